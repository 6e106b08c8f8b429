"""The verification record: what passed on an accelerator, and at which commit."""

import json
from pathlib import Path

import pytest
import verify as verification

from rankproof.judge import Failure
from rankproof.run import Report

EVERYTHING = [("first", 1), ("first", 2), ("second", 1), ("second", 2)]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A machine of two test accelerators, where ``ran`` notes what is run and nothing is."""
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    (recipes / "first.py").write_text('"""First."""\n')
    (recipes / "second.py").write_text('"""Second."""\nimport first\n')
    ran = []

    def run(path: Path, ranks: int, **_) -> Report:
        ran.append((path.stem, ranks))
        report = Report(path.stem, str(path), ranks, "warm", "command")
        if path.stem in verify.broken:
            report.failures = [Failure("raised", "it broke")]
        if path.stem in verify.unjudged:
            report.unjudged = ["a port was taken"]
            report.conclusive = False
        return report

    def verify(go_on: bool = False) -> tuple[int, list, dict]:
        ran.clear()
        out = tmp_path / "verified"
        status = verification.verify((recipes,), tmp_path, out, (1, 2, 4), go_on)
        return status, sorted(ran), json.loads((out / "t1-x2.json").read_text())["recipes"]

    verify.broken = set()
    verify.unjudged = set()
    verify.code = {"version": "0.2.1", "commit": "abc"}
    monkeypatch.setattr(verification, "run", run)
    monkeypatch.setattr(verification, "accelerators", lambda: ("Test T1", 2, "2.11.0"))
    monkeypatch.setattr(verification, "code_of_today", lambda: verify.code)
    monkeypatch.setattr(verification, "usable_cores", lambda: 1)
    return verify


def test_what_failed_or_could_not_be_judged_is_recorded_and_ends_with_an_error(machine):
    machine.broken.add("second")
    machine.unjudged.add("first")
    status, ran, record = machine()
    assert (status, ran) == (1, EVERYTHING)
    assert record["first"]["failures"] == ["not judged: a port was taken"]
    assert record["second"]["failures"] == ["raised: it broke"]


def test_go_on_runs_what_failed_and_all_at_another_commit(machine):
    machine.broken.add("second")
    machine()
    machine.broken.clear()
    assert machine(go_on=True)[1] == [("second", 1), ("second", 2)]
    status, ran, record = machine(go_on=True)
    assert (status, ran) == (0, [])
    assert all(result["ok"] and result["commit"] == "abc" for result in record.values())
    machine.code["commit"] = "def"
    assert machine(go_on=True)[1] == EVERYTHING
    assert machine()[1] == EVERYTHING
