"""pytorch#181832 and its like: gradients reach a unit by a tensor that FSDP2 has no hook on.

Argument: which tensor of each unit that is; see ``Block``. Stock FSDP2 raises in backward, unless
its hook came before. In place the gradients must be right, or the error must be the one that
autograd gives for weights that are no longer there.
"""

import sys

import torch
import torch.distributed as dist
import unsharded
from torch import nn

BLOCKS = 6
GAIN = 3  # of the weights, so that gradients of all blocks are of a size
KEPT_ELSEWHERE: list[torch.Tensor] = []


class Output:
    """A class of the user's, which no pytree knows."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up = nn.Linear(unsharded.WIDTH, unsharded.WIDTH)
        self.down = nn.Linear(unsharded.WIDTH, unsharded.WIDTH)
        self.side = nn.Linear(unsharded.WIDTH, unsharded.WIDTH)
        if kind == "frozen":
            self.requires_grad_(False)

    def forward(self, x: torch.Tensor):
        y = self.down(self.up(x).tanh())
        if self.kind in ("in_place", "twice", "frozen"):
            return y.unsqueeze(0).squeeze(0)
        if self.kind == "own_class":
            return Output(y)
        if self.kind == "kept":
            self.auxiliary = self.side(self.up(x.detach()).tanh())
        if self.kind == "kept_in_a_list":
            self.auxiliaries = [self.side(self.up(x.detach()).tanh())]
        if self.kind == "kept_elsewhere":
            KEPT_ELSEWHERE.append(self.side(self.up(x.detach()).tanh()))
        return y


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Linear(unsharded.WIDTH, unsharded.WIDTH)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        KEPT_ELSEWHERE.clear()
        x = self.embedding(x)
        for block in self.blocks:
            for _ in range(2 if self.kind == "twice" else 1):
                x = block(x)
                if self.kind in ("in_place", "twice", "frozen"):
                    x += 1.0
                if self.kind == "own_class":
                    x = x.hidden
        return x.square().mean() + self.auxiliary()

    def auxiliary(self) -> torch.Tensor:
        kept = list(KEPT_ELSEWHERE)
        for block in self.blocks:
            if self.kind == "kept":
                kept.append(block.auxiliary)
            if self.kind == "kept_in_a_list":
                kept += block.auxiliaries
        total = torch.zeros(())
        for tensor in kept:
            total = total + tensor.square().mean()
        return total


def build(kind: str) -> Model:
    torch.manual_seed(0)
    model = Model(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(GAIN)
    return model


def main() -> None:
    kind = sys.argv[1]
    with unsharded.job():
        ranks = dist.get_world_size()
        assert ranks > 1, "start it on two ranks or more: one shares nothing"
        whole = build(kind)
        for _ in range(2):
            for rank in range(ranks):
                loss = whole(unsharded.batch_of(rank)) / ranks
                loss.backward()
        model = build(kind)
        unsharded.in_units(model, model.blocks)
        if "stock" not in sys.argv:
            unsharded.in_place(model)
        for _ in range(2):
            loss = model(unsharded.batch_of(dist.get_rank()))
            try:
                loss.backward()
            except RuntimeError as error:
                if "refused" in sys.argv and "modified by an inplace operation" in str(error):
                    return
                raise
        unsharded.assert_true_gradients(model, whole)
        assert "refused" not in sys.argv, "it is right, so it should be listed so"


if __name__ == "__main__":
    main()
