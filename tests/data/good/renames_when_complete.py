"""Writes aside and renames what is complete."""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

if __name__ == "__main__":
    dist.init_process_group("gloo")
    dcp.save({"x": torch.ones(4)}, checkpoint_id="step1.incomplete")
    if dist.get_rank() == 0:
        os.rename("step1.incomplete", "step1")
    dist.barrier()
    dist.destroy_process_group()
