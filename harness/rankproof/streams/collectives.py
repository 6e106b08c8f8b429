"""Collectives: each works on a lane of its own until what it returned is waited for.

``ProcessGroup``'s methods return a ``Work``, also where ``torch.distributed`` waits for it at once.
A collective begins after what was launched on its caller's current stream. ``work.wait()`` makes
the waiting thread's current stream come after it, as does waiting for its future, or for one made
of that by ``then`` or ``collect_all``; a callback comes after the future that it is given.
``work.is_completed()`` and ``future.done()`` let the host know, and so does a barrier, for all
collectives before it.

What a communication hook of DDP issues is waited for by DDP's reducer, in C++. It counts as run at
once.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from rankproof.imports import frames
from rankproof.streams.lanes import Clock, Collective, HostThread, Stream, join
from rankproof.streams.operators import OrderMode
from rankproof.streams.recorder import Recorder

ISSUING = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "gather", "scatter", "barrier"),
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base"),
    *("all_gather_single", "all_gather_single_coalesced"),
    *("reduce_scatter", "reduce_scatter_tensor_coalesced", "_reduce_scatter_base"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single", "send", "recv", "recv_anysource"),
)
WAITS_OF_WORK = ("wait", "synchronize", "block_current_stream", "result")
TORCHS_OWN = "torch/distributed/distributed_c10d.py"


class Pending:
    """What a ``Work`` or a future stands for: all that has happened once it is complete."""

    def __init__(self, *parents: "Pending", collective: Collective | None = None) -> None:
        self.parents = parents
        self.collective = collective
        self.clock: Clock = {}

    def known(self) -> Clock:
        """The clock of whoever knows that this is complete."""
        clock = dict(self.clock)
        for parent in self.parents:
            join(clock, parent.known())
        return clock

    def collectives(self) -> list[Collective]:
        found = [self.collective] if self.collective else []
        for parent in self.parents:
            found += parent.collectives()
        return found


def name_of_caller(method: str) -> str:
    """The function of ``torch.distributed`` that calls ``method`` of a process group."""
    caller = next(frames()).f_code
    public = caller.co_filename.endswith(TORCHS_OWN) and not caller.co_name.startswith("_")
    return caller.co_name if public else method


def only_reads(method: str, group: dist.ProcessGroup, args: tuple) -> bool:
    """Whether this rank's tensor is only sent, though the operator does not say so."""
    if method == "send":
        return True
    options = args[1] if len(args) > 1 else None
    return method == "broadcast" and getattr(options, "rootRank", None) == group.rank()


class Collectives:
    """What stands around the methods that issue collectives, and those that wait for them."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.pending: WeakKeyDictionary[object, Pending] = WeakKeyDictionary()
        self.callback_threads: list[HostThread] = []

    def watch(self) -> None:
        recorder = self.recorder
        for method in ISSUING:
            if hasattr(dist.ProcessGroup, method):
                recorder.replace(dist.ProcessGroup, method, self.issuing(method))
        for name in WAITS_OF_WORK:
            recorder.replace(dist.Work, name, self.waiting(dist.Work, name))
        recorder.watch(dist.Work, "is_completed", after=self.asked_if_done)
        for name in ("get_future", "get_future_result"):
            recorder.watch(dist.Work, name, after=self.future_of_work)
        for name in ("wait", "value"):
            recorder.replace(torch._C.Future, name, self.waiting(torch._C.Future, name))
        recorder.watch(torch._C.Future, "done", after=self.asked_if_done)
        recorder.watch(torch._C.Future, "set_result", self.result_is_set)
        for name in ("then", "add_done_callback"):
            recorder.replace(torch._C.Future, name, self.calling_back(name))
        recorder.watch(torch.futures, "collect_all", after=self.collected)
        recorder.watch(torch.futures, "wait_all", after=self.waited_for_all)
        recorder.replace(dist, "_register_comm_hook", self.register_unwatched())
        recorder.watch(dist.Reducer, "_run_allreduce_hook", after=self.issued_by_reducer)

    # Issuing

    def issuing(self, method: str) -> Callable:
        original = getattr(dist.ProcessGroup, method)
        recorder = self.recorder

        def issue(group, *args, **kwargs):
            thread = recorder.this_thread()
            if thread.collective is not None or thread.in_comm_hook:
                return original(group, *args, **kwargs)
            thread.collective = self.begin(method, thread, group, args)
            try:
                work = original(group, *args, **kwargs)
                return self.issued(thread, work)
            finally:
                thread.collective = None

        return issue

    def begin(self, method: str, thread: HostThread, group: object, args: tuple) -> Collective:
        name = name_of_caller(method)
        known = dict(thread.clock)
        join(known, thread.current.clock)
        with self.recorder.lock:
            self.recorder.collectives += 1
            lane = reusable(self.recorder.collective_lanes, known)
            if lane is None:
                lane = Stream(recorder=self.recorder, name="a collective's own lane")
                self.recorder.collective_lanes.append(lane)
            lane.learn(thread.current.clock)
            if method == "barrier":
                for other in self.recorder.collective_lanes:
                    lane.learn(other.clock)
        return Collective(lane, name, only_reads(method, group, args), method == "barrier")

    def issued(self, thread: HostThread, work: object) -> object:
        pending = Pending(collective=thread.collective)
        pending.clock = dict(thread.collective.lane.clock)
        if work is None:
            self.take(pending)
        else:
            self.pending[work] = pending
        return work

    # Waiting

    def waiting(self, owner: type, name: str) -> Callable:
        original = getattr(owner, name)

        def wait(awaited, *args, **kwargs):
            pending = self.found(awaited)
            if pending is None:
                return original(awaited, *args, **kwargs)
            with self.waiting_for(pending):
                result = original(awaited, *args, **kwargs)
            self.count_if_waited_at_once(pending)
            self.take(pending)
            return result

        return wait

    @contextlib.contextmanager
    def waiting_for(self, pending: Pending) -> Iterator[None]:
        """Some collectives copy what arrived only when they are waited for: that is theirs."""
        thread = self.recorder.this_thread()
        before = thread.collective
        thread.collective = pending.collective
        try:
            yield
        finally:
            thread.collective = before
        if pending.collective:
            pending.clock = dict(pending.collective.lane.clock)

    def count_if_waited_at_once(self, pending: Pending) -> None:
        caller = next(frames()).f_code
        in_torch = caller.co_filename.endswith(TORCHS_OWN) and caller.co_name != "wait"
        if in_torch and pending.collective and not pending.collective.waited:
            self.recorder.collectives -= 1

    def take(self, pending: Pending) -> None:
        """What follows on the current stream comes after ``pending``."""
        thread = self.recorder.this_thread()
        clock = pending.known()
        thread.current.learn(clock)
        for collective in pending.collectives():
            collective.waited = True
            if collective.blocks_host:
                thread.learn(clock)

    def asked_if_done(self, is_done: bool, awaited: object) -> None:
        pending = self.pending.get(awaited)
        if is_done and pending is not None:
            self.take(pending)
            self.recorder.this_thread().learn(pending.known())

    # Futures

    def found(self, awaited: object) -> Pending | None:
        """What ``awaited`` stands for; what a future of the script's own does is known once set."""
        if isinstance(awaited, torch.futures.Future):
            return self.pending.setdefault(awaited, Pending())
        return self.pending.get(awaited)

    def future_of_work(self, future: object, work: object) -> None:
        if future is not None and work in self.pending:
            self.pending[future] = self.pending[work]

    def result_is_set(self, future: object, *_: object) -> None:
        thread = self.recorder.this_thread()
        pending = self.pending.setdefault(future, Pending())
        join(pending.clock, thread.clock)
        join(pending.clock, thread.current.clock)

    def pending_of_all(self, futures: list) -> Pending:
        found = [self.found(future) for future in futures]
        return Pending(*[pending for pending in found if pending is not None])

    def collected(self, collection: object, futures: list) -> None:
        if collection is not None:
            self.pending[collection] = self.pending_of_all(futures)

    def waited_for_all(self, results: list | None, futures: list) -> None:
        if results is not None:
            self.take(self.pending_of_all(futures))

    def calling_back(self, name: str) -> Callable:
        original = getattr(torch._C.Future, name)

        def call(future, callback):
            parent = self.found(future)
            if parent is None:
                return original(future, callback)
            child = Pending(parent)
            result = original(future, self.in_own_lane(callback, parent, child))
            if result is not None:
                self.pending[result] = child
            return result

        return call

    def in_own_lane(self, callback: Callable, parent: Pending, child: Pending) -> Callable:
        """``callback``, whichever thread calls it: after ``parent``, and ``child`` after it."""
        recorder = self.recorder
        known_to_caller = dict(recorder.this_thread().clock)

        def call(future):
            self.pending[future] = parent
            known = dict(known_to_caller)
            join(known, parent.known())
            thread = self.callback_thread(known)
            before = recorder.this_thread()
            recorder.threads.state = thread
            try:
                return self.watched(callback, future)
            finally:
                recorder.threads.state = before
                child.clock = dict(thread.clock)

        return call

    def callback_thread(self, known: Clock) -> HostThread:
        with self.recorder.lock:
            thread = reusable(self.callback_threads, known)
            if thread is None:
                thread = HostThread(self.recorder, None)
                thread.name = "a future's callback"
                thread.current = thread
                self.callback_threads.append(thread)
            thread.learn(known)
        return thread

    def watched(self, callback: Callable, future: object) -> Any:
        """A thread of a process group's has no mode of its own."""
        modes = _get_current_dispatch_mode_stack()
        if any(isinstance(mode, OrderMode) for mode in modes):
            return callback(future)
        with OrderMode(self.recorder):
            return callback(future)

    # DDP

    def issued_by_reducer(self, future: object, *_: object) -> None:
        """It began after what was launched on the current stream; waiting is for both."""
        if future is not None:
            pending = self.pending[future] = Pending()
            pending.clock = dict(self.recorder.this_thread().current.clock)

    def register_unwatched(self) -> Callable:
        original = dist._register_comm_hook
        recorder = self.recorder

        def register(reducer, state, hook):
            def unwatched(state, bucket):
                thread = recorder.this_thread()
                thread.in_comm_hook = True
                try:
                    return hook(state, bucket)
                finally:
                    thread.in_comm_hook = False

            return original(reducer, state, unwatched)

        return register


def reusable(lanes: list, known: Clock) -> Any:
    """One of ``lanes`` all of whose work is ``known`` to be complete, or None."""
    for lane in lanes:
        if lane.clock[lane.lane] <= known.get(lane.lane, 0):
            return lane
    return None
