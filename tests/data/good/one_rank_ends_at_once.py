"""Rank 1 ends at once behind its work, when rank 0 alone has something left to do."""

import os

import torch
import torch.distributed as dist

if __name__ == "__main__":
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank == 1:
        os._exit(0)
    print(f"mean of the loss: {total.item() / 2}")
