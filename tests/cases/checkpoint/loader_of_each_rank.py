"""torchtitan#279 and #291, accelerate#4165, RLinf#1570: a loader is saved with the job."""

from collections.abc import Iterator

import roundtrip
import torch
import torch.distributed as dist
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from overlap_recipes.checkpoint.loading import load
from overlap_recipes.checkpoint.saves import Saves
from overlap_recipes.checkpoint.state import TrainingState

WIDTH = 16
DOCUMENTS_A_RANK = 1000
STEPS = 3


class Documents(torch.utils.data.IterableDataset):
    """Numbers of documents; a rank skips as many as its own number between two."""

    def __init__(self) -> None:
        self.document = dist.get_rank() * DOCUMENTS_A_RANK

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.document += 1 + dist.get_rank()
            yield torch.full((WIDTH,), float(self.document))

    def state_dict(self) -> dict[str, int]:
        return {"document": self.document}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.document = state["document"]


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, StatefulDataLoader]:
    torch.manual_seed(seed)
    model = roundtrip.sharded(nn.Linear(WIDTH, WIDTH))
    loader = StatefulDataLoader(Documents(), batch_size=2, num_workers=0)
    return model, torch.optim.AdamW(model.parameters()), loader


def numbers(batch: torch.Tensor) -> list[int]:
    return batch[:, 0].int().tolist()


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[torch.Tensor]
) -> None:
    loss = model(next(batches)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def per_rank() -> None:
    with roundtrip.job() as root:
        model, optimizer, loader = build(0)
        app = TrainingState(model, optimizer, per_rank={"data": loader})
        batches = iter(loader)
        with Saves(roundtrip.HOST, model.buffers) as saves:
            for _ in range(STEPS):
                train_step(model, optimizer, batches)
            saves.save({"app": app}, root / "step3")
        wanted = numbers(next(batches))
        again, its_optimizer, its_loader = build(1)
        its_app = TrainingState(again, its_optimizer, per_rank={"data": its_loader})
        load({"app": its_app}, root / "step3")
        found = numbers(next(iter(its_loader)))
        wrong = []
        if found != wanted:
            wrong.append(f"rank {dist.get_rank()}: the next batch is {found}, due was {wanted}")
        roundtrip.none_of_any_rank(wrong)


if __name__ == "__main__":
    per_rank()
