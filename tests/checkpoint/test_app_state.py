"""What optimizers hold comes back as it was, or the load says why not; saving changes nothing."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from overlap_recipes.checkpoint.state import TrainingState

PARTIAL = {"planner": dcp.DefaultLoadPlanner(allow_partial_load=True)}


@pytest.fixture(autouse=True)
def rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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


def test_optimizers_without_state_come_back_with_their_rates(tmp_path) -> None:
    def two(parameters) -> list:
        first, *others = parameters
        return [torch.optim.SGD([first], lr=0.1), torch.optim.SGD(others, lr=0.2)]

    job = Job(two).train(2)
    job.optimizers[1].param_groups[0]["lr"] = 0.3
    job.save(tmp_path)
    later = Job(two).load(tmp_path, 2)
    assert [o.param_groups[0]["lr"] for o in later.optimizers] == [0.1, 0.3]
    assert later.train(3).equals(job.train(3))


def test_two_optimizers_of_one_parameter_are_refused(tmp_path) -> None:
    def two(parameters) -> list:
        shared = [*parameters]
        return [torch.optim.SGD(shared, lr=0.1, momentum=0.9), torch.optim.AdamW(shared)]

    with pytest.raises(ValueError, match="two optimizers hold one parameter"):
        Job(two).train(2).app.state_dict()


def test_a_parameter_that_the_checkpoint_does_not_know_is_told(tmp_path) -> None:
    """As where another rank, without that parameter, has said what there is."""

    def some(parameters) -> torch.optim.Optimizer:
        return torch.optim.AdamW([*parameters][:2])

    Job(some).train(2).save(tmp_path)
    with pytest.raises(ValueError, match=r"knows no \['2.bias', '2.weight'\]"):
        Job().load(tmp_path, 2, **PARTIAL)


@pytest.mark.parametrize("when", ["fresh", "in mid-run"])
def test_a_checkpoint_of_other_code_is_refused(tmp_path, when) -> None:
    job = Job(lambda parameters: torch.optim.SGD(parameters, lr=0.1)).train(2)
    model = {"model": job.model.state_dict()}
    dcp.save({"app": model}, checkpoint_id=tmp_path)
    later = Job() if when == "fresh" else Job().train(2)
    with pytest.raises(ValueError, match="no 'has_state'"):
        later.load(tmp_path, 2, **PARTIAL)


def test_a_deep_copy_of_a_state_loads_and_the_state_itself_is_refused() -> None:
    job = Job().train(2)
    with pytest.raises(ValueError, match="a deepcopy"):
        job.app.load_state_dict(job.app.state_dict())
    copied = deepcopy(job.app.state_dict())
    ended = [x.clone() for x in job.train(4).held()]
    job.app.load_state_dict(copied)
    job.steps = 2
    assert all(map(torch.equal, job.train(4).held(), ended))
    fresh = Job()
    fresh.app.load_state_dict(copied)
    assert fresh.optimizers[0].state


def test_a_load_changes_no_weight_by_the_step_that_makes_state(tmp_path) -> None:
    def without_eps(parameters) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.1, eps=0.0)

    job = Job(without_eps).train(2).save(tmp_path)
    assert Job(without_eps).load(tmp_path, 2).equals(job)


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


@pytest.mark.parametrize("renamed", ["base", "buffer"])
def test_a_partial_load_names_what_the_checkpoint_has_not(tmp_path, renamed) -> None:
    """A frozen layer, as of LoRA, or a buffer: the job went on with other numbers."""

    def app(base: str = "frozen", buffer: str = "scale") -> TrainingState:
        layers = {base: nn.Linear(4, 4).requires_grad_(False), "adapter": nn.Linear(4, 4)}
        model = nn.ModuleDict(layers)
        model.register_buffer(buffer, torch.zeros(1))
        return TrainingState(model, torch.optim.AdamW(model["adapter"].parameters()))

    saved = app()
    saved.model["adapter"](torch.ones(4)).sum().backward()
    saved.optimizers[0].step()
    saved.optimizers[0].zero_grad()
    dcp.save({"app": saved}, checkpoint_id=tmp_path)
    with pytest.raises(Exception, match="another_name"):
        dcp.load({"app": app(**{renamed: "another_name"})}, checkpoint_id=tmp_path, **PARTIAL)
