"""Starts its ranks itself: they save, and it removes what they saved."""

import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp


def work(rank: int, directory: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2
    )
    dcp.save({"x": torch.arange(4)}, checkpoint_id=f"{directory}/checkpoint")
    dist.destroy_process_group()


if __name__ == "__main__":
    directory = tempfile.mkdtemp()
    mp.spawn(work, args=(directory,), nprocs=2)
    shutil.rmtree(directory)
