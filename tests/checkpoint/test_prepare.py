"""The first save is prepared beside the first steps, and that changes nothing of the training."""

import ctypes
import logging
import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from overlap_recipes.checkpoint import staging as staging_module
from overlap_recipes.checkpoint.copies import PinnedArena
from overlap_recipes.checkpoint.saves import Saves
from overlap_recipes.checkpoint.state import TrainingState

pytestmark = pytest.mark.usefixtures("one_rank")

CPU = torch.device("cpu")
MARKED_BY_A_STEP = [
    lambda parameters: torch.optim.Adam(parameters, lr=1e-2, weight_decay=0.1),
    lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, dampening=0.5),
    lambda parameters: torch.optim.NAdam(parameters, lr=1e-2),
]


class Job:
    """A small training whose optimizers take turns."""

    def __init__(self, optimizers: int = 1, make=MARKED_BY_A_STEP[0]) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(optimizers)])
        self.optimizers = [make(layer.parameters()) for layer in self.model]
        self.app = TrainingState(self.model, *self.optimizers)
        self.steps = 0
        self.gradients: list[torch.Tensor] = []

    def forward_backward(self) -> None:
        torch.manual_seed(self.steps)
        self.model(torch.randn(3, 4)).square().sum().backward()
        self.gradients += [p.grad.clone() for p in self.model.parameters() if p.grad is not None]

    def step(self) -> None:
        self.forward_backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.steps += 1

    def bits(self) -> list[torch.Tensor]:
        moments = []
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                moments += state.values()
        return [*self.model.parameters(), *moments, *self.gradients]

    def equals(self, other: "Job") -> bool:
        mine, others = self.bits(), other.bits()
        return len(mine) == len(others) and all(map(torch.equal, mine, others))


@pytest.fixture
def gate(monkeypatch) -> threading.Event:
    """Memory is locked when it is set."""
    gate = threading.Event()

    def held(*args) -> PinnedArena:
        assert gate.wait(60)
        return PinnedArena(*args)

    monkeypatch.setattr(staging_module, "PinnedArena", held)
    return gate


def loads(directory: Path, job: Job) -> bool:
    other = Job(len(job.optimizers))
    dcp.load({"app": other.app}, checkpoint_id=directory)
    other.gradients = job.gradients
    return other.equals(job)


@pytest.mark.parametrize("make", MARKED_BY_A_STEP, ids=["adam", "momentum", "nadam"])
@pytest.mark.parametrize("optimizers", [1, 2])
def test_training_beside_a_preparation_has_the_bits_of_training_alone(
    tmp_path, gate, make, optimizers
) -> None:
    alone, job = Job(optimizers, make), Job(optimizers, make)
    with Saves(CPU) as saves:
        prepared = saves.prepare({"app": job.app})
        for _ in range(5):  # the preparation is held in all of them
            job.step()
            alone.step()
            assert job.equals(alone)
        assert prepared.running()
        gate.set()
        prepared.result(60)
        saves.save({"app": job.app}, tmp_path / "step5")
        for _ in range(2):
            job.step()
            alone.step()
    assert job.equals(alone)


def test_a_prepared_save_makes_no_plan_and_locks_no_memory(tmp_path) -> None:
    job = Job()
    with Saves(CPU) as saves:
        prepared = saves.prepare({"app": job.app})
        job.step()
        job.step()
        prepared.result(60)
        plan, arena, plans = saves.staging.plan, saves.staging.arena, saves.writer.plans
        assert plans == 1
        saves.save({"app": job.app}, tmp_path / "step2").result()
        assert saves.staging.plan is plan and saves.staging.arena is arena
        assert saves.writer.plans == plans
    assert loads(tmp_path / "step2", job)


def test_a_save_before_its_preparation_has_ended_waits_and_says_so(tmp_path, gate, caplog) -> None:
    job = Job()
    with Saves(CPU) as saves, caplog.at_level(logging.WARNING):
        saves.prepare({"app": job.app})
        job.step()
        job.step()
        threading.Timer(0.3, gate.set).start()
        done = saves.save({"app": job.app}, tmp_path / "step2")
        assert gate.is_set(), "it has not waited"
        done.result()
    assert "a save waited" in caplog.text and loads(tmp_path / "step2", job)


def test_memory_that_cannot_be_had_is_told_before_the_save(monkeypatch, tmp_path, caplog) -> None:
    job = Job()

    def refused(*_) -> None:
        raise RuntimeError("cannot lock memory")

    with Saves(CPU) as saves:
        with monkeypatch.context() as patch:
            patch.setattr(staging_module, "PinnedArena", refused)
            prepared = saves.prepare({"app": job.app})
            job.step()
            job.step()
            with pytest.raises(RuntimeError, match="cannot lock memory"):
                prepared.result(60)
        assert "not prepared" in caplog.text
        saves.save({"app": job.app}, tmp_path / "step2").result()
    assert loads(tmp_path / "step2", job)


def bytes_of_a_save() -> int:
    with Saves(CPU) as saves:
        saves.make_buffer([torch.ones(1 << 20)])
        return saves.staging.plan.nbytes


def test_saves_lock_the_memory_of_one_whatever_moves(tmp_path, monkeypatch) -> None:
    nbytes = bytes_of_a_save()
    assert 4 << 20 <= nbytes < (4 << 20) + 1000
    locked = []

    def counted(nbytes: int, device: torch.device) -> PinnedArena:
        locked.append(nbytes)
        return PinnedArena(nbytes, device)

    monkeypatch.setattr(staging_module, "PinnedArena", counted)
    with Saves(CPU, host_bytes=nbytes) as saves:
        for step in range(3):
            saves.save({"x": torch.full((1 << 20,), float(step))}, tmp_path / f"step{step}")
    assert locked == [nbytes]
    for step in range(3):
        like = {"x": torch.ones(1 << 20)}
        dcp.load(like, checkpoint_id=tmp_path / f"step{step}")
        assert like["x"].eq(step).all()


def resident_bytes() -> int:
    """This process's, without what the allocator keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_saves_in_a_row_keep_no_memory(tmp_path) -> None:
    x = torch.ones(4 << 20)
    grown = []
    with Saves(CPU) as saves:
        for step in range(12):
            saves.save({"x": x, "step": step}, tmp_path / "latest").result()
            x.add_(1)
            grown.append(resident_bytes())
    assert grown[-1] - grown[2] < 2 * x.nbytes, grown
