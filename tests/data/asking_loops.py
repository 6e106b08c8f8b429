"""Loops that ask in other ways whether to leave; SIGTERM comes before each of their lines."""

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FrameType

import torch
import torch.distributed as dist
from torch import nn

from overlap_recipes.checkpoint.preemption import Preemption

STEPS = 5
SAVE_EVERY = 3
MICRO_STEPS = 2
GRACE_S = 120


@dataclass
class Job:
    """A toy model, its steps, and what was saved."""

    step: int = 0
    micro_steps: int = 0
    saved: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def train(self) -> None:
        for _ in range(MICRO_STEPS):
            self.backward()
        self.update()

    def backward(self) -> None:
        self.model(torch.ones(1, 2)).sum().backward()
        self.micro_steps += 1

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1

    def save(self) -> None:
        self.saved.append(self.progress())

    def progress(self) -> tuple[int, int]:
        return self.step, self.micro_steps


def stores_the_answer(job: Job, leaving: Preemption) -> None:
    while job.step < STEPS:
        job.train()
        leave = leaving.agreed()
        if leave or job.step % SAVE_EVERY == 0:
            job.save()
        if leave:
            break


def asks_twice(job: Job, leaving: Preemption) -> None:
    while job.step < STEPS:
        job.train()
        if leaving.agreed():
            job.save()
        if leaving.agreed():
            break


def asks_at_the_top(job: Job, leaving: Preemption) -> None:
    while job.step < STEPS and not leaving.agreed():
        job.train()
        if leaving.agreed():
            job.save()


def asks_beside_every_backward(job: Job, leaving: Preemption) -> None:
    while job.step < STEPS:
        job.backward()
        if job.micro_steps % MICRO_STEPS == 0:
            job.update()
        if leaving.agreed():
            job.save()
        if leaving.agreed():
            break


LOOPS: list[Callable[[Job, Preemption], None]] = [
    stores_the_answer,
    asks_twice,
    asks_at_the_top,
    asks_beside_every_backward,
]


class StrikeBeforeLine:
    """SIGTERM to this process before the ``due``-th line that ``code`` runs; a trace function."""

    def __init__(self, code: CodeType, due: int) -> None:
        self.code = code
        self.due = due
        self.lines = 0

    def __call__(self, frame: FrameType, event: str, value: object) -> "StrikeBeforeLine | None":
        if frame.f_code is not self.code:
            return None
        if event == "line":
            if self.lines == self.due:
                signal.raise_signal(signal.SIGTERM)
            self.lines += 1
        return self


def gathered(value: object) -> list:
    if not dist.is_initialized():
        return [value]
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def run_struck(loop: Callable[[Job, Preemption], None], due: int, struck: bool) -> tuple[int, int]:
    """Run ``loop`` and judge it: the number of its steps, and of the lines that it has run."""
    job = Job()
    strike = StrikeBeforeLine(loop.__code__, due if struck else -1)
    before = signal.getsignal(signal.SIGTERM)
    with Preemption(GRACE_S) as leaving:
        sys.settrace(strike)
        try:
            loop(job, leaving)
        finally:
            sys.settrace(None)
        end = job.progress()
        answer = leaving.agreed()
        job.train()
        assert leaving.agreed() or not answer, "it said yes, and then no"
    signal.signal(signal.SIGTERM, before)
    where = f"{loop.__name__}, SIGTERM before its line {due}"
    saved_by_rank = gathered(job.saved)
    assert saved_by_rank == [job.saved] * len(saved_by_rank), f"{where}: {saved_by_rank}"
    if 0 < end[0] < STEPS:
        assert end in job.saved, f"{where}: left behind {end}, saved {job.saved}"
    return end[0], strike.lines


def strike_each_line(loop: Callable[[Job, Preemption], None], struck: bool) -> None:
    steps, lines = run_struck(loop, due=-1, struck=False)
    assert steps == STEPS, "it left, and nobody had asked it to"
    ends = []
    for due in range(lines):
        steps, _ = run_struck(loop, due, struck)
        ends.append(steps)
    assert min(ends) < max(ends) == STEPS, f"{loop.__name__} ended after steps {ends}"


def main() -> None:
    torch.set_num_threads(1)
    is_job = "RANK" in os.environ
    struck = True
    if is_job:
        dist.init_process_group("gloo")
        struck = dist.get_rank() == dist.get_world_size() - 1
    for loop in LOOPS:
        strike_each_line(loop, struck)
    if is_job:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
