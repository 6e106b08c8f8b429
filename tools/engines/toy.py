"""A model, its optimizer, schedule and data, for runs on engines: what a training script has.

``PACE`` says how slow a step is: ``0.1``, seconds each; ``0.1,60:20``: and 20 s in step 60, once.
"""

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

WIDTH, BATCH = 64, 8


class Loader:
    """Batches of this rank, (BATCH, WIDTH); each follows from the rank and how many were taken."""

    def __init__(self, last_step: int) -> None:
        self.taken = 0
        self.last_step = last_step

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.taken < self.last_step:
            self.taken += 1
            generator = torch.Generator().manual_seed(10_000 * dist.get_rank() + self.taken)
            yield torch.randn(BATCH, WIDTH, generator=generator)

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]

    def load_state_dicts(self, states: list[dict[str, int]]) -> None:
        """Of all earlier ranks, where their number was another."""
        self.taken = states[0]["taken"]


class Toy:
    def __init__(self, last_step: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        wide = nn.Linear(WIDTH, 4 * WIDTH)
        narrow = nn.Linear(4 * WIDTH, WIDTH)
        self.model = nn.Sequential(wide, nn.ReLU(), nn.Dropout(0.1), narrow)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=1000)
        self.loader = Loader(last_step)
        pause, _, stall = os.environ.get("PACE", "0").partition(",")
        stalled_step, _, seconds = stall.partition(":")
        self.pause_s = float(pause)
        self.stalled_step = int(stalled_step or 0)
        self.stall_s = float(seconds or 0)

    def step(self, batch: torch.Tensor) -> None:
        (self.model(batch) - batch).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        time.sleep(self.pause_s)
        if self.loader.taken == self.stalled_step:
            self.stall()

    def stall(self) -> None:
        """Sleep in one step of a job, not again after its restart."""
        marker = Path(os.environ["STALLED"] + f".{dist.get_rank()}")
        if not marker.exists():
            marker.touch()
            time.sleep(self.stall_s)

    def weights(self) -> str:
        """A digest of all weights; all ranks call it."""
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.full_tensor().detach().numpy().tobytes())
        return digest.hexdigest()[:12]


def say(text: str) -> None:
    """One line, whole also where several ranks write to one file."""
    rank = dist.get_rank()
    host = os.environ.get("SLURMD_NODENAME", os.uname().nodename)
    os.write(1, f"{time.strftime('%H:%M:%S')} {host} rank {rank}: {text}\n".encode())
