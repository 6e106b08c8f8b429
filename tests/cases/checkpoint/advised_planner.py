"""Automodel#2071: the planner that the log advises, and a part of the model that was renamed.

The argument says which part, ``base`` (a frozen layer, as of LoRA) or ``buffer``. A load must name
it in an error: it is not in the checkpoint, and the job would go on with random numbers.
"""

import sys

import roundtrip
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner

from overlap_recipes.checkpoint.state import TrainingState

WIDTH = 8
OLD_NAMES = {"base": "base_layer", "buffer": "scale"}
NEW_NAMES = {"base": "backbone", "buffer": "amax"}


class Adapted(nn.Module):
    """A frozen base and a trained adapter; a layer that is not used, so that the log advises."""

    def __init__(self, base: str, buffer: str) -> None:
        super().__init__()
        self.base = base
        self.add_module(base, nn.Linear(WIDTH, WIDTH).requires_grad_(False))
        self.adapter = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, 2)
        self.register_buffer(buffer, torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.adapter(self.get_submodule(self.base)(x))


def build(seed: int, names: dict[str, str]) -> tuple[Adapted, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Adapted(**names)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(trained)


def main(renamed: str) -> None:
    with roundtrip.job() as root:
        model, optimizer = build(0, OLD_NAMES)
        model.scale += 3
        model(torch.ones(WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        dcp.save({"app": TrainingState(model, optimizer)}, checkpoint_id=root / "step1")

        names = OLD_NAMES | {renamed: NEW_NAMES[renamed]}
        again, its_optimizer = build(1, names)
        state = {"app": TrainingState(again, its_optimizer)}
        planner = DefaultLoadPlanner(allow_partial_load=True)
        try:
            dcp.load(state, checkpoint_id=root / "step1", planner=planner)
        except Exception as error:
            if names[renamed] in str(error):
                return
            raise
        if renamed == "buffer":
            found = again.amax.item()
            wanted = model.scale.item()
        else:
            found = again.backbone.weight[0, 0].item()
            wanted = model.base_layer.weight[0, 0].item()
        raise AssertionError(
            f"loaded without an error: {names[renamed]} is {found:.3f}, saved {wanted:.3f}"
        )


if __name__ == "__main__":
    main(sys.argv[1])
