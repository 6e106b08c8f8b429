"""Two steps around a save of many pieces: the update waits for the last of them."""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes_source" / "checkpoint"))

import async_save as basic
import staging_copies
from overlapped_stager import OverlappedSaves

staging_copies.SMALL, staging_copies.PIECE = 1, 64
staging_copies.FIRST = staging_copies.LAST = 2

device = basic.start_rank()
model = nn.Linear(16, 16, device=device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with tempfile.TemporaryDirectory() as place, OverlappedSaves(device) as saves:
    for step in range(3):
        model(torch.ones(4, 16, device=device)).sum().backward()
        optimizer.step()
        saves.save({"model": model}, Path(place, f"step{step}"))
    first, most, last, copies = saves.sets[0][1]
    assert [len(sources) > 1 for _, sources in (first, most, last, copies)] == [True] * 3 + [False]
torch.distributed.destroy_process_group()
