"""The benchmark's stall is what a save adds to the steps that it touches, and nothing else."""

import json
import random
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import pytest

from benchmarks.checkpoint_stall import centre_interval, exposed_stall, upload_slowdown

ROOT = Path(__file__).resolve().parents[1]
USUAL = [0.36, 0.34, 0.33, 0.35, 0.34, 0.36, 0.34, 0.33]  # seconds, as clocks rise and fall
CALLED, STAGED = 1.1, 1.3  # in the fourth step


def ends(intervals: list[float]) -> list[float]:
    return list(accumulate(intervals, initial=0.0))


def test_steps_as_long_as_without_a_save_are_no_stall() -> None:
    stall_s, first_free = exposed_stall(ends(USUAL), USUAL, CALLED, STAGED)
    assert stall_s == pytest.approx(0.0)
    assert first_free == 4


def test_a_window_is_not_compared_with_its_median() -> None:
    """What a step takes depends on its place: against the median, clocks look like a stall."""
    stall_s, _ = exposed_stall(ends(USUAL), [0.34], CALLED, STAGED)
    assert stall_s == pytest.approx(0.01)


@pytest.mark.parametrize(("slow", "counted"), [(2, 0.0), (3, 0.05), (4, 0.05), (5, 0.0)])
def test_the_touched_step_and_one_more_are_counted(slow: int, counted: float) -> None:
    intervals = USUAL.copy()
    intervals[slow] += 0.05
    shift = 0.05 if slow < 3 else 0.0
    stall_s, _ = exposed_stall(ends(intervals), USUAL, CALLED + shift, STAGED + shift)
    assert stall_s == pytest.approx(counted)


def test_a_blocking_save_longer_than_the_baseline() -> None:
    """Steps beyond the window without a save are compared with its last value."""
    intervals = [*USUAL, 3.34, 0.34]
    called = sum(USUAL) + 0.1
    stall_s, first_free = exposed_stall(ends(intervals), [*USUAL, 0.34], called, called + 3.0)
    assert stall_s == pytest.approx(3.0)
    assert first_free == len(USUAL) + 1


def test_a_save_after_the_last_step_touches_none() -> None:
    assert exposed_stall(ends(USUAL), USUAL, 9.0, 9.1) == (0.0, len(USUAL))


def test_steps_beside_the_upload_are_compared_place_by_place() -> None:
    """The fourth step always takes longer: that it does beside an upload is no slow-down."""
    slower = [USUAL[0], *(1.1 * seconds for seconds in USUAL[1:])]
    ratio, beside = upload_slowdown(ends(slower), USUAL, 3, ends(slower)[5])
    assert ratio == pytest.approx(1.1) and beside == 1
    assert upload_slowdown(ends(slower), USUAL, 3, ends(slower)[3]) == (None, 0)


def test_five_samples_bound_no_stall() -> None:
    assert centre_interval([1.0, 2.0, 3.0, 4.0, 5.0]) is None
    assert centre_interval([6.0, 2.0, 3.0, 4.0, 5.0, 1.0]) == (1.0, 6.0)


@pytest.mark.parametrize(("count", "rank"), [(7, 2), (10, 8), (14, 21), (20, 52)])
def test_the_interval_is_that_of_published_tables(count: int, rank: int) -> None:
    """Critical values of the signed-rank test, two-sided, 5 %."""
    values = [float(2**i) for i in range(count)]
    means = sorted((a + b) / 2 for i, a in enumerate(values) for b in values[i:])
    assert centre_interval(values) == (means[rank], means[-1 - rank])


@pytest.mark.parametrize("count", [6, 8, 12])
def test_the_interval_holds_the_centre_of_heavy_tails(count: int) -> None:
    draw, held = random.Random(0), 0
    for _ in range(2000):
        low, high = centre_interval([draw.gauss(0, 1) ** 3 for _ in range(count)])
        held += low <= 0 <= high
    assert held / 2000 >= 0.945  # five in a thousand for the luck of 2000 draws


def test_a_row_that_lacks_samples_gets_the_rest(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/checkpoint_stall.py", "--small", "--out", str(tmp_path)]
    command += ["--modes", "none,overlapped", "--storages", "memory", "--steps", "short"]
    results = []
    for saves in ("1", "2"):
        there = [*command, "--memory", str(tmp_path), "--saves", saves]
        run = subprocess.run(there, cwd=ROOT, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        (path,) = (tmp_path / "results").iterdir()
        results.append({row["name"]: row for row in json.loads(path.read_text())["rows"]})
    begun, row = (rows["overlapped"] for rows in results)
    assert row["loaded_back_bitwise"]
    assert row["first_call_s"] == begun["first_call_s"], "measured once, and kept"
    for name in ("none", "overlapped"):
        first, both = (rows[name]["samples"]["exposed_stall_s"] for rows in results)
        assert (len(first), len(both)) == (1, 2) and both[:1] == first
    assert [path.name for path in tmp_path.iterdir()] == ["results"], "a checkpoint was left"

    samples = row["samples"]
    assert samples["quiet_first"] == [True, False], "the window without a save takes turns"
    assert len(samples["intervals_without"][1]) == len(samples["intervals"][1])
