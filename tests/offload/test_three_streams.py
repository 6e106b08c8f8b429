"""Three streams: what a pipeline refuses, and how its hidden copies are counted."""

import pytest
import torch

from benchmarks.three_streams import between_host_and_device, microseconds_hidden


def test_a_copy_is_hidden_while_any_kernel_runs():
    copy = {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "ts": 100, "dur": 200}
    on_device = {"cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "ts": 0, "dur": 9}
    kernels = [{"cat": "kernel", "name": "gemm", "ts": ts, "dur": dur} for ts, dur in KERNELS]
    assert between_host_and_device([on_device, copy, *kernels]) == [copy]
    assert microseconds_hidden(copy, kernels) == 130


KERNELS = ((190, 60), (120, 100))  # begin and duration: they overlap for 30


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
