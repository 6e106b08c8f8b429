# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/state/items.py
"""What a name of ``TrainingState`` may stand for."""

from collections.abc import Iterable, Iterator

from torch.distributed.checkpoint.stateful import Stateful
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from .loaders import LoaderInPass, has_loader_inside
from .random_numbers import as_generator
from .samplers import refuse_without_a_state, samplers_of_nodes, warn_without_a_state


def as_stateful(name: str, item: object) -> Stateful:
    """What saves and loads ``item``, which is given by ``name``.

    Raises:
        TypeError: nothing does.
    """
    if isinstance(item, (list, tuple)):
        items = [as_stateful(f"{name}[{number}]", each) for number, each in enumerate(item)]
        return _Several(items)
    if isinstance(item, dict):
        return _Values(name, item)
    generator = as_generator(item)
    if generator is not None:
        return generator
    if isinstance(item, DataLoader) or has_loader_inside(item):
        return LoaderInPass(name, item)
    if not isinstance(item, Stateful):
        raise TypeError(f"{name} has no state_dict and load_state_dict; a dict of values would do")
    for sampler in samplers_of_nodes(item):
        refuse_without_a_state(name, sampler)
        warn_without_a_state(name, sampler)
    return item


class _Several:
    """A list of objects with a state, such as one scheduler for each optimizer."""

    def __init__(self, items: list[Stateful]) -> None:
        self.items = items

    def state_dict(self) -> dict:
        return {str(number): item.state_dict() for number, item in enumerate(self.items)}

    def load_state_dict(self, state: dict) -> None:
        for number, item in enumerate(self.items):
            item.load_state_dict(state[str(number)])


class _Values:
    """A dict of a job's own values, such as its epoch; a load changes it in place."""

    def __init__(self, name: str, values: dict) -> None:
        _refuse_objects(name, values)
        self.name = name
        self.values = values

    def state_dict(self) -> dict:
        _refuse_objects(self.name, self.values)
        return {**self.values}

    def load_state_dict(self, state: dict) -> None:
        self.values.clear()
        self.values.update(state)


def _refuse_objects(name: str, value: object) -> None:
    """Raise ``TypeError`` if ``value``, or what is in it, is more than a value."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _refuse_objects(f"{name}[{key!r}]", inner)
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            _refuse_objects(f"{name}[{number}]", inner)
    elif isinstance(value, Stateful) or as_generator(value) is not None:
        raise TypeError(
            f"{name} is a {type(value).__name__}: a load would put another one into the dict, and "
            "what holds this one would not know. Give it by a name of its own"
        )


def each_of(items: Iterable[Stateful]) -> Iterator[Stateful]:
    """``items``, with what lists of them hold."""
    for item in items:
        if isinstance(item, _Several):
            yield from each_of(item.items)
        else:
            yield item


def refuse_taken(names: Iterable[str], taken: set[str]) -> None:
    found = taken & set(names)
    if found:
        raise ValueError(f"name it otherwise: {found} is taken in the checkpoint")


# -- kinds ------------------------------------------------------------------------------------


def kind_of(item: Stateful) -> object:
    """What a load compares of ``item``: how many are in a list, and which schedulers of torch.

    Others may be of another class by the time of the load, and know how to read what they saved.
    """
    if isinstance(item, _Several):
        return [kind_of(each) for each in item.items]
    if isinstance(item, LRScheduler) and type(item).__module__.startswith("torch."):
        inner = getattr(item, "_schedulers", [])
        if inner:
            return {type(item).__name__: [kind_of(each) for each in inner]}
        return type(item).__name__
    return None
