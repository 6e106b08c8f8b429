"""A rank that it has started itself raises."""

import torch.multiprocessing as mp


def work(rank: int) -> None:
    if rank == 1:
        raise ValueError("the loss is not finite")


if __name__ == "__main__":
    mp.spawn(work, nprocs=2)
