"""Waits for a save a little at a time, until it is there."""

import concurrent.futures

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

if __name__ == "__main__":
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    saved = dcp.async_save({"x": torch.ones(4)}, checkpoint_id="step1", process_group=group)
    while concurrent.futures.wait([saved], timeout=0.01).not_done:
        print("still saving")
    later = dcp.async_save({"x": torch.ones(4)}, checkpoint_id="step2", process_group=group)
    later.result(timeout=60)
    dist.destroy_process_group()
