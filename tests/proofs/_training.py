"""A small model, its losses and its training by ``HostAdamW``, for proofs; no page of its own."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from overlap_recipes.offload import HostAdamW

WIDTH, LAYERS, WORDS = 32, 4, 50  # features, layers, tokens
STEPS, BAD_STEP, MAX_NORM = 5, 2, 0.5
ON_DEVICE = 1e-2  # how far weights may differ where the device's Adam rounds in another way


class Model(nn.Module):
    """An encoder of torch between an embedding and a head that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        options = {"batch_first": True, "norm_first": True}
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, **options)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        return self.head(self.encoder(self.embedding(ids), mask=causal, is_causal=True))


def loss_of(model: Model, seed: int, device: torch.device) -> torch.Tensor:
    torch.manual_seed(seed)  # of dropout, too
    ids = torch.randint(WORDS, (3, 8)).to(device)
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def losses(model: Model, device: torch.device) -> Iterator[torch.Tensor]:
    """Of ``STEPS`` batches of this rank; one is not a number."""
    for step in range(STEPS):
        loss = loss_of(model, 1000 * dist.get_rank() + step, device)
        yield loss * (torch.nan if step == BAD_STEP else 1)


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))


def train(optimizer: HostAdamW, device: torch.device) -> None:
    """``STEPS`` steps with another rate in each."""
    schedule = schedule_of(optimizer)
    for loss in losses(optimizer.streamed.model, device):
        loss.backward()
        optimizer.step()
        schedule.step()
    optimizer.streamed.wait()
