"""``ActivationOffload``: gradients of a resident run, bit by bit, whatever the host's budget."""

from collections.abc import Iterator
from contextlib import closing, nullcontext

import torch
import torch.distributed as dist
from torch import nn

from overlap_recipes.offload import activations
from overlap_recipes.offload.activations import ActivationOffload
from overlap_recipes.ranks import start_rank

WIDTH, TOKENS, HEADS = 32, 8, 4
LAYERS, STEPS = 4, 3
TOY = {"window": 24 << 10}  # bytes, for small layers


class Block(nn.Module):
    """x + MLP(norm(x)); x is [..., WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def build_layers() -> Iterator[nn.Module]:
    """Layers of three kinds, one with attention and dropout."""
    yield nn.Linear(WIDTH, WIDTH)
    yield from (Block() for _ in range(LAYERS))
    yield nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True)


def gradients_of(model: nn.Module, batch: torch.Tensor, saving) -> list[torch.Tensor]:
    torch.manual_seed(0)  # dropout
    with saving:
        logged = batch.exp().mean()
        loss = model(batch).square().mean()
    return [*torch.autograd.grad(loss, list(model.parameters())), logged.detach()]


def same_bits(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def prove(device: torch.device, model: nn.Module, batch: torch.Tensor) -> None:
    expected = gradients_of(model, batch, nullcontext())
    activations.SMALLEST = 512
    with closing(ActivationOffload(device, 0, stay=[batch], **TOY)) as trial:
        assert same_bits(gradients_of(model, batch, trial.saving()), expected)
    for budget in (trial.wanted, trial.wanted // 2):
        with closing(ActivationOffload(device, budget, stay=[batch], **TOY)) as offload:
            for _ in range(STEPS):
                assert same_bits(gradients_of(model, batch, offload.saving()), expected)
        assert budget / 2 < offload.used <= budget and offload.peak <= 2 * TOY["window"]


def main() -> None:
    device = start_rank()
    torch.manual_seed(0)
    model = nn.Sequential(*build_layers()).to(device)
    batch = torch.randn(2, TOKENS, WIDTH, device=device, requires_grad=True)
    prove(device, model, batch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
