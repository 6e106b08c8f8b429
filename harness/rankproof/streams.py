"""Stream order without a GPU: find accesses that no event, wait or synchronisation orders.

On a CPU, ``torch.cpu``'s streams and events do nothing: a program that forgot to wait for an event
computes the same bits as one that did not. :func:`recording` puts a recording device module in
their place and a ``TorchDispatchMode`` that sees every operator, and keeps *happens-before* by
vector clocks, the way a race detector does. Two accesses to the same bytes, one of them a write,
of which neither happens before the other, are a :class:`Conflict`. No timing is involved: an
order that is missing is found in every run, whether or not the bits came out right.

The model, which is that of a CUDA program:

* Every stream is a lane. An operator runs on the current stream of its thread; it starts after
  all that was launched on its lane, and after all that its thread knew to be complete at launch.
* ``event.record``, ``stream.wait_event``, ``wait_stream`` order lanes. ``event.synchronize``,
  ``stream.synchronize``, ``synchronize()``, and the recipe's own ``.item()`` and ``torch.equal``
  let the host thread know. Where torch itself calls ``.item()`` (Adam's step count, a mesh's
  coordinates), it reads a tensor that is in host memory on any machine, and waits for nothing.
* The main thread's current stream is the default stream. **Another thread has a lane of its own,
  in which its operators are complete when they return**, until it enters a stream: on a machine
  with a GPU such threads (staging, upload) work in host memory or on a stream of their own, and
  never in order with the default stream. ``current_stream()`` gives that lane, so a thread can
  make itself wait for an event. ``DefaultStager``'s thread, which has a stream of its own only
  where there is an accelerator, is judged here as it behaves there.
* Threads know what their starter, the submitter of their work item, a future, a ``threading.Event``
  or a ``queue.Queue`` they waited for knew. ``future.done()`` teaches only the recipe's own code;
  where a library asks, it teaches those who wait for the futures that this thread then completes.
  Locks and conditions order nothing here: a program that relies on them alone may be blamed
  wrongly.
* ``os.pwritev`` reads the memory of its buffers as it is by then, whichever tensors lie there.
* What ``torch.frombuffer`` maps is *host memory*, as page-locked memory is on any machine, and so
  is what is computed from it. An operator that touches host memory runs in its thread's own lane
  and is complete when it returns; a device's tensor in it came by ``.cpu()``, which waits for the
  current stream. ``copy_`` between host memory and other memory is a transfer: it is queued on the
  current stream, and the thread waits for it unless it is ``non_blocking``.
* Any other copy to the host cannot be told from one on the device and is queued like an operator,
  but those of the staging code of ``torch.distributed`` with ``non_blocking=False``: the thread
  waits for them.
* Collectives run on the lane that launches them. A collective whose ``Work`` is never waited for
  is not found.
* ``torch.save``, ``Tensor.numpy()`` and ``tolist()`` read their tensors on the calling thread.
* What ``torch.randn`` and the like make without a ``device`` is made by the host, as a batch is.
* Memory is given back, with the last reference to it, to the stream that allocated it, and goes to
  that stream's next allocation of its size, as a caching allocator would have it: what other lanes
  still do with it then conflicts. Giving it back by ``untyped_storage().resize_`` is a write of it
  on the current lane.
"""

import concurrent.futures
import contextlib
import ctypes
import itertools
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from rankproof.imports import around, called_by_recipe, frames, recipe_line

Clock = dict[int, int]  # lane -> number of its accesses that are complete
Range = tuple[int, int]  # first address, address behind the last

MOST_CONFLICTS = 20
MOST_RANGES = 1024  # of one strided tensor; beyond, its whole span counts as touched
PAGE_BITS = 20  # storages are looked up by the megabytes that they lie in

NO_ACCESS = ("empty", "new_empty", "set_", "resize_", "detach", "is_pinned", "wait_tensor")
HOST_WAITS = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero")
STAGING_FILES = ("_state_dict_utils.py", "_state_dict_stager.py")
UNANNOTATED = ("c10d", "fsdp")  # their schemas do not mark what is written

FACTORIES = ("tensor", "as_tensor", "from_numpy", "arange", "linspace", "eye", "full", "ones")
FACTORIES += ("zeros", "rand", "randn", "randint", "randperm")
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
TORCH = str(Path(torch.__file__).parent)
DISPATCHERS = tuple(f"{TORCH}/{name}" for name in ("_dynamo", "_compile.py", "utils/_"))


@dataclass(frozen=True)
class Access:
    """One operator's read or write of some bytes."""

    operator: str
    writes: bool
    where: str  # "recipe.py:120"
    on: "Stream"
    time: int
    ranges: tuple[Range, ...]

    def before(self, clock: Clock) -> bool:
        """Whether whoever knows ``clock`` comes after this access."""
        return self.time <= clock.get(self.on.lane, 0)

    def __str__(self) -> str:
        verb = "writes" if self.writes else "reads"
        return f"{self.where} {verb} ({self.operator}) on {self.on.name}"


@dataclass(frozen=True)
class Conflict:
    """Two accesses to the same bytes, at least one a write, that nothing orders."""

    earlier: Access
    later: Access
    nbytes: int

    def __str__(self) -> str:
        return (
            f"{self.later}, {self.earlier}: {self.nbytes} bytes in common, and no event, wait or "
            f"synchronisation orders the two"
        )


class Region:
    """The memory of one storage, as long as it stays where it is, and who touched it last."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.weak = StorageWeakRef(storage)
        self.start = storage.data_ptr()
        self.end = self.start + storage.nbytes()
        self.accesses: list[Access] = []
        self.home: Stream | None = None  # where it was allocated: what is freed goes back there
        self.aliases: list[Region] = []
        self.on_host = False  # host memory on any machine
        self.used_by: set[int] = set()  # lanes that record_stream names: freed behind their work

    def alive(self) -> bool:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.weak.cdata)
        return storage is not None and storage.data_ptr() == self.start

    def pages(self) -> range:
        return range(self.start >> PAGE_BITS, ((self.end - 1) >> PAGE_BITS) + 1)


class Recorder:
    """Clocks of all lanes and threads, the memory they touched, and the conflicts found."""

    def __init__(self) -> None:
        self.conflicts: list[Conflict] = []
        self.count = 0
        self.lock = threading.RLock()
        self.lanes = itertools.count(1)
        self.regions: dict[int, Region] = {}
        self.pages: dict[int, set[Region]] = {}
        self.threads = threading.local()
        self.default_stream = Stream(recorder=self, name="the default stream")
        self.streams = [self.default_stream]
        self.freed: dict[tuple[int, int], list[list[Access]]] = {}  # by lane and bytes
        self.undo = contextlib.ExitStack()

    def watch(self, *args: Any, **kwargs: Any) -> None:
        """:func:`rankproof.imports.around`, until the end."""
        self.undo.callback(around(*args, **kwargs))

    def replace(self, owner: object, name: str, by: object) -> None:
        """Have ``by`` stand for ``owner.name`` until the end."""
        self.undo.enter_context(mock.patch.object(owner, name, by))

    # Lanes and threads

    def this_thread(self) -> "HostThread":
        if not hasattr(self.threads, "state"):
            self.enter_thread()
        return self.threads.state

    def enter_thread(self, thread: threading.Thread | None = None) -> None:
        """Begin this thread's lane; ``thread`` is its object, if it was started while recording."""
        self.threads.state = HostThread(self, thread)

    # Accesses

    def access(self, operator: str, tensor: torch.Tensor, writes: bool, on: "Stream", where: str):
        """Note that ``operator``, running on ``on`` now, reads or writes ``tensor``."""
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.numel() == 0:
            return
        with self.lock:
            self.count += 1
            region = self.region_of(tensor.untyped_storage())
            access = Access(operator, writes, where, on, on.clock[on.lane], byte_ranges(tensor))
            others = [other.accesses for other in region.aliases if other.alive()]
            for earlier in itertools.chain(region.accesses, *others):
                self.compare(earlier, access)
            kept = [old for old in region.accesses if not superseded(old, access)]
            region.accesses = [*kept, access]

    def read_at(self, operator: str, start: int, nbytes: int, on: "Stream", where: str) -> None:
        """Note that ``operator`` reads memory by its address, whichever tensors lie there."""
        with self.lock:
            ranges = ((start, start + nbytes),)
            access = Access(operator, False, where, on, on.clock[on.lane], ranges)
            pages = range(start >> PAGE_BITS, ((start + nbytes - 1) >> PAGE_BITS) + 1)
            for region in set().union(*(self.pages.get(page, ()) for page in pages)):
                if region.alive() and region.start < start + nbytes and start < region.end:
                    self.count += 1
                    for earlier in region.accesses:
                        self.compare(earlier, access)
                    kept = [old for old in region.accesses if not superseded(old, access)]
                    region.accesses = [*kept, access]

    def compare(self, earlier: Access, later: Access) -> None:
        if not (earlier.writes or later.writes) or earlier.before(later.on.clock):
            return
        common = bytes_in_common(earlier.ranges, later.ranges)
        seen = {(c.earlier.where, c.later.where) for c in self.conflicts}
        new = common and (earlier.where, later.where) not in seen
        if new and len(self.conflicts) < MOST_CONFLICTS:
            self.conflicts.append(Conflict(earlier, later, common))

    def region_of(self, storage: torch.UntypedStorage) -> Region:
        region = self.regions.get(storage._cdata)
        if region is not None and region.start == storage.data_ptr() and region.alive():
            return region
        if region is not None:
            self.forget(region)
        region = Region(storage)
        weakref.finalize(storage, self.free, region).atexit = False
        neighbours = set().union(*(self.pages.get(page, ()) for page in region.pages()))
        for other in neighbours:
            if not other.alive():
                self.forget(other)
            elif other.start < region.end and region.start < other.end:
                region.aliases.append(other)
                other.aliases.append(region)
        self.regions[storage._cdata] = region
        for page in region.pages():
            self.pages.setdefault(page, set()).add(region)
        return region

    def allocated(self, tensor: torch.Tensor, on: "Stream") -> None:
        """Note that the memory of ``tensor`` is new on ``on``: there it may be what was freed last.

        A caching allocator gives a freed block to the next of its size on the same stream, whoever
        else still uses it. Addresses here are another matter, so the accesses that were pending
        when a block was freed are handed to the next block of its size.
        """
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.numel() == 0:
            return
        with self.lock:
            region = self.region_of(tensor.untyped_storage())
            region.home = on
            pending = self.freed.get((on.lane, region.end - region.start))
            if pending:
                whole = ((region.start, region.end),)
                region.accesses += [replace(access, ranges=whole) for access in pending.pop()]

    def free(self, region: Region) -> None:
        """The last reference to ``region`` is gone: keep what its home stream does not wait for."""
        home = region.home
        if self not in RECORDERS or home is None or isinstance(home, HostThread) or region.on_host:
            return
        with self.lock:
            clock = dict(home.clock)
            join(clock, self.this_thread().clock)
            pending = [
                replace(old, operator=f"{old.operator}, memory freed since")
                for old in region.accesses
                if not (old.on is home or isinstance(old.on, HostThread))  # those have returned
                and old.on.lane not in region.used_by
                and not old.before(clock)
            ]
            if pending:
                self.freed.setdefault((home.lane, region.end - region.start), []).append(pending)

    def on_host(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is in memory that the program mapped, or was computed there."""
        region = self.regions.get(tensor.untyped_storage()._cdata)
        return region is not None and region.on_host and region.alive()

    def report(self) -> dict:
        """What was found, for a rank's record."""
        return {
            "conflicts": [str(conflict) for conflict in self.conflicts],
            "streams": len(self.streams) - 1,
            "accesses": self.count,
        }

    def forget(self, region: Region) -> None:
        self.regions.pop(region.weak.cdata, None)
        for page in region.pages():
            self.pages.get(page, set()).discard(region)
        for other in region.aliases:
            other.aliases.remove(region)


def join(into: Clock, other: Clock) -> None:
    for lane, time in other.items():
        if time > into.get(lane, 0):
            into[lane] = time


def superseded(old: Access, new: Access) -> bool:
    """Whether all that must come after ``old`` must come after ``new`` anyway."""
    same = old.ranges == new.ranges and (new.writes or not old.writes)
    return same and old.before(new.on.clock)


def byte_ranges(tensor: torch.Tensor) -> tuple[Range, ...]:
    """The addresses that ``tensor`` covers, ascending and disjoint."""
    item = tensor.element_size()
    start = tensor.data_ptr()
    dims = sorted(
        ((st, n) for n, st in zip(tensor.shape, tensor.stride(), strict=True) if st * (n - 1))
    )
    run = 1  # elements that lie side by side
    while dims and dims[0][0] == run:
        run *= dims.pop(0)[1]
    starts = [0]
    for stride, count in dims:
        if len(starts) * count > MOST_RANGES:
            span = run + sum(st * (n - 1) for st, n in dims)
            return ((start, start + span * item),)
        starts = [first + i * stride for i in range(count) for first in starts]
    return tuple((start + first * item, start + (first + run) * item) for first in sorted(starts))


def bytes_in_common(a: tuple[Range, ...], b: tuple[Range, ...]) -> int:
    i = j = common = 0
    while i < len(a) and j < len(b):
        common += max(0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def torch_line() -> str:
    for frame in frames(DISPATCHERS):
        if (name := frame.f_code.co_filename).startswith(TORCH):
            return f"torch/{Path(name).relative_to(TORCH)}:{frame.f_lineno}"
    return "unknown line"


# -- what stands in for torch.cpu ---------------------------------------------------------------


class Awaited:
    """What a host thread can wait for: the ``clock`` of a lane, or of a point in one."""

    recorder: Recorder
    clock: Clock

    def synchronize(self) -> None:
        self.recorder.this_thread().learn(self.clock)

    def query(self) -> bool:
        """True: nothing is ever pending here, and the caller knows it from now on."""
        self.synchronize()
        return True


class Stream(Awaited):
    """A lane that operators run on in order. Same methods as a CUDA stream."""

    def __init__(
        self, device=None, priority: int = -1, *, recorder: Recorder | None = None, name: str = ""
    ):
        self.recorder = recorder or RECORDERS[-1]
        self.lane = next(self.recorder.lanes)
        self.clock: Clock = {self.lane: 0}
        self.name = name or f"the stream made at {recipe_line() or torch_line()}"
        if recorder is None:
            self.recorder.streams.append(self)

    def launch(self, host: "HostThread") -> None:
        """Begin an operator: after all before it on this lane and all that ``host`` knows."""
        join(self.clock, host.clock)
        self.clock[self.lane] += 1

    def learn(self, clock: Clock) -> None:
        with self.recorder.lock:
            join(self.clock, clock)

    def wait_event(self, event: "Awaited | None") -> None:
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


class HostThread(Stream):
    """What one thread knows to be complete; off the main thread also the lane it works in."""

    def __init__(self, recorder: Recorder, thread: threading.Thread | None) -> None:
        # threading.current_thread() would register a dummy for a thread that is just starting
        self.is_main = threading.get_ident() == threading.main_thread().ident
        name = "main" if self.is_main else thread.name if thread else str(threading.get_ident())
        super().__init__(recorder=recorder, name=f"thread {name}")
        self.origin = getattr(thread, "order_origin", "")
        join(self.clock, getattr(thread, "order_clock", {}))
        self.current: Stream = recorder.default_stream if self.is_main else self
        self.entered: list[Stream] = []
        self.makes_host_values = False
        self.heard: Clock = {}  # of futures that a library found done: told on, but not known

    def launch(self, host: "HostThread") -> None:
        self.clock[self.lane] += 1

    def line(self) -> str:
        started = f" (thread started at {self.origin})" if self.origin else ""
        return recipe_line() or torch_line() + started


class Event(Awaited):
    """A point in a lane. Same methods as a CUDA event that is not timed."""

    def __init__(self, *_: object, **__: object) -> None:
        self.recorder = RECORDERS[-1]
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        host = self.recorder.this_thread()
        stream = stream or host.current
        with self.recorder.lock:
            self.clock = dict(stream.clock)
            join(self.clock, host.clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.recorder.this_thread().current).wait_event(self)


RECORDERS: list[Recorder] = []  # the last one is in force


def current_stream(device=None) -> Stream:
    return RECORDERS[-1].this_thread().current


def stream(chosen: Stream | None) -> contextlib.AbstractContextManager:
    """Make ``chosen`` the current stream of this thread."""
    return chosen or contextlib.nullcontext()


def synchronize(device=None) -> None:
    """Wait for every stream."""
    recorder = RECORDERS[-1]
    for lane in recorder.streams:
        recorder.this_thread().learn(lane.clock)


# -- what sees the operators --------------------------------------------------------------------


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


class OrderMode(TorchDispatchMode):
    """Gives the recorder every read and write of plain tensors; subclasses are unwrapped first."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if FakeTensor in types:  # shapes only, no memory
            return func(*args, **kwargs)
        if not PLAIN.issuperset(types):
            return NotImplemented
        result = func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if name == "_foreach_copy_":  # some pairs may be the device's, others the host's
            copy = torch.ops.aten.copy_.default
            for target, source in zip(*args[:2], strict=True):
                self.note(copy, "copy_", (target, source, *args[2:]), kwargs, target)
        elif not func.is_view and not name.startswith(NO_ACCESS):
            self.note(func, name, args, kwargs, result)
        elif name.startswith(("empty", "new_empty")):
            for tensor in filter(lambda t: type(t) in PLAIN, tensors_in(result)):
                self.recorder.allocated(tensor, self.recorder.this_thread().current)
        return result

    def note(self, func, name: str, args: tuple, kwargs: dict, result: object) -> None:
        recorder, host = self.recorder, self.recorder.this_thread()
        where = host.line()
        with recorder.lock:
            # Beside host memory, one of no dimensions (Adam's step count) is the host's as well.
            places = {recorder.on_host(t) for t in tensors_in([args, kwargs]) if t.dim() > 0}
            by_host = True in places and not (name == "copy_" and False in places)
            made_here = host.makes_host_values and not any(True for _ in tensors_in([args, kwargs]))
            lane = host if by_host or made_here else host.current
            if by_host and False in places:
                host.learn(host.current.clock)
            lane.launch(host)
            touched = set()
            for index, argument in enumerate(func._schema.arguments):
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                for tensor in tensors_in(value):
                    touched.add(tensor.untyped_storage()._cdata)
                    if by_host and tensor.dim() == 0:
                        continue
                    recorder.access(name, tensor, is_written(func, argument), lane, where)
            for tensor in tensors_in(result):
                if type(tensor) in PLAIN and tensor.untyped_storage()._cdata not in touched:
                    recorder.allocated(tensor, lane)
                    recorder.access(name, tensor, True, lane, where)
                    if by_host:
                        recorder.region_of(tensor.untyped_storage()).on_host = True
            if (name in HOST_WAITS and called_by_recipe(DISPATCHERS)) or self.waits_for_copy(
                name, args, kwargs, transfer=True in places
            ):
                host.learn(lane.clock)

    @staticmethod
    def waits_for_copy(name: str, args: tuple, kwargs: dict, transfer: bool) -> bool:
        if name != "copy_" or kwargs.get("non_blocking", args[2] if len(args) > 2 else False):
            return False
        return transfer or any(f.f_code.co_filename.endswith(STAGING_FILES) for f in frames())


def is_written(func, argument) -> bool:
    if func.namespace in UNANNOTATED:
        return "out" in argument.name or argument.name in ("tensor", "tensors", "self")
    return argument.alias_info is not None and argument.alias_info.is_write


# -- what is watched beside operators -------------------------------------------------------------


def watch_threads(recorder: Recorder) -> None:
    """What a thread knew when it gave something, whoever takes that will know."""

    def give(carrier: object, *_: object, **__: object) -> None:
        thread = recorder.this_thread()
        with recorder.lock:
            clock = carrier.__dict__.setdefault("order_clock", {})
            join(clock, thread.clock)
            join(clock, thread.heard if isinstance(carrier, Future) else {})

    def done(true: bool, future: Future) -> None:
        thread = recorder.this_thread()
        with recorder.lock:
            known = thread.clock if called_by_recipe() else thread.heard
            join(known, getattr(future, "order_clock", {}) if true else {})

    def take(_: object, carrier: object, *__: object, **___: object) -> None:
        recorder.this_thread().learn(getattr(carrier, "order_clock", {}))

    def start(thread: threading.Thread) -> None:
        thread.order_origin = recorder.this_thread().line()
        give(thread)
        run = thread.run

        def watched() -> None:
            recorder.enter_thread(thread)
            with OrderMode(recorder):
                try:
                    run()
                finally:
                    give(thread)

        thread.run = watched

    def submit(self, fn, /, *args, **kwargs):
        clock, line = dict(recorder.this_thread().clock), recorder.this_thread().line()

        def work(*args, **kwargs):
            thread = recorder.this_thread()
            thread.learn(clock)
            thread.origin = line
            return fn(*args, **kwargs)

        return plain_submit(self, work, *args, **kwargs)

    def waited(result: object, *_: object, **__: object) -> None:
        for future in getattr(result, "done", ()):
            take(True, future)

    plain_submit, watch = ThreadPoolExecutor.submit, recorder.watch
    recorder.replace(ThreadPoolExecutor, "submit", submit)
    watch(threading.Thread, "start", start)
    watch(concurrent.futures, "wait", after=waited)
    watch(Future, "done", after=done)
    gives = (Future, "set_result"), (Future, "set_exception"), (threading.Event, "set")
    for owner, name in (*gives, (queue.Queue, "put")):
        watch(owner, name, give)
    for name in ("wait", "is_set"):
        watch(threading.Event, name, after=lambda true, event, *_, **__: true and take(true, event))
    takes = (Future, "result"), (Future, "exception"), (threading.Thread, "join")
    for owner, name in (*takes, (queue.Queue, "get")):
        watch(owner, name, after=take)


def watch_memory(recorder: Recorder) -> None:
    """Reads and writes that are no operators, and where memory comes from and goes to."""

    def on_host(tensor: torch.Tensor | None, *_: object, **__: object) -> None:
        if tensor is not None:
            recorder.region_of(tensor.untyped_storage()).on_host = True

    def reads(name: str, tensors: Iterable[torch.Tensor]) -> None:
        """On the calling thread: host memory as it is by now, a device's after waiting."""
        thread = recorder.this_thread()
        with recorder.lock:
            tensors = list(tensors)
            waits = thread.is_main or name != "torch.save"
            if waits and not all(map(recorder.on_host, tensors)):
                thread.learn(thread.current.clock)
            thread.launch(thread)
            for tensor in tensors:
                recorder.access(name, tensor, False, thread, thread.line())

    def read(name: str, tensor: torch.Tensor, *_: object, **__: object) -> None:
        if type(tensor) in PLAIN and called_by_recipe(DISPATCHERS):
            reads(name, [tensor])

    def written(_: int, buffers: list, *__: object) -> None:
        """A system call reads memory as it is by now, on whatever thread."""
        thread = recorder.this_thread()
        with recorder.lock:
            thread.launch(thread)
            for buffer in buffers:
                if isinstance(buffer, memoryview) and buffer.nbytes and not buffer.readonly:
                    start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
                    recorder.read_at("os.pwritev", start, buffer.nbytes, thread, thread.line())

    def resize(storage: torch.UntypedStorage, size: int) -> None:
        """Shrinking a storage gives its memory back, in the order of the current lane."""
        if size < storage.nbytes() and storage.device.type == "cpu":
            thread = recorder.this_thread()
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            with recorder.lock:
                thread.current.launch(thread)
                recorder.access("resize_", whole, True, thread.current, thread.line())
                recorder.region_of(storage).home = None  # given back, in order, now

    def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
        with recorder.lock:
            recorder.region_of(tensor.untyped_storage()).used_by.add(stream.lane)

    def make(original: Callable) -> Callable:
        def call(*args, **kwargs):
            thread = recorder.this_thread()
            before = thread.makes_host_values
            thread.makes_host_values = kwargs.get("device") is None
            try:
                return original(*args, **kwargs)
            finally:
                thread.makes_host_values = before

        return call

    watch = recorder.watch
    watch(torch, "frombuffer", after=on_host)
    watch(torch, "save", lambda saved, *_, **__: reads("torch.save", tensors_in(saved)))
    watch(os, "pwritev", written)
    for name in ("tolist", "numpy"):
        watch(torch.Tensor, name, partial(read, name))
    watch(torch.UntypedStorage, "resize_", resize)
    recorder.replace(torch.Tensor, "record_stream", record_stream)
    for name in FACTORIES:
        recorder.replace(torch, name, make(getattr(torch, name)))


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Record stream order in this process until the block's end; enter it on the main thread.

    Raises:
        RuntimeError: there is an accelerator, whose streams are real and are not recorded.
    """
    if torch.accelerator.is_available():
        raise RuntimeError("stream order is recorded on machines without an accelerator only")
    recorder = Recorder()
    RECORDERS.append(recorder)
    with recorder.undo:
        recorder.undo.callback(RECORDERS.remove, recorder)
        for stand_in in (Stream, Event, stream, current_stream, synchronize):
            recorder.replace(torch.cpu, stand_in.__name__, stand_in)
        for stand_in in (Stream, Event):
            recorder.replace(torch, stand_in.__name__, stand_in)
        watch_threads(recorder)
        watch_memory(recorder)
        recorder.undo.enter_context(OrderMode(recorder))
        yield recorder
