"""What ranks do with the context of ``stream_context``."""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

RECIPES = Path(__file__).resolve().parents[2] / "recipes_source"
HERE = Path(__file__).parent
sys.path[:0] = [str(RECIPES / "sharding"), str(HERE)]

from raising import assert_refused, raised  # noqa: E402
from stream_context import FsdpContext, start_rank  # noqa: E402

LAYERS = 4
WIDTH = 6
STEPS = 3
ADAMW = partial(torch.optim.AdamW, lr=1e-2)  # fused rounds the last elements of a CPU tensor apart


class Layer(nn.Module):
    """x + two linear layers of x; two rows between them, fewer than three ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2)
        self.down = nn.Linear(2, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def layers(seed: int = 0, kind: type[nn.Module] = Layer) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*[kind() for _ in range(LAYERS)])


def ones() -> torch.Tensor:
    return torch.ones(1, WIDTH)


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    samples = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
    return (model(samples) - samples.flip(1)).square().mean()


def follow(disturb: Callable[[nn.Module], None]) -> None:
    """Train sharded and not; ``disturb`` the sharded model before each update."""
    ranks = range(dist.get_world_size())
    model = layers()
    reference = layers()
    context = FsdpContext(model, list(model))
    optimizer = ADAMW(model.parameters())
    expected = ADAMW(reference.parameters())
    exact = {"rtol": 0, "atol": 0} if len(ranks) <= 2 else {"rtol": 1e-4, "atol": 1e-5}
    for step in range(STEPS):
        losses = [loss_of(reference, step, rank) for rank in ranks]
        loss = loss_of(model, step, dist.get_rank())
        torch.testing.assert_close(loss, losses[dist.get_rank()], **exact)
        context.backward(loss)
        (sum(losses) / len(ranks)).backward()
        disturb(model)
        optimizer.step()
        optimizer.zero_grad()
        expected.step()
        expected.zero_grad()
    context.release_all()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(p, DTensor), "a parameter is left whole"
        torch.testing.assert_close(p.detach().full_tensor(), q.detach(), **exact)
    moved = (q.detach() - list(layers().parameters())[-1].detach()).abs().max()
    assert moved > 0.01, "nothing was learned, so nothing was compared"


def raise_in_forward(model: nn.Module) -> None:
    def fail(*_) -> None:
        raise MemoryError("of this test")

    hook = model[1].up.register_forward_pre_hook(fail)
    assert isinstance(raised(lambda: model(ones())), MemoryError)
    hook.remove()


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(ones())


def skip_backward(model: nn.Module) -> None:
    assert model(ones()).requires_grad


def load_in_place(model: nn.Module) -> None:
    """There and back; DTensors are changed in place."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict({name: value * 0 for name, value in state.items()})
    evaluate(model)
    model.load_state_dict(state)


def between_steps() -> None:
    for disturb in (raise_in_forward, evaluate, skip_backward, load_in_place):
        follow(disturb)


def few_rows() -> None:
    follow(lambda model: None)


# -- what the file is not made for --------------------------------------------------------------


def sharded(kind: type[nn.Module] = Layer) -> tuple[nn.Sequential, FsdpContext]:
    model = layers(kind=kind)
    return model, FsdpContext(model, list(model))


def not_sharded(model: nn.Module, why: str, units: list[nn.Module] | None = None) -> None:
    assert_refused(lambda: FsdpContext(model, units or list(model)), ValueError, why)


def models() -> None:
    """Refused when they are sharded."""
    model = layers()
    model[2].up.weight = model[0].up.weight
    not_sharded(model, "shared by several")
    model = layers()
    model[1].down.bias.requires_grad_(False)
    not_sharded(model, "1.down.bias has no rows")
    model = layers()
    model[1].scale = nn.Parameter(torch.ones(()))
    not_sharded(model, "1.scale has no rows")
    model = layers()
    not_sharded(model, "0.up.weight is in 2 units", [model[0], model[0].up, *model[1:]])
    not_sharded(model, "0.up.weight is in 0 units", list(model[1:]))
    FsdpContext(model, list(model))
    not_sharded(model, "sharded already")
    for hook in HOOKS:
        model = layers()
        getattr(model[1].up.weight, hook)(lambda x: None)
        not_sharded(model, "1.up.weight has a hook")


HOOKS = ("register_hook", "register_post_accumulate_grad_hook")


class Pair(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x), x


class Renormed(Layer):
    """Changes its weight, as an embedding with ``max_norm`` does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.up.weight.renorm_(2, 0, 1.0)
        return super().forward(x)


class Rescaling(nn.Sequential):
    """Changes a weight of a later unit in forward, as spectral normalization may."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self[0](x)
        with torch.no_grad():
            self[2].up.weight.to_local().mul_(2)
        for layer in self[1:]:
            x = layer(x)
        return x


CHANGES = (
    lambda model: model[1].requires_grad_(False),
    lambda model: model.to(torch.bfloat16),
    lambda model: model.to("meta"),
    lambda model: model.load_state_dict(model.state_dict(), assign=True),
)


def forwards() -> None:
    """Refused when a unit runs."""
    model, _ = sharded(Pair)
    assert_refused(lambda: model(ones()), TypeError, "wrap it to return one tensor")
    model, _ = sharded()
    assert_refused(lambda: model[2](ones()), RuntimeError, "unit 2 ran out of turn")
    assert_refused(lambda: model[1:](ones()), RuntimeError, "unit 1 ran out of turn")
    twice = partial(lambda model: model[1](model[1](model[0](ones()))), model)
    assert_refused(twice, RuntimeError, "unit 1 ran out of turn")
    assert model(ones()).isfinite().all(), "the context is no longer good"
    model, _ = sharded(Renormed)
    assert_refused(lambda: model(ones()), RuntimeError, "weight was changed in forward")
    model = Rescaling(*layers())
    FsdpContext(model, list(model))
    assert_refused(lambda: model(ones()), RuntimeError, "weights of unit 2 have changed")
    for change in CHANGES:
        model, _ = sharded()
        model(ones())
        change(model)
        assert_refused(partial(model, ones()), RuntimeError, "replaced, moved or frozen")


class OneOfTwo(Layer):
    """A rank uses one of two experts of equal sizes: stock FSDP2 mixes their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.experts[dist.get_rank() % 2](x)


class View(Layer):
    """Returns a view, which the next one changes in place: autograd drops the hook on it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1.0
        return super().forward(x).unsqueeze(0).squeeze(0)


class Kept(Layer):
    """Keeps a second result beside the first, computed with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.kept = self.second(x).square().sum()
        return y


class Detached(Kept):
    """Keeps numbers to look at."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.kept = self.kept.detach()
        return y + self.second(x)


def with_kept(model: nn.Module) -> torch.Tensor:
    return model(ones()).sum() + sum(layer.kept for layer in model)


def tensors_kept_beside_results() -> None:
    """Refused where the loss is computed with them: backward might read weights early."""
    model, context = sharded(Kept)
    loss = with_kept(model)
    assert_refused(partial(context.backward, loss), RuntimeError, "kept with")
    model, context = sharded(Detached)
    expected = layers(kind=Detached)
    context.backward(with_kept(model))
    with_kept(expected).backward()
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=0, atol=0)


def backwards() -> None:
    """Refused in backward."""
    for unit, why in ((OneOfTwo, "has no gradient on this rank"), (View, "")):
        model, context = sharded(unit)
        loss = model(ones()).sum()
        assert_refused(partial(context.backward, loss), RuntimeError, why)

    model, context = sharded()
    assert_refused(model(ones()).sum().backward, RuntimeError, "call context.backward")
    detached = model[3](model[:3](ones()).detach()).sum()
    assert_refused(lambda: context.backward(detached), RuntimeError, "come to unit 2")
    first = model(ones()).sum()
    model(ones())
    assert_refused(lambda: context.backward(first), RuntimeError, "not the last forward")
    context.backward(model(ones()).sum())
    for p in model.parameters():
        assert p.grad.to_local().isfinite().all(), "the context is no longer good"
    assert_refused(lambda: context.backward(model(ones())), RuntimeError, "scalar")

    model = layers()
    optimizer = ADAMW(model.parameters())
    context = FsdpContext(model, list(model))
    loss = model(ones()).sum()
    early = "from before the sharding, an optimizer perhaps"
    assert_refused(lambda: context.backward(loss), RuntimeError, early)
    assert optimizer is not None

    model, context = sharded()
    x = ones()
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=False)
    loss = x.sum()
    assert_refused(lambda: context.backward(loss), RuntimeError, "do not recompute activations")

    for hook in HOOKS:  # it would never run
        model, context = sharded()
        getattr(model[1].up.weight, hook)(lambda x: None)
        loss = raised(lambda: context.backward(model(ones()).sum()))  # noqa: B023
        assert isinstance(loss, RuntimeError) and "weight has a hook" in str(loss), loss


def updates_between() -> None:
    """An update of any kind between forward and backward is seen if PyTorch counts it."""
    updates = [partial(torch.optim.AdamW, foreach=foreach) for foreach in (False, True)]
    for make in (torch.optim.SGD, *updates):
        model, context = sharded()
        optimizer = make(model.parameters(), lr=1e-2)
        context.backward(model(ones()).sum())
        loss = model(ones()).sum()
        optimizer.step()
        assert_refused(partial(context.backward, loss), RuntimeError, "have changed since")
    model, context = sharded()
    loss = model(ones()).sum()
    with torch.no_grad():
        model[1].up.weight.to_local().mul_(2)
    assert_refused(lambda: context.backward(loss), RuntimeError, "have changed since")
    other = nn.Parameter(ones())
    other.grad = ones()
    loss = model(ones()).sum()
    torch.optim.AdamW([other], foreach=True).step()
    context.backward(loss)  # an update of other weights is none


MODES = (
    few_rows,
    between_steps,
    models,
    forwards,
    backwards,
    tensors_kept_beside_results,
    updates_between,
)

if __name__ == "__main__":
    modes = {mode.__name__: mode for mode in MODES}
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="+", choices=modes)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    start_rank()
    try:
        for what in asked.what:
            modes[what]()
    finally:
        dist.destroy_process_group()
