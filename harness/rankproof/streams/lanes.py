"""Lanes and their clocks: the streams, events and threads that stand in for those of ``torch.cpu``.

A *lane* runs its operators in order: a stream is one, and so is a thread. Operators of a lane are
numbered. A *clock* says, for each lane, up to which number its operators are known to be complete:
what is in the clock of a lane happens before the lane's next operator. Who waits for something
joins its clock into the own.
"""

import contextlib
import threading
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from rankproof.streams.lines import Line

if TYPE_CHECKING:
    from rankproof.streams.recorder import Recorder

Clock = dict[int, int]  # lane -> number of its accesses that are complete

RECORDERS: list["Recorder"] = []  # the last one is in force


def join(into: Clock, other: Clock) -> None:
    """Have ``into`` know what ``other`` knows."""
    for lane, time in other.items():
        if time > into.get(lane, 0):
            into[lane] = time


class Awaited:
    """What a host thread can wait for: the ``clock`` of a lane, or of a point in one."""

    recorder: "Recorder"
    clock: Clock

    def synchronize(self) -> None:
        self.recorder.this_thread().learn(self.clock)

    def query(self) -> bool:
        """True: nothing is ever pending here, and the caller knows it from now on."""
        self.synchronize()
        return True


class Stream(Awaited):
    """A lane that operators run on in order. Same methods as a CUDA stream."""

    device = torch.device("cpu")

    def __init__(
        self,
        device=None,
        priority: int = -1,
        *,
        recorder: "Recorder | None" = None,
        name: str = "",
    ) -> None:
        self.recorder = recorder or RECORDERS[-1]
        self.lane = next(self.recorder.lanes)
        self.clock: Clock = {self.lane: 0}
        self.name = name or f"the stream made at {Line()}"
        if recorder is None:
            self.recorder.streams.append(self)

    @property
    def stream_id(self) -> int:
        return self.lane

    def launch(self, host: "HostThread") -> None:
        """Begin an operator: after all before it on this lane and all that ``host`` knows."""
        join(self.clock, host.clock)
        self.clock[self.lane] += 1

    def learn(self, clock: Clock) -> None:
        """What follows on this lane comes after all that ``clock`` names."""
        with self.recorder.lock:
            join(self.clock, clock)

    def wait_event(self, event: Awaited | None) -> None:
        if event is not None:
            self.learn(event.clock)

    wait_stream = wait_event

    def __enter__(self) -> "Stream":
        thread = self.recorder.this_thread()
        thread.entered.append(thread.current)
        thread.current = self
        return self

    def __exit__(self, *_: object) -> None:
        thread = self.recorder.this_thread()
        thread.current = thread.entered.pop()

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event


@dataclass
class Collective:
    """A collective that a thread has issued."""

    lane: Stream
    name: str  # "all_reduce"
    only_reads: bool
    blocks_host: bool  # whether the host thread that waits for it knows it to be complete
    waited: bool = False


class HostThread(Stream):
    """What one thread knows to be complete; off the main thread also the lane it works in."""

    def __init__(self, recorder: "Recorder", thread: threading.Thread | None) -> None:
        # threading.current_thread() would register a dummy for a thread that is just starting
        self.is_main = threading.get_ident() == threading.main_thread().ident
        super().__init__(recorder=recorder, name=f"thread {self.name_of(thread)}")
        self.origin = getattr(thread, "order_origin", "")
        join(self.clock, getattr(thread, "order_clock", {}))
        self.current: Stream = recorder.default_stream if self.is_main else self
        self.entered: list[Stream] = []
        self.makes_host_values = False
        self.collective: Collective | None = None  # that it issues or waits for
        self.in_comm_hook = False
        # What others had queued on the default stream when they gave it something.
        self.queued: Clock = dict(getattr(thread, "order_queued", {}))
        self.copies_in_turn = False  # blocking, and on the default stream: see ``stagers``
        self.heard: Clock = {}  # of futures that a library found done: told on, but not known

    def learn(self, clock: Clock) -> None:
        with self.recorder.lock:
            super().learn(clock)
            join(self.recorder.waited_for, clock)

    def name_of(self, thread: threading.Thread | None) -> str:
        if self.is_main:
            return "main"
        return thread.name if thread else str(threading.get_ident())

    def launch(self, host: "HostThread") -> None:
        self.clock[self.lane] += 1

    def has_queued(self) -> Clock:
        """What it knows to be queued on the default stream, complete or not."""
        known = dict(self.queued)
        if self.current is self.recorder.default_stream:
            join(known, self.current.clock)
        return known

    def is_told_of(self, queued: Clock) -> None:
        with self.recorder.lock:
            join(self.queued, queued)

    def wait_for_current_stream(self) -> None:
        """As a device's memory is waited for that is copied or saved.

        Another thread that has entered no stream waits for the default stream: for what was queued
        there before it was told of it.
        """
        self.learn(self.queued if self.current is self else self.current.clock)

    def line(self) -> Line:
        """The line that this thread runs."""
        return Line(self.origin)


class Event(Awaited):
    """A point in a lane. Same methods as a CUDA event; the time is that of the calls."""

    def __init__(self, *_: object, **__: object) -> None:
        self.recorder = RECORDERS[-1]
        self.clock: Clock = {}
        self.recorded_s = 0.0

    def elapsed_time(self, end: "Event") -> float:
        return (end.recorded_s - self.recorded_s) * 1000

    def record(self, stream: Stream | None = None) -> None:
        host = self.recorder.this_thread()
        stream = stream or host.current
        self.recorded_s = perf_counter()
        with self.recorder.lock:
            self.clock = dict(stream.clock)
            join(self.clock, host.clock)

    def wait(self, stream: Stream | None = None) -> None:
        stream = stream or self.recorder.this_thread().current
        stream.wait_event(self)


def current_stream(device=None) -> Stream:
    return RECORDERS[-1].this_thread().current


def stream(chosen: Stream | None) -> contextlib.AbstractContextManager:
    """Make ``chosen`` the current stream of this thread."""
    return chosen or contextlib.nullcontext()


def synchronize(device=None) -> None:
    """Wait for every stream, and for the collectives, which run on streams as well."""
    recorder = RECORDERS[-1]
    for lane in (*recorder.streams, *recorder.collective_lanes):
        recorder.this_thread().learn(lane.clock)


def stand_in(recorder: "Recorder") -> None:
    """Have these classes and functions stand for those of ``torch.cpu`` and ``torch``."""
    for by in (Stream, Event, stream, current_stream, synchronize):
        recorder.replace(torch.cpu, by.__name__, by)
    for by in (Stream, Event):
        recorder.replace(torch, by.__name__, by)
