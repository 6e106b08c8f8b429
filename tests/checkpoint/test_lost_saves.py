"""No save is lost to a second manager, a warning, or a late rank."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from selection import with_library
from torch import nn

from overlap_recipes.checkpoint import CheckpointManager, TrainingState
from overlap_recipes.checkpoint.preemption import Preemption
from overlap_recipes.checkpoint.stores.store import steps_of
from overlap_recipes.checkpoint.talk import Talk

GRACE_S = 3600


def job(**shared: object) -> TrainingState:
    model = nn.Linear(4, 4)
    return TrainingState(model, torch.optim.AdamW(model.parameters()), **shared)


def step(state: TrainingState) -> None:
    state.model(torch.ones(4)).sum().backward()
    state.optimizers[0].step()
    state.optimizers[0].zero_grad()


@pytest.fixture(autouse=True)
def handler() -> Iterator[object]:
    """The one of SIGTERM that must be there afterwards."""
    found = signal.getsignal(signal.SIGTERM)
    yield found
    signal.signal(signal.SIGTERM, found)


def manager(root: Path, number: int) -> CheckpointManager:
    return CheckpointManager(root / str(number), job(), grace_s=GRACE_S)


def saved(root: Path) -> list[int]:
    return [len(steps_of(path.name for path in each.iterdir())) for each in sorted(root.iterdir())]


@pytest.mark.parametrize("asked", [0, 1, 2])
def test_sigterm_is_told_by_each_manager_of_several_in_each_other(
    tmp_path: Path, asked: int
) -> None:
    several = [manager(tmp_path, number) for number in range(3)]
    with ExitStack() as stack:
        for each in several:
            stack.enter_context(each)
        for number in range(1, 9):
            for each in several:
                step(each.state)
            if number == 3:
                signal.raise_signal(signal.SIGTERM)
            if several[asked].preempted():
                for each in several:
                    each.save(number)
                break
    assert number < 8
    assert saved(tmp_path) == [1, 1, 1]
    assert several[asked].exit_code == 85


@pytest.mark.parametrize("made", ["before", "in turn"])
@pytest.mark.parametrize("struck", [0, 1, None])
def test_each_of_several_managers_in_turn_answers_sigterm_and_gives_it_back(
    tmp_path: Path, handler: object, made: str, struck: int | None
) -> None:
    several = [manager(tmp_path, number) for number in range(2) if made == "before"]
    for number in range(2):
        own = several[number] if several else manager(tmp_path, number)
        with own:
            step(own.state)
            if number == struck:
                signal.raise_signal(signal.SIGTERM)
            if made == "before" or struck != 0:
                assert own.preempted() == (struck is not None and number >= struck)
            own.save(1)
    if struck is None:
        assert signal.getsignal(signal.SIGTERM) is handler
    assert saved(tmp_path) == [1, 1]


def test_a_handler_of_the_users_own_between_two_managers_comes_back(tmp_path: Path) -> None:
    def own(*_: object) -> None: ...

    with manager(tmp_path, 0):
        signal.signal(signal.SIGTERM, own)
        with manager(tmp_path, 1):
            pass
    assert signal.getsignal(signal.SIGTERM) is own


@pytest.mark.parametrize(("minutes", "due"), [(1, 10), (120, 120)])
def test_ranks_wait_for_each_other_as_long_as_their_group_does(
    tmp_path: Path, minutes: int, due: int
) -> None:
    given = timedelta(minutes=minutes)
    wait = timedelta(minutes=due)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=given)
    try:
        talk = Talk()
        assert talk.deadline == wait
        with CheckpointManager(tmp_path, job()) as own:
            groups = [talk.group, own.preemption.votes, own.preemption.peers]
            for group in groups:
                host = group._get_backend(torch.device("cpu"))
                assert host.options._timeout == wait
    finally:
        dist.destroy_process_group()


STRICT = """
import sys
import torch
from torch import nn
from overlap_recipes.checkpoint import CheckpointManager, TrainingState
for done in (0, 1):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrainingState(model, optimizer, trainable_only=True)
    with CheckpointManager(sys.argv[1], state) as own:
        assert own.resume() == done
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        own.save(done + 1).result()
"""


@pytest.mark.parametrize("place", ["", "file://"])
def test_a_job_for_which_each_warning_is_an_error_saves_and_resumes(
    tmp_path: Path, place: str
) -> None:
    command = [sys.executable, "-W", "error", "-c", STRICT, f"{place}{tmp_path}"]
    done = subprocess.run(
        command, env=with_library(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_manager_on_another_thread_is_refused_while_one_is_open(tmp_path: Path) -> None:
    told = []

    def make() -> None:
        try:
            Preemption(grace_s=GRACE_S)
        except ValueError as error:
            told.append(str(error))

    with manager(tmp_path, 0):
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
    assert told
