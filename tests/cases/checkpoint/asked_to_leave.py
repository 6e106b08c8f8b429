"""Jobs that hear of a preemption otherwise than by SIGTERM, and ranks that ask unequally.

``on_threads``: the loop runs on a thread, as under Ray Train, and rank 1 is told by a callback.
``by_another_signal``: rank 0 gets SIGUSR1. ``in_evaluations``: rank 0 alone asks, before the first
step and after others. Both ranks must save the same step, and leave.
"""

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


def train(
    root: Path,
    grace_s: object,
    tell: Callable[[CheckpointManager], None],
    evaluate: Callable[[CheckpointManager], None],
) -> int:
    """The step that was saved last."""
    job = Job()
    with CheckpointManager(root, job.state, grace_s=grace_s) as checkpoints:
        checkpoints.resume()
        evaluate(checkpoints)
        for step in range(1, STEPS + 1):
            job.step()
            evaluate(checkpoints)
            if step == TOLD_AT:
                tell(checkpoints)
            leave = checkpoints.preempted()
            if leave:
                checkpoints.save(step)
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


def main(directory: Path) -> None:
    dist.init_process_group("gloo")
    places = [str(directory)]
    dist.broadcast_object_list(places)
    for case in (on_threads, by_another_signal, in_evaluations):
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
