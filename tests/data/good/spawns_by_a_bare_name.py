"""Starts its ranks by a function that it has imported by its name."""

import socket

import torch
import torch.distributed as dist
from torch.multiprocessing import spawn


def work(rank: int, ranks: int, address: str) -> None:
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"tcp://localhost:{probe.getsockname()[1]}"
    spawn(work, (2, address), nprocs=2)
