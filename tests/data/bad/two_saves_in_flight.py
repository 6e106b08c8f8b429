"""Begins a save while another one is being written."""

import tempfile
import threading
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

FIRST_MAY_WRITE = threading.Event()


class HeldWriter(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        FIRST_MAY_WRITE.wait()
        return super().write_data(plan, planner)


class ReleasingWriter(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        FIRST_MAY_WRITE.set()
        return super().write_data(plan, planner)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    groups = [dist.new_group(backend="gloo") for _ in range(2)]
    with tempfile.TemporaryDirectory() as temporary:
        directory = [temporary]
        dist.broadcast_object_list(directory)
        state = {"weight": torch.ones(4)}
        first = HeldWriter(Path(directory[0]) / "step1")
        uploads = [dcp.async_save(state, storage_writer=first, process_group=groups[0])]
        second = ReleasingWriter(Path(directory[0]) / "step2")
        uploads.append(dcp.async_save(state, storage_writer=second, process_group=groups[1]))
        for upload in uploads:
            upload.result()
        dist.barrier()
    dist.destroy_process_group()
