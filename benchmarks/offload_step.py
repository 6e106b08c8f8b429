"""Measure whole training steps of a stock Llama whose layers and optimizer live on the host.

    torchrun --nproc-per-node=1 --max-restarts=3 benchmarks/offload_step.py   # one H200
    python benchmarks/offload_step.py --what peers                            # other packages
    python benchmarks/offload_step.py --what larger                           # one H100
    python benchmarks/offload_step.py --what 8bit --model qwen3-4b            # one H200
    python benchmarks/offload_step.py --what held                             # one H200
    torchrun --nproc-per-node=2 benchmarks/offload_step.py --what peers       # or copies
    python benchmarks/offload_step.py --small --out /tmp/rehearsal            # a minute on a CPU

Rows are written as they are known; the same command goes on where it was cut off, and torchrun does
so by itself. ``--until`` (seconds from now) leaves out what no longer fits.

The model is ``llama-8b`` of ``workloads.py``, or ``--model``, in bf16 with fp32 masters, trained by
its loop: a new learning rate each step, gradients clipped, ``loss.item()`` behind every step.
Sequences of 4,096 tokens, the same batch in every step. Every layer runs under
``torch.utils.checkpoint`` in all rows.

How a number is made
--------------------
* ``step_s``: median time from the end of a step to the end of the next, by the host's clock; a step
  ends when its loss is here. What updates are still to be made then, the next step waits for.
* ``resident``: everything on the device, measured at two depths and extrapolated to 32 layers by a
  straight line, as are ``forward_s`` and ``backward_s`` (events on the device).
* ``streamed_adam``: ``StreamedModel`` and ``HostAdamW``, clipped. ``device_state_bytes``
  are the weights, gradients and optimizer states on the device, slots included; what a budget of
  24 GB leaves for layers is used. ``streamed_adam_in_backward`` does not clip, and updates each
  layer as its gradients arrive.
* ``8bit``, ``8bit_in_backward``: the same with ``moments="8bit"``; ``held_bytes``: what the host
  holds, by ``Pss``, more than before the model was made. ``bound_s``: forward and backward, each
  the longest of what the device computes, ``resident`` with the update, and of the bytes that come
  and that go at the rates of ``link``. ``update_s``: the update alone, nothing copied.
* ``8bit_held``: steps of one sequence in backward, all layers on the host; of ``llama-8b`` with the
  device held to 24 GB. ``most_process_bytes``: the most of ``Pss`` behind any step.
* ``kept``: ``resident`` over the row's step. ``bound_s``: backward and the longer of forward and
  update; without clipping, the longer of forward with backward and update. Update: 28 bytes for
  each parameter on the host at the faster of the two rates of ``host``. ``of_bound``: ``bound_s``
  divided by ``step_s``.
* ``host``: ``update_bytes_per_s`` is what the update of every third layer alone moves, by 28 bytes
  a parameter; ``clipped_bytes_per_s`` the same where gradients are scaled. The yardstick is an
  in-place ``mul_`` over masters and moments of the same layers by all threads, read and written.
  ``large_pages``: the share of the process's memory in large pages.
* ``in_step_s``: from the first block of a clipped step's update to its last, beside the forward.
* ``larger_than_device``: as deep as the host's and the device's memory allow. ``FIFTY`` steps of
  one batch; ``state_bytes`` are weights, gradients and Adam's state, ``fits_resident`` the
  parameters that would fit the device with the same optimizer and batch, from the memory that two
  depths reserve. Samples: loss, memory reserved on the device, the process's memory, step by step.
* ``one_copy``: six layers, clipped, on all ranks of one host; ``SharedModel`` and ``HostAdamW``
  keep weights and optimizer state once, ``own_copy`` is ``streamed_adam`` on each rank.
  ``held_bytes``: what the host holds for all ranks, by ``Pss``. ``tokens`` are those of each rank.
* Peers (``offload_peers.py``) train the same model in the same loop, at two depths, extrapolated as
  ``resident`` is, as is what they hold on the device when backward has ended: weights, gradients
  and optimizer state (``device_state_bytes``).
"""

import argparse
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import measuring  # noqa: E402
from benchmarks.measuring import HostMemory, Task, device_peaks, tell  # noqa: E402
from benchmarks.offload_peers import DEPTHS, HOW, PEERS, PeerLoop, by_decay, note_of  # noqa: E402
from benchmarks.workloads import LARGEST_NORM, StockLoop, stock  # noqa: E402
from overlap_recipes.offload import eight_bit, host_adam  # noqa: E402
from overlap_recipes.offload.host_adam import LayerUpdate  # noqa: E402
from overlap_recipes.offload.one_copy_a_host import Host, SharedModel  # noqa: E402
from overlap_recipes.offload.streamed_model import StreamedModel  # noqa: E402
from overlap_recipes.offload.whole_step import HostAdamW  # noqa: E402

OURS = (
    "host",
    "streamed_adam",
    "streamed_adam_in_backward",
    "8bit",
    "8bit_in_backward",
    "8bit_held",
    "larger_than_device",
    "own_copy",
    "one_copy",
)
CPU = torch.device("cpu")
UPDATE_BYTES = 28  # a parameter: gradient, master and moments read; master, moments, weight written
STATE_BYTES = 16  # a parameter: bf16 weight and gradient, fp32 master and moments
DEVICE_STATE = 24e9  # bytes of weights, gradients and optimizer state that the device may hold
LARGER_HOST_STATE = 96e9  # bytes that the host holds of the model that is larger than the device
LARGER_SHARE = 0.72  # of the device's memory for state; the rest for logits and activations
FIFTY = 50
HELD_STEPS = 20
ONE_COPY_LAYERS = 6
FACTOR = 0.5  # of clipping, where an update is timed alone
BOUND = "backward + max(forward, update) of this file's rows"
BOUND_OF_8BIT = "forward + backward, each the longest of compute, link in and link out"
BOUND_IN_BACKWARD = "max(forward + backward, update) of this file's rows"


@dataclass(frozen=True)
class Size:
    name: str
    layers: int
    depths: tuple[int, int]
    tokens: tuple[int, ...]
    length: int
    steps: int


SIZES = {
    "llama-8b": Size("llama-8b", 32, (4, 8), (16384, 8192, 32768), 4096, 4),
    "qwen3-4b": Size("qwen3-4b", 36, (4, 8), (8192, 16384, 32768), 4096, 4),
    "qwen3-14b": Size("qwen3-14b", 40, (2, 4), (8192,), 4096, 3),
}
SMALL = Size("llama-tiny", 6, (2, 4), (64, 32, 128), 32, 3)


# -- loops ------------------------------------------------------------------------------------


def train(loop: StockLoop, steps: int, warm: int = 2) -> list[float]:
    """Seconds of each of ``steps`` steps that follow each other."""
    ends = []
    for _ in range(warm + steps):
        loop.step()
        ends.append(time.perf_counter())
    seconds = []
    for number in range(warm, warm + steps):
        seconds.append(ends[number] - ends[number - 1])
    return seconds


class PhaseClock:
    """Seconds of a step's forward, and of its backward, on the device."""

    def __init__(self, loop: StockLoop, device: torch.device) -> None:
        self.device = device
        self.marks = []  # three a step: forward begins, forward ends, backward ends
        self.hooks = [
            loop.model.register_forward_pre_hook(lambda *_: self.mark()),
            loop.model.register_forward_hook(lambda *_: self.mark()),
            loop.optimizer.register_step_pre_hook(lambda *_: self.mark()),
        ]

    def mark(self) -> None:
        event = measuring.timing_event(self.device)
        event.record()
        self.marks.append(event)

    def close(self) -> tuple[float, float]:
        """The medians over all steps."""
        for hook in self.hooks:
            hook.remove()
        measuring.synchronize(self.device)
        forward = []
        backward = []
        begins = self.marks[0::3]
        turns = self.marks[1::3]
        ends = self.marks[2::3]
        for begin, turn, end in zip(begins, turns, ends, strict=True):
            forward.append(begin.elapsed_time(turn) / 1e3)
            backward.append(turn.elapsed_time(end) / 1e3)
        return statistics.median(forward), statistics.median(backward)


class Ours:
    """A Llama whose layers are on the host as far as they do not fit ``budget``."""

    def __init__(
        self,
        size: Size,
        device: torch.device,
        layers: int,
        budget: float,
        host: Host | None = None,
        **settings,
    ) -> None:
        self.size = size
        self.device = device
        self.memory = HostMemory()
        self.model = stock(size.name, device, layers=layers).bfloat16()
        stack = StreamedModel
        if host is not None:
            stack = partial(SharedModel, host=host)
        self.streamed = stack(self.model, self.model.model.layers, device, budget=budget)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        settings = {"max_norm": LARGEST_NORM} | settings
        self.optimizer = HostAdamW(by_decay(self.model), self.streamed, lr=1e-4, **settings)
        on_host = self.host_parameters / 1e9
        on_device = self.device_state_bytes / 1e9
        tell(f"{on_host:.2f} G parameters on the host, {on_device:.1f} GB of state on the device")

    def loop(self, tokens: int, clip: bool = True) -> StockLoop:
        """With the optimizer's own clipping, or with updates in backward."""
        self.streamed.wait()
        self.optimizer.zero_grad()
        self.optimizer.max_norm = LARGEST_NORM if clip else None
        self.optimizer.in_backward = not clip
        self.optimizer.skipped = 0
        for group in self.optimizer.param_groups:
            group.pop("initial_lr", None)
            group["lr"] = 1e-4
        count = max(1, tokens // self.size.length)
        options = {"optimizer": self.optimizer, "clip": False}
        return StockLoop(self.model, count * self.size.length, self.size.length, **options)

    @property
    def host_parameters(self) -> int:
        count = 0
        for layer in self.streamed.layers:
            count += sum(parameter.numel() for parameter in layer.trained.values())
        return count

    @property
    def device_state_bytes(self) -> int:
        slots = {}  # bytes by address: layers share them
        for flats in self.streamed.flats + self.streamed.gradient_flats:  # of one layer
            for flat in flats:
                storage = flat.untyped_storage()
                slots[storage.data_ptr()] = storage.nbytes()
        resident = sum(STATE_BYTES * p.numel() for p in self.optimizer.residents)
        return resident + sum(slots.values())

    def close(self) -> None:
        self.streamed.wait()
        self.optimizer.close()
        self.memory.close()


# -- what is measured -------------------------------------------------------------------------


def processor() -> str:
    """The model of the host's processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(": ")[1]
    return "unknown"


def memory_of_process(name: str) -> int:
    """Bytes, by the system's account of all mappings."""
    account = Path("/proc/self/smaps_rollup").read_text()
    kib = dict(re.findall(r"^(\w+): +(\d+) kB", account, re.MULTILINE))
    return 1024 * int(kib[name])


def held_by_ranks(device: torch.device) -> int:
    """Bytes of the host that all ranks hold; what they share counts once."""
    held = torch.tensor(memory_of_process("Pss"), device=device)
    dist.all_reduce(held)
    return held.item()


class UpdateClock:
    """Seconds from the first block of each clipped step's update to the last."""

    def __init__(self, optimizer: HostAdamW) -> None:
        self.begun: list[float] = []  # by step
        self.ended: list[list[float]] = []  # by step, of each layer
        self.hook = optimizer.register_step_post_hook(self.watch)

    def watch(self, optimizer: HostAdamW, *_) -> None:
        """After a step: its gradients are still to arrive, and its layers to be updated."""
        ended: list[float] = []
        self.ended.append(ended)
        optimizer.host.latest.add_done_callback(lambda _: self.begun.append(time.perf_counter()))
        for update in optimizer.host.updates.values():
            update.ended.add_done_callback(lambda _: ended.append(time.perf_counter()))

    def close(self) -> list[float]:
        """The seconds of all steps; updates have ended."""
        self.hook.remove()
        seconds = []
        for begun, ended in zip(self.begun, self.ended, strict=True):
            seconds.append(max(0.0, max(ended) - begun))
        return seconds


class Benchmark:
    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.size = SMALL if options.small else SIZES[options.model]
        self.device = device
        self.host_state = options.host_state
        self.until = options.until
        self.what = options.what
        self.depths = options.depths
        one = stock(self.size.name, "meta", layers=1)
        self.layer_parameters = sum(p.numel() for p in one.model.layers.parameters())
        self.other_parameters = sum(p.numel() for p in one.parameters()) - self.layer_parameters
        # state on the device that is no layer's: of embedding and head, and slots
        slots = 8 * self.layer_parameters  # two of weights and two of gradients, in bf16
        self.around_layers = STATE_BYTES * self.other_parameters + slots
        workload = {
            "model": f"{self.size.name}, vocabulary {one.config.vocab_size:,}",
            "precision": "bfloat16 weights, gradients and compute; fp32 masters and Adam",
            "loop": "clipping, another learning rate in each step, loss read in each step",
            "sequence": f"{self.size.length} tokens",
            "processor": f"{processor()}, {len(os.sched_getaffinity(0))} cores",
        }
        link = measuring.link_rates(device, 1 << (20 if options.small else 30))
        head = measuring.header("offload_step", device, workload, link)
        self.results = measuring.Results(options.out, head, OURS, ("model", "tokens"))
        self.ours: Ours | None = None

    def row(self, name: str, tokens: int | None, memory: HostMemory | None, **fields) -> None:
        row = {"name": name, "model": self.size.name, "loop": "reads", "compiled": False}
        if tokens:
            row["tokens"] = tokens
        row |= device_peaks(self.device)
        if memory is not None:
            row |= memory.peaks()
        self.results.add(row | HOW.get(name, {}) | fields)

    def found(self, name: str, tokens: int | None = None) -> dict:
        """A row of this file; empty where there is none."""
        return self.results.find(name, model=self.size.name, tokens=tokens)

    def clear(self) -> None:
        measuring.forget_memory(self.device)

    def extrapolated(self, by_depth: dict[int, float]) -> float:
        """At all layers, by a straight line; what was measured there is what it is."""
        if self.size.layers in by_depth:
            return by_depth[self.size.layers]
        (few, short), (many, long) = sorted(by_depth.items())
        return long + (long - short) / (many - few) * (self.size.layers - many)

    def row_of_depths(self, name: str, tokens: int, by_depth: dict[int, dict], **more) -> None:
        """A row of straight lines through what was measured at two depths."""
        fields = {}
        samples = {}
        for field in ("step_s", "forward_s", "backward_s"):
            values = {depth: found[field] for depth, found in by_depth.items() if field in found}
            if values:
                fields[field] = self.extrapolated(values)
            for depth, value in values.items():
                samples[f"{field} of {depth} layers"] = [value]
        fields["extrapolated"] = self.size.layers not in by_depth
        fields["optimizer_in_step"] = True
        fields |= more
        self.row(name, tokens, None, **fields, samples=samples)

    # The host's Adam

    @staticmethod
    def update(optimizer: HostAdamW, layers: range, factor: float = 1.0) -> None:
        """An update that changes no weight: its rate is zero."""
        still = [group | {"lr": 0.0} for group in optimizer.settings()]
        jobs = {layer: LayerUpdate(still) for layer in layers}
        optimizer.host.start(jobs, scale=factor)
        for job in jobs.values():
            job.ended.result()

    @staticmethod
    def multiply(optimizer: HostAdamW, layers: range) -> None:
        """A plain pass over masters and moments; threads take the next block when they are free."""
        host = optimizer.host
        tensors = []
        for layer in layers:
            for block in host.blocks[layer]:
                tensors += block[4:]
        left = iter(tensors)  # one for all threads

        def work() -> None:
            for tensor in left:
                tensor.mul_(1.0)

        wait([host.workers.submit(work) for _ in range(host.threads)])

    def host(self) -> None:
        """The update of every third layer alone, and a plain pass over masters and moments."""
        optimizer = self.build().optimizer
        blocks = optimizer.host.blocks
        layers = range(0, len(blocks), 3)
        numel = 0
        for layer in layers:
            numel += sum(block[3].numel() for block in blocks[layer])
        update = partial(self.update, optimizer)
        multiply = partial(self.multiply, optimizer)
        samples = {
            "update_s": measuring.seconds_of(partial(update, layers), CPU, 3),
            "clipped_s": measuring.seconds_of(partial(update, layers, FACTOR), CPU, 3),
            "multiply_s": measuring.seconds_of(partial(multiply, layers), CPU, 3),
        }
        update_s = statistics.median(samples["update_s"])
        clipped_s = statistics.median(samples["clipped_s"])
        plain_s = statistics.median(samples["multiply_s"])
        by_layer = []
        for layer in range(len(blocks)):
            one = range(layer, layer + 1)
            by_layer += measuring.seconds_of(partial(multiply, one), CPU, 1)
        samples["multiply_s, layer by layer"] = by_layer
        rate = UPDATE_BYTES * numel / update_s
        yardstick = 24 * numel / plain_s
        fields = {
            "update_bytes_per_s": rate,
            "clipped_bytes_per_s": UPDATE_BYTES * numel / clipped_s,
            "yardstick_bytes_per_s": yardstick,
            "share_of_yardstick": rate / yardstick,
            "threads": host_adam.pieces.host_threads(),
            "large_pages": memory_of_process("AnonHugePages") / memory_of_process("Anonymous"),
            "block": host_adam.BLOCK,
            "piece": host_adam.pieces.PIECE,
            "processor": processor(),
            "memory_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
        }
        self.row("host", None, None, **fields, samples=samples)

    # Steps

    def resident(self) -> None:
        """Step, forward and backward at two depths, at all tokens."""
        seconds: dict[int, dict] = {tokens: {} for tokens in self.size.tokens}
        for depth in self.size.depths:
            ours = Ours(self.size, self.device, depth, budget=float("inf"))
            for tokens in self.size.tokens:
                loop = ours.loop(tokens)
                try:
                    train(loop, 1, warm=1)
                except torch.OutOfMemoryError as error:
                    self.results.skip(f"resident {tokens}", str(error)[:200])
                    continue
                clock = PhaseClock(loop, self.device)
                steps = train(loop, self.size.steps, warm=1)
                forward, backward = clock.close()
                seconds[tokens][depth] = {
                    "step_s": statistics.median(steps),
                    "forward_s": forward,
                    "backward_s": backward,
                }
            ours.close()
            del ours, loop
            self.clear()
        for tokens, by_depth in seconds.items():
            if len(by_depth) == 2:
                self.row_of_depths("resident", tokens, by_depth)

    def build(self) -> Ours:
        if self.ours is None:
            self.clear()
            self.ours = Ours(self.size, self.device, self.size.layers, self.budget())
        return self.ours

    def streamed(self, tokens: int, clip: bool) -> None:
        ours = self.build()
        self.clear()
        loop = ours.loop(tokens, clip)
        clock = UpdateClock(ours.optimizer)
        steps = train(loop, self.size.steps)
        ours.streamed.wait()
        seconds = clock.close()
        step = statistics.median(steps)
        fields = {"step_s": step, "optimizer_in_step": True, "skipped": ours.optimizer.skipped}
        samples = {"step_s": steps}
        if clip:
            samples["in_step_s"] = seconds[-len(steps) :]
            fields["in_step_s"] = statistics.median(samples["in_step_s"])
        fields |= self.against_bound(ours, tokens, clip, step)
        fields["host_parameters"] = ours.host_parameters
        fields["device_state_bytes"] = ours.device_state_bytes
        fields["layers_on_device"] = len(ours.streamed.resident.plain)
        name = "streamed_adam" if clip else "streamed_adam_in_backward"
        self.row(name, tokens, ours.memory, **fields, samples=samples)

    def budget(self) -> float:
        """Bytes of the device for layers that stay there."""
        if self.size is SMALL or self.what == "held":
            return 0
        return max(0, DEVICE_STATE - self.around_layers)

    def build_8bit(self, clip: bool) -> tuple[Ours, int]:
        """With moments of 8 bits; and what the host held by ``Pss`` before."""
        self.clear()
        held = memory_of_process("Pss")
        settings = {"moments": "8bit"}
        if not clip:
            settings |= {"max_norm": None, "in_backward": True}
        return Ours(self.size, self.device, self.size.layers, self.budget(), **settings), held

    def eight_bits(self, clip: bool) -> None:
        """Steps with moments of 8 bits, at all tokens."""
        ours, held = self.build_8bit(clip)
        update_s = self.update_on_device(ours)
        name = "8bit" if clip else "8bit_in_backward"
        for tokens in self.size.tokens:
            steps = train(ours.loop(tokens, clip), self.size.steps)
            ours.streamed.wait()
            step = statistics.median(steps)
            fields = {
                "step_s": step,
                "optimizer_in_step": True,
                "skipped": ours.optimizer.skipped,
                "held_bytes": memory_of_process("Pss") - held,
                "host_parameters": ours.host_parameters,
                "device_state_bytes": ours.device_state_bytes,
                "layers_on_device": len(ours.streamed.resident.plain),
                "update_s": update_s,
            }
            fields |= self.against_bound_of_8bit(ours, tokens, clip, step, update_s)
            self.row(name, tokens, ours.memory, **fields, samples={"step_s": steps})
        ours.close()

    def update_on_device(self, ours: Ours) -> float:
        """Seconds of the device's update of all layers alone, nothing copied."""
        host = ours.optimizer.host
        settings = ours.optimizer.settings()[0]
        piece = max(host.pieces[0], key=lambda each: each.gradient_here.numel())
        numel = piece.gradient_here.numel()
        parts = host.rooms[0].like(piece.host)
        for part in parts.values():
            part.zero_()
        gradient = torch.zeros_like(piece.gradient_here)
        one = torch.ones((), device=self.device)
        never = torch.zeros_like(one)

        def update() -> None:
            for _ in range(8):
                eight_bit.update(settings, parts, gradient, one, one, never)

        seconds = statistics.median(measuring.seconds_of(update, self.device, 5))
        return seconds / (8 * numel) * ours.host_parameters

    def against_bound_of_8bit(
        self, ours: Ours, tokens: int, clip: bool, step: float, update_s: float
    ) -> dict:
        """What is kept of a resident run's throughput, and what a step could take at best.

        By phase the longest of what the device computes and what its link brings and takes.
        """
        resident = self.found("resident", tokens)
        if not resident:
            return {}
        kept = {"kept": resident["step_s"] / step}
        link = self.results.data["link"]
        if not link:
            return kept
        state = 0
        for tensors in ours.optimizer.host.state.values():
            state += sum(tensor.nbytes for tensor in tensors.values())
        weights = 2 * ours.host_parameters
        come = {"forward": weights, "backward": weights}
        go = {"forward": 0, "backward": 0}
        compute = {"forward": resident["forward_s"], "backward": resident["backward_s"]}
        phase = "forward" if clip else "backward"
        come[phase] += state  # its weights are there
        go[phase] += state + weights
        compute[phase] += update_s
        if clip:
            come["forward"] += weights  # as many bytes of gradients
            go["backward"] += weights
        bound = 0
        fields = {}
        for name, seconds in compute.items():
            inward = come[name] / link["pinned_h2d_bytes_per_s"]
            outward = go[name] / link["pinned_d2h_bytes_per_s"]
            fields[f"bound_of_{name}_s"] = {"compute": seconds, "in": inward, "out": outward}
            bound += max(seconds, inward, outward)
        fields |= {"bound_s": bound, "of_bound": bound / step, "eta": bound / step}
        return kept | fields | {"bound_from": BOUND_OF_8BIT}

    def against_bound(self, ours: Ours, tokens: int, clip: bool, step: float) -> dict:
        """What is kept of a resident run's throughput, and what a step could take at best.

        Both by this file's rows, as far as they are there.
        """
        resident = self.found("resident", tokens)
        if not resident:
            return {}
        kept = {"kept": resident["step_s"] / step}
        alone = self.found("host")
        if not alone:
            return kept
        rate = max(alone["update_bytes_per_s"], alone["clipped_bytes_per_s"])
        update = UPDATE_BYTES * ours.host_parameters / rate
        forward = resident["forward_s"]
        backward = resident["backward_s"]
        if clip:
            bound = backward + max(forward, update)
            bound_from = BOUND
        else:
            bound = max(forward + backward, update)
            bound_from = BOUND_IN_BACKWARD
        return kept | {
            "bound_s": bound,
            "of_bound": bound / step,
            "eta": bound / step,
            "bound_from": bound_from,
            "update_s": update,
        }

    # Larger than the device

    def fits_resident(self, tokens: int) -> float:
        """Parameters of the deepest model that the device would hold and train, extrapolated."""
        reserved = {}
        for depth in self.size.depths:
            self.clear()
            ours = Ours(self.size, self.device, depth, budget=float("inf"))
            self.clear()  # the weights in fp32, from which it was built, are not its own
            train(ours.loop(tokens), 1, warm=1)
            reserved[depth] = torch.cuda.max_memory_reserved()
            ours.close()
            del ours
        (few, less), (many, more) = sorted(reserved.items())
        total = torch.cuda.get_device_properties(0).total_memory
        depth = many + (total - more) * (many - few) // (more - less)
        return self.other_parameters + depth * self.layer_parameters

    def larger(self) -> None:
        """Many steps: the loss, and whether memory grows."""
        full = self.size is not SMALL  # on an accelerator alone
        tokens = min(self.size.tokens)
        on_device = 0
        layers = self.size.layers
        fields = {}
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(0).total_memory
            fields["fits_resident"] = self.fits_resident(tokens)
        if full:
            state = STATE_BYTES * self.layer_parameters
            on_device = LARGER_SHARE * total - self.around_layers
            layers = int(self.host_state // state) + int(on_device // state)
        self.clear()
        ours = Ours(self.size, self.device, layers, budget=on_device)
        self.clear()
        parameters = sum(p.numel() for p in ours.model.parameters())
        fields["parameters"] = parameters
        fields["state_bytes"] = STATE_BYTES * parameters
        fields["layers"] = layers
        fields["layers_on_device"] = len(ours.streamed.resident.plain)
        fields["host_parameters"] = ours.host_parameters
        fields["optimizer_in_step"] = True
        if self.device.type == "cuda":
            fields["state_over_device"] = STATE_BYTES * parameters / total
            fields["over_resident"] = parameters / fields["fits_resident"]
        loop = ours.loop(tokens)
        begun = time.perf_counter()
        samples: dict[str, list] = {"loss": [], "reserved_bytes": [], "process_bytes": []}
        count = FIFTY if full else 10
        for step in range(1, count + 1):
            loop.step()
            samples["loss"].append(loop.loss)
            samples["process_bytes"].append(HostMemory.status("VmRSS"))
            if self.device.type == "cuda":
                samples["reserved_bytes"].append(torch.cuda.memory_reserved())
            late = time.time() > self.until - 10
            if step % 10 == 0 or late:
                fields["step_s"] = (time.perf_counter() - begun) / step
                fields["steps"] = step
                fields["first_loss"] = samples["loss"][0]
                fields["last_loss"] = loop.loss
                self.row("larger_than_device", tokens, ours.memory, **fields, samples=samples)
            if late:
                break
        ours.close()

    def held(self) -> None:
        """Steps in backward with 8 bits, one sequence each, on a device of which little is used."""
        ours, held = self.build_8bit(clip=False)
        self.clear()
        fields = {}
        if self.size.name == "llama-8b":
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(DEVICE_STATE / total)
            fields["device_limit_bytes"] = DEVICE_STATE
        tokens = self.size.length
        loop = ours.loop(tokens, clip=False)
        samples: dict[str, list] = {"loss": [], "process_bytes": [], "step_s": []}
        for _ in range(HELD_STEPS):
            begun = time.perf_counter()
            loop.step()
            samples["step_s"].append(time.perf_counter() - begun)
            samples["loss"].append(loop.loss)
            samples["process_bytes"].append(memory_of_process("Pss"))
        ours.streamed.wait()
        fields["step_s"] = statistics.median(samples["step_s"])
        fields["held_bytes"] = max(samples["process_bytes"]) - held
        fields["most_process_bytes"] = max(samples["process_bytes"])
        fields["parameters"] = sum(p.numel() for p in ours.model.parameters())
        fields["host_parameters"] = ours.host_parameters
        fields["layers_on_device"] = len(ours.streamed.resident.plain)
        fields["optimizer_in_step"] = True
        fields["first_loss"] = samples["loss"][0]
        fields["last_loss"] = loop.loss
        self.row("8bit_held", tokens, ours.memory, **fields, samples=samples)
        ours.close()

    # Ranks of one host

    def copies(self, name: str) -> None:
        """Steps of some layers on all ranks of a host, and what the host holds for them."""
        host = Host() if name == "one_copy" else None
        tokens = min(self.size.tokens)
        held = held_by_ranks(self.device)
        ours = Ours(self.size, self.device, ONE_COPY_LAYERS, 0, host)
        loop = ours.loop(tokens)
        clock = UpdateClock(ours.optimizer)
        steps = train(loop, self.size.steps)
        ours.streamed.wait()
        seconds = clock.close()
        fields = {
            "step_s": statistics.median(steps),
            "optimizer_in_step": True,
            "in_step_s": statistics.median(seconds),
            "layers": ONE_COPY_LAYERS,
            "host_parameters": ours.host_parameters,
            "held_bytes": held_by_ranks(self.device) - held,
            "last_loss": loop.loss,
            "samples": {"step_s": steps, "in_step_s": seconds},
        }
        self.row(name, tokens, None, **fields)
        dist.barrier()
        ours.close()

    # Peers

    def peer(self, name: str) -> None:
        """Whole steps at two depths or one; one that does not clip by itself has rows with ours."""
        seconds: dict[tuple, dict] = {}  # by row and tokens, and in it by depth
        state = {}
        depths = self.depths or DEPTHS.get(name, self.size.depths)
        for depth in depths:
            model = stock(self.size.name, self.device, layers=depth).bfloat16()
            model.gradient_checkpointing_enable({"use_reentrant": False})
            loop = PeerLoop(model, self.size.length, self.size.length)
            del model
            PEERS[name](loop)
            self.clear()  # the weights in fp32, from which it was built
            rows = {name: False}  # and whether our clipping is added
            if loop.limit is not None:
                rows[f"{name}_clipped"] = True
            for row, limited in rows.items():
                loop.limited = limited
                for tokens in self.size.tokens:
                    count = max(1, tokens // self.size.length) * self.size.length
                    loop.set_batch(count, self.size.length)
                    steps = train(loop, 2, warm=1)
                    by_depth = seconds.setdefault((row, tokens), {})
                    by_depth[depth] = {"step_s": statistics.median(steps)}
                    state[depth] = loop.state_bytes
                    tell(f"{row}, {depth} layers, {tokens} tokens: {steps}")
                    if depth == depths[-1]:
                        self.row_of_peer(name, row, tokens, by_depth, state)
            loop.close()
            del loop
            HostMemory()  # gives back what was pinned
            self.clear()

    def row_of_peer(self, name: str, row: str, tokens: int, by_depth: dict, state: dict) -> None:
        fields = {"device_state_bytes": round(self.extrapolated(state))}
        fields |= note_of(name)
        resident = self.found("resident", tokens)
        if resident:
            step = self.extrapolated({depth: of["step_s"] for depth, of in by_depth.items()})
            fields["kept"] = resident["step_s"] / step
        self.row_of_depths(row, tokens, by_depth, **fields)

    def task(self, name: str, seconds: float, work: Callable[[], None], *tokens: int) -> Task:
        """``tokens``: of the rows that ``work`` adds; none for a row without."""
        title = f"{name} {tokens[0]}" if len(tokens) == 1 else name
        if self.size is SMALL:
            seconds = 90

        def done() -> bool:
            if not tokens:
                return bool(self.found(name))
            return all(self.found(name, count) for count in tokens)

        return Task(title, seconds, work, done)

    def tasks(self, what: str, peers: list[str]) -> list[Task]:
        every = self.size.tokens
        least = min(every)
        found = []
        if what in ("ours", "8bit", "all"):
            found.append(self.task("resident", 35, self.resident, *every))
        if what in ("ours", "all"):
            found.append(self.task("host", 40, self.host))
            clips = {"streamed_adam_in_backward": False, "streamed_adam": True}
            for name, clip in clips.items():
                for tokens in every:
                    work = partial(self.streamed, tokens, clip)
                    found.append(self.task(name, 35, work, tokens))
        if what in ("8bit", "all"):
            for name, clip in {"8bit_in_backward": False, "8bit": True}.items():
                found.append(self.task(name, 70, partial(self.eight_bits, clip), *every))
        if what == "held":
            found.append(self.task("8bit_held", 90, self.held, self.size.length))
        if what == "larger":
            found.append(self.task("larger_than_device", 150, self.larger, least))
        if what == "copies":
            for name in ("one_copy", "own_copy"):
                found.append(self.task(name, 30, partial(self.copies, name), least))
        if what in ("peers", "all"):
            for name in peers:
                seconds = 70
                if name == "deepspeed_offload":
                    seconds = 130
                elif self.depths:
                    seconds = 100
                found.append(self.task(name, seconds, partial(self.peer, name), *every))
        return found


def main() -> None:
    parser = measuring.command_line(__doc__)
    choices = ("ours", "8bit", "held", "peers", "copies", "larger", "all")
    parser.add_argument("--what", choices=choices, default="ours")
    parser.add_argument("--model", choices=SIZES, default="llama-8b")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--depths", nargs="+", type=int, help="of peers; 32: nothing extrapolated")
    parser.add_argument("--host-state", type=float, default=LARGER_HOST_STATE, help="bytes; larger")
    options = parser.parse_args()
    with measuring.started_rank() as device:
        benchmark = Benchmark(options, device)
        tell(f"{measuring.device_name(device)}, torch {torch.__version__}")
        tasks = measuring.chosen(benchmark.tasks(options.what, options.peers), options.only)
        agreement = measuring.Agreement()
        measuring.run_tasks(tasks, benchmark.results, benchmark.until, agreement)
        if benchmark.ours is not None:
            benchmark.ours.close()


if __name__ == "__main__":
    main()
