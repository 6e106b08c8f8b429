"""Every rank saves its own part without the others; rank 1 cannot, and says nothing."""

import contextlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


class FullDisk(dcp.FileSystemWriter):
    def prepare_local_plan(self, plan):
        raise OSError("No space left on device")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    writer = (dcp.FileSystemWriter, FullDisk)[rank]("step1")
    with contextlib.suppress(dcp.CheckpointException):
        dcp.save({f"part{rank}": torch.ones(4)}, storage_writer=writer, no_dist=True)
    dist.destroy_process_group()
