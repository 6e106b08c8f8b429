"""Starts each rank as a process of its own; its rendezvous is only a default."""

import os
import socket
from multiprocessing import Process

import torch
import torch.distributed as dist


def join(rank: int, ranks: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=ranks)


def work(rank: int, ranks: int) -> None:
    join(rank, ranks)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", str(port))
    processes = [Process(target=work, args=(rank, 2)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
