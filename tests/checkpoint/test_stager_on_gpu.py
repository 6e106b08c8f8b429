"""The overlapped stager on a CUDA device: the saved step, reads beside its copies, their stream.

Work is queued on the compute stream before each save, and no test waits for the device before it
has saved: that would hide what is looked for.
"""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from selection import REPO

from overlap_recipes.checkpoint import copies, saves

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

QUEUED_S = 1.0  # of work before a save; staging takes milliseconds
MATRIX = 8192  # rows and columns
TOYS = str(REPO / "recipes_source" / "checkpoint")


@pytest.fixture(scope="module", autouse=True)
def rank():
    """One rank with NCCL and gloo, and the recipes importable."""
    sys.path.insert(0, TOYS)
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    sys.path.remove(TOYS)


class Saver:
    """An application state and its saves."""

    def __init__(self, root: Path) -> None:
        self.basic, self.root = importlib.import_module("_toys"), root
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.app = self.basic.build_app(self.device)
        self.saves = saves.Saves(self.device, self.app.model.buffers())
        self.saves.__enter__()
        self.uploads: list = []
        self.expected: dict[int, dict] = {}
        for _ in range(3):  # kernels are loaded and memory is locked before anything is judged
            self.step()
            self.save()
        self.finish()
        self.compute = torch.ones(MATRIX, MATRIX, device=self.device, dtype=torch.bfloat16)
        self.product = torch.empty_like(self.compute)
        self.queue_work(0.05)
        torch.cuda.synchronize()

    def step(self) -> None:
        self.basic.train_step(self.app, self.device)

    def queue_work(self, seconds: float) -> None:
        """Queue matmuls for about ``seconds`` (600 TFLOP/s) on the compute stream."""
        for _ in range(max(1, round(seconds * 600e12 / (2 * MATRIX**3)))):
            torch.mm(self.compute, self.compute, out=self.product)

    def save(self) -> None:
        self.expected[self.app.step] = self.basic.snapshot(self.app)
        directory = self.root / f"step{self.app.step}"
        self.uploads.append(self.saves.save({"app": self.app}, directory))

    def right(self, step: int) -> bool:
        loaded = self.basic.load_app(self.root / f"step{step}", self.device)
        try:
            self.basic.assert_same_bits(loaded, self.expected[step])
        except AssertionError:
            return False
        return True

    def finish(self) -> None:
        for upload in self.uploads:
            upload.result()
        self.uploads.clear()

    def close(self) -> None:
        self.finish()
        self.saves.__exit__(None, None, None)


@pytest.fixture
def saver(tmp_path):
    made = Saver(tmp_path)
    yield made
    made.close()


def saved_behind_work(saver: Saver) -> bool:
    """Save right after a step with work queued before it; whether that step is what was saved."""
    saver.queue_work(QUEUED_S)
    saver.step()
    saver.save()
    stepped = torch.cuda.Event()
    stepped.record()
    assert not stepped.query(), "the queued work had ended: nothing was tested"
    saver.step()
    saver.finish()
    return saver.right(saver.app.step - 1)


def test_a_save_with_work_queued_holds_its_own_step(saver):
    assert all(saved_behind_work(saver) for _ in range(3))


def test_a_read_in_mid_step_does_not_wait_for_the_copies(saver, monkeypatch):
    """Against the same copies without gaps, which it does wait for."""
    streams, device = torch.cuda, torch.device("cuda", torch.cuda.current_device())
    tensors = [torch.zeros(1 << 28, device=device) for _ in range(4)]  # 4 GiB, 80 ms
    plan = copies.CopyPlan(tensors, device)
    arena = copies.PinnedArena(plan.nbytes, device)
    gaps = plan.copies(arena)
    monkeypatch.setattr(copies, "PIECE", plan.nbytes)
    plain = plan.copies(arena)
    scalar, stream, waits = torch.zeros(1, device=device), streams.Stream(), {}
    for name, rows in {"gaps": gaps, "plain": plain}.items():
        waits[name] = []
        for _ in range(4):
            torch.cuda.synchronize()
            _, copied = rows.queue(streams, stream)
            scalar.item()
            waits[name].append(not copied.query())
            torch.cuda.synchronize()
    assert sum(waits["gaps"]) >= 3, "the read came back when all copies had ended"
    assert sum(waits["plain"]) <= 1, "the read did not wait, so nothing was tested"


def test_copies_are_pinned_and_beside_compute_on_another_stream(saver, tmp_path):
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        saver.queue_work(0.1)
        saver.step()
        saver.save()
        saver.queue_work(0.1)
        saver.step()
        torch.cuda.synchronize()
    saver.finish()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    copies = [
        event
        for event in events
        if event.get("cat") == "gpu_memcpy" and event["args"].get("bytes", 0) > 2**20
    ]
    copies = [event for event in copies if "DtoH" in event["name"]]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    matmuls = [k for k in kernels if k["dur"] > 500]  # the 8192³ ones, µs
    assert copies and all("Pinned" in event["name"] for event in copies)
    streams = {event["args"]["stream"] for event in copies}
    assert streams.isdisjoint(event["args"]["stream"] for event in matmuls)
    copied = sum(event["dur"] for event in copies)
    beside = sum(
        max(0, min(c["ts"] + c["dur"], p["ts"] + p["dur"]) - max(c["ts"], p["ts"]))
        for c in copies
        for p in matmuls
    )
    assert beside > 0.8 * copied, f"{beside:.0f} of {copied:.0f} µs of copies beside products"
