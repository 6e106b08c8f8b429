"""verl#7952, Automodel#603: does a restart find directories that are named otherwise?

The argument is the pattern of their names, ``step-{}`` or ``step{:06d}``. A save that a restart
would not find must be refused when it is called.
"""

import sys
from pathlib import Path

import roundtrip
import torch
from torch import nn

from overlap_recipes.checkpoint.restart import Run, resume
from overlap_recipes.checkpoint.retention import RetainedSaves

STEPS = 5
WIDTH = 8


def build() -> Run:
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())
    return Run(model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))


def train(run: Run, root: Path, pattern: str) -> None:
    with RetainedSaves(root, roundtrip.HOST, run.model.buffers, keep_last=2) as saves:
        for _ in range(STEPS):
            run.model(torch.ones(WIDTH)).sum().backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.step += 1
            saves.save({"run": run}, root / pattern.format(run.step))


def main(pattern: str) -> None:
    with roundtrip.job() as root:
        try:
            train(build(), root, pattern)
        except ValueError as refusal:
            assert "would never be found again" in str(refusal), refusal
            assert not list(root.glob("step*"))
            return
        step = resume(build(), root)
        assert step == STEPS, f"resumed at step {step}, the newest save is of step {STEPS}"


if __name__ == "__main__":
    main(sys.argv[1])
