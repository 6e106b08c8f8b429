"""Races that a loss curve does not show: each is found, its cure is not, and the page says what is.

    python tests/harness/test_races.py

writes what the page shows, from runs of the programs.
"""

import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

import harness  # noqa: E402, F401 (puts rankproof on the path)
from rankproof.report import Report  # noqa: E402
from rankproof.run import run  # noqa: E402

RACES = REPO / "tests" / "data" / "races"
PAGE = REPO / "guide" / "races.rst"
KINDS = {
    "reload_before_it_is_stored": "unordered_access",
    "gradient_freed_before_it_is_home": "unordered_access",
    "metrics_read_too_early": "unordered_access",
    "slot_filled_too_early": "unordered_access",
    "gradient_used_before_its_sum": "used_before_wait",
}
NAMES = sorted(KINDS)
OUTPUTS = {  # what the page shows of a program, and with which argument
    "reload_before_it_is_stored.lost": "--lost",
    "reload_before_it_is_stored.cured": "--cured",
}


def judged(name: str, *args: str) -> Report:
    ranks = 2 if KINDS[name] == "used_before_wait" else 1
    return run(RACES / f"{name}.py", ranks, launcher="warm", order=True, args=args)


def shown(report: Report) -> str:
    """The first finding, a line each for its two accesses."""
    failure = report.failures[0]
    finding = failure.text.partition("; " + report.recipe)[0]
    return f"{failure.kind}: {finding}\n".replace(", " + report.recipe, ",\n  " + report.recipe)


@pytest.mark.parametrize("name", NAMES)
def test_a_race_is_found_and_told_as_the_page_says(name: str) -> None:
    report = judged(name)
    assert report.kinds == {KINDS[name]}, report.describe()
    assert (RACES / f"{name}.txt").read_text() == shown(report)


@pytest.mark.parametrize("name", NAMES)
def test_its_cure_passes(name: str) -> None:
    report = judged(name, "--cured")
    assert report.verdict == "passed", report.describe()


@pytest.mark.parametrize("output", OUTPUTS)
def test_the_loss_falls_whether_or_not_the_race_is_lost(output: str) -> None:
    """What it gains when cured: the first step's gradients."""
    report = judged(output.partition(".")[0], OUTPUTS[output])
    assert (RACES / f"{output}.txt").read_text() == report.outputs[0]


def test_the_page_shows_each() -> None:
    text = PAGE.read_text()
    for name in NAMES:
        assert f"/tests/data/races/{name}.py" in text
        assert f"/tests/data/races/{name}.txt" in text


if __name__ == "__main__":
    for name in NAMES:
        (RACES / f"{name}.txt").write_text(shown(judged(name)))
    for output, argument in OUTPUTS.items():
        printed = judged(output.partition(".")[0], argument).outputs[0]
        (RACES / f"{output}.txt").write_text(printed)
