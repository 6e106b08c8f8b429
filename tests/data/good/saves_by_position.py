"""Passes its writer by position, as torch still allows."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

if __name__ == "__main__":
    dist.init_process_group("gloo")
    dcp.save({"x": torch.arange(4.0)}, dcp.FileSystemWriter("step1"))
    dist.destroy_process_group()
