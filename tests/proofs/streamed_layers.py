"""``StreamedLayers``: gradients of a resident run, bit by bit, and no load that was not needed.

Each step compares all gradients with those of ordinary training on the device. Then an optimizer on
the host updates the weights, and the next step must find them updated.
"""

from contextlib import closing

import torch
import torch.distributed as dist
from torch import nn

from overlap_recipes.offload.weight_streaming import SLOTS, StreamedLayers
from overlap_recipes.ranks import start_rank

WIDTH = 32
LAYERS, STEPS = 5, 2


class Block(nn.Module):
    """x + MLP(norm(x)); x is [..., WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def train(stack: StreamedLayers, model: nn.Sequential, resident: nn.Sequential) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for _ in range(STEPS):
        resident.load_state_dict(model.state_dict())
        resident.zero_grad()
        x = torch.randn(2, 8, WIDTH, device=stack.device)
        for each in (resident, model):
            each(x).square().mean().backward()
        stack.wait()
        for ours, theirs in zip(model.parameters(), resident.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad.cpu())
        optimizer.step()
    assert stack.loads == STEPS * (2 * LAYERS - SLOTS) and stack.stores == STEPS * LAYERS


def main() -> None:
    device = start_rank()
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(*(Block() for _ in range(LAYERS)))
    resident = nn.Sequential(*(Block() for _ in range(LAYERS)))
    with closing(StreamedLayers(model, device)) as stack:
        train(stack, model, resident.to(device))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
