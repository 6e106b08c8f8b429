# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/offload/arguments.py
"""Tensors in what layers take and return: found, exchanged, and handed back to the caller."""

from collections import UserDict
from copy import copy
from itertools import zip_longest

import torch

from . import caches
from .layer_state import version_of


def tensors_in(tree) -> list[torch.Tensor]:
    """All tensors in nested tuples, lists and dicts."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, (dict, UserDict)):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        return []
    found = []
    for value in tree:
        found += tensors_in(value)
    return found


def inputs_of(tree) -> list[torch.Tensor]:
    """The tensors in a nest that require gradients; once, those that come twice."""
    found = {id(x): x for x in tensors_in(tree) if x.requires_grad}
    return list(found.values())


def generators_in(tree) -> list[torch.Generator]:
    """All generators of random numbers in nested tuples, lists and dicts."""
    if isinstance(tree, torch.Generator):
        return [tree]
    if isinstance(tree, (dict, UserDict)):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        return []
    found = []
    for value in tree:
        found += generators_in(value)
    return found


def exchanged(tree, others: dict[int, torch.Tensor]):
    """A copy of a nest: ``others`` maps ``id(tensor)`` to what takes its place.

    Raises:
        TypeError: a tensor to be exchanged is in a tuple, list or dict of another class.
    """
    return _Copying(others).copy(tree)


class _Copying:
    """Copies nests; what comes twice is copied once."""

    def __init__(self, others: dict[int, torch.Tensor]) -> None:
        self.others = others
        self.copies = {}  # of lists and dicts, by ``id``

    def copy(self, tree):
        if isinstance(tree, torch.Tensor):
            return self.others.get(id(tree), tree)
        if type(tree) is tuple:
            return tuple(self.copy(value) for value in tree)
        if id(tree) not in self.copies:
            self.copies[id(tree)] = self.copy_of_object(tree)
        return self.copies[id(tree)]

    def copy_of_object(self, tree):
        if type(tree) is list:
            return [self.copy(value) for value in tree]
        if type(tree) is dict:
            return {key: self.copy(value) for key, value in tree.items()}
        if isinstance(tree, UserDict):
            other = copy(tree)
            other.data = self.copy(tree.data)
            return other
        if caches.is_cache(tree):
            return caches.copy_of(tree)
        if any(id(x) in self.others for x in tensors_in(tree)):
            raise TypeError(
                f"{type(tree).__name__}: layers take and return plain tuples, lists, dicts"
            )
        return tree


def objects_in(tree) -> list:
    """What is in a nest besides tensors and numbers: a cache of another kind, say."""
    if isinstance(tree, (dict, UserDict)):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        plain = isinstance(tree, (torch.Tensor, torch.nn.Module)) or not hasattr(tree, "__dict__")
        return [] if plain or caches.is_cache(tree) else [tree]
    found = []
    for value in tree:
        found += objects_in(value)
    return found


def held_by(objects: list) -> list[tuple[int, int]]:
    """Tensors that objects hold, and objects that these hold: ``id`` and version of each."""
    found = []
    seen = set()
    waiting = list(objects)
    while waiting:
        held = waiting.pop()
        if id(held) in seen:
            continue
        seen.add(id(held))
        if isinstance(held, torch.Tensor):
            found.append((id(held), version_of(held)))
        elif isinstance(held, (tuple, list)):
            waiting += held
        elif isinstance(held, (dict, UserDict)):
            waiting += held.values()
        else:
            for holder in objects_in([held]):
                waiting += vars(holder).values()
    return found


def handed_back(theirs, left):
    """What takes the place of ``theirs``: its lists and dicts hold what ``left`` does.

    Args:
        theirs: an argument of the caller, whose lists and dicts stay the same objects.
        left: what a layer has made of its copy.
    """
    if type(theirs) is not type(left) or theirs is left:
        return left
    if type(theirs) is list:
        pairs = list(zip_longest(theirs[: len(left)], left))
        theirs[:] = [handed_back(old, new) for old, new in pairs]
        return theirs
    if type(theirs) is tuple and len(theirs) == len(left):
        return tuple(handed_back(old, new) for old, new in zip(theirs, left, strict=True))
    if type(theirs) is dict:
        values = {key: handed_back(theirs.get(key), value) for key, value in left.items()}
        theirs.clear()
        theirs.update(values)
        return theirs
    if isinstance(theirs, UserDict):
        handed_back(theirs.data, left.data)
        return theirs
    if caches.is_cache(theirs):
        return theirs
    return left
