"""The synthetic stack of ``fsdp_overlap.py``: bfloat16 matrices, and the ways to train them."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes_source" / "sharding")]

import in_place_gather  # noqa: E402
import in_place_reduce  # noqa: E402
import peer_schedule  # noqa: E402

from benchmarks.measuring import timing_event  # noqa: E402

REFERENCE = "no_communication"


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's."""
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


class Unit(nn.Module):
    """Two residual multilayer perceptrons: four matrices of ``width * hidden`` parameters."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(hidden, width, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.relu(up(x)))
        return x


class Stack:
    """Eight units of 0.47 G parameters, bfloat16 throughout; ``shard`` says how they are shared."""

    recipes: tuple[str, ...] = ()
    note = "fully_shard on each unit and the root"

    def __init__(self, case: object, device: torch.device) -> None:
        self.device, self.small = device, device.type == "cpu"
        self.width, self.hidden = (64, 96) if self.small else (8192, 14_336)
        units = []
        torch.manual_seed(0)
        for _ in range(4 if self.small else 8):
            with device:
                units.append(self.shard_unit(Unit(self.width, self.hidden).bfloat16()))
        self.model = nn.Sequential(*units)
        self.shard()

    def shard_unit(self, unit: Unit) -> nn.Module:
        return fully_shard(unit)

    def shard(self) -> None:
        fully_shard(self.model)
        self.build_optimizer(self.model.parameters())

    def build_optimizer(self, parameters) -> None:
        self.optimizer = torch.optim.AdamW(parameters, lr=3e-6, fused=True)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loop(self, tokens: int) -> "Stack":
        torch.manual_seed(1)
        batch = torch.randn(tokens, self.width, device=self.device, dtype=torch.bfloat16)
        self.batch, self.loss, self.ends = batch.requires_grad_(), None, []
        return self

    def step(self) -> None:
        if len(self.ends) == 2:
            self.ends.pop(0).synchronize()
        loss = self.model(self.batch).square().mean()
        self.backward(loss)
        self.update()
        self.batch.grad = None
        self.ends.append(timing_event(self.device))
        self.ends[-1].record()
        self.loss = loss.detach()


class StackWhole(Stack):
    note = "whole weights; each rank updates its own rows; nothing is sent"

    def shard_unit(self, unit: Unit) -> nn.Module:
        return unit

    def shard(self) -> None:
        self.whole = list(self.model.parameters())
        self.own = [nn.Parameter(rows_of(weight.data)) for weight in self.whole]
        self.build_optimizer(self.own)

    def update(self) -> None:
        for weight, own in zip(self.whole, self.own, strict=True):
            own.grad = rows_of(weight.grad)
        super().update()
        for weight in self.whole:
            weight.grad = None


class StackInPlace(Stack):
    recipes = ("shared_slots", "in_place_gather", "in_place_reduce")
    note = "fsdp2, gathered by peer copies and reduced by pushes, without copies around them"

    def shard(self) -> None:
        super().shard()
        in_place_gather.gather_in_place(self.model)
        in_place_reduce.reduce_in_place(self.model)


class OwnSchedule(StackWhole):
    recipes = ("sharded_parameter", "stream_context", "prefetch_schedule", "peer_schedule")
    note = "a static schedule without FSDP2, gathers and reductions by copies, three buffers"

    def shard(self) -> None:
        mesh = dist.init_device_mesh(self.device.type, (dist.get_world_size(),))
        self.context = peer_schedule.PeerContext(self.model, list(self.model), mesh, buffers=3)
        self.build_optimizer(self.model.parameters())

    def backward(self, loss: torch.Tensor) -> None:
        self.context.backward(loss)

    def update(self) -> None:
        Stack.update(self)


STACKS = {
    REFERENCE: StackWhole,
    "fsdp2": Stack,
    "fsdp2_in_place": StackInPlace,
    "prefetch_copy_engine": OwnSchedule,
}
