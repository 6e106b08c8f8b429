"""The first save is prepared beside the first steps, and that changes nothing of the training."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from overlap_recipes.checkpoint import saves as saves_module
from overlap_recipes.checkpoint import staging as staging_module
from overlap_recipes.checkpoint.copies import PinnedArena
from overlap_recipes.checkpoint.saves import Saves
from overlap_recipes.checkpoint.state import TrainingState
from overlap_recipes.checkpoint.writer import FileWriter

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


@pytest.fixture(autouse=True)
def rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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


def test_nothing_is_asked_for_before_every_optimizer_has_state() -> None:
    """An optimizer without state would be made to step, which leaves marks in some."""
    job = Job(2)
    first, second = job.optimizers
    with Saves(CPU) as saves:
        prepared = saves.prepare({"app": job.app})
        for _ in range(3):  # the second does not step
            job.forward_backward()
            first.step()
        assert not prepared.running() and not prepared.done()
        job.step()
        job.step()
        prepared.result(60)
    assert len(second.state) == 2


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


def test_a_second_preparation_is_refused(tmp_path) -> None:
    """Two would make buffers on two threads."""
    job = Job()
    with Saves(CPU) as saves:
        saves.prepare({"app": job.app})
        with pytest.raises(RuntimeError, match="prepare once"):
            saves.prepare({"app": job.app})
        job.step()
        saves.save({"app": job.app}, tmp_path / "step1").result()
        with pytest.raises(RuntimeError, match="prepare once"):
            saves.prepare({"app": job.app})


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


def test_a_state_is_saved_again_behind_one_that_the_memory_did_not_hold(tmp_path) -> None:
    x = torch.ones(1 << 20)
    with Saves(CPU, host_bytes=bytes_of_a_save()) as saves:
        saves.save({"x": x}, tmp_path / "step1").result()
        with pytest.raises(RuntimeError, match="host_bytes is"):
            saves.save({"x": torch.ones(2 << 20)}, tmp_path / "step2").result()
        saves.writing.failures.clear()
        x.fill_(3)
        saves.save({"x": x}, tmp_path / "step3").result()
    like = {"x": torch.zeros(1 << 20)}
    dcp.load(like, checkpoint_id=tmp_path / "step3")
    assert like["x"].eq(3).all()


def test_a_save_waits_for_the_one_before_it_says_so_and_doubles_the_threads(
    tmp_path, monkeypatch, caplog
) -> None:
    class Held(FileWriter):
        def write(self, *args) -> None:
            assert go.wait(60)
            super().write(*args)

    def held(**settings) -> Saves:
        return Saves(CPU, writer=Held(), **settings)

    def open_and_wait(uploads: list) -> object:
        go.set()
        return wait(uploads)

    go, wait, x = threading.Event(), saves_module.wait, torch.ones(3)
    go.set()
    monkeypatch.setattr(saves_module, "wait", open_and_wait)
    with held() as saves, held(write_threads=1) as set_by_hand:
        for step in range(3):
            saves.save({"x": x}, tmp_path / f"a{step}").result()
        assert saves.writing.threads == 2 and "a save waited" not in caplog.text
        for each, letter, threads in ((saves, "b", 4), (set_by_hand, "c", 1)):
            go.clear()
            each.save({"x": x}, tmp_path / f"{letter}0")
            with caplog.at_level(logging.WARNING):
                each.save({"x": x}, tmp_path / f"{letter}1")
            assert each.writing.threads == threads
            assert "until the last was written" in caplog.text
            caplog.clear()


@pytest.mark.parametrize("threads", [0, 9])
def test_a_number_of_threads_that_does_nothing_is_refused(threads: int) -> None:
    with pytest.raises(ValueError, match="give 1 to 8"):
        Saves(CPU, write_threads=threads)
