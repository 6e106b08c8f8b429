"""Activation offload: what is copied, what stays, when memory is freed, and that it comes back."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from activations import NBYTES, ROWS, WIDTH, activation, chain, offloading
from selection import REPO
from torch import nn

from rankproof.run import run


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
        assert layer.weight.nbytes >= NBYTES // 2 and gain.nbytes == NBYTES
        # the output of exp, and x, which the gradient of the weight needs
        assert offload.wanted == NBYTES * (1 + trained)
        outputs.sum().backward()


def test_what_is_asked_for_stays(recipe):
    x = activation()
    for stay, wanted in (((), 2 * NBYTES), ([x], NBYTES)):
        with offloading(recipe, stay=stay) as offload:
            with offload.saving():  # saves x, and the output of exp
                (x * x).exp().sum().backward()
            assert offload.wanted == wanted


SHARDED = f"""
import sys

sys.path[:0] = [{str(REPO)!r}]

from contextlib import closing, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from overlap_recipes.offload import ActivationOffload, activations as library
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
options = {{"window": 64 << 10}}
library.SMALLEST = 512
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
            found = gradients_of(model, batch, offload.saving())
            assert all(map(torch.equal, found, expected))
            assert offload.wanted == activations, f"{{offload.wanted}} of {{activations}} bytes"
dist.destroy_process_group()
"""


def test_no_gathered_weight_of_fully_shard_is_copied(tmp_path):
    """It may be freed while a copy still reads it."""
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED)
    report = run(script, 2, launcher="warm")
    assert report.ok, report.describe()


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
