"""Jobs that hear of a preemption otherwise than by SIGTERM, and ranks that ask unequally."""

import argparse
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from overlap_recipes.checkpoint import AGAIN, CheckpointManager, TrainingState

STEPS = 12
TOLD_AT = 4


class Job:
    """A small model and its optimizer; nothing is sharded, the ranks hold the same."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.state = TrainingState(self.model, self.optimizer)

    def step(self) -> None:
        self.model(torch.ones(2, 4)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class GraphedJob(Job):
    """Its optimizer steps without torch's hooks, as in a CUDA graph."""

    def __init__(self) -> None:
        super().__init__()
        super().step()

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.sub_(0.1)


def train(
    root: Path,
    grace_s: object,
    tell: Callable[[CheckpointManager], None],
    evaluate: Callable[[CheckpointManager], None],
    job_of: type[Job] = Job,
    save_every: int = STEPS,
) -> int:
    """The step that was saved last."""
    job = job_of()
    with CheckpointManager(root, job.state, grace_s=grace_s) as checkpoints:
        checkpoints.resume()
        evaluate(checkpoints)
        for step in range(1, STEPS + 1):
            job.step()
            evaluate(checkpoints)
            if step == TOLD_AT:
                tell(checkpoints)
            leave = checkpoints.preempted()
            if leave or step % save_every == 0:
                checkpoints.save(step)
            if leave:
                break
    assert leave, "no rank has left"
    assert checkpoints.exit_code == AGAIN
    return step


def nothing(checkpoints: CheckpointManager) -> None: ...


def on_threads(root: Path) -> int:
    def told(checkpoints: CheckpointManager) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            checkpoints.ask_to_leave()

    try:
        on_a_thread(lambda: CheckpointManager(root, Job().state))
    except ValueError as refusal:
        assert "grace_s=None, and call ask_to_leave()" in str(refusal), refusal
    else:
        raise AssertionError("a signal cannot be handled there, and nothing was said")
    return on_a_thread(lambda: train(root, None, told, nothing))


def on_a_thread(work: Callable[[], object]) -> object:
    found = []
    errors = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return found[0]


def by_another_signal(root: Path) -> int:
    def told(checkpoints: CheckpointManager) -> None:
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGUSR1)

    grace_s = {signal.SIGTERM: 30, signal.SIGUSR1: 300}
    return train(root, grace_s, told, nothing)


def in_evaluations(root: Path) -> int:
    asked = iter([3, 0, 2, 1, 5])

    def told(checkpoints: CheckpointManager) -> None:
        checkpoints.ask_to_leave()

    def evaluate(checkpoints: CheckpointManager) -> None:
        times = next(asked, 1)
        if dist.get_rank() == 0:
            for _ in range(times):
                assert not checkpoints.preempted() or checkpoints.preemption.asked

    return train(root, 30, told, evaluate)


def of_own_optimizers(root: Path) -> int:
    """Rank 0 fits a probe in each evaluation, and asks after each of its steps."""

    def told(checkpoints: CheckpointManager) -> None:
        if dist.get_rank() == 1:
            checkpoints.ask_to_leave()

    def evaluate(checkpoints: CheckpointManager) -> None:
        if dist.get_rank() == 0:
            probe = nn.Linear(4, 1)
            optimizer = torch.optim.SGD(probe.parameters(), lr=0.1)
            for _ in range(3):
                probe(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                checkpoints.preempted()

    return train(root, 30, told, evaluate)


def without_hooks(root: Path) -> int:
    """From the first save on such a job is heard."""

    def told(checkpoints: CheckpointManager) -> None:
        checkpoints.ask_to_leave()

    return train(root, 30, told, nothing, GraphedJob, save_every=3)


def not_asked(root: Path) -> int:
    """One rank handles signals, the other does not, and none comes."""
    grace_s = 30 if dist.get_rank() == 1 else None
    with CheckpointManager(root, Job().state, grace_s=grace_s):
        return 0


def main(directory: Path) -> None:
    dist.init_process_group("gloo")
    places = [str(directory)]
    dist.broadcast_object_list(places)
    others = (of_own_optimizers, without_hooks, not_asked)
    for case in (on_threads, by_another_signal, in_evaluations, *others):
        last = case(Path(places[0], case.__name__))
        steps = [None] * dist.get_world_size()
        dist.all_gather_object(steps, last)
        assert len(set(steps)) == 1, f"{case.__name__}: the ranks have saved {steps}"
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path)
    with tempfile.TemporaryDirectory() as temporary:
        main(parser.parse_args().dir or Path(temporary))
    sys.exit(0)
