"""What the cases of sharding share: a group, units on stock FSDP2 or in place, true gradients."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from overlap_recipes.fsdp2.in_place_gather import gather_in_place
from overlap_recipes.fsdp2.in_place_reduce import reduce_in_place

WIDTH = 16
BATCH = 4
LARGEST_ERROR = 1e-4  # of the largest number of a gradient: sums in another order


@contextmanager
def job() -> Iterator[None]:
    """Join the group that torchrun describes, or a group of one."""
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def in_units(model: nn.Module, units: Iterable[nn.Module]) -> list[FSDPModule]:
    """Shard the model over all ranks, each unit by itself; the model is the last one returned."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    modules = [*units, model]
    for module in modules:
        fully_shard(module, mesh=mesh)
    return modules


def in_place(model: nn.Module) -> None:
    gather_in_place(model)
    reduce_in_place(model)


def batch_of(rank: int) -> torch.Tensor:
    torch.manual_seed(rank)
    return torch.randn(BATCH, WIDTH)


def whole_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """All of a sharded gradient; a shard without one counts as zeros. All ranks call it."""
    shard = parameter.detach() * 0
    if parameter.grad is not None:
        shard = parameter.grad
    return shard.full_tensor()


def assert_true_gradients(model: nn.Module, unsharded: nn.Module) -> None:
    """Assert that a sharded model has the gradients of one that is not; all ranks call it."""
    wrong = []
    pairs = zip(model.named_parameters(), unsharded.parameters(), strict=True)
    for (name, parameter), other in pairs:
        found = whole_gradient(parameter)
        wanted = torch.zeros_like(found) if other.grad is None else other.grad
        error = (found - wanted).abs()
        if error.max() > LARGEST_ERROR * wanted.abs().max():
            worst = error.flatten().argmax()
            here = found.flatten()[worst].item()
            there = wanted.flatten()[worst].item()
            wrong.append(f"gradient of {name} is {here:.3g}, unsharded {there:.3g}")
    assert not wrong, f"{wrong[0]} ({len(wrong)} gradients are wrong)"
