"""FSDP2 in bfloat16 cannot reduce a weight first used in the last micro-batch (pytorch#196996).

Sums of earlier micro-batches are float32, which ``reduce_dtype`` asks for, the new gradient is not.

Avoided by recipes_source/sharding/fsdp2_settings.py.
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class First(torch.nn.Sequential):
    def forward(self, x: torch.Tensor, used: int) -> torch.Tensor:
        return sum(layer(x) for layer in self[:used])


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
layers = First(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
model = fully_shard(layers, mesh=dist.init_device_mesh("cpu", (1,)), mp_policy=policy)
try:
    for used in (1, 2):
        model.set_requires_gradient_sync(used == 2)
        model(torch.ones(1, 2), used).sum().backward()
    print("fixed")
except AssertionError as error:
    print("holds" if "uniform gradient dtype" in str(error) else error)
dist.destroy_process_group()
