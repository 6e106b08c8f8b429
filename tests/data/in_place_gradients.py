"""Gradients in place that are those of the unsharded model, or a refusal that says what to do.

pytorch#158719: parameters with a gradient on some ranks, as experts without tokens. pytorch#181832
and its like: gradients that reach a unit by a tensor on which FSDP2 has no hook. Stock FSDP2 mixes
gradients in silence in some of these programs, and dies or raises in others.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from overlap_recipes.fsdp2.in_place_gather import gather_in_place  # noqa: E402
from overlap_recipes.fsdp2.in_place_reduce import reduce_in_place  # noqa: E402

WIDTH, BLOCKS, STEPS = 16, 6, 2
GAIN = 3  # of the weights, so that gradients of all blocks are of a size
LARGEST_ERROR = 1e-4  # of the largest number of a gradient: sums in another order
IDLE = -1  # no weight of the last block is used
EXPERTS = {"one_each": [[0], [1]], "both_and_one": [[0, 1], [1]], "idle": [[0, 1], [0, 1, IDLE]]}
VIEWS = ("view", "twice", "frozen")  # the next block changes what a block returns, in place
KEPT = ("kept", "kept_in_a_list", "kept_elsewhere")  # beside the result, for the loss
ELSEWHERE: list[torch.Tensor] = []
REFUSED = {
    **dict.fromkeys(EXPERTS, "set_reduce_scatter_unused_params"),
    "view": "in place",
    "kept_elsewhere": "modified by an inplace operation",
}


class Output:
    """A class of the user's, which no pytree knows."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, 2)
        if kind == "frozen":
            self.requires_grad_(False)

    def forward(self, x: torch.Tensor, used: list[int]):
        if self.kind in EXPERTS:
            y = x * self.router(x).softmax(-1)[:, :1]
            for number in used:
                y = y + (self.up, self.down)[number](x)
            return y
        y = self.down(self.up(x).tanh())
        if self.kind in VIEWS:
            return y.unsqueeze(0).squeeze(0)
        if self.kind == "own_class":
            return Output(y)
        aside = self.router(self.up(x.detach()).tanh())
        if self.kind == "kept":
            self.aside = aside
        elif self.kind == "kept_in_a_list":
            self.aside = [aside]
        else:
            ELSEWHERE.append(aside)
        return y


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(BLOCKS))
        for parameter in self.parameters():
            parameter.data.mul_(GAIN if kind not in EXPERTS else 1)

    def loss(self, rank: int) -> torch.Tensor:
        torch.manual_seed(rank)
        ELSEWHERE.clear()
        return self(torch.randn(4, WIDTH), rank)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        x = self.embedding(x)
        used = EXPERTS[self.kind][rank] if self.kind in EXPERTS else []
        for block in self.blocks:
            for _ in range(2 if self.kind == "twice" else 1):
                y = block(x, [number for number in used if number != IDLE])
                if IDLE in used and block is self.blocks[-1]:
                    y = x + y.detach()
                x = y.hidden if self.kind == "own_class" else y
                if self.kind in VIEWS:
                    x += 1.0
        kept = list(ELSEWHERE)
        for block in self.blocks:
            if self.kind == "kept":
                kept.append(block.aside)
            elif self.kind == "kept_in_a_list":
                kept += block.aside
        return x.square().mean() + sum(tensor.square().mean() for tensor in kept)


def run(kind: str, unused: bool, ours: bool = True) -> None:
    ranks = dist.get_world_size()
    whole, model = Model(kind), Model(kind)
    for unit in (*model.blocks, model):
        fully_shard(unit)
        if unused:
            unit.set_reduce_scatter_unused_params(True)
    if ours:
        gather_in_place(model)
        reduce_in_place(model)
    for _ in range(STEPS):
        for rank in range(ranks):
            (whole.loss(rank) / ranks).backward()
        try:
            model.loss(dist.get_rank()).backward()
        except RuntimeError as error:
            assert kind in REFUSED and REFUSED[kind] in str(error), error
            return
    assert kind != "kept_elsewhere", "it is right, so it should be listed so"
    for (name, parameter), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        gradient = parameter.detach() * 0 if parameter.grad is None else parameter.grad
        found = gradient.full_tensor()
        wanted = torch.zeros_like(found) if other.grad is None else other.grad
        error = (found - wanted).abs().max()
        assert error <= LARGEST_ERROR * wanted.abs().max(), f"{kind}: {name} is off by {error}"


if __name__ == "__main__":
    dist.init_process_group("gloo")
    if "stock" in sys.argv:
        run("one_each", unused=False, ours=False)
    else:
        for kind in EXPERTS:
            run(kind, unused=False)
            run(kind, unused=True)
        for kind in (*VIEWS, "own_class", *KEPT):
            run(kind, unused=False)
    dist.destroy_process_group()
