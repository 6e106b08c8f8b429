"""The benchmark's figures of times and traces that are known, and what a run does in what order."""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks import fsdp_overlap
from benchmarks.fsdp_overlap import (
    ORDER,
    REFERENCE,
    WARM_UP_WINDOWS,
    Memory,
    NoCommunication,
    Pairs,
    Profiled,
    Run,
    overlap,
    take_windows,
    union,
)

ROOT = Path(__file__).resolve().parents[1]


# -- a profiled step ---------------------------------------------------------------------------


def event(kind: str, name: str, ts: float, dur: float, **args) -> dict:
    return {"ph": "X", "cat": kind, "name": name, "ts": ts, "dur": dur, "tid": 1, "args": args}


def launched(at: float, number: int, kind: str, name: str, ts: float, dur: float, **args) -> list:
    """A launch on the host at ``at``, and what it did on the device at ``ts``."""
    done = event(kind, name, ts, dur, correlation=number, **args)
    return [event("cuda_runtime", "launch", at, 1, correlation=number), done]


@pytest.fixture
def events() -> list[dict]:
    """Two products of 100 µs; a gather half beside the first, a push wholly beside the second."""
    copy = {"bytes": 2**21}
    found = [
        event("user_annotation", "step 0 forward", 0, 90),
        event("user_annotation", "step 1 forward", 100, 100),
        event("user_annotation", "step 1 backward", 200, 100),
        event("cpu_op", "aten::mm", 110, 10),
        event("cpu_op", "aten::mm", 210, 10),
        *launched(50, 1, "kernel", "of another step", 500, 900, stream=7),
        *launched(115, 2, "kernel", "any name", 1000, 100, stream=7),
        *launched(130, 3, "gpu_memcpy", "Memcpy PtoP", 950, 100, stream=9, **copy),
        *launched(215, 4, "kernel", "any name", 1250, 100, stream=7),
        *launched(220, 5, "gpu_memcpy", "Memcpy PtoP", 1260, 50, stream=11, **copy),
        *launched(225, 6, "gpu_memcpy", "bookkeeping", 5000, 50, stream=11, bytes=8),
    ]
    return sorted(found, key=lambda event: event["ts"])


def judged(events: list[dict]) -> Profiled:
    profiled = Profiled.__new__(Profiled)
    profiled.digest(events)
    return profiled


def test_products_are_found_by_the_operator_that_launched_them(events) -> None:
    assert judged(events).products_s == pytest.approx(200e-6)


def test_a_stream_that_copies_in_forward_gathers(events) -> None:
    profiled = judged(events)
    assert profiled.intervals("gather") == [(950, 1050)]
    assert profiled.intervals("reduce-scatter") == [(1260, 1310)]


def test_hidden_is_what_runs_beside_the_compute_stream(events) -> None:
    assert judged(events).hidden_share() == pytest.approx((50 + 50) / 150)


def test_a_gather_on_the_compute_stream_is_not_hidden(events) -> None:
    for found in events:
        if found["name"] == "Memcpy PtoP":
            found |= {"name": "ncclDevKernel_AllGather", "cat": "kernel", "ts": found["ts"] + 1000}
            found["args"]["stream"] = 7
    assert judged(events).hidden_share() == 0


def test_a_gap_of_the_compute_stream_is_a_stall(events) -> None:
    stalls = [drawn for drawn in judged(events).drawn() if drawn.label == "stall"]
    assert [(stall.start, stall.stop) for stall in stalls] == [(1100, 1250)]


def test_intervals() -> None:
    assert union([(5, 7), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 7)]
    assert overlap([(0, 4), (5, 7)], [(3, 6), (6.5, 9)]) == pytest.approx(1 + 1 + 0.5)
    assert overlap([(0, 1)], []) == 0


# -- windows -----------------------------------------------------------------------------------


class Clock:
    """A device that gets slower with time, and the events and trainers that run on it."""

    def __init__(self, drift: float) -> None:
        self.now, self.drift = 0.0, drift  # seconds; how much slower a second later
        self.ran: list[str] = []  # the trainer of each step

    def run(self, seconds: float) -> None:
        self.now += seconds * (1 + self.drift * self.now)

    def event(self, device: torch.device) -> "Event":
        return Event(self)


class Event:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def record(self) -> None:
        self.at = self.clock.now

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: "Event") -> float:
        return (end.at - self.at) * 1e3


class OnClock:
    """A trainer whose step takes ``seconds``; its first two behind another's, ``late`` more."""

    def __init__(self, name: str, clock: Clock, seconds: float, late: float = 0.0) -> None:
        self.name, self.clock, self.seconds, self.late = name, clock, seconds, late

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.clock.run(0.3 * self.seconds)
        if self.clock.ran[-2:] != [self.name] * 2:
            self.clock.run(self.late)
        self.clock.ran.append(self.name)
        return torch.zeros(())

    def backward(self, loss: torch.Tensor) -> None:
        self.clock.run(0.6 * self.seconds)

    def update(self) -> None:
        self.clock.run(0.1 * self.seconds)


SECONDS = {"reference": 0.9, "mode": 1.0, "bound": 0.98}


def windows_on(clock: Clock, monkeypatch, late: float = 0.0, turns: int = 4) -> Pairs:
    monkeypatch.setattr(fsdp_overlap, "timing_event", clock.event)
    monkeypatch.setattr(fsdp_overlap, "begin_together", lambda device: None)
    trainers = {name: OnClock(name, clock, seconds, late) for name, seconds in SECONDS.items()}
    order = [*WARM_UP_WINDOWS, *ORDER * turns]
    taken = take_windows(trainers, order, torch.zeros(1), 4)
    counted = list(zip(order, taken, strict=True))[len(WARM_UP_WINDOWS) :]
    return Pairs(**{n: [[w.step_s] for name, w in counted if name == n] for n in SECONDS})


def test_a_device_that_gets_slower_does_not_change_the_share(monkeypatch) -> None:
    """Each pair alone is off by the drift between its windows; forth and back they cancel."""
    found = windows_on(Clock(drift=0.001), monkeypatch)
    assert max(abs(share - 0.9) for share in found.efficiencies()) > 0.003
    assert median(found.efficiencies()) == pytest.approx(0.9, abs=2e-4)
    assert median(found.etas(0.0)) == pytest.approx(0.98, abs=2e-4)


def test_the_first_steps_of_a_window_are_not_timed(monkeypatch) -> None:
    found = windows_on(Clock(drift=0.0), monkeypatch, late=5.0)
    assert found.efficiencies() == pytest.approx([0.9] * 8)


def test_windows_follow_each_other_without_another_step_between(monkeypatch) -> None:
    clock = Clock(drift=0.0)
    windows_on(clock, monkeypatch, turns=1)
    steps = [name for name in (*WARM_UP_WINDOWS, *ORDER) for _ in range(6)]
    assert clock.ran == steps, "two that are not timed and four that are"


def test_a_drift_cancels_because_each_kind_is_as_often_first() -> None:
    pairs = [pair for pair in pairwise(ORDER) if set(pair) == {"reference", "mode"}]
    assert pairs.count(("reference", "mode")) == pairs.count(("mode", "reference")) > 0
    places = {name: [i for i, n in enumerate(ORDER) if n == name] for name in SECONDS}
    assert len({mean(of_name) for of_name in places.values()}) == 1


def test_a_window_takes_as_long_as_on_the_slowest_rank() -> None:
    found = Pairs(
        reference=[[1.0, 1.2], [1.1, 1.2]], mode=[[2.0, 2.4], [2.4, 2.0]], bound=[[1.8, 1.0]]
    )
    assert found.efficiencies() == pytest.approx([0.5, 0.5])
    assert found.etas(0.6) == pytest.approx([1.0])


# -- a run -------------------------------------------------------------------------------------


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Whole(NoCommunication):
    """A mode on one rank, where nothing is to be sent."""

    note = "whole weights"


def file_of(folder: Path) -> Path:
    (path,) = (folder / "results").glob("*.json")
    return path


@pytest.fixture
def run(one_rank, tmp_path, monkeypatch):
    """Measure modes at a size for rehearsal; return the rows by name and tokens."""
    monkeypatch.setattr(fsdp_overlap, "MODES", {REFERENCE: NoCommunication, "mode": Whole})
    monkeypatch.setattr(Run, "measure_link", lambda self: None)

    def measured(tokens: list[int], **options) -> dict:
        given = {"modes": [REFERENCE, "mode"], "pairs": 2, "profile": [], "again": False}
        arguments = argparse.Namespace(out=tmp_path, small=True, tokens=tokens, **given | options)
        Run(arguments, torch.device("cpu")).all()
        rows = json.loads(file_of(tmp_path).read_text())["rows"]
        return {(row["name"], row["tokens"]): row for row in rows}

    return measured


def test_memory_is_read_before_the_reference_is_built(run, monkeypatch) -> None:
    done: list[str] = []

    def noted(what: str, function):
        def call(*arguments):
            done.append(what)
            return function(*arguments)

        return call

    monkeypatch.setattr(Memory, "peaks", noted("memory", Memory.peaks))
    monkeypatch.setattr(
        fsdp_overlap, "NoCommunication", noted("reference", fsdp_overlap.NoCommunication)
    )
    monkeypatch.setattr(fsdp_overlap, "take_windows", noted("windows", take_windows))
    run([32, 64], modes=["mode"])
    assert done == ["memory", "memory", "reference", "windows", "windows"]


def test_windows_fill_a_row_and_give_the_reference_its_step(run) -> None:
    rows = run([32])
    samples = rows["mode", 32]["samples"]
    counts = [len(samples[f"{name}_window_s"]) for name in ("reference", "mode", "bound")]
    assert counts == [2, 2, 1] and rows["mode", 32]["pairs"] == 2
    beside = [max(of_ranks) for of_ranks in samples["reference_window_s"]]
    assert rows[REFERENCE, 32]["step_s"] == median(beside)
    shares = [a / max(b) for a, b in zip(beside, samples["mode_window_s"], strict=True)]
    assert rows["mode", 32]["efficiency"] == pytest.approx(median(shares))


def test_a_run_that_was_cut_off_measures_what_is_missing(run) -> None:
    first = run([32])
    rows = run([32, 64])
    assert rows["mode", 32]["samples"] == first["mode", 32]["samples"]
    assert rows["mode", 64]["pairs"] == 2
    more = run([32, 64], pairs=4)
    assert more["mode", 32]["pairs"] == more["mode", 64]["pairs"] == 4
    again = run([32], again=True, modes=["mode"])
    assert again["mode", 32]["samples"] != more["mode", 32]["samples"]
    assert again["mode", 64] == more["mode", 64]


def test_a_row_without_windows_is_measured_anew_and_keeps_its_profile(run, tmp_path) -> None:
    run([32])
    path = file_of(tmp_path)
    data = json.loads(path.read_text())
    for row in data["rows"]:
        row.pop("pairs", None)
        row |= {"samples": {"step_s": [0.1]}, "hidden_share": 0.5, "step_s": 7.0}
    path.write_text(json.dumps(data))
    rows = run([32])
    assert rows["mode", 32]["pairs"] == 2 and rows["mode", 32]["hidden_share"] == 0.5
    assert rows["mode", 32]["step_s"] < 7.0 and rows[REFERENCE, 32]["step_s"] < 7.0


def test_a_mode_that_trains_something_else_has_no_row(run, tmp_path, monkeypatch) -> None:
    class Other(Whole):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(batch)

    monkeypatch.setitem(fsdp_overlap.MODES, "other", Other)
    rows = run([32], modes=["mode", "other"])
    assert ("mode", 32) in rows and ("other", 32) not in rows
    assert "its loss is" in json.loads(file_of(tmp_path).read_text())["not_run"]["other"]


def test_the_bound_trains_like_the_reference_and_leaves_no_hooks(one_rank) -> None:
    size, device = fsdp_overlap.SMALL, torch.device("cpu")
    batch = fsdp_overlap.random_batch(size, 32, device)
    plain, beside = NoCommunication(size, device), NoCommunication(size, device)
    transfers = fsdp_overlap.Transfers(size, device)
    queued: list[str] = []
    transfers.gather = lambda: queued.append("gather")
    transfers.reduce_scatter = lambda: queued.append("reduce-scatter")
    bound = fsdp_overlap.BoundTrainer(beside, transfers, (size.units, size.units - 1))
    for trainer in (plain, bound):
        for _ in range(2):
            trainer.backward(trainer.forward(batch))
            trainer.update()
    transfers.close()
    in_a_step = 4 * ((size.units - 1) + (size.units - 1))  # parameters; all gathers but the first
    assert queued.count("gather") == 2 * in_a_step
    assert queued.count("reduce-scatter") == 2 * 4 * (size.units - 1), "all but the last"
    assert all(map(torch.equal, plain.model.parameters(), beside.model.parameters()))
    assert not any(hooks_of(unit) for unit in beside.model)


def test_ranks_that_do_not_divide_the_weights_are_refused(run, monkeypatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 3)
    with pytest.raises(ValueError, match="divides 64 and 96"):
        run([32])


def hooks_of(module: nn.Module) -> list:
    return [*module._forward_pre_hooks.values(), *module._backward_pre_hooks.values()]


def test_four_ranks_take_the_same_windows(tmp_path) -> None:
    modes = f"{REFERENCE},update_in_order"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "4", "benchmarks/fsdp_overlap.py", "--small"]
    command += ["--modes", modes, "--tokens", "32", "--pairs", "2", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    data = json.loads(file_of(tmp_path).read_text())
    assert data["not_run"] == {}
    (row,) = (row for row in data["rows"] if row["name"] == "update_in_order")
    for name in ("reference", "mode", "bound"):
        assert all(len(of_ranks) == 4 for of_ranks in row["samples"][f"{name}_window_s"])
