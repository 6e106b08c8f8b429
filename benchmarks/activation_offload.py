"""Measure what it costs to keep activations of a stock Llama on the host, and what it frees.

    python benchmarks/activation_offload.py --out benchmarks
    python benchmarks/activation_offload.py --small --out /tmp/rehearsal      # seconds on a CPU

Four layers of Llama 3 8B's shapes with embedding and head (``workloads.py``, vocabulary 32,000) in
bf16, forward and backward of one sequence. ``--ways`` and ``--tokens`` choose what is measured;
every row is written when it is known, and not measured again.

How a number is made
--------------------
* ``step_s``: seconds of a forward and backward by events on the compute stream; the median of
  ``--repeats`` steps after two unmeasured ones. The host may queue one step ahead.
* Under ``checkpoint`` each layer runs again in backward; ``selective`` keeps what attention
  returned. With a name behind it, what autograd saves of the rest, the layers' inputs, goes to the
  host. Without: all that autograd saves.
* ``over_checkpoint``: ``step_s`` over that of ``checkpoint`` at the same tokens.
* ``peak_allocated_bytes``: of these steps, weights and gradients included.
* ``pinned_bytes``: page-locked host memory in use: the pool's part that is filled, or what
  PyTorch's allocator handed out at its peak.
* ``checkpoint_unsloth`` follows the design of Unsloth: the input of a layer is copied without a
  stream of its own, from pageable memory back.

Gradients are not compared here: the backward of flash attention adds in no fixed order. The recipe
and ``tests/test_activation_offload.py`` compare them, bit by bit.
"""

import argparse
import gc
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes_source" / "offload")]

from activation_offload import ActivationOffload  # noqa: E402

from benchmarks.measuring import (  # noqa: E402
    Agreement,
    Results,
    Task,
    header,
    link_rates,
    run_tasks,
    say,
    synchronize,
    timing_event,
)
from benchmarks.workloads import llama  # noqa: E402

LAYERS = 4
TOKENS = (16384, 65536, 131072)
SMALL_TOKENS = (64, 128)
POOL_BYTES, SMALL_POOL_BYTES = 56 * 10**9, 10**7
WINDOW_SHARE = 1 / LAYERS  # of what the layers save: of about one layer
LONGEST_WHOLE = 65536  # tokens of which all that autograd saves is tried to keep
aten = torch.ops.aten
ATTENTION = [
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
]


# -- how layers run ---------------------------------------------------------------------------


class InputOnHost(torch.autograd.Function):
    """A layer whose input waits in pageable host memory and which runs again in backward."""

    @staticmethod
    def forward(ctx, layer: Callable, hidden: torch.Tensor) -> torch.Tensor:
        ctx.layer, ctx.device = layer, hidden.device
        ctx.save_for_backward(hidden.to("cpu", non_blocking=True))
        with torch.no_grad():
            return layer(hidden)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        (kept,) = ctx.saved_tensors
        hidden = kept.to(ctx.device, non_blocking=True).detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.layer(hidden)
        torch.autograd.backward(output, grad)
        return None, hidden.grad


SELECTIVE = partial(create_selective_checkpoint_contexts, ATTENTION)
RUNS: dict[str, Callable | None] = {
    "": None,
    "checkpoint": partial(checkpoint, use_reentrant=False),
    "selective": partial(checkpoint, use_reentrant=False, context_fn=SELECTIVE),
    "unsloth": InputOnHost.apply,
}


def use(model: torch.nn.Module, run: Callable | None) -> None:
    """Have the layers run by ``run``; as they are by None."""
    for layer in model.model.layers:
        layer.gradient_checkpointing = run is not None
        layer._gradient_checkpointing_func = run


# -- what keeps what autograd saves -----------------------------------------------------------


class Training:
    """The model, and the one pool of all rows of ours."""

    def __init__(self, small: bool, device: torch.device) -> None:
        self.device, self.pool_bytes = device, SMALL_POOL_BYTES if small else POOL_BYTES
        name = "llama-tiny" if small else "llama-8b-blocks"
        self.model = llama(name, device, layers=LAYERS).bfloat16()
        for parameter in self.model.parameters():  # backward adds to them and allocates none
            parameter.grad = torch.zeros_like(parameter)
        self.smallest, self.offload = 1 << (10 if small else 20), None

    def ours(self) -> AbstractContextManager:
        if self.offload is None:
            options = {"smallest": self.smallest}
            self.offload = ActivationOffload(self.device, self.pool_bytes, 1 << 30, **options)
        wanted = self.offload.wanted
        self.offload.window = max(1, int((wanted or self.pool_bytes) * WINDOW_SHARE))
        return self.offload.saving()

    def half(self) -> AbstractContextManager:
        saving = self.ours()
        self.offload.budget = self.offload.wanted // 2 or self.pool_bytes
        return saving

    def save_on_cpu(self) -> AbstractContextManager:
        return torch.autograd.graph.save_on_cpu(pin_memory=self.device.type == "cuda")

    def trl(self) -> AbstractContextManager:
        """Torchtune's class, as trl keeps it."""
        hooks = importlib.import_module("trl.models.activation_offloading").OffloadActivations
        return hooks()


WAYS = {
    "checkpoint": ("checkpoint", None),
    "checkpoint_activation_offload": ("checkpoint", "ours"),
    "checkpoint_save_on_cpu": ("checkpoint", "save_on_cpu"),
    "checkpoint_trl": ("checkpoint", "trl"),
    "checkpoint_unsloth": ("unsloth", None),
    "selective": ("selective", None),
    "selective_activation_offload": ("selective", "ours"),
    "resident": ("", None),
    "activation_offload": ("", "ours"),
    "activation_offload_half": ("", "half"),
    "trl": ("", "trl"),
    "save_on_cpu": ("", "save_on_cpu"),
}


# -- measuring --------------------------------------------------------------------------------


class Benchmark:
    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.device, self.repeats, self.small = device, options.repeats, options.small
        self.started = time.perf_counter()
        self.training = Training(options.small, device)
        workload = {
            "model": f"{LAYERS} layers of Llama 3 8B's shapes, vocabulary 32,000",
            "precision": "bfloat16 weights, activations and gradients",
            "pool_bytes": self.training.pool_bytes,
        }
        link = link_rates(device, 1 << (20 if options.small else 30))
        head = header("activation_offload", device, workload, link)
        recipes = {name: ("activation_offload",) for name in WAYS if "activation" in name}
        self.results = Results(options.out, head, recipes, ("tokens",))

    def measure(self, name: str, tokens: int) -> None:
        training, (run, keep) = self.training, WAYS[name]
        use(training.model, RUNS[run])
        saving = getattr(training, keep) if keep else nullcontext
        if training.offload is not None:
            training.offload.budget, training.offload.wanted = training.pool_bytes, 0
        torch.manual_seed(tokens)
        ids = torch.randint(256, (1, tokens), device=self.device)

        def step() -> None:
            for parameter in training.model.parameters():
                parameter.grad.zero_()
            with saving():
                loss = training.model(ids, labels=ids, use_cache=False).loss
            loss.backward()

        on_gpu = self.device.type == "cuda"
        try:
            for _ in range(2):
                step()
            synchronize(self.device)
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.reset_peak_host_memory_stats()  # not the way's before
            events = [timing_event(self.device) for _ in range(self.repeats + 1)]
            events[0].record()
            for number, event in enumerate(events[1:]):
                step()
                event.record()
                events[number].synchronize()
            synchronize(self.device)
        finally:
            if training.offload is not None:
                training.offload.release(0)
                training.offload.arriving.clear()
        steps = [a.elapsed_time(b) / 1e3 for a, b in zip(events, events[1:], strict=False)]
        row = {"name": name, "tokens": tokens, "model": "llama-8b-blocks", "loop": "free"}
        row |= {"compiled": False, "step_s": statistics.median(steps)}
        if on_gpu:
            row["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
            row["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
            row["pinned_bytes"] = torch.cuda.host_memory_stats()["allocated_bytes.peak"]
        if keep in ("ours", "half"):
            row["pinned_bytes"] = training.offload.used
        plain = [r for r in self.results.data["rows"] if r["name"] == "checkpoint"]
        plain = [r["step_s"] for r in plain if r["tokens"] == tokens]
        row |= {"over_checkpoint": row["step_s"] / plain[0]} if plain else {}
        row |= {"note": f"trl {version('trl')}, OffloadActivations"} if keep == "trl" else {}
        self.results.add(row | {"samples": {"step_s": steps}})
        shown = {k: f"{v:.4g}" for k, v in row.items() if isinstance(v, float)}
        say(
            self.started,
            f"{name} {tokens}: {shown} {row.get('peak_allocated_bytes', 0) / 1e9:.1f} GB",
        )

    def tasks(self, ways: list[str], tokens: list[int]) -> list[Task]:
        found = []
        for each in tokens:
            for name in ways:
                whole = WAYS[name][0] == ""
                if whole and not self.small and each > LONGEST_WHOLE:
                    continue
                seconds = 2 + (self.repeats + 2) * (6 if whole else 2) * max(1, each / 32768)
                work = partial(self.measure, name, each)
                done = partial(self.results.has, name, tokens=each)
                found.append(Task(f"{name} {each}", seconds, work, done))
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of results/")
    parser.add_argument("--ways", type=lambda s: s.split(","), default=list(WAYS))
    parser.add_argument("--tokens", type=lambda s: [int(x) for x in s.split(",")])
    parser.add_argument("--repeats", type=int, default=3, help="samples a row")
    parser.add_argument("--until", type=float, default=3600, help="seconds from now")
    parser.add_argument("--small", action="store_true", help="a size for rehearsal")
    options = parser.parse_args()
    if unknown := set(options.ways) - set(WAYS):
        parser.error(f"no way {sorted(unknown)}; there are {list(WAYS)}")
    kind = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device(kind.type, 0) if kind else torch.device("cpu")
    until = time.time() + options.until
    benchmark = Benchmark(options, device)
    tokens = options.tokens or (SMALL_TOKENS if options.small else TOKENS)
    tasks = benchmark.tasks(options.ways, list(tokens))
    run_tasks(tasks, benchmark.results, until, Agreement())
    if benchmark.training.offload is not None:
        benchmark.training.offload.close()
    gc.collect()


if __name__ == "__main__":
    main()
