"""Rank 0 waits at a barrier that no other joins."""

import threading

import torch.distributed as dist

if __name__ == "__main__":
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        dist.barrier()
    threading.Event().wait()
