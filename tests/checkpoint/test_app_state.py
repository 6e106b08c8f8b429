"""What optimizers hold comes back as it was, or the load says why not; saving changes nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from overlap_recipes.checkpoint.state import TrainingState

pytestmark = pytest.mark.usefixtures("one_rank")

PARTIAL = {"planner": dcp.DefaultLoadPlanner(allow_partial_load=True)}


class Late(torch.optim.SGD):
    """Holds another tensor from its second step on."""

    def step(self, closure=None) -> None:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                held = self.state[parameter]
                if "steps" in held:
                    held.setdefault("late", parameter.detach().clone())
                held["steps"] = torch.ones(())


class Job:
    """A small training; ``frozen`` is its first layer."""

    def __init__(self, optimizers: Callable = torch.optim.AdamW) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        self.frozen = self.model[0]
        made = optimizers(self.model.parameters())
        self.optimizers = made if isinstance(made, list) else [made]
        self.app = TrainingState(self.model, *self.optimizers)
        self.steps = 0

    def train(self, last_step: int) -> "Job":
        while self.steps < last_step:
            torch.manual_seed(self.steps)
            self.model(torch.randn(3, 4)).square().sum().backward()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self.steps += 1
        return self

    def save(self, directory: Path) -> "Job":
        dcp.save({"app": self.app}, checkpoint_id=directory)
        return self

    def load(self, directory: Path, steps: int, **how: object) -> "Job":
        dcp.load({"app": self.app}, checkpoint_id=directory, **how)
        self.steps = steps
        return self

    def held(self) -> list[torch.Tensor]:
        """Weights, then what the optimizers hold, in order."""
        moments = [x for o in self.optimizers for p in self.model.parameters() if p in o.state
                   for x in o.state[p].values()]  # fmt: skip
        return [*self.model.parameters(), *moments]

    def equals(self, other: "Job") -> bool:
        mine, others = self.held(), other.held()
        return len(mine) == len(others) and all(map(torch.equal, mine, others))


def test_a_load_keeps_the_state_of_a_layer_that_is_frozen_by_then(tmp_path) -> None:
    job = Job().train(2)
    job.frozen.requires_grad_(False)
    job.train(3).save(tmp_path).load(tmp_path, 3)
    assert not job.frozen.weight.requires_grad and len(job.optimizers[0].state) == 4
    later = Job().load(tmp_path, 3)
    later.frozen.requires_grad_(False)
    assert later.train(5).equals(job.train(5))
    for each in (job, later):
        each.frozen.requires_grad_()
    assert later.train(6).equals(job.train(6))


def test_a_job_that_is_frozen_before_its_load_is_told_what_it_would_lose(tmp_path) -> None:
    job = Job().train(2)
    job.frozen.requires_grad_(False)
    job.save(tmp_path)
    later = Job()
    later.frozen.requires_grad_(False)
    with pytest.raises(ValueError, match=r"\['0.bias', '0.weight'\]: frozen"):
        later.load(tmp_path, 2)


def test_state_that_an_optimizer_gets_later_is_not_left_out_in_silence(tmp_path) -> None:
    Job(Late).train(3).save(tmp_path)
    with pytest.raises(ValueError, match="no room here for the checkpoint's state of"):
        Job(Late).load(tmp_path, 3)


@pytest.mark.parametrize("when", ["fresh", "in mid-run"])
def test_a_parameter_without_state_has_none_after_a_load(tmp_path, when) -> None:
    job = Job()
    job.frozen.requires_grad_(False)
    job.train(3)
    job.frozen.requires_grad_()
    job.save(tmp_path)
    later = Job() if when == "fresh" else Job().train(2)
    assert later.load(tmp_path, 3, **PARTIAL).equals(job)
    assert len(later.optimizers[0].state) == 2
    assert later.train(5).equals(job.train(5))


def test_two_optimizers_of_one_parameter_are_refused(tmp_path) -> None:
    def two(parameters) -> list:
        shared = [*parameters]
        return [torch.optim.SGD(shared, lr=0.1, momentum=0.9), torch.optim.AdamW(shared)]

    with pytest.raises(ValueError, match="two optimizers hold one parameter"):
        Job(two).train(2).app.state_dict()


class Wrapping(torch.optim.Optimizer):
    """As SAM is published: the moments are in an optimizer inside."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {})
        self.base_optimizer = torch.optim.AdamW(self.param_groups)


@pytest.mark.parametrize(
    ("wrapping", "name"),
    [
        (Wrapping, "base_optimizer"),
        (lambda p: ZeroRedundancyOptimizer(p, torch.optim.SGD), "optim"),
    ],
    ids=["sam", "zero"],
)
def test_an_optimizer_whose_state_is_in_another_is_refused(wrapping, name) -> None:
    with pytest.raises(TypeError, match=f"keeps its state in {name}"):
        Job(wrapping)
