"""KempnerForge#202, torchtune#1958: ranks have under one name what is not the same.

The argument says what must hold: ``refused`` (no checkpoint, and each rank is told why in the loop,
of every kind of the table), ``taken`` (what is equal is saved, however Python shows it), ``later``
(ranks that drift apart after their first save), ``each`` (a stage of a pipeline and its optimizer
come back to their rank where they are given as the refusal says).
"""

import argparse
import collections
import dataclasses
import functools
import os
import re
import sys
import types
from pathlib import Path

import roundtrip
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from overlap_recipes.checkpoint import CheckpointManager, TrainingState

LARGE = 1024  # a square of such is 4 MiB
Job = tuple[TrainingState, str]  # and what a refusal says


class Hidden:
    """An object that does not show what it has learned, as sklearn's StandardScaler."""

    def __init__(self, mean: object) -> None:
        self.mean = mean

    def __repr__(self) -> str:
        return "Hidden()"


class Unshown:
    """An object without a ``repr`` of its own."""


@dataclasses.dataclass
class Progress:
    seen: object


def job(width: int = 8, **shared: object) -> TrainingState:
    """The same on all ranks, and stepped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width, bias=False), nn.BatchNorm1d(width))
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrainingState(model, optimizer, **shared)
    roundtrip.train_step(model, optimizer, 0)
    return state


@torch.no_grad()
def apart(tensor: torch.Tensor) -> None:
    tensor.add_(dist.get_rank())


def experts(width: int) -> Job:
    torch.manual_seed(dist.get_rank())
    made = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(2)])
    return TrainingState(made), "0.weight"


def frozen() -> Job:
    state = job()
    (weight,) = state.model[0].parameters()
    weight.requires_grad_(False)
    apart(weight)
    return state, "app.model.0.weight"


def moments(width: int) -> Job:
    state = job(width)
    (weight,) = state.model[0].parameters()
    apart(state.optimizers[0].state[weight]["exp_avg"])
    return state, "app.optim.state.0.weight.exp_avg"


def counts() -> Job:
    state = job()
    (weight,) = state.model[0].parameters()
    state.optimizers[0].state[weight]["seen"] = dist.get_rank()
    return state, "app.optim.state"


def settings_of_a_parameter() -> Job:
    state = job()
    (weight,) = state.model[0].parameters()
    state.optimizers[0].state[weight]["scale"] = 1.0 + dist.get_rank()
    return state, "app.optim.state"


class Counting(nn.Linear):
    """Keeps what is no tensor in the state of the model."""

    def get_extra_state(self) -> int:
        return dist.get_rank()

    def set_extra_state(self, state: int) -> None: ...


def extra_state() -> Job:
    torch.manual_seed(0)
    return TrainingState(nn.Sequential(Counting(2, 2))), "app.model.0._extra_state"


def long_array() -> torch.Tensor:
    numbers = torch.arange(5000.0)
    numbers[2500] += dist.get_rank()
    return numbers


def value(made: object) -> Job:
    return job(progress={"value": made}), "app.progress"


def stages() -> Job:
    rank = dist.get_rank()
    model = nn.ModuleDict({f"stage{rank}": nn.Linear(4, 4)})
    words = "app.model.stage0.weight (on rank 0 alone)"
    return TrainingState(model, torch.optim.AdamW(model.parameters())), words


def of_rank_0(**more: object) -> Job:
    (name,) = more
    shared = more if dist.get_rank() == 0 else {}
    return job(**shared), f"app.{name} (on rank 0 alone)"


def of_rank_0_for_itself() -> Job:
    own = {"log": {"rows": 3}} if dist.get_rank() == 0 else {}
    return job(per_rank=own), "app.log (on rank 0 alone)"


def averages() -> Job:
    average = nn.Linear(LARGE, LARGE)
    apart(average.weight)
    return job(average=average), "app.average.weight"


def dtensor() -> torch.Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(torch.arange(8.0), mesh)


def sharded_in_an_object() -> Job:
    state = job()
    (weight,) = state.model[0].parameters()
    state.optimizers[0].state[weight]["own"] = types.SimpleNamespace(mean=dtensor())
    return state, "a DTensor inside a SimpleNamespace"


ANOTHER_STEP = "another step"
REFUSED = {
    "large experts": lambda: experts(LARGE),
    "small experts": lambda: experts(8),
    "a frozen weight": frozen,
    "large moments": lambda: moments(LARGE),
    "small moments": lambda: moments(8),
    "counts of an optimizer": counts,
    "a float of an optimizer": settings_of_a_parameter,
    "extra state": extra_state,
    "an object that shows nothing": lambda: value(Hidden(1 + dist.get_rank())),
    "one with a tensor": lambda: value(Hidden(torch.full((3,), 1 + dist.get_rank()))),
    "a deque of long arrays": lambda: value(collections.deque([long_array().numpy()])),
    "a set in an object": lambda: value(Progress({"a", str(dist.get_rank())})),
    "another function": lambda: value([os.path.join, os.path.split][dist.get_rank()]),
    "an average": averages,
    "pipeline stages": stages,
    "an average on rank 0": lambda: of_rank_0(ema=nn.Linear(2, 2)),
    "a value on rank 0": lambda: of_rank_0(best={"loss": 1.0}),
    "a value of rank 0 for itself": of_rank_0_for_itself,
    "a shard in an object": lambda: (value(Progress(dtensor()))[0], "a DTensor inside a Progress"),
    "a shard in an optimizer's object": sharded_in_an_object,
    ANOTHER_STEP: lambda: (job(), "app.step = 1 (on rank 0 alone), app.step = 2 (on rank 1 alone)"),
}


def names_below(root: Path) -> list[str]:
    dist.barrier()
    return [path.name for path in root.glob("step*")]


def refused() -> None:
    wrong = []
    with roundtrip.job() as root:
        for number, (kind, make) in enumerate(REFUSED.items()):
            place = root / str(number)
            state, words = make()
            told = ""
            try:
                with CheckpointManager(place, state, grace_s=None) as own:
                    own.save(dist.get_rank() + 1 if kind == ANOTHER_STEP else 1).result()
            except RuntimeError as error:
                told = str(error)
            if words not in told or names_below(place):
                wrong.append(f"{kind}: {names_below(place)}, told: {told}")
        roundtrip.none_of_any_rank(wrong)


def in_a_circle() -> Unshown:
    found = Unshown()
    found.own = found
    return found


WORDS = ("a", "bb", "ccc", "dddd")
TAKEN = {
    "dataclass with a set": lambda: Progress(set(WORDS)),
    "Namespace with a set": lambda: argparse.Namespace(tasks=set(WORDS)),
    "dataclass with an object": lambda: Progress(Unshown()),
    "partial of a function": lambda: functools.partial(os.path.join, "x"),
    "function": lambda: os.path.join,
    "class": lambda: Progress,
    "deque of frozensets": lambda: collections.deque([frozenset(WORDS)]),
    "a dict by frozensets": lambda: Progress({frozenset(WORDS): 1, frozenset("xyz"): 2}),
    "a circle": in_a_circle,
    "pattern": lambda: re.compile("a+"),
    "method": lambda: Hidden(0).__repr__,
    "type of torch": lambda: torch.bfloat16,
    "tensor in an object": lambda: Hidden(torch.ones(3)),
}


def taken() -> None:
    wrong = []
    with roundtrip.job() as root:
        for number, (kind, make) in enumerate(TAKEN.items()):
            state = job(progress={"value": make()})
            place = root / str(number)
            try:
                with CheckpointManager(place, state, grace_s=None) as own:
                    own.save(1).result()
            except RuntimeError as error:
                wrong.append(f"{kind}: {error}")
            if names_below(place) != ["step1"]:
                wrong.append(f"{kind}: {names_below(place)}")
        roundtrip.none_of_any_rank(wrong)


def each() -> None:
    found = []
    with roundtrip.job() as root:
        for seed in (0, 10):
            torch.manual_seed(seed + dist.get_rank())
            stage = nn.Sequential(nn.Linear(4, 4 + dist.get_rank(), bias=False))
            optimizer = torch.optim.AdamW(stage.parameters())
            roundtrip.train_step(stage, optimizer, 0)
            own = {"stage": stage, "optimizer": optimizer}
            with CheckpointManager(root, TrainingState(nn.Module(), per_rank=own)) as checkpoints:
                checkpoints.resume()
                checkpoints.save(1).result()
            found.append(roundtrip.all_state(stage, optimizer))
        roundtrip.none_of_any_rank(roundtrip.differences(*found))


@torch.no_grad()
def made_equal(state: TrainingState) -> None:
    for parameter in state.model.parameters():
        dist.broadcast(parameter.data, 0)


def later() -> None:
    """A drift is told by the save that it spoils, and by the next call; others stay."""
    with roundtrip.job() as root:
        state = job(LARGE)
        told = []
        with CheckpointManager(root, state, grace_s=None, keep_last=9) as own:
            for number in range(1, 5):
                if number == 2:
                    apart(state.model[0].weight)
                if number == 3:
                    made_equal(state)
                try:
                    own.save(number)
                except RuntimeError as error:
                    told.append((number, str(error)))
                own.latest.exception()
        assert [number for number, _ in told] == [3], told
        assert "app.model.0.weight, and" in told[0][1], told
        assert sorted(names_below(root)) == ["step1", "step3", "step4"]


if __name__ == "__main__":
    globals()[sys.argv[1]]()
