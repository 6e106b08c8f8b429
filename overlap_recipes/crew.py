# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/crew.py
"""Threads that share a list of jobs; a job that never ends is an error, too."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread

import torch

PATIENCE_S = 300.0  # that all threads together may go without an end of a job


@dataclass
class _Shared:
    """What the threads of one call have in common.

    Attributes:
        left: jobs that nobody has taken.
        ended: for each job that has ended None, for each thread its error or itself.
        doing: by thread, its job.
    """

    left: deque
    ended: SimpleQueue = field(default_factory=SimpleQueue)
    doing: dict[int, object] = field(default_factory=dict)


def share(
    jobs: Iterable,
    threads: int,
    worker: Callable[[], Callable[[object], None]],
    name_of: Callable[[object], str],
) -> None:
    """Do ``jobs`` on at most so many threads.

    Args:
        worker: called on each thread; returns what is called with each job.
        name_of: what a job reads, for the message of a stall.

    Raises:
        TimeoutError: no job has ended for ``PATIENCE_S`` seconds.
        BaseException: the first error of a job. Jobs that have begun end before it is raised.
    """
    shared = _Shared(deque(jobs))
    crew: list[Thread] = []
    inference = torch.is_inference_mode_enabled()
    for number in range(min(threads, len(shared.left))):
        member = (shared, number, worker, inference)
        thread = Thread(target=work, args=member, name="load", daemon=True)
        thread.start()
        crew.append(thread)
    error = None
    at_work = len(crew)
    try:
        while at_work:
            said = _next_of(shared, name_of)
            if isinstance(said, BaseException):
                error = error or said
                shared.left.clear()
            if said is not None:
                at_work -= 1
    finally:
        shared.left.clear()
    if error is not None:
        raise error


def _next_of(shared: _Shared, name_of: Callable[[object], str]) -> object:
    try:
        return shared.ended.get(timeout=PATIENCE_S)
    except Empty:
        names = sorted({name_of(job) for job in shared.doing.values()})
        raise TimeoutError(
            f"the storage has given nothing for {PATIENCE_S:.0f} s: {', '.join(names)}"
        ) from None


def work(shared: _Shared, number: int, worker: Callable, inference: bool) -> None:
    said: object = number
    try:
        with torch.inference_mode(inference):
            do = worker()
            while True:
                try:
                    job = shared.left.popleft()
                except IndexError:
                    break
                shared.doing[number] = job
                do(job)
                del shared.doing[number]
                shared.ended.put(None)
    except BaseException as error:
        said = error
    shared.ended.put(said)
