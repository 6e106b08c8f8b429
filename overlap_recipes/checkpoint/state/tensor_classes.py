# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.1, overlap_recipes/checkpoint/state/tensor_classes.py
"""Tensors that are made of others, such as float8 weights: taken apart, and joined again."""

import importlib
import operator
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from .trees import shard_of, walk

PLAIN_TYPES = {torch.Tensor, nn.Parameter, int, float, bool, str, bytes, type(None)}
PARTS = (
    "%s is a %s whose parts are of other sizes than its shards: shard it evenly along its first "
    "dimension"
)


class Recipe(NamedTuple):
    """How a tensor that is made of others is joined again."""

    module: str
    name: str
    context: object
    shape: tuple[int, ...]  # of this rank's part
    stride: tuple[int, ...]
    is_dtensor: bool


def is_made_of_tensors(leaf: object) -> bool:
    """Whether it is of a class that wraps others, such as float8 weights and 8-bit moments."""
    if not torch.is_tensor(leaf):
        return False
    local = shard_of(leaf)
    if type(local) in (torch.Tensor, nn.Parameter):
        return False
    return hasattr(type(local), "__tensor_flatten__") and not local.is_nested


def has_parts(tree: object) -> bool:
    """Whether it has a tensor that is made of others, which is rare."""
    values = tree
    if isinstance(tree, dict):
        values = tree.values()
    for value in values:
        if isinstance(value, (dict, list)):
            if has_parts(value):
                return True
        elif type(value) not in PLAIN_TYPES and is_made_of_tensors(value):
            return True
    return False


def in_parts(tree: object, path: tuple, recipes: dict[tuple, tuple]) -> object:
    """``tree`` with the parts of tensors that are made of others; adds their ``recipes``."""
    if isinstance(tree, dict):
        found = {key: in_parts(value, (*path, str(key)), recipes) for key, value in tree.items()}
        return found if any(found[key] is not tree[key] for key in tree) else tree
    if isinstance(tree, list):
        values = [in_parts(value, (*path, n), recipes) for n, value in enumerate(tree)]
        return values if any(map(operator.is_not, values, tree)) else tree
    if not is_made_of_tensors(tree):
        return tree
    local = shard_of(tree)
    with torch.no_grad():
        names, context = local.__tensor_flatten__()
    cls = type(local)
    layout = tuple(local.shape), tuple(local.stride()), isinstance(tree, DTensor)
    recipes[path] = tuple(Recipe(cls.__module__, cls.__qualname__, context, *layout))
    parts = {}
    for name in names:
        part = part_of(tree, getattr(local, name), path)
        parts[name] = in_parts(part, (*path, name), recipes)
    return parts


@torch.no_grad()
def part_of(whole: torch.Tensor, part: torch.Tensor, path: tuple) -> torch.Tensor:
    """``part`` of this rank's ``whole``, sharded as that is; equal on all ranks if it is a number.

    Raises:
        TypeError: no checkpoint can say whose it is.
    """
    if not is_made_of_tensors(part):
        part = part.detach()
    if not isinstance(whole, DTensor) or part.dim() == 0:
        return part
    mesh = whole.device_mesh
    if part.shape == whole._local_tensor.shape:
        layout = {"shape": whole.shape, "stride": whole.stride()}
        return DTensor.from_local(part, mesh, whole.placements, run_check=False, **layout)
    ranks = 1
    for dim, placement in enumerate(whole.placements):
        if placement == Shard(0):
            ranks *= mesh.size(dim)
        elif not isinstance(placement, Replicate):
            raise TypeError(PARTS % (".".join(map(str, path)), type(whole._local_tensor).__name__))
    if whole.shape[0] != ranks * whole._local_tensor.shape[0]:
        raise TypeError(PARTS % (".".join(map(str, path)), type(whole._local_tensor).__name__))
    return DTensor.from_local(part, mesh, whole.placements, run_check=False)


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that it is made of; itself, if of none."""
    parts: list[torch.Tensor] = []
    walk(in_parts(tensor, (), {}), parts.append)
    return parts


def joined(tree: object, path: tuple, recipes: dict[tuple, tuple]) -> object:
    """``tree`` with the tensors that were taken apart; the inverse of ``in_parts``."""
    if isinstance(tree, list):
        return [joined(value, (*path, n), recipes) for n, value in enumerate(tree)]
    if not isinstance(tree, dict):
        return tree
    for key, value in tree.items():
        inner = joined(value, (*path, str(key)), recipes)
        if inner is not value:
            tree = {**tree, key: inner}
    if path not in recipes:
        return tree
    recipe = Recipe(*recipes[path])
    cls = importlib.import_module(recipe.module)
    for name in recipe.name.split("."):
        cls = getattr(cls, name)
    locals_ = {name: shard_of(part) for name, part in tree.items()}
    local = cls.__tensor_unflatten__(locals_, recipe.context, recipe.shape, recipe.stride)
    if not recipe.is_dtensor:
        return local
    like = next(x for x in tree.values() if isinstance(x, DTensor) and is_of_shape(x, recipe))
    layout = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, **layout)


def is_of_shape(part: DTensor, recipe: Recipe) -> bool:
    return tuple(part._local_tensor.shape) == recipe.shape
