"""Measure what it costs to keep activations of a stock Llama on the host, and what it frees.

    python benchmarks/activation_offload.py --out benchmarks
    python benchmarks/activation_offload.py --small --out /tmp/rehearsal      # seconds on a CPU

Four layers of Llama 3 8B's shapes with embedding and head (``workloads.py``, vocabulary 32,000) in
bf16, forward and backward of one sequence. ``--only "trl 65536"`` chooses what is measured; every
row is written when it is known, and not measured again.

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

Gradients are not compared here: the backward of flash attention adds in no fixed order.
``tests/proofs/activations.py`` compares them, bit by bit.
"""

import importlib
import inspect
import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks import measuring  # noqa: E402
from benchmarks.workloads import llama  # noqa: E402
from overlap_recipes.offload import ActivationOffload, activations  # noqa: E402

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
# What selective checkpointing keeps stays on the device, on every torch. 2.14 and 2.15 warn beside
# hooks where it is not said, and a later torch is to hand such tensors to the hooks by default
# (pytorch#191236): the row would then copy attention's results, too, and measure something else.
BESIDE_HOOKS = {}
if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters:
    BESIDE_HOOKS = {"respect_saved_tensors_hooks": False}
RUNS: dict[str, Callable | None] = {
    "": None,
    "checkpoint": partial(checkpoint, use_reentrant=False),
    "selective": partial(checkpoint, use_reentrant=False, context_fn=SELECTIVE, **BESIDE_HOOKS),
    "unsloth": InputOnHost.apply,
}


def use(model: torch.nn.Module, run: Callable | None) -> None:
    """Have the layers run by ``run``; as they are by None."""
    for layer in model.model.layers:
        layer.gradient_checkpointing = run is not None
        layer._gradient_checkpointing_func = run


# -- what keeps what autograd saves -----------------------------------------------------------


class Keeping:
    """Ways to keep what autograd saves, and the one pool of all rows of ours."""

    def __init__(self, small: bool, device: torch.device) -> None:
        self.device, self.pool_bytes = device, SMALL_POOL_BYTES if small else POOL_BYTES
        activations.SMALLEST = 1 << (10 if small else 20)
        self.offload: ActivationOffload | None = None

    def nothing(self) -> AbstractContextManager:
        return nullcontext()

    def ours(self) -> AbstractContextManager:
        if self.offload is None:
            self.offload = ActivationOffload(self.device, self.pool_bytes, 1 << 30)
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
        return importlib.import_module("trl.models.activation_offloading").OffloadActivations()

    def begin(self) -> None:
        if self.offload is not None:
            self.offload.budget, self.offload.wanted = self.pool_bytes, 0

    def end(self) -> None:
        if self.offload is not None:
            self.offload.release(0)
            self.offload.arriving.clear()


WAYS = {  # how layers run, and what keeps what autograd saves
    "checkpoint": ("checkpoint", "nothing"),
    "checkpoint_activation_offload": ("checkpoint", "ours"),
    "checkpoint_save_on_cpu": ("checkpoint", "save_on_cpu"),
    "checkpoint_trl": ("checkpoint", "trl"),
    "checkpoint_unsloth": ("unsloth", "nothing"),
    "selective": ("selective", "nothing"),
    "selective_activation_offload": ("selective", "ours"),
    "resident": ("", "nothing"),
    "activation_offload": ("", "ours"),
    "activation_offload_half": ("", "half"),
    "trl": ("", "trl"),
    "save_on_cpu": ("", "save_on_cpu"),
}


# -- measuring --------------------------------------------------------------------------------


class Benchmark:
    def __init__(self, small: bool, repeats: int, out: Path, device: torch.device) -> None:
        self.device, self.repeats = device, repeats
        self.keeping = Keeping(small, self.device)
        model = llama("llama-tiny" if small else "llama-8b-blocks", self.device, layers=LAYERS)
        self.model = model.bfloat16()
        for parameter in self.model.parameters():  # backward adds to them and allocates none
            parameter.grad = torch.zeros_like(parameter)
        workload = {
            "model": f"{LAYERS} layers of Llama 3 8B's shapes, vocabulary 32,000",
            "precision": "bfloat16 weights, activations and gradients",
            "pool_bytes": self.keeping.pool_bytes,
        }
        link = measuring.link_rates(self.device, 1 << (20 if small else 30))
        head = measuring.header("activation_offload", self.device, workload, link)
        ours = [name for name in WAYS if "activation" in name]
        self.results = measuring.Results(out, head, ours, ("tokens",))

    def step(self, saving: Callable[[], AbstractContextManager], ids: torch.Tensor) -> None:
        for parameter in self.model.parameters():
            parameter.grad.zero_()
        with saving():
            loss = self.model(ids, labels=ids, use_cache=False).loss
        loss.backward()

    def measure(self, name: str, tokens: int) -> None:
        on_gpu = self.device.type == "cuda"
        run, keep = WAYS[name]
        use(self.model, RUNS[run])
        torch.manual_seed(tokens)
        ids = torch.randint(256, (1, tokens), device=self.device)
        step = partial(self.step, getattr(self.keeping, keep), ids)
        self.keeping.begin()
        try:
            for _ in range(2):
                step()
            measuring.synchronize(self.device)
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.reset_peak_host_memory_stats()  # not the way's before
            clock = measuring.StepClock(self.device)
            for _ in range(self.repeats):
                step()
                clock.tick()
            steps = measuring.intervals_of(clock.ends())
        finally:
            self.keeping.end()
        row = {"name": name, "tokens": tokens, "model": "llama-8b-blocks", "loop": "free"}
        row |= {"compiled": False, "step_s": statistics.median(steps)}
        row |= measuring.device_peaks(self.device)
        if on_gpu:
            row["pinned_bytes"] = torch.cuda.host_memory_stats()["allocated_bytes.peak"]
        if keep in ("ours", "half"):
            row["pinned_bytes"] = self.keeping.offload.used
        if plain := self.results.find("checkpoint", tokens=tokens):
            row["over_checkpoint"] = row["step_s"] / plain["step_s"]
        if keep == "trl":
            row["note"] = f"trl {version('trl')}, OffloadActivations"
        self.results.add(row | {"samples": {"step_s": steps}})

    def task(self, name: str, tokens: int) -> measuring.Task:
        seconds = 2 if WAYS[name][0] else 6
        seconds = 2 + (self.repeats + 2) * seconds * max(1, tokens / 32768)
        work = partial(self.measure, name, tokens)
        done = partial(self.results.has, name, tokens=tokens)
        return measuring.Task(f"{name} {tokens}", seconds, work, done)

    def tasks(self, lengths: tuple[int, ...]) -> list[measuring.Task]:
        return [
            self.task(name, tokens)
            for tokens in lengths
            for name, (run, _) in WAYS.items()
            if run or tokens <= LONGEST_WHOLE
        ]


def main() -> None:
    parser = measuring.command_line(__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="samples a row")
    options = parser.parse_args()
    with measuring.started_rank() as device:
        benchmark = Benchmark(options.small, options.repeats, options.out, device)
        tasks = benchmark.tasks(SMALL_TOKENS if options.small else TOKENS)
        tasks = measuring.chosen(tasks, options.only)
        measuring.run_tasks(tasks, benchmark.results, options.until, measuring.Agreement())
        if benchmark.keeping.offload is not None:
            benchmark.keeping.offload.close()


if __name__ == "__main__":
    main()
