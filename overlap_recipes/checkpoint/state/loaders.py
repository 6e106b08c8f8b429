# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/state/loaders.py
"""A loader's place in its data, and the random numbers of its pass."""

import logging
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from inspect import isgeneratorfunction
from itertools import chain, islice

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from .random_numbers import has_drawn_more_than_a_seed, numbers_of_host, set_numbers_of_host

LOG = logging.getLogger(__name__)
_KEY = "overlap_recipes.pass"  # in the state of a loader

# who is told of the passes of a loader; private by name: ``_get_iterator``, ``_iterator``
_LISTENERS: "weakref.WeakKeyDictionary[DataLoader, list[weakref.ref[LoaderInPass]]]"
_LISTENERS = weakref.WeakKeyDictionary()


class LoaderInPass:
    """A loader that knows where it is, with the random numbers from which its pass began.

    The order of a sampler, the seeds of the workers and what a dataset draws come from them. A pass
    that goes on after a load begins with them again, and leaves the job's own as they are.

    As long as this object lives, the loader is of a subclass of its class, which tells when a pass
    begins. A copy of the loader, and what is unpickled, is of the class itself, and has nothing to
    do with this object.

    Raises:
        TypeError: the loader does not know where it is, or draws an order that is in no state.
    """

    def __init__(self, name: str, item: DataLoader) -> None:
        loader = getattr(item, "base_dataloader", item)  # accelerate's has the methods, no state
        if not isinstance(loader, Stateful):
            raise TypeError(
                f"{name} is a DataLoader that does not know where it is: use torchdata's "
                "StatefulDataLoader, or skip batches yourself; accelerate has "
                "DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)"
            )
        sampler = _innermost_sampler(loader)
        if _draws_without_a_state(sampler):
            raise TypeError(
                f"{name} is a DataLoader whose {type(sampler).__name__} draws another order after "
                "a restart: what it has drawn is in no state. Use "
                "StatefulDataLoader(shuffle=True), or a sampler with a seed (accelerate: "
                "DataLoaderConfiguration(use_seedable_sampler=True))"
            )
        self.name = name
        self.item = item
        self.sampler = type(sampler).__name__
        has_sampler = not isinstance(loader.dataset, IterableDataset)
        self.draws_at_once = has_sampler and not isgeneratorfunction(type(sampler).__iter__)
        self.order_is_unknown = False
        self.began: dict | None = None  # with which numbers; None: before this object was made
        self.began_by_reset = False  # workers that persist begin another pass, and no iterator does
        self.goes_on = False  # whether a load has given the pass that comes next
        self.has_begun = _has_begun(loader)  # whether the job has taken batches since the last load
        _warn_of_workers_that_persist(name, loader)
        _listen(loader, self)
        if hasattr(item, "load_state_dicts"):
            self.load_state_dicts = item.load_state_dicts

    # -- told by the loader -----------------------------------------------------------------------

    def make_iterator(self, loader: DataLoader, make: Callable[[], Iterator]) -> Iterator:
        """Make the iterator of a pass by ``make``: of a new one, or of that which a load gave."""
        if self.goes_on:
            self.goes_on = False
            return self._go_on(loader, make)
        return self._begin(make)

    def _begin(self, make: Callable[[], Iterator]) -> Iterator:
        """Begin a pass with the job's numbers, and note them."""
        of_job = self._numbers()
        self.began = of_job
        self.began_by_reset = False
        iterator = make()
        if self.draws_at_once and has_drawn_more_than_a_seed(of_job):
            self.order_is_unknown = True
        return iterator

    def _go_on(self, loader: DataLoader, make: Callable[[], Iterator]) -> Iterator:
        """Go on with the pass of the save, from the numbers with which that had begun.

        The job's own are afterwards what they were.
        """
        of_job = self._numbers()
        generator = loader.generator
        try:
            if self.began is not None:
                self._set_numbers(self.began)
            if self.began_by_reset:
                # A reset has drawn no seed for workers; ``make`` draws one, from another generator.
                loader.generator = torch.Generator()
            iterator = make()
            _draw_first(iterator)
        finally:
            loader.generator = generator
            self._set_numbers(of_job)
        has_ended = getattr(iterator, "_finished", False)
        if has_ended:  # the pass of the save: what comes is the next
            self.began = of_job
            if _is_of_accelerate(self.item):  # a sampler that has ended counts its passes itself
                self.item.set_epoch(self.item.iteration)
        return iterator

    def reset_iterator(self, reset: Callable[[], Iterator]) -> Iterator:
        """Begin another pass of an iterator whose workers persist."""
        self.began = self._numbers()
        self.began_by_reset = True
        return reset()

    # -- told by the job --------------------------------------------------------------------------

    def state_dict(self) -> dict:
        state = self.item.state_dict()  # may make an iterator
        if self.order_is_unknown:
            raise ValueError(
                f"{self.name}: what {self.sampler} draws in iter() is in no state, so a job that "
                "resumes would have another order: make its __iter__ a generator (yield from ...), "
                "or let it draw from a seed and its epoch"
            )
        if not isinstance(state, dict):
            return state
        of_pass = {
            "began": self.began,
            "by_reset": self.began_by_reset,
            "now": self._numbers().get("generator"),
            "iteration": _next_iteration(self.item, state),
        }
        return {**state, _KEY: of_pass}

    def load_state_dict(self, state: dict) -> None:
        of_pass = {}
        if isinstance(state, dict):
            of_pass = state.get(_KEY, {})  # not in checkpoints of earlier versions
            state = {key: value for key, value in state.items() if key != _KEY}
        self.item.load_state_dict(state)
        self.goes_on = True
        self.has_begun = False
        self.began = of_pass.get("began")
        self.began_by_reset = of_pass.get("by_reset", False)
        if of_pass.get("iteration") is not None:
            self.item.iteration = of_pass["iteration"]
        generator = self._loader.generator
        if generator is not None and of_pass.get("now") is not None:
            generator.set_state(of_pass["now"])

    @property
    def _loader(self) -> DataLoader:
        return getattr(self.item, "base_dataloader", self.item)

    def _numbers(self) -> dict:
        numbers = numbers_of_host()
        generator = self._loader.generator
        if generator is not None:
            numbers["generator"] = generator.get_state()
        return numbers

    def _set_numbers(self, numbers: dict) -> None:
        set_numbers_of_host(numbers)
        generator = self._loader.generator
        if generator is not None and "generator" in numbers:
            generator.set_state(numbers["generator"])


def _next_iteration(item: DataLoader, state: dict) -> int | None:
    """The number of the pass that a prepared loader of accelerate orders by, which it saves not."""
    if not _is_of_accelerate(item):
        return None
    return item.iteration + 1 if state.get("_iterator_finished") else item.iteration


def _is_of_accelerate(item: DataLoader) -> bool:
    return hasattr(item, "base_dataloader") and hasattr(item, "iteration")


def _has_begun(loader: DataLoader) -> bool:
    """Whether somebody has asked for its batches."""
    iterator = getattr(loader, "_iterator", None)
    return iterator is not None and not getattr(loader, "_initial_iter_for_state_dict", False)


def _warn_of_workers_that_persist(name: str, loader: DataLoader) -> None:
    dataset = loader.dataset
    persists = loader.persistent_workers and loader.num_workers > 0
    if persists and isinstance(dataset, IterableDataset) and not isinstance(dataset, Stateful):
        LOG.warning(
            "%s: workers that persist go on with their random numbers from pass to pass, and a job "
            "that resumes starts others. If %s draws an order, give it state_dict and "
            "load_state_dict, or set persistent_workers=False",
            name,
            type(dataset).__name__,
        )


def _draw_first(iterator: Iterator) -> None:
    """Let a sampler that is to skip what was taken do so now, with the numbers of its pass."""
    rest = getattr(iterator, "_sampler_iter", None)
    if isinstance(rest, islice):
        first = list(islice(rest, 1))
        iterator._sampler_iter = chain(first, rest)


def _innermost_sampler(loader: DataLoader) -> object:
    """What gives the order of the samples, below all that makes batches of them."""
    found: object = loader
    while True:
        inner = getattr(found, "batch_sampler", None)
        if inner is None:
            inner = getattr(found, "sampler", None)
        if inner is None:
            return found
        found = inner


def _draws_without_a_state(sampler: object) -> bool:
    """Whether it is one of PyTorch's own samplers that draw; torchdata's RandomSampler is not."""
    is_torchs_own = type(sampler).__module__ == RandomSampler.__module__
    return is_torchs_own and not isinstance(sampler, SequentialSampler)


# -- a loader that tells when a pass begins ---------------------------------------------------


def _listen(loader: DataLoader, listener: LoaderInPass) -> None:
    """Tell ``listener`` of the passes of ``loader``, as long as both live."""
    if loader not in _LISTENERS:
        _LISTENERS[loader] = []
        loader.__class__ = _telling(type(loader))
    reference = weakref.ref(listener)
    _LISTENERS[loader].append(reference)
    end = weakref.finalize(listener, _forget, weakref.ref(loader), reference)
    end.atexit = False


def _forget(loader: weakref.ref, reference: weakref.ref) -> None:
    """Take the loader's own class again, when nobody listens any more."""
    alive = loader()
    if alive is None:
        return
    listeners = _LISTENERS[alive]
    listeners.remove(reference)
    if not listeners:
        del _LISTENERS[alive]
        alive.__class__ = type(alive).__bases__[0]


def _listeners_of(loader: DataLoader) -> list[LoaderInPass]:
    found = [reference() for reference in _LISTENERS.get(loader, [])]
    return [listener for listener in found if listener is not None]


@cache
def _telling(cls: type) -> type:
    """A subclass of a loader's class ``cls``, of which no copy and no pickle is."""

    class Telling(cls):
        def _get_iterator(self) -> Iterator:
            make = super()._get_iterator
            for listener in _listeners_of(self):
                make = _made_by(listener, self, make)
            return make()

        def __iter__(self) -> Iterator:
            listeners = _listeners_of(self)
            for listener in listeners:
                listener.has_begun = True
            begin = super().__iter__
            persists = self.persistent_workers and self.num_workers > 0
            if persists and _has_begun(self):
                for listener in listeners:
                    begin = _reset_by(listener, begin)
            return begin()

        def __reduce_ex__(self, protocol: int) -> tuple:
            make, arguments, *rest = super().__reduce_ex__(1)  # names the class as an argument
            of_own_class = [cls if each is type(self) else each for each in arguments]
            return (make, tuple(of_own_class), *rest)

    Telling.__name__ = cls.__name__
    Telling.__qualname__ = cls.__qualname__
    Telling.__module__ = cls.__module__
    return Telling


def _made_by(
    listener: LoaderInPass, loader: DataLoader, make: Callable[[], Iterator]
) -> Callable[[], Iterator]:
    return lambda: listener.make_iterator(loader, make)


def _reset_by(listener: LoaderInPass, reset: Callable[[], Iterator]) -> Callable[[], Iterator]:
    return lambda: listener.reset_iterator(reset)
