"""Rank 0 saves a sharded model by itself, as one would save one that all ranks have: half of it."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard

if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = torch.nn.Linear(8, 8)
    fully_shard(model)
    if dist.get_rank() == 0:
        dcp.save(model.state_dict(), checkpoint_id="step1", no_dist=True)
    dist.barrier()
    dist.destroy_process_group()
