"""Threads: what one knew when it gave something, whoever takes that will know.

What is given carries the giver's clock in its ``order_clock``: a thread that starts, a future, a
``threading.Event``, a ``threading.Barrier``. A ``queue.Queue`` has a clock for each item. So it is
with what the giver has queued on the default stream, in ``order_queued``: the taker waits for that
where it copies or saves a device's memory in no stream of its own.
"""

import concurrent.futures
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import wraps

from rankproof.imports import called_by_recipe
from rankproof.streams.lanes import Clock, join
from rankproof.streams.operators import OrderMode
from rankproof.streams.recorder import Recorder
from rankproof.streams.stagers import is_of_a_stager_in_turn

GIVES = (
    (Future, "set_result"),
    (Future, "set_exception"),
    (threading.Event, "set"),
)
TAKES = (
    (Future, "result"),
    (Future, "exception"),
    (threading.Thread, "join"),
)


def clock_of(carrier: object) -> Clock:
    return getattr(carrier, "order_clock", {})


def queued_of(carrier: object) -> Clock:
    return getattr(carrier, "order_queued", {})


def clocks_of_items(items: queue.Queue) -> list[tuple[int, Clock, Clock]]:
    """Of each item in a queue its address, and what its putter knew and had queued, in order."""
    return items.__dict__.setdefault("order_clocks", [])


class Handovers:
    """What stands around the methods by which threads give and take."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def watch(self) -> None:
        recorder = self.recorder
        recorder.replace(ThreadPoolExecutor, "submit", self.submit_knowing(ThreadPoolExecutor))
        recorder.watch(threading.Thread, "start", self.start)
        recorder.watch(concurrent.futures, "wait", after=self.waited_for_some)
        recorder.replace(concurrent.futures, "as_completed", self.completed_knowing())
        recorder.watch(Future, "done", after=self.asked_if_done)
        for owner, name in GIVES:
            recorder.watch(owner, name, self.give)
        for name in ("wait", "is_set"):
            recorder.watch(threading.Event, name, after=self.take_if_set)
        for owner, name in TAKES:
            recorder.watch(owner, name, after=self.take)
        # All of the last round have left then, and none of this round has:
        recorder.watch(threading.Barrier, "_enter", after=self.entered)
        recorder.watch(threading.Barrier, "_exit", after=self.take)
        recorder.replace(queue.Queue, "put", self.put_knowing())
        recorder.replace(queue.Queue, "get", self.get_knowing())
        recorder.watch(queue.Queue, "task_done", self.done_with_one)
        recorder.watch(queue.Queue, "join", after=self.done_with_all)

    def give(self, carrier: object, *_: object, **__: object) -> None:
        thread = self.recorder.this_thread()
        with self.recorder.lock:
            clock = carrier.__dict__.setdefault("order_clock", {})
            join(clock, thread.clock)
            join(carrier.__dict__.setdefault("order_queued", {}), thread.has_queued())
            if isinstance(carrier, Future):
                join(clock, thread.heard)

    def take(self, _: object, carrier: object, *__: object, **___: object) -> None:
        thread = self.recorder.this_thread()
        thread.learn(clock_of(carrier))
        thread.is_told_of(queued_of(carrier))

    def take_if_set(self, is_set: bool, event: threading.Event, *_: object, **__: object) -> None:
        if is_set:
            self.take(None, event)

    def entered(self, _: object, barrier: threading.Barrier) -> None:
        self.give(barrier)

    def put_knowing(self) -> Callable[..., None]:
        """A ``put`` whose item knows what its putter knew."""
        recorder = self.recorder
        plain_put = queue.Queue.put

        @wraps(plain_put)
        def put(target, item, *args, **kwargs):
            thread = recorder.this_thread()
            known = (id(item), dict(thread.clock), thread.has_queued())
            with recorder.lock:
                clocks_of_items(target).append(known)
            try:
                plain_put(target, item, *args, **kwargs)
            except BaseException:  # it is in the queue of nobody
                with recorder.lock:
                    clocks_of_items(target).remove(known)
                raise

        return put

    def get_knowing(self) -> Callable[..., object]:
        """A ``get`` whose caller learns what the putter of that item knew."""
        recorder = self.recorder
        plain_get = queue.Queue.get

        @wraps(plain_get)
        def get(source, *args, **kwargs):
            item = plain_get(source, *args, **kwargs)
            with recorder.lock:
                for known in clocks_of_items(source):
                    if known[0] == id(item):
                        clocks_of_items(source).remove(known)
                        recorder.this_thread().learn(known[1])
                        recorder.this_thread().is_told_of(known[2])
                        break
            return item

        return get

    def done_with_one(self, source: queue.Queue) -> None:
        self.give(source.all_tasks_done)

    def done_with_all(self, _: object, source: queue.Queue) -> None:
        self.take(None, source.all_tasks_done)

    def waited_for_some(self, result: object, *_: object, **__: object) -> None:
        for future in getattr(result, "done", ()):
            self.take(None, future)

    def completed_knowing(self) -> Callable[..., Iterator[Future]]:
        """An ``as_completed`` whose caller learns what the threads of done futures knew."""
        plain_as_completed = concurrent.futures.as_completed

        @wraps(plain_as_completed)
        def as_completed(*args, **kwargs):
            for future in plain_as_completed(*args, **kwargs):
                self.take(None, future)
                yield future

        return as_completed

    def asked_if_done(self, is_done: bool, future: Future) -> None:
        """The recipe's own code knows it from now on; a library only tells it on."""
        thread = self.recorder.this_thread()
        if is_done:
            with self.recorder.lock:
                known = thread.clock if called_by_recipe() else thread.heard
                join(known, clock_of(future))

    def start(self, thread: threading.Thread) -> None:
        thread.order_origin = self.recorder.this_thread().line()
        self.give(thread)
        run = thread.run

        def watched() -> None:
            self.recorder.enter_thread(thread)
            with OrderMode(self.recorder):
                try:
                    run()
                finally:
                    self.give(thread)

        thread.run = watched

    def submit_knowing(self, executor: type[ThreadPoolExecutor]) -> Callable[..., Future]:
        """A ``submit`` whose work item knows what its submitter knew."""
        recorder = self.recorder
        plain_submit = executor.submit

        def submit(pool, fn, /, *args, **kwargs):
            submitter = recorder.this_thread()
            clock = dict(submitter.clock)
            queued = submitter.has_queued()
            line = submitter.line()

            def work(*args, **kwargs):
                worker = recorder.this_thread()
                worker.learn(clock)
                worker.is_told_of(queued)
                worker.origin = line
                worker.copies_in_turn = is_of_a_stager_in_turn(fn)
                return fn(*args, **kwargs)

            return plain_submit(pool, work, *args, **kwargs)

        return submit
