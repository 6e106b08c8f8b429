"""pytorch#158719: a parameter that has a gradient on one rank only, an expert without tokens.

Arguments: which experts the two ranks use, ``one_each`` (0 on one rank, 1 on the other),
``both_and_one`` (both, and 1), or ``idle`` (both, and no weight of the last block); ``stock`` FSDP2
or in ``place``; and ``unused`` if ``set_reduce_scatter_unused_params`` is on. The gradients must be
those of the unsharded model, or an error must name that setting.
"""

import sys

import torch
import torch.distributed as dist
import unsharded
from torch import nn

BLOCKS = 3
EXPERTS = 2
IDLE = -1
USED = {"one_each": [[0], [1]], "both_and_one": [[0, 1], [1]], "idle": [[0, 1], [0, 1, IDLE]]}


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Linear(unsharded.WIDTH, unsharded.WIDTH) for _ in range(EXPERTS)
        )
        self.router = nn.Linear(unsharded.WIDTH, EXPERTS)

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        shares = self.router(x).softmax(-1)
        y = x * shares[:, :1]
        for number in used:
            if number == IDLE:
                continue
            y = y + self.experts[number](x)
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        for block in self.blocks:
            idle = IDLE in used and block is self.blocks[-1]
            y = block(x, used)
            x = x + y.detach() if idle else y
        return x


def build() -> Model:
    torch.manual_seed(0)
    return Model()


def main() -> None:
    with unsharded.job():
        used_by_rank = USED[sys.argv[1]]
        assert dist.get_world_size() == len(used_by_rank), "start it on two ranks"
        whole = build()
        for rank, used in enumerate(used_by_rank):
            loss = whole(unsharded.batch_of(rank), used).square().mean() / len(used_by_rank)
            loss.backward()
        model = build()
        units = unsharded.in_units(model, model.blocks)
        if "unused" in sys.argv:
            for unit in units:
                unit.set_reduce_scatter_unused_params(True)
        if "place" in sys.argv:
            unsharded.in_place(model)
        rank = dist.get_rank()
        try:
            loss = model(unsharded.batch_of(rank), used_by_rank[rank]).square().mean()
            loss.backward()
        except RuntimeError as error:
            if "set_reduce_scatter_unused_params" in str(error):
                return
            raise
        unsharded.assert_true_gradients(model, whole)


if __name__ == "__main__":
    main()
