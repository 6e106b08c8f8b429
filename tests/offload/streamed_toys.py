"""Small layers and loops over them, streamed with each budget and compared with a resident run."""

from collections.abc import Callable, Iterator
from contextlib import closing
from copy import deepcopy

import torch
from torch import nn

from overlap_recipes.offload.streamed_model import StreamedModel, resident_bytes

CPU = torch.device("cpu")
WIDTH = 8
LAYERS = 3
ORDER_OF_SUMS = 1e-5  # what it changes in fp32, of the largest number


class Loop(nn.Module):
    """An embedding, then ``run(layers, x)``."""

    def __init__(self, make: Callable[[], nn.Module], run: Callable) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(make() for _ in range(LAYERS))
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self.layers, self.embedding(x))


def one_after_the_other(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def with_each_budget(model: Loop) -> Iterator[Loop]:
    """Copies of a model, closed again: all layers are streamed, some, none."""
    for resident in range(LAYERS + 1):
        copy = deepcopy(model)
        budget = resident * resident_bytes(copy.layers[0])
        with closing(StreamedModel(copy, copy.layers, CPU, budget=budget)) as streamed:
            assert len(streamed.layers) == LAYERS - resident
            yield copy


def train(model: Loop, seed: int = 1) -> list[torch.Tensor]:
    """One backward; the gradients."""
    torch.manual_seed(seed)
    x = torch.randn(4, 5, WIDTH)
    target = torch.randn(4, 5, WIDTH)
    model.zero_grad()
    loss = (model(x) * target).sum()
    loss.backward()
    return gradients_of(model)


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    """Whether all are there, with the same bits."""
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    """Whether all are there, and differ by sums in another order at most."""
    errors = []
    for found, expected in zip(ours, theirs, strict=True):
        errors.append((found - expected).abs().max() / (1 + expected.abs().max()))
    return max(errors).item() < ORDER_OF_SUMS
