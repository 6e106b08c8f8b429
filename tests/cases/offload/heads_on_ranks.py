"""Two ranks that use other modules: the weights of DDP, alike on both, or a refusal on both.

Arguments, in turn: ``heads`` (each rank's task has a head of its own), ``shapes`` (these have other
shapes), ``nobody`` (a head that no rank uses), ``in_turn`` (a head that one rank uses in each
second step) train as ``DistributedDataParallel(find_unused_parameters=True)`` does. ``layer`` (one
rank leaves a layer out), ``order`` (one runs layers in another order), ``idle`` (one has no
backward), ``changed`` (one scales its gradients before ``max_norm``) and ``scaler`` (a GradScaler
on each) are refused: ranks would average other layers' gradients, or scale by other numbers.
"""

import sys
from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn

from overlap_recipes.offload import HostAdamW, stream_layers

HOST = torch.device("cpu")
STEPS = 4
SETTINGS = {"lr": 1e-2}
WORDS = {"scaler": "a GradScaler of each rank", "changed": "changed after backward: see max_norm"}


class Net(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        width = 9 if name == "shapes" else 8
        self.heads = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, width), nn.Linear(8, 8)])

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        for block in self.order_of_blocks():
            x = block(x)
        return self.heads[self.head_of(step)](x)

    def order_of_blocks(self) -> list[nn.Module]:
        blocks = list(self.blocks)
        if dist.get_rank() == 1 and self.name == "layer":
            return blocks[:2]
        if dist.get_rank() == 1 and self.name == "order":
            return [blocks[1], blocks[0], blocks[2]]
        return blocks

    def head_of(self, step: int) -> int:
        if self.name in ("heads", "shapes"):
            return dist.get_rank()
        if self.name == "in_turn":
            return dist.get_rank() * (step % 2)
        return 0


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return model(torch.randn(4, 8, generator=generator), step).square().mean()


def trains_as_ddp(name: str, max_norm: float | None) -> None:
    torch.manual_seed(0)
    model = Net(name)
    twin = deepcopy(model)
    ddp = nn.parallel.DistributedDataParallel(twin, find_unused_parameters=True)
    stock = torch.optim.AdamW(twin.parameters(), fused=True, **SETTINGS)
    for step in range(STEPS):
        loss_of(ddp, step).backward()
        if max_norm:
            nn.utils.clip_grad_norm_(twin.parameters(), max_norm)
        stock.step()
        stock.zero_grad()
    with (
        stream_layers(model, model.blocks, HOST) as streamed,
        HostAdamW(model.parameters(), streamed, max_norm=max_norm, **SETTINGS) as optimizer,
    ):
        for step in range(STEPS):
            loss_of(model, step).backward()
            optimizer.step()
    for (path, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs), f"{path} is another than DDP's"


def is_refused(name: str, in_backward: bool) -> None:
    torch.manual_seed(0)
    model = Net(name)
    words = WORDS.get(name, "run every layer on every rank")
    options = {"in_backward": in_backward, "max_norm": 1.0 if name == "changed" else None}
    try:
        with (
            stream_layers(model, model.blocks, HOST) as streamed,
            HostAdamW(model.parameters(), streamed, **options) as optimizer,
        ):
            if name == "scaler":
                scaler = torch.amp.GradScaler("cpu")
                scaler.scale(loss_of(model, 0)).backward()
                scaler.step(optimizer)
            elif name != "idle" or dist.get_rank() == 0:
                loss_of(model, 0).backward()
            if name == "changed" and dist.get_rank() == 1:
                model.blocks[1][0].weight.grad.data.mul_(0.5)
            optimizer.step()
    except RuntimeError as refusal:
        assert words in str(refusal), refusal
    else:
        raise AssertionError(f"{name} was not refused")


def main(name: str) -> None:
    if name in ("heads", "shapes", "nobody", "in_turn"):
        for max_norm in (None, 0.1):
            trains_as_ddp(name, max_norm)
    else:
        is_refused(name, in_backward=False)
        if name in ("layer", "idle"):
            is_refused(name, in_backward=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for name in sys.argv[1:]:
        main(name)
    dist.destroy_process_group()
