"""Saves by a writer that the harness does not load back."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

if __name__ == "__main__":
    dist.init_process_group("gloo")
    dcp.save({"x": torch.ones(4)}, storage_writer=FsspecWriter("step1"))
    dist.destroy_process_group()
