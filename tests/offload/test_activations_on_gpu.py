"""Activation offload on a CUDA device: copies hold nobody, and memory is freed."""

from contextlib import closing, nullcontext

import pytest
import torch
from torch import nn

from benchmarks import measuring
from benchmarks.three_streams import between_host_and_device, microseconds_hidden


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_of_the_library_holds_nobody_and_frees_memory(recipe):
    device, layers, width, rows = torch.device("cuda"), 8, 16384, 4096  # products beat the link
    with device:
        layer = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)]
    model = nn.Sequential(*layer).to(torch.bfloat16)
    batch = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    offload = recipe.ActivationOffload(
        device, 2 * layers * batch.nbytes, 2 * batch.nbytes, stay=(batch, *model.parameters())
    )

    def step(saving) -> int:
        before = torch.cuda.memory_allocated()
        with saving:
            loss = model(batch).float().mean()
        held = torch.cuda.memory_allocated() - before
        loss.backward()
        return held

    with closing(offload):
        resident = step(nullcontext())
        moved = step(offload.saving())
        assert resident - moved >= (layers - 3) * batch.nbytes, (resident, moved)
        step(offload.saving())
        with torch.profiler.profile(acc_events=True) as profile:
            with torch.profiler.record_function("a step"):
                step(offload.saving())
            torch.cuda.synchronize()
    assert_copies_hold_nobody(measuring.profiled_events(profile), "a step")


def assert_copies_hold_nobody(events: list[dict], call: str) -> None:
    """In a profile: from pinned memory, on streams of their own, half hidden; the host goes on."""
    (called,) = [e for e in events if e["name"] == call and e.get("cat") == "user_annotation"]
    returned = called["ts"] + called["dur"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    streams_of_kernels = {kernel["args"]["stream"] for kernel in kernels}
    copies = between_host_and_device(events)
    for direction in ("HtoD", "DtoH"):
        ours = [copy for copy in copies if direction in copy["name"]]
        assert ours, direction
        assert not [copy["name"] for copy in ours if "Pageable" in copy["name"]]
        assert streams_of_kernels.isdisjoint(copy["args"]["stream"] for copy in ours)
        hidden = sum(microseconds_hidden(copy, kernels) for copy in ours)
        assert hidden > sum(copy["dur"] for copy in ours) / 2, direction
    held = 0.0
    for event in events:
        waits = "Memcpy" in event["name"] or "Synchronize" in event["name"]
        of_host = event.get("cat") in ("cuda_runtime", "cuda_driver")
        if of_host and waits and called["ts"] <= event["ts"] <= returned:
            held += event["dur"]
    assert held < sum(copy["dur"] for copy in copies) / 2, "the host was held"
