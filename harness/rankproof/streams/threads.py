"""Threads: what one knew when it gave something, whoever takes that will know.

What is given carries the giver's clock in its ``order_clock``: a thread that starts, a future, a
``threading.Event``, a ``queue.Queue``.
"""

import concurrent.futures
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from rankproof.imports import called_by_recipe
from rankproof.streams.lanes import Clock, join
from rankproof.streams.operators import OrderMode
from rankproof.streams.recorder import Recorder

GIVES = (
    (Future, "set_result"),
    (Future, "set_exception"),
    (threading.Event, "set"),
    (queue.Queue, "put"),
)
TAKES = (
    (Future, "result"),
    (Future, "exception"),
    (threading.Thread, "join"),
    (queue.Queue, "get"),
)


def clock_of(carrier: object) -> Clock:
    return getattr(carrier, "order_clock", {})


class Handovers:
    """What stands around the methods by which threads give and take."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def watch(self) -> None:
        recorder = self.recorder
        recorder.replace(ThreadPoolExecutor, "submit", self.submit_knowing(ThreadPoolExecutor))
        recorder.watch(threading.Thread, "start", self.start)
        recorder.watch(concurrent.futures, "wait", after=self.waited_for_some)
        recorder.watch(Future, "done", after=self.asked_if_done)
        for owner, name in GIVES:
            recorder.watch(owner, name, self.give)
        for name in ("wait", "is_set"):
            recorder.watch(threading.Event, name, after=self.take_if_set)
        for owner, name in TAKES:
            recorder.watch(owner, name, after=self.take)

    def give(self, carrier: object, *_: object, **__: object) -> None:
        thread = self.recorder.this_thread()
        with self.recorder.lock:
            clock = carrier.__dict__.setdefault("order_clock", {})
            join(clock, thread.clock)
            if isinstance(carrier, Future):
                join(clock, thread.heard)

    def take(self, _: object, carrier: object, *__: object, **___: object) -> None:
        self.recorder.this_thread().learn(clock_of(carrier))

    def take_if_set(self, is_set: bool, event: threading.Event, *_: object, **__: object) -> None:
        if is_set:
            self.take(None, event)

    def waited_for_some(self, result: object, *_: object, **__: object) -> None:
        for future in getattr(result, "done", ()):
            self.take(None, future)

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
            line = submitter.line()

            def work(*args, **kwargs):
                worker = recorder.this_thread()
                worker.learn(clock)
                worker.origin = line
                return fn(*args, **kwargs)

            return plain_submit(pool, work, *args, **kwargs)

        return submit
