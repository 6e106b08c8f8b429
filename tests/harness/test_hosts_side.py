"""Stream order on the host's side: buffers that it fills and reads, copies that it waits for."""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.jit._builtins import _find_builtin

from rankproof import streams

pytestmark = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="an accelerator's streams are real"
)
DEVICE = torch.device("cpu")  # where an accelerator's memory would be
SHAPE = (4, 8)


@pytest.fixture
def recorder():
    with streams.recording() as recording:
        yield recording


MAKERS = {
    "frombuffer": lambda: torch.frombuffer(bytearray(128), dtype=torch.float32).view(SHAPE),
    "empty": lambda: torch.empty(SHAPE),
    "zeros": lambda: torch.zeros(SHAPE),
    "pin_memory": lambda: torch.empty(SHAPE, device=DEVICE, pin_memory=False),
}
BATCHES = {
    "made at once": lambda: torch.randn(SHAPE),
    "stacked": lambda: torch.stack([torch.ones(8) * row for row in range(4)]),
}


def ring_of_two(slots: list, batches: list, waits: bool) -> None:
    """Batches go through slots that the host fills again, each copied on a stream of its own."""
    model = nn.Linear(8, 8, device=DEVICE)
    copying = torch.cpu.Stream()
    copied = [torch.cpu.Event() for _ in slots]
    for number, batch in enumerate(batches):
        slot = number % len(slots)
        if waits:
            copied[slot].synchronize()
        slots[slot].copy_(batch)
        with torch.cpu.stream(copying):
            there = torch.empty(SHAPE, device=DEVICE)
            there.copy_(slots[slot], non_blocking=True)
            copied[slot].record(copying)
        torch.cpu.current_stream().wait_event(copied[slot])
        there.record_stream(torch.cpu.current_stream())
        model(there).sum().backward()


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("waits", [True, False])
def test_the_host_fills_a_slot_again_once_its_copy_has_run(recorder, make, batch, waits):
    ring_of_two([make(), make()], [batch() for _ in range(4)], waits)
    assert bool(recorder.conflicts) is not waits, recorder.conflicts
    assert all(conflict.later.on.is_main for conflict in recorder.conflicts)


READS = {
    "tolist": lambda buffer: buffer.tolist(),
    "item": lambda buffer: buffer[0].item(),
    "float": lambda buffer: float(buffer[1]),
    "numpy": lambda buffer: buffer.numpy().sum(),
    "str": str,
    "pickle": pickle.dumps,
    "safetensors": lambda buffer: pytest.importorskip("safetensors.torch").save({"x": buffer}),
}
BUFFERS = MAKERS | {
    "empty_like": lambda: torch.empty_like(torch.zeros(SHAPE, device=DEVICE)),
    "device named": lambda: torch.empty(SHAPE, device=DEVICE),
}


@pytest.mark.parametrize("make", BUFFERS.values(), ids=BUFFERS.keys())
@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
@pytest.mark.parametrize("waits", [True, False])
def test_a_metrics_buffer_is_read_once_its_copy_has_run(recorder, make, read, waits):
    """Copied on the stream that the loss was computed on, or on another: no read waits for it."""
    metrics = nn.Linear(8, 1, device=DEVICE)(torch.ones(SHAPE)).detach().view(-1)
    buffer = make().view(-1)[:4]
    buffer.copy_(metrics, non_blocking=True)
    copied = torch.cpu.Event()
    copied.record()
    if waits:
        copied.synchronize()
    read(buffer)
    assert bool(recorder.conflicts) is not waits, recorder.conflicts
    assert recorder.report().copies == 1
    assert copied.elapsed_time(copied) == 0


SNAPSHOTS = {
    "to, copy=True": lambda p: p.to("cpu", copy=True),
    "to another dtype": lambda p: p.to("cpu", torch.float64),
    "empty, copy_": lambda p: torch.empty(p.shape).copy_(p),
    "clone": lambda p: p.clone(),
}


@pytest.mark.parametrize("snapshot", SNAPSHOTS.values(), ids=SNAPSHOTS.keys())
@pytest.mark.parametrize("by", ["thread", "pool"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_thread_saves_what_a_blocking_copy_has_made(recorder, tmp_path, snapshot, by):
    model = nn.Linear(8, 8, device=DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    writing = []
    with ThreadPoolExecutor(1) as pool:
        for step in range(3):
            model(torch.randn(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            for each in writing:
                each.join() if by == "thread" else each.result()
            kept = {name: snapshot(p.detach()) for name, p in model.named_parameters()}
            settings = {"checkpoint_id": tmp_path / f"step{step}", "no_dist": True}
            if by == "thread":
                thread = threading.Thread(target=dcp.save, args=(kept,), kwargs=settings)
                thread.start()
                writing = [thread]
            else:
                writing = [pool.submit(dcp.save, kept, **settings)]
        for each in writing:
            each.join() if by == "thread" else each.result()
    assert recorder.conflicts == []


@pytest.mark.parametrize("by", ["thread", "pool"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_thread_that_saves_what_goes_on_to_change_is_found(recorder, tmp_path, by):
    weight = torch.zeros(8, device=DEVICE) + 1
    settings = {"checkpoint_id": tmp_path / "step", "no_dist": True}
    with ThreadPoolExecutor(1) as pool:
        if by == "pool":
            pool.submit(dcp.save, {"w": weight}, **settings)
        else:
            threading.Thread(target=dcp.save, args=({"w": weight},), kwargs=settings).start()
        weight.add_(1)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    assert recorder.conflicts


def test_torchscript_forgets_what_stood_in_for_its_operators():
    with streams.recording():
        assert _find_builtin(stand_in := torch.zeros) == "aten::zeros"
    assert _find_builtin(stand_in) is None
