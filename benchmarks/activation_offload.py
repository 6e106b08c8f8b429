"""Measure what it costs to keep activations on the host, and how much longer a sequence may be.

    python benchmarks/activation_offload.py --out benchmarks
    python benchmarks/activation_offload.py --small --out /tmp/rehearsal      # seconds on a CPU

A stack of transformer layers with causal attention, forward and backward of one sequence. The
device's memory is limited (``device_bytes``), as on a smaller card. ``--ways`` chooses what is
measured; every row is written when it is known.

How a number is made
--------------------
* ``step_s``: seconds of a forward and backward by events on the compute stream, at ``tokens``
  tokens; medians of ``--repeats`` steps after three unmeasured ones. The host may queue one step
  ahead.
* ``over_resident``: ``step_s`` over that of ``resident``, which saves all on the device.
* ``bound_s``: of what this repository's class moves. All that is saved but one window goes to the
  host in forward and comes back in backward, at the link's rates of this run; the step cannot take
  less, nor less than the same step without copies (``resident``, or ``checkpoint``). ``eta`` is
  ``bound_s`` over ``step_s``.
* ``peak_allocated_bytes``, ``peak_reserved_bytes``: of these steps, weights and gradients included.
* ``pinned_bytes``: page-locked host memory in use: the pool's part that is filled, or what
  PyTorch's allocator handed out at its peak.
* ``longest_tokens``: the longest of the ``sequences`` tried of which a step ran; the next one ran
  out of device memory. Only where given: the peers would pin new memory at every length.

Gradients are not compared here: the backward of flash attention adds in no fixed order. The recipe
and ``tests/test_activation_offload.py`` compare them, bit by bit.
"""

import argparse
import gc
import importlib
import statistics
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes_source" / "offload")]

from activation_offload import ActivationOffload  # noqa: E402

from benchmarks.measuring import (  # noqa: E402
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

GB = 10**9
BOUND_FROM = (
    "the longer of the same step without copies, and what is saved, less one window, over the "
    "link's rate to the host plus over its rate back"
)
GAP_US = 100.0  # kernels or copies closer than this are one block of a picture


@dataclass(frozen=True)
class Size:
    """Widths in features, sequences in tokens, memory in bytes."""

    width: int
    heads: int
    layers: int
    tokens: int
    sequences: tuple[int, ...]
    device_bytes: int
    pool_bytes: int
    smallest: int
    link_bytes: int


FULL = Size(
    width=4096,
    heads=32,
    layers=16,
    tokens=8192,
    sequences=(12288, 16384, 24576, 32768, 49152, 65536),
    device_bytes=36 * GB,
    pool_bytes=48 * GB,
    smallest=1 << 20,
    link_bytes=2**30,
)
SMALL = Size(64, 4, 3, 64, (96, 128), 10**9, 10**7, 1 << 10, 2**20)


# -- the model --------------------------------------------------------------------------------


class Layer(nn.Module):
    """Causal attention and an MLP, each behind a norm and around a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, tokens, width] to the same."""
        parts = self.qkv(F.rms_norm(x, x.shape[-1:])).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION if x.is_cuda else SDPBackend.MATH):
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(F.rms_norm(x, x.shape[-1:])), approximate="tanh"))


class Training:
    """The model, and the one pool of all ways."""

    def __init__(self, size: Size, device: torch.device) -> None:
        self.size, self.device = size, device
        torch.manual_seed(0)
        with torch.device(device):
            layers = [Layer(size.width, size.heads) for _ in range(size.layers)]
        self.model = nn.Sequential(*layers).to(torch.bfloat16)
        # The gradients exist from the beginning: backward adds to them and allocates none.
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.offload = ActivationOffload(
            device,
            size.pool_bytes,
            window=self.layer_bytes(size.tokens),
            smallest=size.smallest,
        )

    def layer_bytes(self, tokens: int) -> int:
        """A little more than half of what a layer saves: 17 of 32 bytes a token and feature."""
        return 17 * tokens * self.size.width

    def batch(self, tokens: int) -> torch.Tensor:
        torch.manual_seed(tokens)
        shape = (1, tokens, self.size.width)
        return torch.randn(shape, dtype=torch.bfloat16, device=self.device, requires_grad=True)


class Way:
    """How the tensors that backward needs are kept: around forward, and how a layer is run."""

    note: str | None = None
    recipes: tuple[str, ...] = ()
    without_copies: str | None = None  # the way that computes the same and copies nothing
    searched = True  # whether the longest sequence is looked for

    def __init__(self, training: Training) -> None:
        self.training = training

    def saving(self) -> AbstractContextManager:
        return nullcontext()

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.training.model(x)

    def step(self, batch: torch.Tensor) -> None:
        for parameter in self.training.model.parameters():
            parameter.grad.zero_()
        with self.saving():
            loss = self.run(batch).float().square().mean()
        loss.backward()
        batch.grad = None

    def pinned_bytes(self) -> int:
        return 0


class Checkpointed(Way):
    note = "torch.utils.checkpoint around every layer"

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.training.model:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class Offloaded(Way):
    recipes = ("activation_offload",)
    without_copies = "resident"

    def saving(self) -> AbstractContextManager:
        return self.training.offload.saving()

    def pinned_bytes(self) -> int:
        return self.training.offload.used


class HalfOffloaded(Offloaded):
    note = "a budget of half of what is saved at these tokens"
    searched = False

    def saving(self) -> AbstractContextManager:
        offload = self.training.offload
        offload.budget = offload.wanted // 2 if offload.wanted else self.training.size.pool_bytes
        return offload.saving()


class CheckpointedOffloaded(Offloaded, Checkpointed):
    note = "torch.utils.checkpoint around every layer; the layers' inputs go to the host"
    without_copies = "checkpoint"


class Peer(Way):
    """Pins memory in PyTorch's allocator, anew for every length of sequence."""

    searched = False

    def pinned_bytes(self) -> int:
        if self.training.device.type != "cuda":
            return 0
        return torch.cuda.host_memory_stats()["allocated_bytes.peak"]


class SaveOnCpu(Peer):
    note = "torch.autograd.graph.save_on_cpu(pin_memory=True)"

    def saving(self) -> AbstractContextManager:
        return torch.autograd.graph.save_on_cpu(pin_memory=self.training.device.type == "cuda")


class Torchtune(Peer):
    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self.hooks = importlib.import_module("torchtune.training").OffloadActivations
        self.note = f"torchtune {version('torchtune')}, OffloadActivations"

    def saving(self) -> AbstractContextManager:
        return self.hooks()


WAYS: dict[str, type[Way]] = {
    "resident": Way,
    "activation_offload": Offloaded,
    "activation_offload_half": HalfOffloaded,
    "checkpoint": Checkpointed,  # before the next, whose bound refers to it
    "checkpoint_activation_offload": CheckpointedOffloaded,
    "torchtune": Torchtune,
    "save_on_cpu": SaveOnCpu,
}
TRACED = ("resident", "activation_offload", "checkpoint_activation_offload", "save_on_cpu")


# -- measuring --------------------------------------------------------------------------------


def measure(training: Training, way: Way, repeats: int) -> dict:
    """All fields of a row but its name and what compares it with ``resident``."""
    device, batch = training.device, training.batch(training.size.tokens)
    training.offload.budget = training.size.pool_bytes
    training.offload.window = training.layer_bytes(training.size.tokens)
    for _ in range(3):
        way.step(batch)
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_peak_host_memory_stats()  # not the way's before
    events = [timing_event(device) for _ in range(repeats + 1)]
    events[0].record()
    for number, event in enumerate(events[1:]):
        way.step(batch)
        event.record()
        events[number].synchronize()
    synchronize(device)
    steps = [events[i].elapsed_time(events[i + 1]) / 1e3 for i in range(repeats)]
    row = {"step_s": statistics.median(steps), "samples": {"step_s": steps}}
    if device.type == "cuda":
        row["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        row["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
    row["pinned_bytes"] = way.pinned_bytes()
    return row


def bound(row: dict, window: int, link: dict[str, float], without_copies_s: float) -> dict:
    """``bound_s``, ``bound_from`` and ``eta`` of a row."""
    moved = row["pinned_bytes"] - window
    rates = [link[f"pinned_{direction}_bytes_per_s"] for direction in ("d2h", "h2d")]
    bound_s = max(without_copies_s, sum(moved / rate for rate in rates))
    return {"bound_s": bound_s, "bound_from": BOUND_FROM, "eta": bound_s / row["step_s"]}


def longest(training: Training, way: Way, started: float) -> int | None:
    """The longest sequence of which a step runs; None where nothing can run out."""
    if training.device.type != "cuda":
        return None
    found = training.size.tokens
    for tokens in training.size.sequences:
        empty(training)
        training.offload.window = training.layer_bytes(tokens)
        begin = time.perf_counter()
        try:
            way.step(training.batch(tokens))
            synchronize(training.device)
        except torch.cuda.OutOfMemoryError:
            return found
        found = tokens
        say(started, f"  {tokens} tokens ran, {time.perf_counter() - begin:.1f} s")
    return found


def empty(training: Training) -> None:
    """Give back what the step before, failed or not, has left."""
    synchronize(training.device)
    training.offload.release(0)
    training.offload.arriving.clear()
    gc.collect()
    if training.device.type == "cuda":
        torch.cuda.empty_cache()


def trace(training: Training, way: Way, name: str, out: Path, head: dict) -> None:
    """Write the lanes of one step; kernels and copies close to each other are one block."""
    batch = training.batch(training.size.tokens)
    way.step(batch)
    synchronize(training.device)
    with torch.profiler.profile(acc_events=True) as profile:
        way.step(batch)
        synchronize(training.device)
    events = profiled_events(profile)

    def of(category: str, word: str = "") -> list[dict]:
        return [e for e in events if e.get("cat") == category and word in e["name"]]

    drawn = blocks(of("kernel"), "compute", GAP_US, lambda event: "kernels")
    for lane, direction in (("H2D", "HtoD"), ("D2H", "DtoH")):
        big = [e for e in of("gpu_memcpy", direction) if e["args"].get("bytes", 0) >= 2**20]
        drawn += blocks(big, lane, GAP_US, lambda event: event["name"])
    write_trace(out, head, name, way.recipes, drawn, min(block.start for block in drawn))


def run(arguments: argparse.Namespace, device: torch.device) -> None:
    started = time.perf_counter()
    size = SMALL if arguments.small else FULL
    training = Training(size, device)
    say(started, f"model and a pool of {size.pool_bytes / 1e9:.2f} GB")
    link = link_rates(device, size.link_bytes)
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    workload = {
        "model": f"{size.layers} transformer layers of width {size.width}, causal attention",
        "parameters": parameters,
        "precision": "bfloat16 weights, activations and gradients",
        "tokens": size.tokens,
        "device_memory_limit_bytes": size.device_bytes,
        "pool_bytes": size.pool_bytes,
    }
    head = header("activation_offload", device, workload, link)
    recipes = {name: way.recipes for name, way in WAYS.items()}
    results = Results(arguments.out, head, recipes, ())
    steps: dict[str, float] = {}
    for name in arguments.ways:
        try:
            way = WAYS[name](training)
            row = measure(training, way, arguments.repeats)
            steps[name] = row["step_s"]
            if "resident" in steps:
                row["over_resident"] = row["step_s"] / steps["resident"]
            if link and way.without_copies in steps:
                window = training.layer_bytes(size.tokens)
                row |= bound(row, window, link, steps[way.without_copies])
            say(started, f"{name}: { {k: v for k, v in row.items() if k != 'samples'} }")
            results.add({"name": name, "note": way.note} | row)
            if name in TRACED and device.type == "cuda":
                trace(training, way, name, arguments.out, head)
            if way.searched and not arguments.no_search:
                row["longest_tokens"] = longest(training, way, started)
                results.add({"name": name, "note": way.note} | row)
        except Exception as error:  # why there is no row; the other ways have theirs
            reason = f"{type(error).__name__}: {str(error)[:300]}"
            say(started, f"{name}: {reason}")
            if not results.has(name):
                results.skip(name, reason)
        empty(training)
    training.offload.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks", help="results/, traces/")
    parser.add_argument("--ways", type=lambda s: s.split(","), default=list(WAYS))
    parser.add_argument("--repeats", type=int, default=5, help="samples a row")
    parser.add_argument("--no-search", action="store_true", help="no longest sequence")
    parser.add_argument("--small", action="store_true", help="a size for rehearsal")
    arguments = parser.parse_args()
    if unknown := set(arguments.ways) - set(WAYS):
        parser.error(f"no way {sorted(unknown)}; there are {list(WAYS)}")
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type == "cuda":
        device = torch.device("cuda", 0)
        total = torch.cuda.get_device_properties(device).total_memory
        size = SMALL if arguments.small else FULL
        torch.cuda.set_per_process_memory_fraction(min(1.0, size.device_bytes / total), device)
    run(arguments, device)


if __name__ == "__main__":
    main()
