"""Measure how much of a sharded model's communication each schedule hides behind compute.

    torchrun --nproc-per-node=2 benchmarks/fsdp_overlap.py --out benchmarks
    torchrun --nproc-per-node=2 benchmarks/fsdp_overlap.py --small --out /tmp/rehearsal   # on a CPU

``--modes``, ``--tokens`` and ``--pairs`` choose what is measured, in the order given. Every row is
written when it is known and kept when the command runs again, until ``--again`` or more ``--pairs``
ask for it anew: a run that is cut off is resumed by its command, and a mode without a row that it
was cut off in is noted and left out.

How a number is made
--------------------
All modes train the same units in bfloat16 (weights, gradients and the state of fused AdamW: no
casts in any of them) on the same random batch; all ranks have the same batch and seed, so the mean
of their gradients is each rank's own. ``no_communication``, the reference, runs the same kernels:
it keeps whole weights on the device, updates only the rows that its rank would own, and sends
nothing. A mode whose loss is not that of the others has no row.

**Alone.** A mode is built and takes a few steps at each size with nothing else on the device. From
them come its loss and its memory:

* ``peak_allocated_bytes``, ``peak_reserved_bytes``: what the mode added in PyTorch's allocator.
  ``peak_device_bytes``: what it added to the memory in use on the device (``mem_get_info``), read
  after the steps, when the allocator still holds its peak: with symmetric memory and communicators.

**In windows.** A GPU at its power limit changes its clocks: on H200s, steps took longer by a tenth
for a while, a second after the load began, and a warm device is slower than one that has rested. So
a step is compared only with steps of the same minute, on a device that never rests. The reference
is built beside the mode, so the device must hold both; they share the allocator and nothing else.
Then one size is trained in windows, the queue never empty: the reference, the mode, the mode's
bound, the mode, the reference, and again (``ORDER``). Forth and back, a drift that is linear in
time cancels in each such turn. The first windows (``WARM_UP_WINDOWS``) are not counted: kernels
load, the allocator gets its memory, the clocks come down. All ranks begin a window together. Its
first steps, half as many as those that are timed, are not timed: the queue fills and the clocks
follow the load. A window's time is the mean of the others, on the slowest rank, whose pace the
ranks of a synchronous job have, whether they communicate or not; ``samples`` has the times of all
ranks, in order.

* ``step_s``: median of the mode's windows. That of ``no_communication``: of all windows that it has
  beside modes at that size. ``optimizer_s``: the part of it from the end of backward, reductions
  included.
* ``efficiency``: step of the reference over this step, each window of the mode with the window of
  the reference next to it; the median of these ``pairs``. ``efficiency_spread``: the distance of
  their quartiles.
* ``bound_s``: what a schedule of the same work can reach at best. In its windows the reference
  trains with the transfers of the mode's schedule beside it: in its forward pass all gathers of
  forward but the first, in its backward pass the gathers of backward and all reduce-scatters but
  the last. It waits for none of them; each may begin when the unit begins that it would be hidden
  behind. A phase lasts as long as the slower of its sides, both at the rates that they have beside
  each other. The optimizer follows. To these steps comes what nothing can hide: the gather of the
  first parameter and the reduce-scatter of the last, measured alone (neither for
  ``update_in_order``, which hides them). The transfers are as many as the row's schedule has, by
  its transport, one a parameter.
* ``eta``: bound over step, each window of the bound with the mode's two around it; the median. Both
  are measured: it can come out a little above 1.

**Profiled**, two steps after a rest, the second judged, and the reference likewise right before:

* ``hidden_share``: the share of the time in which a collective (or a copy from a peer) runs and the
  compute stream runs a kernel too.
* ``gemm_slowdown``: the time of all matrix products over that of the same products in the
  reference; kernels belong to the operator that launched them.

All values but the windows' are rank 0's.
"""

import argparse
import contextlib
import gc
import importlib
import json
import statistics
import sys
import time
import traceback
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes_source" / "sharding")]

import copy_engine_gather as copy_engine  # noqa: E402
import copy_engine_reduce  # noqa: E402
import fsdp2_settings  # noqa: E402
import prefetch_schedule  # noqa: E402
import stream_context  # noqa: E402
import update_in_order  # noqa: E402
from sharded_parameter import all_gather, reduce_scatter  # noqa: E402

from benchmarks.measuring import (  # noqa: E402
    Drawn,
    Results,
    blocks,
    header,
    profiled_events,
    say,
    seconds_of,
    synchronize,
    timing_event,
    write_trace,
)

LEARNING_RATE = 3e-6
WARM_UP = 2  # steps alone before those that are timed; modes are compared by the loss behind them
LOSS_TOLERANCE = 0.05  # of the loss: a peer takes a first step with gradients of zero
ORDER = ("reference", "mode", "bound", "mode", "reference")
WARM_UP_WINDOWS = ORDER[:3]
QUEUED = 2  # steps
COLLECTIVE_TIMEOUT = timedelta(seconds=90)


@dataclass(frozen=True)
class Size:
    """``width``, ``hidden`` in features; ``tokens`` a rank and step, ``steps`` timed of each."""

    units: int
    width: int
    hidden: int
    tokens: tuple[int, ...]
    steps: tuple[int, ...]
    trace_tokens: int


FULL = Size(8, 8192, 14336, (1024, 2048, 4096, 8192, 16384), (12, 8, 5, 3, 2), 2048)
SETTING_TOKENS = (1024, 4096)
SMALL = Size(4, 64, 96, (32, 64), (2, 2), 64)


PARAMETERS = 4  # of a unit


# -- the model --------------------------------------------------------------------------------


class Unit(nn.Module):
    """Two residual multilayer perceptrons: four matrices of ``width * hidden`` parameters."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(hidden, width, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.relu(up(x)))
        return x


class Trainer:
    """A mode: the model and how it is sharded. A subclass's ``shard`` sets model and optimizer."""

    recipes: tuple[str, ...] = ()
    note: str | None = None
    transport = "nccl"
    trace_only = False
    hides_ends = False  # the first gather and the last reduce-scatter, behind the optimizer
    tokens: tuple[int, ...] | None = None  # only these sizes of FULL; None: all
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(self, size: Size, device: torch.device) -> None:
        self.size, self.device = size, device
        torch.manual_seed(0)
        self.shard(self.units())

    def units(self) -> Iterator[Unit]:
        """Units with random weights, made one by one, so that one unit is unsharded at a time."""
        for _ in range(self.size.units):
            with self.device:
                unit = Unit(self.size.width, self.size.hidden)
            yield unit.bfloat16()

    @staticmethod
    def gathers(units: int) -> tuple[int, int]:
        """How many units are gathered in forward and in backward."""
        return units, units

    def shard(self, units: Iterator[Unit]) -> None:
        raise NotImplementedError

    def adamw(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """The loss, a scalar."""
        return self.model(batch).square().mean()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer]

    def close(self) -> None:
        """Give back memory that cycles through autograd may hold, and communicators."""
        states = [state for one in self.optimizers() for state in one.state.values()]
        tensors = [*self.model.parameters(), *(x for state in states for x in state.values())]
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.untyped_storage().resizable():
                local.untyped_storage().resize_(0)


class NoCommunication(Trainer):
    note = "whole weights stay on the device; each rank updates its own rows; nothing is sent"

    def shard(self, units: Iterator[Unit]) -> None:
        self.model = nn.Sequential(*units)
        self.whole = list(self.model.parameters())
        self.own = [nn.Parameter(self.rows(weight.data)) for weight in self.whole]
        self.optimizer = self.adamw(self.own)

    @staticmethod
    def rows(weight: torch.Tensor) -> torch.Tensor:
        return weight.chunk(dist.get_world_size())[dist.get_rank()]

    def update(self) -> None:
        for weight, own in zip(self.whole, self.own, strict=True):
            own.grad = self.rows(weight.grad)
        super().update()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        for weight in self.whole:
            weight.grad = None


class Fsdp2(Trainer):
    note = "fully_shard on each unit and the root, settings as they come"

    def shard(self, units: Iterator[Unit]) -> None:
        self.model = nn.Sequential(*(fully_shard(unit) for unit in units))
        fully_shard(self.model)
        self.optimizer = self.adamw(self.model.parameters())
        self.tune(list(self.model))

    def tune(self, units: list[nn.Module]) -> None: ...


class Fsdp2Kept(Fsdp2):
    recipes = ("fsdp2_settings",)
    note = "fsdp2, its last two units kept from forward to backward"
    tokens = SETTING_TOKENS

    @staticmethod
    def gathers(units: int) -> tuple[int, int]:
        return units, units - 2

    def tune(self, units: list[nn.Module]) -> None:
        fsdp2_settings.keep(units[-2:])


class Fsdp2Prefetch(Fsdp2):
    recipes = ("fsdp2_settings",)
    note = "fsdp2, two units prefetched by lists in forward and in backward"
    tokens = SETTING_TOKENS

    def tune(self, units: list[nn.Module]) -> None:
        fsdp2_settings.prefetch(units, 2)


class Fsdp2ReduceGroup(Fsdp2):
    recipes = ("fsdp2_settings",)
    note = "fsdp2, reduce-scatters in a group of their own"
    tokens = SETTING_TOKENS

    def tune(self, units: list[nn.Module]) -> None:
        fsdp2_settings.reduce_in_own_group(units)


class Fsdp2Tuned(Fsdp2Kept):
    note = "fsdp2, two units kept, two prefetched, reduce-scatters in a group of their own"
    tokens = None

    def tune(self, units: list[nn.Module]) -> None:
        fsdp2_settings.tune(units)


class Fsdp2CopyEngine(Fsdp2):
    """``fsdp2`` and the one line of the recipe."""

    recipes = ("copy_engine_gather",)
    note = "fsdp2, its gathers by copy engines"
    transport = "copy_engine"

    def tune(self, units: list[nn.Module]) -> None:
        self.gather_objects = copy_engine.gather_by_copy_engines(self.model, self.optimizer)
        if not self.gather_objects:
            raise RuntimeError("the ranks cannot read each other's memory")


class Fsdp2CopyEngineReduce(Fsdp2CopyEngine):
    recipes = ("copy_engine_gather", "copy_engine_reduce")
    transport = "copy_engine_both"
    note = "fsdp2, its gathers and reduce-scatters by copy engines"
    tokens = SETTING_TOKENS

    def tune(self, units: list[nn.Module]) -> None:
        super().tune(units)
        copy_engine_reduce.reduce_by_copy_engines(self.model, self.gather_objects)


class DelayedRelease(Trainer):
    recipes = ("sharded_parameter", "stream_context")
    note = "gathers on a stream of their own, released late; reduce-scatters on the default stream"

    def shard(self, units: Iterator[Unit]) -> None:
        self.model = nn.Sequential(*units)
        mesh = dist.init_device_mesh(self.device.type, (dist.get_world_size(),))
        self.context = self.build_context(mesh)
        self.optimizer = self.adamw(self.model.parameters())

    def build_context(self, mesh: DeviceMesh) -> stream_context.FsdpContext:
        return stream_context.FsdpContext(self.model, list(self.model), mesh)

    def backward(self, loss: torch.Tensor) -> None:
        self.context.backward(loss)


class Sync(DelayedRelease):
    """``delayed_release`` with its gathers on the compute stream: what a timeline starts from."""

    trace_only = True

    def build_context(self, mesh: DeviceMesh) -> stream_context.FsdpContext:
        context = super().build_context(mesh)
        context.gather_stream = context.streams.current_stream()
        return context


class Prefetch(DelayedRelease):
    recipes = (*DelayedRelease.recipes, "prefetch_schedule")
    buffers = 3
    note = "gathers in a static order ahead of their unit; reduce-scatters beside backward"

    @classmethod
    def gathers(cls, units: int) -> tuple[int, int]:
        return units, units - cls.buffers

    def build_context(self, mesh: DeviceMesh) -> stream_context.FsdpContext:
        return prefetch_schedule.PrefetchContext(
            self.model, list(self.model), mesh, buffers=self.buffers
        )


class PrefetchCopyEngine(Prefetch):
    recipes = (*Prefetch.recipes, "copy_engine_gather", "copy_engine_reduce")
    note = "prefetch, its gathers and reduce-scatters by copy engines"
    transport = "copy_engine_both"

    def shard(self, units: Iterator[Unit]) -> None:
        super().shard(units)
        self.optimizer.register_step_pre_hook(lambda *_: self.memory.barrier())
        self.optimizer.register_step_post_hook(lambda *_: self.memory.barrier())

    def build_context(self, mesh: DeviceMesh) -> stream_context.FsdpContext:
        return prefetch_schedule.PrefetchContext(
            self.model, list(self.model), mesh, **self.copy_engine_options(mesh)
        )

    def copy_engine_options(self, mesh: DeviceMesh) -> dict:
        group = mesh.get_group()
        self.memory = copy_engine.PeerMemory(group, self.device)
        push = copy_engine_reduce.PushReduceScatter(
            copy_engine.PeerMemory(group, self.device),
            self.size.width * self.size.hidden // mesh.size(),
            torch.bfloat16,
        )
        return {
            "buffers": self.buffers,
            "gather": self.memory.gather,
            "reduce_scatter": push,
            "empty": self.memory.empty,
        }


class PeerUpdateContext(update_in_order.UpdateContext):
    """With gathers by peer copies: none of a unit before all ranks have updated it.

    No rank updates a unit before its peers have copied it: their pushes of its gradients, for
    which the update waits, come behind those copies.
    """

    memory: copy_engine.PeerMemory

    def update(self, unit: stream_context.Unit) -> None:
        super().update(unit)
        with self.streams.stream(self.gather_stream):
            self.memory.barrier()


class UpdateInOrder(PrefetchCopyEngine):
    recipes = (*PrefetchCopyEngine.recipes, "update_in_order")
    note = "prefetch_copy_engine, its units updated one by one in the order of the next forward"
    hides_ends = True

    @classmethod
    def gathers(cls, units: int) -> tuple[int, int]:
        return units - cls.buffers, units - cls.buffers

    def shard(self, units: Iterator[Unit]) -> None:
        self.model = nn.Sequential(*units)
        mesh = dist.init_device_mesh(self.device.type, (dist.get_world_size(),))
        options = self.copy_engine_options(mesh)
        self.context = PeerUpdateContext(self.model, list(self.model), mesh, **options)
        self.context.memory = self.memory
        self.context.optimize(self.adamw)

    def update(self) -> None:
        self.context.step()

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return list(self.context.optimizers.values())


class MegatronFsdp(Trainer):
    """The megatron-fsdp package: ``fully_shard_model`` and ``fully_shard_optimizer``."""

    def shard(self, units: Iterator[Unit]) -> None:
        package = importlib.import_module("megatron_fsdp")
        self.note = (
            f"megatron-fsdp {version('megatron-fsdp')}, a communicator each for gathers and "
            f"reduce-scatters"
        )
        self.group = dist.new_group()
        self.model = package.fully_shard_model(
            module=nn.Sequential(*units),
            fsdp_unit_modules=[Unit],
            fsdp_group_ag=self.group,
            device=self.device,
            mixed_precision_policy=package.MixedPrecisionPolicy(main_params_dtype=None),
        )
        self.optimizer = package.fully_shard_optimizer(self.adamw(self.model.parameters()))

    def close(self) -> None:
        super().close()
        dist.destroy_process_group(self.group)


class MegatronFsdpExperimental(Trainer):
    """The same package's rewrite, ``megatron_fsdp.experimental``."""

    def shard(self, units: Iterator[Unit]) -> None:
        package = importlib.import_module("megatron_fsdp.experimental")
        policy = importlib.import_module("megatron_fsdp").MixedPrecisionPolicy
        precision = policy(main_params_dtype=torch.bfloat16)
        self.note = f"megatron-fsdp {version('megatron-fsdp')}, megatron_fsdp.experimental"
        mesh = dist.init_device_mesh(self.device.type, (dist.get_world_size(),))
        flat = [package.Flat()]
        placements = package.Placements([0], flat, flat, flat)
        self.model = nn.Sequential()
        for unit in units:
            package.fully_shard(unit, mesh, placements, precision)
            self.model.append(unit)
        package.fully_shard(self.model, mesh, placements, precision)
        self.optimizer = self.adamw(self.model.parameters())
        package.fully_shard_optimizer(self.optimizer)


REFERENCE = "no_communication"
MODES: dict[str, type[Trainer]] = {
    REFERENCE: NoCommunication,
    "fsdp2": Fsdp2,
    "fsdp2_kept_units": Fsdp2Kept,
    "fsdp2_prefetch_lists": Fsdp2Prefetch,
    "fsdp2_reduce_group": Fsdp2ReduceGroup,
    "fsdp2_tuned": Fsdp2Tuned,
    "fsdp2_copy_engine": Fsdp2CopyEngine,
    "fsdp2_copy_engine_reduce": Fsdp2CopyEngineReduce,
    "sync": Sync,
    "delayed_release": DelayedRelease,
    "prefetch": Prefetch,
    "prefetch_copy_engine": PrefetchCopyEngine,
    "update_in_order": UpdateInOrder,
    "megatron-fsdp": MegatronFsdp,
    "megatron-fsdp-experimental": MegatronFsdpExperimental,
}


# -- steps and their times --------------------------------------------------------------------


@dataclass
class Steps:
    """Seconds of each timed step and of its part after backward, and the first one's loss."""

    step_s: list[float]
    optimizer_s: list[float]
    loss: float


def random_batch(size: Size, tokens: int, device: torch.device) -> torch.Tensor:
    """The same on every rank, of dtype bfloat16 and shape ``(tokens, width)``."""
    torch.manual_seed(1)
    batch = torch.randn(tokens, size.width, device=device, dtype=torch.bfloat16)
    return batch.requires_grad_()  # as the output of an embedding would


@dataclass
class Step:
    """Events on the compute stream behind each phase of a step; the loss, a scalar on the device.

    On a GPU the step is queued, with at most ``QUEUED`` others.
    """

    forward_end: torch.cuda.Event
    backward_end: torch.cuda.Event
    end: torch.cuda.Event
    loss: torch.Tensor


def take_step(trainer: "Trainer | BoundTrainer", batch: torch.Tensor, queued: deque[Step]) -> Step:
    """Train for one step; wait for the oldest of ``queued`` first, if there are ``QUEUED``."""
    if len(queued) == QUEUED:
        queued.popleft().end.synchronize()
    forward_end, backward_end, end = (timing_event(batch.device) for _ in range(3))
    loss = trainer.forward(batch)
    forward_end.record()
    trainer.backward(loss)
    backward_end.record()
    trainer.update()
    batch.grad = None
    end.record()
    queued.append(Step(forward_end, backward_end, end, loss.detach()))
    return queued[-1]


def seconds_between(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return start.elapsed_time(end) / 1e3


def take_steps(trainer: Trainer, batch: torch.Tensor, count: int) -> Steps:
    """Train for ``WARM_UP`` steps and ``count`` timed ones."""
    queued: deque[Step] = deque()
    steps = [take_step(trainer, batch, queued) for _ in range(WARM_UP + count)]
    synchronize(batch.device)
    return Steps(
        [seconds_between(a.end, b.end) for a, b in pairwise(steps[WARM_UP - 1 :])],
        [seconds_between(step.backward_end, step.end) for step in steps[WARM_UP:]],
        float(steps[WARM_UP].loss),
    )


@dataclass
class Window:
    """Of the timed steps of a window, means in seconds; ``clock_mhz`` of the SMs, 0 on a CPU."""

    step_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    clock_mhz: float


def begin_together(device: torch.device) -> None:
    """The work queued on this stream from here on begins when all ranks have come here."""
    dist.all_reduce(torch.zeros(1, device=device))


def take_windows(
    trainers: "dict[str, Trainer | BoundTrainer]",
    order: Iterable[str],
    batch: torch.Tensor,
    count: int,
) -> list[Window]:
    """Train in windows of one of ``trainers`` after another, in ``order``, without a rest between.

    Args:
        count: timed steps of a window; half as many, at least one, come before them.
    """
    queued: deque[Step] = deque()
    lead_in = max(1, count // 2)
    taken: list[tuple[list[Step], list[int]]] = []
    for name in order:
        begin_together(batch.device)
        steps, clocks = [], []
        for _ in range(lead_in + count):
            steps.append(take_step(trainers[name], batch, queued))
            clocks.append(torch.cuda.clock_rate() if batch.is_cuda else 0)
        taken.append((steps[lead_in - 1 :], clocks[lead_in:]))
    synchronize(batch.device)
    return [window_of(steps, clocks) for steps, clocks in taken]


def window_of(steps: list[Step], clocks: list[int]) -> Window:
    """The means of all ``steps`` but the first, whose end is where the time begins."""
    pairs = list(pairwise(steps))
    return Window(
        seconds_between(steps[0].end, steps[-1].end) / len(pairs),
        statistics.mean(seconds_between(a.end, b.forward_end) for a, b in pairs),
        statistics.mean(seconds_between(b.forward_end, b.backward_end) for _, b in pairs),
        statistics.mean(seconds_between(b.backward_end, b.end) for _, b in pairs),
        statistics.median(clocks),
    )


@dataclass(frozen=True)
class Pairs:
    """Seconds a step of windows taken in ``ORDER``, each by rank, in order of time.

    There are as many of ``mode`` as of ``reference``, and half as many of ``bound``.
    """

    reference: list[list[float]]
    mode: list[list[float]]
    bound: list[list[float]]

    def efficiencies(self) -> list[float]:
        """Of each of ``mode``'s windows, with the window of ``reference`` next to it."""
        pairs = zip(self.reference, self.mode, strict=True)
        return [max(reference) / max(mode) for reference, mode in pairs]

    def etas(self, ends_s: float) -> list[float]:
        """Of each of ``bound``'s windows, with the two of ``mode`` around it.

        Args:
            ends_s: what is to be added to the bound's time.
        """
        modes = list(map(max, self.mode))
        around = zip(self.bound, modes[::2], modes[1::2], strict=True)
        return [(max(bound) + ends_s) / statistics.mean(two) for bound, *two in around]


def of_all_ranks(values: list[float]) -> list[list[float]]:
    """Each of ``values`` with those of the other ranks, by rank."""
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, values)
    return [list(of_ranks) for of_ranks in zip(*gathered, strict=True)]


class Memory:
    """What a mode adds to the memory that is in use when it begins; bytes.

    Memory that a peer has mapped goes back when the peer has released it as well.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.release()
        dist.barrier()
        self.before = self.now()

    def release(self) -> None:
        """Give back what is free; peaks count from here."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def now(self) -> dict[str, int]:
        if self.device.type != "cuda":
            return {}
        free, total = torch.cuda.mem_get_info()
        return {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
            "peak_device_bytes": total - free,
        }

    def peaks(self) -> dict[str, int]:
        return {name: value - self.before[name] for name, value in self.now().items()}


# -- the bound --------------------------------------------------------------------------------


class Transfers:
    """A parameter's collectives by themselves, on streams and communicators of their own."""

    def __init__(self, size: Size, device: torch.device) -> None:
        self.device, ranks = device, dist.get_world_size()
        module = torch.get_device_module(device)
        self.gather_stream, self.reduce_stream = module.Stream(), module.Stream()
        self.reduce_group = dist.new_group()
        numel = size.width * size.hidden
        with device:
            self.shard = torch.randn(numel // ranks, dtype=torch.bfloat16)
            self.whole = torch.empty(numel, dtype=torch.bfloat16)
            self.gradient = torch.randn(numel, dtype=torch.bfloat16)
            self.reduced = torch.empty(numel // ranks, dtype=torch.bfloat16)

    def gather(self) -> None:
        all_gather(self.whole, self.shard)

    def reduce_scatter(self) -> None:
        reduce_scatter(self.reduced, self.gradient, group=self.reduce_group)

    def beside(
        self, compute: Callable[[], object], gathers: int, reductions: int, starts: list
    ) -> None:
        """Queue ``compute`` and units' transfers beside it; the current stream waits for all.

        Args:
            starts: to which ``compute`` adds an event where each unit begins. The first gather may
                begin with the first unit, the first reduce-scatter with the second.
        """
        module = torch.get_device_module(self.device)
        current = module.current_stream()
        starts.clear()
        compute()
        for stream, transfer, units in (
            (self.gather_stream, self.gather, range(gathers)),
            (self.reduce_stream, self.reduce_scatter, range(1, reductions + 1)),
        ):
            with module.stream(stream):
                for unit in units:
                    stream.wait_event(starts[unit])
                    for _ in range(PARAMETERS):
                        transfer()
            current.wait_stream(stream)

    def ends_s(self) -> dict[str, float]:
        """Seconds of a parameter's gather and of its reduce-scatter with nothing beside them."""
        return {
            name: statistics.median(seconds_of(transfer, self.device, 5))
            for name, transfer in (
                ("first_gather_s", self.gather),
                ("last_reduce_scatter_s", self.reduce_scatter),
            )
        }

    def close(self) -> None:
        dist.destroy_process_group(self.reduce_group)


class CopyEngineTransfers(Transfers):
    """Gathers by copy engines; reduce-scatters as before."""

    def __init__(self, size: Size, device: torch.device) -> None:
        super().__init__(size, device)
        self.memory = copy_engine.PeerMemory(dist.group.WORLD, device)
        shard = self.memory.empty(self.shard.shape, dtype=self.shard.dtype)
        self.shard = shard.copy_(self.shard)

    def gather(self) -> None:
        self.memory.gather(self.whole, self.shard)


class CopyEngineBothTransfers(CopyEngineTransfers):
    """Gathers and reduce-scatters by copy engines."""

    def __init__(self, size: Size, device: torch.device) -> None:
        super().__init__(size, device)
        self.push = copy_engine_reduce.PushReduceScatter(
            copy_engine.PeerMemory(dist.group.WORLD, device), self.reduced.numel(), torch.bfloat16
        )

    def reduce_scatter(self) -> None:
        self.push(self.reduced, self.gradient)


TRANSFERS: dict[str, type[Transfers]] = {
    "nccl": Transfers,
    "copy_engine": CopyEngineTransfers,
    "copy_engine_both": CopyEngineBothTransfers,
}


class BoundTrainer:
    """The reference with a schedule's transfers beside it, for which it does not wait.

    Args:
        gathers: units gathered in forward and in backward.
    """

    def __init__(
        self, reference: NoCommunication, transfers: Transfers, gathers: tuple[int, int]
    ) -> None:
        self.reference, self.transfers, self.gathers = reference, transfers, gathers
        self.streams = torch.get_device_module(reference.device)
        self.starts: list = []  # an event where each unit begins, in forward or in backward
        self.hooks: list = []

    def start_unit(self, *_) -> None:
        self.starts.append(self.streams.Event())
        self.starts[-1].record(self.streams.current_stream())

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for unit in self.reference.model:
            self.hooks.append(unit.register_forward_pre_hook(self.start_unit))
            self.hooks.append(unit.register_full_backward_pre_hook(self.start_unit))
        losses: list[torch.Tensor] = []

        def compute() -> None:
            losses.append(self.reference.forward(batch))

        self.transfers.beside(compute, max(0, self.gathers[0] - 1), 0, self.starts)
        return losses[0]

    def backward(self, loss: torch.Tensor) -> None:
        compute = partial(self.reference.backward, loss)
        reductions = len(self.reference.model) - 1
        self.transfers.beside(compute, self.gathers[1], reductions, self.starts)
        while self.hooks:
            self.hooks.pop().remove()

    def update(self) -> None:
        self.reference.update()


# -- a profiled step --------------------------------------------------------------------------


Intervals = list[tuple[float, float]]
PHASES = ("forward", "backward", "optimizer")
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")
COPY_BYTES = 2**20  # a copy of fewer bytes beside the compute stream is bookkeeping
BLOCK_GAP_US = 20.0
STALL_US = 100.0


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """The same stretch of time as disjoint intervals in order."""
    joined: Intervals = []
    for start, stop in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def length(intervals: Intervals) -> float:
    return sum(stop - start for start, stop in intervals)


def overlap(a: Intervals, b: Intervals) -> float:
    """Length of the time in both; both as :func:`union` gives them."""
    both, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        both += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return both


def lies_in(at: float, intervals: Intervals) -> bool:
    """Whether ``at`` lies in one of ``intervals``, which are in order and disjoint."""
    place = bisect_right(intervals, (at, float("inf"))) - 1
    return place >= 0 and at < intervals[place][1]


class Profiled:
    """What the device did for one step: by launching operator, phase and stream."""

    def __init__(self, trainer: Trainer, batch: torch.Tensor) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if trainer.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profile:
            for step in range(2):
                with torch.profiler.record_function(f"step {step} forward"):
                    loss = trainer.forward(batch)
                with torch.profiler.record_function(f"step {step} backward"):
                    trainer.backward(loss)
                with torch.profiler.record_function(f"step {step} optimizer"):
                    trainer.update()
                batch.grad = None
            synchronize(trainer.device)
        self.digest(profiled_events(profile))

    def digest(self, events: list[dict]) -> None:
        self.read_host(events)
        self.device_events = list(self.of_this_step(events))
        on_stream: dict[int, float] = {}
        for event in self.device_events:
            if event["product"]:
                stream = event["args"]["stream"]
                on_stream[stream] = on_stream.get(stream, 0.0) + event["dur"] / 1e6
        self.compute_stream = max(on_stream, key=on_stream.__getitem__, default=None)
        self.products_s = sum(on_stream.values())
        self.gather_streams = {  # forward reduces nothing
            event["args"]["stream"]
            for event in self.device_events
            if event["phase"] == "forward" and self.is_transfer(event)
        }

    def read_host(self, events: list[dict]) -> None:
        """The phases of the second step, its products' operators and all launches."""
        self.phases: dict[str, tuple[float, float]] = {}
        self.operators: dict[object, Intervals] = {}
        self.launches: dict[int, dict] = {}
        for event in events:
            span = event["ts"], event["ts"] + event["dur"]
            kind, name = event.get("cat"), event["name"]
            if kind == "user_annotation" and name.startswith("step 1 "):
                self.phases[name.removeprefix("step 1 ")] = span
            elif kind == "cpu_op" and name in PRODUCTS:
                self.operators.setdefault(event["tid"], []).append(span)
            elif kind in ("cuda_runtime", "cuda_driver"):
                self.launches[event["args"]["correlation"]] = event

    def of_this_step(self, events: list[dict]) -> Iterator[dict]:
        """Kernels and copies that the second step launched, with phase and whether a product."""
        for event in events:
            if event.get("cat") not in ("kernel", "gpu_memcpy"):
                continue
            launch = self.launches.get(event["args"].get("correlation"))
            if launch is None:
                continue
            for phase, (start, stop) in self.phases.items():
                if start <= launch["ts"] < stop:
                    product = lies_in(launch["ts"], self.operators.get(launch["tid"], []))
                    yield event | {"phase": phase, "product": product}

    def lane(self, event: dict) -> str | None:
        """``compute``, ``gather`` or ``reduce-scatter``; None for what is neither."""
        name = event["name"]
        if name.startswith("nccl"):
            return "reduce-scatter" if "ReduceScatter" in name else "gather"
        if event["args"]["stream"] == self.compute_stream:
            return "compute"
        if self.is_transfer(event):
            return "gather" if event["args"]["stream"] in self.gather_streams else "reduce-scatter"
        return None

    def is_transfer(self, event: dict) -> bool:
        large = event["cat"] == "gpu_memcpy" and event["args"].get("bytes", 0) >= COPY_BYTES
        return large and event["args"]["stream"] != self.compute_stream

    def intervals(self, *lanes: str) -> Intervals:
        return union(
            (e["ts"], e["ts"] + e["dur"]) for e in self.device_events if self.lane(e) in lanes
        )

    def hidden_share(self) -> float | None:
        transfers = self.intervals("gather", "reduce-scatter")
        if not transfers:
            return None
        return overlap(transfers, self.intervals("compute")) / length(transfers)

    def drawn(self) -> list[Drawn]:
        """Lanes of a trace; gaps of more than ``STALL_US`` between compute are stalls."""
        compute = blocks(
            self.device_events,
            "compute",
            BLOCK_GAP_US,
            lambda event: event["phase"] if self.lane(event) == "compute" else None,
        )
        stalls = [
            Drawn("compute", "stall", a.stop, b.start, {"stall": True})
            for a, b in pairwise(compute)
            if b.start - a.stop > STALL_US
        ]
        transfers = [
            Drawn(lane, lane, event["ts"], event["ts"] + event["dur"])
            for event in self.device_events
            if (lane := self.lane(event)) in ("gather", "reduce-scatter")
        ]
        return [*compute, *stalls, *transfers]


# -- the whole run ----------------------------------------------------------------------------


CUT_OFF = "the run ended while this was measured"
BOUND_FROM = (
    "a step without communication beside the row's transfers, for which it does not wait, plus the "
    "gather of the first parameter and the reduce-scatter of the last"
)
OF_PROFILE = ("hidden_share", "products_s", "gemm_slowdown")  # kept when a row is measured anew


class Run:
    """One command: one mode after another, and a result file that grows.

    Raises:
        ValueError: the ranks do not divide the rows of every weight.
    """

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        self.arguments, self.device = arguments, device
        self.started = time.perf_counter()
        self.size = SMALL if arguments.small else FULL
        if self.size.width % dist.get_world_size() or self.size.hidden % dist.get_world_size():
            raise ValueError(
                f"start a number of ranks that divides {self.size.width} and {self.size.hidden}: "
                "transfers of the bound have one size"
            )
        self.tokens = arguments.tokens or list(self.size.tokens)
        self.parameters = PARAMETERS * self.size.width * self.size.hidden
        self.head = header("fsdp_overlap", device, self.workload(), {})
        self.results = Results(
            arguments.out, self.head, {n: mode.recipes for n, mode in MODES.items()}, ("tokens",)
        )
        self.losses: dict[int, tuple[str, float]] = {}  # by tokens: which all that send must have
        self.broken: set[str] = set()
        if not arguments.again:
            self.broken = {m for m, why in self.results.data["not_run"].items() if why == CUT_OFF}

    def workload(self) -> dict:
        size = self.size
        return {
            "model": f"{size.units} units of {self.parameters:,} parameters, each four matrices of "
            f"{size.width} x {size.hidden}",
            "precision": "bfloat16 weights, gradients and optimizer state",
            "optimizer": "AdamW, fused",
            "tokens": "a rank and step",
            "steps_queued": QUEUED,
        }

    def measure_link(self) -> None:
        """Bytes that a rank receives from its peers a second, one parameter's collectives alone."""
        peers = dist.get_world_size() - 1
        received = 2 * self.parameters / PARAMETERS * peers / dist.get_world_size()
        rates = {}
        for transport, transfers_of in (
            ("nccl", Transfers),
            ("copy_engine", CopyEngineBothTransfers),
        ):
            transfers = transfers_of(self.size, self.device)
            for name in ("gather", "reduce_scatter"):
                seconds = statistics.median(seconds_of(getattr(transfers, name), self.device, 10))
                rates[f"{transport}_{name}_bytes_per_s"] = received / seconds
            transfers.close()
        self.results.data["link"] = rates
        say(self.started, f"link {rates}")

    def row(self, mode: str, tokens: int) -> dict:
        """The row as it is known; empty if it is not."""
        rows = (r for r in self.results.data["rows"] if (r["name"], r["tokens"]) == (mode, tokens))
        return next(rows, {})

    def tokens_of(self, mode: str) -> list[int]:
        if MODES[mode].trace_only:
            return [self.size.trace_tokens]
        only = MODES[mode].tokens
        return [t for t in self.tokens if only is None or self.arguments.small or t in only]

    def wanted(self, mode: str) -> list[int]:
        """The sizes that ``mode`` still has to be measured at."""
        if MODES[mode].trace_only:
            return []
        known = {t: self.row(mode, t) for t in self.tokens_of(mode)}
        if self.arguments.again:
            return list(known)
        pairs = 0 if mode == REFERENCE else self.arguments.pairs
        return [t for t, row in known.items() if not row or row.get("pairs", 0) < pairs]

    def batch(self, tokens: int) -> torch.Tensor:
        return random_batch(self.size, tokens, self.device)

    def steps(self, tokens: int) -> int:
        return self.size.steps[self.size.tokens.index(tokens)]

    def measure(self, mode: str, sizes: list[int], trainer: Trainer, memory: Memory) -> None:
        """The rows of one mode: alone first, then in windows with the reference beside it."""
        alone: dict[int, dict] = {}
        for tokens in sizes:
            memory.release()
            steps = take_steps(trainer, self.batch(tokens), self.steps(tokens))
            if mode != REFERENCE and not alone:  # no step but these before
                self.compare_losses(mode, tokens, steps.loss)
            alone[tokens] = self.row_alone(mode, tokens, trainer, steps) | memory.peaks()
        if mode == REFERENCE:
            for row in alone.values():
                self.add(row)
            return
        with (
            contextlib.closing(NoCommunication(self.size, self.device)) as reference,
            contextlib.closing(TRANSFERS[trainer.transport](self.size, self.device)) as transfers,
        ):
            bound = BoundTrainer(reference, transfers, trainer.gathers(self.size.units))
            trainers = {"reference": reference, "mode": trainer, "bound": bound}
            ends = {} if trainer.hides_ends else transfers.ends_s()
            for tokens, row in alone.items():
                memory.release()
                windows = self.measure_windows(trainers, tokens, ends)
                self.add(row | windows | {"samples": row["samples"] | windows["samples"]})

    def row_alone(self, mode: str, tokens: int, trainer: Trainer, steps: Steps) -> dict:
        """The fields of a row that steps alone give."""
        row = {"name": mode, "tokens": tokens, "note": trainer.note}
        if mode == REFERENCE:
            row |= {"step_s": statistics.median(steps.step_s), "efficiency": 1.0}
            row |= {"optimizer_s": statistics.median(steps.optimizer_s)}
        return row | {"samples": {"alone_step_s": steps.step_s}}

    def compare_losses(self, mode: str, tokens: int, loss: float) -> None:
        """All modes that send must train alike.

        Raises:
            ValueError: ``mode`` does not.
        """
        name, expected = self.losses.setdefault(tokens, (mode, loss))
        if not abs(loss - expected) <= LOSS_TOLERANCE * expected:
            raise ValueError(f"its loss is {loss:.4f}, that of {name} {expected:.4f}")

    def measure_windows(
        self, trainers: dict[str, Trainer | BoundTrainer], tokens: int, ends: dict[str, float]
    ) -> dict:
        """The fields of a row that windows give."""
        order = ORDER * (self.arguments.pairs // ORDER.count("mode"))
        taken = take_windows(
            trainers, [*WARM_UP_WINDOWS, *order], self.batch(tokens), self.steps(tokens)
        )
        windows: dict[str, list[Window]] = {name: [] for name in trainers}
        for name, window in zip(order, taken[len(WARM_UP_WINDOWS) :], strict=True):
            windows[name].append(window)
        step_s = {name: of_all_ranks([w.step_s for w in windows[name]]) for name in windows}
        pairs = Pairs(**step_s)
        efficiencies, ends_s = pairs.efficiencies(), sum(ends.values())
        low, _, high = statistics.quantiles(efficiencies, n=4, method="inclusive")
        parts = {
            part: statistics.median(getattr(w, part) for w in windows["bound"])
            for part in ("forward_s", "backward_s", "optimizer_s")
        }
        samples = {f"{name}_window_s": times for name, times in step_s.items()}
        samples |= {f"{n}_clock_mhz": [w.clock_mhz for w in of_n] for n, of_n in windows.items()}
        return {
            "step_s": statistics.median(map(max, pairs.mode)),
            "optimizer_s": statistics.median(w.optimizer_s for w in windows["mode"]),
            "efficiency": statistics.median(efficiencies),
            "efficiency_spread": high - low,
            "pairs": len(efficiencies),
            "eta": statistics.median(pairs.etas(ends_s)),
            "bound_s": statistics.median(map(max, pairs.bound)) + ends_s,
            "bound_from": BOUND_FROM,
            "bound_parts_s": parts | ends,
            "gathers": list(trainers["bound"].gathers),
            "samples": samples,
        }

    def add(self, row: dict) -> None:
        """Add ``row``, or put it in the place of an older one; what that had of a profile stays."""
        mode, tokens = row["name"], row["tokens"]
        old = self.row(mode, tokens)
        self.results.add({field: old[field] for field in OF_PROFILE if field in old} | row)
        self.relate(tokens)
        hidden = ("samples", "note", "bound_from", "recipes")
        shown = {k: v for k, v in self.row(mode, tokens).items() if k not in hidden}
        say(self.started, f"{mode}, {tokens}: {json.dumps(shown)}")

    def relate(self, tokens: int) -> None:
        """The reference's step is that of all its windows beside modes."""
        samples = [r["samples"] for r in self.results.data["rows"] if r["tokens"] == tokens]
        windows = [w for of_row in samples for w in of_row.get("reference_window_s", ())]
        if windows and (row := self.row(REFERENCE, tokens)):
            row["step_s"] = statistics.median(map(max, windows))
            row["samples"]["windows_beside_modes_s"] = windows
        self.results.write()

    def profile(self, mode: str, sizes: list[int], trainer: Trainer, memory: Memory) -> None:
        """What the kernels say: shares hidden, slow-down, and the trace."""
        with contextlib.closing(NoCommunication(self.size, self.device)) as reference:
            for tokens in sizes:
                memory.release()
                batch = self.batch(tokens)
                alone = Profiled(reference, batch)
                self.keep_profile(mode, tokens, Profiled(trainer, batch), alone)
        self.results.write()

    def keep_profile(self, mode: str, tokens: int, profiled: Profiled, alone: Profiled) -> None:
        row = self.row(mode, tokens)
        if profiled.products_s:
            row["hidden_share"] = profiled.hidden_share()
            row["products_s"] = profiled.products_s
            row["gemm_slowdown"] = profiled.products_s / alone.products_s
            shown = {k: row[k] for k in ("hidden_share", "gemm_slowdown")}
            say(self.started, f"{mode}, {tokens}, profiled: {shown}")
        if tokens == self.size.trace_tokens and profiled.device_events:
            begin = min(event["ts"] for event in profiled.device_events)
            recipes = MODES[mode].recipes
            write_trace(self.arguments.out, self.head, mode, recipes, profiled.drawn(), begin)

    def attempt(self, mode: str, work: Callable[[Trainer, Memory], object]) -> None:
        """Build ``mode`` and do ``work``; a failure leaves a reason and the other modes."""
        if mode in self.broken:
            return
        known = any(row["name"] == mode for row in self.results.data["rows"])
        if not known and not MODES[mode].trace_only:
            self.results.skip(mode, CUT_OFF)
        memory = Memory(self.device)
        say(self.started, f"{mode}; in use before it: {memory.before}")
        trainer = None
        try:
            trainer = MODES[mode](self.size, self.device)
            work(trainer, memory)
        except Exception as error:  # a peer may raise anything; the other modes must go on
            self.broken.add(mode)
            self.results.skip(mode, f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
            say(self.started, f"{mode}: not run\n{traceback.format_exc()}")
        finally:
            if trainer is not None:
                trainer.close()

    def all(self) -> None:
        self.measure_link()
        for mode in self.arguments.modes:
            if wanted := self.wanted(mode):
                self.attempt(mode, partial(self.measure, mode, wanted))
        for mode in self.arguments.modes:
            if sizes := [t for t in self.tokens_of(mode) if t in self.arguments.profile]:
                self.attempt(mode, partial(self.profile, mode, sizes))


def names(text: str) -> list[str]:
    return text.split(",")


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def start_rank() -> torch.device:
    """Join the group that torchrun describes; return this rank's device."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    dist.init_process_group(timeout=COLLECTIVE_TIMEOUT)
    if device.type != "cpu":
        torch.accelerator.set_device_index(dist.get_node_local_rank())
        device = torch.device(device.type, dist.get_node_local_rank())
    return device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks", help="results/ and traces/ go here"
    )
    parser.add_argument("--modes", type=names, default=list(MODES))
    parser.add_argument("--tokens", type=numbers, help="a rank and step; default: all sizes")
    parser.add_argument(
        "--pairs", type=int, default=8, help="windows of each mode at each size, an even number"
    )
    parser.add_argument("--profile", type=numbers, default=[], help="sizes to profile and trace")
    parser.add_argument("--small", action="store_true", help="a size for rehearsal on a CPU")
    parser.add_argument("--again", action="store_true", help="measure rows anew that are there")
    arguments = parser.parse_args()
    if unknown := set(arguments.modes) - set(MODES):
        parser.error(f"no mode {sorted(unknown)}; there are {list(MODES)}")
    sizes = SMALL.tokens if arguments.small else FULL.tokens
    if arguments.tokens and not set(arguments.tokens) <= set(sizes):
        parser.error(f"--tokens: choose from {', '.join(map(str, sizes))}")
    if arguments.pairs < 2 or arguments.pairs % 2:
        parser.error("--pairs: an even number, so that each order has as many")
    device = start_rank()
    try:
        Run(arguments, device).all()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
