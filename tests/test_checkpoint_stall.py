"""The benchmark's stall is what a save adds to the steps that it touches, and nothing else."""

import json
import random
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import pytest

from benchmarks.checkpoint_stall import (
    FULL,
    SMALL,
    Save,
    centre_interval,
    exposed_stall,
    row_begun,
    times_of,
    upload_slowdown,
)
from benchmarks.measuring import Results

ROOT = Path(__file__).resolve().parents[1]
USUAL = [0.36, 0.34, 0.33, 0.35, 0.34, 0.36, 0.34, 0.33]  # seconds, as clocks rise and fall
CALLED, STAGED = 1.1, 1.3  # in the fourth step
# A window of long steps on an H200 that had rested, ms.
RESTED = [322, 330, 354, 334, 330, 346, 335, 331, 342, 336, 333, 340, 336, 334, 339, 337, 335, 338]
RESTED += [336, 336, 338, 337, 336, 337]


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


def test_the_swing_of_a_rested_device_is_neither_a_speed_up_nor_part_of_a_stall() -> None:
    """A blocking save is compared with the steps before it, and the clocks swing anew behind it."""
    quiet, copy_s = FULL.quiet_steps["long"], 0.116
    window = [ms / 1e3 for ms in RESTED]
    intervals = [*window[:quiet], copy_s + window[0], *window[1:13]]
    after = ends(intervals)
    save = Save(Path(), called_at=after[quiet - 2] + 0.01, returned_at=after[quiet] + copy_s)
    save.staged_at, save.uploaded_at = save.returned_at, after[-1] + 0.01
    times = times_of(after, save, [], quiet)
    assert times["upload_slowdown"] == pytest.approx(1.0, abs=0.005)
    faster_steps_s = 2 * 0.337 - window[0] - window[1]  # right behind the pause
    assert times["exposed_stall_s"] == pytest.approx(copy_s - faster_steps_s, abs=0.01)
    assert times["steps_beside_upload"] == 11


def test_a_row_of_other_windows_gets_no_samples(tmp_path: Path) -> None:
    head = {"benchmark": "checkpoint_stall", "device": "CPU", "ranks": 1}
    results = Results(tmp_path, head, {}, varied=("storage", "step"))
    key = {"name": "overlapped", "storage": "memory", "step": "long"}
    results.add({**key, "quiet_steps": 5, "samples": {}})
    assert row_begun(results, 5, **key) is results.data["rows"][0]
    assert row_begun(results, 16, **key) is None
    assert row_begun(results, 5, **key | {"step": "short"}) is None


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

    assert all(found["quiet_steps"] == SMALL.quiet_steps["short"] for found in results[1].values())
    samples = row["samples"]
    assert samples["quiet_first"] == [True, False], "the window without a save takes turns"
    assert len(samples["intervals_without"][1]) == len(samples["intervals"][1])
