"""The sharding recipes on two CUDA devices: gathers behind products, and races that show.

**Overlap** is judged from an exported trace: which share of the gathers' time lies beside matrix
products of the compute stream, and how much slower those products are than without communication.
Kernels and copies belong to what launched them: a product to its operator, a gather to the range
around the call that queued it, whatever the kernels are called. A trace holds a step of the model
without communication and two of the schedule, of which the second is judged: the host is ahead by
then, and no rank waits for another that started late.

The bounds follow from the schedules, not from a measurement:

* A product takes longer than a gather, so a schedule can hide every gather that it queues while
  products are still to come. How many these are is in ``Schedule``. More than half of that must be
  hidden: who hides nothing in forward has lost at least half. The rest is room for what else a
  gather's time contains: its wait for the other rank, and what runs between products.
* The products may take longer beside gathers, but by less than the time that is hidden: else hiding
  does not pay.

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
from pathlib import Path
from statistics import median

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile, record_function

ROOT = Path(__file__).parents[1]
SHARDING = ROOT / "recipes_source" / "sharding"
CONTROLS = ROOT / "tests" / "controls"
LIMIT_S = 280  # for the ranks; the machine itself takes about a minute
PAUSE_MS = 5.0  # longer than any step of a toy without it
CYCLES_PER_MS = 2_000_000  # of a GPU at 2 GHz

RUNS = 20
UNITS, WIDTH, TOKENS = 6, 8192, 8192  # square weights; each product takes more than a millisecond
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")
GATHER = "gather of a parameter or unit"
ALONE, JUDGED = "a step without communication", "the judged step"

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
    """The judged step: time in µs of gathers and products, and where they ran."""

    gathers: int  # calls
    gathers_us: float
    hidden_us: float
    products_us: float
    products_alone_us: float
    gather_streams: tuple[int, ...]
    product_streams: tuple[int, ...]

    def faults(self, least_hidden: float) -> list[str]:
        """What is wrong with the overlap; nothing, if it is as the pages say."""
        found = []
        if not self.gathers_us:
            return ["no gather was found"]
        if len(self.product_streams) != 1 or set(self.gather_streams) & set(self.product_streams):
            found.append(f"gathers on {self.gather_streams}, products on {self.product_streams}")
        if (share := self.hidden_us / self.gathers_us) <= least_hidden:
            found.append(f"{share:.2f} of the gathers' time is hidden")
        return found

    @property
    def cost_us(self) -> float:
        """How much longer the products take than without communication."""
        return self.products_us - self.products_alone_us


def read_overlap(events: list[dict]) -> Overlap:
    """Judge the events of a Chrome trace that ``torch.profiler`` exported."""
    complete = [event for event in events if event.get("ph") == "X"]
    ranges: dict[str, list[tuple[object, Span]]] = {"gather": [], "product": []}
    launches, steps = {}, {}
    for event in complete:
        span = (event["ts"], event["ts"] + event["dur"])
        kind, name = event.get("cat"), event["name"]
        if kind == "user_annotation" and name in (ALONE, JUDGED):
            steps[name] = span
        elif kind == "user_annotation" and name == GATHER:
            ranges["gather"].append((event["tid"], span))
        elif kind == "cpu_op" and name in PRODUCTS:
            ranges["product"].append((event["tid"], span))
        elif kind in ("cuda_runtime", "cuda_driver"):
            launches[event["args"]["correlation"]] = (event["tid"], event["ts"])

    def in_step(step: str, at: float) -> bool:
        start, stop = steps[step]
        return start <= at < stop

    def launched_in(what: str, step: str) -> list[dict]:
        found = []
        for event in complete:
            launch = launches.get(event.get("args", {}).get("correlation"))
            if launch and event.get("cat") in ("kernel", "gpu_memcpy") and in_step(step, launch[1]):
                inside = (t == launch[0] and a <= launch[1] < b for t, (a, b) in ranges[what])
                found += [event] if any(inside) else []
        return found

    gathers, products = launched_in("gather", JUDGED), launched_in("product", JUDGED)
    spans = [
        union([(e["ts"], e["ts"] + e["dur"]) for e in chosen]) for chosen in (gathers, products)
    ]
    return Overlap(
        gathers=sum(in_step(JUDGED, start) for _, (start, _) in ranges["gather"]),
        gathers_us=length(spans[0]),
        hidden_us=common(*spans),
        products_us=sum(event["dur"] for event in products),
        products_alone_us=sum(event["dur"] for event in launched_in("product", ALONE)),
        gather_streams=tuple(sorted({event["args"]["stream"] for event in gathers})),
        product_streams=tuple(sorted({event["args"]["stream"] for event in products})),
    )


# -- the ranks' program: what it shares --------------------------------------------------------


def load(name: str, control: str | None = None):
    """The module of a recipe, with a control's edit if one is named."""
    from harness.recipe import load_recipe

    path = SHARDING / f"{name}.py"
    source = path.read_text()
    if control is not None:
        source = load_recipe(path, CONTROLS).control(control).apply(source)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / f"{name}_{control}.py"
        copy.write_text(source)
        spec = importlib.util.spec_from_file_location(copy.stem, copy)
        module = importlib.util.module_from_spec(spec)
        sys.modules[copy.stem] = module
        spec.loader.exec_module(module)
    return module


def pause(milliseconds: float = PAUSE_MS, *, ranks: tuple[int, ...] = (0, 1)) -> None:
    """Hold the current stream on ``ranks``; the host goes on."""
    if dist.get_rank() in ranks and torch.cuda.is_available():
        torch.cuda._sleep(int(milliseconds * CYCLES_PER_MS))


def on_any_rank(value: bool, device: torch.device) -> bool:
    agreed = torch.tensor(float(value), device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    return bool(agreed.item())


# -- races -------------------------------------------------------------------------------------


def train_context(name: str, control: str | None, device: torch.device, widen: Callable) -> None:
    """Train under the context of ``name`` and compare with the unsharded model."""
    module = load(name, control)
    rows = module.rows
    model, reference = rows.Stack(device, shuffled=True), rows.Stack(device, shuffled=True)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    kind = "PrefetchContext" if name == "prefetch_schedule" else "FsdpContext"
    context = getattr(module, kind)(model, model.blocks, mesh)
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


def slow_rank_updates(module) -> None:
    """Rank 0 updates late: between the first barrier and its step."""
    original = module.gather_by_copy_engines

    def plugged(model, optimizer, *args, **kwargs):
        gathers = original(model, optimizer, *args, **kwargs)
        optimizer.register_step_pre_hook(lambda *_: pause(ranks=(0,)))
        return gathers

    module.gather_by_copy_engines = plugged


def slow_rank_reads(module) -> None:
    """Rank 1 makes its copies late."""
    original = module.PeerMemory.gather

    def gather(self, *args, **kwargs):
        pause(ranks=(1,))
        return original(self, *args, **kwargs)

    module.PeerMemory.gather = gather


def slow_rank_pushes(module) -> None:
    """Rank 0 pushes late."""
    original = module.PushReduceScatter.__call__

    def push(self, *args, **kwargs):
        pause(ranks=(0,))
        return original(self, *args, **kwargs)

    module.PushReduceScatter.__call__ = push


def slow_rank_adds(module) -> None:
    """Rank 1 adds late: behind the barrier, which rank 0 has passed as well."""
    init = module.PushReduceScatter.__init__

    def with_slow_barrier(self, memory, *args, **kwargs):
        init(self, memory, *args, **kwargs)
        barrier = memory.barrier

        def late():
            barrier()
            pause(ranks=(1,))

        memory.barrier = late

    module.PushReduceScatter.__init__ = with_slow_barrier


def prove_copies(name: str, control: str | None, device: torch.device, widen: Callable) -> None:
    """Run the recipe's own proof."""
    module = load(name, control)
    copy_engine = getattr(module, "copy_engine", module)
    gather = copy_engine.PeerMemory.gather
    widen(module)
    try:
        module.prove(device, *([None] if name == "copy_engine_gather" else []))
    finally:
        copy_engine.PeerMemory.gather = gather


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
    Race("copy_engine_gather", "no_barrier_after_the_update", prove_copies, slow_rank_updates),
    Race("copy_engine_gather", "no_barrier_before_the_update", prove_copies, slow_rank_reads),
    Race("copy_engine_reduce", "no_barrier", prove_copies, slow_rank_pushes),
    Race("copy_engine_reduce", "one_slot", prove_copies, slow_rank_adds),
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


def labelled(gather: Callable) -> Callable:
    def call(*args, **kwargs):
        with record_function(GATHER):
            return gather(*args, **kwargs)

    return call


class LabelledAllGather:
    """FSDP2's own all-gather, under the label of the others."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        with record_function(GATHER):
            return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


def under_fsdp2(device: torch.device, control: str | None) -> tuple[nn.Module, Callable]:
    model = products_only(device)
    for unit in (*model, model):
        fully_shard(unit)
    for unit in model:
        unit.set_custom_all_gather(LabelledAllGather())
    return model, torch.Tensor.backward


def under_copy_engines(device: torch.device, control: str | None) -> tuple[nn.Module, Callable]:
    module = load("copy_engine_gather", control)
    model = products_only(device)
    for unit in (*model, model):
        fully_shard(unit)
    gathers = module.gather_by_copy_engines(model, torch.optim.SGD(model.parameters()))
    for gather in gathers:
        gather.memory.gather = labelled(partial(module.PeerMemory.gather, gather.memory))
    return model, torch.Tensor.backward


def under_context(name: str, device: torch.device, control: str | None):
    module = load(name, control)
    model = products_only(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    kind = "PrefetchContext" if name == "prefetch_schedule" else "FsdpContext"
    context = getattr(module, kind)(model, list(model), mesh)
    context.gather = labelled(context.gather)
    return model, context.backward


@dataclass(frozen=True)
class Schedule:
    """How to build one, and what it queues in a step.

    ``gathers`` of a unit's weights; ``behind``: those with products to come that they can run
    behind. ``calls``: of its gather for a unit.
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
    "copy_engine_gather": Schedule(under_copy_engines, **ON_DEMAND, calls=1),
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
    alone: nn.Module, model: nn.Module, backward: Callable, batch: torch.Tensor, path: Path
) -> Overlap:
    """A step of ``alone`` and two of ``model``, which begin on all ranks together."""
    on_device = [ProfilerActivity.CUDA] if batch.is_cuda else []
    with profile(activities=[ProfilerActivity.CPU, *on_device]) as traced:
        dist.all_reduce(torch.zeros(1, device=batch.device))
        with record_function(ALONE):
            take_step(alone, torch.Tensor.backward, batch)
        take_step(model, backward, batch)
        with record_function(JUDGED):
            take_step(model, backward, batch)
        torch.accelerator.synchronize() if batch.is_cuda else None
    traced.export_chrome_trace(str(path))
    return read_overlap(json.loads(path.read_text())["traceEvents"])


def measure_overlaps(
    device: torch.device, folder: Path, runs: int
) -> Iterator[tuple[str, list[dict]]]:
    path = folder / f"trace{dist.get_rank()}.json"
    tokens = TOKENS if device.type == "cuda" else 16
    alone = products_only(device)
    batch = torch.randn(tokens, alone[0][0].in_features, device=device, dtype=torch.bfloat16)
    for name, schedule in {**SCHEDULES, "broken": BROKEN}.items():
        torch.manual_seed(0)
        model, backward = schedule.build(device, schedule.control)
        for _ in range(2):
            trace_steps(alone, model, backward, batch, path)
        yield name, [asdict(trace_steps(alone, model, backward, batch, path)) for _ in range(runs)]
        del model, backward


# -- the ranks' program ------------------------------------------------------------------------


def main(output: Path, runs: int = RUNS, races: tuple[Race, ...] = RACES) -> None:
    sys.path[:0] = [str(ROOT), str(SHARDING)]
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
            write(found, output)
        for name, traced_runs in measure_overlaps(device, output.parent, runs):
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
@pytest.mark.parametrize("race", [race.name for race in RACES])
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
    assert median(run.cost_us for run in runs) < median(run.hidden_us for run in runs)


def test_a_step_gathers_as_often_as_its_bound_supposes(tmp_path):
    found = on_two_ranks(tmp_path / "found.json", "--gathers")
    for name, schedule in SCHEDULES.items():
        (run,) = overlaps(found, name)
        assert run.gathers == schedule.gathers * schedule.calls, name


@two_devices
def test_gathers_on_the_compute_stream_are_found_out(found):
    for run in overlaps(found, "broken"):
        faults = run.faults(BROKEN.least_hidden)
        assert any("is hidden" in fault for fault in faults), faults


def test_every_edit_still_fits_its_recipe():
    from harness.recipe import load_recipe

    edits = {(race.recipe, race.control) for race in RACES}
    edits.add(("stream_context", BROKEN.control))
    for recipe, control in edits:
        path = SHARDING / f"{recipe}.py"
        load_recipe(path, CONTROLS).control(control).apply(path.read_text())


def traced(*, gather_stream: int, gather_at: float) -> list[dict]:
    """A trace of a gather of 100 µs and a product from 1,000 to 2,000 µs, and of a step before.

    That has a gather and a product as well, and another step before it a product of 900 µs alone.
    """

    def event(kind: str, name: str, ts: float, dur: float, tid: int = 1, **args) -> dict:
        return {"ph": "X", "cat": kind, "name": name, "ts": ts, "dur": dur, "tid": tid} | (
            {"args": args} if args else {}
        )

    def product(at: float, number: int, ts: float, dur: float) -> list[dict]:
        launch = event("cuda_driver", "cuLaunchKernelEx", at + 5, 1, correlation=number)
        kernel = event("kernel", "nvjet_sm90", ts, dur, correlation=number, stream=7)
        return [event("cpu_op", "aten::mm", at, 10), launch, kernel]

    def gather(at: float, number: int, ts: float) -> list[dict]:
        launch = event("cuda_runtime", "cudaMemcpyAsync", at + 5, 1, correlation=number)
        copy = event("gpu_memcpy", "Memcpy PtoP", ts, 100, correlation=number, stream=gather_stream)
        return [event("user_annotation", GATHER, at, 10), launch, copy]

    return [
        event("user_annotation", ALONE, 0, 100),
        *product(20, 1, 100, 900),
        *gather(110, 2, 400),
        *product(130, 3, 400, 500),
        event("user_annotation", JUDGED, 200, 100),
        *gather(210, 4, gather_at),
        *product(230, 5, 1000, 1000),
        event("cuda_runtime", "cudaLaunchKernel", 250, 1, correlation=6),
        event("kernel", "elementwise", 2000, 500, correlation=6, stream=7),
        {"ph": "M", "name": "process_name"},
    ]


def test_a_trace_is_judged_by_what_was_launched_where():
    hidden = read_overlap(traced(gather_stream=9, gather_at=1500))
    assert hidden == Overlap(1, 100, 100, 1000, 900, (9,), (7,))
    assert hidden.faults(least_hidden=0.6) == [] and hidden.cost_us == 100
    exposed = read_overlap(traced(gather_stream=9, gather_at=950))
    assert exposed.faults(0.5) == ["0.50 of the gathers' time is hidden"]
    serial = read_overlap(traced(gather_stream=7, gather_at=2500))
    assert len(serial.faults(0.6)) == 2
    events = traced(gather_stream=9, gather_at=0)
    without = [event for event in events if event["name"] != "Memcpy PtoP"]
    assert read_overlap(without).faults(0.6) == ["no gather was found"]


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "stream_context"])
def test_a_schedule_that_hides_nothing_in_forward_is_found_out(name):
    """Gathers of equal length. (Of ``stream_context``, those of backward count as not hidden.)"""
    schedule = SCHEDULES[name]
    in_backward = schedule.behind - (UNITS - 1)
    run = Overlap(schedule.gathers, schedule.gathers, in_backward, 1, 1, (9,), (7,))
    assert run.faults(schedule.least_hidden)


if __name__ == "__main__":
    if sys.argv[2:] == ["--gathers"]:
        main(Path(sys.argv[1]), runs=1, races=())
    else:
        main(Path(sys.argv[1]))
