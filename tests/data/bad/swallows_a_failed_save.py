"""A save fails, and the script says nothing."""

import contextlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


class FullDisk(dcp.FileSystemWriter):
    def prepare_local_plan(self, plan):
        raise OSError("No space left on device")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    with contextlib.suppress(dcp.CheckpointException):
        dcp.save({"weight": torch.ones(4)}, storage_writer=FullDisk("step1"))
    dcp.save({"weight": torch.ones(4)}, checkpoint_id="step2")
    dist.destroy_process_group()
