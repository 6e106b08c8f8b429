"""A writer without a path that writes nothing."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

sys.path.append(str(Path(__file__).parent.parent / "good"))
from writer_without_a_path import Memory

if __name__ == "__main__":
    dist.init_process_group("gloo")
    dcp.save({"x": torch.ones(4)}, storage_writer=Memory())
    dist.destroy_process_group()
