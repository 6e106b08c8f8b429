"""Rank 0 awaits the save, the others wait at a barrier."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

if __name__ == "__main__":
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    saved = dcp.async_save({"x": torch.ones(4)}, checkpoint_id="step1", process_group=group)
    if dist.get_rank() == 0:
        saved.result()
    dist.barrier()
    dist.destroy_process_group()
