"""``Slots``: units filled from their slots have the bits of FSDP2's own gather.

So has one that is filled again at once with other weights, and its change is counted. Neighbours
lie in different slots, and a stack of equal units has as many slots as take turns.
"""

from itertools import pairwise

import peer_memory
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from overlap_recipes.fsdp2.peer_memory import PeerMemory, param_groups, why_not
from overlap_recipes.fsdp2.shared_slots import Slots, outdated


def whole(sharded: torch.Tensor) -> torch.Tensor:
    """The shards of all ranks, one after the other, on the CPU."""
    shards = [None] * dist.get_world_size()
    dist.all_gather_object(shards, sharded.to_local().cpu())
    return torch.cat(shards)


def prove(device: torch.device) -> None:
    model = peer_memory.build(device, MixedPrecisionPolicy(torch.bfloat16))
    groups = param_groups(model)
    if reason := why_not(dist.group.WORLD, device):
        return print(f"nothing to read: {reason}")
    slots = Slots(PeerMemory(dist.group.WORLD, device), turns=3)
    for group in groups:
        slots.give(group)
    for group in groups * 3:
        expected = [whole(p.sharded_param.detach()) for p in group.fsdp_params]
        for more in (0, 1):  # the second time while others may still copy from the first
            for p in group.fsdp_params:
                p.sharded_param._local_tensor.add_(more)
            assert not more or outdated(group), "a change was not counted"
            slots.fill(group)
            for p, full in zip(group.fsdp_params, expected, strict=True):
                bits = (full + more).bfloat16().to(device)
                assert torch.equal(p._unsharded_param, bits), "not the bits of FSDP2's gather"
    assert all(a.slot is not b.slot for a, b in pairwise(groups)), "neighbours share a slot"
    assert len(slots.slots) == 3 < len(groups) == peer_memory.UNITS
    print(f"{len(groups)} units of {slots.memory.ranks} ranks in {len(slots.slots)} slots")


def main() -> None:
    peer_memory.run(prove)


if __name__ == "__main__":
    main()
