"""The sharding recipes on two CUDA devices: gathers behind products, and races that show.

**Overlap** is judged from an exported trace of four steps of a schedule. The first warms up: behind
it the host is ahead, and no rank waits for another that started late. The third is judged. The
second and the fourth are *serial*: the same schedule, but each gather and each reduce-scatter waits
for all products queued so far, and those that follow wait for it. Kernels and copies belong to what
launched them: a product to its operator, a gather or a reduce-scatter to the range around the call
that queued it, whatever the kernels are called.

What is judged follows from the schedules, not from a measurement:

* A product takes longer than a gather, so a schedule can hide every gather that it queues while
  products are still to come. How many these are is in ``Schedule``. More than half of that must be
  hidden: who hides nothing in forward has lost at least half. The rest is room for what else a
  gather's time contains: its wait for the other rank, and what runs between products.
* Overlap pays if the judged step is shorter than the serial ones, by more than their waits cost:
  then the communication that it hides, gathers and reduce-scatters, takes longer one after the
  other than the products lose beside it. The serial step is the mean of the judged one's two
  neighbours, in which a drift of the clocks that is linear cancels; a step lasts from the end of
  the one before to its own, on the device. The median of the runs is judged. In serial steps
  nothing may be hidden: a run whose reference overlaps as well is at fault.

**Races** are the edits in ``tests/controls/*.toml`` that drop an ordering. Each runs with its
window widened by a pause on one stream of one rank or of all; the recipe without the edit runs with
the same pause and must be right.

This file is its own ranks' program: one launch by torchrun measures everything, the tests look at
what rank 0 wrote down.
"""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile, record_function

ROOT = Path(__file__).parents[2]
SHARDING = ROOT / "recipes_source" / "sharding"
CONTROLS = ROOT / "tests" / "controls"
LIMIT_S = 280  # for the ranks; the machine itself takes about a minute
PAUSE_MS = 5.0  # longer than any step of a toy without it
CYCLES_PER_MS = 2_000_000  # of a GPU at 2 GHz

EDITED: list[Path] = []  # where edited copies go: the folder of the run
RUNS = 20
UNITS, WIDTH, TOKENS = 6, 8192, 8192  # square weights; each product takes more than a millisecond
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")
GATHER, REDUCE = "gather of a parameter or unit", "reduce-scatter of a parameter or unit"
WARM_UP, SERIAL, JUDGED = "a step to warm up", "a serial step", "the judged step"
STEPS = (WARM_UP, SERIAL, JUDGED, SERIAL)
NOTHING = 0.01  # of the communication's time: what counts as not hidden in a serial step
WAITS_US = 10.0  # more than the two waits around a collective cost a serial step

two_devices = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two CUDA devices with peer access"
)


# -- what a trace says -------------------------------------------------------------------------


Span = tuple[float, float]  # µs


def union(spans: list[Span]) -> list[Span]:
    joined: list[Span] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def length(spans: list[Span]) -> float:
    return sum(stop - start for start, stop in spans)


def common(a: list[Span], b: list[Span]) -> float:
    return sum(max(0.0, min(x[1], y[1]) - max(x[0], y[0])) for x in a for y in b)


@dataclass(frozen=True)
class Overlap:
    """A trace's judged step beside its serial ones; times in µs."""

    gathers: int  # calls, in the judged step
    reductions: int
    gathers_us: float
    hidden_us: float  # of the gathers' time
    gather_streams: tuple[int, ...]
    product_streams: tuple[int, ...]
    step_us: float
    serial_step_us: float
    serial_communication_us: float  # gathers and reduce-scatters of the serial steps
    serial_hidden_us: float

    def faults(self, least_hidden: float) -> list[str]:
        """What is wrong with the overlap; nothing, if it is as the pages say."""
        found = []
        if not self.gathers_us:
            return ["no gather was found"]
        if len(self.product_streams) != 1 or set(self.gather_streams) & set(self.product_streams):
            found.append(f"gathers on {self.gather_streams}, products on {self.product_streams}")
        if (share := self.hidden_us / self.gathers_us) <= least_hidden:
            found.append(f"{share:.2f} of the gathers' time is hidden")
        if self.serial_hidden_us > NOTHING * self.serial_communication_us:
            found.append(f"serial steps overlap for {self.serial_hidden_us:.0f} µs")
        return found


def gain_us(runs: list[Overlap]) -> float:
    """How much shorter the step is than a serial one: what is hidden, less what that costs.

    The waits that make a step serial are not counted.
    """
    return median(
        run.serial_step_us - WAITS_US * (run.gathers + run.reductions) - run.step_us for run in runs
    )


def spans(events: list[dict]) -> list[Span]:
    return [(event["ts"], event["ts"] + event["dur"]) for event in events]


def read_overlap(events: list[dict]) -> Overlap:
    """Judge the events of a Chrome trace of ``STEPS`` that ``torch.profiler`` exported."""
    complete = [event for event in events if event.get("ph") == "X"]
    ranges: dict[str, list[tuple[object, Span]]] = {GATHER: [], REDUCE: [], "product": []}
    launches: dict[object, tuple[object, float]] = {}
    steps: list[tuple[Span, str]] = []
    for event in complete:
        (span,) = spans([event])
        kind, name = event.get("cat"), event["name"]
        if kind == "user_annotation" and name in STEPS:
            steps.append((span, name))
        elif kind == "user_annotation" and name in (GATHER, REDUCE):
            ranges[name].append((event["tid"], span))
        elif kind == "cpu_op" and name in PRODUCTS:
            ranges["product"].append((event["tid"], span))
        elif kind in ("cuda_runtime", "cuda_driver"):
            launches[event["args"]["correlation"]] = (event["tid"], event["ts"])
    steps.sort()
    assert tuple(name for _, name in steps) == STEPS, f"a trace of {steps}"

    def launch(event: dict) -> tuple[object, float] | None:
        return launches.get(event.get("args", {}).get("correlation"))

    on_device = [e for e in complete if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]

    def ran(step: Span) -> list[dict]:
        """What a step queued on the device."""
        return [e for e in on_device if (at := launch(e)) and step[0] <= at[1] < step[1]]

    def launched(step: Span, *what: str) -> list[dict]:
        """What ran on the device because of ``what`` in a step."""
        callers = [caller for name in what for caller in ranges[name]]

        def because(tid: object, at: float) -> bool:
            return any(t == tid and start <= at < stop for t, (start, stop) in callers)

        return [event for event in ran(step) if because(*launch(event))]

    def calls(step: Span, what: str) -> int:
        return sum(step[0] <= start < step[1] for _, (start, _) in ranges[what])

    ends = [max((stop for _, stop in spans(ran(step))), default=0.0) for step, _ in steps]
    _, before, judged, behind = (step for step, _ in steps)
    lasted = [end - start for start, end in pairwise(ends)]  # of all but the first
    gathers, products = launched(judged, GATHER), launched(judged, "product")
    serial = [
        (union(spans(launched(s, GATHER, REDUCE))), union(spans(launched(s, "product"))))
        for s in (before, behind)
    ]
    return Overlap(
        gathers=calls(judged, GATHER),
        reductions=calls(judged, REDUCE),
        gathers_us=length(union(spans(gathers))),
        hidden_us=common(union(spans(gathers)), union(spans(products))),
        gather_streams=tuple(sorted({event["args"]["stream"] for event in gathers})),
        product_streams=tuple(sorted({event["args"]["stream"] for event in products})),
        step_us=lasted[1],
        serial_step_us=(lasted[0] + lasted[2]) / 2,
        serial_communication_us=sum(length(communication) for communication, _ in serial),
        serial_hidden_us=sum(common(*of_step) for of_step in serial),
    )


# -- the ranks' program: what it shares --------------------------------------------------------


def load(name: str, control: str | None = None):
    """A recipe as a module, with a control's edit of it or of the library if one is named.

    It is imported anew with all that it imports of this project: the edit may be in any of it.
    """
    from harness.recipe import load_recipe

    recipe = load_recipe(SHARDING / f"{name}.py", CONTROLS)
    file = recipe.path
    first = []
    if control is not None:
        folder = Path(tempfile.mkdtemp(dir=EDITED[-1] if EDITED else None)) / "edited"
        _, file = recipe.control(control).edited(recipe, folder)
        first = [str(folder)]
        if file.name != recipe.path.name or file.parent != folder:
            file = recipe.path  # the edit is in what it imports
    for module in list(sys.modules):
        where = getattr(sys.modules[module], "__file__", None) or ""
        if module.partition(".")[0] == "overlap_recipes" or Path(where).parent == SHARDING:
            del sys.modules[module]
    sys.path[:0] = first
    try:
        spec = importlib.util.spec_from_file_location(f"{name}_{control}", file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        del sys.path[: len(first)]
    return module


def of_library(module: str):
    """A module of fsdp2, as the recipe that was loaded last has it."""
    return sys.modules[f"overlap_recipes.fsdp2.{module}"]


def pause(milliseconds: float = PAUSE_MS, *, ranks: tuple[int, ...] = (0, 1)) -> None:
    """Hold the current stream on ``ranks``; the host goes on."""
    if dist.get_rank() in ranks and torch.cuda.is_available():
        torch.cuda._sleep(int(milliseconds * CYCLES_PER_MS))


def on_any_rank(value: bool, device: torch.device) -> bool:
    agreed = torch.tensor(float(value), device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    return bool(agreed.item())


# -- races -------------------------------------------------------------------------------------


KINDS = {
    "stream_context": "FsdpContext",
    "prefetch_schedule": "PrefetchContext",
    "peer_schedule": "PeerContext",
}


def train_context(name: str, control: str | None, device: torch.device, widen: Callable) -> None:
    """Train under the context of ``name`` and compare with the unsharded model."""
    module = load(name, control)
    rows = module.rows
    model, reference = rows.Stack(device, shuffled=True), rows.Stack(device, shuffled=True)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    context = getattr(module, KINDS[name])(model, model.blocks, mesh)
    with widen(model, context):
        rows.train(model, context.backward)
        rows.train(reference)
    rows.prove_parity(model, reference)


@contextlib.contextmanager
def slow_units(model: nn.Module, context) -> Iterator[None]:
    """Pause in each unit, between the gather of its weights and their use."""
    hooks = [block.up.register_forward_pre_hook(lambda *_: pause(1)) for block in model.blocks]
    yield
    for hook in hooks:
        hook.remove()


@contextlib.contextmanager
def slow_optimizer(model: nn.Module, context) -> Iterator[None]:
    """Pause before each update, with samples on the device: to copy them there holds the host."""
    rows = sys.modules["sharded_parameter"]
    original, turns = rows.loss_of, rows.STEPS * rows.MICRO_BATCHES
    torch.manual_seed(0)  # equal on every rank
    shape = (turns, dist.get_world_size(), rows.BATCH, rows.WIDTH)
    samples = torch.randn(shape).to(model.norm.weight.device)

    def loss_of(model: nn.Module, turn: int, rank: int) -> torch.Tensor:
        mine = samples[turn, rank]
        return nn.functional.mse_loss(model(mine, turn), mine.flip(1))

    rows.loss_of = loss_of
    hook = register_optimizer_step_pre_hook(lambda *_: pause())
    yield
    hook.remove()
    rows.loss_of = original


@contextlib.contextmanager
def slow_reductions(model: nn.Module, context) -> Iterator[None]:
    """Pause before each reduce-scatter, on its stream."""
    original = context.reduce_scatter

    def late(*args):
        pause(1)
        return original(*args)

    context.reduce_scatter = late
    yield
    context.reduce_scatter = original


@contextlib.contextmanager
def slow_rank_casts(model: nn.Module, context) -> Iterator[None]:
    """Rank 0 casts late: the others copy what was there."""
    original = context.fill

    def late(unit) -> None:
        pause(ranks=(0,))
        original(unit)

    with mock.patch.object(context, "fill", late):
        yield


@contextlib.contextmanager
def slow_rank_pushes(model: nn.Module, context) -> Iterator[None]:
    """Rank 0 pushes late."""
    original = context.reduce_scatter

    def late(*args) -> None:
        pause(ranks=(0,))
        original(*args)

    with mock.patch.object(context, "reduce_scatter", late):
        yield


@contextlib.contextmanager
def slow_rank_behind_barriers(model: nn.Module, context) -> Iterator[None]:
    """Rank 1 is late behind each barrier, which rank 0 has passed as well."""
    originals = {memory: memory.barrier for memory in (context.memory, context.pushes)}

    def late(memory) -> None:
        originals[memory]()
        pause(ranks=(1,))

    with contextlib.ExitStack() as patches:
        for memory in originals:
            patches.enter_context(mock.patch.object(memory, "barrier", partial(late, memory)))
        yield


def before(owner: type, method: str, ranks: tuple[int, ...] = (0, 1)):
    """Pause on ``ranks`` before each call of ``method``, on the stream that it uses."""
    original = getattr(owner, method)

    def late(self, *args, **kwargs):
        pause(ranks=ranks)
        return original(self, *args, **kwargs)

    return mock.patch.object(owner, method, late)


def late_casts(module):
    """Rank 0 casts late: the others copy what was there."""
    return before(of_library("shared_slots").Slots, "fill", ranks=(0,))


def late_gathers(module):
    return before(of_library("shared_slots").Slots, "fill")


def late_pushes(module):
    return before(of_library("in_place_reduce").PushedGradients, "push", ranks=(0,))


def late_reductions(module):
    return before(of_library("in_place_reduce").PushedGradients, "push")


def late_sums(module):
    return before(of_library("in_place_reduce").PushedGradients, "finish", ranks=(1,))


def late_behind_barriers(module):
    """Rank 1 is late behind each barrier, which rank 0 has passed as well."""
    memory = of_library("peer_memory").PeerMemory
    original = memory.barrier

    def late(self):
        original(self)
        pause(ranks=(1,))

    return mock.patch.object(memory, "barrier", late)


def late_compute(module):
    """Pause in each layer, forward and backward: other streams are ahead of the compute."""
    memory = sys.modules["peer_memory"]
    original = memory.build

    def build(*args, **kwargs):
        model = original(*args, **kwargs)
        for layer in (m for m in model.modules() if isinstance(m, nn.Linear)):
            layer.register_forward_pre_hook(lambda *_: pause(1))
            layer.register_full_backward_pre_hook(lambda *_: pause(1))
        return model

    return mock.patch.object(memory, "build", build)


def prove_in_place(
    name: str, control: str | None, device: torch.device, widen: Callable, proof: str = "prove"
) -> None:
    """Run the recipe's own proof in the widened window, to its end on every rank."""
    module, original, found = load(name, control), torch.equal, []

    def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
        found.append(original(a, b))
        return True  # who stops here leaves the others waiting

    judged_by_bits = mock.patch.object(torch.testing, "assert_close", lambda *_, **__: None)
    with widen(module), mock.patch.object(torch, "equal", equal), judged_by_bits:
        getattr(module, proof)(device)
    assert found and all(found), f"{found.count(False)} of {len(found)} tensors differ"


@dataclass(frozen=True)
class Race:
    recipe: str
    control: str
    run: Callable
    widen: Callable

    @property
    def name(self) -> str:
        return f"{self.recipe}: {self.control}"


RACES = (
    Race("stream_context", "released_without_waiting_for_the_consumer", train_context, slow_units),
    Race("stream_context", "gather_before_the_optimizer_step", train_context, slow_optimizer),
    Race(
        "prefetch_schedule",
        "gradient_freed_before_its_reduce_scatter",
        train_context,
        slow_reductions,
    ),
    Race(
        "prefetch_schedule",
        "optimizer_before_the_last_reduce_scatter",
        train_context,
        slow_reductions,
    ),
    Race("peer_schedule", "no_barrier_before_copies", train_context, slow_rank_casts),
    Race(
        "peer_schedule",
        "cast_over_what_others_copy",
        partial(prove_in_place, proof="prove_changes"),
        late_behind_barriers,
    ),
    Race("peer_schedule", "no_barrier_before_the_sum", train_context, slow_rank_pushes),
    Race("peer_schedule", "one_slot", train_context, slow_rank_behind_barriers),
)
IN_PLACE = (
    Race("shared_slots", "no_barrier_before_copies", prove_in_place, late_casts),
    Race("shared_slots", "filled_again_at_once", prove_in_place, late_behind_barriers),
    Race("in_place_gather", "not_behind_the_compute", prove_in_place, late_compute),
    Race("in_place_gather", "not_awaited", prove_in_place, late_gathers),
    Race("in_place_reduce", "no_barrier", prove_in_place, late_pushes),
    Race("in_place_reduce", "one_slot", prove_in_place, late_behind_barriers),
    Race("in_place_reduce", "pushed_at_once", prove_in_place, late_compute),
    Race("in_place_reduce", "not_awaited", prove_in_place, late_reductions),
    Race("in_place_reduce", "sums_too_late", prove_in_place, late_sums),
)


def is_wrong(race: Race, control: str | None, device: torch.device) -> bool:
    try:
        race.run(race.recipe, control, device, race.widen)
        wrong = False
    except AssertionError:
        wrong = True
    return on_any_rank(wrong, device)


# -- overlap -----------------------------------------------------------------------------------


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
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    context = getattr(module, KINDS[name])(model, list(model), mesh)
    context.gather = watch(GATHER, context.gather)
    context.reduce_scatter = watch(REDUCE, context.reduce_scatter)
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
# of a product. The buffers that stay over the turn-around are not gathered again.
ON_DEMAND = {"gathers": 2 * UNITS, "behind": 2 * UNITS - 2}
KEPT = 3
SCHEDULES = {
    "fsdp2": Schedule(under_fsdp2, **ON_DEMAND, calls=1),
    "stream_context": Schedule(FROM_SCRATCH, 2 * UNITS, UNITS - 1, calls=2),
    "prefetch_schedule": Schedule(
        partial(under_context, "prefetch_schedule"), 2 * UNITS - KEPT, 2 * UNITS - KEPT - 1, calls=2
    ),
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


# -- the ranks' program ------------------------------------------------------------------------


def main(output: Path, runs: int = RUNS, races: tuple[Race, ...] = RACES + IN_PLACE) -> None:
    sys.path[:0] = [str(ROOT), str(SHARDING)]
    EDITED.append(output.parent)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()
    try:
        found: dict = {"right": {}, "wrong": {}, "overlaps": {}}
        for race in races:
            found["right"][race.name] = not is_wrong(race, None, device)
            found["wrong"][race.name] = is_wrong(race, race.control, device)
            if dist.get_rank() == 0:
                print(race.name, found["right"][race.name], found["wrong"][race.name], flush=True)
            write(found, output)
        for name, traced_runs in measure_overlaps(device, output.parent, runs) if runs else ():
            found["overlaps"][name] = traced_runs
            write(found, output)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def write(found: dict, output: Path) -> None:
    if dist.get_rank() == 0:
        output.write_text(json.dumps(found))


# -- the tests ---------------------------------------------------------------------------------


def on_two_ranks(output: Path, *options: str) -> dict:
    """What two ranks of this file's program wrote to ``output``."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", __file__, str(output), *options]
    log = output.with_name("ranks.log")
    with log.open("w") as written:
        ranks = subprocess.Popen(command, stdout=written, stderr=subprocess.STDOUT)
        try:
            status = ranks.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            ranks.terminate()  # torchrun ends its ranks
            ranks.wait()
            status = f"still running after {LIMIT_S} s"
    assert status == 0, f"{status}\n{log.read_text()[-6000:]}"
    return json.loads(output.read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    return on_two_ranks(tmp_path_factory.mktemp("ranks") / "found.json")


@two_devices
@pytest.mark.parametrize("race", [race.name for race in RACES + IN_PLACE])
def test_the_recipe_is_right_where_its_control_is_wrong(found, race):
    assert found["right"][race], "wrong in the widened window, with every ordering in place"
    assert found["wrong"][race], "right without the ordering: the window was missed"


def overlaps(found: dict, name: str) -> list[Overlap]:
    return [Overlap(**run) for run in found["overlaps"][name]]


@two_devices
@pytest.mark.parametrize("name", SCHEDULES)
def test_gathers_run_behind_products_twenty_times_in_twenty_and_it_pays(found, name):
    runs = overlaps(found, name)
    of_runs = [run.faults(SCHEDULES[name].least_hidden) for run in runs]
    assert len(of_runs) == RUNS
    assert not any(of_runs), (
        f"{sum(map(bool, of_runs))} of {RUNS}, first {next(filter(None, of_runs))}"
    )
    assert gain_us(runs) > 0, f"a step costs {-gain_us(runs):.0f} µs more than a serial one"


def test_a_step_gathers_as_often_as_its_bound_supposes_and_no_reduction_is_missed(tmp_path):
    found = on_two_ranks(tmp_path / "found.json", "--gathers")
    for name, schedule in SCHEDULES.items():
        (run,) = overlaps(found, name)
        assert run.gathers == schedule.gathers * schedule.calls, name
        assert run.reductions == UNITS * schedule.calls, name


@two_devices
def test_gathers_on_the_compute_stream_are_found_out(found):
    for run in overlaps(found, "broken"):
        faults = run.faults(BROKEN.least_hidden)
        assert any("is hidden" in fault for fault in faults), faults


def test_every_edit_still_fits_its_recipe():
    from harness.recipe import load_recipe

    edits = {(race.recipe, race.control) for race in RACES + IN_PLACE}
    edits.add(("stream_context", BROKEN.control))
    for recipe, control in edits:
        found = load_recipe(SHARDING / f"{recipe}.py", CONTROLS)
        edit = found.control(control)
        edit.apply((edit.file or found.path).read_text())


class Ran(NamedTuple):
    """When a step's work begins on the device, behind the step's begin, and the product's time."""

    gather: float
    product: float
    product_us: float
    reduce: float


ONE_BY_ONE = Ran(gather=0, product=100, product_us=1000, reduce=1100)  # 1,200 µs
BOTH_HIDDEN = Ran(gather=200, product=0, product_us=1150, reduce=600)  # hides 200, costs 150


def traced(
    judged: Ran, before: Ran = ONE_BY_ONE, behind: Ran = ONE_BY_ONE, gather_stream: int = 9
) -> list[dict]:
    """A trace of ``STEPS``, each behind the last: a gather and a reduction of 100 µs, a product."""

    def event(kind: str, name: str, ts: float, dur: float, tid: int = 1, **args) -> dict:
        return {"ph": "X", "cat": kind, "name": name, "ts": ts, "dur": dur, "tid": tid} | (
            {"args": args} if args else {}
        )

    events, begin = [{"ph": "M", "name": "process_name"}], 1000.0
    for number, (name, ran) in enumerate(
        zip(STEPS, (ONE_BY_ONE, before, judged, behind), strict=True)
    ):
        host, one, two, three, four = 200.0 * number, *range(4 * number, 4 * number + 4)
        gather = event(
            "gpu_memcpy", "Memcpy PtoP", begin + ran.gather, 100, correlation=one,
            stream=gather_stream,
        )  # fmt: skip
        product = event(
            "kernel", "nvjet_sm90", begin + ran.product, ran.product_us, correlation=two, stream=7
        )
        reduction = event(
            "kernel", "ncclDevKernel", begin + ran.reduce, 100, correlation=three, stream=8
        )
        end = max(stop for _, stop in spans([gather, product, reduction]))
        other = event("kernel", "elementwise", end - 50, 50, correlation=four, stream=7)
        events += [
            event("user_annotation", name, host, 100),
            event("user_annotation", GATHER, host + 10, 10),
            event("cuda_runtime", "cudaMemcpyAsync", host + 15, 1, correlation=one),
            event("cpu_op", "aten::mm", host + 30, 10),
            event("cuda_driver", "cuLaunchKernelEx", host + 35, 1, correlation=two),
            event("user_annotation", REDUCE, host + 50, 10),
            event("cuda_runtime", "cudaLaunchKernel", host + 55, 1, correlation=three),
            event("cuda_runtime", "cudaLaunchKernel", host + 70, 1, correlation=four),
            *(gather, product, reduction, other),
        ]
        begin = end
    return events


def test_a_trace_is_judged_by_what_was_launched_where():
    hidden = read_overlap(traced(BOTH_HIDDEN))
    assert hidden == Overlap(1, 1, 100, 100, (9,), (7,), 1150, 1200, 400, 0)
    assert hidden.faults(least_hidden=0.6) == []
    exposed = read_overlap(traced(Ran(gather=0, product=50, product_us=1000, reduce=500)))
    assert exposed.faults(0.5) == ["0.50 of the gathers' time is hidden"]
    serial = read_overlap(traced(ONE_BY_ONE, gather_stream=7))
    assert len(serial.faults(0.6)) == 2
    without = [event for event in traced(BOTH_HIDDEN) if event["name"] != "Memcpy PtoP"]
    assert read_overlap(without).faults(0.6) == ["no gather was found"]


def test_overlap_that_costs_more_than_it_hides_is_found_out():
    gains = read_overlap(traced(BOTH_HIDDEN))
    costs = read_overlap(traced(BOTH_HIDDEN._replace(product_us=1250)))
    assert costs.faults(0.6) == [], "every gather is hidden"
    waits = 2 * WAITS_US
    assert gain_us([gains]) == 50 - waits and gain_us([costs]) == -50 - waits
    assert gain_us([costs, gains, costs]) < 0, "one run out of three is no gain"
    hardly = read_overlap(traced(BOTH_HIDDEN._replace(product_us=1195)))
    assert hardly.step_us < hardly.serial_step_us and gain_us([hardly]) < 0


def test_drifting_clocks_are_no_gain():
    def slowed(by: float) -> Ran:
        return Ran(0, 100, 1000 + by, 1100 + by)

    warming = read_overlap(traced(slowed(50), slowed(0), slowed(100)))
    assert warming.step_us == warming.serial_step_us > 1200


@pytest.mark.parametrize("beside", ["gather", "reduce"])
@pytest.mark.parametrize("which", ["before", "behind"])
def test_a_serial_step_that_overlaps_is_found_out(beside, which):
    overlapped = ONE_BY_ONE._replace(**{beside: 400})
    (fault,) = read_overlap(traced(BOTH_HIDDEN, **{which: overlapped})).faults(0.6)
    assert fault == "serial steps overlap for 100 µs"


def test_a_trace_that_lacks_a_step_is_no_reference():
    events = traced(BOTH_HIDDEN)
    events.remove(next(event for event in events if event["name"] == SERIAL))
    with pytest.raises(AssertionError, match="a trace of"):
        read_overlap(events)


def test_serial_collectives_stand_between_all_products_and_all_that_follow():
    queued = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other) -> None:
            queued.append(f"{self.name} waits for {other.name}")

    compute, own = Stream("compute"), Stream("own")
    current = [compute]
    watch = Watch(SimpleNamespace(current_stream=lambda: current[-1]))
    gather = watch(GATHER, lambda: queued.append("gather"))
    current.append(own)
    gather()
    assert queued == ["gather"]
    watch.serial = True
    gather()
    assert queued[1:] == ["own waits for compute", "gather", "compute waits for own"]


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "stream_context"])
def test_a_schedule_that_hides_nothing_in_forward_is_found_out(name):
    """Gathers of equal length. (Of ``stream_context``, those of backward count as not hidden.)"""
    schedule = SCHEDULES[name]
    in_backward = schedule.behind - (UNITS - 1)
    run = Overlap(schedule.gathers, 0, schedule.gathers, in_backward, (9,), (7,), 1, 2, 1, 0)
    assert run.faults(schedule.least_hidden)


if __name__ == "__main__":
    if sys.argv[2:] == ["--gathers"]:
        main(Path(sys.argv[1]), runs=1, races=())
    elif sys.argv[2:] == ["--in-place"]:
        main(Path(sys.argv[1]), runs=0, races=IN_PLACE)
    elif sys.argv[2:] == ["--own"]:
        main(Path(sys.argv[1]), runs=0, races=RACES)
    else:
        main(Path(sys.argv[1]))
