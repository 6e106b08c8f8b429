"""Rank 1 is lost without a word in step 3, as with its host: rank 0 says why it fails, and ends."""

import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from overlap_recipes.checkpoint import CheckpointManager, TrainingState, saves

saves.EXIT_S = 1.0
dist.init_process_group("gloo", timeout=timedelta(seconds=3))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters())
with CheckpointManager(sys.argv[1], TrainingState(model, optimizer)) as checkpoints:
    checkpoints.resume()
    for step in range(1, 6):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        is_lost = step == 3 and dist.get_rank() == 1
        if is_lost and sys.argv[2] == "in a step":
            os.kill(os.getpid(), signal.SIGSTOP)  # it has not voted
        checkpoints.preempted()
        if step == 3 and sys.argv[2] == "in a save":
            checkpoints.save(step)
            if is_lost:
                os.kill(os.getpid(), signal.SIGSTOP)
