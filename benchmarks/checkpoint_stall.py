"""Measure what one checkpoint save costs a training loop, for every way of saving.

    torchrun --nproc-per-node=2 benchmarks/checkpoint_stall.py --out benchmarks
    python benchmarks/checkpoint_stall.py --small --out /tmp/rehearsal      # a minute on a CPU

One FSDP2 model with fused AdamW is trained all the time; ``--modes``, ``--storages`` and
``--steps`` choose what is measured. A row is written with its first sample and again with every
further one, so a run that is cut off is resumed by its command: rows are kept, and one with fewer
samples than ``--saves`` gets the rest (``--again`` measures it anew).

How a number is made
--------------------
The loop keeps at most two steps queued, as one that logs the loss of the step before last does.
Nothing else synchronises the device between a window's first and last step.

* A *window* is some steps in a row, begun with a device that has rested (``Size.rest_s``). A step's
  *interval* runs from the end of the step before it to its own end, both events on the compute
  stream (host clock on a CPU). It holds everything that delays a step: a held training thread, a
  waiting stream, slower kernels.
* ``step_s``: median interval without a save, the first steps of each window left out. In a window
  that has no partner (see below) these are the steps that end before the call.
* ``call_s``: host seconds from the call to its return.
* ``staged_s``: seconds until the copy in host memory is complete: for ``overlapped`` between the
  events around its copies on the device, otherwise on the host, from the call on.
* ``exposed_stall_s``: sum over the steps that end after the call, up to one step after the end of
  staging, of interval minus what that step takes without a save. A blocking call is part of it,
  since the compute stream runs empty. After a rest a GPU's clocks swing for some seconds, and step
  times with them by several per cent, much alike in every window; the save comes when that is over
  (``Size.quiet_steps``). Where the stall is a small part of a step (``paired`` modes), each window
  with a save has a partner without, of as many steps, and steps at the same place of their windows
  are compared. Which of the two comes first alternates, so that what a window owes to its turn
  cancels over an even number of ``--saves``. Elsewhere the baseline is the mean of the steps before
  the save, whole swings of the clock. ``samples`` has the intervals.
* ``exposed_stall_low_s``, ``exposed_stall_high_s``: between them the centre of all such stalls lies
  with at least 95 % confidence, by Wilcoxon's signed ranks, which asks of their distribution that
  it be symmetric and nothing more; from six samples on. Row ``none`` compares windows without a
  save with each other in the same way: what the method reads where there is nothing.
* ``uploaded_s``: host seconds from the end of staging until the checkpoint is complete in storage
  (for a save that does not stage, from the call), training all the while; ``uploaded_idle_s`` the
  same with no training beside it.
* ``upload_slowdown``: the steps that lie wholly between the end of staging and the end of the
  upload, over what they take without a save, by the same baseline. A save that leaves the GPU
  without work is a rest too: behind it the clocks swing anew, and a change of less than one per
  cent means nothing.
* ``bytes_written``: size of the files of one checkpoint, all ranks.
* ``pinned_bytes``: page-locked host memory of this rank, most at any time: PyTorch's own allocator
  plus memory registered with ``cudaHostRegister``.
* ``host_peak_bytes``: the largest resident set of this rank minus that before the mode began.
  Files in memory-backed storage are not in it.
* ``loaded_back_bitwise``: a save is loaded and compared with a clone that the compute stream made
  of the state right before the call. Where staging runs beside training this is a separate save
  with ``QUEUED_S`` of work queued before its step; elsewhere it is the first.
  ``elements_differing`` is the share of elements that are not those of the clone.
* ``quiet_steps``: steps of a window before its save. A row measured with another number is measured
  anew.
* ``link``: pinned copy rates of rank 0 while nothing else runs, and its device-to-host rate beside
  training on all ranks at once, every rank copying: as many bytes as the state has, queued behind
  an optimizer step, in large pieces. With more than one rank the copies share the way out of the
  GPU with the collectives.
* ``bound_s``: bytes of state of this rank over the rate beside training.

All values are rank 0's; medians over ``--saves`` saves, single values under ``samples``.
"""

import argparse
import gc
import importlib
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import combinations_with_replacement, pairwise
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes_source" / "checkpoint")]

from async_save import (  # noqa: E402
    AppState,
    AsyncCheckpoints,
    SampleCounter,
    leaves,
    same_bits,
    snapshot,
    start_rank,
)
from default_stager import REUSE_CRASHES, StagedCheckpoints  # noqa: E402
from overlapped_stager import OverlappedStager  # noqa: E402
from pinned_staging import PinnedCheckpoints  # noqa: E402
from process_checkpointer import ProcessCheckpoints  # noqa: E402

from benchmarks.measuring import (  # noqa: E402
    Drawn,
    HostMemory,
    Results,
    blocks,
    header,
    link_rates,
    profiled_events,
    say,
    synchronize,
    timing_event,
    write_trace,
)

BOUND_FROM = "bytes of state of a rank over the pinned device-to-host rate beside training"
QUEUED_S = 4.0  # more than a stager takes to lock its memory
QUEUED_MATRIX = 16384  # rows and columns of the products queued
QUEUED_STEPS = 2  # at most, on the device
STEPS_AFTER = 4  # at least, of a window, after its save
CONFIDENCE = 0.95  # of the interval around a stall
SETTLED = 2  # at the start of a window, not counted for the step time: the queue fills


@dataclass(frozen=True)
class Size:
    """Widths in features, tokens a step (all ranks together), link test in bytes."""

    layers_per_rank: int
    widths: tuple[int, int]
    tokens: dict[str, int]
    link_bytes: int
    rest_s: float  # before each window
    quiet_steps: dict[str, int]  # of a window, before its save


# 16 layers of 8192 x 4096 with Adam in float32: 6.44 GB of state a rank. On an H200 that has
# rested, step times swing with a period of about a second, three long steps: by five per cent at
# first, where a window's slowest step may be one place later than its partner's, and by one per
# cent after five seconds. So the save comes then, and from SETTLED to the call there are whole
# periods.
FULL = Size(
    *(16, (8192, 4096), {"long": 65536, "short": 8192}, 2**30, 1.0),
    quiet_steps={"long": 16, "short": 90},
)
SMALL = Size(
    *(4, (256, 128), {"long": 4096, "short": 256}, 2**24, 0.0),
    quiet_steps={"long": 7, "short": 7},
)


# -- the training loop ------------------------------------------------------------------------


class Training:
    """The model under test and the times of its steps."""

    def __init__(self, size: Size, device: torch.device, scratch: Path) -> None:
        self.size, self.device, self.scratch = size, device, scratch
        self.app = self.build()
        self.ends: list = []

    def build(self) -> AppState:
        torch.manual_seed(0)
        wide, narrow = self.size.widths
        count = self.size.layers_per_rank * dist.get_world_size()
        shapes = [(wide, narrow) if i % 2 == 0 else (narrow, wide) for i in range(count)]
        with torch.device(self.device):
            layers = [nn.Linear(*shape, bias=False) for shape in shapes]
            model = nn.Sequential(SampleCounter(), *layers)
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in layers:
            fully_shard(layer, mp_policy=precision)
        fully_shard(model, mp_policy=precision)
        return AppState(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))

    def prepare(self, tokens: str) -> None:
        """Choose the step's length and run until it is steady."""
        self.quiet_steps = self.size.quiet_steps[tokens]
        count = self.size.tokens[tokens] // dist.get_world_size()
        torch.manual_seed(dist.get_rank())
        self.batch = torch.randn(count, self.size.widths[0], device=self.device)
        self.steps(5)
        synchronize(self.device)

    def steps(self, count: int, mode: "Mode | None" = None) -> None:
        for _ in range(count):
            if len(self.ends) >= QUEUED_STEPS:
                self.ends[-QUEUED_STEPS].synchronize()
            self.app.model(self.batch).square().mean().backward()
            with mode.update() if mode else nullcontext():
                self.app.optimizer.step()
            self.app.optimizer.zero_grad()
            self.app.step += 1
            if mode:
                mode.after_step()
            end = timing_event(self.device)
            end.record()
            self.ends.append(end)

    def queue_work(self, seconds: float) -> None:
        """Queue matrix products for about ``seconds`` (800 TFLOP/s) on the compute stream."""
        if self.device.type == "cuda":
            a = torch.randn(QUEUED_MATRIX, QUEUED_MATRIX, device=self.device, dtype=torch.bfloat16)
            product = torch.empty_like(a)
            for _ in range(round(seconds * 800e12 / (2 * QUEUED_MATRIX**3))):
                torch.mm(a, a, out=product)

    def start_clock(self) -> None:
        """Begin a window: tie the device's clock to the host's, with the device rested."""
        self.ends.clear()
        synchronize(self.device)
        dist.barrier(group=AGREEMENT[0])
        time.sleep(self.size.rest_s)
        origin = timing_event(self.device)
        origin.record()
        origin.synchronize()
        self.origin_at = time.perf_counter()
        self.ends.append(origin)

    def step_ends(self) -> list[float]:
        """Host times (s) at which the steps since ``start_clock`` ended on the device."""
        self.ends[-1].synchronize()
        return [self.origin_at + self.ends[0].elapsed_time(end) / 1e3 for end in self.ends]


# -- the ways of saving -----------------------------------------------------------------------


@dataclass
class Save:
    """One save under way: when it was called and returned, what completes it (host times, s)."""

    directory: Path
    called_at: float
    returned_at: float = 0.0
    staged_at: float | None = None
    uploaded_at: float | None = None
    uploaded: Future | None = None
    staged_s: float | None = None

    def watch(self, staged: Future | None, uploaded: Future) -> None:
        def note(name: str) -> Callable[[Future], None]:
            return lambda _: setattr(self, name, time.perf_counter())

        if staged is not None:
            staged.add_done_callback(note("staged_at"))
        uploaded.add_done_callback(note("uploaded_at"))
        self.uploaded = uploaded


class Mode:
    """A way of saving. ``start`` is timed as the call; the rest is what the loop must do for it."""

    recipe: str | None = None  # whose code is measured, by its file's stem
    note: str | None = None
    stages_beside = False  # training goes on while the copy is made
    paired = False  # its stall is a small part of a step
    uploads_idle = False  # measure the upload with the device idle too

    def __init__(self, training: Training) -> None:
        self.training, self.app = training, training.app
        self.group = dist.new_group(backend="gloo")

    def save(self, directory: Path) -> Save:
        save = Save(directory, time.perf_counter())
        self.start(save)
        save.returned_at = time.perf_counter()
        if save.uploaded is None:  # it blocked until all was written
            save.staged_at = save.uploaded_at = save.returned_at
        elif save.staged_at is None and not self.stages_beside:
            save.staged_at = save.returned_at
        return save

    def start(self, save: Save) -> None:
        raise NotImplementedError

    def update(self) -> AbstractContextManager:
        """Around ``optimizer.step()``."""
        return nullcontext()

    def after_step(self) -> None:
        """After each step, on the training thread."""

    def finish(self, save: Save) -> None:
        if save.uploaded is not None:
            save.uploaded.result()
            while save.uploaded_at is None:  # callbacks run just after the result is there
                time.sleep(1e-4)

    def load(self, directory: Path) -> dict[str, object]:
        """The leaves of a state loaded from ``directory``."""
        app = self.training.build()
        dcp.load({"app": app}, checkpoint_id=directory, process_group=self.group)
        return leaves(app.state_dict())

    def close(self) -> None:
        dist.destroy_process_group(self.group)


class Nothing(Mode):
    def start(self, save: Save) -> None: ...


class TorchSave(Mode):
    note = "one file a rank, its local shards; not reshardable"

    def start(self, save: Save) -> None:
        save.directory.mkdir(parents=True, exist_ok=True)
        torch.save(leaves(self.app.state_dict()), save.directory / f"{dist.get_rank()}.pt")
        dist.barrier(group=self.group)

    def load(self, directory: Path) -> dict[str, object]:
        path = directory / f"{dist.get_rank()}.pt"
        return torch.load(path, map_location=self.training.device)


class DcpSave(Mode):
    def start(self, save: Save) -> None:
        dcp.save({"app": self.app}, checkpoint_id=save.directory, process_group=self.group)


class RecipeMode(Mode):
    """The class that a recipe offers for its saves; it writes to ``<directory>/step<N>``."""

    checkpoints: AsyncCheckpoints | ProcessCheckpoints

    def start(self, save: Save) -> None:
        self.checkpoints.root = save.directory
        self.checkpoints.save(self.app)
        self.watch(save)

    def watch(self, save: Save) -> None:
        save.watch(None, self.checkpoints.upload)

    def finish(self, save: Save) -> None:
        super().finish(save)
        self.checkpoints.wait()

    def load(self, directory: Path) -> dict[str, object]:
        (checkpoint,) = directory.iterdir()
        return super().load(checkpoint)

    def close(self) -> None:
        self.checkpoints.close()
        super().close()


class AsyncSave(RecipeMode):
    recipe = "async_save"

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self.checkpoints = AsyncCheckpoints(Path())


class Pinned(RecipeMode):
    recipe = "pinned_staging"

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self.checkpoints = PinnedCheckpoints(Path())


class DefaultStagerOrdered(RecipeMode):
    recipe = "default_stager"
    stages_beside = True
    uploads_idle = True

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self.checkpoints = StagedCheckpoints(Path(), training.device)
        built = "a new stager a save" if REUSE_CRASHES else "one stager for all saves"
        self.note = f"{built}; its stream waits for an event behind the step"

    def watch(self, save: Save) -> None:
        save.watch(self.checkpoints.stager.staged, self.checkpoints.upload)

    def update(self) -> AbstractContextManager:
        self.checkpoints.wait_staged()
        return nullcontext()


class Process(RecipeMode):
    recipe = "process_checkpointer"
    uploads_idle = True
    note = "the daemons are started before the first save that is timed"

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        directory = shared_directory(training.scratch)
        try:
            self.checkpoints = ProcessCheckpoints(directory, self.app)
        finally:
            remove(directory)


class DefaultStagerAsPublished(Mode):
    note = "a new stager a save, never ordered after the step; closed here after each save"
    stages_beside = True
    staging: Future | None = None

    def start(self, save: Save) -> None:
        on_cpu = self.training.device.type == "cpu"
        options = StagingOptions(False, False, True, False) if on_cpu else StagingOptions()
        self.stager = DefaultStager(options)
        response = dcp.async_save(
            {"app": self.app},
            checkpoint_id=save.directory,
            process_group=self.group,
            async_stager=self.stager,
        )
        save.watch(response.staging_completion, response.upload_completion)
        self.staging = response.staging_completion

    def update(self) -> AbstractContextManager:
        if self.staging is not None:
            self.staging.result()
            self.staging = None
        return nullcontext()

    def finish(self, save: Save) -> None:
        super().finish(save)
        self.stager.close()
        self.stager = None  # its memory is freed here, not in the next call


class Overlapped(Mode):
    recipe = "overlapped_stager"
    stages_beside = paired = uploads_idle = True

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self.stager = OverlappedStager(training.device, self.app.model.buffers())

    def start(self, save: Save) -> None:
        writer = FileSystemWriter(save.directory, per_thread_copy_ahead=0)
        response = dcp.async_save(
            {"app": self.app},
            storage_writer=writer,
            process_group=self.group,
            async_stager=self.stager,
        )
        self.stager.in_use_until(response.upload_completion)
        save.watch(self.stager.staged, response.upload_completion)

    def update(self) -> AbstractContextManager:
        self.stager.before_update()
        return nullcontext()

    def finish(self, save: Save) -> None:
        super().finish(save)
        save.staged_s = self.stager.staged.result()

    def close(self) -> None:
        self.stager.close()
        super().close()


class TorchCheckpointing(Mode):
    """The torch_checkpointing package: staging thread, shared memory, a writer process."""

    stages_beside = paired = True

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        package = importlib.import_module("torch_checkpointing")
        self.note = f"torch_checkpointing {version('torch_checkpointing')}; no resharder declared"
        self.manager = package.CheckpointManager(package.CheckpointManager.Config())

    def start(self, save: Save) -> None:
        uploaded = self.manager.save(str(save.directory), self.app.state_dict())
        # The manager does not give out its staging future; without it only the upload has an end.
        save.watch(getattr(self.manager, "_staging_future", None), uploaded)

    def update(self) -> AbstractContextManager:
        return self.manager.lock()

    def load(self, directory: Path) -> dict[str, object]:
        app = self.training.build()
        target = app.state_dict()
        loaded = dict(self.manager.load(str(directory), into=target))
        return leaves(loaded)

    def close(self) -> None:
        self.manager.close()
        super().close()


class NvidiaResiliencyExt(Mode):
    """nvidia-resiliency-ext's TorchAsyncCheckpoint: torch.save in a persistent process."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        module = importlib.import_module(
            "nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt"
        )
        self.note = (
            f"nvidia-resiliency-ext {version('nvidia-resiliency-ext')}, TorchAsyncCheckpoint: "
            f"one file a rank, not reshardable; its end is seen at the end of a step"
        )
        self.checkpoint = module.TorchAsyncCheckpoint()
        self.pending: Future | None = None

    def start(self, save: Save) -> None:
        save.directory.mkdir(parents=True, exist_ok=True)
        path = save.directory / f"{dist.get_rank()}.pt"
        self.checkpoint.async_save(leaves(self.app.state_dict()), path)
        self.pending = Future()
        save.watch(None, self.pending)

    def after_step(self) -> None:
        if self.pending is not None:
            self.checkpoint.finalize_async_save(blocking=False)
            queue = self.checkpoint._get_async_calls_queue()
            if queue.get_num_unfinalized_calls() == 0:
                self.pending.set_result(None)
                self.pending = None
            elif not queue.persistent_caller.process.is_alive():  # nobody would answer
                code = queue.persistent_caller.process.exitcode
                queue.close(abort=True)
                raise RuntimeError(f"the writer process ended with exit code {code}")

    def finish(self, save: Save) -> None:
        if self.pending is not None:
            self.checkpoint.finalize_async_save(blocking=True)
            self.pending.set_result(None)
            self.pending = None
        super().finish(save)

    load = TorchSave.load

    def close(self) -> None:
        self.checkpoint.close()
        super().close()


MODES: dict[str, type[Mode]] = {
    "none": Nothing,
    "torch_save": TorchSave,
    "dcp_save": DcpSave,
    "async_save": AsyncSave,
    "pinned": Pinned,
    "default_stager_as_published": DefaultStagerAsPublished,
    "default_stager_ordered": DefaultStagerOrdered,
    "overlapped": Overlapped,
    "process": Process,
    "torch_checkpointing": TorchCheckpointing,
    "nvidia-resiliency-ext": NvidiaResiliencyExt,
}
RECIPES = {name: (mode.recipe,) if mode.recipe else () for name, mode in MODES.items()}


# -- one row ----------------------------------------------------------------------------------


def agreed_max(value: float) -> float:
    """The largest ``value`` of all ranks, so that they take equal numbers of steps."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=AGREEMENT[0])
    return tensor.item()


AGREEMENT: list = []  # one gloo group for what the benchmark itself must agree on


def remove(directory: Path) -> None:
    dist.barrier(group=AGREEMENT[0])
    if dist.get_rank() == 0:
        shutil.rmtree(directory, ignore_errors=True)
    dist.barrier(group=AGREEMENT[0])


def size_on_disk(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def window_without_save(training: Training, mode: Mode, steps: int) -> list[float]:
    """Host times (s) of the start and of each step's end of a window."""
    training.start_clock()
    training.steps(steps, mode)
    return training.step_ends()


def window_with_save(
    training: Training, mode: Mode, directory: Path, first: bool
) -> tuple[list[float], Save, dict | None]:
    """The same of a window with a save, the save, and what it must hold if that is known.

    Trains until the upload has ended on all ranks.
    """
    training.start_clock()
    training.steps(training.quiet_steps, mode)
    expected = snapshot(training.app) if first and not mode.stages_beside else None
    save = mode.save(directory)
    training.steps(STEPS_AFTER, mode)
    while agreed_max(float(save.uploaded is not None and not save.uploaded.done())):
        training.steps(2, mode)
    ends = training.step_ends()
    mode.finish(save)
    dist.barrier(group=AGREEMENT[0])
    return ends, save, expected


def intervals_of(ends: list[float]) -> list[float]:
    return [b - a for a, b in pairwise(ends)]


def usual(baseline: list[float], step: int) -> float:
    """Seconds that a window's step takes without a save; the last value holds for all beyond."""
    return baseline[min(step, len(baseline) - 1)]


def exposed_stall(
    ends: list[float], baseline: list[float], called_at: float, staged_at: float
) -> tuple[float, int]:
    """Seconds that a save added to a window's steps, and the first step that it did not touch.

    Args:
        ends: host times (s) of the window's start and of each step's end.
        baseline: see :func:`usual`.
        called_at, staged_at: host times (s) of the call and of the end of staging.
    """
    steps = list(pairwise(ends))
    touched = [i for i, (a, b) in enumerate(steps) if b > called_at and a < staged_at]
    first_free = touched[-1] + 1 if touched else len(steps)
    counted = [i for i in (*touched, first_free) if i < len(steps)]
    added = [steps[i][1] - steps[i][0] - usual(baseline, i) for i in counted]
    return sum(added), first_free


def upload_slowdown(
    ends: list[float], baseline: list[float], begin: int, uploaded_at: float
) -> tuple[float | None, int]:
    """Time of the steps from ``begin`` on that end before ``uploaded_at``, over the usual.

    Returns:
        The ratio, None if there is no such step, and the number of steps.
    """
    taken = [b - a for a, b in list(pairwise(ends))[begin:] if b < uploaded_at]
    without = sum(usual(baseline, begin + i) for i in range(len(taken)))
    return (sum(taken) / without if taken else None), len(taken)


def centre_interval(values: list[float]) -> tuple[float, float] | None:
    """What holds the centre of a symmetric distribution, with ``CONFIDENCE``, by its samples.

    Of the means of all pairs, how many are below the centre is distributed as the sum of those
    ranks 1 … n whose coin shows heads (Wilcoxon's signed-rank test, turned around). None where even
    the smallest and the largest sample are not enough.
    """
    means = sorted((a + b) / 2 for a, b in combinations_with_replacement(values, 2))
    ways = Counter({0: 1})  # to get each sum of ranks
    for rank in range(1, len(values) + 1):
        ways += Counter({total + rank: count for total, count in ways.items()})
    outside, found = 0.0, None
    for i in range(len(means) // 2):
        outside += 2 * ways[i] / 2 ** len(values)
        if outside > 1 - CONFIDENCE:
            break
        found = means[i], means[-1 - i]
    return found


def stall_interval(stalls: list[float]) -> dict[str, float]:
    """The fields of a row around ``exposed_stall_s``."""
    interval = centre_interval(stalls)
    return dict(zip(("exposed_stall_low_s", "exposed_stall_high_s"), interval or (), strict=False))


def measure_save(
    training: Training,
    mode: Mode,
    directory: Path,
    *,
    first: bool = False,
    pair_steps: int = 0,
    quiet_first: bool = True,
) -> tuple[dict, dict | None]:
    """One sample of every time in a row; of the first save, also what its checkpoint must hold.

    Args:
        first: the mode's first save.
        pair_steps: steps of the window without a save that this one is compared with; 0: none.
        quiet_first: whether that window comes before the one with the save.
    """
    without: list[float] = []
    if pair_steps and quiet_first:
        without = intervals_of(window_without_save(training, mode, pair_steps))
    ends, save, expected = window_with_save(training, mode, directory, first)
    intervals = intervals_of(ends)
    if pair_steps and not quiet_first:
        without = intervals_of(window_without_save(training, mode, len(intervals)))
    times = times_of(ends, save, without, training.quiet_steps)
    paired = {"intervals_without": without, "quiet_first": quiet_first} if without else {}
    return {"intervals": intervals, **paired, **times}, expected


def times_of(ends: list[float], save: Save, without: list[float], quiet_steps: int) -> dict:
    """The times of one save, by the step ends of its window and the intervals of its partner.

    Args:
        without: empty where the window has no partner.
        quiet_steps: of the window, before the call; ``QUEUED_STEPS`` of them end after it.
    """
    quiet = without[SETTLED:] or intervals_of(ends)[SETTLED : quiet_steps - QUEUED_STEPS]
    baseline = [*without, statistics.mean(quiet)]
    staged_at = save.staged_at if save.staged_at is not None else save.uploaded_at
    stall_s, first_free = exposed_stall(ends, baseline, save.called_at, staged_at)
    slowdown, beside = upload_slowdown(ends, baseline, first_free + 1, save.uploaded_at)
    return {
        "step_s": statistics.median(quiet),
        "call_s": save.returned_at - save.called_at,
        "staged_s": save.staged_s or (staged_at - save.called_at if save.uploaded else None),
        "uploaded_s": save.uploaded_at - (staged_at if save.uploaded else save.called_at),
        "exposed_stall_s": stall_s,
        "upload_slowdown": slowdown,
        "steps_beside_upload": beside,
    }


def upload_when_idle(training: Training, mode: Mode, directory: Path) -> float:
    """Seconds from the call to the end of the upload while nothing is computed."""
    synchronize(training.device)
    save = mode.save(directory)
    mode.update()
    mode.finish(save)
    dist.barrier(group=AGREEMENT[0])
    return save.uploaded_at - (save.staged_at or save.called_at)


def save_behind_queued_work(training: Training, mode: Mode, directory: Path) -> dict:
    """Save right behind a step that runs only after ``QUEUED_S``; return what it must hold."""
    training.steps(2, mode)
    training.queue_work(QUEUED_S)
    training.steps(1, mode)
    expected = snapshot(training.app)
    save = mode.save(directory)
    training.steps(3, mode)
    mode.finish(save)
    synchronize(training.device)
    return expected


def judge(mode: Mode, directory: Path, expected: dict) -> dict:
    """Load the checkpoint in ``directory`` and compare it with ``expected``."""
    loaded = mode.load(directory)
    differing = total = 0
    same = True
    for path, leaf in expected.items():
        if isinstance(leaf, torch.Tensor):
            found = loaded[path].to(leaf.device)
            differing += int((found != leaf).sum())
            total += leaf.numel()
            same &= same_bits(found, leaf)
        else:
            same &= loaded.get(path) == leaf
    everywhere = agreed_max(float(not same)) == 0
    return {"loaded_back_bitwise": everywhere, "elements_differing": differing / total}


def measure(
    training: Training,
    mode: Mode,
    storage: Path,
    saves: int,
    memory: HostMemory,
    begun: dict | None,
) -> Iterator[dict]:
    """All fields of a row but its key, first with one sample, then with each further one.

    Args:
        storage: an empty directory of this row's.
        begun: the row, if it is there and lacks samples; what is measured once is taken from it.
    """
    first, expected = measure_save(training, mode, storage / "first", first=True)
    written = size_on_disk(storage / "first")
    if begun is None:
        if expected is None:
            remove(storage / "first")
            expected = save_behind_queued_work(training, mode, storage / "first")
        once = {
            "first_call_s": first["call_s"],
            "first_exposed_stall_s": first["exposed_stall_s"],
            "bytes_written": written,
            **judge(mode, storage / "first", expected),
        }
    else:
        kept = ("first_call_s", "first_exposed_stall_s", "bytes_written")
        kept += ("loaded_back_bitwise", "elements_differing", "uploaded_idle_s")
        once = {key: begun[key] for key in kept}
    del expected
    remove(storage / "first")
    if mode.uploads_idle and begun is None:
        once["uploaded_idle_s"] = upload_when_idle(training, mode, storage / "idle")
        remove(storage / "idle")
    samples: dict[str, list] = begun["samples"] if begun else {}
    steps = len(first["intervals"]) if mode.paired else 0
    while (number := len(samples.get("step_s", ()))) < saves:
        sample, _ = measure_save(
            training, mode, storage / "save", pair_steps=steps, quiet_first=number % 2 == 0
        )
        remove(storage / "save")
        steps = len(sample["intervals"]) if mode.paired else 0
        for key, value in sample.items():
            samples.setdefault(key, []).append(value)
        known = {key: [v for v in values if v is not None] for key, values in samples.items()}
        medians = {
            key: statistics.median(values) if values else None
            for key, values in known.items()
            if key not in ("intervals", "intervals_without", "quiet_first")
        }
        spread = stall_interval(samples["exposed_stall_s"])
        shared = {"uploaded_idle_s": None, **once, **memory.peaks(), "samples": samples}
        yield {**medians, **spread, **shared}


def measure_nothing(
    training: Training, mode: Mode, saves: int, begun: dict | None
) -> Iterator[dict]:
    """The row of training without a save: windows against windows, as if one had a save.

    The save that is not made is called once the host has queued the quiet steps, the last of them
    not begun on the device, and staged within the step behind them.
    """
    samples: dict[str, list] = begun["samples"] if begun else {"step_s": [], "exposed_stall_s": []}
    called, staged = training.quiet_steps - QUEUED_STEPS, training.quiet_steps
    for number in range(len(samples["step_s"]), saves):
        steps = training.quiet_steps + STEPS_AFTER
        pair = [window_without_save(training, mode, steps) for _ in range(2)]
        without, ends = pair if number % 2 == 0 else reversed(pair)
        baseline = intervals_of(without)
        between = [(a + b) / 2 for a, b in pairwise(ends)]
        stall_s, _ = exposed_stall(ends, baseline, between[called], between[staged])
        samples["step_s"].append(statistics.median(baseline[SETTLED:]))
        samples["exposed_stall_s"].append(stall_s)
        medians = {key: statistics.median(values) for key, values in samples.items()}
        yield {**medians, **stall_interval(samples["exposed_stall_s"]), "samples": samples}


# -- the whole run ----------------------------------------------------------------------------


def d2h_beside_training(training: Training, nbytes: int, piece: int) -> float:
    """Pinned device-to-host rate (byte/s) of ``nbytes`` in pieces, queued behind steps; a median.

    All ranks call this together, so that all copy at the same time, beside the next forward.
    """
    host = torch.empty(piece, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(piece, dtype=torch.uint8, device=training.device)
    stream, pieces, timed = torch.cuda.Stream(), max(1, round(nbytes / piece)), []
    for _ in range(10):
        training.steps(1)
        stream.wait_stream(torch.cuda.current_stream())
        start, end = timing_event(training.device), timing_event(training.device)
        with torch.cuda.stream(stream):
            start.record()
            for _ in range(pieces):
                host.copy_(there, non_blocking=True)
            end.record()
        timed.append((start, end))
    training.steps(1)
    synchronize(training.device)
    rates = [pieces * piece / (start.elapsed_time(end) / 1e3) for start, end in timed]
    return statistics.median(rates[2:])


def measure_link(training: Training, size: Size, state_bytes: int) -> dict[str, float]:
    """Rates of rank 0's link, the other ranks idle, and beside training on all; empty on a CPU."""
    if training.device.type != "cuda":
        return {}
    alone = link_rates(training.device, size.link_bytes) if dist.get_rank() == 0 else {}
    dist.barrier(group=AGREEMENT[0])
    beside = d2h_beside_training(training, state_bytes, size.link_bytes)
    return alone | {"pinned_d2h_beside_training_bytes_per_s": beside}


def row_begun(results: Results, quiet_steps: int, **key: str) -> dict | None:
    """The row of this name, storage and step if it was measured in windows like these."""
    found = (row for row in results.data["rows"] if results.key(row) == results.key(key))
    return next((row for row in found if row.get("quiet_steps") == quiet_steps), None)


def run(arguments: argparse.Namespace, device: torch.device) -> None:
    started = time.perf_counter()
    size = SMALL if arguments.small else FULL
    training = Training(size, device, arguments.memory)
    training.prepare("long")
    state = [x for x in leaves(training.app.state_dict()).values() if isinstance(x, torch.Tensor)]
    state_bytes = sum(x.nbytes for x in state)
    link = measure_link(training, size, state_bytes)
    bound_s = state_bytes / link["pinned_d2h_beside_training_bytes_per_s"] if link else None
    workload = {
        "model": "{} linear layers a rank, {} x {}".format(size.layers_per_rank, *size.widths),
        "precision": "float32 weights and Adam state, bfloat16 compute",
        "optimizer": "AdamW, fused",
        "sharding": "fully_shard, one group a layer",
        "tensors": len(state),
        "state_bytes_per_rank": state_bytes,
        "tokens_per_step": size.tokens,
        "steps_queued": QUEUED_STEPS,
    }
    head = header("checkpoint_stall", device, workload, link)
    results = Results(arguments.out, head, RECIPES, varied=("storage", "step"))
    say(started, f"{state_bytes / 1e9:.2f} GB of state a rank, link {link}")
    for mode_name in arguments.modes:
        wanted = []
        for storage in arguments.storages:
            for step in arguments.steps:
                key = {"name": mode_name, "storage": storage, "step": step}
                begun = row_begun(results, size.quiet_steps[step], **key)
                begun = None if arguments.again else begun
                if begun is None or len(begun["samples"]["step_s"]) < arguments.saves:
                    wanted.append((key, begun))
        if not wanted:
            continue
        if all(row["name"] != mode_name for row in results.data["rows"]):
            results.skip(mode_name, "begun, and cut off before its first row was complete")
        memory = HostMemory()
        try:
            mode = MODES[mode_name](training)
        except (ImportError, PackageNotFoundError) as error:
            results.skip(mode_name, f"{type(error).__name__}: {error}")
            say(started, f"{mode_name}: not run, {error}")
            continue
        try:
            for key, begun in wanted:
                training.prepare(key["step"])
                directory = shared_directory(
                    arguments.memory if key["storage"] == "memory" else arguments.disk
                )
                fixed = {**key, "quiet_steps": training.quiet_steps, "note": mode.note}
                if bound_s:
                    fixed |= {"bound_s": bound_s, "bound_from": BOUND_FROM}
                try:
                    if mode_name == "none":
                        rows = measure_nothing(training, mode, arguments.saves, begun)
                    else:
                        rows = measure(training, mode, directory, arguments.saves, memory, begun)
                    for row in rows:
                        results.add({**fixed, **row})
                        count = f"{len(row['samples']['step_s'])} of {arguments.saves}"
                        say(started, f"{mode_name}: {count}, stall {row['exposed_stall_s']:.4f} s")
                finally:
                    remove(directory)
                shown = {k: v for k, v in row.items() if k != "samples"}
                say(started, f"{mode_name}, {key['storage']}, {key['step']}: {json.dumps(shown)}")
            if arguments.trace and mode_name != "none":
                training.prepare("long")
                directory = shared_directory(arguments.memory)
                trace(training, mode, mode_name, directory, arguments.out, head)
                remove(directory)
        except BaseException as error:  # CheckpointException is no Exception
            if mode_name in results.data["not_run"]:
                results.skip(mode_name, f"{type(error).__name__}: {str(error)[:300]}")
            raise
        finally:
            memory.close()
            mode.close()
            del mode
            gc.collect()


def shared_directory(parent: Path) -> Path:
    """A new directory below ``parent``, made by rank 0."""
    agreed = [Path(tempfile.mkdtemp(dir=parent)) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(agreed, group=AGREEMENT[0])
    return agreed[0]


# -- a small trace ----------------------------------------------------------------------------


GAP_US = 200.0  # kernels closer than this are one block
STALL_US = 5000.0  # a longer gap between blocks is drawn as a stall


def trace(
    training: Training, mode: Mode, name: str, directory: Path, folder: Path, head: dict
) -> None:
    """Write compute, copy and write lanes from two steps before a save to four after its call.

    Compute and copy come from the profiler: kernels less than ``GAP_US`` apart are one block, a gap
    of more than ``STALL_US`` between blocks is marked as a stall. On a CPU, compute is the steps.
    The write lane runs from the end of staging to the end of the upload, by the host's clock, and
    is cut at the end of the window.
    """
    on_cuda = training.device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] * on_cuda
    training.start_clock()
    with torch.profiler.profile(activities=activities) as profile:
        training.steps(4, mode)
        save = mode.save(directory)
        training.steps(4, mode)
        ends = training.step_ends()
    mode.finish(save)
    offset = time.time_ns() / 1e3 - time.perf_counter() * 1e6

    def profiler_us(host_s: float) -> float:
        return host_s * 1e6 + offset

    begin, end = profiler_us(ends[2]), profiler_us(ends[-1])
    if on_cuda:
        events = [e for e in profiled_events(profile) if begin <= e["ts"] < end]
    else:
        step = {"cat": "kernel", "name": "step"}
        events = [
            step | {"ts": profiler_us(a), "dur": (b - a) * 1e6} for a, b in pairwise(ends[2:])
        ]

    def computes(event: dict) -> str | None:
        if event.get("cat") != "kernel" or event["name"].startswith("nccl"):
            return None
        return "optimizer" if "adam" in event["name"].lower() else "forward, backward"

    drawn = blocks(events, "compute", GAP_US, computes)
    drawn += [
        Drawn("compute", "stall", a.stop, b.start, {"stall": True})
        for a, b in pairwise(drawn)
        if b.start - a.stop > STALL_US
    ]
    for event in events:
        nbytes = event.get("args", {}).get("bytes", 0)
        if event.get("cat") == "gpu_memcpy" and "DtoH" in event["name"] and nbytes > 2**20:
            args = {"bytes": nbytes, "stream": event["args"].get("stream")}
            stop = event["ts"] + event["dur"]
            drawn.append(Drawn("copy", event["name"], event["ts"], stop, args))
    if save.uploaded is not None and save.staged_at is not None:
        stop = min(profiler_us(save.uploaded_at), end)
        drawn.append(Drawn("write", "write", profiler_us(save.staged_at), stop))
    marks = [("save called", save.called_at), ("call returns", save.returned_at)]
    marks = [(text, profiler_us(at)) for text, at in marks]
    write_trace(folder, head, name, RECIPES[name], drawn, begin, marks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks", help="results/ and traces/ go here"
    )
    parser.add_argument("--modes", type=lambda s: s.split(","), default=list(MODES))
    parser.add_argument("--storages", type=lambda s: s.split(","), default=["memory", "disk"])
    parser.add_argument("--steps", type=lambda s: s.split(","), default=["long", "short"])
    parser.add_argument("--saves", type=int, default=3, help="samples a row")
    parser.add_argument(
        "--memory", type=Path, default=Path("/dev/shm"), help="memory-backed storage"
    )
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="local disk")
    parser.add_argument("--small", action="store_true", help="a size for rehearsal on a CPU")
    parser.add_argument("--again", action="store_true", help="measure rows anew that are there")
    parser.add_argument("--trace", action="store_true", help="also write a trace of each mode")
    arguments = parser.parse_args()
    unknown = set(arguments.modes) - set(MODES)
    if unknown:
        parser.error(f"no mode {sorted(unknown)}; there are {list(MODES)}")
    device = start_rank()
    AGREEMENT.append(dist.new_group(backend="gloo"))
    try:
        run(arguments, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
