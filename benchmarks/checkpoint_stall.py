"""Measure what one checkpoint save costs a training loop, for every way of saving.

    torchrun --nproc-per-node=2 benchmarks/checkpoint_stall.py --out benchmarks
    python benchmarks/checkpoint_stall.py --small --out /tmp/rehearsal      # a minute on a CPU

One FSDP2 model with fused AdamW is trained all the time; ``--modes``, ``--storages`` and
``--steps`` choose what is measured. Every row is written when it is known and kept when the
command runs again (``--again`` measures it anew): a run that is cut off is resumed by its command.

How a number is made
--------------------
The loop keeps at most two steps queued, as one that logs the loss of the step before last does.
Nothing else synchronises the training thread between a sample's first and last step.

* A step's *interval* runs from the end of the step before it to its own end, both events on the
  compute stream (host clock on a CPU). It holds everything that delays a step: a held training
  thread, a waiting stream, slower kernels.
* ``step_s``: median interval of the steps before the save, when nothing else runs; the quartiles
  of these are in ``samples``.
* ``call_s``: host seconds from the call to its return.
* ``staged_s``: seconds until the copy in host memory is complete: for ``overlapped`` between the
  events around its copies on the device, otherwise on the host, from the call on.
* ``exposed_stall_s``: sum over the steps that end after the call, up to one step after the end of
  staging, of interval minus ``step_s``. A blocking call is part of it, since the compute stream
  runs empty. It can come out slightly negative: the noise of a median.
* ``uploaded_s``: host seconds from the end of staging until the checkpoint is complete in storage
  (for a save that does not stage, from the call); ``uploaded_idle_s`` the same with no training
  beside it.
* ``upload_slowdown``: mean interval of the steps that lie wholly between the end of staging and
  the end of the upload, over ``step_s``.
* ``bytes_written``: size of the files of one checkpoint, all ranks.
* ``pinned_bytes``: page-locked host memory of this rank, most at any time: PyTorch's own allocator
  plus memory registered with ``cudaHostRegister``.
* ``host_peak_bytes``: the largest resident set of this rank minus that before the mode began.
  Files in memory-backed storage are not in it.
* ``loaded_back_bitwise``: a separate save, called with ``QUEUED_S`` of work queued before its step,
  is loaded and compared with a clone that the compute stream made of the state right before the
  call. ``elements_differing`` is the share of elements that are not those of the clone.
* ``bound_s``: bytes of state of this rank over the pinned device-to-host rate measured in this run.

All values are rank 0's; medians over ``--saves`` saves, single values under ``samples``.
"""

import argparse
import gc
import importlib
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "recipes_source" / "checkpoint"
sys.path[:0] = [str(ROOT), str(RECIPES)]

from async_save import (  # noqa: E402
    AppState,
    AsyncCheckpoints,
    SampleCounter,
    leaves,
    snapshot,
    start_rank,
)
from default_stager import REUSE_CRASHES, StagedCheckpoints  # noqa: E402
from overlapped_stager import OverlappedStager  # noqa: E402
from pinned_staging import PinnedCheckpoints  # noqa: E402
from process_checkpointer import ProcessCheckpoints  # noqa: E402

from harness.recipe import code_sha256  # noqa: E402

BOUND_FROM = "bytes of state of a rank over the pinned device-to-host rate of this run"
QUEUED_S = 4.0  # more than a stager takes to lock its memory
QUEUED_MATRIX = 16384  # rows and columns of the products queued
QUIET_STEPS = 8  # before each save
SETTLED = 2  # of these, not counted: the queue fills


@dataclass(frozen=True)
class Size:
    """Widths in features, tokens a step (all ranks together), link test in bytes."""

    layers_per_rank: int
    widths: tuple[int, int]
    tokens: dict[str, int]
    link_bytes: int


# 16 layers of 8192 x 4096 with Adam in float32: 6.44 GB of state a rank.
FULL = Size(16, (8192, 4096), {"long": 65536, "short": 8192}, 2**30)
SMALL = Size(4, (256, 128), {"long": 4096, "short": 256}, 2**24)


# -- the training loop ------------------------------------------------------------------------


class HostEvent:
    """Stands in for a timing event on a CPU, where work is done when the call returns."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: "HostEvent") -> float:
        return (end.at - self.at) * 1e3


class Training:
    """The model under test and the times of its steps."""

    def __init__(self, size: Size, device: torch.device, scratch: Path) -> None:
        self.size, self.device, self.scratch = size, device, scratch
        self.app = self.build()
        self.ends: list = []
        self.tokens = "long"

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

    def event(self):
        return torch.cuda.Event(enable_timing=True) if self.device.type == "cuda" else HostEvent()

    def prepare(self, tokens: str) -> None:
        """Choose the step's length and run until it is steady."""
        count = self.size.tokens[tokens] // dist.get_world_size()
        torch.manual_seed(dist.get_rank())
        self.batch = torch.randn(count, self.size.widths[0], device=self.device)
        self.steps(5)
        self.synchronize()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def steps(self, count: int, mode: "Mode | None" = None) -> None:
        for _ in range(count):
            if len(self.ends) >= 2:
                self.ends[-2].synchronize()
            self.app.model(self.batch).square().mean().backward()
            with mode.update() if mode else nullcontext():
                self.app.optimizer.step()
            self.app.optimizer.zero_grad()
            self.app.step += 1
            if mode:
                mode.after_step()
            end = self.event()
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
        """Tie the device's clock to the host's; the only synchronisation of a sample."""
        self.ends.clear()
        self.synchronize()
        origin = self.event()
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
    stages_beside = False

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
    stages_beside = True

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

    stages_beside = True

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
            if self.checkpoint._get_async_calls_queue().get_num_unfinalized_calls() == 0:
                self.pending.set_result(None)
                self.pending = None

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
BLOCKING = ("torch_save", "dcp_save")


# -- one row ----------------------------------------------------------------------------------


class HostMemory:
    """Peak resident set and peak page-locked bytes of this process since the object was made."""

    def __init__(self) -> None:
        gc.collect()
        if torch.cuda.is_available() and hasattr(torch._C, "_host_emptyCache"):
            torch._C._host_emptyCache()  # what the mode before had pinned
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        self.resident_before = self.status("VmRSS")
        self.registered = self.most_registered = 0
        self.sizes: dict[int, int] = {}
        if torch.cuda.is_available():
            torch.cuda.reset_peak_host_memory_stats()
            self.runtime = torch.cuda.cudart()
            self.register, self.unregister = (
                self.runtime.cudaHostRegister,
                self.runtime.cudaHostUnregister,
            )
            self.runtime.cudaHostRegister = self.counting_register
            self.runtime.cudaHostUnregister = self.counting_unregister

    def counting_register(self, address: int, nbytes: int, flags: int):
        self.sizes[address] = nbytes
        self.most_registered = max(self.most_registered, sum(self.sizes.values()))
        return self.register(address, nbytes, flags)

    def counting_unregister(self, address: int):
        self.sizes.pop(address, None)
        return self.unregister(address)

    @staticmethod
    def status(name: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
        raise KeyError(name)

    def peaks(self) -> dict[str, int]:
        pinned = self.most_registered
        if torch.cuda.is_available():
            pinned += torch.cuda.host_memory_stats()["allocated_bytes.peak"]
        return {
            "pinned_bytes": pinned,
            "host_peak_bytes": self.status("VmHWM") - self.resident_before,
        }

    def close(self) -> None:
        if torch.cuda.is_available():
            self.runtime.cudaHostRegister = self.register
            self.runtime.cudaHostUnregister = self.unregister


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


def measure_save(training: Training, mode: Mode, directory: Path, steps_after: int) -> dict:
    """One sample of every time in a row; the upload is beside ``steps_after`` steps of training."""
    training.start_clock()
    training.steps(QUIET_STEPS, mode)
    save = mode.save(directory)
    training.steps(steps_after, mode)
    ends = training.step_ends()
    mode.finish(save)
    dist.barrier(group=AGREEMENT[0])
    intervals = [b - a for a, b in pairwise(ends)]
    quiet = intervals[SETTLED : QUIET_STEPS - 1]
    step_s = statistics.median(quiet)

    staged_at = save.staged_at if save.staged_at is not None else save.uploaded_at
    after = list(pairwise(ends))
    touched = [(a, b) for a, b in after if b > save.called_at and a < staged_at]
    first_free = after.index(touched[-1]) + 1 if touched else len(after)
    touched += after[first_free : first_free + 1]
    beside = [b - a for a, b in after[first_free + 1 :] if b < save.uploaded_at]
    return {
        "quiet": quiet,
        "step_s": step_s,
        "call_s": save.returned_at - save.called_at,
        "staged_s": save.staged_s or (staged_at - save.called_at if save.uploaded else None),
        "uploaded_s": save.uploaded_at - (staged_at if save.uploaded else save.called_at),
        "exposed_stall_s": sum(b - a - step_s for a, b in touched),
        "upload_slowdown": statistics.mean(beside) / step_s if beside else None,
        "steps_beside_upload": len(beside),
    }


def upload_when_idle(training: Training, mode: Mode, directory: Path) -> float:
    """Seconds from the call to the end of the upload while nothing is computed."""
    training.synchronize()
    save = mode.save(directory)
    mode.update()
    mode.finish(save)
    dist.barrier(group=AGREEMENT[0])
    return save.uploaded_at - (save.staged_at or save.called_at)


def judge(training: Training, mode: Mode, directory: Path) -> tuple[bool, float]:
    """Whether a save called with work queued holds its own step's bits; the share that differs."""
    training.steps(2, mode)
    training.queue_work(QUEUED_S)
    training.steps(1, mode)
    expected = snapshot(training.app)
    save = mode.save(directory)
    training.steps(3, mode)
    mode.finish(save)
    training.synchronize()
    loaded = mode.load(directory)
    differing = total = 0
    same = True
    for path, leaf in expected.items():
        if isinstance(leaf, torch.Tensor):
            found = loaded[path].to(leaf.device)
            differing += int((found != leaf).sum())
            total += leaf.numel()
            same &= torch.equal(found, leaf)
        else:
            same &= loaded.get(path) == leaf
    return agreed_max(float(not same)) == 0, differing / total


def measure(
    training: Training, name: str, mode: Mode, storage: Path, saves: int, memory: HostMemory
) -> dict:
    """All fields of a row but its key; ``storage`` is an empty directory of this row's."""
    if name == "none":
        training.start_clock()
        training.steps(QUIET_STEPS * 2)
        ends = training.step_ends()
        intervals = [b - a for a, b in pairwise(ends)][SETTLED:]
        return {"step_s": statistics.median(intervals), "samples": {"step_s": intervals}}

    blocking = name in BLOCKING
    samples: dict[str, list] = {}
    steps_after = 4
    for i in range(-1, saves):  # the first allocates and is kept apart
        directory = storage / f"save{i}"
        sample = measure_save(training, mode, directory, steps_after)
        written = size_on_disk(directory)
        remove(directory)
        if i < 0:
            first = sample
        else:
            for key, value in sample.items():
                samples.setdefault(key, []).append(value)
        if not blocking:  # train until the upload has ended; all ranks take as many steps
            needed = (sample["staged_s"] or 0) + 1.3 * sample["uploaded_s"]
            steps_after = 6 + int(agreed_max(needed / sample["step_s"]))
    idle = None
    if not blocking:
        idle = upload_when_idle(training, mode, storage / "idle")
        remove(storage / "idle")
    right, share = judge(training, mode, storage / "judged")
    remove(storage / "judged")
    known = {key: [v for v in values if v is not None] for key, values in samples.items()}
    return {
        **{key: statistics.median(v) if v else None for key, v in known.items() if key != "quiet"},
        "first_call_s": first["call_s"],
        "first_exposed_stall_s": first["exposed_stall_s"],
        "uploaded_idle_s": idle,
        "bytes_written": written,
        "loaded_back_bitwise": right,
        "elements_differing": share,
        **memory.peaks(),
        "samples": samples,
    }


# -- the whole run ----------------------------------------------------------------------------


def link_rates(device: torch.device, nbytes: int) -> dict[str, float]:
    """Pinned copy rates, byte/s: the median of five copies of ``nbytes`` each way."""
    if device.type != "cuda":
        return {}
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    rates = {}
    for name, target, source in (("d2h", host, there), ("h2d", there, host)):
        seconds = []
        for _ in range(6):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
        rates[f"pinned_{name}_bytes_per_s"] = nbytes / statistics.median(seconds[1:])
    return rates


def driver_version() -> str | None:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError):
        return None


def recipe_hash(mode: str) -> dict[str, str]:
    """Recipe and code hash of what ``mode`` measures; empty for what is no recipe's."""
    recipe = MODES[mode].recipe
    return {recipe: code_sha256(RECIPES / f"{recipe}.py")} if recipe else {}


class Results:
    """The result file: rows of unchanged recipes are kept, others replaced. Rank 0 writes."""

    def __init__(self, path: Path, header: dict) -> None:
        self.path, self.rank = path, dist.get_rank()
        old = json.loads(path.read_text()) if path.exists() else {}
        hashes = old.get("code_sha256", {})
        self.data = header | {"code_sha256": {}, "rows": [], "not_run": old.get("not_run", {})}
        for row in old.get("rows", ()):
            now = recipe_hash(row["name"])
            if all(hashes.get(recipe) == sha for recipe, sha in now.items()):
                self.data["rows"].append(row)
                self.data["code_sha256"] |= now

    @staticmethod
    def key(row: dict) -> tuple:
        return row["name"], row["storage"], row["step"]

    def has(self, *key: str) -> bool:
        return any(self.key(row) == key for row in self.data["rows"])

    def add(self, row: dict) -> None:
        rows = [old for old in self.data["rows"] if self.key(old) != self.key(row)]
        self.data["rows"] = rows + [row]
        self.data["code_sha256"] |= recipe_hash(row["name"])
        self.data["not_run"].pop(row["name"], None)
        self.write()

    def skip(self, name: str, reason: str) -> None:
        self.data["not_run"][name] = reason
        self.write()

    def write(self) -> None:
        if self.rank == 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.data, indent=1) + "\n")


def say(started: float, text: str) -> None:
    if dist.get_rank() == 0:
        print(f"[{time.perf_counter() - started:6.1f} s] {text}", flush=True)


def run(arguments: argparse.Namespace, device: torch.device) -> None:
    started = time.perf_counter()
    size = SMALL if arguments.small else FULL
    training = Training(size, device, arguments.memory)
    training.prepare("long")
    state = [x for x in leaves(training.app.state_dict()).values() if isinstance(x, torch.Tensor)]
    state_bytes = sum(x.nbytes for x in state)
    link = link_rates(device, size.link_bytes)
    bound_s = state_bytes / link["pinned_d2h_bytes_per_s"] if link else None
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {platform.machine()}"
    short_name = name.split()[-1].lower() if device.type == "cuda" else "cpu"
    label = f"{short_name}-x{dist.get_world_size()}"
    header = {
        "benchmark": "checkpoint_stall",
        "torch": torch.__version__,
        "device": name,
        "driver": driver_version(),
        "ranks": dist.get_world_size(),
        "date": date.today().isoformat(),
        "workload": {
            "model": "{} linear layers a rank, {} x {}".format(size.layers_per_rank, *size.widths),
            "precision": "float32 weights and Adam state, bfloat16 compute",
            "optimizer": "AdamW, fused",
            "sharding": "fully_shard, one group a layer",
            "tensors": len(state),
            "state_bytes_per_rank": state_bytes,
            "tokens_per_step": size.tokens,
            "steps_queued": 2,
        },
        "link": link,
    }
    results = Results(arguments.out / "results" / f"checkpoint_stall.{label}.json", header)
    say(started, f"{state_bytes / 1e9:.2f} GB of state a rank, link {link}")
    for mode_name in arguments.modes:
        wanted = [
            (storage, step)
            for storage in arguments.storages
            for step in arguments.steps
            if arguments.again or not results.has(mode_name, storage, step)
        ]
        if not wanted:
            continue
        memory = HostMemory()
        try:
            mode = MODES[mode_name](training)
        except (ImportError, PackageNotFoundError) as error:
            results.skip(mode_name, f"{type(error).__name__}: {error}")
            say(started, f"{mode_name}: not run, {error}")
            continue
        try:
            for storage, step in wanted:
                training.prepare(step)
                directory = shared_directory(
                    arguments.memory if storage == "memory" else arguments.disk
                )
                try:
                    row = measure(training, mode_name, mode, directory, arguments.saves, memory)
                finally:
                    remove(directory)
                key = {"name": mode_name, "storage": storage, "step": step}
                bound = {"bound_s": bound_s, "bound_from": BOUND_FROM} if bound_s else {}
                results.add({**key, **bound, "note": mode.note, **row})
                shown = {k: v for k, v in row.items() if k != "samples"}
                say(started, f"{mode_name}, {storage}, {step}: {json.dumps(shown)}")
            if arguments.trace and mode_name != "none":
                training.prepare("long")
                directory = shared_directory(arguments.memory)
                path = arguments.out / "traces" / f"checkpoint_stall.{mode_name}.{label}.json"
                trace(training, mode, mode_name, directory, path, header)
                remove(directory)
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
    training: Training, mode: Mode, name: str, directory: Path, path: Path, header: dict
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
    to_us = time.time_ns() / 1e3 - time.perf_counter() * 1e6  # host clock to the profiler's
    begin, end = (at * 1e6 + to_us for at in (ends[2], ends[-1]))
    if on_cuda:
        with tempfile.TemporaryDirectory() as temporary:
            profile.export_chrome_trace(f"{temporary}/trace.json")
            raw = json.loads(Path(temporary, "trace.json").read_text())
        base = raw.get("baseTimeNanoseconds", 0) / 1e3
        events = [e | {"ts": e["ts"] + base} for e in raw["traceEvents"] if e.get("ph") == "X"]
    else:
        events = []
        for a, b in pairwise(ends):
            step = {"cat": "kernel", "name": "step", "ts": a * 1e6 + to_us, "dur": (b - a) * 1e6}
            events.append(step)
    events = sorted((e for e in events if begin <= e["ts"] < end), key=lambda e: e["ts"])
    blocks: list[list] = []  # [label, start, end]
    for event in events:
        if event.get("cat") != "kernel" or event["name"].startswith("nccl"):
            continue
        label = "optimizer" if "adam" in event["name"].lower() else "forward, backward"
        start, stop = event["ts"], event["ts"] + event["dur"]
        if blocks and blocks[-1][0] == label and start - blocks[-1][2] < GAP_US:
            blocks[-1][2] = max(stop, blocks[-1][2])
        else:
            blocks.append([label, start, stop])
    lanes = [("compute", *block, {}) for block in blocks]
    lanes += [
        ("compute", "stall", a[2], b[1], {"stall": True})
        for a, b in pairwise(blocks)
        if b[1] - a[2] > STALL_US
    ]
    lanes += [
        ("copy", event["name"], event["ts"], event["ts"] + event["dur"], event["args"])
        for event in events
        if event.get("cat") == "gpu_memcpy"
        and "DtoH" in event["name"]
        and event["args"].get("bytes", 0) > 2**20
    ]
    if save.uploaded is not None and (staged_at := save.staged_at) is not None:
        start, stop = staged_at * 1e6 + to_us, save.uploaded_at * 1e6 + to_us
        lanes.append(("write", "write", start, min(stop, end), {"ends_after_window": stop > end}))
    tids = {"compute": 1, "copy": 2, "write": 3}
    drawn = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": lane}}
        for lane, tid in tids.items()
    ]
    for lane, label, start, stop, args in lanes:
        if stop > start:
            times = {"ts": round(start - begin, 1), "dur": round(stop - start, 1)}
            kept = {k: v for k, v in args.items() if k in ("bytes", "stream", "stall")}
            place = {"pid": 0, "tid": tids[lane]}
            drawn.append(
                {"ph": "X", "name": label, **place, **times, "args": {"lane": lane} | kept}
            )
    for label, at in (("save called", save.called_at), ("call returns", save.returned_at)):
        ts = round(at * 1e6 + to_us - begin, 1)
        mark = {"ph": "i", "name": label, "s": "g", "pid": 0, "tid": 1, "ts": ts}
        drawn.append(mark | {"args": {"mark": True}})
    kept = ("benchmark", "device", "ranks", "torch", "date")
    other = {"mode": name, "rank": 0} | {key: header[key] for key in kept}
    other["code_sha256"] = recipe_hash(name)
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        data = {"displayTimeUnit": "ms", "otherData": other, "traceEvents": drawn}
        path.write_text(json.dumps(data) + "\n")


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
