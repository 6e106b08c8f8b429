"""Activations to offload, of one size, so that their bytes can be counted."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from unittest import mock

import torch

ROWS, WIDTH = 32, 64
NBYTES = ROWS * WIDTH * 4  # of an activation


def activation() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(ROWS, WIDTH, requires_grad=True)


@contextmanager
def offloading(
    recipe, budget: int = 1 << 20, window: int = 1 << 20, smallest: int = NBYTES // 2, **options
) -> Iterator:
    """An offload of storages of ``smallest`` bytes and more."""
    offload = recipe.ActivationOffload(torch.device("cpu"), budget, window, **options)
    with mock.patch.object(recipe, "SMALLEST", smallest), closing(offload):
        yield offload


def chain(x: torch.Tensor, length: int) -> torch.Tensor:
    """Each link saves its result."""
    for _ in range(length):
        x = (x * 0.1).exp()
    return x
