"""What all benchmarks share: intervals of medians, turns, tasks in order."""

import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import measuring
from benchmarks.measuring import (
    CUT_OFF,
    Agreement,
    Results,
    StepClock,
    Task,
    chosen,
    in_turn,
    median_interval,
    run_tasks,
    summary,
    trimmed_mean,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("count", [8, 12, 20])
def test_the_interval_holds_the_median_of_heavy_tails(count: int) -> None:
    draw, held, runs = random.Random(0), 0, 300
    for _ in range(runs):
        low, high = median_interval([draw.gauss(0, 1) ** 3 for _ in range(count)], draws=400)
        held += low <= 0 <= high
    assert held / runs >= 0.92


def test_few_samples_have_no_interval_and_the_same_samples_the_same() -> None:
    assert median_interval([1.0] * 5) is None
    values = [0.3, 0.1, 0.2, 0.9, 0.5, 0.4]
    assert median_interval(values) == median_interval(values)
    low, high = median_interval(values)
    assert low <= statistics.median(values) <= high


def test_the_names_of_an_interval_keep_the_unit_at_their_end() -> None:
    assert summary("cost_s", [2.0]) == {"cost_s": 2.0, "cost_low_s": None, "cost_high_s": None}
    found = summary("upload_slowdown", [1.0] * 6)
    assert found == {"upload_slowdown": 1.0, "upload_slowdown_low": 1.0, "upload_slowdown_high": 1}


def test_an_outlier_does_not_move_the_trimmed_mean() -> None:
    assert trimmed_mean([1.0] * 9 + [100.0]) == 1.0
    assert trimmed_mean([1.0, 2.0]) == 1.5


def test_windows_take_turns() -> None:
    order: list[str] = []
    windows = {name: lambda name=name: order.append(name) or name for name in "ab"}
    rounds = in_turn(windows, 3)
    assert [sorted(found) for found in rounds] == [["a", "b"]] * 3
    assert order == ["a", "b", "b", "a", "a", "b"]


def test_the_clock_gives_the_ends_of_steps() -> None:
    clock = StepClock(torch.device("cpu"))
    for _ in range(3):
        time.sleep(0.002)
        clock.tick()
    ends = clock.ends()
    assert len(ends) == 4 and ends == sorted(ends)
    assert ends[-1] <= time.perf_counter()


def results_in(folder: Path) -> Results:
    head = {"benchmark": "any", "device": "CPU", "ranks": 1}
    return Results(folder, head, ours=(), varied=())


def test_rows_of_another_commit_stay_until_they_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def results(commit: str) -> Results:
        monkeypatch.setenv("MEASURED_COMMIT", commit)
        head = {"benchmark": "any", "device": "CPU", "ranks": 1}
        return Results(tmp_path, head, ours=("ours",), varied=("tokens",))

    first = results("abc")
    for row in ({"name": "ours", "tokens": 1}, {"name": "theirs"}):
        first.add(row)
    assert results("abc").data == first.data and results("abc").has("ours", tokens=1)
    second = results("def")
    assert [row["name"] for row in second.present()] == ["theirs"], "a peer's is of any commit"
    second.add({"name": "ours", "tokens": 2})
    third = results("def")
    codes = {row.get("tokens"): row["commit"] for row in third.data["rows"] if row["ours"]}
    assert codes == {1: "abc", 2: "def"}
    assert not third.has("ours", tokens=1) and third.has("ours", tokens=2)
    third.add({"name": "ours", "tokens": 1})
    assert len(third.data["rows"]) == 3 and third.find("ours", tokens=1)["commit"] == "def"


def test_a_name_that_no_task_has_is_an_error() -> None:
    tasks = [Task(name, 1, print) for name in "abc"]
    assert chosen(tasks, None) == tasks and chosen(tasks, ["c", "a"]) == [tasks[2], tasks[0]]
    with pytest.raises(SystemExit, match="no task is called d; there are a, b, c"):
        chosen(tasks, ["a", "d"])


def test_a_task_that_fails_is_noted_and_the_next_begins(tmp_path: Path) -> None:
    results, done = results_in(tmp_path), []

    def fail() -> None:
        raise ValueError("no such device")

    tasks = [
        Task("fails", 1, fail),
        Task("is there", 1, lambda: done.append("again"), lambda: True),
        Task("does not fit", 1e6, lambda: done.append("too long")),
        Task("works", 1, lambda: done.append("works")),
    ]
    run_tasks(tasks, results, time.time() + 100, Agreement())
    assert done == ["works"]
    assert results.data["not_run"] == {"fails": "ValueError: no such device"}
    run_tasks([Task("fails", 1, lambda: done.append("fails"))], results, 1e12, Agreement())
    assert done == ["works"]


def test_after_a_task_that_hangs_on_one_rank_the_same_command_goes_on(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]
from benchmarks.measuring import *
from test_measuring import results_in
faulthandler.dump_traceback_later(60, exit=True)  # if they do not find each other
until = moment("1000")
print(f"until {{until}}\\n", end="", flush=True)
with started_rank():
    results = results_in(Path({str(tmp_path)!r}))
    hangs = Task("hangs", -4.9, lambda: time.sleep(60) if dist.get_rank() else dist.barrier())
    works = Task("works", 1, lambda: print("done"))
    run_tasks([hangs, works], results, until, Agreement())
""")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
    command += ["--nproc-per-node=2", str(program)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("done") == 2, "the ranks that were started again"
    assert "lambda" in run.stderr or "Timeout" in run.stderr, "where it hung"
    lines = [line for line in run.stdout.splitlines() if line.startswith("until")]
    assert len(lines) == 4 and len(set(lines)) == 1, "no rank and no restart has more time"
    assert results_in(tmp_path).data["not_run"] == {"hangs": CUT_OFF}


def test_a_device_on_which_another_program_works_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    total = 80 * 10**9
    held = [30 * 10**9, 30 * 10**9, 10**9]  # bytes, at each look
    memory = SimpleNamespace(mem_get_info=lambda device: (total - held.pop(0), total))
    monkeypatch.setattr(torch, "get_device_module", lambda device: memory)
    measuring.refuse_shared_device(torch.device("cpu"))
    assert not held, "it has not waited until the memory was given back"

    monkeypatch.setattr(measuring, "OTHERS_END_S", 0.0)
    held.extend([30 * 10**9] * 2)
    with pytest.raises(RuntimeError, match=r"another program holds 30\.0 GB of cpu: end it first"):
        measuring.refuse_shared_device(torch.device("cpu"))
