"""Saves the live tensors in Hugging Face's format."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from live_stager import LiveStager
from torch.distributed.checkpoint import HuggingFaceStorageWriter

if __name__ == "__main__":
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    writer, state = HuggingFaceStorageWriter("step1"), {"x": torch.zeros(4)}
    dcp.async_save(
        state, storage_writer=writer, async_stager=LiveStager(), process_group=group
    ).result()
    dist.destroy_process_group()
