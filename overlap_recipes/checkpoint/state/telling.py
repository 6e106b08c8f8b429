# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/state/telling.py
"""A loader that tells when a pass begins, and iterators that know when theirs is over.

Private by name: ``_get_iterator``, ``_iterator``, ``_finished``, ``_next_index``, ``_next_data``.
"""

import weakref
from collections.abc import Callable, Iterator
from functools import cache
from typing import Protocol

from torch.utils.data import DataLoader

from .random_numbers import drawn_between, numbers_of_host


class Listener(Protocol):
    """Who is told of the passes of a loader."""

    def ask_for_pass(self, loader: DataLoader) -> None: ...
    def make_iterator(self, loader: DataLoader, make: Callable[[], Iterator]) -> Iterator: ...
    def reset_iterator(self, reset: Callable[[], Iterator]) -> Iterator: ...


_LISTENERS: "weakref.WeakKeyDictionary[DataLoader, list[weakref.ref[Listener]]]"
_LISTENERS = weakref.WeakKeyDictionary()


def listen(loader: DataLoader, listener: Listener) -> None:
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


def _listeners_of(loader: DataLoader) -> list[Listener]:
    found = [reference() for reference in _LISTENERS.get(loader, [])]
    return [listener for listener in found if listener is not None]


def has_begun(loader: DataLoader) -> bool:
    """Whether somebody has asked for its batches."""
    iterator = getattr(loader, "_iterator", None)
    return iterator is not None and not getattr(loader, "_initial_iter_for_state_dict", False)


@cache
def _telling(cls: type) -> type:
    """A subclass of a loader's class ``cls``, of which no copy and no pickle is."""

    class Telling(cls):
        def _get_iterator(self) -> Iterator:
            end_pass(self, "another pass of this loader has begun since")
            make = super()._get_iterator
            for listener in _listeners_of(self):
                make = _made_by(listener, self, make)
            return make()

        def __iter__(self) -> Iterator:
            listeners = _listeners_of(self)
            for listener in listeners:
                listener.ask_for_pass(self)
            begin = super().__iter__
            persists = self.persistent_workers and self.num_workers > 0
            if persists and has_begun(self):
                for listener in listeners:
                    begin = _reset_by(listener, begin)
            return begin()

        def __reduce_ex__(self, protocol: int) -> tuple:
            make, arguments, *rest = super().__reduce_ex__(1)  # names the class as an argument
            of_own_class = [cls if each is type(self) else each for each in arguments]
            return (make, tuple(of_own_class), *rest)

    _take_names(Telling, cls)
    return Telling


def _take_names(new: type, cls: type) -> None:
    new.__name__ = cls.__name__
    new.__qualname__ = cls.__qualname__
    new.__module__ = cls.__module__


def _made_by(
    listener: Listener, loader: DataLoader, make: Callable[[], Iterator]
) -> Callable[[], Iterator]:
    return lambda: listener.make_iterator(loader, make)


def _reset_by(listener: Listener, reset: Callable[[], Iterator]) -> Callable[[], Iterator]:
    return lambda: listener.reset_iterator(reset)


# -- iterators --------------------------------------------------------------------------------


def end_pass(loader: DataLoader, why: str) -> None:
    """Let who holds the loader's iterator get no more batches: no checkpoint has its place."""
    iterator = getattr(loader, "_iterator", None)
    if iterator is not None and not getattr(iterator, "_finished", False):
        iterator.__class__ = _over(type(iterator), why)


@cache
def _over(cls: type, why: str) -> type:
    class Over(cls):
        def __next__(self) -> object:
            raise RuntimeError(
                f"{why}, and checkpoints have the place of that one alone: what this iterator "
                "gives would come again, or never, in a job that resumes. Call iter(loader) after "
                "resume(), and give an evaluation a loader of its own"
            )

    _take_names(Over, cls)
    return Over


def before_first(iterator: Iterator, look: Callable[[], None]) -> None:
    """Call ``look``, which may raise, before the first batch of ``iterator``."""
    iterator.__class__ = _looked_at_first(type(iterator))
    iterator.look = look


@cache
def _looked_at_first(cls: type) -> type:
    class LookedAtFirst(cls):
        look: Callable[[], None] | None = None

        def __next__(self) -> object:
            if self.look is not None:
                self.look()
                self.look = None
            return super().__next__()

    _take_names(LookedAtFirst, cls)
    return LookedAtFirst


def watch(iterator: Iterator, method: str, count: str, tell: Callable[[], None]) -> None:
    """Call ``tell`` once ``method`` of ``iterator`` and the rest of the job draw in turns.

    That is, from one source of random numbers. Before the first batch, while ``count``, an
    attribute of the iterator, is 0, anybody may have drawn.
    """
    iterator.__class__ = _watched(type(iterator), method, count)
    iterator.tell = tell
    iterator.drawn_by_others = set()
    iterator.last_numbers = None


@cache
def _watched(cls: type, method: str, count: str) -> type:
    class Watched(cls):
        tell: Callable[[], None] | None = None

    def look(self: Iterator) -> object:
        call = getattr(super(Watched, self), method)
        if self.tell is None:
            return call()
        if getattr(self, count) == 0:
            self.drawn_by_others = set()
            self.last_numbers = None
        before = numbers_of_host()
        if self.last_numbers is not None:
            self.drawn_by_others |= drawn_between(self.last_numbers, before)
        found = call()
        self.last_numbers = numbers_of_host()
        if self.drawn_by_others & drawn_between(before, self.last_numbers):
            self.tell()
            self.tell = None
        return found

    setattr(Watched, method, look)
    _take_names(Watched, cls)
    return Watched
