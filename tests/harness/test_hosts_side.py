"""Stream order on the host's side: buffers that it fills and reads, copies that it waits for."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from rankproof import streams
from rankproof.streams.stagers import always_blocks

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


def test_what_a_device_has_computed_is_waited_for_where_it_is_read(recorder):
    """From a batch that came by a copy that need not wait."""
    there = torch.empty(SHAPE, device=DEVICE)
    there.copy_(torch.randn(SHAPE), non_blocking=True)
    assert there.tolist() and (there * 2).sum().item()
    assert recorder.conflicts == []


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


HOME = {
    "to, copy=True": lambda tensor: tensor.to("cpu", copy=True),
    "empty, copy_": lambda tensor: torch.empty(tensor.shape).copy_(tensor),
}


@pytest.mark.parametrize("copy_home", HOME.values(), ids=HOME.keys())
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_thread_copies_home_what_was_queued_before_it_was_told(recorder, copy_home, goes_on):
    """Blocking, in no stream of its own: in turn with the default stream, as on a device."""
    weight = torch.zeros(SHAPE, device=DEVICE) + 1
    cloned = weight.clone()
    given = weight if goes_on else cloned
    thread = threading.Thread(target=copy_home, args=(given,))
    thread.start()
    if goes_on:
        weight.add_(1)
    thread.join()
    del cloned, given
    assert (weight.clone() + 1).numel() == 32
    assert bool(recorder.conflicts) is goes_on, recorder.conflicts


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


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_stager_that_blocks_copies_in_turn(recorder, tmp_path, waits):
    model = nn.Linear(8, 8, device=DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stager = DefaultStager(StagingOptions(False, False, True, False))
    uploads = []
    for step in range(3):
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for upload in uploads:
            upload.result()
        state = {"model": model.state_dict()}
        begun = dcp.async_save(state, checkpoint_id=tmp_path / f"{step}", async_stager=stager)
        if waits:
            begun.staging_completion.result()
        uploads = [begun.upload_completion]
    uploads[0].result()
    stager.close()
    assert bool(recorder.conflicts) is not waits, recorder.conflicts


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("DefaultStager(StagingOptions(False, False, True, False))", True),
        ("DefaultStager(StagingOptions(use_non_blocking_copy=False))", True),
        ("DefaultStager(StagingOptions(use_non_blocking_copy=gpu))", False),
        ("DefaultStager(StagingOptions())", False),
        (
            "DefaultStager(StagingOptions(False, False, True, False)) if cpu else DefaultStager()",
            False,
        ),
    ],
)
def test_a_stager_is_judged_as_it_behaves_with_an_accelerator(tmp_path, text, blocks):
    file = tmp_path / "script.py"
    file.write_text(text)
    assert always_blocks(str(file)) is blocks
