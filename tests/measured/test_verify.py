"""The verification record: what passed on an accelerator, and at which commit."""

import json
from pathlib import Path
from threading import Barrier

import pytest
import verify as verification
import versions

from rankproof.judge import Failure
from rankproof.recipe import load_recipe
from rankproof.run import Report


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A machine of two test accelerators, where ``ran`` notes what is run and nothing is.

    With ``side_by_side`` it has the cores to run both recipes at once. The first run of each, for
    one number of ranks, then lasts until the other is there, and fails if the recipe is ``busy``.
    """
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    (recipes / "first.py").write_text('"""First."""\n')
    (recipes / "second.py").write_text('"""Second."""\nimport first\n')
    ran, in_flight, broken, busy, both = [], set(), set(), set(), Barrier(2)

    def run(path: Path, ranks: int, **_) -> Report:
        first = verify.side_by_side and (path.stem, ranks) not in ran
        ran.append((path.stem, ranks))
        in_flight.add(path.stem)
        if first:
            both.wait(10)
        beside = in_flight - {path.stem}
        if first:
            both.wait(10)
        in_flight.remove(path.stem)
        report = Report(path.stem, str(path), ranks, "warm", "command")
        if path.stem in broken or (beside and path.stem in busy):
            report.failures = [Failure("raised", f"it broke beside {sorted(beside)}")]
        return report

    monkeypatch.setattr(verification, "run", run)
    monkeypatch.setattr(verification, "accelerators", lambda: ("Test T1", 2, "2.11.0"))

    def verify(go_on: bool = False) -> tuple[int, list, dict]:
        ran.clear()
        out = tmp_path / "verified"
        status = verification.verify((recipes,), tmp_path, out, (1, 2, 4), go_on)
        return status, sorted(ran), json.loads((out / "t1-x2.json").read_text())["recipes"]

    verify.recipes, verify.broken, verify.busy, verify.side_by_side = recipes, broken, busy, False
    verify.code = {"version": "0.2.1", "commit": "abc"}
    monkeypatch.setattr(verification, "code_of_today", lambda: verify.code)
    monkeypatch.setattr(verification, "usable_cores", lambda: 64 if verify.side_by_side else 1)
    return verify


EVERYTHING = [("first", 1), ("first", 2), ("second", 1), ("second", 2)]


def test_every_recipe_runs_on_as_many_ranks_as_there_are_accelerators(machine):
    status, ran, record = machine()
    assert (status, ran) == (0, EVERYTHING)
    assert all(result["ok"] for result in record.values())
    assert all(result["commit"] == "abc" for result in record.values())


def test_a_failure_is_recorded_and_ends_with_an_error(machine):
    machine.broken.add("second")
    status, ran, record = machine()
    assert status == 1 and record["first"]["ok"]
    assert record["second"]["failures"] == ["raised: it broke beside []"]
    assert ran == EVERYTHING, "it was alone already: a second run would be a second chance"


def test_what_could_not_be_judged_has_not_passed(machine, monkeypatch):
    """A port that was taken drops all failures, and says nothing of the recipe."""
    taken = Report("first", "first.py", 1, "warm", "command", unjudged=["a port was taken"])
    taken.conclusive = False
    monkeypatch.setattr(verification, "run", lambda *_, **__: taken)
    status, _, record = machine()
    assert status == 1
    assert record["first"]["failures"] == ["not judged: a port was taken"]
    monkeypatch.setattr(versions, "run", lambda *_, **__: taken)
    kept = versions.judged(load_recipe(machine.recipes / "first.py"), "warm")
    assert (kept["ok"], kept["runs"]) == (False, 2)
    assert kept["failures"] == ["not judged: a port was taken"]


def test_what_failed_beside_others_is_judged_by_a_run_of_its_own(machine, capsys):
    machine.side_by_side = True
    machine.busy.update(("first", "second"))
    status, ran, record = machine()
    said = capsys.readouterr().out
    assert status == 0 and ran == sorted(2 * EVERYTHING)
    for name, other in (("first", "second"), ("second", "first")):
        result = record[name]
        assert result["ok"] and result["alone"] and not result["failures"]
        assert result["beside_others"] == [f"raised: it broke beside ['{other}']"]
        assert f"{name} failed beside others; once more, by itself:" in said


def test_go_on_runs_what_failed_and_all_at_another_commit(machine):
    machine.broken.add("second")
    machine()
    machine.broken.clear()
    assert machine(go_on=True)[1] == [("second", 1), ("second", 2)]
    assert machine(go_on=True)[1] == []
    machine.code["commit"] = "def"
    assert machine(go_on=True)[1] == EVERYTHING
    assert machine()[1] == EVERYTHING
