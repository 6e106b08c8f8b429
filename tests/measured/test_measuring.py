"""What all benchmarks share: intervals of medians, turns, tasks in order."""

import random
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import measuring
from benchmarks.measuring import (
    Agreement,
    Results,
    Task,
    chosen,
    in_turn,
    median_interval,
    run_tasks,
)


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


def test_windows_take_turns() -> None:
    order: list[str] = []
    windows = {name: lambda name=name: order.append(name) or name for name in "ab"}
    rounds = in_turn(windows, 3)
    assert [sorted(found) for found in rounds] == [["a", "b"]] * 3
    assert order == ["a", "b", "b", "a", "a", "b"]


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
