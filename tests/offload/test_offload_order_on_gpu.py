"""The files from scratch on a CUDA device: every edge between streams is needed.

The edits of ``tests/controls`` are made, and the stream that must be waited for is delayed, so that
a missing wait gives wrong values every time.
"""

from contextlib import closing, nullcontext
from copy import deepcopy

import pytest
import torch
from activations import chain
from loaded_recipes import load
from torch import nn

from benchmarks import measuring
from benchmarks.three_streams import between_host_and_device, microseconds_hidden

pytestmark = pytest.mark.usefixtures("importable")

DELAY_CYCLES = 200_000_000  # of the device's clock: 0.1 s and more; queueing a step takes less
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def delay(stream: torch.cuda.Stream, cycles: int = DELAY_CYCLES) -> None:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)


def pipeline_is_right(module, delayed: str | None) -> bool:
    side, device = 1024, torch.device("cuda")
    torch.manual_seed(0)
    weight = torch.randn(side, side, device=device)
    sources = [torch.randn(side, side).pin_memory() for _ in range(module.CHUNKS)]
    results = [torch.zeros(side, side, pin_memory=True) for _ in sources]
    expected = [(source.to(device) @ weight).cpu() for source in sources]
    pipeline = module.Pipeline(weight)
    torch.cuda.synchronize()
    if delayed:
        delay({"compute": torch.cuda.current_stream()}.get(delayed) or getattr(pipeline, delayed))
    pipeline.run(sources, results).synchronize()
    torch.cuda.synchronize()
    return all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


PIPELINE_EDGES = {
    "compute_not_ordered_after_load": "load",
    "load_not_ordered_after_compute": "compute",
    "store_not_ordered_after_compute": "compute",
    "compute_not_ordered_after_store": "store",
}


@needs_cuda
def test_every_edge_of_the_pipeline_is_needed(tmp_path):
    whole = load(tmp_path, "three_streams")
    assert all(pipeline_is_right(whole, delayed) for delayed in ("load", "compute", "store"))
    needed = {
        control: not pipeline_is_right(load(tmp_path, "three_streams", control), delayed)
        for control, delayed in PIPELINE_EDGES.items()
    }
    assert all(needed.values()), needed


def gradients_are_right(module, delayed: str) -> bool:
    """Two steps; ``delayed`` is a lane, at each copy back ("h2d") or at the begin of each step."""
    device, layers, width, rows = torch.device("cuda"), 8, 1024, 4096
    torch.manual_seed(0)
    layer = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)]
    model = nn.Sequential(*layer).to(device)
    batches = [torch.randn(rows, width, device=device, requires_grad=True) for _ in range(2)]
    parameters = list(model.parameters())

    def step(batch: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logged = batch.exp().mean()
        gradients = torch.autograd.grad(model(batch).square().mean(), parameters)
        return *gradients, logged.detach()

    expected = [step(batch) for batch in batches]
    offload = module.HostActivations(device, 2 * batches[0].nbytes)
    torch.cuda.synchronize()
    load_back = offload.load

    def load_late(storage) -> None:
        delay(offload.h2d, DELAY_CYCLES // 20)
        load_back(storage)

    if delayed == "h2d":
        offload.load = load_late
    ours = []
    for batch in batches:
        if delayed != "h2d":
            delay(torch.cuda.current_stream() if delayed == "compute" else offload.d2h)
        with offload.saving():
            ours.append(step(batch))
    torch.cuda.synchronize()
    return all(
        torch.equal(*pair)
        for mine, theirs in zip(ours, expected, strict=True)
        for pair in zip(mine, theirs, strict=True)
    )


OFFLOAD_EDGES = {
    "store_not_ordered_after_compute": "compute",
    "source_freed_before_its_copy": "d2h",
    "load_not_ordered_after_compute": "compute",
    "backward_not_ordered_after_load": "h2d",
}


def unread_copies_are_awaited(module) -> bool:
    """Whether memory that an unread copy back was given holds what is written to it next."""
    device, count = torch.device("cuda"), 1 << 22
    x = torch.randn(count, device=device, requires_grad=True)
    offload = module.HostActivations(device, 4 * count)
    addresses: list[int] = []
    load_back = offload.load

    def load_late(storage) -> None:
        delay(offload.h2d)
        load_back(storage)
        addresses.append(storage.back.data_ptr())

    offload.load = load_late
    with offload.saving():
        unread = x.exp()  # no backward runs through it
        used = chain(x, 3).sum()
    used.backward()
    del unread, used
    with offload.saving():
        claimed = [torch.empty(count, device=device) for _ in range(16)]
        mine = next(tensor for tensor in claimed if tensor.data_ptr() == addresses[-1])
        mine.fill_(1)
    torch.cuda.synchronize()
    return bool((mine == 1).all())


@needs_cuda
def test_every_edge_of_activation_offload_is_needed(tmp_path):
    whole = load(tmp_path, "activation_offload")
    right = {delayed: gradients_are_right(whole, delayed) for delayed in OFFLOAD_EDGES.values()}
    assert all(right.values()), right
    needed = {
        control: not gradients_are_right(load(tmp_path, "activation_offload", control), delayed)
        for control, delayed in OFFLOAD_EDGES.items()
    }
    edited = load(tmp_path, "activation_offload", "unread_given_up_too_early")
    assert unread_copies_are_awaited(whole)
    needed["unread_given_up_too_early"] = not unread_copies_are_awaited(edited)
    assert all(needed.values()), needed


def streamed_gradients_are_right(module, delayed: str) -> bool:
    """A step with a stream that is late; ``delayed`` is compute, or a stream of the stack."""
    device, width = torch.device("cuda"), 1024
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(6)]
    resident = deepcopy(nn.Sequential(*layers)).to(device)
    batch = torch.randn(4096, width, device=device)
    loss = resident(batch).square().mean()
    expected = torch.autograd.grad(loss, list(resident.parameters()))
    stack = module.StreamedStack(layers, device)
    load = stack.load

    def load_late(index: int) -> None:
        delay(stack.h2d, DELAY_CYCLES // 20)
        load(index)

    if delayed == "h2d":
        stack.load = load_late
    torch.cuda.synchronize()
    loss = stack(batch).square().mean()
    if delayed != "h2d":
        delay(stack.d2h if delayed == "d2h" else torch.cuda.current_stream())
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in stack.parameters()]
    torch.cuda.synchronize()
    return all(
        torch.equal(mine, theirs.cpu()) for mine, theirs in zip(gradients, expected, strict=True)
    )


def weights_may_change_behind_forward(module) -> bool:
    """Whether an evaluation has read all weights when it returns, however late they came."""
    device, width = torch.device("cuda"), 1024
    torch.manual_seed(0)
    layers = [nn.Linear(width, width) for _ in range(4)]
    batch = torch.randn(64, width, device=device)
    with torch.no_grad():
        expected = deepcopy(nn.Sequential(*layers)).to(device)(batch)
        stack = module.StreamedStack(layers, device)
        delay(stack.h2d)
        found = stack(batch)
        for parameter in stack.parameters():
            parameter.zero_()
    torch.cuda.synchronize()
    return torch.equal(found, expected)


STREAMING_EDGES = {
    "compute_not_ordered_after_load": "h2d",
    "load_not_ordered_after_compute": "compute",
    "store_not_ordered_after_gradients": "compute",
    "gradients_not_ordered_after_store": "d2h",
    "host_not_ordered_after_store": "d2h",
}


@needs_cuda
def test_every_edge_of_weight_streaming_is_needed(tmp_path):
    whole = load(tmp_path, "weight_streaming")
    right = {late: streamed_gradients_are_right(whole, late) for late in ("h2d", "compute", "d2h")}
    assert all(right.values()), right
    needed = {
        control: not streamed_gradients_are_right(load(tmp_path, "weight_streaming", control), late)
        for control, late in STREAMING_EDGES.items()
    }
    assert all(needed.values()), needed
    assert weights_may_change_behind_forward(whole)


@needs_cuda
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
