# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/state/trees.py
"""What a state is made of: nested dicts and lists with tensors as leaves."""

import io
from collections.abc import Callable, Iterable
from copy import copy

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


# -- what stands at a path --------------------------------------------------------------------


def element(tree: object, path: Iterable[str | int]) -> object:
    """What is at ``path``, whose names may be of numbers; None if there is nothing."""
    for key in path:
        if isinstance(tree, dict):
            names = {str(own): own for own in tree} if key not in tree else {key: key}
            if key not in names:
                return None
            tree = tree[names[key]]
        elif isinstance(tree, list) and isinstance(key, int) and key < len(tree):
            tree = tree[key]
        else:
            return None
    return tree


def put(tree: object, path: tuple[str | int, ...], value: object) -> None:
    """Set what is at ``path``; dicts are made for names and lists for numbers."""
    for key, following in zip(path, path[1:], strict=False):
        fresh: dict | list = [] if isinstance(following, int) else {}
        if isinstance(tree, list):
            while len(tree) <= key:
                tree.append(None)
            if tree[key] is None:
                tree[key] = fresh
        else:
            tree.setdefault(key, fresh)
        tree = tree[key]
    last = path[-1]
    if isinstance(tree, list):
        while len(tree) <= last:
            tree.append(None)
    tree[last] = value


def with_numbers(tree: object, path: tuple, numbers: set[tuple]) -> object:
    """``tree`` with the keys at the paths ``numbers`` as numbers."""
    if isinstance(tree, dict):
        found = {}
        for key, value in tree.items():
            here = (*path, key)
            inner = with_numbers(value, here, numbers)
            found[int(key) if here in numbers else key] = inner
        return found
    if isinstance(tree, list) and numbers:
        return [with_numbers(value, (*path, n), numbers) for n, value in enumerate(tree)]
    return tree


def in_dicts_like(own: object, tree: object) -> object:
    """``tree`` with its dicts of the classes that they have in ``own``."""
    if not isinstance(tree, dict) or not isinstance(own, dict):
        return tree
    found = {key: in_dicts_like(own.get(key), value) for key, value in tree.items()}
    if type(own) is dict:
        return found
    like_own = copy(own)
    like_own.clear()
    like_own.update(found)
    return like_own
