# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/state/loaders.py
"""A loader's place in its data, and the random numbers of its pass."""

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from inspect import isgeneratorfunction
from itertools import chain, islice

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import DataLoader, IterableDataset

from .random_numbers import has_drawn_more_than_a_seed, numbers_of_host, set_numbers_of_host
from .samplers import OwnCounts, draws_by_own_code, innermost_sampler, refuse_without_a_state
from .telling import before_first, end_pass, has_begun, listen, watch

LOG = logging.getLogger(__name__)
_KEY = "overlap_recipes.pass"  # in the state of a loader


class LoaderInPass:
    """A loader that knows where it is, with the random numbers from which its pass began.

    The order of a sampler, the seeds of the workers and what a dataset draws come from them. A pass
    that goes on after a load begins with them again, and leaves the job's own as they are. So it
    does with what ``OwnCounts`` reads.

    As long as this object lives, the loader is of a subclass of its class, which tells when a pass
    begins. A copy of the loader, and what is unpickled, is of the class itself, and has nothing to
    do with this object.

    Args:
        item: the loader, or what has a state and hands on the batches of one.

    Raises:
        TypeError: the loader does not know where it is, or which batches it has given, or draws an
            order that is in no state.
    """

    def __init__(self, name: str, item: DataLoader | Stateful) -> None:
        loader = _loader_of(item)
        if not isinstance(loader, Stateful):
            raise TypeError(
                f"{name} is a DataLoader that does not know where it is: use torchdata's "
                "StatefulDataLoader, or skip batches yourself; accelerate has "
                "DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)"
            )
        if loader.num_workers > 1 and not getattr(loader, "in_order", True):
            raise TypeError(
                f"{name} gives batches as its workers end them (in_order=False), and its state "
                "does not say which those were: a job that resumes would train some twice and "
                "others never. Set in_order=True"
            )
        sampler = innermost_sampler(loader)
        refuse_without_a_state(name, sampler)
        self.name = name
        self.item = item
        self.sampler = type(sampler).__name__
        has_sampler = not isinstance(loader.dataset, IterableDataset)
        self.draws_at_once = has_sampler and not isgeneratorfunction(type(sampler).__iter__)
        self.own_counts = OwnCounts(loader)
        self.lost_order = ""  # why the order of the samples is in no state, in words
        self.passes = 0  # that have begun
        self.began: dict | None = None  # with which numbers; None: before this object was made
        self.began_by_reset = False  # workers that persist begin another pass, and no iterator does
        self.counts: dict = {}  # with which the pass began, or will
        self.counts_of_loop: dict | None = None  # when it has asked for a pass that has not begun
        self.goes_on = False  # whether a load has given the pass that comes next
        self.loaded: object = None  # the state, until the loop has taken a batch of that pass
        self.iteration: int | None = None  # of accelerate's loader, in that pass
        self.has_begun = has_begun(loader)  # whether the job has taken batches since the last load
        _warn_of_workers_that_persist(name, loader)
        listen(loader, self)
        if hasattr(item, "load_state_dicts"):
            self.load_state_dicts = item.load_state_dicts

    def place(self) -> tuple:
        """Where the loop is in the data: another one as soon as it has taken a batch."""
        iterator = getattr(self._loader, "_iterator", None)
        return self.passes, getattr(iterator, "_num_yielded", 0)

    # -- told by the loader -----------------------------------------------------------------------

    def ask_for_pass(self, loader: DataLoader) -> None:
        counts = self._counts()
        if self.loaded is not None and not self.goes_on:
            self.load_state_dict(self.loaded)  # another iterator for it, before its first batch
        self.has_begun = True
        self.counts_of_loop = counts

    def make_iterator(self, loader: DataLoader, make: Callable[[], Iterator]) -> Iterator:
        """Make the iterator of a pass by ``make``: of a new one, or of that which a load gave."""
        counts = self._take_counts()
        if self.goes_on:
            self.goes_on = False
            iterator = self._go_on(loader, make, counts)
        else:
            iterator = self._begin(make, counts)
        self._watch(loader, iterator)
        return iterator

    def _take_counts(self) -> dict:
        """Those with which the loop has asked for the pass that begins now."""
        counts = self._counts() if self.counts_of_loop is None else self.counts_of_loop
        self.counts_of_loop = None
        return counts

    def _begin(self, make: Callable[[], Iterator], counts: dict) -> Iterator:
        """Begin a pass with the job's numbers, and note them."""
        self.counts = counts
        of_job = self._numbers()
        self.passes += 1
        self.began = of_job
        self.began_by_reset = False
        iterator = make()
        if self.draws_at_once and has_drawn_more_than_a_seed(of_job):
            self.lost_order = (
                f"what {self.sampler} draws in iter() is in no state, so a job that resumes would "
                "have another order: make its __iter__ a generator (yield from ...), or let it "
                "draw from a seed and its epoch"
            )
        return iterator

    def _go_on(self, loader: DataLoader, make: Callable[[], Iterator], of_loop: dict) -> Iterator:
        """Go on with the pass of the save, from the numbers with which that had begun.

        The job's own are afterwards what they were.
        """
        of_job = self._numbers()
        before = self._counts()
        other_epochs = self._other_epochs(of_loop)
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
            self.loaded = None
            self.began = of_job
            if _is_of_accelerate(self.item):  # a sampler that has ended counts its passes itself
                self.item.set_epoch(self.item.iteration)
        if other_epochs:  # the loop has set them
            is_at_end = has_ended or _has_given_all(iterator, loader)
            if not is_at_end or min(other_epochs.values()) < 0:
                raise ValueError(
                    f"{self.name}: {'; '.join(other_epochs)} when the pass began that the "
                    "checkpoint is in: what is left of it would have another order. Set it as it "
                    f"was, or begin the data again: resume(skip=['{self.name}'])"
                )
            self.own_counts.write(before)
            if not has_ended:
                self.loaded = None
                return self._begin(make, of_loop)
        elif has_ended:
            self.own_counts.write(before)
        before_first(iterator, partial(self._take_first, self._counts()))
        return iterator

    def _take_first(self, began: dict) -> None:
        """The loop takes the first batch of the pass that goes on.

        Raises:
            ValueError: it has set an epoch back since the iterator was made: it counts from 0.
        """
        self.loaded = None
        epochs = self.own_counts.other_epochs(self._counts(), began)
        if min(epochs.values(), default=0) < 0:
            raise ValueError(
                f"{self.name}: {'; '.join(epochs)} at the save, so that later passes would have "
                "orders of earlier ones: let the loop go on with the epoch of the save (in "
                "Lightning, set trainer.fit_loop.epoch_progress.current.processed)"
            )

    def _other_epochs(self, of_loop: dict) -> dict[str, int]:
        """By how much epochs that the loop has set are ahead of those of the save."""
        if not _is_of_accelerate(self.item):
            return self.own_counts.other_epochs(of_loop, self.counts)
        here = self.item.iteration  # what ``set_epoch`` has made it
        if self.iteration in (None, here):
            return {}
        says = f"the loop has set epoch {here}, and it was {self.iteration}"
        return {says: here - self.iteration}

    def reset_iterator(self, reset: Callable[[], Iterator]) -> Iterator:
        """Begin another pass of an iterator whose workers persist."""
        self.passes += 1
        self.counts = self._take_counts()
        self.began = self._numbers()
        self.began_by_reset = True
        return reset()

    def _watch(self, loader: DataLoader, iterator: Iterator) -> None:
        """Notice what is drawn in the middle of a pass: a pass that goes on draws it at once."""
        if isinstance(loader.dataset, IterableDataset):
            if loader.num_workers == 0 and not isinstance(loader.dataset, Stateful):
                watch(iterator, "_next_data", "_num_yielded", self._warn_of_stream)
        elif draws_by_own_code(loader):
            watch(iterator, "_next_index", "_sampler_iter_yielded", self._lose_order)

    def _lose_order(self) -> None:
        self.lost_order = (
            f"{self.sampler} draws random numbers of the job in the middle of a pass, between "
            "those of the model, so a job that resumes would have another order: let it draw all "
            "when the pass begins, or from a generator of its own"
        )

    def _warn_of_stream(self) -> None:
        LOG.warning(
            "%s: %s draws random numbers of the job as it goes, between those of the model, and "
            "has no state. If they make the order, a job that resumes has another one: let it draw "
            "from a generator of its own, or give it state_dict and load_state_dict",
            self.name,
            type(self._loader.dataset).__name__,
        )

    # -- told by the job --------------------------------------------------------------------------

    def state_dict(self) -> dict:
        state = self.item.state_dict()  # may make an iterator
        if self.lost_order:
            raise ValueError(f"{self.name}: {self.lost_order}")
        if not isinstance(state, dict):
            return state
        of_pass = {
            "began": self.began,
            "by_reset": self.began_by_reset,
            "now": self._numbers().get("generator"),
            "iteration": _next_iteration(self.item, state),
            "counts": self.counts,
            "counts_now": self._counts(),
            "workers": self._loader.num_workers,
        }
        return {**state, _KEY: of_pass}

    def load_state_dict(self, state: dict) -> None:
        self.loaded = state
        of_pass = {}
        if isinstance(state, dict):
            of_pass = state.get(_KEY, {})  # not in checkpoints of earlier versions
            state = {key: value for key, value in state.items() if key != _KEY}
        workers = self._loader.num_workers
        if of_pass.get("workers", workers) != workers:
            raise ValueError(
                f"{self.name} was saved with {of_pass['workers']} workers, and has {workers} here: "
                "its place is one of theirs. Set num_workers as it was, or begin the data again: "
                f"resume(skip=['{self.name}'])"
            )
        end_pass(self._loader, "a checkpoint has been loaded since")
        self.item.load_state_dict(state)
        self.goes_on = True
        self.has_begun = False
        self.began = of_pass.get("began")
        self.began_by_reset = of_pass.get("by_reset", False)
        has_ended = isinstance(state, dict) and state.get("_iterator_finished", False)
        self.counts = of_pass.get("counts_now" if has_ended else "counts", {})
        self.counts_of_loop = None
        self.own_counts.write(self.counts)
        self.iteration = of_pass.get("iteration")
        if self.iteration is not None:
            self.item.iteration = self.iteration
        generator = self._loader.generator
        if generator is not None and of_pass.get("now") is not None:
            generator.set_state(of_pass["now"])

    @property
    def _loader(self) -> DataLoader:
        return _loader_of(self.item)

    def _counts(self) -> dict:
        """Those of accelerate's loaders are its ``iteration``."""
        return {} if _is_of_accelerate(self.item) else self.own_counts.read()

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


def _loader_of(item: object) -> object:
    """The one that gives the batches; accelerate's has the methods of a state, and no state."""
    if isinstance(item, DataLoader):
        return getattr(item, "base_dataloader", item)
    return _loaders_inside(item)[0]


def has_loader_inside(item: object) -> bool:
    """Whether ``item`` has a state, and hands on what one loader with a state gives."""
    gives_batches = isinstance(item, Iterable) and isinstance(item, Stateful)
    return gives_batches and len(_loaders_inside(item)) == 1


def _loaders_inside(item: object) -> list[DataLoader]:
    found = []
    for value in getattr(item, "__dict__", {}).values():
        if isinstance(value, DataLoader):
            inner = getattr(value, "base_dataloader", value)
            if isinstance(inner, Stateful):
                found.append(inner)
    return found


def _has_given_all(iterator: Iterator, loader: DataLoader) -> bool:
    try:
        return iterator._num_yielded >= len(loader)
    except TypeError:  # a stream's length is unknown
        return False


def _next_iteration(item: DataLoader, state: dict) -> int | None:
    """The number of the pass that a prepared loader of accelerate orders by, which it saves not."""
    if not _is_of_accelerate(item):
        return None
    return item.iteration + 1 if state.get("_iterator_finished") else item.iteration


def _is_of_accelerate(item: DataLoader) -> bool:
    return hasattr(item, "base_dataloader") and hasattr(item, "iteration")


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
