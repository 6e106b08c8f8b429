"""A save fails, and the second attempt does not."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


class FullDisk(dcp.FileSystemWriter):
    def prepare_local_plan(self, plan):
        raise OSError("No space left on device")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for writer in (FullDisk("step1"), dcp.FileSystemWriter("step1")):
        try:
            dcp.save({"weight": torch.ones(4)}, storage_writer=writer)
        except dcp.CheckpointException as error:
            print("saving again:", error)
    dist.destroy_process_group()
