"""Three streams and activation offload: what a trace is judged to say, what is copied, what fails.

What the recipes' own asserts and the recorder of stream order prove is not repeated here. On a CUDA
device the edits of ``tests/controls`` are made, and the stream that must be waited for is delayed,
so that a missing wait gives wrong values every time.
"""

import gc
import importlib.util
import sys
import weakref
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harness.recipe import load_recipe
from harness.run import run

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes_source" / "offload"
DELAY_CYCLES = 200_000_000  # of the device's clock: 0.1 s and more; queueing a step takes less
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


def load(tmp_path: Path, recipe: str, control: str | None = None):
    """The recipe's module, with a control's edit if one is named."""
    path = RECIPES / f"{recipe}.py"
    source = path.read_text()
    if control is not None:
        source = load_recipe(path, ROOT / "tests" / "controls").control(control).apply(source)
    copy = tmp_path / f"{recipe}_{control}.py"
    copy.write_text(source)
    spec = importlib.util.spec_from_file_location(copy.stem, copy)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def streams(tmp_path):
    return load(tmp_path, "three_streams")


@pytest.fixture
def recipe(tmp_path):
    return load(tmp_path, "activation_offload")


# -- what a trace says ------------------------------------------------------------------------

COMPUTE, LOAD, STORE = 7, 13, 17  # streams


def kernel(ts: float, dur: float) -> dict:
    return {"cat": "kernel", "name": "gemm", "ts": ts, "dur": dur, "args": {"stream": COMPUTE}}


def copied(name: str, stream: int, ts: float, dur: float) -> dict:
    name = f"Memcpy {name}"
    return {"cat": "gpu_memcpy", "name": name, "ts": ts, "dur": dur, "args": {"stream": stream}}


def called(name: str, ts: float, dur: float) -> dict:
    return {"cat": "cuda_runtime", "name": name, "ts": ts, "dur": dur}


def trace(call_us: float, *events: dict) -> list[dict]:
    call = {"cat": "user_annotation", "name": "judged call", "ts": 0.0, "dur": call_us}
    return [call, {"ph": "M", "name": "process_name"}, *events]


def test_pageable_copies_hold_the_host(streams):
    verdict = streams.judge(
        trace(
            400,
            called("cudaMemcpyAsync", 1, 190),
            copied("HtoD (Pageable -> Device)", COMPUTE, 5, 180),
            called("cudaStreamSynchronize", 192, 3),
            kernel(200, 50),
        )
    )
    assert verdict.holds_host
    found = verdict.copies["HtoD"]
    assert not found.pinned and not found.own_stream and found.hidden_share == 0
    assert "PAGEABLE" in str(verdict) and "HELD" in str(verdict)


def test_waiting_for_a_pinned_copy_holds_the_host(streams):
    verdict = streams.judge(
        trace(
            400,
            called("cudaMemcpyAsync", 1, 5),
            copied("HtoD (Pinned -> Device)", LOAD, 6, 180),
            called("cudaStreamSynchronize", 7, 180),
            kernel(200, 50),
        )
    )
    assert verdict.holds_host
    assert verdict.copies["HtoD"].pinned and verdict.copies["HtoD"].own_stream


def test_a_wait_after_the_call_is_not_the_copys(streams):
    verdict = streams.judge(
        trace(
            10,
            called("cudaMemcpyAsync", 1, 5),
            copied("DtoH (Device -> Pinned)", STORE, 100, 200),
            called("cudaDeviceSynchronize", 20, 300),
            kernel(120, 100),
            kernel(190, 60),
        )
    )
    assert not verdict.holds_host
    assert verdict.host_s == pytest.approx(5e-6)
    assert verdict.copies["DtoH"].hidden_share == pytest.approx(130 / 200)


def test_directions_are_judged_apart(streams):
    verdict = streams.judge(
        trace(
            10,
            copied("HtoD (Pinned -> Device)", LOAD, 0, 100),
            copied("DtoH (Device -> Pinned)", COMPUTE, 200, 100),
            kernel(0, 150),
        )
    )
    assert verdict.copies["HtoD"].own_stream and verdict.copies["HtoD"].hidden_share == 1
    assert not verdict.copies["DtoH"].own_stream and verdict.copies["DtoH"].hidden_share == 0


def test_one_pageable_copy_among_pinned_ones_is_named(streams):
    both = ("HtoD (Pinned -> Device)", "HtoD (Pageable -> Device)")
    verdict = streams.judge(trace(10, *(copied(name, LOAD, 0, 10) for name in both)))
    assert not verdict.copies["HtoD"].pinned


def test_without_copies_there_is_nothing_to_judge(streams):
    assert "no device copy to judge" in str(streams.judge(trace(10, kernel(0, 5))))


def test_the_pipeline_refuses_a_chunk_that_does_not_fit_its_slots(streams):
    pipeline = streams.Pipeline(torch.zeros(4, 4))
    with pytest.raises(ValueError, match=r"slots hold \(4, 4\), not \(4, 5\)"):
        pipeline.run([torch.zeros(4, 5)], [torch.zeros(4, 5)])


# -- what is copied ---------------------------------------------------------------------------

ROWS, WIDTH = 32, 64
NBYTES = ROWS * WIDTH * 4  # of an activation below


def offloading(recipe, budget: int = 1 << 20, window: int = 1 << 20, **options):
    options = {"smallest": NBYTES // 2} | options
    return closing(recipe.ActivationOffload(torch.device("cpu"), budget, window, **options))


def activation() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(ROWS, WIDTH, requires_grad=True)


def test_a_storage_is_copied_once_whatever_views_of_it_are_saved(recipe):
    x = activation()
    with offloading(recipe) as offload:
        with offload.saving():
            base = x * 2  # saves nothing: the factor is a number
            q, k = base.chunk(2, dim=1)
            y = (q.t() @ k).sum() + (base.relu() * base).sum()
        # base (as q.t(), k, base and twice more) and base.relu()
        assert offload.used == offload.wanted == 2 * NBYTES
        y.backward()
    ours, x.grad = x.grad, None
    base = x * 2
    q, k = base.chunk(2, dim=1)
    ((q.t() @ k).sum() + (base.relu() * base).sum()).backward()
    assert torch.equal(ours, x.grad)


@pytest.mark.parametrize("trained", [True, False])
def test_parameters_and_their_views_stay(recipe, trained):
    layer = nn.Linear(WIDTH, WIDTH).requires_grad_(trained)
    gain = nn.Parameter(torch.ones(ROWS, WIDTH), requires_grad=trained)
    x = activation().exp()
    with offloading(recipe) as offload:
        with offload.saving():  # saves the weight transposed, gain itself, and the output of exp
            outputs = layer(x).exp() * gain
        assert layer.weight.nbytes >= offload.smallest and gain.nbytes == NBYTES
        # the output of exp, and x, which the gradient of the weight needs
        assert offload.wanted == NBYTES * (1 + trained)
        outputs.sum().backward()


def test_casts_of_parameters_under_autocast_stay(recipe):
    layer, x = nn.Linear(WIDTH, WIDTH), activation()
    with offloading(recipe, smallest=NBYTES // 4) as offload:
        with offload.saving(), torch.autocast("cpu", torch.bfloat16):
            y = layer(x)  # saves the casts of x and of the weight
        assert layer.weight.nbytes // 2 >= offload.smallest
        assert offload.wanted == NBYTES // 2, "the cast of x alone"
        y.sum().backward()


def test_what_is_asked_for_stays(recipe):
    x = activation()
    for stay, wanted in (((), 2 * NBYTES), ([x], NBYTES)):
        with offloading(recipe, stay=stay) as offload:
            with offload.saving():  # saves x, and the output of exp
                (x * x).exp().sum().backward()
            assert offload.wanted == wanted


SHARDED = f"""
import sys

sys.path[:0] = [{str(RECIPES)!r}, {str(ROOT)!r}]

from contextlib import closing, nullcontext

import torch
import torch.distributed as dist
from activation_offload import ActivationOffload, same_bits
from torch import nn
from torch.distributed.fsdp import fully_shard
from overlap_recipes.ranks import start_rank


def build(device):
    torch.manual_seed(0)
    blocks = (
        nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64))
        for _ in range(4)
    )
    return nn.Sequential(*blocks).to(device)


def gradients_of(model, batch, saving):
    model.zero_grad()
    with saving:
        loss = model(batch).square().mean()
    loss.backward()
    return [parameter.grad.to_local() for parameter in model.parameters()]


device = start_rank()
batch = torch.randn(32, 64, device=device)
plain = build(device)
options = {{"window": 64 << 10, "smallest": 512}}
with closing(ActivationOffload(device, 1 << 20, stay=plain.parameters(), **options)) as offload:
    with offload.saving():
        plain(batch).square().mean().backward()
    activations = offload.wanted
assert activations >= 4 * 3 * 32 * 256 * 4, activations
for reshard in (True, False):
    model = build(device)
    for part in (*model, model):
        fully_shard(part, reshard_after_forward=reshard)
    expected = gradients_of(model, batch, nullcontext())
    with closing(ActivationOffload(device, 1 << 20, **options)) as offload:
        for _ in range(3):
            assert same_bits(gradients_of(model, batch, offload.saving()), expected)
            assert offload.wanted == activations, f"{{offload.wanted}} of {{activations}} bytes"
dist.destroy_process_group()
"""


def test_no_gathered_weight_of_fully_shard_is_copied(tmp_path):
    """It may be freed while a copy still reads it."""
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED)
    report = run(script, 2, launcher="warm")
    assert report.ok, report.describe()


def test_small_tensors_stay(recipe):
    with offloading(recipe, smallest=NBYTES + 1) as offload:
        with offload.saving():
            activation().exp().sum().backward()
        assert offload.wanted == 0


def chain(x: torch.Tensor, length: int) -> torch.Tensor:
    """Each link saves its result."""
    for _ in range(length):
        x = (x * 0.1).exp()
    return x


def test_sources_are_freed_while_forward_goes_on(recipe):
    seen: list[weakref.ref] = []
    with offloading(recipe, window=2 * NBYTES) as offload:
        pack = offload.pack

        def watched(tensor):
            seen.append(weakref.ref(tensor.untyped_storage()))
            return pack(tensor)

        offload.pack = watched
        x = activation()
        with offload.saving():
            y = chain(x, 10).sum()
        assert len(seen) == 10 and sum(storage() is not None for storage in seen) == 2
        y.backward()
        assert offload.peak <= 4 * NBYTES
    ours, x.grad = x.grad, None
    chain(x, 10).sum().backward()
    assert torch.equal(ours, x.grad)


UNLIKE_THEIR_BYTES = {
    "conjugated": lambda: torch.randn(ROWS, WIDTH, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(ROWS, WIDTH, dtype=torch.complex64).conj().imag,
    "sparse": lambda: torch.randn(ROWS, WIDTH).to_sparse(),
    "sparse in rows": lambda: torch.randn(ROWS, WIDTH).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(ROWS, WIDTH), 0.1, 0, torch.qint8),
}
WHOLE = {
    "expanded": lambda: torch.randn(ROWS, 1).expand(ROWS, WIDTH),
    "overlapping": lambda: torch.randn(ROWS + WIDTH).as_strided((ROWS, WIDTH), (1, 1)),
    "a view": lambda: torch.randn(ROWS, WIDTH)[3:5, 7::9],
    "empty": lambda: torch.randn(ROWS, WIDTH)[:0],
    "8 bits": lambda: torch.randn(ROWS, WIDTH).to(torch.float8_e4m3fn),
    "bits": lambda: torch.randn(ROWS, WIDTH) > 0,
    "a real part": lambda: torch.randn(ROWS, WIDTH, dtype=torch.complex64).real,
}


class Keep(torch.autograd.Function):
    """Saves a tensor for backward, and shows in ``came_back`` what backward was given."""

    @staticmethod
    def forward(ctx, x, kept, came_back):
        ctx.save_for_backward(kept)
        ctx.came_back = came_back
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.came_back.extend(ctx.saved_tensors)
        return gradient, None, None


@pytest.mark.filterwarnings("ignore:.*(Sparse CSR|quantized tensor creation):UserWarning")
@pytest.mark.parametrize("kind", [*UNLIKE_THEIR_BYTES, *WHOLE])
def test_every_kind_of_tensor_comes_back_as_it_was(recipe, kind):
    torch.manual_seed(0)
    kept, came_back = (UNLIKE_THEIR_BYTES | WHOLE)[kind](), []
    with offloading(recipe, smallest=1) as offload:
        with offload.saving():
            y = Keep.apply(torch.zeros(1, requires_grad=True), kept, came_back)
        offload.release(0)
        y.backward()
        assert (offload.used == 0) == (kind in UNLIKE_THEIR_BYTES)
    (back,) = came_back
    assert (back.dtype, back.layout, back.shape) == (kept.dtype, kept.layout, kept.shape)
    if kept.layout == torch.strided:
        assert back.stride() == kept.stride()
    if kept.is_quantized:
        kept, back = kept.dequantize(), back.dequantize()
    assert torch.equal(back.to_dense(), kept.to_dense())


@pytest.mark.parametrize("window", [1, 1 << 20])
def test_parts_of_a_storage_with_versions_of_their_own_are_not_mixed_up(recipe, window):
    x = activation()

    def gradient(saving):
        with saving:
            one, two = (x * 1).unsafe_chunk(2, dim=1)
            first = one.exp_().square().sum()  # saves `one`, and with it the memory of `two`
            middle = chain(x, 2).sum()  # by now, the first copy has been made
            loss = first + middle + two.exp_().square().sum()
        return torch.autograd.grad(loss, x)[0]

    right = gradient(nullcontext())
    with offloading(recipe, window=window) as offload:
        assert torch.equal(gradient(offload.saving()), right)
        assert offload.used == 2 * NBYTES  # of `chain`


@pytest.mark.parametrize("budget", [1 << 20, 0])
def test_gradients_through_conjugated_views_are_right(recipe, budget):
    torch.manual_seed(0)
    a, b = (torch.randn(ROWS, WIDTH, dtype=torch.complex64, requires_grad=True) for _ in range(2))

    def gradients(saving):
        with saving:
            loss = (a * b.conj() * (a.conj().imag * a.real)).abs().sum()
        return torch.autograd.grad(loss, (a, b))

    with offloading(recipe, budget) as offload:
        ours = gradients(offload.saving())
        assert (offload.used > 0) == (budget > 0)
    for mine, right in zip(ours, gradients(nullcontext()), strict=True):
        assert torch.equal(mine, right)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype:UserWarning")
def test_nested_tensors_stay(recipe):
    parts = [torch.randn(rows, WIDTH) for rows in (ROWS, ROWS // 2)]
    x = torch.nested.nested_tensor(parts).requires_grad_()
    with offloading(recipe) as offload:
        with offload.saving():  # saves x
            loss = torch.nested.to_padded_tensor(x.sin(), 0.0).sum()
        loss.backward()
    for part, gradient in zip(parts, x.grad.unbind(), strict=True):
        assert torch.equal(gradient, part.cos())


def test_what_exceeds_the_budget_stays_and_is_wanted_once(recipe):
    x = activation()
    with offloading(recipe, budget=2 * NBYTES) as offload:
        with offload.saving():
            y = chain(x, 4)
            z = (y * y + y.square()).sum()  # y again, three times
        assert offload.used == 2 * NBYTES and offload.wanted == 4 * NBYTES
        z.backward()


def test_a_storage_larger_than_the_window_goes_alone_and_ahead(recipe):
    there: list[bool] = []
    with offloading(recipe, window=1) as offload:
        unpack = offload.unpack

        def watched(packed):
            storage = packed[0]
            there.append(storage.source is not None or storage.back is not None)
            return unpack(packed)

        offload.unpack = watched
        with offload.saving():
            chain(activation(), 5).sum().backward()
        assert offload.used == 5 * NBYTES and offload.peak <= 2 * NBYTES
        assert there == [True] * 5  # loaded, or never gone, before backward asked


def test_what_is_never_read_keeps_nothing_from_coming_early(recipe):
    late: list[int] = []
    with offloading(recipe, window=NBYTES) as offload:
        load_back, prefetch = offload.load, offload.prefetch

        def watched(storage) -> None:
            late.append(storage.index)
            load_back(storage)

        def prefetched(index: int) -> None:
            offload.load = load_back
            prefetch(index)
            offload.load = watched

        offload.load, offload.prefetch = watched, prefetched
        with offload.saving():
            first = chain(activation(), 6)
            metric = first.exp()  # number 6; no backward runs through it
            loss = chain(first, 3).sum()
        loss.backward()
        del metric
    assert late == [5]  # the metric came instead of it; the others were there


def test_what_nobody_has_read_leaves_the_device_with_the_next_forward(recipe):
    with offloading(recipe, window=2 * NBYTES) as offload:
        with offload.saving():
            metric = activation().exp()  # kept with its graph
            loss = chain(activation(), 4).sum()
        loss.backward()
        (unread,) = offload.arriving
        assert unread.back is not None
        with offload.saving():
            pass
        assert unread.back is None and not offload.arriving
        metric.sum().backward()  # comes again


def test_two_forwards_before_the_first_backward_share_the_pool(recipe):
    x, z = activation(), activation()
    with offloading(recipe, window=NBYTES) as offload:
        with offload.saving():
            first = chain(x, 4).sum()
        with offload.saving():
            second = chain(z, 4).sum()
        assert offload.used == 8 * NBYTES
        first.backward()
        second.backward()
        with offload.saving():
            chain(x, 4).sum()
        assert offload.used == 4 * NBYTES
    assert torch.equal(x.grad, z.grad)


def test_a_graph_may_be_run_backward_twice(recipe):
    x = activation()
    with offloading(recipe, window=NBYTES) as offload:
        with offload.saving():
            y = chain(x, 4).sum()
        (once,) = torch.autograd.grad(y, x, retain_graph=True)
        (again,) = torch.autograd.grad(y, x)
    assert torch.equal(once, again)


@pytest.mark.parametrize("budget", [1 << 20, 2 * NBYTES, 0])
def test_a_graph_without_backward_leaves_nothing(recipe, budget):
    seen: list[weakref.ref] = []
    with offloading(recipe, budget=budget) as offload:
        pack = offload.pack

        def watched(tensor):
            seen.append(weakref.ref(tensor.untyped_storage()))
            return pack(tensor)

        offload.pack = watched
        with offload.saving():
            y = chain(activation(), 6).relu().square().sum()
        del y
        offload.release(0)
        gc.collect()
    assert len(seen) == 8 and not any(storage() for storage in seen)


# -- what fails -------------------------------------------------------------------------------


STAYS = {
    "nothing": lambda x: {},  # its copy is on its way
    "small": lambda x: {"smallest": NBYTES + 1},
    "beyond the budget": lambda x: {"budget": 0},
    "asked for": lambda x: {"stay": [x]},
}


@pytest.mark.parametrize("why", STAYS)
def test_a_change_in_place_of_what_the_device_holds_is_an_error(recipe, why):
    x = activation()
    middle = x * 1
    with offloading(recipe, **STAYS[why](middle)) as offload:
        with offload.saving():
            y = middle.square().sum()
        with torch.no_grad():
            middle.mul_(2)
        with pytest.raises(RuntimeError, match="changed in place after autograd saved it"):
            y.backward()


def test_a_change_in_place_during_a_copy_is_an_error_when_backward_reads_it(recipe):
    middle = activation() * 1
    with offloading(recipe) as offload:
        with offload.saving():
            y = middle.square().sum()
        with torch.no_grad():
            middle.mul_(2)
        offload.release(0)  # where the copy ends; nobody may ever read it
        with pytest.raises(RuntimeError, match="changed in place after autograd saved it"):
            y.backward()


@pytest.mark.parametrize("window", [1 << 20, 1])  # what is saved fits it, or nothing does
def test_what_backward_is_done_with_may_be_changed_in_place(recipe, window):
    """A batch that is refilled, and a weight that is no ``nn.Parameter``."""

    def trained(saving) -> torch.Tensor:
        torch.manual_seed(0)
        batch, weight = torch.empty(ROWS, WIDTH), torch.randn(WIDTH, WIDTH, requires_grad=True)
        for _ in range(3):
            batch.normal_()
            with saving():
                loss = (batch @ weight).tanh().square().mean()
            loss.backward()
            with torch.no_grad():
                weight.sub_(0.1 * weight.grad)
            weight.grad = None
        return weight

    with offloading(recipe, window=window) as offload:
        assert torch.equal(trained(offload.saving), trained(nullcontext))
        assert offload.used > 0


def test_a_change_in_place_of_a_conjugated_view_is_an_error(recipe):
    x = torch.randn(ROWS, WIDTH, dtype=torch.complex64, requires_grad=True)
    middle = x * 1
    with offloading(recipe) as offload:
        with offload.saving():
            y = (middle.conj() * x).abs().sum()
        with torch.no_grad():
            middle.mul_(2)
        with pytest.raises(RuntimeError, match="changed in place after autograd saved it"):
            y.backward()


def test_operations_in_place_that_autograd_allows_are_no_error(recipe):
    x = activation()

    def gradient(saving):
        with saving:
            loss = (x * 1).add_(1).exp_().relu().square().sum()
        return torch.autograd.grad(loss, x)[0]

    right = gradient(nullcontext())
    for smallest in (1, NBYTES + 1):
        with offloading(recipe, smallest=smallest) as offload:
            assert torch.equal(gradient(offload.saving()), right)


def test_a_change_in_place_after_the_copy_is_harmless(recipe):
    x = activation()
    with offloading(recipe, window=1) as offload, offload.saving():
        middle = (x * 0.1).exp()
        y = (middle * 0.1).exp().sum()  # its copy makes that of `middle` complete
        with torch.no_grad():
            middle.zero_()
        y.backward()
    ours, x.grad = x.grad, None
    chain(x, 2).sum().backward()
    assert torch.equal(ours, x.grad)


def test_a_device_may_be_named(recipe):
    with closing(recipe.ActivationOffload("cpu", budget=1, window=1)) as offload:
        assert offload.device == torch.device("cpu")


@pytest.mark.parametrize(
    ("named", "refused"), [("cuda:1", True), ("cuda:0", False), ("cuda", False)]
)
def test_a_device_that_is_not_the_current_one_is_refused(recipe, monkeypatch, named, refused):
    """Copies to it would be queued on streams of the current one."""
    empty = torch.empty

    def on_two_devices(*size, device, **options):
        if torch.device(device).type != "cuda":
            return empty(*size, device=device, **options)
        index = torch.device(device).index or 0  # the current device is the first
        return SimpleNamespace(device=torch.device("cuda", index))

    monkeypatch.setattr(torch, "empty", on_two_devices)
    told = r"cuda:1 is not the current device: call torch\.accelerator\.set_device_index\(i\) first"
    with pytest.raises(ValueError, match=told) if refused else nullcontext():
        offload = recipe.ActivationOffload(torch.device(named), 0, 1, lanes=("h2d", "d2h"))
        assert offload.device == torch.device("cuda:0")


@pytest.mark.parametrize(("budget", "window"), [(-1, 1), (1, 0)])
def test_bytes_that_make_no_sense_are_refused(recipe, budget, window):
    with pytest.raises(ValueError, match="pass bytes"):
        recipe.ActivationOffload(torch.device("cpu"), budget, window)


def test_more_memory_than_the_host_has_is_refused(recipe):
    with pytest.raises(RuntimeError, match="cannot lock"):
        recipe.ActivationOffload(torch.device("cpu"), 1 << 60, 1)


# -- on a device ------------------------------------------------------------------------------


def delay(stream: torch.cuda.Stream, cycles: int = DELAY_CYCLES) -> None:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)


def pipeline_is_right(module, delayed: str | None) -> bool:
    side, device = 1024, torch.device("cuda")
    torch.manual_seed(0)
    weight = torch.randn(side, side, device=device)
    sources = [torch.randn(side, side).pin_memory() for _ in range(module.CHUNKS)]
    results = [torch.zeros(side, side, pin_memory=True) for _ in sources]
    expected = [(source.to(device) @ weight).cpu() for source in sources]
    pipeline = module.Pipeline(weight)
    torch.cuda.synchronize()
    if delayed:
        delay({"compute": torch.cuda.current_stream()}.get(delayed) or getattr(pipeline, delayed))
    pipeline.run(sources, results).synchronize()
    torch.cuda.synchronize()
    return all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


PIPELINE_EDGES = {
    "compute_not_ordered_after_load": "load",
    "load_not_ordered_after_compute": "compute",
    "store_not_ordered_after_compute": "compute",
    "compute_not_ordered_after_store": "store",
}


@needs_cuda
def test_every_edge_of_the_pipeline_is_needed(tmp_path):
    whole = load(tmp_path, "three_streams")
    assert all(pipeline_is_right(whole, delayed) for delayed in ("load", "compute", "store"))
    needed = {
        control: not pipeline_is_right(load(tmp_path, "three_streams", control), delayed)
        for control, delayed in PIPELINE_EDGES.items()
    }
    assert all(needed.values()), needed


def gradients_are_right(module, delayed: str) -> bool:
    """Two steps; ``delayed`` is a lane, at each copy back ("h2d") or at the begin of each step."""
    device, layers, width, rows = torch.device("cuda"), 8, 1024, 4096
    torch.manual_seed(0)
    layer = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)]
    model = nn.Sequential(*layer).to(device)
    batches = [torch.randn(rows, width, device=device, requires_grad=True) for _ in range(2)]
    parameters = list(model.parameters())

    def step(batch: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logged = batch.exp().mean()
        gradients = torch.autograd.grad(model(batch).square().mean(), parameters)
        return *gradients, logged.detach()

    expected = [step(batch) for batch in batches]
    nbytes = batches[0].nbytes
    offload = module.ActivationOffload(
        device, 3 * layers * nbytes, 2 * nbytes, stay=parameters, smallest=nbytes
    )
    torch.cuda.synchronize()
    load_back = offload.load

    def load_late(storage) -> None:
        delay(offload.h2d, DELAY_CYCLES // 20)
        load_back(storage)

    if delayed == "h2d":
        offload.load = load_late
    with closing(offload):
        ours = []
        for batch in batches:
            if delayed != "h2d":
                delay(torch.cuda.current_stream() if delayed == "compute" else offload.d2h)
            with offload.saving():
                ours.append(step(batch))
        torch.cuda.synchronize()
    return all(
        torch.equal(*pair)
        for mine, theirs in zip(ours, expected, strict=True)
        for pair in zip(mine, theirs, strict=True)
    )


OFFLOAD_EDGES = {
    "store_not_ordered_after_compute": "compute",
    "source_freed_before_its_copy": "d2h",
    "load_not_ordered_after_compute": "compute",
    "backward_not_ordered_after_load": "h2d",
}


def unread_copies_are_awaited(module) -> bool:
    """Whether memory that an unread copy back was given holds what is written to it next."""
    device, count = torch.device("cuda"), 1 << 22
    x = torch.randn(count, device=device, requires_grad=True)
    offload = module.ActivationOffload(device, 1 << 28, 4 * count, smallest=4 * count)
    addresses: list[int] = []
    load_back = offload.load

    def load_late(storage) -> None:
        delay(offload.h2d)
        load_back(storage)
        addresses.append(storage.back.data_ptr())

    offload.load = load_late
    with closing(offload):
        with offload.saving():
            unread = x.exp()  # no backward runs through it
            used = chain(x, 3).sum()
        used.backward()
        del unread, used
        with offload.saving():
            claimed = [torch.empty(count, device=device) for _ in range(16)]
            mine = next(tensor for tensor in claimed if tensor.data_ptr() == addresses[-1])
            mine.fill_(1)
        torch.cuda.synchronize()
    return bool((mine == 1).all())


@needs_cuda
def test_every_edge_of_activation_offload_is_needed(tmp_path):
    whole = load(tmp_path, "activation_offload")
    right = {delayed: gradients_are_right(whole, delayed) for delayed in OFFLOAD_EDGES.values()}
    assert all(right.values()), right
    needed = {
        control: not gradients_are_right(load(tmp_path, "activation_offload", control), delayed)
        for control, delayed in OFFLOAD_EDGES.items()
    }
    edited = load(tmp_path, "activation_offload", "pool_used_again_too_early")
    assert unread_copies_are_awaited(whole)
    needed["pool_used_again_too_early"] = not unread_copies_are_awaited(edited)
    assert all(needed.values()), needed


@needs_cuda
def test_a_step_holds_nobody_and_frees_memory(recipe, streams):
    device, layers, width, rows = torch.device("cuda"), 8, 16384, 4096  # products beat the link
    with device:
        layer = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)]
    model = nn.Sequential(*layer).to(torch.bfloat16)
    batch = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    offload = recipe.ActivationOffload(
        device, 2 * layers * batch.nbytes, 2 * batch.nbytes, stay=(batch, *model.parameters())
    )

    def step(saving) -> int:
        before = torch.cuda.memory_allocated()
        with saving:
            loss = model(batch).float().mean()
        held = torch.cuda.memory_allocated() - before
        loss.backward()
        return held

    with closing(offload):
        resident = step(nullcontext())
        moved = step(offload.saving())
        assert resident - moved >= (layers - 3) * batch.nbytes, (resident, moved)
        step(offload.saving())
        verdict = streams.is_my_copy_asynchronous(lambda: step(offload.saving()))
    assert not verdict.holds_host, verdict
    assert {*verdict.copies} >= {"HtoD", "DtoH"}
    for direction in ("HtoD", "DtoH"):
        copies = verdict.copies[direction]
        assert copies.pinned and copies.own_stream and copies.hidden_share > 0.5, verdict
