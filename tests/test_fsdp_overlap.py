"""The benchmark's figures of a trace that is known: what is a product, a transfer, hidden."""

import pytest

from benchmarks.fsdp_overlap import Profiled, overlap, union


def event(kind: str, name: str, ts: float, dur: float, **args) -> dict:
    return {"ph": "X", "cat": kind, "name": name, "ts": ts, "dur": dur, "tid": 1, "args": args}


def launched(at: float, number: int, kind: str, name: str, ts: float, dur: float, **args) -> list:
    """A launch on the host at ``at``, and what it did on the device at ``ts``."""
    done = event(kind, name, ts, dur, correlation=number, **args)
    return [event("cuda_runtime", "launch", at, 1, correlation=number), done]


@pytest.fixture
def events() -> list[dict]:
    """Two products of 100 µs; a gather half beside the first, a push wholly beside the second."""
    copy = {"bytes": 2**21}
    found = [
        event("user_annotation", "step 0 forward", 0, 90),
        event("user_annotation", "step 1 forward", 100, 100),
        event("user_annotation", "step 1 backward", 200, 100),
        event("cpu_op", "aten::mm", 110, 10),
        event("cpu_op", "aten::mm", 210, 10),
        *launched(50, 1, "kernel", "of another step", 500, 900, stream=7),
        *launched(115, 2, "kernel", "any name", 1000, 100, stream=7),
        *launched(130, 3, "gpu_memcpy", "Memcpy PtoP", 950, 100, stream=9, **copy),
        *launched(215, 4, "kernel", "any name", 1250, 100, stream=7),
        *launched(220, 5, "gpu_memcpy", "Memcpy PtoP", 1260, 50, stream=11, **copy),
        *launched(225, 6, "gpu_memcpy", "bookkeeping", 5000, 50, stream=11, bytes=8),
    ]
    return sorted(found, key=lambda event: event["ts"])


def judged(events: list[dict]) -> Profiled:
    profiled = Profiled.__new__(Profiled)
    profiled.digest(events)
    return profiled


def test_products_are_found_by_the_operator_that_launched_them(events) -> None:
    assert judged(events).products_s == pytest.approx(200e-6)


def test_a_stream_that_copies_in_forward_gathers(events) -> None:
    profiled = judged(events)
    assert profiled.intervals("gather") == [(950, 1050)]
    assert profiled.intervals("reduce-scatter") == [(1260, 1310)]


def test_hidden_is_what_runs_beside_the_compute_stream(events) -> None:
    assert judged(events).hidden_share() == pytest.approx((50 + 50) / 150)


def test_a_gather_on_the_compute_stream_is_not_hidden(events) -> None:
    for found in events:
        if found["name"] == "Memcpy PtoP":
            found |= {"name": "ncclDevKernel_AllGather", "cat": "kernel", "ts": found["ts"] + 1000}
            found["args"]["stream"] = 7
    assert judged(events).hidden_share() == 0


def test_a_gap_of_the_compute_stream_is_a_stall(events) -> None:
    stalls = [drawn for drawn in judged(events).drawn() if drawn.label == "stall"]
    assert [(stall.start, stall.stop) for stall in stalls] == [(1100, 1250)]


def test_intervals() -> None:
    assert union([(5, 7), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 7)]
    assert overlap([(0, 4), (5, 7)], [(3, 6), (6.5, 9)]) == pytest.approx(1 + 1 + 0.5)
    assert overlap([(0, 1)], []) == 0
