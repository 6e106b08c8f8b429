"""Waits for a save no longer than a millisecond, and does not look whether it is done."""

import concurrent.futures

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

if __name__ == "__main__":
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    state = {"weight": torch.ones(2**20)}
    saved = dcp.async_save(state, checkpoint_id="step1", process_group=group)
    concurrent.futures.wait([saved], timeout=0.001)
    dist.destroy_process_group()
