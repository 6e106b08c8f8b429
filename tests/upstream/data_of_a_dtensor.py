"""``p.data = x`` on a parameter of ``fully_shard`` changes nothing, without an error.

Avoided by recipes_source/sharding/peer_copies.py.
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = fully_shard(torch.nn.Linear(2, 2, device="cpu"), mesh=dist.init_device_mesh("cpu", (1,)))
weight = next(model.parameters())
try:
    weight.data = torch.zeros_like(weight)
    print("fixed" if weight.to_local().abs().sum() == 0 else "holds")
except RuntimeError:
    print("fixed")
dist.destroy_process_group()
