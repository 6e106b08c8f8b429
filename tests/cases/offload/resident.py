"""What the cases of streamed layers share: a model and its resident twin, and comparing them."""

import copy

import torch
from torch import nn

HOST = torch.device("cpu")
LARGEST_ERROR = 1e-4  # of the largest number of a gradient: sums in another order
TINY = 1e-9

torch.set_num_threads(1)


def twin_of(model: nn.Module) -> nn.Module:
    """A copy, to be taken before the layers are streamed."""
    return copy.deepcopy(model)


def assert_close(what: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Assert that all numbers are close; name the one that is furthest away."""
    error = (found - wanted).detach().abs().float()
    worst = error.flatten().argmax()
    here = found.flatten()[worst].item()
    there = wanted.flatten()[worst].item()
    allowed = LARGEST_ERROR * wanted.detach().abs().max().item() + TINY
    assert error.max().item() <= allowed, f"{what} is {here:.3g}, resident {there:.3g}"


def assert_same_gradients(model: nn.Module, resident: nn.Module) -> None:
    """Assert that the gradients of both are close."""
    pairs = zip(model.named_parameters(), resident.parameters(), strict=True)
    for (name, parameter), wanted in pairs:
        if wanted.grad is not None:
            assert_close(f"gradient of {name}", parameter.grad, wanted.grad)


def assert_same_bits_of_gradients(model: nn.Module, resident: nn.Module) -> None:
    """Assert that the gradients of both have the same bits."""
    pairs = zip(model.named_parameters(), resident.parameters(), strict=True)
    for (name, parameter), wanted in pairs:
        if not torch.equal(parameter.grad, wanted.grad):
            error = (parameter.grad - wanted.grad).abs().max().item()
            raise AssertionError(f"gradient of {name} is off by {error:.2g}, due is every bit")
