# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/offload/kept_things.py
"""What modules keep besides weights and buffers: containers, objects, arrays, random numbers."""

import pickle
import random
import sys
from argparse import Namespace
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from functools import partial
from types import SimpleNamespace

import torch
from torch import nn

_MOST = 10_000  # values that are looked at: data that a module holds are left alone
_PLAIN = (SimpleNamespace, Namespace)  # objects of the standard library that are only attributes
_CONTAINERS = (list, dict, set, deque)


class Draws:
    """A source of random numbers: where it is now.

    ``get()`` is its state, ``put(state)`` sets that.
    """

    def __init__(self, get: Callable, put: Callable) -> None:
        self.get = get
        self.put = put
        self.before = get()
        self.was_used = True

    def forward_has_run(self) -> None:
        """See whether forward has drawn: if not, another thread may, at any time."""
        now = self.get()
        if isinstance(now, torch.Tensor):
            self.was_used = not torch.equal(now, self.before)
        else:
            self.was_used = pickle.dumps(now) != pickle.dumps(self.before)


def is_source(value) -> bool:
    """Whether it is a generator of random numbers: of torch, Python or NumPy."""
    if isinstance(value, (torch.Generator, random.Random)):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(
        value, (numpy.random.RandomState, numpy.random.Generator)
    )


def draws_of(source) -> Draws:
    """Of such a generator."""
    if isinstance(source, random.Random):
        return Draws(source.getstate, source.setstate)
    if hasattr(source, "bit_generator"):
        bits = source.bit_generator
        return Draws(lambda: bits.state, lambda state: setattr(bits, "state", state))
    return Draws(source.get_state, source.set_state)


def fresh(value):
    """A copy of an iterator, which goes on where that one is now; anything else as it is."""
    if isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
        try:
            return copy(value)
        except TypeError:  # a generator cannot be copied
            return value
    return value


def is_array(value) -> bool:
    """Whether it is an array of NumPy, if somebody has imported that."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_object(value) -> bool:
    """Whether it is an object of a class of users: one that has attributes, and no more.

    A configuration of transformers is none: it is large, and every layer has it.
    """
    if isinstance(value, _PLAIN):
        return True
    if isinstance(value, (nn.Module, torch.Tensor, type, *_CONTAINERS, UserDict)):
        return False
    package = type(value).__module__.partition(".")[0]
    if package == "torch" or package in sys.stdlib_module_names:
        return False
    if hasattr(type(value), "to_diff_dict"):
        return False
    return type(getattr(value, "__dict__", None)) is dict or len(_slots_of(value)) > 0


def _slots_of(value) -> list[str]:
    names = []
    for each in type(value).__mro__:
        slots = vars(each).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def attributes_of_object(value) -> dict:
    """Those in its ``__dict__`` and in slots."""
    found = dict(getattr(value, "__dict__", {}))
    for name in _slots_of(value):
        if hasattr(value, name):
            found[name] = getattr(value, name)
    return found


def set_attributes(value, attributes: dict) -> None:
    """Give an object these attributes in place of those that it has."""
    slots = set(_slots_of(value))
    if hasattr(value, "__dict__"):
        vars(value).clear()
        vars(value).update({n: kept for n, kept in attributes.items() if n not in slots})
    for name in slots:
        if name in attributes:
            object.__setattr__(value, name, attributes[name])
        elif hasattr(value, name):
            object.__delattr__(value, name)


def things_in(values: Iterable) -> list:
    """All that can change among values and in what these hold, each once; not modules' own."""
    found = []
    seen = set()
    waiting = deque(values)
    for _ in range(_MOST):
        if not waiting:
            break
        value = waiting.popleft()
        if id(value) in seen or value is None or isinstance(value, (str, int, float, nn.Parameter)):
            continue
        seen.add(id(value))
        if isinstance(value, tuple):
            waiting += value
        elif isinstance(value, dict):
            found.append(value)
            waiting += value.values()
        elif isinstance(value, _CONTAINERS):
            found.append(value)
            waiting += value
        elif isinstance(value, torch.Tensor) or is_array(value) or is_source(value):
            found.append(value)
        elif is_object(value):
            found.append(value)
            waiting += attributes_of_object(value).values()
    return found


class Contents:
    """What things hold now; ``put_back`` lets the same things hold it again."""

    def __init__(self, values: Iterable) -> None:
        self.setters = [_setter(thing) for thing in things_in(values)]

    def put_back(self) -> None:
        for setter in self.setters:
            setter()


def _setter(thing) -> Callable[[], None]:
    """What lets a thing hold again what it holds now."""
    if is_source(thing):
        draws = draws_of(thing)
        return partial(draws.put, draws.before)
    if isinstance(thing, torch.Tensor):
        return partial(_fill, thing, thing.detach().clone())
    if is_array(thing):
        return partial(thing.__setitem__, Ellipsis, thing.copy())
    if isinstance(thing, _CONTAINERS):
        return partial(_refill, thing, copy(thing))
    return partial(set_attributes, thing, attributes_of_object(thing))


@torch.no_grad()
def _fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    if not tensor.requires_grad and tensor.shape == values.shape:
        tensor.copy_(values)


def _refill(container, items) -> None:
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(items)
    else:
        container.update(items)
