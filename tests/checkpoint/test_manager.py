"""One object saves, keeps, resumes and leaves in time, and no checkpoint is lost without a word."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from test_stores import flip
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from troubles import survives

from overlap_recipes.checkpoint import CheckpointManager, TrainingState
from overlap_recipes.checkpoint.stores.store import name_of
from overlap_recipes.checkpoint.writing import Writing
from rankproof.run import run as run_ranks

CPU = torch.device("cpu")


class Job:
    """A small training with a scheduler."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.state = TrainingState(self.model, self.optimizer, scheduler=self.scheduler)

    def step(self) -> float:
        loss = self.model(torch.randn(8, 4)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss.item()


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def run(job: Job, root: Path | str, steps: int, save_every: int = 1, **settings) -> list[float]:
    """Train as README says; the losses."""
    losses = []
    with CheckpointManager(root, job.state, **settings) as checkpoints:
        done = checkpoints.resume()
        for step in range(done + 1, steps + 1):
            losses.append(job.step())
            if step % save_every == 0:
                checkpoints.save(step)
    return losses


@pytest.mark.parametrize("kind", ["directory", "url"])
def test_a_job_that_goes_on_has_the_losses_of_one_without_interruption(
    tmp_path: Path, kind: str
) -> None:
    """Dropout, scheduler and random numbers included; without a process group."""
    root = tmp_path / "run" if kind == "directory" else f"file://{tmp_path}/run"
    whole = run(Job(), tmp_path / "whole", steps=7)
    first = run(Job(), root, steps=4, save_every=2, keep_last=2)
    again = run(Job(seed=1), root, steps=7, save_every=2, keep_last=2)
    assert first + again == whole


def test_the_pointer_names_what_is_there_behind_a_rollback_or_damage(tmp_path: Path) -> None:
    pointer = tmp_path / "latest"
    run(Job(), tmp_path, steps=4, keep_last=4)
    flip(tmp_path / "step4" / "__0_0.distcp")
    with CheckpointManager(tmp_path, Job().state) as checkpoints:
        assert checkpoints.resume() == 3
    assert pointer.read_text() == "step3"
    with CheckpointManager(tmp_path, Job().state) as checkpoints:
        assert checkpoints.resume(step=1) == 1
    assert pointer.read_text() == "step1"
    pointer.unlink()
    run(Job(), tmp_path, steps=2)
    assert pointer.read_text() == "step2"


@pytest.mark.parametrize(
    ("step", "error"),
    [
        (True, TypeError),
        (1.0, TypeError),
        ("5", TypeError),
        (Path("step5"), TypeError),
        (-1, ValueError),
        (1, ValueError),
    ],
    ids=str,
)
def test_a_step_is_a_number_that_grows(tmp_path: Path, step: object, error: type) -> None:
    job = Job()
    with CheckpointManager(tmp_path, job.state) as checkpoints:
        job.step()
        checkpoints.save(2)
        with pytest.raises(error, match="step"):
            checkpoints.save(step)
    assert names(tmp_path) == ["step2"]


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    """The last save of a loop and the one behind the loop, or one behind a resume."""
    job = Job()
    with CheckpointManager(tmp_path, job.state) as checkpoints:
        job.step()
        first = checkpoints.save(1)
        assert checkpoints.save(1) is first
    with CheckpointManager(tmp_path, Job().state) as checkpoints:
        assert checkpoints.resume() == 1
        checkpoints.save(1).result()
    assert names(tmp_path) == ["step1"]


def test_the_block_raises_if_the_last_save_failed_and_not_for_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    job = Job()
    fails = [True, False]

    real = Writing.write_files

    def write(self, *args: object) -> dict:
        if fails.pop(0):
            raise OSError(28, "No space left on device")
        return real(self, *args)

    monkeypatch.setattr(Writing, "write_files", write)
    with CheckpointManager(root, job.state) as checkpoints:
        for step in (1, 2):
            job.step()
            checkpoints.save(step)
    fails.append(True)
    manager = CheckpointManager(root, job.state)
    with pytest.raises(RuntimeError, match="No space left"), manager as checkpoints:
        checkpoints.resume()
        checkpoints.save(3)


def test_without_a_grace_period_the_signal_is_left_alone(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with CheckpointManager(tmp_path, Job().state, grace_s=None) as checkpoints:
        assert signal.getsignal(signal.SIGTERM) is before
        assert not checkpoints.preempted()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_not_told_as_another_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    told = rf"cannot lock .*Errno {number}.*mount it with locks"
    with (
        pytest.raises(RuntimeError, match=told),
        CheckpointManager(tmp_path, Job().state, grace_s=None),
    ):
        pass


@pytest.mark.parametrize(
    ("root", "settings", "message"),
    [
        ("run", {"keep_last": 0}, "keep_last is 0"),
        ("run", {"keep_every": -1}, "keep_every is -1"),
        ("s3://", {}, "s3:// names no bucket"),
        ("s3//bucket/run", {}, "nearly a URL"),
        ("gs:bucket/run", {}, "nearly a URL"),
        ("", {}, "the root is empty"),
        ("s3://me:secret@bucket/run", {}, "credentials belong into the environment"),
        ("run", {"write_threads": 0}, "write_threads is 0"),
    ],
)
def test_a_setting_without_a_meaning_is_refused(
    tmp_path: Path, root: str, settings: dict, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match=message):
        CheckpointManager(root, Job().state, **settings)
    assert signal.getsignal(signal.SIGTERM) is before
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("url", ["s3://bucket/run", "memory://run", "file:///run"])
def test_a_url_as_a_path_is_refused_since_it_has_lost_a_slash(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="give the URL as text"):
        CheckpointManager(Path(url), Job().state)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("endpoint", ["localhost:9000", "", "http://", "ftp://host"])
def test_an_endpoint_that_is_no_url_is_refused_by_its_variable(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(ValueError, match=f"AWS_ENDPOINT_URL={endpoint} is no URL"):
        CheckpointManager("s3://bucket/run", Job().state)


def test_the_state_is_a_training_state(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"state is a dict: pass TrainingState\(model"):
        CheckpointManager(tmp_path, {})


@pytest.mark.parametrize("kind", ["directory", "url"])
@pytest.mark.parametrize("size", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_ranks_without_a_process_group_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, size: str
) -> None:
    """Each would be a job of its own, and a store cannot be asked whether another one writes."""
    root = tmp_path if kind == "directory" else f"file://{tmp_path}"
    monkeypatch.setenv(size, "2")
    with (
        pytest.raises(RuntimeError, match="one of 2 ranks.*call torch.distributed.init_process"),
        CheckpointManager(root, Job().state, grace_s=None),
    ):
        pass
    assert not list(tmp_path.iterdir())


def in_fsdp1(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, device_id=CPU, use_orig_params=True)


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


WRONG_ORDERS = {
    "checkpoint_wrapper around FullyShardedDataParallel": (checkpoint_wrapper, in_fsdp1),
    "checkpoint_wrapper around torch.compile": (checkpoint_wrapper, compiled),
    "FullyShardedDataParallel around torch.compile": (in_fsdp1, compiled),
}


@pytest.mark.parametrize("said", WRONG_ORDERS)
def test_wrappers_that_torch_could_not_load_in_this_order_are_refused(
    said: str, tmp_path: Path, one_rank: None
) -> None:
    around, inside = WRONG_ORDERS[said]
    model = in_fsdp1(nn.Sequential(nn.Linear(2, 2), around(inside(nn.Linear(2, 2)))))
    state = TrainingState(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(TypeError, match=f"^1 is {said}: .* another order"):
        CheckpointManager(tmp_path, state)


def test_wrappers_in_an_order_that_torch_can_load_are_resumed(
    tmp_path: Path, one_rank: None
) -> None:
    weights = []
    for steps in (1, 2):
        layer = compiled(in_fsdp1(checkpoint_wrapper(nn.Linear(2, 2))))
        model = in_fsdp1(nn.Sequential(layer))
        optimizer = torch.optim.AdamW(model.parameters())
        with CheckpointManager(tmp_path, TrainingState(model, optimizer)) as checkpoints:
            done = checkpoints.resume()
            assert done == steps - 1
            weights.append(next(model.parameters()).detach().clone())
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            weights.append(next(model.parameters()).detach().clone())
            checkpoints.save(steps)
    assert torch.equal(weights[1], weights[2])


def test_ranks_save_resume_and_fail_as_one() -> None:
    """The late rank comes last: they do not understand each other after it."""
    troubles = ("goes_on", "ddp", "room_for_one_checkpoint", "load_in_a_group", "other_steps")
    troubles += ("other_resumes", "a_rank_that_cannot_begin_to_write")
    troubles += ("later_difference", "failed_step", "full_disk", "nothing_to_train", "not_shared")
    troubles += ("sharded_by_fsdp1", "error_of_a_store", "late_rank")
    survives("manager_troubles", *troubles, ranks=2)


def test_buffers_that_ranks_change_for_themselves_come_from_rank_0() -> None:
    """Which the harness says, too: what rank 1 passed is not what is loaded."""
    program = Path(__file__).parents[1] / "data" / "manager_troubles.py"
    report = run_ranks(program, 2, launcher="warm", args=("batch_norm",), deadline_s=120)
    assert report.kinds == {"checkpoint_wrong"}, report.describe()
    assert all("(rank 0)" not in failure.text for failure in report.failures), report.describe()


def warmed_up(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, partial(min, 1.0))


def in_steps(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 4])


@pytest.mark.parametrize("schedule", [warmed_up, in_steps])
def test_every_save_of_a_schedule_succeeds_and_comes_back(tmp_path: Path, schedule) -> None:
    """States with a list of an empty dict, as transformers' schedules, and with numbers as keys."""
    job = Job()
    job.scheduler = schedule(job.optimizer)
    job.state = TrainingState(job.model, job.optimizer, scheduler=job.scheduler)
    with CheckpointManager(tmp_path, job.state) as checkpoints:
        for step in range(1, 5):
            job.step()
            checkpoints.save(step).result()
    wanted = job.scheduler.state_dict()
    job.step()
    with CheckpointManager(tmp_path, job.state) as checkpoints:
        assert checkpoints.resume() == 4
    assert job.scheduler.state_dict() == wanted


GRADIENTS = "gradients that no optimizer of TrainingState has used"
SCHEDULER = "a scheduler sets the learning rate of"


@pytest.mark.parametrize("to_none", [True, False])
def test_a_save_in_mid_accumulation_warns_that_the_gradients_are_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, to_none: bool
) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with CheckpointManager(tmp_path, TrainingState(model, optimizer)) as checkpoints:
        for step in range(1, 5):
            model(torch.ones(2, 4)).sum().backward()
            if step % 2 == 0:
                optimizer.step()
                checkpoints.save(step)
                optimizer.zero_grad(set_to_none=to_none)
        assert GRADIENTS not in caplog.text
        model(torch.ones(2, 4)).sum().backward()
        checkpoints.save(5)
        assert f"step 5 is saved with {GRADIENTS}" in caplog.text


@pytest.mark.parametrize("given", ["none", "one", "a list", "in another object"])
def test_a_scheduler_that_was_not_given_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, given: str
) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    class Wrapper:
        def __init__(self) -> None:
            self.inner = scheduler
            self.state_dict = scheduler.state_dict
            self.load_state_dict = scheduler.load_state_dict

    shared = {
        "none": {"progress": {"epoch": 0}},
        "one": {"scheduler": scheduler},
        "a list": {"scheduler": [scheduler]},
        "in another object": {"scheduler": Wrapper()},
    }
    state = TrainingState(model, optimizer, **shared[given])
    with CheckpointManager(tmp_path, state) as checkpoints:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        checkpoints.save(1)
    assert (f"{SCHEDULER} SGD" in caplog.text) == (given == "none")


def test_a_forked_process_can_neither_save_nor_end_the_block(tmp_path: Path) -> None:
    """Its end would give up the lock of the one that has entered, and wait for its threads."""
    job = Job()
    with CheckpointManager(tmp_path, job.state) as checkpoints:
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                checkpoints.__exit__(None, None, None)
                with pytest.raises(RuntimeError, match="that has entered it"):
                    checkpoints.save(1)
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with pytest.raises(RuntimeError, match="another job writes"):
            CheckpointManager(tmp_path, Job().state).__enter__()


NEVER_LEFT = """
import atexit, logging, os, sys, threading, time
from torch import nn
from overlap_recipes.checkpoint import CheckpointManager, TrainingState

told = threading.Event()


@atexit.register
def say_whether_it_was_waited_for():  # called after what was registered later
    print("done:", checkpoints.latest.done())


class Tells(logging.Handler):
    def emit(self, record):
        if "nobody has left the manager" in record.getMessage():
            told.set()


def synced_when_told(file):
    told.wait()
    time.sleep(0.2)


os.fsync = synced_when_told  # the save has not ended when the script does
logging.getLogger("overlap_recipes").addHandler(Tells())
checkpoints = CheckpointManager(sys.argv[1], TrainingState(nn.Linear(4, 4)), grace_s=None)
checkpoints.__enter__()
checkpoints.resume()
checkpoints.save(3)
"""


def test_a_save_of_a_manager_that_nobody_leaves_ends_with_the_script(tmp_path):
    script = [sys.executable, "-c", NEVER_LEFT, str(tmp_path)]
    ended = subprocess.run(script, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "done: True\n"
    assert (tmp_path / name_of(3)).is_dir()
