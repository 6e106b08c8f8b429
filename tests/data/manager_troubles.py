"""What the manager does on several ranks; the argument names it."""

import errno
import logging
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from unittest import mock

RECIPES = Path(__file__).parents[2] / "recipes_source" / "checkpoint"
sys.path[:0] = [str(RECIPES), str(Path(__file__).parent)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from facing import face  # noqa: E402
from raising import assert_refused  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed._shard.sharded_tensor import ShardedTensor  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from overlap_recipes.checkpoint import CheckpointManager, TrainingState, load, talk  # noqa: E402
from overlap_recipes.checkpoint.kept import Checkpoint  # noqa: E402
from overlap_recipes.checkpoint.stores.directory import Directory  # noqa: E402
from overlap_recipes.checkpoint.stores.objects import Objects  # noqa: E402


class Job:
    """A small training of all ranks, each with batches and dropout of its own."""

    def __init__(self, wrap, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = wrap(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4)))
        torch.manual_seed(100 * seed + dist.get_rank())
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


def sharded(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def run(job: Job, root: Path, steps: int, **settings) -> list[float]:
    losses = []
    with CheckpointManager(root, job.state, **settings) as checkpoints:
        done = checkpoints.resume()
        for step in range(done + 1, steps + 1):
            losses.append(job.step())
            checkpoints.save(step)
    return losses


def raises(kind: type, words: str, call, *args) -> None:
    assert_refused(partial(call, *args), kind, words)


def goes_on(root: Path, device: torch.device) -> None:
    """A signal to one rank: all save the same step, and a restart has the losses of one run."""
    whole = run(Job(sharded), root / "whole", 8)
    job = Job(sharded)
    losses = []
    with CheckpointManager(root / "run", job.state, grace_s=60) as checkpoints:
        assert checkpoints.resume() == 0
        for step in range(1, 9):
            losses.append(job.step())
            if step == 3 and dist.get_rank() == dist.get_world_size() - 1:
                signal.raise_signal(signal.SIGTERM)
            if checkpoints.preempted():
                checkpoints.save(step)
                break
    assert step < 8
    assert checkpoints.exit_code == 85
    assert losses + run(Job(sharded, seed=1), root / "run", 8) == whole


def ddp(root: Path, device: torch.device) -> None:
    whole = run(Job(DistributedDataParallel), root / "whole", 6)
    first = run(Job(DistributedDataParallel), root / "run", 3)
    assert first + run(Job(DistributedDataParallel, seed=1), root / "run", 6) == whole


def room_for_one_checkpoint(root: Path, device: torch.device) -> None:
    """A save needs the room that its checkpoint takes, whether ranks hold copies or shards."""
    numbers = 4 * 8 + 8 + 8 * 4 + 4
    size = 4 * (3 * numbers + 4)  # weights and two moments, and the steps of four parameters
    for wrap in (DistributedDataParallel, sharded):
        job = Job(wrap)
        job.step()
        with CheckpointManager(root / wrap.__name__, job.state) as checkpoints:
            for step, free in enumerate((size - 1, size), 1):
                usage = SimpleNamespace(free=free)
                with mock.patch.object(shutil, "disk_usage", lambda _, usage=usage: usage):
                    error = checkpoints.save(step).exception()
                lacks = f"{size} bytes to write, {free} free"
                assert (lacks in str(error)) == (free < size), error


def frozen_base(seed: int) -> TrainingState:
    torch.manual_seed(seed)
    trained = nn.Linear(4, 4)
    torch.manual_seed(0)
    base = nn.Linear(4, 4).requires_grad_(False)
    model = nn.Sequential(base, trained)
    return TrainingState(model, torch.optim.AdamW(trained.parameters()), trainable_only=True)


def load_in(group: dist.ProcessGroup, state: TrainingState, directory: Path) -> None:
    load({"app": state}, directory, process_group=group)


def load_in_a_group(root: Path, device: torch.device) -> None:
    """The last rank loads alone: what is frozen is compared in its group, and not in all."""
    saved = frozen_base(seed=1)
    with CheckpointManager(root, saved) as checkpoints:
        checkpoints.save(1)
    last = dist.get_world_size() - 1
    group = dist.new_group([last])
    if dist.get_rank() == last:
        other = frozen_base(seed=2)
        load_in(group, other, root / "step1")
        assert torch.equal(other.model[1].weight, saved.model[1].weight)
        with torch.no_grad():
            other.model[0].weight.add_(1)
        raises(ValueError, "of other values", load_in, group, other, root / "step1")


def other_steps(root: Path, device: torch.device) -> None:
    """A save whose step differs between ranks fails on all, and the next one succeeds."""
    job = Job(sharded)
    with CheckpointManager(root, job.state) as checkpoints:
        job.step()
        raises(RuntimeError, "ranks differ in app.step", checkpoints.save, 1 + dist.get_rank())
        job.step()
        checkpoints.save(5).result()
        failed = checkpoints.save(6 + dist.get_rank())
        raises(RuntimeError, "the ranks have called save for others", failed.result)
        checkpoints.save(9)
    dist.barrier()
    assert sorted(path.name for path in root.glob("step*")) == ["step5", "step9"]


def other_resumes(root: Path, device: torch.device) -> None:
    """A resume that differs between ranks is refused on all, before it changes anything."""
    rank = dist.get_rank()
    run(Job(sharded), root, 4)
    for settings in ({"step": 2 + 2 * rank}, {"skip": ["scheduler"] * rank}):
        job = Job(sharded, seed=1)
        with CheckpointManager(root, job.state, grace_s=None) as checkpoints:
            raises(ValueError, "ranks resume otherwise", partial(checkpoints.resume, **settings))
            assert job.state.step == 0


def late_rank(root: Path, device: torch.device) -> None:
    """Behind a deadline the ranks do not understand each other: the next save says so."""
    talk.wait_of_ranks = lambda: timedelta(seconds=5)
    job = Job(sharded)
    try:
        with CheckpointManager(root, job.state) as checkpoints:
            checkpoints.save(1).result()
            if dist.get_rank() == 0:
                assert checkpoints.save(2).exception() is not None  # it has waited for rank 1
            dist.barrier()
            if dist.get_rank() == 1:
                assert checkpoints.save(2).exception() is not None
            job.step()
            raises(RuntimeError, "No later save can succeed", checkpoints.save, 3)
            raises(RuntimeError, "No later save can succeed", checkpoints.save, 3)
    except RuntimeError as error:
        assert "no checkpoint" not in str(error)
    else:
        raise AssertionError("the block has not told of the save that failed")
    assert sorted(path.name for path in root.glob("step?")) == ["step1"]


def later_difference(root: Path, device: torch.device) -> None:
    """What differs from the second save on raises on all ranks in the next call, and once."""
    for kind in ("directory", "url"):
        folder = root / kind
        job = Job(sharded)
        place = folder if kind == "directory" else f"file://{folder}"
        with CheckpointManager(place, job.state, keep_last=9) as checkpoints:
            job.step()
            checkpoints.save(1)
            job.step()
            job.scheduler.last_epoch += dist.get_rank()
            checkpoints.save(2)
            job.scheduler.last_epoch -= dist.get_rank()
            raises(RuntimeError, "ranks differ in app.scheduler", checkpoints.save, 3)
            checkpoints.save(3).result()  # what has raised was the save before
            checkpoints.save(4)
            job.scheduler.last_epoch += dist.get_rank()
            checkpoints.save(5)
            raises(RuntimeError, "ranks differ in app.scheduler", checkpoints.wait)
            job.scheduler.last_epoch -= dist.get_rank()
            checkpoints.save(6)
        found = CheckpointManager(place, job.state).store.steps()
        assert sorted(found) == [1, 3, 4, 6], found  # the call that raises saves its own step
        dist.barrier()


def batch_norm(root: Path, device: torch.device) -> None:
    """Buffers that each rank changes for itself come from rank 0, large ones too, and are named."""
    job = Job(sharded)
    norms = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(4)]
    for norm in norms:
        norm.register_buffer("queue", torch.full((600, 600), dist.get_rank()))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    of_each = torch.full((4,), dist.get_rank())
    whole = DTensor.from_local(of_each, mesh, [Replicate()], run_check=False)
    job.model = sharded(nn.Sequential(*norms))
    job.model.register_buffer("whole", whole)
    job.model.register_buffer("drifts", torch.zeros(4))
    job.optimizer = torch.optim.SGD(job.model.parameters(), lr=1e-2)
    progress = {"batch": torch.full((2,), dist.get_rank())}
    job.state = TrainingState(job.model, job.optimizer, progress=progress)
    job.step()
    of_ranks = [None] * dist.get_world_size()
    plain = {name: b for name, b in job.model.named_buffers() if name != "whole"}
    dist.all_gather_object(of_ranks, plain)
    with messages() as said, CheckpointManager(root, job.state) as checkpoints:
        checkpoints.save(1).result()
        job.model.drifts += dist.get_rank()
        checkpoints.save(2).result()
        checkpoints.save(3)
    later = [line for line in said if "ranks differ in app.model.drifts:" in line]
    assert len(later) == (dist.get_rank() == 0), said
    told = [line for line in said if "ranks differ in app.model.0.1.running_mean" in line]
    assert len(told) == (dist.get_rank() == 0), said
    for name in ("app.model.3.queue", "app.progress.batch", "app.model.whole"):
        assert all(name in line for line in told), said
    for buffer in job.model.buffers():
        buffer.zero_()
    with CheckpointManager(root, job.state) as checkpoints:
        checkpoints.resume()
    for name, buffer in plain.items():
        assert torch.equal(buffer, of_ranks[0][name]), f"{name} is not that of rank 0"


@contextmanager
def messages() -> Iterator[list[str]]:
    """The warnings that are logged meanwhile."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())
    logging.getLogger("overlap_recipes").addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger("overlap_recipes").removeHandler(handler)


def failed_step(root: Path, device: torch.device) -> None:
    """A step is saved again by all ranks if its save failed, though one of them learns it later."""
    job = Job(sharded)
    with CheckpointManager(root, job.state) as checkpoints:
        job.step()
        commit = Checkpoint.commit
        may_fail = Event()

        def fail(*args: object) -> None:
            may_fail.wait()
            Checkpoint.commit = commit
            raise OSError(28, "No space left on device")

        if dist.get_rank() == 0:  # which commits for all
            Checkpoint.commit = fail
        first = checkpoints.save(1)
        if dist.get_rank() > 0:
            learn_when_asked(first)
        may_fail.set()
        if dist.get_rank() == 0:
            assert first.exception() is not None
        checkpoints.save(1).result()
    dist.barrier()
    assert [path.name for path in root.glob("step*")] == ["step1"]


def full_disk(root: Path, device: torch.device) -> None:
    """What failed on all ranks is told once for each, and not by each for all."""
    job = Job(sharded)
    job.step()
    with CheckpointManager(root, job.state) as checkpoints:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with mock.patch.object(os, "pwritev", side_effect=full):
            told = str(checkpoints.save(1).exception())
        checkpoints.save(2)
    ranks = range(dist.get_world_size())
    assert told == "; ".join(f"rank {rank}: OSError: {full}" for rank in ranks), told


def learn_when_asked(upload: Future) -> None:
    """Let ``upload`` end when its end is asked for."""
    is_asked = Event()
    done = upload.done
    exception = upload.exception
    set_exception = upload.set_exception

    def done_then_end() -> bool:
        answer = done()
        is_asked.set()
        return answer

    def end_then_exception() -> BaseException | None:
        is_asked.set()
        return exception()

    def set_when_asked(error: BaseException) -> None:
        is_asked.wait()
        set_exception(error)

    upload.done = done_then_end
    upload.exception = end_then_exception
    upload.set_exception = set_when_asked


def nothing_to_train(root: Path, device: torch.device) -> None:
    """One rank has all that an optimizer trains: each is told, before any waits for the other."""
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model = FullyShardedDataParallel(layers, use_orig_params=True, device_id=device)
    first, second = (torch.optim.AdamW(layer.parameters()) for layer in layers)

    def refused(optimizers: list, words: str) -> None:
        manager = CheckpointManager(root, TrainingState(model, optimizers))
        raises(RuntimeError, words, manager.__enter__)

    refused([first], "rank 1 holds nothing of what optimizer 0 trains")
    refused([second], "rank 0 holds nothing of what optimizer 0 trains")
    refused([second, first], "rank 0 holds nothing of what optimizer 0 trains")
    layers[0].requires_grad_(False)
    refused([first, second], "rank 0 holds nothing of what optimizer 1 trains")


def sharded_by_fsdp1(root: Path, device: torch.device) -> None:
    """Its tensors have a shape and a type, and neither ``numel`` nor ``nbytes``."""
    warnings.simplefilter("ignore", FutureWarning)  # of torch, of which there is no way around
    for resumed in (0, 1):
        model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=device, use_orig_params=True)
        optimizer = torch.optim.AdamW(model.parameters())
        state = TrainingState(model, optimizer)
        with CheckpointManager(root, state, grace_s=None) as checkpoints:
            assert checkpoints.resume() == resumed
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            assert isinstance(state.state_dict()["model"]["weight"], ShardedTensor)
            checkpoints.save(resumed + 1).result()


def not_shared(root: Path, device: torch.device) -> None:
    """Each host has another directory under the root's name; and a store in each one's memory."""
    own = root / f"host{dist.get_rank()}"
    for place in (own, f"file://{own}", "memory://run"):
        words = f"ranks 1 do not see in {place} what rank 0 has written"
        raises(RuntimeError, words, CheckpointManager(place, Job(sharded).state).__enter__)
    dist.barrier()
    left = [path.name for path in root.rglob("*") if path.is_file()]
    assert not [name for name in left if name.startswith("probe")], left


def a_rank_that_cannot_begin_to_write(root: Path, device: torch.device) -> None:
    """As where its mount is gone for a while: it costs that save alone."""
    job = Job(sharded)
    job.step()
    with CheckpointManager(root, job.state) as checkpoints:
        for step in (1, 2, 3):
            is_broken = step == 2 and dist.get_rank() == 1
            raised = OSError("stale file handle") if is_broken else None
            with mock.patch.object(Directory, "join", side_effect=raised):
                error = checkpoints.save(step).exception()
            assert ("rank 1: OSError: stale file handle" in str(error)) == (step == 2), error
    assert sorted(path.name for path in root.glob("step?")) == ["step1", "step3"]


def error_of_a_store(root: Path, device: torch.device) -> None:
    """Whatever it raises, no rank waits."""
    url = f"file://{root}"
    run(Job(sharded), url, 2)
    broken = mock.patch.object(Objects, "wrong", side_effect=KeyError("data"))
    with broken, CheckpointManager(url, Job(sharded).state) as checkpoints:
        raises(RuntimeError, f"cannot resume from {url}: 'data'", checkpoints.resume)


if __name__ == "__main__":
    face(globals())
