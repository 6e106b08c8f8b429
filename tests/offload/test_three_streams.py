"""Three streams: what a trace is judged to say of copies, and what a pipeline refuses."""

import pytest
import torch

from overlap_recipes.profiled_copies import judge

COMPUTE, LOAD, STORE = 7, 13, 17  # streams


def kernel(ts: float, dur: float) -> dict:
    return {"cat": "kernel", "name": "gemm", "ts": ts, "dur": dur, "args": {"stream": COMPUTE}}


def copied(name: str, stream: int, ts: float, dur: float) -> dict:
    name = f"Memcpy {name}"
    return {"cat": "gpu_memcpy", "name": name, "ts": ts, "dur": dur, "args": {"stream": stream}}


def called(name: str, ts: float, dur: float) -> dict:
    return {"cat": "cuda_runtime", "name": name, "ts": ts, "dur": dur}


def trace(call_us: float, *events: dict) -> list[dict]:
    call = {"cat": "user_annotation", "name": "judged call", "ts": 0.0, "dur": call_us}
    return [call, {"ph": "M", "name": "process_name"}, *events]


def test_pageable_copies_hold_the_host():
    verdict = judge(
        trace(
            400,
            called("cudaMemcpyAsync", 1, 190),
            copied("HtoD (Pageable -> Device)", COMPUTE, 5, 180),
            called("cudaStreamSynchronize", 192, 3),
            kernel(200, 50),
        )
    )
    assert verdict.holds_host
    found = verdict.copies["HtoD"]
    assert not found.pinned and not found.own_stream and found.hidden_share == 0
    assert "PAGEABLE" in str(verdict) and "HELD" in str(verdict)


def test_waiting_for_a_pinned_copy_holds_the_host():
    verdict = judge(
        trace(
            400,
            called("cudaMemcpyAsync", 1, 5),
            copied("HtoD (Pinned -> Device)", LOAD, 6, 180),
            called("cudaStreamSynchronize", 7, 180),
            kernel(200, 50),
        )
    )
    assert verdict.holds_host
    assert verdict.copies["HtoD"].pinned and verdict.copies["HtoD"].own_stream


def test_a_wait_after_the_call_is_not_the_copys():
    verdict = judge(
        trace(
            10,
            called("cudaMemcpyAsync", 1, 5),
            copied("DtoH (Device -> Pinned)", STORE, 100, 200),
            called("cudaDeviceSynchronize", 20, 300),
            kernel(120, 100),
            kernel(190, 60),
        )
    )
    assert not verdict.holds_host
    assert verdict.host_s == pytest.approx(5e-6)
    assert verdict.copies["DtoH"].hidden_share == pytest.approx(130 / 200)


def test_directions_are_judged_apart():
    verdict = judge(
        trace(
            10,
            copied("HtoD (Pinned -> Device)", LOAD, 0, 100),
            copied("DtoH (Device -> Pinned)", COMPUTE, 200, 100),
            kernel(0, 150),
        )
    )
    assert verdict.copies["HtoD"].own_stream and verdict.copies["HtoD"].hidden_share == 1
    assert not verdict.copies["DtoH"].own_stream and verdict.copies["DtoH"].hidden_share == 0


def test_one_pageable_copy_among_pinned_ones_is_named():
    both = ("HtoD (Pinned -> Device)", "HtoD (Pageable -> Device)")
    verdict = judge(trace(10, *(copied(name, LOAD, 0, 10) for name in both)))
    assert not verdict.copies["HtoD"].pinned


def test_without_copies_there_is_nothing_to_judge():
    assert "no device copy to judge" in str(judge(trace(10, kernel(0, 5))))


@pytest.mark.parametrize(
    ("source", "result", "why"),
    [
        (torch.zeros(4, 5), torch.zeros(4, 5), r"tensor 0 .*slots hold \(4, 4\)"),
        (torch.zeros(4, 4), torch.zeros(4, 4).double(), "tensor 1 .*float64"),
        (torch.zeros(4, 4), torch.zeros(4, 4).t(), "tensor 1 .*not contiguous"),
        (torch.zeros(4, 4, device="meta"), torch.zeros(4, 4), "tensor 0 .*not on the host"),
    ],
)
def test_the_pipeline_refuses_what_is_outside_its_scope(streams, source, result, why):
    pipeline = streams.Pipeline(torch.zeros(4, 4))
    with pytest.raises(ValueError, match=why):
        pipeline.run([source], [result])
    with pytest.raises(ValueError, match="1 sources, 0 results"):
        pipeline.run([torch.zeros(4, 4)], [])
