"""Rank 0 waits for a message that nobody sends."""

import threading

import torch
import torch.distributed as dist


def wait_for_a_message() -> None:
    if dist.get_rank() == 0 and dist.get_world_size() > 1:
        dist.recv(torch.zeros(1), src=1)
    threading.Event().wait()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    wait_for_a_message()
