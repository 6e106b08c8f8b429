"""torchtitan's float8, ao#1189: parameters are DTensors of a tensor class of torchao.

The argument says what must hold: ``resumes`` (a run is saved and resumed), or ``told`` (a save that
can never work is an error in the training loop, at the third save at the latest).
"""

import sys
from pathlib import Path

import roundtrip
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from overlap_recipes.checkpoint.saves import Saves
from overlap_recipes.checkpoint.state import TrainingState

WIDTH = 32  # float8 needs multiples of 16
SAVES = 3


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    convert_to_float8_training(model, config=config)
    roundtrip.sharded(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    torch.manual_seed(number)
    loss = model(torch.randn(16, WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def is_refused(saves: Saves, state: dict, directory: Path) -> bool:
    try:
        saves.save(state, directory)
    except (RuntimeError, TypeError) as error:
        assert "DTensor" in str(error), error
        return True
    return False


def told() -> None:
    """Train and save three times; see what is written, and whether any call has raised."""
    with roundtrip.job() as root:
        model, optimizer = build(0)
        state = {"app": TrainingState(model, optimizer)}
        refused = False
        try:
            with Saves(roundtrip.HOST, model.buffers) as saves:
                for number in range(SAVES):
                    step(model, optimizer, number)
                    refused = refused or is_refused(saves, state, root / f"step{number}")
        except RuntimeError as error:  # what the end of the block says, when training is over
            assert "DTensor" in str(error), error
        written = len(list(root.glob("step?")))
        message = f"{written} of {SAVES} saves are there, and none of {SAVES} calls raised"
        assert refused or written == SAVES, message


if __name__ == "__main__":
    if "told" in sys.argv:
        told()
    else:
        roundtrip.round_trip(build, step)
