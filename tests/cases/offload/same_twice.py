"""A layer that is given one tensor twice: its gradient counts once for each use, not twice.

The argument names the program: ``x0`` (modded-nanogpt's ``block(x, x0)``), ``budget`` (the same,
compared with a run whose first layer stays on the device), ``qkv`` (attention with ``q = k = v``),
``decoder`` (``nn.TransformerDecoderLayer(x, x)``), ``cloned`` (``x0`` is a copy).
"""

import sys
from collections.abc import Iterable

import resident
import torch
from torch import nn

from overlap_recipes.offload.streamed_model import StreamedModel, resident_bytes

WIDTH = 16
LAYERS = 3
HEADS = 2


class Mixing(nn.Module):
    """modded-nanogpt's block: it mixes its input with what all blocks began with."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.tensor([1.0, 0.5]))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, x0: torch.Tensor) -> torch.Tensor:
        x = self.mix[0] * x + self.mix[1] * x0
        return x + self.linear(x).relu().square()


class Attention(nn.Module):
    """Attention that is told query, key and value apart."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.attention(q, k, v, need_weights=False)[0]


def decoder_layer() -> nn.Module:
    return nn.TransformerDecoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)


def run_mixing(layers: Iterable[nn.Module], x: torch.Tensor) -> torch.Tensor:
    x0 = x
    for layer in layers:
        x = layer(x, x0)
    return x


def run_cloned(layers: Iterable[nn.Module], x: torch.Tensor) -> torch.Tensor:
    x0 = x.clone()
    for layer in layers:
        x = layer(x, x0)
    return x


def run_attention(layers: Iterable[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = x + layer(x, x, x)
    return x


def run_decoder(layers: Iterable[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x, x)
    return x


PROGRAMS = {
    "x0": (Mixing, run_mixing),
    "budget": (Mixing, run_mixing),
    "cloned": (Mixing, run_cloned),
    "qkv": (Attention, run_attention),
    "decoder": (decoder_layer, run_decoder),
}


def main(name: str) -> None:
    make, run = PROGRAMS[name]
    torch.manual_seed(0)
    layers = nn.ModuleList(make() for _ in range(LAYERS))
    model = nn.ModuleDict({"embedding": nn.Linear(WIDTH, WIDTH), "layers": layers})
    twin = resident.twin_of(model)
    streamed = [StreamedModel(model, layers, resident.HOST)]
    if name == "budget":
        budget = resident_bytes(layers[0])
        streamed.append(StreamedModel(twin, twin["layers"], resident.HOST, budget=budget))
    x = torch.randn(2, 5, WIDTH)
    target = torch.randn(2, 5, WIDTH)
    for each in (model, twin):
        output = run(each["layers"], each["embedding"](x))
        loss = (output * target).sum()
        loss.backward()
    resident.assert_same_gradients(model, twin)
    for each in streamed:
        each.close()


if __name__ == "__main__":
    main(sys.argv[1])
