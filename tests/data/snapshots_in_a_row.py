"""Saves in a row whose large tensors are first copied on the device; run with ``--order``."""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes_source" / "checkpoint"))
import _toys as basic

from overlap_recipes.checkpoint.saves import Saves

WIDTH = 600  # a weight of 1.4 MB: not packed with others

if __name__ == "__main__":
    device = basic.start_rank()
    model = nn.Linear(WIDTH, WIDTH, bias=False).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tempfile.TemporaryDirectory() as root, Saves(device, [model.weight]) as saves:
        for step in range(3):
            model(torch.ones(1, WIDTH, device=device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            saves.save({"model": model.state_dict()}, Path(root) / f"step{step}")
    dist.destroy_process_group()
