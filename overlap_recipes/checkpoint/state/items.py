# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.1, overlap_recipes/checkpoint/state/items.py
"""What a name of ``TrainingState`` may stand for."""

import random
import sys
from collections.abc import Callable, Iterable

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import DataLoader

from .loaders import NO_ORDER, NO_POSITION, LoaderInPass, draws_without_a_state, innermost_sampler

REPLACED = (
    "%s is a %s: a load would put another one into the dict, and what holds this one would not "
    "know. Give it by a name of its own"
)


def as_stateful(name: str, item: object) -> Stateful:
    if isinstance(item, (list, tuple)):
        items = [as_stateful(f"{name}[{number}]", each) for number, each in enumerate(item)]
        return Several(items)
    if isinstance(item, dict):
        return Values(name, item)
    generator = as_generator(item)
    if generator is not None:
        return generator
    if isinstance(item, DataLoader):
        inner = getattr(item, "base_dataloader", item)  # accelerate's has the methods, and no state
        if not isinstance(inner, Stateful):
            raise TypeError(NO_POSITION % name)
        sampler = innermost_sampler(inner)
        if draws_without_a_state(sampler):
            raise TypeError(NO_ORDER % (name, type(sampler).__name__))
        return LoaderInPass(name, item, inner)
    if not isinstance(item, Stateful):
        raise TypeError(f"{name} has no state_dict and load_state_dict; a dict of values would do")
    return item


class Several:
    """A list of objects with a state, such as one scheduler for each optimizer."""

    def __init__(self, items: list[Stateful]) -> None:
        self.items = items

    def state_dict(self) -> dict:
        return {str(number): item.state_dict() for number, item in enumerate(self.items)}

    def load_state_dict(self, state: dict) -> None:
        for number, item in enumerate(self.items):
            item.load_state_dict(state[str(number)])


class Values:
    """A dict of a job's own values, such as its epoch; a load changes it in place."""

    def __init__(self, name: str, values: dict) -> None:
        refuse_objects(name, values)
        self.name = name
        self.values = values

    def state_dict(self) -> dict:
        refuse_objects(self.name, self.values)
        return {**self.values}

    def load_state_dict(self, state: dict) -> None:
        self.values.clear()
        self.values.update(state)


def refuse_objects(name: str, value: object) -> None:
    """Raise ``TypeError`` if ``value``, or what is in it, is more than a value."""
    if isinstance(value, dict):
        for key, inner in value.items():
            refuse_objects(f"{name}[{key!r}]", inner)
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            refuse_objects(f"{name}[{number}]", inner)
    elif isinstance(value, Stateful) or as_generator(value) is not None:
        raise TypeError(REPLACED % (name, type(value).__name__))


class Generator:
    """A source of random numbers of the job's own."""

    def __init__(self, read: Callable[[], object], write: Callable[[object], None]) -> None:
        self.read = read
        self.write = write

    def state_dict(self) -> dict:
        return {"numbers": self.read()}

    def load_state_dict(self, state: dict) -> None:
        self.write(state["numbers"])


def as_generator(item: object) -> Generator | None:
    """The state of ``item``, if it is a generator of torch, Python or NumPy."""
    if isinstance(item, torch.Generator):
        return Generator(item.get_state, item.set_state)
    if isinstance(item, random.Random):
        return Generator(item.getstate, item.setstate)
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(item, numpy.random.RandomState):
        return Generator(item.get_state, item.set_state)
    if isinstance(item, numpy.random.Generator):
        bits = item.bit_generator
        return Generator(lambda: bits.state, lambda state: setattr(bits, "state", state))
    return None


def in_one_list(optimizers: tuple) -> list[torch.optim.Optimizer]:
    """The optimizers of a call with one, several, or a list of them."""
    if len(optimizers) == 1 and isinstance(optimizers[0], (list, tuple)):
        optimizers = optimizers[0]
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"{type(optimizer).__name__} is no optimizer: pass it by a name")
    return [*optimizers]


def refuse_taken(names: Iterable[str], taken: set[str]) -> None:
    found = taken & set(names)
    if found:
        raise ValueError(f"name it otherwise: {found} is taken in the checkpoint")
