"""Every recipe and every proof of a module holds on every rank; every control is caught."""

import os
import re
import tomllib
import zipfile
from pathlib import Path

import pytest
from selection import RECIPES, REPO, proofs_under_test, ranks_under_test, recipes_under_test

from rankproof.bundles import write_bundle
from rankproof.kept import KeptRun
from rankproof.recipe import Control, Recipe
from rankproof.run import Report, run

MOST_RANKS = 3
HELD = "hold_write"
OF_PAGES = {"test_plain_python_runs_one_rank"}  # what a reader does; a proof has no reader
NOT_COMPARED = {"export": r"\w+: written by SafetensorsWriter, not loaded back"}
LEDGER = REPO / "tests" / "controls" / "ledger" / "names.toml"


@pytest.fixture
def store() -> Path:
    """Where the pages' build keeps its runs."""
    return REPO / "_build" / "recipe_runs"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    recipes = recipes_under_test()
    if metafunc.function.__name__ not in OF_PAGES:
        recipes = [*recipes, *proofs_under_test()]
    names = set(metafunc.fixturenames)
    if {"recipe", "ranks"} <= names:
        cases = [(r, n) for r in recipes for n in ranks_of(r, metafunc.config)]
        metafunc.parametrize("recipe,ranks", cases, ids=[f"{r.name}-{n}" for r, n in cases])
    elif {"recipe", "control"} <= names:
        cases = [(r, c) for r in recipes for c in r.controls]
        metafunc.parametrize("recipe,control", cases, ids=[f"{r.name}-{c.name}" for r, c in cases])
    elif {"recipe", "gate"} <= names:
        cases = [(r, g) for r in recipes for g in gates_of(r)]
        metafunc.parametrize("recipe,gate", cases, ids=[f"{r.name}-{name_of(g)}" for r, g in cases])
    elif "recipe" in names:
        metafunc.parametrize("recipe", recipes, ids=[r.name for r in recipes])


def name_of(gate: str) -> str:
    """A gate of this folder is told by its file, too."""
    return gate.rpartition(":")[2]


def gates_of(recipe: Recipe) -> list[str]:
    """The gates of its controls; that of slow disks holds a run of each recipe that saves."""
    gates = {control.gate for control in recipe.controls if control.gate}
    if recipe.saves:
        gates.discard(HELD)
    return sorted(gates)


def ranks_of(recipe: Recipe, config: pytest.Config) -> list[int]:
    """Those asked for, or those of ``make test``: a fourth rank asks what the third has asked."""
    asked = ranks_under_test(config)
    if asked:
        return asked
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


def test_recipe_proves_its_claim(
    recipe: Recipe, ranks: int, store: Path, pytestconfig: pytest.Config
) -> None:
    """On each world size.

    The smallest is started by torchrun, as a reader starts a recipe; ranks of the others are forked
    from a warm process. On the largest, each write is held until the recipe waits for it: a save
    that is awaited however slow the disk is passes, one that is never awaited is never written. A
    fresh run of the page stands for one that is neither.
    """
    sizes = ranks_of(recipe, pytestconfig)
    launcher = "torchrun" if ranks == min(sizes) and recipe.path.is_relative_to(RECIPES) else "warm"
    gate = HELD if ranks == max(sizes) and recipe.saves else None
    kept = KeptRun(store, recipe, ranks, launcher=launcher)
    report = kept.report() if gate is None else None
    if report is None:
        report = run(
            recipe.path,
            ranks,
            launcher=launcher,
            gate=gate,
            order=recipe.order,
            deadline_s=recipe.deadline_s,
        )
    assert report.ok, report.describe()
    assert not left_unjudged(report), report.describe()
    assert len(report.outputs) == ranks


def left_unjudged(report: Report) -> list[str]:
    """What was not judged, but for what is known of this recipe."""
    known = NOT_COMPARED.get(report.recipe, "")
    return [reason for reason in report.unjudged if not re.fullmatch(known, reason)]


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


def test_plain_python_runs_one_rank(recipe: Recipe, tmp_path, plain_python) -> None:
    """As a reader does it: the bundle of its page, unpacked into an empty folder."""
    downloads, work = tmp_path / "downloads", tmp_path / "work"
    downloads.mkdir()
    work.mkdir()
    with zipfile.ZipFile(write_bundle(recipe, tmp_path)) as archive:
        archive.extractall(downloads)
    reply = plain_python(str(downloads / recipe.path.name), str(work))
    code, said = reply["code"], reply["said"]
    assert not list(work.iterdir()), "it left files in the working directory"
    if recipe.min_ranks == 1:
        assert code == 0, said
    else:
        assert code != 0
        assert str(recipe.min_ranks) in said, "say how many ranks it needs"


def test_importing_recipes_does_nothing(tmp_path) -> None:
    """The harness sees what an import leaves: a thread, a process, a group, a file."""
    recipes = [recipe for recipe in recipes_under_test() if not recipe.missing]
    folders = {str(folder) for recipe in recipes for folder in recipe.import_path}
    lines = ["import sys", f"sys.path[:0] = {sorted(folders)!r}"]
    lines += [f"import {recipe.name}" for recipe in recipes]
    importer = tmp_path / "importer.py"
    importer.write_text("\n".join(lines))
    report = run(importer, 1, launcher="warm")
    assert report.ok, report.describe()
    assert report.outputs == [""]
