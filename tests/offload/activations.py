"""Activations to offload, of one size, so that their bytes can be counted."""

from contextlib import closing

import torch

ROWS, WIDTH = 32, 64
NBYTES = ROWS * WIDTH * 4  # of an activation


def activation() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(ROWS, WIDTH, requires_grad=True)


def offloading(recipe, budget: int = 1 << 20, window: int = 1 << 20, **options):
    options = {"smallest": NBYTES // 2} | options
    return closing(recipe.ActivationOffload(torch.device("cpu"), budget, window, **options))


def chain(x: torch.Tensor, length: int) -> torch.Tensor:
    """Each link saves its result."""
    for _ in range(length):
        x = (x * 0.1).exp()
    return x
