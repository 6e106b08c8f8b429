# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.1, overlap_recipes/checkpoint/state/tensor_classes.py
"""Tensors of classes that wrap others, as float8 weights and 8-bit moments are: apart, and joined.

A checkpoint has the plain tensors inside, by names below that of the whole, and how to join them.
"""

import importlib
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from .trees import packed, shard_of, unpacked, walk

_PLAIN_TYPES = {torch.Tensor, nn.Parameter, int, float, bool, str, bytes, type(None)}
Path = tuple[str | int, ...]  # from the state on


@dataclass(frozen=True)
class Flattened:
    """How a tensor that is made of others is joined again."""

    module: str
    name: str  # of its class
    context: object
    shape: tuple[int, ...]  # of this rank's part
    stride: tuple[int, ...]
    is_dtensor: bool


def pack_flattened(flattened: dict[Path, Flattened]) -> bytes:
    """As one leaf of a checkpoint."""
    return packed({path: tuple(vars(each).values()) for path, each in flattened.items()})


def unpack_flattened(data: bytes | None) -> dict[Path, Flattened]:
    """What ``pack_flattened`` was given; {} of None."""
    if data is None:
        return {}
    return {path: Flattened(*values) for path, values in unpacked(data).items()}


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
        elif type(value) not in _PLAIN_TYPES and is_made_of_tensors(value):
            return True
    return False


def in_parts(tree: object, path: Path, flattened: dict[Path, Flattened]) -> object:
    """``tree`` with the parts of tensors that are made of others; adds to ``flattened``.

    What has no such tensor is returned as it is, not copied.
    """
    if isinstance(tree, dict):
        parted = {}
        for key, value in tree.items():
            parted[key] = in_parts(value, (*path, str(key)), flattened)
        has_changed = any(parted[key] is not tree[key] for key in tree)
        return parted if has_changed else tree
    if isinstance(tree, list):
        values = [in_parts(value, (*path, n), flattened) for n, value in enumerate(tree)]
        has_changed = any(new is not old for new, old in zip(values, tree, strict=True))
        return values if has_changed else tree
    if not is_made_of_tensors(tree):
        return tree
    local = shard_of(tree)
    with torch.no_grad():
        names, context = local.__tensor_flatten__()
    flattened[path] = Flattened(
        module=type(local).__module__,
        name=type(local).__qualname__,
        context=context,
        shape=tuple(local.shape),
        stride=tuple(local.stride()),
        is_dtensor=isinstance(tree, DTensor),
    )
    parts = {}
    for name in names:
        part = _part_of(tree, getattr(local, name), path)
        parts[name] = in_parts(part, (*path, name), flattened)
    return parts


@torch.no_grad()
def _part_of(whole: torch.Tensor, part: torch.Tensor, path: Path) -> torch.Tensor:
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
    ranks = _ranks_along_rows(whole)
    if ranks is None or whole.shape[0] != ranks * whole._local_tensor.shape[0]:
        name = ".".join(map(str, path))
        raise TypeError(
            f"{name} is a {type(whole._local_tensor).__name__} whose parts are of other sizes than "
            "its shards: shard it evenly along its first dimension"
        )
    return DTensor.from_local(part, mesh, whole.placements, run_check=False)


def _ranks_along_rows(tensor: DTensor) -> int | None:
    """How many ranks share its rows; None if ranks share it in another way."""
    ranks = 1
    for dim, placement in enumerate(tensor.placements):
        if placement == Shard(0):
            ranks *= tensor.device_mesh.size(dim)
        elif not isinstance(placement, Replicate):
            return None
    return ranks


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that it is made of; itself, if of none."""
    parts: list[torch.Tensor] = []
    walk(in_parts(tensor, (), {}), parts.append)
    return parts


def joined(tree: object, path: Path, flattened: dict[Path, Flattened]) -> object:
    """``tree`` with the tensors that were taken apart; the inverse of ``in_parts``."""
    if isinstance(tree, list):
        return [joined(value, (*path, n), flattened) for n, value in enumerate(tree)]
    if not isinstance(tree, dict):
        return tree
    found = {key: joined(value, (*path, str(key)), flattened) for key, value in tree.items()}
    if path in flattened:
        return _made_of(found, flattened[path])
    has_changed = any(found[key] is not tree[key] for key in tree)
    return found if has_changed else tree


def _made_of(parts: dict[str, torch.Tensor], how: Flattened) -> torch.Tensor:
    cls = importlib.import_module(how.module)
    for name in how.name.split("."):
        cls = getattr(cls, name)
    locals_ = {name: shard_of(part) for name, part in parts.items()}
    local = cls.__tensor_unflatten__(locals_, how.context, how.shape, how.stride)
    if not how.is_dtensor:
        return local
    like = _first_of_shape(parts, how.shape)
    layout = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, **layout)


def _first_of_shape(parts: dict[str, torch.Tensor], shape: tuple[int, ...]) -> DTensor:
    for part in parts.values():
        if isinstance(part, DTensor) and tuple(part._local_tensor.shape) == shape:
            return part
    raise ValueError(f"of {sorted(parts)} none is sharded as the whole is, {shape}")
