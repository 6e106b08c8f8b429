"""A reduction given to ``set_custom_reduce_scatter`` gets a copy of a unit's gradients.

FSDP2 casts, packs and divides the gradients into a flat buffer before the call, and reads the
result from another. So a reduction that pushes each gradient from where backward left it to the
rank that owns its part has no place: it is not told the parameters, nor which of them have a
gradient. Asked for: the gradients of the unit in the call, with their parameters, before they are
packed, and the divisor with them.

Avoided by recipes_source/sharding/peer_copies.py.
"""

import tempfile

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Reduction:
    def __init__(self) -> None:
        self.buffers = set()
        self.packed = None  # whether the gradients came in a buffer that was asked for

    def allocate(self, size, *, dtype, device):
        buffer = torch.empty(size, dtype=dtype, device=device)
        self.buffers.add(buffer.untyped_storage().data_ptr())
        return buffer

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.packed = input_tensor.untyped_storage().data_ptr() in self.buffers
        return reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def rank_of_two(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    layer = fully_shard(torch.nn.Linear(2, 2, bias=False), mesh=dist.init_device_mesh("cpu", (2,)))
    reduction = Reduction()
    layer.set_custom_reduce_scatter(reduction)
    layer(torch.ones(1, 2)).sum().backward()
    if rank == 0:
        print("holds" if reduction.packed else "fixed", flush=True)
    dist.barrier()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_of_two, (folder,), 2)
