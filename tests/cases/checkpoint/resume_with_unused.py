"""prime-rl#3252, NemotronH: a run that has a parameter without a gradient is resumed."""

import roundtrip
import torch
from torch import nn

from overlap_recipes.checkpoint import CheckpointManager, TrainingState

WIDTH = 8


def build() -> TrainingState:
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(WIDTH, WIDTH), "unused": nn.Linear(WIDTH, WIDTH)})
    optimizer = torch.optim.AdamW(model.parameters())
    return TrainingState(model, optimizer)


def main() -> None:
    with roundtrip.job() as root:
        state = build()
        with CheckpointManager(root, state) as checkpoints:
            state.model["used"](torch.ones(WIDTH)).sum().backward()
            (optimizer,) = state.optimizers
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.save(1)
        with CheckpointManager(root, build()) as checkpoints:
            step = checkpoints.resume()
        assert step == 1, f"resumed at step {step}, saved was step 1"


if __name__ == "__main__":
    main()
