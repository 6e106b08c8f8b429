"""A fused AdamW changes weights and leaves their version counters: a cache that asks sees nothing.

Avoided by recipes_source/sharding/peer_copies.py.
"""

import torch

weight = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.AdamW([weight], fused=True)
weight.sum().backward()
before, values = weight._version, weight.detach().clone()
optimizer.step()
assert not torch.equal(weight, values)
print("holds" if weight._version == before else "fixed")
