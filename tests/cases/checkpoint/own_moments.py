"""flashoptim#3, torchtitan#4615, TransformerEngine#2795: an optimizer's own kind of moments.

The argument says which: ``int8`` or ``bf16`` (DTensors of that type) come back as they were;
``local`` (a float32 moment of this rank's shard, as a plain tensor) is refused at the first save.
"""

import sys

import roundtrip
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from overlap_recipes.checkpoint.saves import Saves
from overlap_recipes.checkpoint.state import TrainingState

RATE = 0.01
DECAY = 0.9
UNIT = 64  # an int8 moment counts in 1/64
LARGEST = 127
SCALE = 10  # of the loss, so that int8 moments are not all zero
TYPES = {"int8": torch.int8, "bf16": torch.bfloat16, "local": torch.float32}


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class Momentum(torch.optim.Optimizer):
    """SGD with a momentum that is kept in ``kind``."""

    def __init__(self, parameters, kind: str) -> None:
        super().__init__(parameters, {"lr": RATE})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, group["lr"])

    def update(self, parameter: nn.Parameter, rate: float) -> None:
        state = self.state[parameter]
        if not state:
            like = own_part(parameter) if self.kind == "local" else parameter
            state["moment"] = torch.zeros_like(like, dtype=TYPES[self.kind])
        kept = own_part(state["moment"])
        moment = kept.float()
        if self.kind == "int8":
            moment = moment / UNIT
        moment = moment * DECAY + own_part(parameter.grad)
        own_part(parameter).sub_(rate * moment)
        if self.kind == "int8":
            moment = (moment * UNIT).round().clamp(-LARGEST, LARGEST)
        kept.copy_(moment)


def build(seed: int) -> tuple[nn.Module, Momentum]:
    model = roundtrip.sharded(roundtrip.two_layers(seed))
    return model, Momentum(model.parameters(), sys.argv[1])


def step(model: nn.Module, optimizer: Momentum, number: int) -> None:
    torch.manual_seed(number)
    loss = SCALE * model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def refused() -> None:
    with roundtrip.job() as root:
        model, optimizer = build(0)
        state = {"app": TrainingState(model, optimizer)}
        told = ""
        try:
            with Saves(roundtrip.HOST, model.buffers) as saves:
                step(model, optimizer, 0)
                try:
                    saves.save(state, root / "step0")
                except RuntimeError as error:
                    told = str(error)
                    raise
        except RuntimeError:
            pass  # what the end of the block says is too late
        for word in ("0.weight", "zeros_like", "rank 0", "rank 1"):
            assert word in told, f"the first save says {told!r}, without {word}"
        assert not list(root.iterdir())


if __name__ == "__main__":
    if "local" in sys.argv:
        refused()
    else:
        roundtrip.round_trip(build, step)
