"""No save is lost, whatever strikes it: trials, power cuts, and edits that both must catch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
TRIALS = 16
CUTS_BY_CHANCE = 3


def ask(what: str, *arguments: object) -> dict:
    """Run one of :mod:`faults.ask` in a process of its own, which forks ranks."""
    command = [sys.executable, "-m", "faults.ask", what, *map(str, arguments)]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def wrong(results: list[dict]) -> list[dict]:
    return [result for result in results if result["wrong"] or result["hung"] or result["left"]]


def test_no_save_is_lost_whatever_strikes() -> None:
    """A trial a point and kind; ``make soak`` runs hundreds."""
    results = ask("trials", TRIALS, 1)
    assert len(results) == TRIALS and len({(r["kind"], r["point"]) for r in results}) == TRIALS
    assert not wrong(results), json.dumps(wrong(results), indent=1)


def test_a_seed_strikes_the_same_point_again() -> None:
    first, second = ask("again", 3, 7)
    assert first["what"] == second["what"] and first["hit"] == second["hit"]


@pytest.mark.parametrize("edit", ["pointer before rename", "delete before durable"])
def test_a_kill_catches(edit: str) -> None:
    assert not wrong([ask("killed")]), "the recipes as they are"
    result = ask("killed", edit)
    assert result["wrong"], f"{edit} was not caught: {result}"


def test_what_a_power_cut_leaves_loads_or_is_refused() -> None:
    """Every state after every operation; and each flush is needed."""
    edits = [
        "files not flushed",
        "directory not flushed",
        "root not flushed",
        "rename before flush",
        "deletion not flushed",
    ]
    answers = ask("cut", 1, CUTS_BY_CHANCE, *edits)
    assert answers[""]["wrong"] is None, answers[""]
    assert answers[""]["states"] > 100 and answers[""]["committed"] == [2, 4, 6, 8, 10]
    assert all(answers[edit]["wrong"] for edit in edits), answers
