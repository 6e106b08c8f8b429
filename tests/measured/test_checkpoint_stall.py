"""What a save costs is what it adds to the steps that it touches, and nothing else."""

import json
import os
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import pytest

from benchmarks.checkpoint_stall import LEAD, Window, usual_steps
from benchmarks.checkpoint_ways import Save, differences

ROOT = Path(__file__).resolve().parents[2]
USUAL = 0.3  # seconds of a step
STEPS = 12
CALLED = LEAD * USUAL + 0.001  # right behind a step


def window(
    slow: dict[int, float] | None = None,
    *,
    call: float = 0.0,
    staged: float | None = None,
    uploaded: float = 1.2,
) -> Window:
    """A window whose steps take longer by ``slow``; times of its save from the call on."""
    steps = [USUAL + (slow or {}).get(i, 0.0) for i in range(STEPS)]
    save = Save(Path(), CALLED, CALLED + call, uploaded_at=CALLED + uploaded)
    save.staged_at = None if staged is None else CALLED + staged
    return Window(list(accumulate(steps, initial=0.0)), save)


@pytest.mark.parametrize(
    ("slow", "staging", "whole"),
    [
        (LEAD - 1, 0.0, 0.0),  # before the call
        (LEAD, 0.1, 0.1),  # its copy ends before its update
        (LEAD + 1, 0.1, 0.1),  # one more
        (LEAD + 2, 0.0, 0.1),  # beside the upload
        (LEAD + 4, 0.0, 0.1),  # the upload ends in it
        (LEAD + 5, 0.0, 0.0),
    ],
)
def test_which_steps_are_counted(slow: int, staging: float, whole: float) -> None:
    late = 0.1 if slow < LEAD else 0.0
    found = window({slow: 0.1})
    found.save.called_at += late
    found.save.returned_at += late
    found.save.uploaded_at += late
    times = found.times([USUAL])
    assert times["staging_cost_s"] == pytest.approx(staging)
    assert times["cost_s"] == pytest.approx(whole)


def test_a_copy_that_ends_late_takes_more_steps_with_it() -> None:
    times = window({LEAD + 3: 0.1}, staged=0.7).times([USUAL])
    assert times["staging_cost_s"] == pytest.approx(0.1)
    assert times["staged_s"] == pytest.approx(0.7)
    assert times["uploaded_s"] == pytest.approx(0.5)


def test_a_call_that_blocks_is_part_of_the_cost() -> None:
    found = window({LEAD: 3.0}, call=3.0, uploaded=3.0)
    found.save.staged_at = found.save.uploaded_at
    times = found.times([USUAL])
    assert times["staging_cost_s"] == times["cost_s"] == pytest.approx(3.0)
    assert times["call_s"] == times["uploaded_s"] == pytest.approx(3.0)
    assert times["upload_slowdown"] is None


@pytest.mark.parametrize(
    ("slow", "seen"), [(LEAD, False), (LEAD + 1, True), (LEAD + 2, True), (LEAD + 3, False)]
)
def test_steps_that_begin_beside_the_upload_are_its_slowdown(slow: int, seen: bool) -> None:
    times = window({slow: 0.1}, staged=0.2, uploaded=0.8).times([USUAL])
    assert times["steps_beside_upload"] == 2
    assert times["upload_slowdown"] == pytest.approx(7 / 6 if seen else 1.0)


def test_a_step_is_compared_with_the_windows_around_it() -> None:
    rounds = [[1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0], [3.0, 3.0, 3.0, 3.0]]
    assert usual_steps(rounds, 1) == pytest.approx([2.0] * 4)
    assert usual_steps(rounds, 2) == pytest.approx([2.5] * 4)
    assert usual_steps(rounds, 2, own=False) == pytest.approx([2.0] * 4)


def test_a_checkpoint_that_lacks_a_leaf_or_a_bit_is_not_the_same() -> None:
    import torch

    expected = {"/w": torch.zeros(4), "/step": 3}
    assert differences(expected, {"/w": torch.zeros(4), "/step": 3}) == (False, 0.0)
    assert differences(expected, {"/w": torch.tensor([0.0, 0, 0, 1]), "/step": 3}) == (True, 0.25)
    assert differences(expected, {"/w": torch.tensor([0.0, 0, 0, -0.0]), "/step": 3})[0]
    assert differences(expected, {"/w": torch.zeros(4), "/step": 2})[0]


def test_a_stock_loop_is_measured_on_a_cpu(tmp_path: Path) -> None:
    """Its rows have every field that pages show."""
    ours = "overlapped_writer"
    tasks = ["memory probe", ours, f"{ours} loaded back", f"{ours} every 100"]
    command = [sys.executable, "benchmarks/checkpoint_stall.py", "--small", "--out", str(tmp_path)]
    command += ["--pairs", "3", "--only", ",".join(tasks)]
    command += ["--memory", str(tmp_path), "--disk", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for pid in (os.getpid(), 10**9):  # left by an earlier start of this command, and of another
        (tmp_path / f"checkpoint_stall_{pid}_before" / "half").mkdir(parents=True)
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results"], "a checkpoint was left"
    found = {}
    for name in ("checkpoint_stall", "save_interval"):
        data = json.loads((tmp_path / "results" / f"{name}.cpu-x1.json").read_text())
        assert data["not_run"] == {}
        found[name] = data["rows"]
    none, row = sorted(found["checkpoint_stall"], key=lambda row: row["name"] != "none")
    case = {"model": "llama-tiny", "loop": "reads", "compiled": False, "step": "long"}
    for each in (none, row):
        assert case.items() <= each.items()
        assert len(each["samples"]["staging_cost_s"]) == 3
        assert each["staging_cost_s"] is not None and each["cost_s"] is not None
    assert row["loaded_back_bitwise"] is True
    for field in ("call_s", "uploaded_s", "write_bytes_per_s", "storage_bytes_per_s", "tensors"):
        assert row[field] > 0, field
    assert row["bytes_written"] > 1e5 and row["host_peak_bytes"] >= 0
    (often,) = found["save_interval"]
    assert often["every"] == 100 and often["kept"] > 0
