# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.1, overlap_recipes/checkpoint/state/trees.py
"""What a state is made of: nested dicts and lists with tensors as leaves."""

import io
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of ``tensor``."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_staged(leaf: object) -> bool:
    """Whether ``leaf`` is a dense tensor or a DTensor of one."""
    x = shard_of(leaf)
    is_dense = type(x) in (torch.Tensor, nn.Parameter) and x.layout == torch.strided
    return is_dense and not (x.is_quantized or x.is_meta)


def memory_of(leaf: object) -> object:
    """Where a tensor lies and how it is read; of all else, its type."""
    if not torch.is_tensor(leaf):
        return type(leaf)
    x = shard_of(leaf)
    if not is_staged(leaf):
        return type(x), x.shape
    return x.data_ptr(), leaf.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg()


def walk(tree: object, function: Callable[[object], object]) -> object:
    """A copy of nested dicts, lists and tuples, with ``function`` applied to all else but names."""
    if isinstance(tree, dict):
        return {key: walk(value, function) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        values = [walk(value, function) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return tree if isinstance(tree, str) else function(tree)


def packed(state: object) -> bytes:
    """One leaf of a checkpoint, whatever the state has inside; ``torch.load`` reads it."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def unpacked(data: bytes) -> object:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
