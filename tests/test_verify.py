"""The verification record: what passed on an accelerator, tied to the code that ran."""

import json
from pathlib import Path

import pytest

from harness import verify as verification
from harness.judge import Failure
from harness.recipe import RecipeError
from harness.run import Report


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A machine of two test accelerators, where ``ran`` notes what is run and nothing is."""
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    (recipes / "first.py").write_text('"""First."""\n')
    (recipes / "second.py").write_text('"""Second."""\nimport first\n')
    ran, broken = [], set()

    def run(path: Path, ranks: int, **_) -> Report:
        ran.append((path.stem, ranks))
        report = Report(path.stem, str(path), "", ranks, "warm", "command")
        report.failures = [Failure("raised", "it broke")] * (path.stem in broken)
        return report

    monkeypatch.setattr(verification, "run", run)
    monkeypatch.setattr(verification, "accelerators", lambda: ("Test T1", 2, "2.11.0"))

    def verify(stale_only: bool = False) -> tuple[int, list, dict]:
        ran.clear()
        out = tmp_path / "verified"
        status = verification.verify(recipes, tmp_path, out, (1, 2, 4), stale_only)
        return status, sorted(ran), json.loads((out / "t1-x2.json").read_text())["recipes"]

    verify.recipes, verify.broken = recipes, broken
    return verify


EVERYTHING = [("first", 1), ("first", 2), ("second", 1), ("second", 2)]


def test_every_recipe_runs_on_as_many_ranks_as_there_are_accelerators(machine):
    status, ran, record = machine()
    assert (status, ran) == (0, EVERYTHING)
    assert all(result["ok"] for result in record.values())
    assert list(record["second"]["code_sha256"]) == ["second", "first"]


def test_a_failure_is_recorded_and_ends_with_an_error(machine):
    machine.broken.add("second")
    status, _, record = machine()
    assert status == 1 and record["first"]["ok"]
    assert record["second"]["failures"] == ["raised: it broke"]


def test_stale_runs_what_changed_what_imports_it_and_what_failed(machine):
    machine.broken.add("second")
    machine()
    machine.broken.clear()
    assert machine(stale_only=True)[1] == [("second", 1), ("second", 2)]
    assert machine(stale_only=True)[1] == []
    (machine.recipes / "first.py").write_text('"""First."""\nCHANGED = 1\n')
    assert machine(stale_only=True)[1] == EVERYTHING
    assert machine()[1] == EVERYTHING


def test_without_an_accelerator_there_is_nothing_to_verify(machine, monkeypatch):
    monkeypatch.setattr(verification, "accelerators", lambda: ("", 0, "2.13.0"))
    with pytest.raises(RecipeError, match="no accelerator here"):
        machine()
