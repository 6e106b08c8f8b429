"""A gather given to ``set_custom_all_gather`` cannot say where a unit's full weights lie.

FSDP2 casts and copies a unit's shards into a flat buffer before the call, and copies each parameter
out of it behind the call. So a gather that copies from the other ranks' memory straight to where a
unit computes has no place: it is not told the parameters, and its result is copied once more. Asked
for: the shards and the full parameters of the unit in the call, memory for the full parameters from
``allocate``, and a call when the unit lets go of them, so that units can take turns in that memory.

Avoided by recipes_source/sharding/peer_copies.py.
"""

import tempfile

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Gather:
    def allocate(self, size, *, dtype, device):
        self.buffer = torch.empty(size, dtype=dtype, device=device)
        return self.buffer

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


def rank_of_two(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    layer = fully_shard(torch.nn.Linear(2, 2, bias=False), mesh=dist.init_device_mesh("cpu", (2,)))
    gather = Gather()
    layer.set_custom_all_gather(gather)
    layer.set_reshard_after_forward(False)  # its full weights stay, to be looked at
    layer(torch.ones(1, 2))
    where = layer.weight.untyped_storage().data_ptr()
    if rank == 0:
        copied = where != gather.buffer.untyped_storage().data_ptr()
        print("holds" if copied else "fixed", flush=True)
    dist.barrier()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_of_two, (folder,), 2)
