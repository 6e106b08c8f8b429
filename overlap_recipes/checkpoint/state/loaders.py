# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.1, overlap_recipes/checkpoint/state/loaders.py
"""A loader's place in its data, and the random numbers of its pass."""

import weakref
from collections.abc import Callable, Iterator
from inspect import isgeneratorfunction
from itertools import chain, islice

from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from .random_numbers import has_drawn_more_than_a_seed, numbers_of_host, set_numbers_of_host

NO_POSITION = (
    "%s is a DataLoader that does not know where it is: use torchdata's StatefulDataLoader, or "
    "skip batches yourself; accelerate has "
    "DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)"
)
NO_ORDER = (
    "%s is a DataLoader whose %s draws another order after a restart: what it has drawn is in no "
    "state. Use StatefulDataLoader(shuffle=True), or a sampler with a seed (accelerate: "
    "DataLoaderConfiguration(use_seedable_sampler=True))"
)
DRAWS_AT_ONCE = (
    "%s: what %s draws in iter() is in no state, so a job that resumes would have another order: "
    "make its __iter__ a generator (yield from ...), or let it draw from a seed and its epoch"
)


class LoaderInPass:
    """A loader that knows where it is, with the random numbers from which its pass began.

    The order of a sampler, the seeds of the workers and what a dataset draws come from them. A pass
    that goes on behind a load begins with them again, and leaves the job's own as they are.
    """

    KEY = "overlap_recipes.pass"  # in the state of the loader

    def __init__(self, name: str, item: Stateful, loader: DataLoader) -> None:
        self.item = item
        self.name = name
        self.generator = loader.generator
        sampler = type(innermost_sampler(loader))
        has_sampler = not isinstance(loader.dataset, IterableDataset)
        self.draws_at_once = has_sampler and not isgeneratorfunction(sampler.__iter__)
        self.sampler = sampler.__name__
        self.unknown_order = False
        self.began: dict | None = None  # None: before this object was made
        self.goes_on = False  # whether a load has given the pass that comes next
        self.make_iterator = maker_of_iterators(loader)
        loader._get_iterator = begun_by(weakref.ref(self), self.make_iterator)
        if hasattr(item, "load_state_dicts"):
            self.load_state_dicts = item.load_state_dicts

    def begin(self) -> Iterator:
        """Make the iterator of a pass, for the loader."""
        own = self.numbers()
        if not self.goes_on:
            self.began = own
            iterator = self.make_iterator()
            if self.draws_at_once and has_drawn_more_than_a_seed(own):
                self.unknown_order = True
            return iterator
        self.goes_on = False
        try:
            if self.began is not None:
                self.set_numbers(self.began)
            iterator = self.make_iterator()
            draw_first(iterator)
            return iterator
        finally:
            self.set_numbers(own)

    def numbers(self) -> dict:
        numbers = numbers_of_host()
        if self.generator is not None:
            numbers["generator"] = self.generator.get_state()
        return numbers

    def set_numbers(self, numbers: dict) -> None:
        set_numbers_of_host(numbers)
        if self.generator is not None and "generator" in numbers:
            self.generator.set_state(numbers["generator"])

    def state_dict(self) -> dict:
        state = self.item.state_dict()  # may begin a pass
        if self.unknown_order:
            raise ValueError(DRAWS_AT_ONCE % (self.name, self.sampler))
        if not isinstance(state, dict):
            return state
        of_pass = {"began": self.began, "now": self.numbers().get("generator")}
        return {**state, self.KEY: of_pass}

    def load_state_dict(self, state: dict) -> None:
        of_pass = {}
        if isinstance(state, dict):
            of_pass = state.get(self.KEY, {})  # not in checkpoints of earlier versions
            state = {key: value for key, value in state.items() if key != self.KEY}
        self.item.load_state_dict(state)
        self.goes_on = True
        self.began = of_pass.get("began")
        if self.generator is not None and of_pass.get("now") is not None:
            self.generator.set_state(of_pass["now"])


def maker_of_iterators(loader: DataLoader) -> Callable[[], Iterator]:
    """What makes them up to now. It does not keep ``loader``, whose workers end with it."""
    own = weakref.ref(loader)
    before = vars(loader).get("_get_iterator")  # of another state of the job

    def make() -> Iterator:
        alive = own()
        return type(alive)._get_iterator(alive) if before is None else before()

    return make


def begun_by(owner: weakref.ref, make: Callable[[], Iterator]) -> Callable[[], Iterator]:
    """``LoaderInPass.begin`` of ``owner`` as long as there is one."""

    def begin() -> Iterator:
        alive = owner()
        return make() if alive is None else alive.begin()

    return begin


def draw_first(iterator: Iterator) -> None:
    """Let a sampler that is to skip what was taken do so now, with the numbers of its pass."""
    rest = getattr(iterator, "_sampler_iter", None)
    if isinstance(rest, islice):
        first = list(islice(rest, 1))
        iterator._sampler_iter = chain(first, rest)


def innermost_sampler(loader: DataLoader) -> object:
    """What gives the order of the samples, below all that makes batches of them."""
    found: object = loader
    while True:
        inner = getattr(found, "batch_sampler", None)
        if inner is None:
            inner = getattr(found, "sampler", None)
        if inner is None:
            return found
        found = inner


def draws_without_a_state(sampler: object) -> bool:
    """Whether it is one of PyTorch's own samplers that draw; torchdata's RandomSampler is not."""
    is_torchs_own = type(sampler).__module__ == RandomSampler.__module__
    return is_torchs_own and not isinstance(sampler, SequentialSampler)
