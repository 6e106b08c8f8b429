"""Measure what one checkpoint save costs a stock training loop, for every way of saving.

    torchrun --nproc-per-node=2 --max-restarts=3 benchmarks/checkpoint_stall.py --until 300
    python benchmarks/checkpoint_stall.py --small --out /tmp/rehearsal      # a minute on a CPU

A stock Llama (``workloads.py``) trains all the time. What is measured is a list of tasks, the most
important first (``--list`` prints it with the seconds each needs, ``--only`` picks); tasks that no
longer fit before ``--until`` (seconds from now) are left out, one that fails is noted, and rows are
written as they come. A task that hangs ends its ranks; torchrun starts them again behind it.

How a number is made
--------------------
* A *window* is some steps in a row. A step's *interval* runs from the end of the step before it to
  its own end, both events on the compute stream (host clock on a CPU). It holds everything that
  delays a step: a held training thread, a waiting stream, slower kernels. A loop that reads nothing
  is kept at most two steps ahead of the device.
* Windows with and without a save take turns. What a step takes without a save is the trimmed mean
  of the windows without one in the same round and in the rounds beside it, and what a step at its
  place differs from that (the first steps behind a pause are not like those that follow), as the
  median over all windows without a save.
* ``staging_cost_s``: the steps from the call to one step after the copy, minus what they take
  without a save. Every way has made its copy before the update of the step after the call, or says
  when it ended. A blocking call is part of it.
* ``cost_s``: the same of all steps from the call to the end of the upload: everything that a save
  costs training.
* ``upload_slowdown``: the steps that begin between the end of the copy and that of the upload, over
  what they take without a save.
* ``_low``, ``_high``: the bootstrap's 95 % interval of the median, from six samples on.
* Row ``none`` is windows without a save, read in the same way, as if a save as long as the others'
  had been called: what the method reads where there is nothing.
* ``call_s``: host seconds from the call to its return; ``staged_s`` to the end of the copy, where
  the way tells; ``uploaded_s`` from there until the checkpoint is complete in storage.
* ``write_bytes_per_s``: bytes of a rank over ``uploaded_s``. ``storage_bytes_per_s``: the best of
  1, 2, 4 and 8 threads that write 64 MB pieces into new files and sync them, all ranks at once.
* ``loaded_back_bitwise``: a save behind ``queued_s`` of work on the device is loaded and compared
  with a clone that the compute stream made of the state right before the call.
* ``kept`` (``save_interval``): steps without saves over steps with a save every so many, in turn,
  from the third save on; the writer deletes the checkpoint before the last. For 100 it is computed
  from ``cost_s``.

All values are rank 0's, medians over windows; single values under ``samples``.
"""

import argparse
import gc
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes_source" / "checkpoint")]

from _toys import AppState, leaves, snapshot  # noqa: E402

from benchmarks import checkpoint_ways, measuring  # noqa: E402
from benchmarks.checkpoint_ways import PIECES, WAYS, AllAtOnce, Save, Way  # noqa: E402
from benchmarks.measuring import Results, Task, intervals_of, medians, trimmed_mean  # noqa: E402
from benchmarks.workloads import HOST_BOUND, StockLoop, compile_blocks, layers_of, shard, stock  # noqa: E402

BOUND_FROM = "bytes of state of a rank over the rate of its link"
LEAD = 2  # steps of a window before its save
AFTER = 1  # and after the upload has ended
QUIET = 6, 10  # steps of a window without a save, at least and at most
PREFIX = f"checkpoint_stall_{os.getppid()}_"  # names of its directories: torchrun's process in them
READ_US = 5000.0  # a read of the forward that takes longer waits for more than the forward
INTERVALS = ("staging_cost_s", "cost_s", "upload_slowdown")  # get a bootstrap interval
DEFAULT_STAGERS = "default_stager_as_published", "default_stager_ordered"
OURS = [name for name, way in (WAYS | PIECES).items() if way.ours]
STAGERS = ("overlapped_stager", "default_stager_2.13")
PARAMETERS = ("model", "loop", "compiled", "storage", "step", "tokens")


@dataclass(frozen=True)
class Case:
    """What the loop does: a row's parameters."""

    model: str = "llama-1b"
    loop: str = "reads"
    compiled: bool = False
    storage: str = "memory"
    step: str = "long"


@dataclass(frozen=True)
class Size:
    model: str
    tokens: dict[str, int]  # a step and rank
    length: int  # tokens of a sequence
    probe_bytes: int  # that a rank writes to learn what the storage takes
    link_bytes: int


FULL = {  # steps of 0.3 s and the shortest that an H200 reaches
    1: Size("llama-1b", {"longest": 40960, "long": 16384, "short": 2048}, 2048, 4 * 10**9, 2**30),
    2: Size("llama-1b", {"longest": 40960, "long": 14336, "short": 2048}, 2048, 4 * 10**9, 2**30),
}
SMALL = Size("llama-tiny", {"longest": 128, "long": 64, "short": 32}, 32, 2**20, 2**20)


def size_of(model: str | None, small: bool, ranks: int) -> Size:
    """``llama-1b``'s, unless another model is named."""
    size = SMALL if small else FULL[min(ranks, max(FULL))]
    if model is None:
        return size
    tokens = size.tokens if small else {"long": 4096, "short": 1024}
    return replace(size, model=model, tokens=tokens, length=min(size.length, 1024))


@dataclass
class Window:
    """Host times (s) of a window's start and of each step's end, and its save."""

    ends: list[float]
    save: Save

    def times(self, usual: list[float]) -> dict:
        """What the save cost; ``usual``: seconds of the steps at each place without a save."""
        steps, ends, save = intervals_of(self.ends), self.ends[1:], self.save
        usual = [usual[min(i, len(usual) - 1)] for i in range(len(steps))]
        staged_at = save.staged_at or save.returned_at

        def step_of(moment: float) -> int:  # the last one holds for all beyond
            return next((i for i, end in enumerate(ends) if end >= moment), len(steps) - 1)

        first = step_of(save.called_at)
        # the copy has ended before the update of step LEAD; behind it one step more is counted
        free = min(max(LEAD, step_of(staged_at)) + 1, len(steps) - 1)
        last = max(free, step_of(save.uploaded_at))
        blocked = save.staged_at == save.uploaded_at
        beside = slice(free, free if blocked else step_of(save.uploaded_at) + 1)
        begun = save.called_at if blocked else save.staged_at or save.called_at
        return {
            "staging_cost_s": sum(steps[first : free + 1]) - sum(usual[first : free + 1]),
            "cost_s": sum(steps[first : last + 1]) - sum(usual[first : last + 1]),
            "upload_slowdown": sum(steps[beside]) / sum(usual[beside]) if steps[beside] else None,
            "steps_beside_upload": len(steps[beside]),
            "step_s": statistics.mean(usual[1:]),
            "call_s": save.returned_at - save.called_at,
            "staged_s": save.staged_at - save.called_at if save.staged_at else None,
            "uploaded_s": save.uploaded_at - begun,
        }


class Training:
    """The model under test, its loop, and windows of it."""

    def __init__(self, size: Size, device: torch.device, storages: dict[str, Path]) -> None:
        self.size, self.device, self.storages = size, device, storages
        for parent in set(storages.values()) if dist.get_rank() == 0 else ():
            for left in parent.glob("checkpoint_stall_*_*"):  # by ranks that were ended
                pid = left.name.split("_")[2]
                if pid == str(os.getppid()) or not Path("/proc", pid).exists():
                    shutil.rmtree(left, ignore_errors=True)
        self.agreement = measuring.Agreement()
        model = shard(stock(size.model, device))
        self.loop = StockLoop(model, size.tokens["long"], size.length)
        self.app = AppState(model, self.loop.optimizer)
        self.case = Case(size.model)
        self.way: Way | None = None
        self.clock = measuring.StepClock(device)
        self.steps(6)

    def prepare(self, case: Case) -> None:
        """Train as ``case`` says until it is steady."""
        if case == self.case:
            return
        if case.compiled and not self.case.compiled:
            compile_blocks(self.loop.model)
        if self.case.compiled and not case.compiled:
            for layer in layers_of(self.loop.model):
                layer._compiled_call_impl = None
        self.loop.set_batch(self.size.tokens[case.step], self.size.length)
        self.loop.reads = case.loop == "reads"
        self.case = case
        self.clock.start()
        self.steps(6)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.loop.step()
            self.app.step += 1
            if self.way is not None:
                self.way.after_step()
            self.clock.tick()

    def quiet(self, like: Window | None = None) -> Window:
        """A window without a save, read as if it had one that took as long as that of ``like``."""
        steps = min(max(QUIET[0], len(like.ends) - 1 if like else 0), QUIET[1])
        self.clock.start()
        self.steps(LEAD)
        now = time.perf_counter()
        taken = like.save.uploaded_at - like.save.called_at if like else 0.0
        self.steps(steps - LEAD)
        return Window(self.clock.ends(), Save(Path(), now, now, now, now + taken))

    def saving(self, directory: Path) -> Window:
        """A window with a save: until its upload has ended on all ranks, and some steps more."""
        self.agreement.barrier()
        self.clock.start()
        self.steps(LEAD)
        save = self.way.save(directory)
        self.steps(2 + AFTER)
        while self.agreement.any(save.uploaded is not None and not save.uploaded.done()):
            self.steps(2)
        self.steps(AFTER)
        ends = self.clock.ends()
        self.way.finish(save)
        self.agreement.barrier()
        return Window(ends, save)

    def new_directory(self) -> Path:
        rank_0 = dist.get_rank() == 0
        parent = self.storages[self.case.storage]
        made = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent)) if rank_0 else None
        return self.agreement.from_rank_0(made)

    def remove(self, directory: Path) -> None:
        self.agreement.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(directory, ignore_errors=True)
        self.agreement.barrier()


# -- one row ----------------------------------------------------------------------------------


def usual_steps(rounds: list[list[float]], number: int, own: bool = True) -> list[float]:
    """What the steps of a window take without a save, around round ``number``, by their place."""
    near = range(max(0, number - 1), min(len(rounds), number + 2))
    level = trimmed_mean([s for i in near if own or i != number for s in rounds[i][1:]])
    others = [window for i, window in enumerate(rounds) if own or i != number]
    places = zip(*([s - trimmed_mean(w[1:]) for s in w] for w in others), strict=False)
    return [level + statistics.median(apart) for apart in places]


class Measurement:
    """The results and everything that adds to them; a method a kind of task."""

    def __init__(self, training: Training, out: Path, head: dict, state: list[int]) -> None:
        self.training, self.out, self.head = training, out, head
        self.state = state  # bytes of each tensor of this rank
        self.results = self.results_of("checkpoint_stall")
        self.intervals = self.results_of("save_interval", "every")
        self.pieces = self.results_of("staging_copies")
        self.storage: dict[str, float] = {}
        self.name: str | None = None  # of the way that is open
        self.first: Window | None = None  # its first save
        self.memory: measuring.HostMemory | None = None

    def results_of(self, benchmark: str, *varied: str) -> Results:
        head = self.head | {"benchmark": benchmark}
        return Results(self.out, head, OURS, (*PARAMETERS, *varied))

    def key(self, case: Case) -> dict:
        tokens = self.training.size.tokens[case.step] * dist.get_world_size()
        return {**vars(case), "tokens": tokens}

    def has(self, case: Case, name: str, samples: int, results: Results) -> bool:
        row = results.find(name, **self.key(case))
        return bool(row) and len(row["samples"].get("step_s", ())) >= samples

    def fixed(self, case: Case, name: str, way: Way | None) -> dict:
        link = self.head["link"]
        fixed = {"name": name, **self.key(case), "note": way.note if way else None}
        fixed["tensors"] = len(self.state)
        if link:
            bound_s = sum(self.state) / link["pinned_d2h_bytes_per_s"]
            fixed |= {"bound_s": bound_s, "bound_from": BOUND_FROM}
        return fixed

    @contextmanager
    def opened(self, case: Case, name: str) -> Iterator[Path]:
        """Train as ``case`` says with the way ``name``; yields a directory for its saves.

        A way stays open for the tasks behind it: it may have locked all of its memory.
        """
        training = self.training
        if name != self.name:
            self.close()
            self.memory = measuring.HostMemory()
            training.way = (WAYS | PIECES)[name](training.app, training.device)
            self.name = name
        try:
            training.prepare(case)
            directory = training.new_directory()
            if self.first is None:
                self.first = training.saving(directory / "first")
                self.written = measuring.size_on_disk(directory / "first")
                training.remove(directory / "first")
            yield directory
            training.remove(directory)
        except BaseException as error:  # it may not answer any more
            training.way.abandon(type(error), error, error.__traceback__)
            training.way = None
            self.close()
            raise

    def close(self) -> None:
        way, self.training.way = self.training.way, None
        if self.memory is not None:
            self.memory.close()
        self.name = self.memory = self.first = None
        if way is not None:
            way.close()
        gc.collect()

    def cost(self, case: Case, name: str, rounds: int, results: Results) -> None:
        """The row of ``name``: ``rounds`` pairs of windows; beside it that of ``none``."""
        training, key = self.training, self.key(case)
        saves: list[Window] = []
        without: list[Window] = []
        with self.opened(case, name) as directory:
            fixed = self.fixed(case, name, training.way)

            def save() -> None:
                place = directory / f"save{len(saves)}"
                saves.append(training.saving(place))
                training.remove(place)

            def quiet() -> None:
                without.append(training.quiet(saves[-1]))

            for _ in measuring.in_turn({"save": save, "quiet": quiet}, rounds):
                quiet_steps = [intervals_of(window.ends) for window in without]
                usual = [usual_steps(quiet_steps, i) for i in range(len(saves))]
                row = medians([w.times(u) for w, u in zip(saves, usual, strict=True)], INTERVALS)
                first = self.first.times(usual[0])
                row |= {
                    "exposed_stall_s": row["staging_cost_s"],
                    "first_call_s": first["call_s"],
                    "first_exposed_stall_s": first["staging_cost_s"],
                    "bytes_written": self.written,
                    **self.memory.peaks(),
                    "write_bytes_per_s": None,
                    "storage_bytes_per_s": None,
                }
                if self.written:
                    rate = self.written / dist.get_world_size() / row["uploaded_s"]
                    row["write_bytes_per_s"] = rate
                    row["storage_bytes_per_s"] = self.storage.get(case.storage)
                results.add({**results.find(name, **key), **fixed, **row})
        if rounds > 2 and not self.has(case, "none", rounds, results):
            own = [usual_steps(quiet_steps, i, own=False) for i in range(rounds)]
            row = medians([w.times(u) for w, u in zip(without, own, strict=True)], INTERVALS)
            row |= dict.fromkeys(("call_s", "staged_s", "uploaded_s"))  # there was no save
            results.add({**self.fixed(case, "none", None), **row})

    def judge(self, case: Case, name: str) -> None:
        """Load back what was saved right behind a step that had not run yet."""
        training = self.training
        with self.opened(replace(case, loop="free"), name) as directory:
            way = training.way
            measuring.queue_work(training.device, way.queued_s)
            training.steps(1)
            expected = snapshot(training.app)
            save = way.save(directory / "judged")
            training.steps(3)
            way.finish(save)
            measuring.synchronize(training.device)
            training.agreement.barrier()
            target = checkpoint_ways.like(training.app.state_dict())
            loaded = way.load(directory / "judged", target)
        wrong, share = checkpoint_ways.differences(expected, loaded)
        same = not training.agreement.any(wrong)
        verdict = {"loaded_back_bitwise": same, "elements_differing": share}
        measuring.tell(f"{name}: {verdict}")
        if row := self.results.find(name, **self.key(case)):
            self.results.add(row | verdict)

    def probe(self, case: Case) -> None:
        """Learn what the storage takes; rows of it that are there without the figure get it."""
        training = self.training
        training.prepare(replace(training.case, storage=case.storage))
        size, agreement = training.size.probe_bytes, training.agreement
        rates = measuring.storage_rates(size, agreement, training.new_directory)
        best = self.storage[case.storage] = max(rates.values())
        measuring.tell(f"{case.storage} takes {best / 1e9:.2f} GB/s a rank: {rates}")
        self.head["workload"][f"{case.storage}_storage_bytes_per_s"] = best
        for row in self.results.present():
            rated = row.get("storage_bytes_per_s") or not row.get("write_bytes_per_s")
            if row["storage"] == case.storage and not rated:
                self.results.add(row | {"storage_bytes_per_s": best})

    def interval(self, case: Case, name: str, every: int, saves: int) -> None:
        """Throughput kept with a save every ``every`` steps, between windows without one.

        The first two are not counted: each needs room that no save before it has given back.
        """
        training = self.training
        lasted: list[float] = []
        with self.opened(case, name) as directory:
            way, usual = training.way, [training.quiet()]
            for number in range(2 + saves):
                training.clock.start()
                save = way.save(directory / f"{number}")
                if number and dist.get_rank() == 0:
                    before = directory / f"{number - 1}"
                    save.uploaded.add_done_callback(
                        lambda _, old=before: shutil.rmtree(old, ignore_errors=True)
                    )
                training.steps(every)
                lasted.append(training.clock.ends()[-1] - training.clock.origin_at)
                usual.append(training.quiet())
            way.finish(save)
        lasted, usual = lasted[2:], usual[2:]
        step_s = trimmed_mean([s for w in usual for s in intervals_of(w.ends)[1:]])
        kept = [every * step_s / seconds for seconds in lasted]
        row = measuring.summary("kept", kept) | {"kept": saves * every * step_s / sum(lasted)}
        row |= {"step_s": step_s, "saves": saves, "samples": {"kept": kept}}
        self.intervals.add(self.fixed(case, name, way) | {"every": every} | row)

    def interval_by_cost(self, case: Case, name: str, every: int) -> None:
        """The same, from what one save costs."""
        row = self.results.find(name, **self.key(case))
        step_s = row["step_s"]
        kept = [every * step_s / (every * step_s + cost) for cost in row["samples"]["cost_s"]]
        fixed = self.fixed(case, name, None) | {"every": every, "step_s": step_s}
        fixed["note"] = "computed from what one save costs"
        self.intervals.add({**fixed, **measuring.summary("kept", kept), "samples": {"kept": kept}})

    def trace(self, case: Case, name: str) -> None:
        """Write the lanes from a step before the call to two steps after it.

        The host's lane has the call, and the forward's read where it waits.
        """
        training = self.training
        with self.opened(case, name) as directory:
            training.steps(2)
            training.clock.start()
            with torch.profiler.profile() as profile:
                training.steps(2)
                save = training.way.save(directory / "save")
                training.steps(2)
                ends = training.clock.ends()
            training.way.finish(save)

        offset = time.time_ns() / 1e3 - time.perf_counter() * 1e6

        def on_trace(moment: float) -> float:  # µs since the epoch
            return moment * 1e6 + offset

        begin, end = on_trace(ends[1]), on_trace(ends[-1])
        events = [e for e in measuring.profiled_events(profile) if begin <= e["ts"] < end]
        if training.device.type != "cuda":
            steps = [(on_trace(a), (b - a) * 1e6) for a, b in pairwise(ends[1:])]
            events += [{"cat": "kernel", "name": "step", "ts": at, "dur": dur} for at, dur in steps]
        drawn = measuring.compute_lane(events)
        for event in events:
            start, stop = event["ts"], event["ts"] + event["dur"]
            large = event.get("args", {}).get("bytes", 0) > 2**20
            if event.get("cat") == "gpu_memcpy" and "DtoH" in event["name"] and large:
                drawn.append(measuring.Drawn("D2H", "copy", start, stop))
            elif event["name"] == "aten::is_nonzero" and event["dur"] > READ_US:
                drawn.append(measuring.Drawn("host", "read waits", start, stop))
        called, returned = on_trace(save.called_at), on_trace(save.returned_at)
        if returned - called > READ_US:
            drawn.append(measuring.Drawn("host", "save", called, returned))
        if save.uploaded is not None and name in WAYS:
            staged = max([d.stop for d in drawn if d.lane == "D2H"], default=returned)
            drawn.append(measuring.Drawn("write", "write", max(staged, returned), end))
        marks = [("save called", called), ("call returns", returned)]
        head = (self.pieces if name in PIECES else self.results).data
        head = head | {"workload": {"model": f"stock {case.model}"}}
        measuring.write_trace(self.out, head, name, name in OURS, drawn, begin, marks)

    def copies(self, case: Case) -> None:
        """The rows of the ways to queue copies, and a trace of the worst and of the best."""
        try:
            for name in PIECES:
                self.cost(case, name, 4, self.pieces)
            for name in ("cure_at_once", "cure_gaps"):
                self.trace(case, name)
        finally:
            self.close()
            AllAtOnce.memory = None


# -- the whole run ----------------------------------------------------------------------------


def tasks_of(measurement: Measurement, model: str, pairs: int) -> Iterator[Task]:
    """What is measured, the most important first, with the seconds it takes on H200s."""
    gb = 12.7 if dist.get_world_size() == 1 else 7.4  # of state a rank, of the full size
    long = Case(model)
    short, free = replace(long, step="short"), replace(long, loop="free")
    compiled, disk = replace(long, compiled=True), replace(long, storage="disk")
    results, ours = measurement.results, "overlapped_writer"

    def cost(case: Case, name: str, rounds: int) -> Task:
        other = [v for k, v in vars(case).items() if v != getattr(long, k) and k != "compiled"]
        title = " ".join([name, *other] + ["compiled"] * case.compiled)
        work = partial(measurement.cost, case, name, rounds, results)
        upload = 0.5 * gb if name in OURS else 2.5 * gb  # others write slowly
        seconds = 4 + gb + rounds * (3 + upload) + 20 * case.compiled
        return Task(title, seconds, work, partial(measurement.has, case, name, rounds, results))

    def judged(name: str) -> Task:
        def done() -> bool:
            row = results.find(name, **measurement.key(long))
            return not row or row.get("loaded_back_bitwise") is not None

        return Task(f"{name} loaded back", 4 + 3 * gb, partial(measurement.judge, long, name), done)

    def interval(name: str, every: int, saves: int) -> Task:
        """Without ``saves``: from what one costs."""

        def done() -> bool:
            return measurement.intervals.has(name, **measurement.key(long), every=every)

        work = partial(measurement.interval_by_cost, long, name, every)
        if saves:
            work = partial(measurement.interval, long, name, every, saves)
        seconds = 4 + (4 + saves) * max(0.45 * every, gb / 2) if saves else 1
        return Task(f"{name} every {every}", seconds, work, done)

    def probe(case: Case, seconds: float) -> Task:
        return Task(f"{case.storage} probe", seconds, partial(measurement.probe, case))

    def copied() -> bool:
        names = ("none", *PIECES)
        return all(measurement.has(long, name, 4, measurement.pieces) for name in names)

    yield probe(long, 5 + gb)
    yield cost(long, ours, pairs)
    yield judged(ours)
    yield interval(ours, 20, 4)
    yield interval(ours, 100, 0)
    yield cost(long, "torch_checkpointing", 2)
    for name in ("nvidia-resiliency-ext", "torchtitan_async_with_pinned_mem"):
        yield cost(long, name, 1)
    yield Task("copies alone", 50 + 3 * gb, partial(measurement.copies, long), copied)
    yield cost(short, ours, 12)
    yield probe(disk, 5 + 4 * gb)
    yield cost(disk, ours, 6)
    yield cost(long, DEFAULT_STAGERS[0], 1)
    yield judged(DEFAULT_STAGERS[0])
    yield cost(long, "overlapped_stager_frozen", 6)
    for name in STAGERS:
        yield cost(long, name, 3)
        yield judged(name)
    yield cost(long, "pinned", 3)
    for name in ("dcp_save", "async_save"):
        yield cost(long, name, 1)
    for threads in ("1_thread", "7_threads"):
        yield cost(long, f"{ours}_{threads}", 6)
    yield cost(free, ours, 3)
    for name in (DEFAULT_STAGERS[1], "torch_save"):
        yield cost(long, name, 1)
    yield cost(compiled, ours, 3)
    for name in (ours, "dcp_save", "async_save", "pinned", *STAGERS, *DEFAULT_STAGERS):
        yield Task(f"{name} trace", 30 + gb, partial(measurement.trace, long, name))
    for case in (free, compiled):
        yield cost(case, "torch_checkpointing", 1)
    for name in ("torch_checkpointing", "dcp_save", "async_save", "pinned"):
        yield judged(name)


def run(arguments: argparse.Namespace, device: torch.device) -> None:
    ranks = dist.get_world_size()
    size = size_of(arguments.model, arguments.small, ranks)
    storages = {"memory": arguments.memory, "disk": arguments.disk}
    training = Training(size, device, storages)
    state = leaves(training.app.state_dict()).values()
    by_address = {x.data_ptr(): x.nbytes for x in state if isinstance(x, torch.Tensor)}
    state = list(by_address.values())
    training.agreement.barrier()  # ranks share the host's memory: all copy at once, as saves do
    link = training.agreement.from_rank_0(measuring.link_rates(device, size.link_bytes))
    workload = {  # of all models whose rows the file has
        "precision": "float32 weights and Adam state, bfloat16 compute",
        "optimizer": "AdamW, fused; gradients clipped, another rate each step",
        "sharding": "fully_shard, one group a layer",
    }
    head = measuring.header("checkpoint_stall", device, workload, link)
    measurement = Measurement(training, arguments.out, head, state)
    if arguments.retry:
        measurement.results.data["not_run"].clear()
    tasks = tasks_of(measurement, size.model, arguments.pairs)
    tasks = measuring.chosen(tasks, arguments.only)
    if arguments.list:
        for task in tasks:
            print(f"{task.seconds:6.0f} s  {task.name}{' (done)' if task.done() else ''}")
        return
    measuring.tell(f"{sum(state) / 1e9:.2f} GB of state a rank, link {link}")
    measuring.run_tasks(tasks, measurement.results, arguments.until, training.agreement)
    measurement.close()


def main() -> None:
    parser = measuring.command_line(__doc__)
    parser.add_argument("--list", action="store_true", help="print the tasks and end")
    parser.add_argument("--retry", action="store_true", help="also tasks that failed before")
    parser.add_argument("--model", choices=sorted(HOST_BOUND), help="in place of the Llama")
    parser.add_argument("--pairs", type=int, default=12, help="of windows, of our main row")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="storage in memory")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="local disk")
    arguments = parser.parse_args()
    with measuring.started_rank() as device:
        run(arguments, device)


if __name__ == "__main__":
    main()
