"""Starts its ranks itself."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank: int, ranks: int, port: int) -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", str(port)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == ranks
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    mp.spawn(work, (2, port), nprocs=2)
