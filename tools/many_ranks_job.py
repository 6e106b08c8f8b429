# SPDX-License-Identifier: BSD-3-Clause
"""The job of ``many_ranks.py``: each value says of which tensor, element and step it is."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from overlap_recipes.checkpoint import TrainingState

SHAPES = ((192, 4), (100, 3))  # of 64 ranks some have no row of the second


class Adding(torch.optim.Optimizer):
    """Adds one to each element, and to two moments of it, which its first step makes."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        super().__init__(parameters, {})

    def step(self) -> None:
        pieces = []
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"] = parameter.detach().clone()
                    state["exp_avg_sq"] = parameter.detach().clone()
                pieces.append(local(parameter))
                pieces.extend(local(tensor) for tensor in state.values())
        with torch.no_grad():
            torch._foreach_add_(pieces, 1.0)


class Place:
    """What each rank has for itself."""

    def __init__(self) -> None:
        self.now = {"rank": dist.get_rank(), "step": 0}
        self.loaded: list[dict] = []

    def state_dict(self) -> dict:
        return dict(self.now)

    def load_state_dict(self, state: dict) -> None:
        assert state["rank"] == dist.get_rank(), state
        self.loaded = [state]

    def load_state_dicts(self, states: list[dict]) -> None:
        assert [state["rank"] for state in states] == list(range(len(states))), states
        self.loaded = states


@torch.no_grad()
def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def whole(number: int) -> torch.Tensor:
    """Parameter ``number`` in a new job."""
    shape = torch.Size(SHAPES[number % len(SHAPES)])
    return torch.arange(shape.numel(), dtype=torch.float32).view(shape) + 1000 * number


def sharded(full: torch.Tensor, mesh: dist.DeviceMesh) -> DTensor:
    """As ``fully_shard`` shards it."""
    pieces = full.chunk(mesh.size())
    rank = mesh.get_rank()
    piece = pieces[rank].clone() if rank < len(pieces) else full[:0].clone()
    with torch.no_grad():
        return DTensor.from_local(
            piece, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride()
        )


class Job:
    """A model, its optimizer, and what is saved of them."""

    def __init__(self, parameters: int) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = nn.Module()
        for number in range(parameters):
            weight = sharded(whole(number), mesh)
            self.model.register_parameter(f"weight{number}", nn.Parameter(weight))
        self.model.norm = nn.BatchNorm1d(8)
        self.optimizer = Adding(list(self.model.parameters())[:parameters])
        self.place = Place()
        self.progress = {"step": 0}
        self.state = TrainingState(
            self.model, self.optimizer, per_rank={"place": self.place}, progress=self.progress
        )
        self.mesh = mesh

    def train(self, step: int) -> None:
        self.optimizer.step()
        with torch.no_grad():
            self.model.norm.weight.fill_(step)
        self.place.now["step"] = step
        self.progress["step"] = step

    def check(self, step: int) -> None:
        """Compare every bit with what a job of this many ranks has after ``step``."""
        for number, weight in enumerate(self.optimizer.param_groups[0]["params"]):
            first = local(sharded(whole(number), self.mesh))
            state = self.optimizer.state[weight]
            assert torch.equal(local(weight), first + step), (number, step)
            assert torch.equal(local(state["exp_avg"]), first + step), (number, step)
            assert torch.equal(local(state["exp_avg_sq"]), first + step), (number, step)
            assert state["step"].item() == step, (number, step)
        assert torch.equal(self.model.norm.weight, torch.full((8,), float(step)))
        assert self.progress["step"] == step, self.progress
        assert {state["step"] for state in self.place.loaded} == {step}, self.place.loaded
