"""No save is lost to a second manager, a warning, a late rank, or names that read alike."""

import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from selection import with_library
from torch import nn

from overlap_recipes.checkpoint import CheckpointManager, TrainingState, load
from overlap_recipes.checkpoint.preemption import Preemption
from overlap_recipes.checkpoint.stores.store import steps_of

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
    """The one of SIGTERM that must be there afterwards; what an error has kept hears no signal."""
    gc.collect()
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


STRICT = """
import sys
import torch
from torch import nn
from overlap_recipes.checkpoint import CheckpointManager, TrainingState
for root, done in [(root, done) for root in sys.argv[1:] for done in (0, 1)]:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrainingState(model, optimizer, trainable_only=True)
    with CheckpointManager(root, state) as own:
        assert own.resume() == done
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        own.save(done + 1).result()
"""


def test_a_job_for_which_each_warning_is_an_error_saves_and_resumes(tmp_path: Path) -> None:
    roots = [str(tmp_path / "directory"), f"file://{tmp_path}/store"]
    command = [sys.executable, "-W", "error", "-c", STRICT, *roots]
    done = subprocess.run(
        command, env=with_library(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "values",
    [
        {"a.b": 1, "a": {"b": 2}},
        {"a": {"b.c": 1, "b": {"c": torch.ones(2)}}},
        {1: 1, "1": 2},
        {"a.0": 1, "a": [torch.ones(2)]},
        {"a.0.b": 1, "a": [{"b": 2}]},
    ],
    ids=["a.b", "inner", "number", "list of tensors", "list of dicts"],
)
def test_names_that_a_checkpoint_could_not_tell_apart_are_refused_at_the_first_save(
    tmp_path: Path, values: dict
) -> None:
    state = job(progress=values)
    with (
        pytest.raises(RuntimeError, match=r"one name"),
        CheckpointManager(tmp_path, state, grace_s=None) as own,
    ):
        own.save(1)
    assert not steps_of(path.name for path in tmp_path.iterdir())


@pytest.mark.parametrize("values", [{"a.b": 1, "a": [1, 2]}, {"a.0": 1, "a": [1, 2]}, {"a.b": 1}])
def test_names_that_have_dots_and_are_not_alike_come_back(tmp_path: Path, values: dict) -> None:
    for done in (0, 1):
        progress = dict(values) if not done else {}
        with CheckpointManager(tmp_path, job(progress=progress), grace_s=None) as own:
            assert own.resume() == done
            if not done:
                own.save(1)
    assert progress == values


# -- what a message says -----------------------------------------------------------------------


def leave(root: Path) -> CheckpointManager:
    with CheckpointManager(root, job(), grace_s=None) as own:
        own.save(1)
    return own


def resume_behind_the_block(root: Path) -> None:
    leave(root).resume()


def under_another_key(root: Path) -> None:
    leave(root)
    load({"trainer": job()}, root / "step1")


def saved_by_hand(root: Path) -> None:
    dcp.save({"app": job()}, checkpoint_id=root / "step3")
    with CheckpointManager(root, job(), grace_s=None) as own:
        own.resume()


def skip_a_word(root: Path) -> None:
    leave(root)
    with CheckpointManager(root, job(), grace_s=None) as own:
        own.resume(skip="data")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        (resume_behind_the_block, RuntimeError, r"inside its `with` block"),
        (under_another_key, ValueError, r"has its state under app, not trainer"),
        (saved_by_hand, RuntimeError, r"step3: no manifest, so no CheckpointManager .* load\("),
        (skip_a_word, TypeError, r"skip=\['data'\]"),
    ],
)
def test_a_message_names_the_cause(tmp_path: Path, what, kind: type, words: str) -> None:
    with pytest.raises(kind, match=words):
        what(tmp_path)


def test_what_dcp_has_saved_is_set_aside_by_no_one_who_loads_it(tmp_path: Path) -> None:
    """As the message of ``saved_by_hand`` says."""
    first = job()
    step(first)
    first.step = 3
    with pytest.warns(UserWarning, match="disabled"):
        dcp.save({"app": first}, checkpoint_id=tmp_path / "hand" / "step3")
    state = job()
    load({"app": state}, tmp_path / "hand" / "step3")
    assert state.step == 3
    with CheckpointManager(tmp_path / "new", state, grace_s=None) as own:
        own.save(state.step + 1)
    assert torch.equal(state.model.weight, first.model.weight)


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
