"""The sharding recipes on two CUDA devices: gathers behind products, and races that show.

**Overlap** is judged from an exported trace: which share of the gathers' time lies beside matrix
products of the compute stream, and how much slower those products are than without communication.
Kernels and copies belong to what launched them: a product to its operator, a gather to the range
around the call that queued it, whatever the kernels are called.

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
from dataclasses import asdict, dataclass
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
MOST_SLOWDOWN = 1.25  # of the products beside gathers
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")
GATHER = "gather of a unit"

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
    """One traced step: time in µs of gathers and products, and where they ran."""

    gathers_us: float
    hidden_us: float
    products_us: float
    gather_streams: tuple[int, ...]
    product_streams: tuple[int, ...]

    def faults(self, products_alone_us: float, least_hidden: float) -> list[str]:
        """What is wrong with the overlap; nothing, if it is as the pages say."""
        found = []
        if not self.gathers_us:
            return ["no gather was found"]
        if len(self.product_streams) != 1 or set(self.gather_streams) & set(self.product_streams):
            found.append(f"gathers on {self.gather_streams}, products on {self.product_streams}")
        if (share := self.hidden_us / self.gathers_us) < least_hidden:
            found.append(f"{share:.2f} of the gathers' time is hidden")
        if (slowdown := self.products_us / products_alone_us) > MOST_SLOWDOWN:
            found.append(f"products take {slowdown:.2f} times their time alone")
        return found


def read_overlap(events: list[dict]) -> Overlap:
    """Judge the events of a Chrome trace that ``torch.profiler`` exported."""
    complete = [event for event in events if event.get("ph") == "X"]
    ranges: dict[str, list[tuple[object, Span]]] = {"gather": [], "product": []}
    launches = {}
    for event in complete:
        span = (event["ts"], event["ts"] + event["dur"])
        kind = event.get("cat")
        if kind == "user_annotation" and event["name"] == GATHER:
            ranges["gather"].append((event["tid"], span))
        elif kind == "cpu_op" and event["name"] in PRODUCTS:
            ranges["product"].append((event["tid"], span))
        elif kind in ("cuda_runtime", "cuda_driver"):
            launches[event["args"]["correlation"]] = (event["tid"], event["ts"])

    def launched_in(what: str) -> list[dict]:
        found = []
        for event in complete:
            if event.get("cat") in ("kernel", "gpu_memcpy"):
                thread, at = launches.get(event["args"].get("correlation"), (None, 0.0))
                inside = (t == thread and a <= at < b for t, (a, b) in ranges[what])
                found += [event] if any(inside) else []
        return found

    gathers, products = launched_in("gather"), launched_in("product")
    spans = [
        union([(e["ts"], e["ts"] + e["dur"]) for e in chosen]) for chosen in (gathers, products)
    ]
    return Overlap(
        gathers_us=length(spans[0]),
        hidden_us=common(*spans),
        products_us=sum(event["dur"] for event in products),
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
    """How to build one, and the share of its gathers' time that products must hide.

    Exposed are the first gather of a step, the one at the turn-around, and, where the
    reduce-scatter is on the compute stream, what runs beside it.
    """

    build: Callable
    least_hidden: float
    control: str | None = None


FROM_SCRATCH = partial(under_context, "stream_context")
SCHEDULES = {
    "fsdp2": Schedule(under_fsdp2, 0.5),
    "copy_engine_gather": Schedule(under_copy_engines, 0.5),
    "stream_context": Schedule(FROM_SCRATCH, 0.25),
    "prefetch_schedule": Schedule(partial(under_context, "prefetch_schedule"), 0.4),
}
BROKEN = Schedule(FROM_SCRATCH, 0.25, "gather_on_the_compute_stream")


def trace_step(model: nn.Module, backward: Callable, batch: torch.Tensor, path: Path) -> Overlap:
    """Two steps in a row, so that the host is ahead; both are traced, and begin on all ranks."""
    on_device = [ProfilerActivity.CUDA] if batch.is_cuda else []
    with profile(activities=[ProfilerActivity.CPU, *on_device]) as traced:
        dist.all_reduce(torch.zeros(1, device=batch.device))
        for _ in range(2):
            backward(model(batch).float().square().mean())
            for parameter in model.parameters():
                parameter.grad = None
        torch.accelerator.synchronize() if batch.is_cuda else None
    traced.export_chrome_trace(str(path))
    return read_overlap(json.loads(path.read_text())["traceEvents"])


def measure_overlaps(device: torch.device, folder: Path) -> Iterator[tuple[str, list[dict]]]:
    path = folder / f"trace{dist.get_rank()}.json"
    tokens = TOKENS if device.type == "cuda" else 16
    alone = Schedule(lambda device, control: (products_only(device), torch.Tensor.backward), 0)
    for name, schedule in {"alone": alone, **SCHEDULES, "broken": BROKEN}.items():
        torch.manual_seed(0)
        model, backward = schedule.build(device, schedule.control)
        batch = torch.randn(tokens, model[0][0].in_features, device=device, dtype=torch.bfloat16)
        for _ in range(2):
            trace_step(model, backward, batch, path)
        yield name, [asdict(trace_step(model, backward, batch, path)) for _ in range(RUNS)]
        del model, backward


# -- the ranks' program ------------------------------------------------------------------------


def main(output: Path) -> None:
    sys.path[:0] = [str(ROOT), str(SHARDING)]
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()
    try:
        found: dict = {"right": {}, "wrong": {}, "overlaps": {}}
        for race in RACES:
            found["right"][race.name] = not is_wrong(race, None, device)
            found["wrong"][race.name] = is_wrong(race, race.control, device)
            write(found, output)
        for name, runs in measure_overlaps(device, output.parent):
            found["overlaps"][name] = runs
            write(found, output)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def write(found: dict, output: Path) -> None:
    if dist.get_rank() == 0:
        output.write_text(json.dumps(found))


# -- the tests ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    output = tmp_path_factory.mktemp("ranks") / "found.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", __file__, str(output)]
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


@two_devices
@pytest.mark.parametrize("race", [race.name for race in RACES])
def test_the_recipe_is_right_where_its_control_is_wrong(found, race):
    assert found["right"][race], "wrong in the widened window, with every ordering in place"
    assert found["wrong"][race], "right without the ordering: the window was missed"


def faults(found: dict, name: str, schedule: Schedule) -> list[list[str]]:
    """What is wrong with each traced run of a schedule."""
    alone = median(run["products_us"] for run in found["overlaps"]["alone"])
    runs = [Overlap(**run) for run in found["overlaps"][name]]
    return [run.faults(alone, schedule.least_hidden) for run in runs]


@two_devices
@pytest.mark.parametrize("name", SCHEDULES)
def test_gathers_run_behind_products_twenty_times_in_twenty(found, name):
    of_runs = faults(found, name, SCHEDULES[name])
    assert len(of_runs) == RUNS
    assert not any(of_runs), (
        f"{sum(map(bool, of_runs))} of {RUNS}, first {next(filter(None, of_runs))}"
    )


@two_devices
def test_gathers_on_the_compute_stream_are_found_out(found):
    for of_run in faults(found, "broken", BROKEN):
        assert any("is hidden" in fault for fault in of_run), of_run


def test_every_edit_still_fits_its_recipe():
    from harness.recipe import load_recipe

    edits = {(race.recipe, race.control) for race in RACES}
    edits.add(("stream_context", BROKEN.control))
    for recipe, control in edits:
        path = SHARDING / f"{recipe}.py"
        load_recipe(path, CONTROLS).control(control).apply(path.read_text())


def traced(*, gather_stream: int, gather_at: float) -> list[dict]:
    """A trace of a gather of 100 µs, launched first, and a product from 1,000 to 2,000 µs."""

    def event(kind: str, name: str, ts: float, dur: float, tid: int = 1, **args) -> dict:
        return {"ph": "X", "cat": kind, "name": name, "ts": ts, "dur": dur, "tid": tid} | (
            {"args": args} if args else {}
        )

    return [
        event("user_annotation", GATHER, 0, 10),
        event("cuda_runtime", "cudaMemcpyAsync", 5, 1, correlation=1),
        event("cpu_op", "aten::mm", 20, 10),
        event("cuda_driver", "cuLaunchKernelEx", 25, 1, correlation=2),
        event("cuda_runtime", "cudaLaunchKernel", 40, 1, correlation=3),
        event("gpu_memcpy", "Memcpy PtoP", gather_at, 100, correlation=1, stream=gather_stream),
        event("kernel", "nvjet_sm90", 1000, 1000, correlation=2, stream=7),
        event("kernel", "elementwise", 2000, 500, correlation=3, stream=7),
        {"ph": "M", "name": "process_name"},
    ]


def test_a_trace_is_judged_by_what_was_launched_where():
    hidden = read_overlap(traced(gather_stream=9, gather_at=1500))
    assert hidden == Overlap(100, 100, 1000, (9,), (7,))
    assert hidden.faults(products_alone_us=900, least_hidden=0.6) == []
    assert hidden.faults(500, 0.6) == ["products take 2.00 times their time alone"]
    exposed = read_overlap(traced(gather_stream=9, gather_at=950))
    assert exposed.faults(900, 0.6) == ["0.50 of the gathers' time is hidden"]
    serial = read_overlap(traced(gather_stream=7, gather_at=2500))
    assert len(serial.faults(900, 0.6)) == 2
    assert read_overlap([]).faults(900, 0.6) == ["no gather was found"]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
