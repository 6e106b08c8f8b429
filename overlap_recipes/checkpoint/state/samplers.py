# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/state/samplers.py
"""What gives a loader its order, and what of that no ``state_dict`` has."""

import logging
from collections.abc import Sequence

from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from .random_numbers import as_generator

LOG = logging.getLogger(__name__)
_EPOCH = "epoch"  # as ``DistributedSampler`` and most others call it


def innermost_sampler(loader: object) -> object:
    """What gives the order of the samples, below all that makes batches of them."""
    return _samplers(loader)[-1]


def _samplers(loader: object) -> list[object]:
    """The loader, what makes its batches, and so on down to what gives the order."""
    found = [loader]
    while True:
        inner = getattr(found[-1], "batch_sampler", None)
        if inner is None:
            inner = getattr(found[-1], "sampler", None)
        if inner is None:
            return found
        found.append(inner)


def _draws_without_a_state(sampler: object) -> bool:
    """Whether it is one of PyTorch's own samplers that draw; torchdata's RandomSampler is not."""
    is_torchs_own = type(sampler).__module__ == RandomSampler.__module__
    return is_torchs_own and not isinstance(sampler, SequentialSampler)


def refuse_without_a_state(name: str, sampler: object) -> None:
    """Refuse what ``name`` draws by, if a restart would draw another order."""
    if _draws_without_a_state(sampler):
        raise TypeError(
            f"{name} is a loader whose {type(sampler).__name__} draws another order after "
            "a restart: what it has drawn is in no state. Use "
            "StatefulDataLoader(shuffle=True), torchdata's RandomSampler, or a sampler with a seed "
            "(accelerate: DataLoaderConfiguration(use_seedable_sampler=True))"
        )


def samplers_of_nodes(item: object) -> list[object]:
    """The samplers of a graph of ``torchdata.nodes``."""
    if not type(item).__module__.startswith("torchdata.nodes"):
        return []
    found = []
    for name, inner in vars(item).items():
        if name in ("sampler", "iterable"):
            found.append(inner)
        elif isinstance(inner, dict):
            for each in inner.values():
                found.extend(samplers_of_nodes(each))
        elif name != "loader":  # an iterator's, which has the iterator
            found.extend(samplers_of_nodes(inner))
    return found


def warn_without_a_state(name: str, sampler: object) -> None:
    """Warn of a class of the job's in a graph of nodes, which may draw what is in no state."""
    knows_its_order = isinstance(sampler, (Stateful, Sequence)) or hasattr(sampler, "set_epoch")
    if not knows_its_order and not _is_known(sampler):
        LOG.warning(
            "%s: %s has no state. If it draws its order, a job that resumes has another one: give "
            "it state_dict and load_state_dict, or a seed and set_epoch",
            name,
            type(sampler).__name__,
        )


class OwnCounts:
    """What a loader, its samplers and its stream count and draw by themselves, without a state.

    That is an ``epoch`` of any, and generators of random numbers of what is no class of PyTorch.
    """

    def __init__(self, loader: DataLoader) -> None:
        self._parts = _samplers(loader)
        dataset = loader.dataset
        if isinstance(dataset, IterableDataset) and not isinstance(dataset, Stateful):
            self._parts.append(dataset)

    def read(self) -> dict[str, object]:
        found: dict[str, object] = {}
        for number, part in enumerate(self._parts):
            for name, value in getattr(part, "__dict__", {}).items():
                if name == _EPOCH and type(value) is int:
                    found[f"{number}.{name}"] = value
                elif not _is_known(part):
                    generator = as_generator(value)
                    if generator is not None:
                        found[f"{number}.{name}"] = generator.state_dict()
        return found

    def write(self, counts: dict[str, object]) -> None:
        here = self.read()
        for key in here.keys() & counts.keys():
            number, name = key.split(".", 1)
            part = self._parts[int(number)]
            if name == _EPOCH:
                part.epoch = counts[key]
            else:
                as_generator(getattr(part, name)).load_state_dict(counts[key])

    def other_epochs(self, here: dict[str, object], there: dict[str, object]) -> dict[str, int]:
        """By how much the epochs of ``here`` are ahead of ``there``, where they differ."""
        found = {}
        for key in sorted(here.keys() & there.keys()):
            number, name = key.split(".", 1)
            if name == _EPOCH and here[key] != there[key]:
                kind = type(self._parts[int(number)]).__name__
                says = f"the epoch of {kind} is {here[key]}, and was {there[key]}"
                found[says] = here[key] - there[key]
        return found


def draws_by_own_code(loader: DataLoader) -> bool:
    """Whether one of its samplers is of a class of the job's, without a state."""
    return not all(_is_known(part) for part in _samplers(loader))


def _is_known(part: object) -> bool:
    """Whether its class is PyTorch's, or has a state."""
    return isinstance(part, (Stateful, DataLoader)) or type(part).__module__.startswith("torch")
