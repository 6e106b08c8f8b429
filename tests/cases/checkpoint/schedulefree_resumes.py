"""facebookresearch/schedule_free#48, #32: a run with a schedule-free optimizer is resumed.

The argument says how: ``trains`` (saved while its optimizer trains), ``evaluates`` (saved after
``optimizer.eval()``), ``not_entered`` (a fresh job has not called ``optimizer.train()`` before it
loads), ``plain`` (``TrainingState`` and ``dcp.save``).
"""

import sys

import roundtrip
import schedulefree
import torch.distributed.checkpoint as dcp
from torch import nn

from overlap_recipes.checkpoint.state import TrainingState


def build(seed: int) -> tuple[nn.Module, schedulefree.AdamWScheduleFree]:
    model = roundtrip.sharded(roundtrip.two_layers(seed))
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=1e-2, warmup_steps=3)
    if "not_entered" not in sys.argv:
        optimizer.train()
    return model, optimizer


def step(model: nn.Module, optimizer: schedulefree.AdamWScheduleFree, number: int) -> None:
    optimizer.train()
    roundtrip.train_step(model, optimizer, number)
    if "evaluates" in sys.argv:
        optimizer.eval()


def plain() -> None:
    """The same with a save that training waits for."""
    with roundtrip.job() as root:
        model, optimizer = build(0)
        step(model, optimizer, 0)
        dcp.save({"app": TrainingState(model, optimizer)}, checkpoint_id=root / "step1")
        again, its_optimizer = build(1)
        dcp.load({"app": TrainingState(again, its_optimizer)}, checkpoint_id=root / "step1")
        saved = roundtrip.all_state(model, optimizer)
        loaded = roundtrip.all_state(again, its_optimizer)
        roundtrip.none_of_any_rank(roundtrip.differences(loaded, saved))


if __name__ == "__main__":
    if "plain" in sys.argv:
        plain()
    else:
        roundtrip.round_trip(build, step)
