"""Data-parallel training that never touches torch's checkpointing."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 16)).sum().backward()
        optimizer.step()
    assert "torch.distributed.checkpoint" not in sys.modules, "nobody here has imported it"
    dist.destroy_process_group()
