"""Schedules to trace: products alone, with a range around each gather and reduce-scatter."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from edited_recipes import KINDS, load
from overlap_in_traces import GATHER, REDUCE, SERIAL, STEPS, Overlap, read_overlap
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile, record_function

RUNS = 20
UNITS, WIDTH, TOKENS = 6, 8192, 8192  # square weights; each product takes more than a millisecond


def products_only(device: torch.device) -> nn.Sequential:
    width = WIDTH if device.type == "cuda" else 64
    layers = [
        nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(2)))
        for _ in range(UNITS)
    ]
    model = nn.Sequential(*layers).to(device, torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=width**-0.5)
    return model


class Watch:
    """Puts a range around collectives; while ``serial``, runs each beside no product."""

    def __init__(self, streams) -> None:
        self.streams, self.compute = streams, streams.current_stream()
        self.serial = False

    def __call__(self, name: str, collective: Callable) -> Callable:
        def call(*args, **kwargs):
            here = self.streams.current_stream()
            with record_function(name):
                if self.serial:
                    here.wait_stream(self.compute)
                result = collective(*args, **kwargs)
                if self.serial:
                    self.compute.wait_stream(here)
            return result

        return call


class Fsdp2Collective:
    """A watched collective in the place of FSDP2's own."""

    def __init__(self, collective: Callable) -> None:
        self.collective = collective

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, **options):
        return self.collective(output_tensor, input_tensor, group=group, **options)


def sharded_by_fsdp2(device: torch.device, watch: Watch) -> nn.Sequential:
    model = products_only(device)
    for unit in (*model, model):
        fully_shard(unit)
    reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    for unit in model:
        unit.set_custom_reduce_scatter(Fsdp2Collective(watch(REDUCE, reduce_scatter)))
    return model


def under_fsdp2(device: torch.device, watch: Watch, control: str | None):
    model = sharded_by_fsdp2(device, watch)
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    for unit in model:
        unit.set_custom_all_gather(Fsdp2Collective(watch(GATHER, all_gather)))
    return model, torch.Tensor.backward


def under_context(name: str, device: torch.device, watch: Watch, control: str | None):
    module = load(name, control)
    model = products_only(device)
    context = getattr(module, KINDS[name])(model, list(model))
    module.all_gather = watch(GATHER, module.all_gather)
    module.reduce_scatter = watch(REDUCE, module.reduce_scatter)
    return model, context.backward


@dataclass(frozen=True)
class Schedule:
    """How to build one, and what it queues in a step.

    ``gathers`` of a unit's weights; ``behind``: those with products to come that they can run
    behind. ``calls``: of its gather for a unit, and of its reduce-scatter.
    """

    build: Callable
    gathers: int
    behind: int
    calls: int
    control: str | None = None

    @property
    def least_hidden(self) -> float:
        """The share of the gathers' time of which more must be hidden."""
        return self.behind / self.gathers / 2


FROM_SCRATCH = partial(under_context, "stream_context")
# Without prefetch, nothing hides the first gather of forward and the first of backward. Where the
# reduce-scatters are on the compute stream, a gather of backward may run beside one of them instead
# of a product.
ON_DEMAND = {"gathers": 2 * UNITS, "behind": 2 * UNITS - 2}
SCHEDULES = {
    "fsdp2": Schedule(under_fsdp2, **ON_DEMAND, calls=1),
    "stream_context": Schedule(FROM_SCRATCH, 2 * UNITS, UNITS - 1, calls=2),
}
BROKEN = replace(SCHEDULES["stream_context"], control="gather_on_the_compute_stream")


def take_step(model: nn.Module, backward: Callable, batch: torch.Tensor) -> None:
    backward(model(batch).float().square().mean())
    for parameter in model.parameters():
        parameter.grad = None


def trace_steps(
    model: nn.Module, backward: Callable, watch: Watch, batch: torch.Tensor, path: Path
) -> Overlap:
    """``STEPS`` of ``model``, which begin on all ranks together."""
    on_device = [ProfilerActivity.CUDA] if batch.is_cuda else []
    with profile(activities=[ProfilerActivity.CPU, *on_device]) as traced:
        dist.all_reduce(torch.zeros(1, device=batch.device))
        for step in STEPS:
            watch.serial = step == SERIAL
            with record_function(step):
                take_step(model, backward, batch)
        torch.accelerator.synchronize() if batch.is_cuda else None
    traced.export_chrome_trace(str(path))
    return read_overlap(json.loads(path.read_text())["traceEvents"])


def measure_overlaps(
    device: torch.device, folder: Path, runs: int
) -> Iterator[tuple[str, list[dict]]]:
    path = folder / f"trace{dist.get_rank()}.json"
    tokens = TOKENS if device.type == "cuda" else 16
    for name, schedule in {**SCHEDULES, "broken": BROKEN}.items():
        torch.manual_seed(0)
        watch = Watch(torch.get_device_module(device))
        model, backward = schedule.build(device, watch, schedule.control)
        width = model[0][0].in_features
        batch = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
        for _ in range(2):
            trace_steps(model, backward, watch, batch, path)
        yield name, [asdict(trace_steps(model, backward, watch, batch, path)) for _ in range(runs)]
        del model, backward
