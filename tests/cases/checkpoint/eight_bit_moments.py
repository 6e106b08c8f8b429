"""torchtitan#4615, ao#1189: the state of torchao's 8-bit Adam is of tensors of its own class.

The argument says what must hold: ``resumes`` (a run is saved and resumed), ``uneven`` (shards of
different sizes, whose scales no checkpoint can place: refused at the first save), or ``stock``
(``dcp.load`` reads codes and scales, with nothing of ours).
"""

import sys
from collections.abc import Callable

import roundtrip
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torchao.optim import AdamW8bit

from overlap_recipes.checkpoint.saves import Saves
from overlap_recipes.checkpoint.state import TrainingState

WIDTH = 128
ODD_WIDTH = 137  # rows: one rank has one more


def uncompiled(function: Callable, **how: object) -> Callable:
    return function


torch.compile = uncompiled  # a compiler would take longer than all else


def build(seed: int, width: int = WIDTH) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Linear(width, 256))
    roundtrip.sharded(model)
    return model, AdamW8bit(model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    torch.manual_seed(number)
    loss = model(torch.randn(8, 256)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def uneven() -> None:
    with roundtrip.job() as root:
        model, optimizer = build(0, ODD_WIDTH)
        told = ""
        try:
            with Saves(roundtrip.HOST, model.buffers) as saves:
                step(model, optimizer, 0)
                try:
                    saves.save({"app": TrainingState(model, optimizer)}, root / "step0")
                except RuntimeError as error:
                    told = str(error)
                    raise
        except RuntimeError:
            pass  # what the end of the block says is too late
        assert "OptimState8bit" in told and "0.weight" in told, f"the first save says {told!r}"


def stock() -> None:
    with roundtrip.job() as root:
        model, optimizer = build(0)
        step(model, optimizer, 0)
        dcp.save({"app": TrainingState(model, optimizer)}, checkpoint_id=root / "step0")
        kept = optimizer.state[model[0].weight]["exp_avg"]._local_tensor
        parts = {"codes": torch.zeros_like(kept.codes), "scale": torch.zeros_like(kept.scale)}
        tree = {"app": {"optim": {"state": {"0.weight": {"exp_avg": parts}}}}}
        dcp.load(tree, checkpoint_id=root / "step0")
        assert kept.codes.any()
        assert torch.equal(parts["codes"], kept.codes)
        assert torch.equal(parts["scale"], kept.scale)


if __name__ == "__main__":
    if "uneven" in sys.argv:
        uneven()
    elif "stock" in sys.argv:
        stock()
    else:
        roundtrip.round_trip(build, step)
