"""Controls: files of them, what catches an edit, and the template that CONTRIBUTING.md offers."""

import pytest
from selection import REPO
from written_recipes import CONTROL, command, write

from rankproof.judge import Failure
from rankproof.recipe import Control, RecipeError, load_controls, load_recipe
from rankproof.run import run


def test_a_control_whose_text_is_gone_says_so(tmp_path) -> None:
    write(tmp_path, "r.toml", CONTROL)
    recipe = load_recipe(write(tmp_path, "r.py", "y = 1\n"), tmp_path)
    with pytest.raises(RecipeError, match="occurs 0 times"):
        run(recipe.path, 1, control=recipe.control("n"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank = [1]", "unknown keys"),
        ("[[control]]\nname = 'n'", "lacks"),
        ("ranks = [", "r.toml"),
        (CONTROL + "    when = 'now'", "control 'n': unknown keys"),
        (CONTROL.replace("AssertionError: x is 2", ".*"), "fails.raised matches any text"),
        (CONTROL.replace("AssertionError: x is 2", "x is 2"), "begins with the exception's type"),
        (CONTROL.replace("AssertionError: x is 2", "ValueError: ("), "fails.raised is no pattern"),
        (CONTROL.replace("fails.raised", "fails.rose"), "no kind of failure 'rose'"),
        (CONTROL.replace("fails.raised =", "fails ="), "say kind and pattern"),
        (CONTROL + "    file = 'nowhere.py'", "no file .*nowhere.py"),
    ],
)
def test_a_bad_controls_file_names_what_is_wrong(tmp_path, text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_controls(write(tmp_path, "r.toml", text), tmp_path)


PROVES = """
    def double(x):
        return 2 * x

    x = 1
    assert x == 1, f"x is {x}"
    assert double(x) == 2
"""


@pytest.mark.parametrize(
    ("replace", "missed"),
    [
        ("x = 2", ""),
        ("x = undefined", "no failure is one that the control names"),
        ("import no_such_module; x = 2", "no failure is one that the control names"),
        ("double = lambda y: y.no_such_attribute; x = 1", "no failure is one"),
        ("x = 1", "no failure is one that the control names"),
    ],
)
def test_a_control_is_caught_by_the_failure_that_it_names_alone(
    tmp_path, monkeypatch, capsys, replace, missed
) -> None:
    """An undefined name, a missing import or a slip in another function is no proof."""
    write(tmp_path, "rankproof.toml", 'controls = "."')
    write(tmp_path, "r.toml", CONTROL.replace("x = 2", replace) + "    ranks = 1\n")
    script = write(tmp_path, "r.py", PROVES)
    status = command(monkeypatch, "run", script, "--control", "n", "--launcher", "warm")
    told = capsys.readouterr().out
    assert "r on 1 rank: " in told and status == bool(missed), told
    assert f"control 'n': {'NOT caught: ' + missed if missed else 'caught'}" in told


def test_a_slip_beside_the_named_failure_is_refused() -> None:
    control = Control("n", "s", "x = 1", "x = 2", {"raised": ("AssertionError: x is 2",)})
    named = Failure("raised", "AssertionError: x is 2", 0)
    assert control.caught([named])
    for slip in ("NameError: name 'y'", "RuntimeError: rank 1: ModuleNotFoundError: No module"):
        said = control.missed([named, Failure("raised", slip, 1)])
        assert said.startswith("the edit is no Python that could run")
    said = control.missed([named, Failure("left_thread", "write", 1)])
    assert said == "it failed by left_thread, too"


TEMPLATE = load_recipe(REPO / "tests/data/template/recipe.py", REPO / "tests/data/template")


@pytest.mark.parametrize("ranks", TEMPLATE.ranks)
def test_the_template_passes(ranks: int) -> None:
    report = run(TEMPLATE.path, ranks, launcher="warm")
    assert report.ok, report.describe()


@pytest.mark.parametrize("control", TEMPLATE.controls, ids=lambda control: control.name)
def test_the_templates_controls_are_caught(control) -> None:
    report = run(TEMPLATE.path, control.ranks, launcher="warm", control=control)
    assert control.caught(report.failures), report.describe()
