"""Ends well and leaves a save under its unfinished name."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

if __name__ == "__main__":
    dist.init_process_group("gloo")
    dcp.save({"x": torch.ones(4)}, checkpoint_id="step1.incomplete")
    dist.destroy_process_group()
