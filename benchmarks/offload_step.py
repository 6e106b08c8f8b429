"""Measure whole training steps of a stock Llama whose layers and optimizer live on the host.

    torchrun --nproc-per-node=1 --max-restarts=3 benchmarks/offload_step.py   # one H200
    python benchmarks/offload_step.py --what peers                            # other packages
    python benchmarks/offload_step.py --what larger                           # one H100
    torchrun --nproc-per-node=2 benchmarks/offload_step.py --what peers       # or copies
    python benchmarks/offload_step.py --small --out /tmp/rehearsal            # a minute on a CPU

Rows are written as they are known; the same command goes on where it was cut off, and torchrun does
so by itself. ``--until`` (seconds from now) leaves out what no longer fits.

The model is ``llama-8b`` of ``workloads.py`` in bf16 with fp32 masters, trained by its loop: a new
learning rate each step, gradients clipped, ``loss.item()`` behind every step. Sequences of 4,096
tokens, the same batch in every step. Every layer runs under ``torch.utils.checkpoint`` in all rows.

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
from benchmarks.offload_peers import DEPTHS, PEERS, PeerLoop, by_decay, note_of  # noqa: E402
from benchmarks.workloads import LARGEST_NORM, LLAMAS, StockLoop, llama  # noqa: E402
from overlap_recipes.offload import host_adam  # noqa: E402
from overlap_recipes.offload.host_adam import LayerUpdate  # noqa: E402
from overlap_recipes.offload.one_copy_a_host import Host, SharedModel  # noqa: E402
from overlap_recipes.offload.streamed_model import StreamedModel  # noqa: E402
from overlap_recipes.offload.whole_step import HostAdamW  # noqa: E402

RECIPES = ("overlap_recipes.offload.streamed_model", "overlap_recipes.offload.whole_step")
ONE_COPY = ("overlap_recipes.offload.one_copy_a_host",)
CPU = torch.device("cpu")
UPDATE_BYTES = 28  # a parameter: gradient, master and moments read; master, moments, weight written
STATE_BYTES = 16  # a parameter: bf16 weight and gradient, fp32 master and moments
DEVICE_STATE = 24e9  # bytes of weights, gradients and optimizer state that the device may hold
LARGER_HOST_STATE = 96e9  # bytes that the host holds of the model that is larger than the device
LARGER_SHARE = 0.72  # of the device's memory for state; the rest for logits and activations
FIFTY = 50
ONE_COPY_LAYERS = 6
FACTOR = 0.5  # of clipping, where an update is timed alone
BOUND = "backward + max(forward, update) of this file's rows"
BOUND_IN_BACKWARD = "max(forward + backward, update) of this file's rows"


@dataclass(frozen=True)
class Size:
    name: str
    layers: int
    depths: tuple[int, int]
    tokens: tuple[int, ...]
    length: int
    steps: int


FULL = Size("llama-8b", 32, (4, 8), (16384, 8192, 32768), 4096, 4)
SMALL = Size("llama-tiny", 6, (2, 4), (64, 32, 128), 32, 3)


# -- loops ------------------------------------------------------------------------------------


def train(loop: StockLoop, steps: int, warm: int = 2) -> list[float]:
    """Seconds of each of ``steps`` steps that follow each other."""
    ends = []
    for _ in range(warm + steps):
        loop.step()
        ends.append(time.perf_counter())
    return [later - end for end, later in zip(ends[warm - 1 :], ends[warm:], strict=False)]


class PhaseClock:
    """Seconds of a step's forward, and of its backward, on the device."""

    def __init__(self, loop: StockLoop, device: torch.device) -> None:
        self.device, self.marks = device, []
        self.hooks = [
            loop.model.register_forward_pre_hook(lambda *_: self.mark()),
            loop.model.register_forward_hook(lambda *_: self.mark()),
            loop.optimizer.register_step_pre_hook(lambda *_: self.mark()),
        ]

    def mark(self) -> None:
        self.marks.append(measuring.timing_event(self.device))
        self.marks[-1].record()

    def close(self) -> tuple[float, float]:
        for hook in self.hooks:
            hook.remove()
        measuring.synchronize(self.device)
        phases = []
        for first in (0, 1):
            pairs = zip(self.marks[first::3], self.marks[first + 1 :: 3], strict=True)
            phases.append(statistics.median([a.elapsed_time(b) / 1e3 for a, b in pairs]))
        return phases[0], phases[1]


class Ours:
    """A Llama whose layers are on the host as far as they do not fit ``budget``."""

    def __init__(
        self, size: Size, device: torch.device, layers: int, budget: float, host: Host | None = None
    ) -> None:
        self.size, self.device, self.memory = size, device, HostMemory()
        self.model = llama(size.name, device, layers=layers).bfloat16()
        stack = partial(SharedModel, host=host) if host else StreamedModel
        self.streamed = stack(self.model, self.model.model.layers, device, budget=budget)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        groups, adamw = by_decay(self.model), HostAdamW
        self.optimizer = adamw(groups, self.streamed, lr=1e-4, max_norm=LARGEST_NORM)
        on_host, on_device = self.host_parameters / 1e9, self.device_state_bytes / 1e9
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
        layers = self.streamed.layers
        return sum(p.numel() for layer in layers for p in layer.trained.values())

    @property
    def device_state_bytes(self) -> int:
        flats = [*self.streamed.flats, *self.streamed.gradient_flats]
        slots = {flat.untyped_storage().data_ptr(): flat for each in flats for flat in each}
        resident = sum(STATE_BYTES * p.numel() for p in self.optimizer.residents)
        return resident + sum(flat.untyped_storage().nbytes() for flat in slots.values())

    def close(self) -> None:
        self.streamed.wait()
        self.optimizer.close()
        self.memory.close()


# -- what is measured -------------------------------------------------------------------------


def processor() -> str:
    """The model of the host's processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((x.split(": ")[1] for x in lines if x.startswith("model name")), "unknown")


def memory_of_process(name: str) -> int:
    """Bytes, by the system's account of all mappings."""
    kib = dict(re.findall(r"^(\w+): +(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.M))
    return 1024 * int(kib[name])


def held_by_ranks(device: torch.device) -> int:
    """Bytes of the host that all ranks hold; what they share counts once."""
    held = torch.tensor(memory_of_process("Pss"), device=device)
    dist.all_reduce(held)
    return held.item()


class UpdateClock:
    """Seconds from the first block of each clipped step's update to the last."""

    def __init__(self, host: host_adam.HostUpdates) -> None:
        self.seconds, self.left, self.begun = [], 0, 0.0
        self.start, self.end = host.start, host.end
        host.start, host.end = self.started, self.ended

    def started(self, announced: dict, scale: float = 1.0) -> None:
        self.left, self.begun = len(announced), time.perf_counter()
        self.start(announced, scale)

    def ended(self, *args) -> None:
        self.end(*args)
        self.left -= 1
        if self.left == 0:
            self.seconds.append(time.perf_counter() - self.begun)


class Benchmark:
    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.size, self.device = SMALL if options.small else FULL, device
        self.host_state, self.until = options.host_state, options.until
        self.depths = options.depths
        shape, one = LLAMAS[self.size.name], llama(self.size.name, "meta", layers=1)
        self.layer_parameters = sum(p.numel() for p in one.model.layers.parameters())
        self.other_parameters = sum(p.numel() for p in one.parameters()) - self.layer_parameters
        # state on the device that is no layer's: of embedding and head, and slots
        slots = 8 * self.layer_parameters
        self.around_layers = STATE_BYTES * self.other_parameters + slots
        workload = {
            "model": f"{self.size.name}, vocabulary {shape.vocabulary:,}",
            "precision": "bfloat16 weights, gradients and compute; fp32 masters and Adam",
            "loop": "clipping, another learning rate in each step, loss read in each step",
            "sequence": f"{self.size.length} tokens",
            "processor": f"{processor()}, {len(os.sched_getaffinity(0))} cores",
        }
        link = measuring.link_rates(device, 1 << (20 if options.small else 30))
        head = measuring.header("offload_step", device, workload, link)
        ours = "host", "streamed_adam", "streamed_adam_in_backward", "larger_than_device"
        recipes = dict.fromkeys((*ours, "own_copy"), RECIPES)
        recipes["one_copy"] = ONE_COPY
        self.results = measuring.Results(options.out, head, recipes, ("model", "tokens"))
        self.ours: Ours | None = None

    def row(self, name: str, tokens: int | None, memory: HostMemory | None, **fields) -> None:
        row = {"name": name, "model": self.size.name, "loop": "reads", "compiled": False}
        row |= {"tokens": tokens} if tokens else {}
        row |= device_peaks(self.device) | (memory.peaks() if memory else {})
        self.results.add(row | fields)

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
        fields, samples = {}, {}
        for field in ("step_s", "forward_s", "backward_s"):
            values = {depth: found[field] for depth, found in by_depth.items() if field in found}
            if values:
                fields[field] = self.extrapolated(values)
                samples |= {f"{field} of {depth} layers": [v] for depth, v in values.items()}
        fields |= {"extrapolated": self.size.layers not in by_depth, "optimizer_in_step": True}
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
        blocks = iter([x for layer in layers for block in host.blocks[layer] for x in block[3:]])

        def work() -> None:
            for x in blocks:
                x.mul_(1.0)

        wait([host.workers.submit(work) for _ in range(host.threads)])

    def host(self) -> None:
        """The update of every third layer alone, and a plain pass over masters and moments."""
        optimizer = self.build().optimizer
        every, layers = range(len(optimizer.host.blocks)), range(0, len(optimizer.host.blocks), 3)
        numel = sum(block[3].numel() for layer in layers for block in optimizer.host.blocks[layer])
        update, multiply = partial(self.update, optimizer), partial(self.multiply, optimizer)
        samples = {
            "update_s": measuring.seconds_of(partial(update, layers), CPU, 3),
            "clipped_s": measuring.seconds_of(partial(update, layers, FACTOR), CPU, 3),
            "multiply_s": measuring.seconds_of(partial(multiply, layers), CPU, 3),
        }
        update_s, clipped_s, plain_s = map(statistics.median, samples.values())
        for layer in every:
            each = range(layer, layer + 1)
            times = measuring.seconds_of(partial(multiply, each), CPU, 1)
            samples.setdefault("multiply_s, layer by layer", []).extend(times)
        rate, yardstick = UPDATE_BYTES * numel / update_s, 24 * numel / plain_s
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
                phases = {"forward_s": forward, "backward_s": backward}
                seconds[tokens][depth] = {"step_s": min(steps)} | phases
            ours.close()
            del ours, loop
            self.clear()
        for tokens, by_depth in seconds.items():
            if len(by_depth) == 2:
                self.row_of_depths("resident", tokens, by_depth)

    def build(self) -> Ours:
        if self.ours is None:
            self.clear()
            budget = DEVICE_STATE - self.around_layers if self.size is FULL else 0
            self.ours = Ours(self.size, self.device, self.size.layers, max(0, budget))
        return self.ours

    def streamed(self, tokens: int, clip: bool) -> None:
        ours = self.build()
        self.clear()
        loop, host = ours.loop(tokens, clip), ours.optimizer.host
        clock = UpdateClock(host)
        steps = train(loop, self.size.steps)
        ours.streamed.wait()
        del host.start, host.end
        step = statistics.median(steps)
        resident, alone = self.found("resident", tokens), self.found("host")
        fields = {"step_s": step, "optimizer_in_step": True, "skipped": ours.optimizer.skipped}
        in_step = {"in_step_s": clock.seconds[-len(steps) :]} if clip else {}
        fields |= {name: statistics.median(seconds) for name, seconds in in_step.items()}
        if alone and resident:
            rate = max(alone["update_bytes_per_s"], alone["clipped_bytes_per_s"])
            update_s = UPDATE_BYTES * ours.host_parameters / rate
            forward, backward = resident["forward_s"], resident["backward_s"]
            in_backward = max(forward + backward, update_s)
            bound = backward + max(forward, update_s) if clip else in_backward
            fields |= {"bound_s": bound, "of_bound": bound / step, "eta": bound / step}
            fields |= {"bound_from": BOUND if clip else BOUND_IN_BACKWARD}
            fields |= {"kept": resident["step_s"] / step, "update_s": update_s}
        fields |= {"host_parameters": ours.host_parameters}
        fields |= {"device_state_bytes": ours.device_state_bytes}
        fields |= {"layers_on_device": len(ours.streamed.resident)}
        name = "streamed_adam" if clip else "streamed_adam_in_backward"
        self.row(name, tokens, ours.memory, **fields, samples={"step_s": steps} | in_step)

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
        full, tokens = self.size is FULL, min(self.size.tokens)
        on_device, layers, fields = 0, self.size.layers, {}
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(0).total_memory
            fields["fits_resident"] = self.fits_resident(tokens)
        if full:
            state = STATE_BYTES * self.layer_parameters
            budget = LARGER_SHARE * total - self.around_layers
            layers = int(self.host_state // state) + int(budget // state)
            on_device = budget
        self.clear()
        ours = Ours(self.size, self.device, layers, budget=on_device)
        self.clear()
        parameters = sum(p.numel() for p in ours.model.parameters())
        fields |= {"parameters": parameters, "state_bytes": STATE_BYTES * parameters}
        fields |= {"layers": layers, "layers_on_device": len(ours.streamed.resident)}
        fields |= {"host_parameters": ours.host_parameters, "optimizer_in_step": True}
        if self.device.type == "cuda":
            fields |= {"state_over_device": STATE_BYTES * parameters / total}
            fields |= {"over_resident": parameters / fields["fits_resident"]}
        loop, begun = ours.loop(tokens), time.perf_counter()
        samples: dict[str, list] = {"loss": [], "reserved_bytes": [], "process_bytes": []}
        for step in range(1, 1 + (FIFTY if full else 10)):
            loop.step()
            samples["loss"].append(loop.loss)
            samples["process_bytes"].append(HostMemory.status("VmRSS"))
            if self.device.type == "cuda":
                samples["reserved_bytes"].append(torch.cuda.memory_reserved())
            late = time.time() > self.until - 10
            if step % 10 == 0 or late:
                fields |= {"step_s": (time.perf_counter() - begun) / step, "steps": step}
                fields |= {"first_loss": samples["loss"][0], "last_loss": loop.loss}
                self.row("larger_than_device", tokens, ours.memory, **fields, samples=samples)
            if late:
                break
        ours.close()

    # Ranks of one host

    def copies(self, name: str) -> None:
        """Steps of some layers on all ranks of a host, and what the host holds for them."""
        host, tokens = Host() if name == "one_copy" else None, min(self.size.tokens)
        held = held_by_ranks(self.device)
        ours = Ours(self.size, self.device, ONE_COPY_LAYERS, 0, host)
        loop = ours.loop(tokens)
        clock = UpdateClock(ours.optimizer.host)
        steps = train(loop, self.size.steps)
        ours.streamed.wait()
        fields = {
            "step_s": statistics.median(steps),
            "optimizer_in_step": True,
            "in_step_s": statistics.median(clock.seconds),
            "layers": ONE_COPY_LAYERS,
            "host_parameters": ours.host_parameters,
            "held_bytes": held_by_ranks(self.device) - held,
            "last_loss": loop.loss,
            "samples": {"step_s": steps, "in_step_s": clock.seconds},
        }
        self.row(name, tokens, None, **fields)
        dist.barrier()
        ours.close()

    # Peers

    def peer(self, name: str) -> None:
        """Whole steps at two depths or one; one that does not clip by itself has rows with ours."""
        seconds: dict[tuple, dict] = {}
        state, depths = {}, self.depths or DEPTHS.get(name, self.size.depths)
        for depth in depths:
            model = llama(self.size.name, self.device, layers=depth).bfloat16()
            model.gradient_checkpointing_enable({"use_reentrant": False})
            loop = PeerLoop(model, self.size.length, self.size.length)
            del model
            PEERS[name](loop)
            self.clear()  # the weights in fp32, from which it was built
            for limited in (False, True) if loop.limit else (False,):
                loop.limited, row = limited, f"{name}_clipped" if limited else name
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
        fields = {"device_state_bytes": round(self.extrapolated(state))} | note_of(name)
        if resident := self.found("resident", tokens):
            step = self.extrapolated({depth: of["step_s"] for depth, of in by_depth.items()})
            fields["kept"] = resident["step_s"] / step
        self.row_of_depths(row, tokens, by_depth, **fields)

    def task(self, name: str, seconds: float, work: Callable[[], None], *tokens: int) -> Task:
        """``tokens``: of the rows that ``work`` adds; none for a row without."""
        title = f"{name} {tokens[0]}" if len(tokens) == 1 else name

        def done() -> bool:
            return all(self.found(name, count) for count in tokens or (None,))

        return Task(title, seconds if self.size is FULL else 15, work, done)

    def tasks(self, what: str, peers: list[str]) -> list[Task]:
        every, least, found = self.size.tokens, min(self.size.tokens), []
        if what in ("ours", "all"):
            found.append(self.task("resident", 35, self.resident, *every))
            found.append(self.task("host", 40, self.host))
            for clip, name in ((False, "streamed_adam_in_backward"), (True, "streamed_adam")):
                for tokens in every:
                    work = partial(self.streamed, tokens, clip)
                    found.append(self.task(name, 35, work, tokens))
        if what == "larger":
            found.append(self.task("larger_than_device", 150, self.larger, least))
        if what == "copies":
            for name in ("one_copy", "own_copy"):
                found.append(self.task(name, 30, partial(self.copies, name), least))
        if what in ("peers", "all"):
            for name in peers:
                seconds = 130 if name == "deepspeed_offload" else 100 if self.depths else 70
                found.append(self.task(name, seconds, partial(self.peer, name), *every))
        return found


def main() -> None:
    parser = measuring.command_line(__doc__)
    choices = ("ours", "peers", "copies", "larger", "all")
    parser.add_argument("--what", choices=choices, default="ours")
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
