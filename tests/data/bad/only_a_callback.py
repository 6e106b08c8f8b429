"""Asks to be called when its save has ended, and leaves the process group before that."""

import threading

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

has_left = threading.Event()


class Slow(dcp.FileSystemWriter):
    """Writes when its rank has left the process group."""

    def write_data(self, plan, planner):
        has_left.wait()
        return super().write_data(plan, planner)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    state = {"x": torch.ones(4)}
    upload = dcp.async_save(state, storage_writer=Slow("step1"), process_group=group)
    upload.add_done_callback(print)
    dist.destroy_process_group()
    has_left.set()
