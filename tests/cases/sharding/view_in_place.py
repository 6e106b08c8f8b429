"""pytorch#181832: ``+=`` on a view that a unit returns drops the hook of FSDP2 from the graph.

Stock FSDP2 raises in backward. In place the gradients must be right, or an error must name the
cause: a change in place.
"""

import torch
import torch.distributed as dist
import unsharded
from torch import nn

BLOCKS = 6
GAIN = 3  # of the weights, so that gradients of all blocks are of a size


class Block(nn.Module):
    """Returns a view, as the flatten of a PatchEmbed gives."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(unsharded.WIDTH, unsharded.WIDTH)
        self.down = nn.Linear(unsharded.WIDTH, unsharded.WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(self.up(x).tanh())
        return y.unsqueeze(0).squeeze(0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(unsharded.WIDTH, unsharded.WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
            x += 1.0
        return x


def build() -> Model:
    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(GAIN)
    return model


def main() -> None:
    with unsharded.job():
        ranks = dist.get_world_size()
        assert ranks > 1, (
            "start it on two ranks or more: one shares nothing, so nothing is in place"
        )
        whole = build()
        for rank in range(ranks):
            loss = whole(unsharded.batch_of(rank)).square().mean() / ranks
            loss.backward()
        model = build()
        unsharded.in_units(model, model.blocks)
        unsharded.in_place(model)
        try:
            loss = model(unsharded.batch_of(dist.get_rank())).square().mean()
            loss.backward()
        except RuntimeError as error:
            if "in place" in str(error):
                return
            raise
        unsharded.assert_true_gradients(model, whole)


if __name__ == "__main__":
    main()
