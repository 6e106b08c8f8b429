"""A thread saves tensors that the main thread changes."""

import threading

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

WRITING, CHANGED = threading.Event(), threading.Event()


class LateWriter(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        WRITING.set()
        CHANGED.wait()
        return super().write_data(plan, planner)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    state, directory = {"x": torch.ones(4)}, f"rank{dist.get_rank()}"
    settings = {"storage_writer": LateWriter(directory), "no_dist": True}
    thread = threading.Thread(target=dcp.save, args=(state,), kwargs=settings)
    thread.start()
    WRITING.wait()
    state["x"].add_(1)
    CHANGED.set()
    thread.join()
    dist.destroy_process_group()
