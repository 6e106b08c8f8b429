"""Layers get what the model gives them: one tensor twice, caches, dicts that they fill."""

import pytest
import torch
from streamed_toys import WIDTH, Loop, close, same, train, with_each_budget
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")


class Mixing(nn.Linear):
    """Mixes its input with what all layers began with."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, x0: torch.Tensor) -> torch.Tensor:
        x = x + 0.5 * x0
        return x + super().forward(x).relu().square()


class Attention(nn.MultiheadAttention):
    def __init__(self) -> None:
        super().__init__(WIDTH, 2, batch_first=True)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return super().forward(q, k, v, need_weights=False)[0]


def decoder_layer() -> nn.Module:
    return nn.TransformerDecoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)


def mix(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    x0 = x
    for layer in layers:
        x = layer(x, x0)
    return x


def attend(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = x + layer(x, k=x, v=x)
    return x


def decode(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x, x)
    return x


@pytest.mark.parametrize(
    ("make", "run"), [(Mixing, mix), (Attention, attend), (decoder_layer, decode)]
)
def test_a_tensor_given_twice_counts_once_for_each_use_whatever_the_budget(make, run):
    """It counted twice in a streamed layer, so that a budget changed training."""
    model = Loop(make, run)
    expected = train(model)
    found = []
    for streamed in with_each_budget(model):
        found.append(train(streamed))
    for gradients in found:
        assert close(gradients, expected)
        assert same(gradients, found[0])
