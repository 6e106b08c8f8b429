"""What benchmarks/offload_step.py computes from times and traces: the bound, and its judgement."""

import pytest

from benchmarks.measuring import Drawn
from benchmarks.offload_step import bound_s, judge_trace, lanes_of, ridge_tokens, transfers

LAYERS, NBYTES = 6, 100
LINK = {
    "pinned_h2d_bytes_per_s": 10.0,  # a layer in 10 s
    "pinned_d2h_bytes_per_s": 10.0,
    "duplex_h2d_bytes_per_s": 5.0,  # 20 s
    "duplex_d2h_bytes_per_s": 5.0,
}


@pytest.mark.parametrize("slots", [2, 3, 4])
def test_every_layer_is_loaded_twice_but_those_in_the_slots_and_stored_once(slots):
    phases = [transfers(phase, LAYERS, slots) for phase in range(2 * LAYERS)]
    assert 1 + sum(loads for loads, _ in phases) == 2 * LAYERS - slots
    assert 1 + sum(stores for _, stores in phases) == LAYERS


def test_bound_is_the_larger_of_compute_and_copies_in_each_phase():
    # First load 10, five more in forward; backward stores beside four loads at the duplex rate,
    # stores once alone, and once more behind the last phase.
    assert bound_s([0.0] * 2 * LAYERS, NBYTES, LINK) == 10 + 5 * 10 + 4 * 20 + 10 + 10
    assert bound_s([100.0] * 2 * LAYERS, NBYTES, LINK) == 10 + 2 * LAYERS * 100 + 10


def test_ridge_is_where_compute_takes_as_long_as_the_copies():
    compute = [5.0] * LAYERS + [10.0] * LAYERS
    ridge = {"ridge_tokens_forward": 2000, "ridge_tokens_backward": 2000}
    assert ridge_tokens(compute, 1000, NBYTES, LINK) == ridge


def step(overlapped: bool, *, label: str = "HtoD (Pinned -> Device)") -> list[Drawn]:
    """Backward of LAYERS layers, 10 µs each; loads and stores beside it, or between."""
    begin = dict(zip(reversed(range(LAYERS)), range(0, 1000, 30), strict=False))
    lanes = [Drawn("H2D", label, -100 + layer, -99 + layer) for layer in range(LAYERS)]
    for layer, at in begin.items():
        lanes.append(Drawn("compute", f"backward {layer}", at, at + 10))
        copies = at + (1 if overlapped else 11)
        if 0 <= layer - 1 < LAYERS - 2:
            lanes.append(Drawn("H2D", label, copies, copies + 5))
        stored = copies + 30 if layer else at + 11
        lanes.append(Drawn("D2H", "DtoH (Device -> Pinned)", stored, stored + 5))
    return sorted(lanes, key=lambda drawn: drawn.start)


def window(*calls: tuple[str, int]) -> list[dict]:
    named = {"name": "one step", "cat": "user_annotation", "tid": 1, "ts": 0, "dur": 1000}
    launch = ("cudaLaunchKernel", 1)
    return [named] + [
        {"name": name, "cat": "cuda_runtime", "tid": tid, "ts": 5, "dur": 1}
        for name, tid in (launch, *calls)
    ]


def test_a_trace_is_judged_by_what_runs_at_one_time():
    good = judge_trace(window(), step(overlapped=True), LAYERS, 2)
    assert (good["trace_layers_overlapped"], good["trace_layers_judged"]) == (2, 2)
    assert good["copies_pinned"] and good["blocking_calls"] == 0
    serial = judge_trace(window(), step(overlapped=False), LAYERS, 2)
    assert serial["trace_layers_overlapped"] == 0
    pageable = step(overlapped=True, label="HtoD (Pageable -> Device)")
    assert not judge_trace(window(), pageable, LAYERS, 2)["copies_pinned"]


def test_waits_count_on_threads_that_launch_kernels_only():
    calls = ("cudaEventSynchronize", 1), ("cudaMalloc", 1), ("cudaEventSynchronize", 2)
    found = judge_trace(window(*calls), step(overlapped=True), LAYERS, 2)
    assert found["blocking_calls_named"] == {"cudaEventSynchronize": 1, "cudaMalloc": 1}


def test_kernels_belong_to_the_block_whose_product_follows_or_came_before():
    products = 2 * LAYERS + 5 * LAYERS - 1
    events = [
        {"cat": "cpu_op", "name": "aten::mm", "args": {"External id": n}} for n in range(products)
    ]
    events += [
        {"cat": "kernel", "name": "gemm", "ts": 10.0 * n, "dur": 9.0, "args": {"External id": n}}
        for n in range(products)
    ]
    lanes = lanes_of(events, LAYERS, NBYTES)
    assert [lane.label for lane in lanes[:2]] == ["forward 0", "forward 1"]
    assert (lanes[-1].label, lanes[-1].stop - lanes[-1].start) == ("backward 0", 39.0)
    with pytest.raises(ValueError, match="matrix products"):
        lanes_of(events[:-1], LAYERS, NBYTES)
