"""FSDP2 adds gradients of different parameters, where two ranks lack those of different ones.

Of two layers of one unit rank 0 uses the first, rank 1 the second. Each reduces what it has: one
gradient, of equal size. ``set_reduce_scatter_unused_params(True)`` is right. The documentation of
``fully_shard`` does not say that it is needed.

Avoided by recipes_source/sharding/fsdp2_settings.py.
"""

import tempfile

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard


class OneOfTwo(torch.nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[dist.get_rank()](x)  # as experts of which one rank's tokens reach one


def rank_of_two(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = dist.init_device_mesh("cpu", (2,))
    layers = OneOfTwo(*(torch.nn.Linear(2, 2, bias=False) for _ in range(2)))
    fully_shard(layers, mesh=mesh)(torch.ones(1, 2)).sum().backward()
    if rank == 0:  # each parameter's true gradient is not zero, on both ranks
        missing = any(p.grad is None for p in layers.parameters())
        print("holds" if missing else "fixed", flush=True)
    dist.barrier()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_of_two, (folder,), 2)
