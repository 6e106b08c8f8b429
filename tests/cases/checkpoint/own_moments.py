"""flashoptim#3, torchtitan#4615, TransformerEngine#2795: an optimizer's own kind of moments.

The argument says which: ``int8`` or ``bf16`` (DTensors of that type) come back as they were;
``local`` (a float32 moment of this rank's shard, as a plain tensor) is refused at the first save.
``tuple``: two moments in one, and an object with a named tuple, on as many ranks and on one.
"""

import collections
import sys

import roundtrip
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from overlap_recipes.checkpoint import CheckpointManager, load
from overlap_recipes.checkpoint.saves import Saves
from overlap_recipes.checkpoint.state import TrainingState

RATE = 0.01
DECAY = 0.9
UNIT = 64  # an int8 moment counts in 1/64
LARGEST = 127
SCALE = 10  # of the loss, so that int8 moments are not all zero
Pair = collections.namedtuple("Pair", "moment, other")  # noqa: PYI024
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
        if self.kind == "tuple":
            if not state:
                state["pair"] = torch.zeros_like(parameter), torch.ones_like(parameter)
            moment, other = state["pair"]
            moment.mul_(DECAY).add_(parameter.grad)
            other.mul_(DECAY)
            parameter.sub_(rate * moment * other)
            return
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


class Average:
    """An object of the user's own."""

    def __init__(self, model: nn.Module, value: float) -> None:
        (first, *_) = model.parameters()
        self.pair = Pair(torch.full_like(first, value).detach(), value)

    def state_dict(self) -> dict:
        return {"pair": self.pair}

    def load_state_dict(self, state: dict) -> None:
        self.pair = state["pair"]


def build(seed: int) -> tuple[nn.Module, Momentum]:
    model = roundtrip.sharded(roundtrip.two_layers(seed))
    return model, Momentum(model.parameters(), sys.argv[1])


def step(model: nn.Module, optimizer: Momentum, number: int) -> None:
    torch.manual_seed(number)
    loss = SCALE * model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def on_one_rank() -> None:
    """Saved by all, and loaded by all and by rank 0 alone into a model that is not sharded."""
    with roundtrip.job() as root:
        model, optimizer = build(0)
        step(model, optimizer, 0)
        average = Average(model, 3)
        with CheckpointManager(root, TrainingState(model, optimizer, own=average)) as checkpoints:
            checkpoints.save(1)
        due_average = average.pair.moment.full_tensor()
        again, its = build(1)
        average = Average(again, 0)
        with CheckpointManager(root, TrainingState(again, its, own=average)) as checkpoints:
            checkpoints.resume()
        assert torch.equal(average.pair.moment.full_tensor(), due_average)
        saved = roundtrip.all_state(model, optimizer)
        roundtrip.none_of_any_rank(roundtrip.differences(roundtrip.all_state(again, its), saved))
        whole = [state["pair"][0].full_tensor() for state in optimizer.state.values()]
        group = dist.new_group([0])
        if dist.get_rank() == 0:
            alone = roundtrip.two_layers(1)
            its = Momentum(alone.parameters(), sys.argv[1])
            average = Average(alone, 0)
            state = TrainingState(alone, its, own=average)
            load({"app": state}, root / "step1", process_group=group)
            assert type(average.pair) is Pair
            assert torch.equal(average.pair.moment, due_average)
            for state, due in zip(its.state.values(), whole, strict=True):
                assert torch.equal(state["pair"][0], due)
            step(alone, its, 1)


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
    elif "tuple" in sys.argv:
        on_one_rank()
    else:
        roundtrip.round_trip(build, step)
