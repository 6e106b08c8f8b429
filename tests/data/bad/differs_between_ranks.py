"""A plain tensor that differs between ranks is taken for replicated."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

if __name__ == "__main__":
    dist.init_process_group("gloo")
    dcp.save({"x": torch.full((2,), float(dist.get_rank()))}, checkpoint_id="step1")
    dist.destroy_process_group()
