"""The recorder of stream order finds each missing edge, and misses no order that is there."""

import concurrent.futures
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from rankproof import streams

pytestmark = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="an accelerator's streams are real"
)


@pytest.fixture
def recorder():
    with streams.recording() as recording:
        yield recording


def write(tensor: torch.Tensor) -> None:
    tensor.add_(1)


def read(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


ORDERS = {
    "wait_event": lambda other, event, _: other.wait_event(event),
    "event.wait": lambda other, event, _: event.wait(other),
    "wait_stream": lambda other, *_: other.wait_stream(torch.cpu.current_stream()),
    "record_event": lambda other, *_: other.wait_event(torch.cpu.current_stream().record_event()),
    "event.synchronize": lambda _, event, __: event.synchronize(),
    "stream.synchronize": lambda *_: torch.cpu.current_stream().synchronize(),
    "synchronize": lambda *_: torch.cpu.synchronize(),
    "item": lambda _, __, tensor: tensor[0].item(),
    "nothing": lambda *_: None,
}


def on_other_stream(ordered_by: str) -> None:
    """Write on the default stream, then read on another one."""
    tensor, other, event = torch.zeros(8), torch.cpu.Stream(), torch.cpu.Event()
    write(tensor)
    event.record()
    ORDERS[ordered_by](other, event, tensor)
    with torch.cpu.stream(other):
        read(tensor)


@pytest.mark.parametrize("ordered_by", sorted(ORDERS.keys() - {"nothing"}))
def test_an_ordered_read_is_no_conflict(recorder, ordered_by):
    on_other_stream(ordered_by)
    assert recorder.conflicts == []


def test_an_unordered_read_is_a_conflict_that_names_both_lines(recorder):
    on_other_stream("nothing")
    (conflict,) = recorder.conflicts
    assert (conflict.earlier.operator, conflict.earlier.writes) == ("add_", True)
    assert (conflict.later.operator, conflict.later.writes) == ("mul", False)
    assert conflict.nbytes == 32
    for line in (conflict.earlier.where, conflict.later.where):
        assert line.startswith("test_streams.py:")
    assert "nothing" not in str(conflict) and "no event" in str(conflict)


def test_an_event_orders_only_what_was_recorded_before_it(recorder):
    tensor, other, event = torch.zeros(8), torch.cpu.Stream(), torch.cpu.Event()
    event.record()
    write(tensor)
    other.wait_event(event)
    with torch.cpu.stream(other):
        read(tensor)
    assert len(recorder.conflicts) == 1


def test_a_write_after_an_unordered_read_is_a_conflict(recorder):
    tensor, other = torch.zeros(8), torch.cpu.Stream()
    other.wait_stream(torch.cpu.current_stream())
    with torch.cpu.stream(other):
        read(tensor)
    write(tensor)
    assert len(recorder.conflicts) == 1


@pytest.mark.parametrize(
    ("first", "second", "conflicts"),
    [
        (slice(0, 4), slice(4, 8), 0),
        (slice(0, 5), slice(4, 8), 1),
        ((slice(None), 0), (slice(None), 1), 0),
        ((slice(None), 0), (slice(None), slice(0, 2)), 1),
    ],
)
def test_slices_conflict_only_where_they_overlap(recorder, first, second, conflicts):
    arena = torch.empty(8, 4)
    with torch.cpu.stream(torch.cpu.Stream()):
        write(arena[first])
    with torch.cpu.stream(torch.cpu.Stream()):
        write(arena[second])
    assert len(recorder.conflicts) == conflicts


def copy_out_and_in(steps: set[str]) -> None:
    """A tensor to host memory, changed there by the host, and back; ``steps`` are the waits."""
    host = torch.frombuffer(bytearray(64), dtype=torch.float32)
    there, other = torch.ones(16, device="cpu"), torch.cpu.Stream()
    copied, returned = torch.cpu.Event(), torch.cpu.Event()
    blocking = "blocking copies" in steps
    with torch.cpu.stream(other):
        if "device" in steps:
            other.wait_stream(streams.RECORDERS[-1].default_stream)
        host.copy_(there, non_blocking=not blocking)
        copied.record(other)
    if "host, before it reads" in steps:
        copied.synchronize()
    changed = host * 2
    with torch.cpu.stream(other):
        there.copy_(changed, non_blocking=not blocking)
        returned.record(other)
    if "host, before it writes" in steps:
        returned.synchronize()
    changed.zero_()


ALL_WAITS = {"device", "host, before it reads", "host, before it writes"}


@pytest.mark.parametrize("missing", [None, "blocking", *sorted(ALL_WAITS)])
def test_the_host_must_wait_for_transfers_and_its_own_work_is_complete(recorder, missing):
    blocking = {"device", "blocking copies"}
    copy_out_and_in(blocking if missing == "blocking" else ALL_WAITS - {missing})
    assert bool(recorder.conflicts) is (missing in ALL_WAITS)


@pytest.mark.parametrize("waits", [True, False])
def test_a_system_call_that_writes_reads_what_lies_at_its_address(recorder, tmp_path, waits):
    memory = bytearray(1 << 12)
    host, device = torch.frombuffer(memory, dtype=torch.uint8), torch.ones(1 << 12).byte()
    stream, copied = torch.cpu.Stream(), torch.cpu.Event()
    stream.wait_stream(torch.cpu.current_stream())
    with torch.cpu.stream(stream):
        host.copy_(device, non_blocking=True)
        copied.record(stream)
    if waits:
        copied.synchronize()
    with open(tmp_path / "file", "wb") as file:
        os.pwritev(file.fileno(), [b"header", memoryview(memory)[100:200]], 0)
    assert bool(recorder.conflicts) is not waits
    assert all("os.pwritev" in str(conflict) for conflict in recorder.conflicts)


def in_thread(work, handed_over: str) -> None:
    """Run ``work`` in another thread and learn of its end in the way named."""
    if handed_over == "join":
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return
    done, results = threading.Event(), queue.Queue()

    def report() -> None:
        work()
        done.set()
        results.put(None)

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(report)
        if handed_over == "result":
            future.result()
        elif handed_over == "event":
            done.wait()
        else:
            results.get()


@pytest.mark.parametrize("ordered", [True, False])
def test_memory_is_given_back_in_the_order_of_its_lane(recorder, ordered):
    tensor, other = torch.ones(8), torch.cpu.Stream()
    read(tensor)
    with torch.cpu.stream(other):
        if ordered:
            other.wait_stream(recorder.default_stream)
        tensor.untyped_storage().resize_(0)
    assert bool(recorder.conflicts) is not ordered
    assert all(conflict.later.operator == "resize_" for conflict in recorder.conflicts)


@pytest.mark.parametrize("wait", [concurrent.futures.wait, concurrent.futures.as_completed, list])
def test_what_a_pool_did_is_known_once_its_futures_were_waited_for(recorder, wait):
    """Which have ended already; ``list`` waits for none."""
    tensor = torch.zeros(8)
    wait = getattr(concurrent.futures, wait.__name__, list)  # as a script finds it
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(write, tensor)
        while future._state != "FINISHED":  # which teaches nothing
            pass
        assert len(list(wait([future]))) >= 1
        read(tensor)
    assert bool(recorder.conflicts) is (wait is list), recorder.conflicts


@pytest.mark.parametrize("handed_over", ["join", "result", "event", "queue"])
def test_what_a_thread_did_is_known_once_it_was_waited_for(recorder, handed_over):
    tensor = torch.zeros(8)
    torch.cpu.synchronize()
    in_thread(lambda: read(tensor), handed_over)
    write(tensor)
    assert recorder.conflicts == []


def test_what_a_thread_did_is_unknown_if_it_was_not_waited_for(recorder):
    tensor = torch.zeros(8)
    torch.cpu.synchronize()
    finished = []

    def work() -> None:
        read(tensor)
        finished.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    while not finished:  # it has read, but nothing that the recorder knows says so
        pass
    write(tensor)
    thread.join()
    assert len(recorder.conflicts) == 1


def test_a_thread_is_not_in_order_with_the_default_stream(recorder):
    tensor = torch.zeros(8)
    write(tensor)
    in_thread(lambda: read(tensor), "join")
    assert len(recorder.conflicts) == 1


def brought_by_a_copy(tensor: torch.Tensor) -> torch.Tensor:
    """That need not wait: what it has brought is host memory."""
    return torch.empty_like(tensor).copy_(tensor, non_blocking=True)


@pytest.mark.parametrize("make", [torch.clone, brought_by_a_copy])
def test_a_thread_that_saves_waits_for_what_the_default_stream_had_queued(recorder, tmp_path, make):
    """Of a device's memory; host memory it reads as it is."""
    tensor = make(torch.zeros(8, device="cpu") + 1)
    in_thread(lambda: torch.save(tensor, tmp_path / "unordered.pt"), "join")
    found = [conflict.later.operator for conflict in recorder.conflicts]
    assert found == (["torch.save"] if make is brought_by_a_copy else [])


@pytest.mark.parametrize("waits", [True, False])
def test_memory_that_a_thread_has_waited_for_may_be_let_go_of_by_another(recorder, waits):
    """The thread that issued the copy lets go last: a future came before its block has ended."""
    side, event, ended = torch.cpu.Stream(), torch.cpu.Event(), threading.Semaphore(0)
    shared = [torch.zeros(8) + 1]
    torch.cpu.synchronize()
    with torch.cpu.stream(side):
        read(shared[0])
    event.record(side)

    def arrive() -> None:
        if waits:
            event.synchronize()
        ended.release()

    thread = threading.Thread(target=arrive)
    thread.start()
    ended.acquire()  # a semaphore teaches the recorder nothing
    shared.clear()
    again = torch.zeros(8) + 1
    assert (recorder.conflicts == []) == waits, recorder.conflicts
    thread.join()
    assert again.numel() == 8


@pytest.mark.parametrize("reader", ["a thread", "a stream", "a stream that it waits for"])
def test_memory_that_a_stream_may_still_read_is_given_back_too_early(recorder, reader):
    """A thread has read what it has let go of; what it queued on a stream has perhaps not run.

    The main thread lets go last, whatever it knows: by then the other thread has.
    """
    shared, ended = [torch.zeros(8) + 1], threading.Semaphore(0)
    torch.cpu.synchronize()

    def staging() -> None:
        side = torch.cpu.Stream() if "stream" in reader else None
        with torch.cpu.stream(side):
            read(shared[0])
        if "waits" in reader:
            side.synchronize()
        ended.release()

    thread = threading.Thread(target=staging)
    thread.start()
    ended.acquire()  # a semaphore teaches the recorder nothing
    shared.clear()
    again = torch.zeros(8) + 1
    assert (recorder.conflicts == []) == (reader != "a stream"), recorder.conflicts
    thread.join()
    del again  # memory that was freed once, and is again
    assert (torch.zeros(8) + 1).numel() == 8
    assert all(str(conflict).count("freed since") == 1 for conflict in recorder.conflicts)


HOST_READS: dict[str, Callable] = {
    "numpy": lambda tensor: tensor.numpy(),
    "asarray": np.asarray,
    "from_dlpack": np.from_dlpack,
    "save": lambda tensor: np.save(os.devnull, tensor),
}


@pytest.mark.parametrize("host_reads", HOST_READS.values(), ids=HOST_READS.keys())
@pytest.mark.parametrize("ordered", [True, False])
def test_numpy_reads_as_the_host_does(recorder, host_reads, ordered):
    tensor, other = torch.zeros(8), torch.cpu.Stream()
    other.wait_stream(recorder.default_stream)
    with torch.cpu.stream(other):
        write(tensor)
    if ordered:
        other.synchronize()
    host_reads(tensor)
    assert bool(recorder.conflicts) is not ordered


def test_what_is_compiled_runs_as_it_is_and_is_recorded(recorder):
    frames = torch._dynamo.utils.counters["frames"]
    frames.clear()
    doubled = torch.compile(read, backend="eager", fullgraph=True)
    tensor = torch.ones(4)
    write(tensor)
    with torch.cpu.stream(torch.cpu.Stream()):
        doubled(tensor)
    assert not frames, "torch compiles the recorder"
    assert "(mul)" in str(recorder.conflicts[0])


def test_of_very_many_pieces_the_whole_span_counts(recorder):
    table = torch.zeros(2048, 8)
    write(table[-1])
    with torch.cpu.stream(torch.cpu.Stream()):
        read(table[:, :4])
    assert len(recorder.conflicts) == 1
