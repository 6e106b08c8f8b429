"""How overlap is judged: traces made by hand, and what a schedule that hides nothing gets."""

from types import SimpleNamespace
from typing import NamedTuple

import pytest
from overlap_in_traces import (
    GATHER,
    REDUCE,
    SERIAL,
    STEPS,
    WAITS_US,
    Overlap,
    gain_us,
    read_overlap,
    spans,
)
from watched_schedules import SCHEDULES, UNITS, Watch


class Ran(NamedTuple):
    """When a step's work begins on the device, behind the step's begin, and the product's time."""

    gather: float
    product: float
    product_us: float
    reduce: float


ONE_BY_ONE = Ran(gather=0, product=100, product_us=1000, reduce=1100)  # 1,200 µs
BOTH_HIDDEN = Ran(gather=200, product=0, product_us=1150, reduce=600)  # hides 200, costs 150


def traced(
    judged: Ran, before: Ran = ONE_BY_ONE, behind: Ran = ONE_BY_ONE, gather_stream: int = 9
) -> list[dict]:
    """A trace of ``STEPS``, each behind the last: a gather and a reduction of 100 µs, a product."""

    def event(kind: str, name: str, ts: float, dur: float, tid: int = 1, **args) -> dict:
        return {"ph": "X", "cat": kind, "name": name, "ts": ts, "dur": dur, "tid": tid} | (
            {"args": args} if args else {}
        )

    events, begin = [{"ph": "M", "name": "process_name"}], 1000.0
    for number, (name, ran) in enumerate(
        zip(STEPS, (ONE_BY_ONE, before, judged, behind), strict=True)
    ):
        host, one, two, three, four = 200.0 * number, *range(4 * number, 4 * number + 4)
        gather = event(
            "gpu_memcpy", "Memcpy PtoP", begin + ran.gather, 100, correlation=one,
            stream=gather_stream,
        )  # fmt: skip
        product = event(
            "kernel", "nvjet_sm90", begin + ran.product, ran.product_us, correlation=two, stream=7
        )
        reduction = event(
            "kernel", "ncclDevKernel", begin + ran.reduce, 100, correlation=three, stream=8
        )
        end = max(stop for _, stop in spans([gather, product, reduction]))
        other = event("kernel", "elementwise", end - 50, 50, correlation=four, stream=7)
        events += [
            event("user_annotation", name, host, 100),
            event("user_annotation", GATHER, host + 10, 10),
            event("cuda_runtime", "cudaMemcpyAsync", host + 15, 1, correlation=one),
            event("cpu_op", "aten::mm", host + 30, 10),
            event("cuda_driver", "cuLaunchKernelEx", host + 35, 1, correlation=two),
            event("user_annotation", REDUCE, host + 50, 10),
            event("cuda_runtime", "cudaLaunchKernel", host + 55, 1, correlation=three),
            event("cuda_runtime", "cudaLaunchKernel", host + 70, 1, correlation=four),
            *(gather, product, reduction, other),
        ]
        begin = end
    return events


def test_a_trace_is_judged_by_what_was_launched_where():
    hidden = read_overlap(traced(BOTH_HIDDEN))
    assert hidden == Overlap(1, 1, 100, 100, (9,), (7,), 1150, 1200, 400, 0)
    assert hidden.faults(least_hidden=0.6) == []
    exposed = read_overlap(traced(Ran(gather=0, product=50, product_us=1000, reduce=500)))
    assert exposed.faults(0.5) == ["0.50 of the gathers' time is hidden"]
    serial = read_overlap(traced(ONE_BY_ONE, gather_stream=7))
    assert len(serial.faults(0.6)) == 2
    without = [event for event in traced(BOTH_HIDDEN) if event["name"] != "Memcpy PtoP"]
    assert read_overlap(without).faults(0.6) == ["no gather was found"]


def test_overlap_that_costs_more_than_it_hides_is_found_out():
    gains = read_overlap(traced(BOTH_HIDDEN))
    costs = read_overlap(traced(BOTH_HIDDEN._replace(product_us=1250)))
    assert costs.faults(0.6) == [], "every gather is hidden"
    waits = 2 * WAITS_US
    assert gain_us([gains]) == 50 - waits and gain_us([costs]) == -50 - waits
    assert gain_us([costs, gains, costs]) < 0, "one run out of three is no gain"
    hardly = read_overlap(traced(BOTH_HIDDEN._replace(product_us=1195)))
    assert hardly.step_us < hardly.serial_step_us and gain_us([hardly]) < 0


def test_drifting_clocks_are_no_gain():
    def slowed(by: float) -> Ran:
        return Ran(0, 100, 1000 + by, 1100 + by)

    warming = read_overlap(traced(slowed(50), slowed(0), slowed(100)))
    assert warming.step_us == warming.serial_step_us > 1200


@pytest.mark.parametrize("beside", ["gather", "reduce"])
@pytest.mark.parametrize("which", ["before", "behind"])
def test_a_serial_step_that_overlaps_is_found_out(beside, which):
    overlapped = ONE_BY_ONE._replace(**{beside: 400})
    (fault,) = read_overlap(traced(BOTH_HIDDEN, **{which: overlapped})).faults(0.6)
    assert fault == "serial steps overlap for 100 µs"


def test_a_trace_that_lacks_a_step_is_no_reference():
    events = traced(BOTH_HIDDEN)
    events.remove(next(event for event in events if event["name"] == SERIAL))
    with pytest.raises(AssertionError, match="a trace of"):
        read_overlap(events)


def test_serial_collectives_stand_between_all_products_and_all_that_follow():
    queued = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other) -> None:
            queued.append(f"{self.name} waits for {other.name}")

    compute, own = Stream("compute"), Stream("own")
    current = [compute]
    watch = Watch(SimpleNamespace(current_stream=lambda: current[-1]))
    gather = watch(GATHER, lambda: queued.append("gather"))
    current.append(own)
    gather()
    assert queued == ["gather"]
    watch.serial = True
    gather()
    assert queued[1:] == ["own waits for compute", "gather", "compute waits for own"]


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "stream_context"])
def test_a_schedule_that_hides_nothing_in_forward_is_found_out(name):
    """Gathers of equal length. (Of ``stream_context``, those of backward count as not hidden.)"""
    schedule = SCHEDULES[name]
    in_backward = schedule.behind - (UNITS - 1)
    run = Overlap(schedule.gathers, 0, schedule.gathers, in_backward, (9,), (7,), 1, 2, 1, 0)
    assert run.faults(schedule.least_hidden)
