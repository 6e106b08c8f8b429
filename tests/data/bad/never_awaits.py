"""Never awaits its save, which happens to be written in time."""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

if __name__ == "__main__":
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    dcp.async_save({"x": torch.ones(4)}, checkpoint_id="step1", process_group=group)
    while not os.path.exists("step1/.metadata"):
        pass
    dist.barrier()
    dist.destroy_process_group()
