"""Measure a training step whose weights live on the host, against its bound and its peers.

    python benchmarks/offload_step.py --out benchmarks
    python benchmarks/offload_step.py --small --out /tmp/rehearsal      # a minute on a CPU

One rank, one device. ``--modes`` and ``--tokens`` choose what is measured; every row is written
when it is known and kept when the command runs again (``--again`` measures it anew), so a run that
is cut off is resumed by its command. Each run measures ``resident`` for itself, since devices of
one kind differ by some per cent. ``--memory`` and ``--beyond`` add the file ``offload_memory``.

The model
---------
Twelve blocks ``x + down(gelu(up(rms_norm(x))))`` with two bfloat16 matrices of 8192 x 32768 each:
0.54 G parameters a block, 1.07 GB to load and 1.07 GB of gradients to store. The weights are drawn
from a normal distribution with one seed a block, the batch with another: every mode computes with
the same numbers, and rows say whether its gradients have the bits of ``resident``. Loss: mean
squared distance to a drawn target.

How a number is made
--------------------
* ``step_s``: forward and backward, by the host's clock, from a synchronised device until all
  gradients are where the mode leaves them and the device is idle: median over steps after a warm-up
  step.
* ``in_a_row_s``: the time of ``IN_A_ROW`` steps over their number when nothing waits between them,
  as when gradients are accumulated: the next step's first load runs beside the last one's last
  store. ``streamed_adam`` and ``torchao`` run their optimizer in each step; their ``step_s`` is
  measured like this.
* ``resident`` keeps all weights and gradients on the device and runs each block again in backward,
  by ``torch.utils.checkpoint``: the kernels of ``streamed``, none of its copies. The second run
  stops where the last tensor that backward needs is there, which makes seven matrix products a
  block. ``resident_whole_recompute`` runs the block to its end: eight. ``resident_all_saved`` runs
  no block again. ``resident_zeros`` is ``resident`` with zeros for weights and data: the same
  kernels, less power.
* A *phase* is one block's forward or backward. Its compute time is measured by events in a resident
  step: alone, and *beside* the copies of a streamed step, at the pace of one: a phase begins when
  the copies of the phase before are complete. This matters where power is the limit: a device that
  waits for weights may compute faster afterwards.
* ``bound_s`` = first load + sum over phases of max(compute, load, store) + last store of gradients.
  Compute beside the same copies; loads and stores by the link's rates of this run, the duplex rates
  where both are under way. Loads: each block once in forward, all but the last two again in
  backward (two slots keep them). ``eta`` = ``bound_s`` / ``step_s``; ``eta_alone`` is the same with
  compute measured alone.
* ``streamed_adam``: its bound is the larger of the updates of all blocks on the host, and the bound
  above plus the update of the first block, which lies between its gradient's store and its next
  load. ``update_s`` is the update of one block, alone.
* ``over_resident``: ``step_s`` over ``resident_s``, the step of ``resident`` in the same run.
* ``sm_clock_mhz``, ``power_w``: medians of what ``nvidia-smi`` reads while the row is measured;
  nothing is set.
* ``peak_allocated_bytes``, ``peak_reserved_bytes``: the device allocator's peaks over the steps of
  the row; ``pinned_bytes``: page-locked host memory, PyTorch's own plus what is registered with
  ``cudaHostRegister``; ``host_peak_bytes``: what the resident set grew by.
* ``gradients_bitwise``: whether the first and the last block's gradients have the bits of
  ``resident`` at these tokens.

A trace's judgement goes to its row: ``trace_layers_overlapped`` of ``trace_layers_judged`` backward
layers (all but the first two and the last two) have an instant when a matrix product of the layer,
the load of the next and the store of the one before are all under way; ``copies_pinned`` is whether
every copy of a block's size is between the device and pinned memory; ``blocking_calls`` counts
``cudaMalloc``, host allocations and synchronisations inside the step on the threads that launch
kernels: the training thread and autograd's.
"""

import argparse
import gc
import importlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes_source" / "offload")]

import accumulate_and_average  # noqa: E402
import activation_offload  # noqa: E402
import pipelined_optimizer  # noqa: E402
import weight_streaming  # noqa: E402

from benchmarks.measuring import (  # noqa: E402
    Drawn,
    HostMemory,
    Results,
    device_name,
    header,
    link_rates,
    profiled_events,
    say,
    synchronize,
    timing_event,
    write_trace,
)

MODEL = "x + down(gelu(up(rms_norm(x)))), {0.width} x {0.hidden}"
BOUND_FROM = (
    "first load + sum over phases of max(compute, load, store) + last store, compute beside the "
    "same copies, duplex rates where both directions are under way, all of this run"
)
BOUND_WITH_UPDATES = (
    "the larger of all blocks' updates on the host, and forward's and backward's bound plus the "
    "first block's update"
)
IN_A_ROW = 3  # steps timed together
MICROBATCHES = 4
ADAMW = {"lr": 3e-6, "betas": (0.9, 0.95)}
ADAM_BYTES = 16  # a parameter: bf16 weight and gradient, fp32 weight and two moments
BEYOND_STEPS = 6
PAUSE_US = 200.0  # between kernels of a block of a trace there is less


@dataclass(frozen=True)
class Size:
    """Widths in features, tokens a step; ``beyond``: of the model that does not fit the device."""

    width: int
    hidden: int
    layers: int
    tokens: tuple[int, int, int, int, int]
    memory_layers: tuple[int, ...]
    beyond_layers: int
    beyond_tokens: int

    @property
    def judged_tokens(self) -> int:
        """At which gradients are compared and traces taken."""
        return self.tokens[2]

    @property
    def layer_parameters(self) -> int:
        return 2 * self.width * self.hidden

    @property
    def layer_bytes(self) -> int:
        return 2 * self.layer_parameters


# 23 blocks are 12.35 G parameters: with Adam 198 GB, 1.3 times a device of 150 GB.
FULL = Size(8192, 32768, 12, (2048, 4096, 8192, 16384, 32768), (4, 8, 12), 23, 8192)
SMALL = Size(64, 256, 5, (32, 64, 128, 256, 512), (3, 5), 6, 128)


# -- the model --------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.up = nn.Linear(size.width, size.hidden, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(size.hidden, size.width, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens x width to the same."""
        normed = F.rms_norm(x, x.shape[-1:])
        return x + self.down(F.gelu(self.up(normed), approximate="tanh"))


class Recomputed(nn.Module):
    """A block of which backward runs the forward again."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


@dataclass(frozen=True)
class Workload:
    size: Size
    device: torch.device
    layers: int

    def build(self, where: torch.device | str, *, zeros: bool = False) -> Iterator[Block]:
        """The blocks, one by one, on ``where``; drawn on the device, so alike in all modes."""
        for index in range(self.layers):
            with torch.device("meta"):
                block = Block(self.size)
            block.to_empty(device=where)
            generator = torch.Generator(self.device).manual_seed(index)
            with torch.no_grad():
                for weight in block.parameters():
                    deviation = 0.0 if zeros else weight.shape[1] ** -0.5
                    drawn = torch.empty_like(weight, device=self.device)
                    weight.copy_(drawn.normal_(0, deviation, generator=generator))
            yield block

    def batch(
        self, tokens: int, *, zeros: bool = False, seed: int = 0
    ) -> tuple[torch.Tensor, Callable]:
        """Inputs (tokens x width, bfloat16) and the loss of outputs (0-d)."""
        generator = torch.Generator(self.device).manual_seed(1000 + seed)
        x, target = (
            torch.empty(tokens, self.size.width, device=self.device, dtype=torch.bfloat16).normal_(
                0, 0.0 if zeros else 1.0, generator=generator
            )
            for _ in range(2)
        )
        return x, lambda y: (y - target[: len(y)]).square().mean()


def start_group() -> None:
    """A process group of this process alone; its store needs no port."""
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)


# -- the modes --------------------------------------------------------------------------------


class Mode:
    """A way to train. ``step`` is forward and backward; ``finish`` waits for all gradients."""

    recipes: tuple[str, ...] = ()  # whose code is measured, by their files' stems
    note: str | None = None
    bounded = False  # loads and stores every block, and runs it again in backward
    zeros = False
    optimizer = False
    in_a_row = False  # whether steps that follow each other are measured as well
    slots = 2
    sizes: tuple[int, ...] = (2,)  # which of the tokens are measured

    def __init__(self, work: Workload) -> None:
        self.work, self.device = work, work.device

    def step(self, x: torch.Tensor, loss_of: Callable) -> torch.Tensor:
        raise NotImplementedError

    def finish(self) -> None:
        synchronize(self.device)

    def gradients(self, layer: int) -> list[torch.Tensor] | None:
        """The gradients of a block after ``finish``, where they can be read."""
        return None

    def close(self) -> None:
        """Give back what is not memory of the allocators."""


class Resident(Mode):
    """All weights and gradients on the device; backward runs each block again."""

    early_stop = True  # without its last product, as torch.utils.checkpoint does
    in_a_row = True
    sizes = (0, 1, 2, 3, 4)

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        self.layers = list(work.build(work.device, zeros=self.zeros))
        self.weights = [list(layer.parameters()) for layer in self.layers]
        self.phase: Callable[[], None] = lambda: None  # called where a phase begins and at the end

    def run(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        if self.early_stop:
            with torch.enable_grad():
                return checkpoint(self.layers[layer], x, use_reentrant=False)
        with torch.no_grad():
            return self.layers[layer](x)

    def step(self, x: torch.Tensor, loss_of: Callable) -> torch.Tensor:
        kept = []
        for weight in chain(*self.weights):
            weight.grad = None
        for layer in range(len(self.layers)):
            self.phase()
            x = x.detach().requires_grad_(layer > 0)
            y = self.run(layer, x)
            kept.append((x, y if self.early_stop else None))
            x = y
        y = x.detach().requires_grad_()
        loss = loss_of(y)
        (gradient,) = torch.autograd.grad(loss, y)
        del x, y
        for layer in reversed(range(len(self.layers))):
            self.phase()
            x, y = kept.pop()
            if y is None:
                with torch.enable_grad():
                    y = self.layers[layer](x)
            inputs = [*self.weights[layer], *([x] if layer else [])]
            found = torch.autograd.grad(y, inputs, gradient)
            gradient = found[-1]
            del x, y, inputs
            for weight, weight_gradient in zip(self.weights[layer], found, strict=False):
                weight.grad = weight_gradient
        self.phase()
        return loss.detach()

    def gradients(self, layer: int) -> list[torch.Tensor]:
        return [weight.grad for weight in self.weights[layer]]


class ResidentWholeRecompute(Resident):
    note = "backward runs each block again to its end: eight products instead of seven"
    early_stop = False
    in_a_row = False
    sizes = (2,)


class ResidentZeros(Resident):
    note = "weights and data are zeros"
    zeros = True
    in_a_row = False
    sizes = (2,)


class ResidentAllSaved(Resident):
    """Nothing is run again: autograd saves what it needs, on the device."""

    saving = staticmethod(torch.enable_grad)  # the context in which forward runs
    in_a_row = False
    sizes = (2,)

    def step(self, x: torch.Tensor, loss_of: Callable) -> torch.Tensor:
        for weight in chain(*self.weights):
            weight.grad = None
        with self.saving():
            for layer in self.layers:
                x = layer(x)
        loss = loss_of(x)
        loss.backward()
        return loss.detach()


class SaveOnCpu(ResidentAllSaved):
    note = "torch.autograd.graph.save_on_cpu(pin_memory=True); weights on the device"

    def saving(self):
        return torch.autograd.graph.save_on_cpu(pin_memory=self.device.type == "cuda")


class TorchtuneOffload(ResidentAllSaved):
    def __init__(self, work: Workload) -> None:
        training = importlib.import_module("torchtune.training")
        self.note = f"torchtune {version('torchtune')}, OffloadActivations; weights on the device"
        super().__init__(work)
        self.saving = training.OffloadActivations


class Fsdp2CpuOffload(Mode):
    note = "fully_shard a block, CPUOffloadPolicy, torch.utils.checkpoint"
    in_a_row = True
    sizes = (0, 1, 2, 3, 4)

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        start_group()
        pin = work.device.type == "cuda"
        mesh = dist.device_mesh.init_device_mesh(work.device.type, (1,))
        settings = {"mesh": mesh, "offload_policy": CPUOffloadPolicy(pin_memory=pin)}
        layers = []
        for block in work.build("cpu"):
            layers.append(fully_shard(Recomputed(block), **settings))
        self.model = fully_shard(nn.Sequential(*layers), **settings)

    def step(self, x: torch.Tensor, loss_of: Callable) -> torch.Tensor:
        for weight in self.model.parameters():
            weight.grad = None
        loss = loss_of(self.model(x))
        loss.backward()
        return loss.detach()

    def gradients(self, layer: int) -> list[torch.Tensor]:
        return [weight.grad.to_local() for weight in self.model[layer].parameters()]

    def close(self) -> None:
        del self.model
        dist.destroy_process_group()


class TorchaoOptimizer(Resident):
    optimizer = True
    sizes = (2,)

    def __init__(self, work: Workload) -> None:
        optim = importlib.import_module("torchao.optim")
        super().__init__(work)
        self.note = (
            f"torchao {version('torchao')}, CPUOffloadOptimizer(AdamW, fused): weights and "
            "gradients on the device, weights and both moments in bfloat16 on the host"
        )
        self.model = nn.ModuleList(self.layers)
        self.adam = optim.CPUOffloadOptimizer(self.model.parameters(), **ADAMW)

    def step(self, x: torch.Tensor, loss_of: Callable) -> torch.Tensor:
        for layer in self.layers:  # its hooks run where autograd accumulates
            x = checkpoint(layer, x, use_reentrant=False)
        loss = loss_of(x)
        loss.backward()
        self.adam.step()
        self.adam.zero_grad()
        return loss.detach()

    def gradients(self, layer: int) -> None:
        return None


class DeepspeedZero3(Mode):
    def __init__(self, work: Workload) -> None:
        os.environ.setdefault("LOCAL_RANK", "0")
        deepspeed = importlib.import_module("deepspeed")
        super().__init__(work)
        self.note = (
            f"deepspeed {version('deepspeed')}, ZeRO-3 with offload_param and offload_optimizer "
            "(pinned), torch.utils.checkpoint; SGD, whose step is not timed"
        )
        model = nn.Sequential(*(Recomputed(block) for block in work.build("cpu")))
        start_group()
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "cpu", "pin_memory": True},
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "overlap_comm": True,
                "stage3_prefetch_bucket_size": work.size.layer_parameters,
                "stage3_max_live_parameters": 3 * work.size.layer_parameters,
                "stage3_param_persistence_threshold": 0,
                "sub_group_size": work.size.layer_parameters,
            },
        }
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(self, x: torch.Tensor, loss_of: Callable) -> torch.Tensor:
        loss = loss_of(self.engine(x))
        self.engine.backward(loss)
        return loss.detach()

    def close(self) -> None:
        self.engine.destroy()
        dist.destroy_process_group()


class Streamed(Mode):
    recipes = ("host_layers", "weight_streaming")
    bounded = True
    in_a_row = True
    sizes = (0, 1, 2, 3, 4)

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        self.stack = self.stack_of(work.build(work.device))

    def stack_of(self, layers: Iterator[Block]):
        return weight_streaming.StreamedStack(layers, self.device, slots=self.slots)

    def step(self, x: torch.Tensor, loss_of: Callable) -> torch.Tensor:
        return self.stack.step(x, loss_of)

    def finish(self) -> None:
        self.stack.wait_for_gradients()
        synchronize(self.device)

    def gradients(self, layer: int) -> list[torch.Tensor]:
        return list(self.stack.gradients[layer].views.values())

    def close(self) -> None:
        self.stack.close()


class Streamed4Slots(Streamed):
    slots = 4
    sizes = (0, 2)
    note = "four slots for weights: four blocks less to load in backward"


class Streamed4Microbatches(Streamed):
    recipes = (*Streamed.recipes, "accumulate_and_average")
    bounded = False  # a phase is four microbatches long, which no resident run here is
    sizes = (2, 3)
    note = (
        f"the tokens in {MICROBATCHES} microbatches, all of them through a block, then the next; "
        "gradients summed and stored in fp32"
    )

    def stack_of(self, layers: Iterator[Block]):
        return accumulate_and_average.LayerMajor(layers, self.device, gradient_dtype=torch.float32)

    def step(self, x: torch.Tensor, loss_of: Callable) -> torch.Tensor:
        return self.stack.step(list(x.chunk(MICROBATCHES)), loss_of)

    def finish(self) -> None:
        synchronize(self.device)  # fp32 sums are nobody's ``grad``

    def gradients(self, layer: int) -> None:
        return None


class StreamedAdam(Streamed):
    recipes = (*Streamed.recipes, "pipelined_optimizer")
    optimizer = True
    sizes = (2, 3, 4)
    note = "AdamW on the host in each step: fp32 weights and moments, no clipping"

    def stack_of(self, layers: Iterator[Block]):
        start_group()
        return pipelined_optimizer.PipelinedAdamW(layers, self.device, adamw=ADAMW)

    def finish(self) -> None:
        self.stack.finish()
        synchronize(self.device)

    def update_seconds(self) -> list[float]:
        """Of one block's update each, on the thread that does it, nothing beside it."""
        samples = []
        for layer in range(min(3, self.work.layers)):
            begin = time.perf_counter()
            self.stack.updates.submit(self.stack.update, layer).result()
            samples.append(time.perf_counter() - begin)
        return samples

    def gradients(self, layer: int) -> None:
        return None

    def close(self) -> None:
        super().close()
        dist.destroy_process_group()


class StreamedActivationOffload(Streamed):
    recipes = (*Streamed.recipes, "activation_offload")
    note = "saved inputs of blocks on the host as well"
    sizes = (2, 4)
    offload = None

    def step(self, x: torch.Tensor, loss_of: Callable) -> torch.Tensor:
        if self.offload is None or self.tokens != len(x):
            if self.offload is not None:
                self.offload.close()
            lanes = self.stack.h2d, self.stack.d2h
            self.offload = activation_offload.ActivationOffload(
                self.device, self.work.layers * x.nbytes, window=2 * x.nbytes, lanes=lanes
            )
            self.tokens = len(x)
        with self.offload.saving():
            return super().step(x, loss_of)

    def close(self) -> None:
        super().close()
        if self.offload is not None:
            self.offload.close()


class OneStream(Streamed):
    note = "the same code, every copy on the stream of the kernels"
    in_a_row = False

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        self.stack.h2d = self.stack.d2h = self.stack.streams.current_stream()


class Pageable(OneStream):
    note = "one stream, and memory that is not page-locked"
    sizes = (0, 2)

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        for buffer in self.stack.weights + self.stack.gradients:
            buffer.close()


MODES: dict[str, type[Mode]] = {
    "resident": Resident,
    "streamed": Streamed,
    "resident_whole_recompute": ResidentWholeRecompute,
    "resident_zeros": ResidentZeros,
    "resident_all_saved": ResidentAllSaved,
    "streamed_4_slots": Streamed4Slots,
    "one_stream": OneStream,
    "fsdp2_cpu_offload": Fsdp2CpuOffload,
    "pageable": Pageable,
    "streamed_4_microbatches": Streamed4Microbatches,
    "streamed_activation_offload": StreamedActivationOffload,
    "save_on_cpu": SaveOnCpu,
    "torchtune": TorchtuneOffload,
    "streamed_adam": StreamedAdam,
    "torchao": TorchaoOptimizer,
    "deepspeed": DeepspeedZero3,
}
TRACED = ("streamed", "one_stream", "pageable", "fsdp2_cpu_offload")
MEMORY_MODES = ("resident", "streamed", "streamed_activation_offload")
RECIPES = {name: mode.recipes for name, mode in MODES.items()}


# -- phases and the bound ---------------------------------------------------------------------


class Phases:
    """Times the phases of a resident step; with ``copies``, at the pace of a streamed one.

    A phase then queues the load and the store of a streamed step's, on a stream each, and the next
    phase begins when they are complete, so that clocks and power are those of a streamed step.
    """

    def __init__(self, work: Workload, copies: bool) -> None:
        self.work = work
        self.begins, self.ends = [], []
        self.copies = copies and work.device.type == "cuda"
        if self.copies:
            count = work.size.layer_bytes
            self.host = [torch.empty(count, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            self.there = [torch.empty_like(h, device=work.device) for h in self.host]
            self.streams = [torch.cuda.Stream() for _ in range(2)]

    def __call__(self) -> None:
        """End a phase and begin the next."""
        self.ends.append(self.now())
        if self.copies:
            for stream in self.streams:
                torch.cuda.current_stream().wait_stream(stream)
        self.begins.append(self.now())
        phase = len(self.begins) - 1
        if self.copies and phase < 2 * self.work.layers:
            loads, stores = transfers(phase, self.work.layers)
            for wanted, stream, target, source in (
                (loads, self.streams[0], self.there[0], self.host[0]),
                (stores, self.streams[1], self.host[1], self.there[1]),
            ):
                if wanted:
                    stream.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(stream):
                        target.copy_(source, non_blocking=True)

    def now(self):
        event = timing_event(self.work.device)
        event.record()
        return event

    def seconds(self) -> list[float]:
        """Of each phase of the last step: forward 0 … L-1, backward L-1 … 0."""
        synchronize(self.work.device)
        pairs = zip(self.begins, self.ends[1:], strict=False)
        times = [begin.elapsed_time(end) / 1e3 for begin, end in pairs]
        self.begins, self.ends = [], []
        return times


def transfers(phase: int, layers: int, slots: int = 2) -> tuple[bool, bool]:
    """Whether a block is loaded and whether gradients are stored in a phase of a streamed step.

    Phases count forward 0 … L-1, then backward L-1 … 0. Forward l loads l+1; backward l loads l-1
    unless its slot still has it, and stores the gradients of l+1.
    """
    if phase < layers:
        return phase + 1 < layers, False
    layer = 2 * layers - 1 - phase
    return 0 <= layer - 1 < layers - slots, layer + 1 < layers


def phase_times(mode: Resident, batch: tuple, copies: bool, repeats: int = 2) -> list[float]:
    """Median seconds of each phase of a resident step; see :meth:`Phases.seconds`."""
    mode.phase = phases = Phases(mode.work, copies)
    samples = []
    for _ in range(repeats + 1):
        mode.step(*batch)
        samples.append(phases.seconds())
    mode.phase = lambda: None
    return [statistics.median(times) for times in zip(*samples[1:], strict=True)]


def bound_s(compute: list[float], nbytes: int, link: dict[str, float], slots: int = 2) -> float:
    """The shortest forward and backward of ``compute``'s phases, in seconds.

    Args:
        compute: seconds of each phase, see :func:`phase_times`.
        nbytes: of a block's weights, and of its gradients.
        link: see :func:`benchmarks.measuring.link_rates`.
    """
    alone = [nbytes / link[f"pinned_{d}_bytes_per_s"] for d in ("h2d", "d2h")]
    duplex = [nbytes / link[f"duplex_{d}_bytes_per_s"] for d in ("h2d", "d2h")]
    total = sum(alone)  # the first load and the last store
    for phase, seconds in enumerate(compute):
        wanted = transfers(phase, len(compute) // 2, slots)
        rates = duplex if all(wanted) else alone
        total += max(seconds, *(t for t, w in zip(rates, wanted, strict=True) if w), 0.0)
    return total


def ridge_tokens(compute: list[float], tokens: int, nbytes: int, link: dict) -> dict[str, int]:
    """From how many tokens on the median phase computes longer than its copies take.

    Compute time is taken to grow in proportion to the tokens.
    """
    layers = len(compute) // 2
    forward, backward = (statistics.median(part) for part in (compute[:layers], compute[layers:]))
    load = nbytes / link["pinned_h2d_bytes_per_s"]
    both = nbytes / min(link["duplex_h2d_bytes_per_s"], link["duplex_d2h_bytes_per_s"])
    return {
        "ridge_tokens_forward": round(tokens * load / forward),
        "ridge_tokens_backward": round(tokens * both / backward),
    }


# -- one row ----------------------------------------------------------------------------------


class Machine:
    """What nvidia-smi reads while a row is measured, every 0.1 s in a process of its own."""

    FIELDS = ("clocks.sm", "power.draw")

    def __enter__(self) -> "Machine":
        self.log = tempfile.TemporaryFile("w+")
        query = ["nvidia-smi", f"--query-gpu={','.join(self.FIELDS)}", "-lms", "100", "-i", "0"]
        try:
            self.process = subprocess.Popen(
                [*query, "--format=csv,noheader,nounits"], stdout=self.log, text=True
            )
        except OSError:
            self.process = None
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
        self.log.seek(0)
        lines = [line.split(",") for line in self.log.read().splitlines() if "," in line]
        self.log.close()
        values = [[float(value) for value in line] for line in lines if len(line) == 2]
        medians = [statistics.median(column) for column in zip(*values, strict=True)]
        self.row = dict(zip(("sm_clock_mhz", "power_w"), medians, strict=False))


class TooLong(Exception):
    """A mode took more than its time."""


def limited(seconds: int) -> None:
    """Raise :class:`TooLong` in this thread in ``seconds``; 0 takes that back."""

    def stop(*_: object) -> None:
        raise TooLong(f"stopped after {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)


def repeats_for(tokens: int) -> int:
    return 5 if tokens <= 4096 else 3


def step_seconds(mode: Mode, batch: tuple, repeats: int) -> dict[str, list[float]]:
    """Seconds of single steps and of steps in a row, after one that is not measured."""

    def seconds(steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            mode.step(*batch)
        mode.finish()
        return (time.perf_counter() - begin) / steps

    seconds(1)
    if mode.optimizer:
        return {"step_s": [seconds(IN_A_ROW) for _ in range(2)]}
    samples = {"step_s": [seconds(1) for _ in range(repeats)]}
    return samples | ({"in_a_row_s": [seconds(IN_A_ROW)]} if mode.in_a_row else {})


def forget_peaks(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peaks(device: torch.device) -> dict[str, int]:
    if device.type != "cuda":
        return {}
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }


@dataclass
class Reference:
    """What the rows of this run are compared with: link, and by tokens what ``resident`` gave."""

    link: dict[str, float]
    rows: dict[int, dict] = field(default_factory=dict)
    gradients: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def measure(self, mode: Resident, tokens: int) -> dict:
        """The row of ``resident``, its samples with the phases that bounds are made of."""
        row = self.rows[tokens] = measure(mode, tokens, repeats_for(tokens))
        batch = mode.work.batch(tokens)
        for name, copies in (("compute_alone_s", False), ("compute_beside_s", True)):
            row["samples"][name] = phase_times(mode, batch, copies)
        if tokens == mode.work.size.judged_tokens:
            self.gradients[tokens] = judged_gradients(mode)
        return row

    def compare(self, mode: Mode, tokens: int, row: dict) -> dict:
        resident = self.rows[tokens]
        found = {"resident_s": resident["step_s"]}
        found["over_resident"] = row["step_s"] / resident["step_s"]
        if tokens in self.gradients and (own := judged_gradients(mode)):
            pairs = zip(own, self.gradients[tokens], strict=True)
            found["gradients_bitwise"] = all(torch.equal(a, b) for a, b in pairs)
        if mode.bounded and self.link:
            update = row.get("update_s", 0.0)
            nbytes = mode.work.size.layer_bytes
            for suffix, name in (("", "compute_beside_s"), ("_alone", "compute_alone_s")):
                compute = resident["samples"][name]
                bound = bound_s(compute, nbytes, self.link, mode.slots) + update
                bound = max(bound, mode.work.layers * update)
                found |= {f"bound{suffix}_s": bound, f"eta{suffix}": bound / row["step_s"]}
            found["bound_from"] = BOUND_WITH_UPDATES if mode.optimizer else BOUND_FROM
        return found


def judged_gradients(mode: Mode) -> list[torch.Tensor] | None:
    """The first and the last block's gradients, on the host."""
    found = [mode.gradients(layer) for layer in (0, mode.work.layers - 1)]
    if None in found or mode.zeros:
        return None
    return [gradient.detach().to("cpu", copy=True) for layer in found for gradient in layer]


def measure(mode: Mode, tokens: int, repeats: int) -> dict:
    """The times, clocks and peaks of a row."""
    batch = mode.work.batch(tokens, zeros=mode.zeros)
    forget_peaks(mode.device)
    with Machine() as machine:
        samples = step_seconds(mode, batch, repeats)
    medians = {field: statistics.median(values) for field, values in samples.items()}
    return {**medians, **peaks(mode.device), **machine.row, "samples": samples}


# -- traces -----------------------------------------------------------------------------------


BLOCKING = ("cudaMalloc", "cudaFree", "cudaHost", "Synchronize", "cuMem")


def traced_step(mode: Mode, batch: tuple) -> list[dict]:
    """The profiler's events of one step after one, on CUDA."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    mode.step(*batch)
    mode.finish()
    with torch.profiler.profile(activities=activities) as profile:
        with torch.profiler.record_function("one step"):
            mode.step(*batch)
        mode.finish()
    return profiled_events(profile)


def lanes_of(events: list[dict], layers: int, nbytes: int) -> list[Drawn]:
    """Compute by layer, loads and stores of a traced step.

    Phases begin at matrix products, told by the operator that launched them: forward has two in
    each block, backward five, one less in the first block, since no gradient of the batch is
    wanted. Kernels after a pause belong to the product that follows.
    """
    operators = {e["args"]["External id"]: e["name"] for e in events if e.get("cat") == "cpu_op"}
    kernels = [e for e in events if e.get("cat") == "kernel"]
    is_product = [operators.get(e["args"].get("External id")) == "aten::mm" for e in kernels]
    firsts = [2 * layer for layer in range(layers)]
    firsts += [2 * layers + 5 * layer for layer in range(layers)]
    if sum(is_product) != firsts[-1] + 4:
        raise ValueError(f"{sum(is_product)} matrix products, expected {firsts[-1] + 4}")
    names = [f"forward {layer}" for layer in range(layers)]
    names += [f"backward {layer}" for layer in reversed(range(layers))]
    drawn: list[Drawn] = []
    products, begin = 0, None  # of kernels after a pause, which are the next block's
    for kernel, product in zip(kernels, is_product, strict=True):
        start, stop = kernel["ts"], kernel["ts"] + kernel["dur"]
        if product and products in firsts:
            label = names[firsts.index(products)]
            drawn.append(Drawn("compute", label, start if begin is None else begin, stop))
            begin = None
        elif drawn and begin is None and start - drawn[-1].stop < PAUSE_US:
            drawn[-1] = replace(drawn[-1], stop=stop)
        elif begin is None:
            begin = start
        products += product
    for lane, way in (("H2D", "HtoD"), ("D2H", "DtoH")):
        copies = [e for e in events if e.get("cat") == "gpu_memcpy" and way in e["name"]]
        for copy in copies:
            if copy["args"].get("bytes", 0) * 4 >= nbytes:
                label = copy["name"].removeprefix("Memcpy ")
                args = {"bytes": copy["args"]["bytes"]}
                drawn.append(Drawn(lane, label, copy["ts"], copy["ts"] + copy["dur"], args))
    return drawn


def judge_trace(events: list[dict], lanes: list[Drawn], layers: int, slots: int) -> dict:
    """The fields of a row that come from its trace; loads and stores are one copy a block."""
    backward = {d.label: d for d in lanes if d.lane == "compute" and d.label.startswith("backw")}
    loads = [d for d in lanes if d.lane == "H2D"]
    stores = [d for d in lanes if d.lane == "D2H"]
    found: dict = {"copies_pinned": all("Pinned" in d.label for d in loads + stores)}
    if len(loads) == 2 * layers - slots and len(stores) == layers:
        order = range(layers - 1, -1, -1)
        load_of = dict(zip(order[slots:], loads[layers:], strict=True))
        store_of = dict(zip(order, stores, strict=True))
        judged = order[2:-2]
        overlapped = 0
        for layer in judged:
            three = (backward[f"backward {layer}"], load_of[layer - 1], store_of[layer + 1])
            overlapped += max(d.start for d in three) < min(d.stop for d in three)
        found |= {"trace_layers_overlapped": overlapped, "trace_layers_judged": len(judged)}
    (window,) = (e for e in events if e["name"] == "one step" and e.get("cat") == "user_annotation")
    calls = [
        event
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
        and window["ts"] <= event["ts"] < window["ts"] + window["dur"]
    ]
    launching = {call["tid"] for call in calls if "LaunchKernel" in call["name"]}
    calls = Counter(
        call["name"]
        for call in calls
        if call["tid"] in launching and any(word in call["name"] for word in BLOCKING)
    )
    return found | {"blocking_calls": sum(calls.values()), "blocking_calls_named": dict(calls)}


# -- the whole run ----------------------------------------------------------------------------


def run(arguments: argparse.Namespace, device: torch.device) -> None:
    started = time.perf_counter()
    size = SMALL if arguments.small else FULL
    work = Workload(size, device, size.layers)
    workload = {
        "model": f"{size.layers} blocks " + MODEL.format(size),
        "precision": "bfloat16 weights, gradients and compute",
        "layer_parameters": size.layer_parameters,
        "layer_bytes": size.layer_bytes,
    }
    reference = Reference(link_rates(device, size.layer_bytes))
    head = header("offload_step", device, workload, reference.link)
    results = Results(arguments.out, head, RECIPES, ("tokens",))
    say(started, f"{device_name(device)}, link {reference.link}")
    plan = {
        name: [
            tokens
            for tokens in (size.tokens[index] for index in MODES[name].sizes)
            if (not arguments.tokens or tokens in arguments.tokens)
            and (arguments.again or not results.has(name, tokens=tokens))
        ]
        for name in arguments.modes
    }

    def residents(mode: Mode, host: HostMemory) -> None:
        for tokens in sorted(set().union(*plan.values())):
            row = reference.measure(mode, tokens)
            if tokens in plan.get("resident", ()):
                row |= host.peaks() | reference.compare(mode, tokens, row)
                results.add({"name": "resident", "tokens": tokens} | row)
            if tokens == size.judged_tokens and reference.link:
                compute = row["samples"]["compute_beside_s"]
                workload.update(ridge_tokens(compute, tokens, size.layer_bytes, reference.link))
            say(started, f"resident, {tokens}: {row}")

    def rows(mode: Mode, host: HostMemory) -> None:
        say(started, f"{name}: built")
        for tokens in plan[name]:
            row = measure(mode, tokens, repeats_for(tokens)) | host.peaks()
            if isinstance(mode, StreamedAdam):
                row["samples"]["update_s"] = updates = mode.update_seconds()
                row["update_s"] = statistics.median(updates)
            row |= reference.compare(mode, tokens, row)
            row |= {"name": name, "tokens": tokens, "note": mode.note}
            results.add(row)
            if arguments.trace and tokens == size.judged_tokens and name in TRACED:
                row |= trace(mode, name, arguments.out, head)
                results.add(row)
            shown = {k: v for k, v in row.items() if k not in ("samples", "bound_from", "note")}
            say(started, f"{name}, {tokens}: {shown}")

    if any(plan.values()):
        attempt("resident", work, results, arguments, residents)
    for name, tokens in plan.items():
        if tokens and name != "resident":
            attempt(name, work, results, arguments, rows)


def attempt(
    name: str, work: Workload, results: Results, arguments: argparse.Namespace, body: Callable
) -> None:
    """``body`` with a mode and its host memory; a failure is why there is no row."""
    host, mode = HostMemory(), None
    limited(arguments.limit)
    try:
        mode = MODES[name](work)
        body(mode, host)
    except Exception as error:
        results.skip(name, f"{type(error).__name__}: {str(error)[:300]}")
        print(f"{name}: not run, {type(error).__name__}: {error}", flush=True)
        if arguments.raises:
            raise
    finally:
        limited(0)
        if mode is not None:
            mode.close()
        host.close()
        del mode
        forget_peaks(work.device)


def run_memory(arguments: argparse.Namespace, device: torch.device) -> None:
    """The file ``offload_memory``: peaks over the number of layers; a model beyond the device."""
    started = time.perf_counter()
    size = SMALL if arguments.small else FULL
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    workload = {
        "model": MODEL.format(size),
        "tokens": size.judged_tokens,
        "layer_parameters": size.layer_parameters,
        "device_memory_bytes": memory,
        "state": "bf16 weights and gradients; with Adam fp32 weights and two moments besides",
    }
    head = header("offload_memory", device, workload, {})
    results = Results(arguments.out, head, RECIPES, ("layers",))
    cases = [(name, layers) for layers in size.memory_layers for name in MEMORY_MODES]
    cases = cases if arguments.memory else []
    cases += [("streamed_adam", size.beyond_layers)] * arguments.beyond

    def row_of(mode: Mode, host: HostMemory) -> None:
        name, layers = case
        say(started, f"{name}, {layers} layers: built")
        if mode.optimizer:
            row = train_beyond(mode, size.beyond_tokens)
        else:
            row = measure(mode, size.judged_tokens, repeats=2)
        parameters = layers * size.layer_parameters
        state = parameters * (ADAM_BYTES if mode.optimizer else 4)
        row |= {"parameters": parameters, "state_bytes": state, **host.peaks()}
        row |= {"state_over_device": state / memory} if memory else {}
        results.add({"name": name, "layers": layers, "note": mode.note} | row)
        say(started, f"{name}, {layers} layers: {row}")

    for case in cases:
        if arguments.again or not results.has(case[0], layers=case[1]):
            attempt(case[0], Workload(size, device, case[1]), results, arguments, row_of)


def train_beyond(mode: Mode, tokens: int) -> dict:
    """Train the blocks to return their input, a new batch each step; losses, times and peaks."""
    losses, seconds = [], []
    forget_peaks(mode.device)
    for step in range(BEYOND_STEPS):
        x, _ = mode.work.batch(tokens, seed=step)
        begin = time.perf_counter()
        try:
            loss = mode.step(x, lambda y, x=x: (y - x).float().square().mean())
            mode.finish()
        except TooLong:
            if step < 3:
                raise
            break  # enough steps to see the loss fall
        losses.append(loss)
        seconds.append(time.perf_counter() - begin)
        print(f"step {step}: loss {losses[-1].item():.3f}, {seconds[-1]:.2f} s", flush=True)
    values = [loss.item() for loss in losses]
    row = {"step_s": statistics.median(seconds[1:]), **peaks(mode.device)}
    row |= {"first_loss": values[0], "last_loss": values[-1]}
    return row | {"samples": {"step_s": seconds, "loss": values}}


def trace(mode: Mode, name: str, folder: Path, head: dict) -> dict:
    """Write the mode's small trace; returns what it says about the row."""
    if mode.device.type != "cuda":
        return {}
    events = traced_step(mode, mode.work.batch(mode.work.size.judged_tokens))
    lanes = lanes_of(events, mode.work.layers, mode.work.size.layer_bytes)
    begin = min(d.start for d in lanes)
    write_trace(folder, head, name, mode.recipes, lanes, begin)
    return judge_trace(events, lanes, mode.work.layers, getattr(mode, "slots", 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks", help="results/ and traces/ go here"
    )
    parser.add_argument("--modes", type=lambda s: s.split(",") if s else [], default=list(MODES))
    parser.add_argument("--tokens", type=lambda s: tuple(map(int, s.split(","))), default=())
    parser.add_argument("--limit", type=int, default=90, help="seconds a mode may take")
    parser.add_argument("--memory", action="store_true", help="peaks over the number of layers")
    parser.add_argument("--beyond", action="store_true", help="train a model beyond the device")
    parser.add_argument("--small", action="store_true", help="a size for rehearsal on a CPU")
    parser.add_argument("--again", action="store_true", help="measure rows anew that are there")
    parser.add_argument("--trace", action="store_true", help="also write traces")
    parser.add_argument("--raises", action="store_true", help="stop at the first failure")
    arguments = parser.parse_args()
    unknown = set(arguments.modes) - set(MODES)
    if unknown:
        parser.error(f"no mode {sorted(unknown)}; there are {list(MODES)}")
    kind = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device(kind.type if kind else "cpu", 0 if kind else None)
    run(arguments, device)
    if arguments.memory or arguments.beyond:
        run_memory(arguments, device)


if __name__ == "__main__":
    main()
