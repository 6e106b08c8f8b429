"""A model under ``fully_shard`` whose first forward is in ``inference_mode`` cannot be trained.

Avoided by recipes_source/sharding/peer_copies.py.
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = fully_shard(torch.nn.Linear(2, 2), mesh=dist.init_device_mesh("cpu", (1,)))
try:
    with torch.inference_mode():
        model(torch.ones(1, 2))
    model(torch.ones(1, 2)).sum().backward()
    print("fixed")
except RuntimeError as error:
    print("holds" if "nference" in str(error) else error)
dist.destroy_process_group()
