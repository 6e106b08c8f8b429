"""Every recipe and every proof of a module holds on every rank; every control is caught."""

import os
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fork_server import asking
from selection import (
    REPO,
    proofs_under_test,
    ranks_under_test,
    recipes_under_test,
    with_library,
)

from rankproof.kept import KeptRun
from rankproof.recipe import Control, Recipe
from rankproof.run import run

MOST_RANKS = 3
OF_PAGES = {  # what a reader does with a recipe; a proof has no reader
    "test_recipe_runs_under_torchrun",
    "test_plain_python_runs_one_rank",
    "test_importing_a_recipe_does_nothing",
}
LEDGER = REPO / "tests" / "controls" / "ledger" / "names.toml"


@pytest.fixture
def store() -> Path:
    """Where the pages' build keeps its runs."""
    return REPO / "_build" / "recipe_runs"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    recipes = recipes_under_test()
    if metafunc.function.__name__ not in OF_PAGES:
        recipes = [*recipes, *proofs_under_test()]
    asked = ranks_under_test(metafunc.config)
    names = set(metafunc.fixturenames)
    if {"recipe", "ranks"} <= names:
        if "slow_the_disk" in metafunc.function.__name__:
            recipes = [recipe for recipe in recipes if recipe.saves]
            cases = [(r, n) for r in recipes for n in (asked or [max(2, r.min_ranks)])]
        else:
            cases = [(r, n) for r in recipes for n in (asked or ranks_of(r, metafunc.config))]
        metafunc.parametrize("recipe,ranks", cases, ids=[f"{r.name}-{n}" for r, n in cases])
    elif {"recipe", "control"} <= names:
        cases = [(r, c) for r in recipes for c in r.controls]
        metafunc.parametrize("recipe,control", cases, ids=[f"{r.name}-{c.name}" for r, c in cases])
    elif {"recipe", "gate"} <= names:
        cases = [(r, g) for r in recipes for g in sorted({c.gate for c in r.controls if c.gate})]
        metafunc.parametrize("recipe,gate", cases, ids=[f"{r.name}-{name_of(g)}" for r, g in cases])
    elif "recipe" in names:
        metafunc.parametrize("recipe", recipes, ids=[r.name for r in recipes])


def name_of(gate: str) -> str:
    """A gate of this folder is told by its file, too."""
    return gate.rpartition(":")[2]


def ranks_of(recipe: Recipe, config: pytest.Config) -> list[int]:
    """The world sizes of ``make test``; a fourth rank asks what the third has asked."""
    few = [n for n in recipe.ranks if n <= MOST_RANKS or config.getoption("--all-ranks")]
    return few or [recipe.min_ranks]


@pytest.fixture(autouse=True)
def installed(request: pytest.FixtureRequest) -> None:
    """What a recipe needs is installed where CI=true; elsewhere the tests of it are skipped."""
    if "recipe" not in request.fixturenames:
        return
    recipe = request.getfixturevalue("recipe")
    if recipe.missing and os.environ.get("CI") != "true":
        pytest.skip(f"{recipe.name} needs {', '.join(recipe.missing)}, not installed")


def test_recipe_proves_its_claim(recipe: Recipe, ranks: int, store: Path) -> None:
    """On each world size, ranks forked from a warm process.

    A fresh run of the page stands for that on as many ranks.
    """
    kept = KeptRun(store, recipe, ranks, launcher="warm")
    report = kept.report() or run(
        recipe.path, ranks, launcher="warm", order=recipe.order, deadline_s=recipe.deadline_s
    )
    assert report.ok, report.describe()
    assert len(report.outputs) == ranks


def test_every_save_is_awaited_however_slow_the_disk(recipe: Recipe, ranks: int) -> None:
    """Each write is held until the recipe waits for it: what is never awaited is never written."""
    report = run(
        recipe.path, ranks, launcher="warm", gate="hold_write", deadline_s=recipe.deadline_s
    )
    assert report.ok, report.describe()


def test_recipe_runs_under_torchrun(recipe: Recipe, pytestconfig: pytest.Config, store) -> None:
    """As a reader starts it; all other runs fork their ranks from a warm process."""
    ranks = max(ranks_under_test(pytestconfig) or (recipe.page_ranks,))
    kept = KeptRun(store, recipe, ranks)
    report = kept.report() or kept.run()
    assert report.ok, report.describe()


def test_recipe_passes_under_the_gates_of_its_controls(recipe: Recipe, gate: str) -> None:
    """A gate alone fails nothing: what a control reports is the missing line's doing."""
    report = run(recipe.path, 2, launcher="warm", gate=gate, deadline_s=recipe.deadline_s)
    assert report.ok, report.describe()


def test_control_is_caught(recipe: Recipe, control: Control, store: Path) -> None:
    kept = KeptRun(store, recipe, control.ranks, control)
    report = kept.report() or kept.run()
    missed = control.missed(report.failures)
    assert not missed, (
        f"{recipe.name} without its line ({control.says}) was expected to fail by "
        f"{control.expected}, but {missed}\n{report.describe()}"
    )


def test_no_control_goes_without_a_reason() -> None:
    """The ledger lists every control; what is gone from the recipes is listed there, and why."""
    ledger = tomllib.loads(LEDGER.read_text(encoding="utf-8"))
    scripts = [*recipes_under_test(), *proofs_under_test()]
    present = {f"{script.name}/{control.name}" for script in scripts for control in script.controls}
    listed = ledger["controls"]
    assert len(listed) == len(set(listed)), "a name is listed twice"
    assert present == set(listed), f"not as the ledger has it: {sorted(present ^ set(listed))}"
    assert present.isdisjoint(ledger["gone"])
    assert all(len(reason.split()) >= 3 for reason in ledger["gone"].values()), "say why"


def test_recipe_has_at_least_four_controls(recipe: Recipe) -> None:
    assert len(recipe.controls) >= 4


@pytest.fixture(scope="module")
def plain_python() -> Iterator[Callable[..., dict]]:
    """``plain_python(file, work)``: the code and the output of ``python file`` in ``work``."""
    command = [sys.executable, "-B", str(REPO / "tests" / "warm_python.py")]
    env = with_library() | {"PYTHONDONTWRITEBYTECODE": "1"}
    with asking(command, 120, REPO, env) as ask:
        yield ask


def test_plain_python_runs_one_rank(recipe: Recipe, tmp_path, plain_python) -> None:
    """As a reader does it: the file, and beside it what it imports, in a folder of their own."""
    downloads, work = tmp_path / "downloads", tmp_path / "work"
    downloads.mkdir()
    work.mkdir()
    for file in recipe.flat_files:
        shutil.copy(file, downloads)
    for package in recipe.packages:
        shutil.copytree(package, downloads / package.name)
    reply = plain_python(str(downloads / recipe.path.name), str(work))
    code, said = reply["code"], reply["said"]
    assert not list(work.iterdir()), "it left files in the working directory"
    if recipe.min_ranks == 1:
        assert code == 0, said
    else:
        assert code != 0
        assert str(recipe.min_ranks) in said, "say how many ranks it needs"


def test_importing_a_recipe_does_nothing(recipe: Recipe, tmp_path) -> None:
    """The harness sees what an import leaves: a thread, a process, a group, a file."""
    importer = tmp_path / "importer.py"
    folders = [str(folder) for folder in recipe.import_path]
    importer.write_text(f"import sys\nsys.path[:0] = {folders!r}\nimport {recipe.name}\n")
    report = run(importer, 1, launcher="warm")
    assert report.ok, report.describe()
    assert report.outputs == [""]
