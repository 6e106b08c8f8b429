"""A thread of its own saves what nobody changes."""

import threading

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

if __name__ == "__main__":
    dist.init_process_group("gloo")
    state = {"x": torch.ones(4)}
    thread = threading.Thread(target=dcp.save, args=(state,), kwargs={"checkpoint_id": "step1"})
    thread.start()
    thread.join()
    dist.destroy_process_group()
