"""Removes a part of its checkpoint."""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

if __name__ == "__main__":
    dist.init_process_group("gloo")
    dcp.save({"x": torch.ones(4)}, checkpoint_id="step1")
    if dist.get_rank() == 0:
        os.remove("step1/.metadata")
    dist.barrier()
    dist.destroy_process_group()
