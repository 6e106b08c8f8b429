"""The recorder: takes every access, compares it with those before it, and keeps the conflicts."""

import contextlib
import itertools
import os
import threading
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from rankproof.imports import around
from rankproof.protocol import OrderRecord
from rankproof.streams.accesses import Access, Conflict, Place, conflict_of, place_of
from rankproof.streams.lanes import RECORDERS, Clock, Collective, HostThread, Stream, join
from rankproof.streams.lines import Line
from rankproof.streams.memory import Memory, Region, pages_of

MOST_CONFLICTS = 20
FREED = ", memory freed since"  # told of an operator


def is_seen(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has bytes of the CPU that a range can name."""
    return tensor.is_cpu and tensor.layout is torch.strided and tensor.numel() > 0


def resize_of(region: Region, nbytes: int, lane: Stream, line: Line) -> Access:
    """The write of the first ``nbytes`` of ``region`` by ``resize_``."""
    place = (region.start, ((0, nbytes),))
    return Access("resize_", True, line, lane, lane.clock[lane.lane], place)


def call_as_found(owner: Any, name: str) -> None:
    """Have what stands for ``owner.name`` be pickled as that."""
    stand_in = getattr(owner, name)
    if isinstance(stand_in, types.FunctionType):
        is_class = isinstance(owner, type)
        stand_in.__module__ = owner.__module__ if is_class else owner.__name__
        stand_in.__qualname__ = f"{owner.__qualname__}.{name}" if is_class else name


class Recorder:
    """The lanes and threads, the memory they touched, and the conflicts found."""

    def __init__(self) -> None:
        self.conflicts: list[Conflict] = []
        self.count = 0
        self.lock = threading.RLock()
        self.makes_operator = threading.RLock()
        self.is_forked = False
        self.is_shielded = False
        self.lanes = itertools.count(1)
        self.memory = Memory(when_freed=self.free)
        self.threads = threading.local()
        self.default_stream = Stream(recorder=self, name="the default stream")
        self.streams = [self.default_stream]
        self.waited_for: Clock = {}  # by any thread
        self.collectives = 0  # asynchronous ones
        self.copies = 0  # between the host and a device, that need not wait
        self.collective_lanes: list[Stream] = []
        self.freed: dict[tuple[int, int], list[list[Access]]] = {}  # by lane and bytes
        self.undo = contextlib.ExitStack()

    def watch(self, owner: Any, name: str, *args: Any, **kwargs: Any) -> None:
        """:func:`rankproof.imports.around`, until the end."""
        self.undo.callback(around(owner, name, *args, **kwargs))
        call_as_found(owner, name)

    def replace(self, owner: Any, name: str, by: object) -> None:
        """Have ``by`` stand for ``owner.name`` until the end."""
        self.undo.enter_context(mock.patch.object(owner, name, by))
        call_as_found(owner, name)

    def begin_in_fork(self) -> None:
        """Nothing is recorded in a forked process, whose locks threads may hold that it has not."""
        self.lock = threading.RLock()
        self.makes_operator = threading.RLock()
        self.is_forked = True
        self.memory.forget_all()
        self.memory = Memory(when_freed=self.free)
        self.freed = {}

    def end(self) -> None:
        RECORDERS.remove(self)
        self.memory.forget_all()

    # Threads

    def this_thread(self) -> HostThread:
        try:
            return self.threads.state
        except AttributeError:
            self.enter_thread()
            return self.threads.state

    def enter_thread(self, thread: threading.Thread | None = None) -> None:
        """Begin this thread's lane; ``thread`` is its object, if it was started while recording."""
        self.threads.state = HostThread(self, thread)

    # Accesses

    def access(
        self,
        operator: str,
        tensor: torch.Tensor,
        writes: bool,
        on: Stream,
        line: Line,
        collective: Collective | None = None,
        arrives: bool = False,
    ) -> None:
        """Note that ``operator``, running on ``on`` now, reads or writes ``tensor``."""
        if not is_seen(tensor) or self.is_forked:
            return
        with self.lock:
            time = on.clock[on.lane]
            place = place_of(tensor)
            access = Access(operator, writes, line, on, time, place, collective, arrives)
            self.touch(self.region_of(tensor), access)

    def touch(self, region: Region, access: Access) -> None:
        """``access``, which begins now, is to ``region``: what conflicts with it is kept."""
        self.count += 1
        for earlier in region.add(access):
            self.compare(earlier, access)
        for other in region.aliases:
            if other.alive():
                for earlier in other.accesses:
                    if not earlier.before(access.on.clock):
                        self.compare(earlier, access)

    def read_at(self, operator: str, start: int, nbytes: int, on: Stream, line: Line) -> None:
        """Note that ``operator`` reads memory by its address, whichever tensors lie there."""
        end = start + nbytes
        with self.lock:
            place = (start, ((0, nbytes),))
            access = Access(operator, False, line, on, on.clock[on.lane], place)
            for region in self.memory.overlapping(start, end, pages_of(start, end)):
                self.count += 1
                for earlier in region.add(access):
                    self.compare(earlier, access)

    def compare(self, earlier: Access, later: Access) -> None:
        """Keep the first conflict of each two lines, of which nothing orders the accesses."""
        conflict = conflict_of(earlier, later)
        if conflict is None:
            return
        lines = (conflict.earlier.where, conflict.later.where)
        known = {(other.earlier.where, other.later.where) for other in self.conflicts}
        if lines not in known and len(self.conflicts) < MOST_CONFLICTS:
            self.conflicts.append(conflict)

    # Memory

    def region_of(self, tensor: torch.Tensor) -> Region:
        return self.memory.region_of(tensor.untyped_storage())

    def seen(self, tensor: torch.Tensor) -> tuple[Region, Place] | None:
        """The memory of a strided ``tensor`` and which bytes of it; None if it has none here."""
        nbytes = tensor.nbytes
        if not nbytes:
            return None
        storage = tensor.untyped_storage()
        region = self.memory.known(storage)
        if region is None:
            if not tensor.is_cpu:
                return None
            region = self.memory.region_of(storage)
        if nbytes == region.nbytes and tensor.is_contiguous():
            return region, region.whole
        return region, place_of(tensor)

    def is_read_by_host(self, tensor: torch.Tensor) -> bool:
        """Whether Python reads ``tensor`` as it is by now: a device's it would wait for.

        What a copy that need not wait has brought lies in host memory, whoever made that.
        """
        if not is_seen(tensor):
            return False
        region = self.region_of(tensor)
        return region.on_host or region.arrives_in(place_of(tensor))

    def allocated(self, region: Region, on: Stream) -> None:
        """Note that ``region`` is new on ``on``: there it may be what was freed last.

        A caching allocator gives a freed block to the next of its size on the same stream, whoever
        else still uses it. Addresses here are another matter, so the accesses that were pending
        when a block was freed are handed to the next block of its size. The caller has the lock.
        """
        region.home = on
        pending = self.freed.get((on.lane, region.nbytes)) if self.freed else None
        if pending:
            for access in pending.pop():
                region.accesses.append(access._replace(place=region.whole))

    @contextlib.contextmanager
    def resizing(self, storage: torch.UntypedStorage) -> Iterator[None]:
        """A storage that ``resize_`` moves gives its memory back, in the order of the current lane.

        What it keeps is read there before, and written to other memory. That is other memory even
        where the CPU gives the same address again: a caching allocator may take it from another
        stream's pool.
        """
        if storage.device.type != "cpu" or not storage.nbytes():
            yield
            return
        with self.lock:
            region = self.memory.region_of(storage)
        yield
        if storage.nbytes() == region.nbytes:
            return
        thread = self.this_thread()
        lane = thread if region.on_host else thread.current
        with self.lock:
            lane.launch(thread)
            self.touch(region, resize_of(region, region.nbytes, lane, thread.line()))
            region.home = None  # given back, in order, now
            self.memory.forget(region)
            kept = min(region.nbytes, storage.nbytes())
            if kept:
                moved = self.memory.region_of(storage)
                moved.home = lane
                moved.on_host = region.on_host
                moved.add(resize_of(moved, kept, lane, thread.line()))

    def free(self, region: Region) -> None:
        """The last reference to ``region`` is gone: keep what its home stream does not wait for.

        Any thread may let go last; what another has waited for is complete by then.
        """
        home = region.home
        if self not in RECORDERS or home is None or isinstance(home, HostThread) or region.on_host:
            return
        for access in region.accesses:
            if access.on is not home:
                break
        else:
            return
        with self.lock:
            known = dict(home.clock)
            join(known, self.this_thread().clock)
            pending = []
            for access in region.accesses:
                ordered = access.on is home or access.before(known)
                has_returned = isinstance(access.on, HostThread)
                is_kept = access.awaits_wait()  # its process group holds on to the memory
                was_waited_for = access.before(self.waited_for)
                is_named = access.on.lane in region.used_by
                if not (ordered or has_returned or was_waited_for or is_kept or is_named):
                    operator = access.operator.removesuffix(FREED) + FREED
                    pending.append(access._replace(operator=operator))
            if pending:
                self.freed.setdefault((home.lane, region.nbytes), []).append(pending)

    def report(self) -> OrderRecord:
        """What was found, for a rank's record."""
        unordered = [str(conflict) for conflict in self.conflicts if not conflict.before_wait]
        early = [str(conflict) for conflict in self.conflicts if conflict.before_wait]
        return OrderRecord(
            conflicts=unordered,
            used_before_wait=early,
            async_collectives=self.collectives,
            copies=self.copies,
            streams=len(self.streams) - 1,
            accesses=self.count,
        )


def begin_in_fork() -> None:
    for recorder in RECORDERS:
        recorder.begin_in_fork()


os.register_at_fork(after_in_child=begin_in_fork)
