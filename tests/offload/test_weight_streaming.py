"""Weights on the host, from scratch: what is outside the file's scope raises, and says why."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

CPU = torch.device("cpu")
WIDTH = 8
X = torch.ones(2, WIDTH)

pytestmark = pytest.mark.usefixtures("one_thread")


class Aside(nn.Linear):
    """Keeps what a loss may be computed with, beside its result."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = super().forward(x)
        return self.kept


class Twice(nn.Linear):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x), x


class Clamped(nn.Linear):
    """Changes its weight in forward, in the slot alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class InPlace(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(2))


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def with_hook() -> nn.Linear:
    layer = linear()
    layer.weight.register_hook(lambda grad: grad * 2)
    return layer


class Parts(torch.Tensor):
    """Weights that are made of others, as torchao's are."""


def of_parts() -> nn.Linear:
    layer = linear()
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Parts))
    return layer


@pytest.mark.parametrize(
    ("layers", "why"),
    [
        ([nn.BatchNorm1d(WIDTH)], "layer 0 has buffers"),
        ([linear(), linear().requires_grad_(False)], "weight of layer 1 is frozen"),
        ([with_hook()], "weight of layer 0 has a hook"),
        ([of_parts()], "weight of layer 0 is a Parts"),
        ([linear()] * 2, "weight of layer 1 is of an earlier layer"),
        ([linear(), linear().double()], "one dtype is wanted"),
        ([nn.ReLU()], "one dtype is wanted"),
    ],
)
def test_layers_outside_the_scope_are_refused_before_their_memory_is_exchanged(
    streaming, layers, why
):
    before = [p.data_ptr() for layer in layers for p in layer.parameters()]
    with pytest.raises(ValueError, match=why):
        streaming.StreamedStack(layers, CPU)
    assert [p.data_ptr() for layer in layers for p in layer.parameters()] == before


def read_what_it_kept(stack: nn.Module) -> None:
    y = stack(X)
    (y.sum() + stack.layers[0].kept.sum()).backward()


def train_twice(stack: nn.Module) -> None:
    for _ in range(2):
        stack(X).sum().backward()


def change_between(stack: nn.Module) -> None:
    loss = stack(X).sum()
    with torch.no_grad():
        stack.layers[0].weight.mul_(2)
    loss.backward()


def change_the_input(stack: nn.Module) -> None:
    x = X.clone()
    loss = stack(x).sum()
    x.mul_(2)
    loss.backward()


def exchange(stack: nn.Module) -> None:
    stack.double()
    stack(X)


def assign(stack: nn.Module) -> None:
    state = {name: tensor.clone() for name, tensor in stack.state_dict().items()}
    stack.load_state_dict(state, assign=True)
    stack(X)


def freeze(stack: nn.Module) -> None:
    stack.layers[0].bias.requires_grad_(False)
    stack(X)


def add(stack: nn.Module) -> None:
    stack.layers[0].scale = nn.Parameter(torch.ones(1))
    stack(X)


def under_autocast(stack: nn.Module) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        stack(X)


@pytest.mark.parametrize(
    ("use", "layer", "why"),
    [
        (train_twice, nn.Linear, "weight.grad would be overwritten"),
        (change_between, nn.Linear, "changed between forward and backward"),
        (change_the_input, nn.Linear, "modified by an inplace operation"),
        (exchange, nn.Linear, "weight has other memory"),
        (assign, nn.Linear, "weight has other memory"),
        (freeze, nn.Linear, "bias is frozen"),
        (add, nn.Linear, "other parameters than before"),
        (under_autocast, nn.Linear, "without autocast"),
        (lambda stack: stack(torch.ones(2, dtype=torch.int64)), nn.Linear, "torch.int64 on cpu"),
        (read_what_it_kept, Aside, "what a layer had kept"),
        (lambda stack: stack(X), Twice, "returns a tuple"),
        (lambda stack: stack(X), Clamped, "changes its own weights"),
        (lambda stack: stack(X), InPlace, "in-place operation"),
    ],
)
def test_uses_outside_the_scope_raise(streaming, use: Callable, layer: type, why: str):
    stack = streaming.StreamedStack([layer(WIDTH, WIDTH)], CPU)
    with pytest.raises((RuntimeError, ValueError, TypeError), match=why):
        use(stack)


def test_one_layer_and_an_embedding_before_it_train_as_usual(streaming):
    torch.manual_seed(0)
    embedding = linear()
    layer = linear()
    nn.Sequential(embedding, layer)(X).square().sum().backward()
    expected = [p.grad.clone() for p in (*embedding.parameters(), *layer.parameters())]
    layer.zero_grad()
    embedding.zero_grad()
    stack = streaming.StreamedStack([layer], CPU)
    stack(embedding(X)).square().sum().backward()
    found = [p.grad for p in (*embedding.parameters(), *stack.parameters())]
    assert all(map(torch.equal, found, expected))
