# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/writing.py
"""The thread that writes: one save after the other, each committed when all ranks have written."""

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

import torch

from .state import (
    REPLICAS_DIFFER,
    DifferingRanks,
    Replicas,
    differing_names,
    is_staged,
    parts_of_contents,
    refuse_differing,
    walk,
)
from .talk import Talk

LOG = logging.getLogger(__name__)
_FEWEST_THREADS = 2  # that write, unless a save comes before the one before it is written


class Sink(Protocol):
    """A file that is being written: a context manager, at whose end the storage has the file.

    If the block raises, there is no file, or one that nobody takes for whole.
    """

    def __enter__(self) -> "Sink": ...

    def __exit__(self, kind: object, error: object, trace: object) -> None: ...

    def write(self, nbytes: int, buffers: Sequence) -> None:
        """Add ``buffers``, which have so many bytes together and stay as they are in the block."""

    def described(self) -> dict[str, object]:
        """What a manifest says of the file: bytes and digests. Behind the block."""


class Target(Protocol):
    """Where one save of all ranks goes; trainers and exports bring their own.

    The thread that writes calls it. If a rank fails, all learn of it after each step.

    Attributes:
        name: what is saved, for messages; the same on all ranks.
        place: where this save is written until it is complete, a path or a URL.
    """

    name: str
    place: str

    def begin(self, nbytes: int) -> str:
        """On rank 0, before anything is written: refuse, or make room; return the place."""

    def join(self, place: str) -> None:
        """On all ranks: write to ``place``, which rank 0 has made."""

    def create(self, name: str) -> Sink:
        """Begin the file ``name``, which no other rank writes."""

    def finish(self, rank: int, ranks: int) -> dict[str, int]:
        """On all ranks, when this one has written its files: their names and sizes."""

    def commit(self, files: dict[str, int]) -> None:
        """On rank 0, when all ranks have finished: give the save its name.

        Args:
            files: what all ranks have written.
        """

    def abort(self) -> None:
        """On rank 0, when the save has failed before its commit, and no rank writes any more."""


class Writer(Protocol):
    """What is written of a state that lies in host memory. All ranks call each method."""

    def prepare(self, state: dict, talk: Talk) -> None:
        """Plan what ``write`` will write of such a state."""

    def write(self, state: dict, target: Target, talk: Talk, threads: int) -> None:
        """Write this rank's part of ``state`` with so many threads."""

    def forget(self) -> None:
        """Hold the memory of no state."""


@dataclass
class Job:
    """One save, for the thread that writes.

    Attributes:
        number: how many saves this rank has called.
        state: as it was passed, and then, when ``begin`` has waited, as it was staged.
        tensors, hosts: of the state, and what is staged of them.
        copied: an event: all is staged.
        may_be_dropped: on rank 0, from when the target has made its place to its commit.
        error: why there is nothing to write; the other ranks are told.
        compared: done when ranks have compared what they share; it raises if they differ.
        done: what ``save`` has returned.
        call_s: how long ``save`` kept the training thread.
    """

    number: int
    target: Target
    state: object = None
    tensors: list[torch.Tensor] = field(default_factory=list)
    hosts: list[torch.Tensor] = field(default_factory=list)
    copied: object = None
    may_be_dropped: bool = False
    error: BaseException | None = None
    compared: Future = field(default_factory=Future)
    done: Future = field(default_factory=Future)
    call_s: float = 0.0


@dataclass(frozen=True)
class Begun:
    """What a rank tells when it begins to write: ``place`` is told by rank 0."""

    number: int
    name: str
    place: str


class Writing:
    """Writes saves on a thread of its own.

    Args:
        device: of the copies that it waits for.
        talk: with the writing threads of the other ranks.
        writer: what is written of a state.
        shared: returns digests, by name, of what must be equal on all ranks.
        advice: for the message where that is not.

    Attributes:
        threads: that write at a time.
        failures: of saves, in order.
        replicas: what several ranks have of the latest layout; None if there is one rank.
        told: names of what ranks have otherwise and may, of which a warning has told.
        is_abandoned: training has ended by an exception: no more saves come.
    """

    def __init__(
        self,
        device: torch.device,
        talk: Talk,
        writer: Writer,
        shared: Callable[[dict], dict[str, str]],
        advice: str,
    ) -> None:
        self.device = device
        self.talk = talk
        self.writer = writer
        self.shared = shared
        self.advice = advice
        self.threads = _FEWEST_THREADS
        self.failures: list[BaseException] = []
        self.replicas: Replicas | None = None
        self.told: set[str] = set()
        self.is_abandoned = False
        self.tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.thread: Thread | None = None

    def start(self) -> None:
        self.thread = Thread(target=self.do_in_turn, name="write", daemon=True)
        self.thread.start()

    def put(self, task: Callable[[], None]) -> None:
        """Have ``task`` called when those before it have ended."""
        self.tasks.put(task)

    def end(self, timeout: float | None) -> bool:
        """Take no more tasks; return whether all have ended in so many seconds."""
        self.tasks.put(None)
        self.thread.join(timeout)
        return not self.thread.is_alive()

    def do_in_turn(self) -> None:
        # A new thread would open a context on the first device.
        torch.get_device_module(self.device).set_device(self.device)
        for task in iter(self.tasks.get, None):
            task()
            del task  # which holds the host tensors of a plan

    def write(self, job: Job) -> None:
        """Write one state where nobody takes it for a checkpoint; commit it when it is complete."""
        target = job.target
        began = time.monotonic()
        try:
            told = self.talk.together(self.begin, job)
            if len({(begun.number, begun.name) for begun in told}) > 1:
                raise RuntimeError(f"the ranks have called save for others than {target.name}")
            self.compare(job)
            copied = time.monotonic()
            files: dict[str, int] = {}
            for of_rank in self.talk.together(self.write_files, job, told[0].place):
                files.update(of_rank)
            job.may_be_dropped = False  # a commit that fails may have named it
            self.talk.on_first_rank(target.commit, files)
            LOG.info(
                "%s: the call took %.3f s, staged in %.2f s, written in %.2f s",
                target.name,
                job.call_s,
                copied - began,
                time.monotonic() - copied,
            )
            job.done.set_result(target.name)
        except BaseException as failure:  # CheckpointException is no Exception
            LOG.error("no checkpoint in %s: %s", target.name, failure)
            if job.may_be_dropped:
                drop(target)
            if not job.compared.done():
                job.compared.set_result(None)
            self.failures.append(failure)
            job.done.set_exception(failure)

    def begin(self, job: Job) -> Begun:
        """Wait for the copies. Until then this thread leaves the interpreter to the training."""
        if job.error is not None:
            raise job.error
        job.copied.synchronize()
        job.state = staged(job.state, job.tensors, job.hosts)
        place = ""
        if self.talk.rank == 0:
            place = job.target.begin(_bytes_of_whole(job.state))
            job.may_be_dropped = True
        return Begun(job.number, job.target.name, place)

    def compare(self, job: Job) -> None:
        """Raise on all ranks if they differ in what they share."""
        look = partial(self.look, job)
        look_closer = partial(self.look_closer, job)
        try:
            differ = refuse_differing(self.talk.together, look, look_closer, self.advice)
        except DifferingRanks as error:
            job.compared.set_exception(error)
            raise
        job.compared.set_result(None)
        if self.replicas is not None and (differ or job.number == 1):
            of_ranks = self.talk.together(self.replicas.parts, job.number, False)
            differing = dict.fromkeys(name for _, name, _ in differing_names(of_ranks))
            untold = [name for name in differing if name not in self.told]
            self.told.update(untold)
            if untold and self.talk.rank == 0:
                LOG.warning(REPLICAS_DIFFER, ", ".join(untold))

    def look(self, job: Job) -> dict[str, str]:
        """Digests of what must be equal on all ranks."""
        found = self.shared(job.state)
        if self.talk.ranks == 1:
            return found
        if self.replicas is None or self.replicas.hosts is not job.hosts:
            with garbage_collection_paused():
                self.replicas = Replicas(job.state, job.hosts)
        return found | self.replicas.digest(job.number, self.told)

    def look_closer(self, job: Job, names: list[str]) -> dict:
        """Digests of the parts of ``names``, which differ."""
        found = parts_of_contents(job.state, names)
        if self.replicas is not None:
            found |= self.replicas.parts_among(job.number, names)
        return found

    def write_files(self, job: Job, place: str) -> dict[str, int]:
        """Write this rank's files; return their names and sizes."""
        job.target.join(place)
        self.writer.write(job.state, job.target, self.talk, self.threads)
        return job.target.finish(self.talk.rank, self.talk.ranks)


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Leave cycles uncollected in all threads.

    A plan is tens of thousands of objects, which set off two or three full collections: each stops
    the training thread, too, for .2 to .3 s.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def drop(target: Target) -> None:
    """Abort ``target``; if that fails, the thread that writes still ends this save."""
    try:
        target.abort()
    except Exception as error:
        LOG.error("%s is left unfinished: %s", target.name, error)


def staged(state: object, tensors: list[torch.Tensor], hosts: list[torch.Tensor]) -> object:
    """``state`` with ``hosts`` in the place of ``tensors``."""
    host_of = dict(zip(map(id, tensors), hosts, strict=True))

    def in_place_of(leaf: object) -> object:
        return host_of[id(leaf)] if is_staged(leaf) else leaf

    return walk(state, in_place_of)


def _bytes_of_whole(state: object) -> int:
    """Bytes that a checkpoint has of the tensors in nested dicts and lists.

    A DTensor counts with the shards of all ranks, and any other tensor once, since one rank writes
    it. What only other ranks hold, as in a pipeline, does not count.
    """
    if isinstance(state, dict):
        return sum(_bytes_of_whole(value) for value in state.values())
    if isinstance(state, list | tuple):
        return sum(_bytes_of_whole(value) for value in state)
    if torch.is_tensor(state):
        return state.shape.numel() * state.dtype.itemsize  # a DTensor has the shape of the whole
    return 0
