"""On the CPU, a deep copy of a ``DTensor`` fails where its local tensor begins inside a storage.

Avoided by recipes_source/sharding/stream_context.py.
"""

import copy

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = dist.init_device_mesh("cpu", (1,))
tensor = DTensor.from_local(torch.arange(8.0)[4:], mesh, [Shard(0)])
try:
    copy.deepcopy(tensor)
    print("fixed")
except RuntimeError:
    print("holds")
dist.destroy_process_group()
