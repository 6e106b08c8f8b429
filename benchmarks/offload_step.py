"""Measure whole training steps of a stock Llama whose layers and optimizer live on the host.

    python benchmarks/offload_step.py --out benchmarks                        # one H200 or H100
    python benchmarks/offload_step.py --out benchmarks --what peers           # other packages
    python benchmarks/offload_step.py --small --out /tmp/rehearsal            # a minute on a CPU

One rank, one device. Rows are written as they are known; the same command goes on where it was cut
off. ``--until`` (seconds from now) leaves out what no longer fits.

The model is ``llama-8b`` of ``workloads.py`` in bf16 with fp32 masters, trained by its loop: a new
learning rate each step, gradients clipped, ``loss.item()`` behind every step. Sequences of 4,096
tokens. Every layer runs under ``torch.utils.checkpoint`` in all rows.

How a number is made
--------------------
* ``step_s``: median time from the end of a step to the end of the next, by the host's clock; a step
  ends when its loss is here. What updates are still to be made then, the next step waits for.
* ``resident``: everything on the device, measured at two depths and extrapolated to 32 layers by a
  straight line, as are ``forward_s`` and ``backward_s`` (events on the device).
* ``streamed_adam``: ``streamed_model.py`` and ``whole_step.py``, clipped. ``device_state_bytes``
  are the weights, gradients and optimizer states on the device, slots included; what a budget of
  24 GB leaves for layers is used. ``streamed_adam_in_backward`` does not clip, and updates each
  layer as its gradients arrive.
* ``kept``: ``resident`` over the row's step. ``bound_s``: backward and the longer of forward and
  update; without clipping, the longer of both together and update. Update: 28 bytes for each
  parameter on the host at ``update_bytes_per_s``. ``of_bound``: ``bound_s`` over ``step_s``.
* ``host``: ``update_bytes_per_s`` is what the update of layers alone moves, by 28 bytes a
  parameter; ``yardstick_bytes_per_s`` an in-place ``mul_`` over the same masters by the same
  threads, read and written.
* ``larger_than_device``: ``FIFTY`` steps; weights, gradients and Adam's state against the memory of
  the device, the loss of the first and of the last step, the memory reserved after the fifth and
  after the last one.
* ``fsdp2_cpu_offload``: FSDP2 with ``CPUOffloadPolicy`` on one rank, where it cannot prefetch as it
  does on more; fused AdamW on the host. ``torchao``: its ``CPUOffloadOptimizer`` with gradients
  offloaded, weights on the device, moments in bf16 and no clipping. Both extrapolated as
  ``resident`` is.
"""

import argparse
import gc
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import wait
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes_source" / "offload")]

import host_adam  # noqa: E402
from host_adam import BLOCK, LayerUpdate  # noqa: E402
from streamed_model import StreamedModel  # noqa: E402
from whole_step import HostAdamW  # noqa: E402

from benchmarks.measuring import (  # noqa: E402
    Agreement,
    HostMemory,
    Results,
    Task,
    device_name,
    header,
    link_rates,
    run_tasks,
    say,
    synchronize,
    timing_event,
)
from benchmarks.workloads import LARGEST_NORM, LLAMAS, StockLoop, llama  # noqa: E402

RECIPES = (
    "host_layers",
    "layer_as_node",
    "weight_streaming",
    "streamed_model",
    "host_adam",
    "whole_step",
)
UPDATE_BYTES = 28  # a parameter: gradient, master and moments read; master, moments, weight written
STATE_BYTES = 16  # a parameter: bf16 weight and gradient, fp32 master and moments
DEVICE_STATE = 24e9  # bytes of weights, gradients and optimizer state that the device may hold
FIFTY = 50
BOUND = "backward + max(forward, update) of this run"
BOUND_IN_BACKWARD = "max(forward + backward, update) of this run"


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
        self.marks.append(timing_event(self.device))
        self.marks[-1].record()

    def close(self) -> tuple[float, float]:
        for hook in self.hooks:
            hook.remove()
        synchronize(self.device)
        phases = []
        for first in (0, 1):
            pairs = zip(self.marks[first::3], self.marks[first + 1 :: 3], strict=True)
            phases.append(statistics.median([a.elapsed_time(b) / 1e3 for a, b in pairs]))
        return phases[0], phases[1]


def parameters_by_decay(model: torch.nn.Module) -> list[dict]:
    """Two groups: matrices, and what is not decayed."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1]},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]


class Ours:
    """A Llama whose layers are on the host as far as they do not fit ``budget``."""

    def __init__(self, size: Size, device: torch.device, layers: int, budget: float) -> None:
        self.size, self.device = size, device
        self.model = llama(size.name, device, layers=layers).bfloat16()
        self.streamed = StreamedModel(self.model, self.model.model.layers, device, budget=budget)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        groups = parameters_by_decay(self.model)
        self.optimizer = HostAdamW(groups, self.streamed, lr=1e-4, max_norm=LARGEST_NORM)

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


def fsdp2_cpu_offload(size: Size, device: torch.device, layers: int) -> tuple:
    """FSDP2's policy on one rank: fp32 weights and fused AdamW on the host."""
    if not dist.is_initialized():
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    model = llama(size.name, device, layers=layers).cpu()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    options = {
        "mesh": dist.device_mesh.init_device_mesh(device.type, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda"),
    }
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model, torch.optim.AdamW(parameters_by_decay(model), lr=1e-4, fused=True), True


def torchao(size: Size, device: torch.device, layers: int) -> tuple:
    from torchao.optim import CPUOffloadOptimizer

    model = llama(size.name, device, layers=layers).bfloat16()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    options = {"offload_gradients": True, "lr": 1e-4, "fused": True}
    parameters = parameters_by_decay(model)
    return model, CPUOffloadOptimizer(parameters, torch.optim.AdamW, **options), False


PEERS = {"fsdp2_cpu_offload": fsdp2_cpu_offload, "torchao": torchao}


# -- what is measured -------------------------------------------------------------------------


class Benchmark:
    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.size, self.device = SMALL if options.small else FULL, device
        self.started, self.until = time.perf_counter(), time.time() + options.until
        shape = LLAMAS[self.size.name]
        workload = {
            "model": f"{self.size.name}, vocabulary {shape.vocabulary:,}",
            "precision": "bfloat16 weights, gradients and compute; fp32 masters and Adam",
            "loop": "clipping, another learning rate in each step, loss read in each step",
            "sequence": f"{self.size.length} tokens",
        }
        link = link_rates(device, 1 << (20 if options.small else 30))
        head = header("offload_step", device, workload, link)
        ours = ("host", "streamed_adam", "streamed_adam_in_backward", "larger_than_device")
        recipes = dict.fromkeys(ours, RECIPES)
        self.results = Results(options.out, head, recipes, ("model", "tokens"))
        self.ours: Ours | None = None

    def say(self, text: str) -> None:
        say(self.started, text)

    def row(self, name: str, tokens: int | None, memory: HostMemory | None, **fields) -> None:
        row = {"name": name, "model": self.size.name, "loop": "reads", "compiled": False}
        row |= {"tokens": tokens} if tokens else {}
        if self.device.type == "cuda":
            row["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
            row["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
        row |= memory.peaks() if memory else {}
        self.results.add(row | fields)
        shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in fields.items()}
        self.say(f"{name} {tokens or ''} { ({k: v for k, v in shown.items() if k != 'samples'}) }")

    def found(self, name: str, tokens: int | None = None) -> dict:
        """A row of this file; empty where there is none."""
        key = {"name": name, "model": self.size.name} | ({"tokens": tokens} if tokens else {})
        rows = self.results.data["rows"]
        return next((r for r in rows if all(r.get(k) == v for k, v in key.items())), {})

    def clear(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def extrapolated(self, by_depth: dict[int, float]) -> float:
        (few, short), (many, long) = sorted(by_depth.items())
        return long + (long - short) / (many - few) * (self.size.layers - many)

    def resident(self) -> None:
        """Step, forward and backward at two depths, at all tokens."""
        seconds: dict[tuple, dict] = {}
        for depth in self.size.depths:
            ours = Ours(self.size, self.device, depth, budget=float("inf"))
            for tokens in self.size.tokens:
                loop = ours.loop(tokens)
                try:
                    train(loop, 1)
                except torch.OutOfMemoryError as error:
                    self.results.skip(f"resident {tokens}", str(error)[:200])
                    continue
                phases = PhaseClock(loop, self.device)
                steps = train(loop, self.size.steps, warm=1)
                forward, backward = phases.close()
                fields = {"step_s": min(steps), "forward_s": forward, "backward_s": backward}
                for field, value in fields.items():
                    seconds.setdefault((tokens, field), {})[depth] = value
            ours.close()
            del ours, loop
            self.clear()
        for tokens in (t for t in self.size.tokens if len(seconds.get((t, "step_s"), ())) == 2):
            depths = {f: seconds[tokens, f] for f in ("step_s", "forward_s", "backward_s")}
            fields = {f: self.extrapolated(by_depth) for f, by_depth in depths.items()}
            samples = {f"{f} of {d} layers": [s] for f, v in depths.items() for d, s in v.items()}
            extra = {"extrapolated": True, "optimizer_in_step": True, "samples": samples}
            self.row("resident", tokens, None, **fields, **extra)

    def build(self) -> Ours:
        if self.ours is None:
            self.clear()
            self.memory = HostMemory()
            begun = time.perf_counter()
            shape = LLAMAS[self.size.name]
            outside = 2 * shape.vocabulary * shape.width * STATE_BYTES
            heads = 2 * shape.width**2 * (1 + shape.kv_heads / shape.heads)
            slots = STATE_BYTES / 2 * (heads + 3 * shape.width * shape.mlp)  # two, bf16, each way
            budget = max(0.0, DEVICE_STATE - outside - slots) if self.size is FULL else 0
            self.ours = Ours(self.size, self.device, self.size.layers, budget)
            self.say(
                f"built in {time.perf_counter() - begun:.0f} s, "
                f"{self.ours.host_parameters / 1e9:.2f} G parameters on the host, "
                f"{len(self.ours.streamed.resident)} layers and "
                f"{self.ours.device_state_bytes / 1e9:.1f} GB of state on the device"
            )
        return self.ours

    def host(self) -> None:
        """The update of some layers alone, and a plain pass over their masters."""
        optimizer = self.build().optimizer
        host = optimizer.host
        layers = range(min(4, len(host.blocks)))
        numel = sum(block[3].numel() for layer in layers for block in host.blocks[layer])

        def update() -> None:
            still = [group | {"lr": 0.0} for group in optimizer.settings()]
            jobs = {layer: LayerUpdate(still) for layer in layers}
            host.start(jobs, steps=1)
            for job in jobs.values():
                job.result()

        def multiply() -> None:
            masters = [b[3] for layer in layers for b in host.blocks[layer]]
            parts = [masters[i::16] for i in range(16)]
            wait([host.workers.submit(lambda p: [x.mul_(1.0) for x in p], p) for p in parts])

        def seconds(work: Callable[[], None]) -> list[float]:
            work()
            times = []
            for _ in range(5):
                begun = time.perf_counter()
                work()
                times.append(time.perf_counter() - begun)
            return times

        update_s, multiply_s = seconds(update), seconds(multiply)
        moved = UPDATE_BYTES * numel / statistics.median(update_s)
        plain = 8 * numel / statistics.median(multiply_s)
        fields = {"update_bytes_per_s": moved, "yardstick_bytes_per_s": plain}
        by_block = {}
        for size in (2**19, 2**21, 2**22):
            self.cut(layers, size)
            by_block[f"update_s in blocks of {size}"] = seconds(update)
        self.cut(layers, BLOCK)
        fields |= {"share_of_yardstick": moved / plain, "threads": host_adam.host_threads()}
        samples = {"update_s": update_s, "multiply_s": multiply_s, **by_block}
        self.row("host", None, None, **fields, samples=samples)

    def cut(self, layers: Iterable[int], size: int) -> None:
        """Cut layers into blocks of another size."""
        host = self.ours.optimizer.host
        host_adam.BLOCK, host.of_thread = size, threading.local()
        for index in layers:
            layer, host.blocks[index] = self.ours.streamed.layers[index], []
            for name, parameter in layer.trained.items():
                pieces = [layer.gradients[0].views[name], layer.weights[0].views[name]]
                pieces += host.state[parameter].values()
                parts = zip(*(piece.view(-1).split(size) for piece in pieces), strict=True)
                group = host.group_of[parameter]
                host.blocks[index] += [(group, *part) for part in parts]

    def streamed(self, tokens: int, clip: bool) -> None:
        ours = self.build()
        self.clear()
        loop = ours.loop(tokens, clip)
        steps = train(loop, self.size.steps)
        ours.streamed.wait()
        step = statistics.median(steps)
        resident, host = self.found("resident", tokens), self.found("host")
        fields = {"step_s": step, "optimizer_in_step": True, "skipped": ours.optimizer.skipped}
        if host:
            update_s = UPDATE_BYTES * ours.host_parameters / host["update_bytes_per_s"]
            fields["update_s"] = update_s
        if host and resident:
            forward, backward = resident["forward_s"], resident["backward_s"]
            in_backward = max(forward + backward, update_s)
            bound = backward + max(forward, update_s) if clip else in_backward
            fields |= {"bound_s": bound, "of_bound": bound / step, "eta": bound / step}
            fields |= {"bound_from": BOUND if clip else BOUND_IN_BACKWARD}
            fields |= {"kept": resident["step_s"] / step}
        fields |= {"host_parameters": ours.host_parameters}
        fields |= {"device_state_bytes": ours.device_state_bytes}
        fields |= {"layers_on_device": len(ours.streamed.resident)}
        name = "streamed_adam" if clip else "streamed_adam_in_backward"
        self.row(name, tokens, self.memory, **fields, samples={"step_s": steps})

    def larger(self) -> None:
        """Many steps: the loss, and whether memory grows."""
        ours = self.build()
        self.clear()
        tokens = min(self.size.tokens)
        loop = ours.loop(tokens)
        losses, reserved, begun = [], [], time.perf_counter()
        for _ in range(FIFTY if self.size is FULL else 6):
            loop.step()
            losses.append(loop.loss)
            if self.device.type == "cuda":
                reserved.append(torch.cuda.memory_reserved())
        ours.streamed.wait()
        parameters = sum(p.numel() for p in self.ours.model.parameters())
        fields = {"step_s": (time.perf_counter() - begun) / len(losses), "parameters": parameters}
        fields |= {"first_loss": losses[0], "last_loss": losses[-1], "steps": len(losses)}
        fields |= {"state_bytes": STATE_BYTES * parameters, "optimizer_in_step": True}
        if reserved:
            memory = torch.cuda.get_device_properties(0).total_memory
            fields |= {"state_over_device": STATE_BYTES * parameters / memory}
        samples = {"loss": losses, "reserved_bytes": reserved}
        self.row("larger_than_device", tokens, self.memory, **fields, samples=samples)

    def peer(self, name: str, tokens: int) -> None:
        by_depth = {}
        for depth in self.size.depths:
            model, optimizer, clip = PEERS[name](self.size, self.device, depth)
            count = max(1, tokens // self.size.length) * self.size.length
            loop = StockLoop(model, count, self.size.length, optimizer=optimizer, clip=clip)
            loop.device = self.device
            by_depth[depth] = statistics.median(train(loop, 2, warm=1))
            del loop, model, optimizer
            self.clear()
        step = self.extrapolated(by_depth)
        resident = self.found("resident", tokens).get("step_s")
        note = {"note": f"torchao {version('torchao')}"} if name == "torchao" else {}
        fields = {"step_s": step, "extrapolated": True, "optimizer_in_step": True} | note
        fields |= {"kept": resident / step} if resident else {}
        samples = {f"step_s of {depth} layers": [s] for depth, s in by_depth.items()}
        self.row(name, tokens, None, **fields, samples=samples)

    def tasks(self, what: str) -> list[Task]:
        full, known = self.size is FULL, self.results.has
        model = {"model": self.size.name}
        found = []
        if what in ("ours", "all"):
            last = {"tokens": self.size.tokens[-1]}
            done = lambda: known("resident", **model, **last)  # noqa: E731
            found.append(Task("resident", 60 if full else 20, self.resident, done))
            found.append(
                Task("host", 80 if full else 20, self.host, lambda: known("host", **model))
            )
            for clip, name in ((True, "streamed_adam"), (False, "streamed_adam_in_backward")):
                for tokens in self.size.tokens:
                    found.append(
                        Task(
                            f"{name} {tokens}",
                            20 if full else 10,
                            lambda tokens=tokens, clip=clip: self.streamed(tokens, clip),
                            lambda name=name, tokens=tokens: known(name, tokens=tokens, **model),
                        )
                    )
            done = lambda: known("larger_than_device", tokens=min(self.size.tokens), **model)  # noqa: E731
            found.append(Task("larger_than_device", 200 if full else 20, self.larger, done))
        if what in ("peers", "all"):
            for name in PEERS:
                for tokens in self.size.tokens:
                    found.append(
                        Task(
                            f"{name} {tokens}",
                            60 if full else 20,
                            lambda name=name, tokens=tokens: self.peer(name, tokens),
                            lambda name=name, tokens=tokens: known(name, tokens=tokens, **model),
                        )
                    )
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of results/")
    parser.add_argument("--what", choices=("ours", "peers", "all"), default="ours")
    parser.add_argument("--small", action="store_true", help="a tiny Llama, for a CPU")
    parser.add_argument("--until", type=float, default=3600, help="seconds from now")
    options = parser.parse_args()
    kind = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device(kind.type if kind else "cpu", 0 if kind else None)
    benchmark = Benchmark(options, device)
    benchmark.say(f"{device_name(device)}, torch {torch.__version__}")
    tasks = benchmark.tasks(options.what)
    run_tasks(tasks, benchmark.results, benchmark.until, Agreement())
    if benchmark.ours is not None:
        benchmark.ours.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
