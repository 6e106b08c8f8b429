"""``gather_in_place``: every loss and final weight has the bits of stock FSDP2.

After each step two blocks are called alone, so that others are gathered in vain, weights change in
a way that nothing knows of, and the model is evaluated.
"""

import peer_memory
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from overlap_recipes.fsdp2.in_place_gather import gather_in_place

BATCH, STEPS = 8, 4  # samples per rank and step


def train(model: FSDPModule, device: torch.device, gathers=None) -> list[torch.Tensor]:
    """Train, and change weights in ways no optimizer knows of; all losses and final weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    shards, found = [p.to_local().data for p in model.parameters()], []  # changes go uncounted
    for number in range(STEPS):
        if number == 1:  # more units ahead than there are slots
            model[0].set_modules_to_forward_prefetch(list(model)[1:])
        torch.manual_seed(1000 * number + dist.get_rank())
        batch = torch.randn(BATCH, peer_memory.WIDTH, device=device)
        found.append((model(batch) - batch).square().mean())
        found[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(model[-1](model[1](batch)).square().mean())  # others are gathered in vain
            for shard in shards:
                shard.mul_(0.75)  # as a load or a swapped average would
            found.append(model(batch).square().mean())
        if gathers is not None:
            gathers.begin_next_forward()
    return [t.detach() for t in found] + shards


def prove(device: torch.device) -> None:
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
        expected = train(peer_memory.build(device, policy), device)
        model = peer_memory.build(device, policy, stock=False)
        gathers = gather_in_place(model, slots=3)
        found = train(model, device, gathers)
        assert peer_memory.same(found, expected), "not the bits of stock FSDP2"
        if gathers is not None:
            assert gathers.gathers > STEPS * peer_memory.UNITS, "FSDP2 gathered by itself"
            print(f"{gathers.gathers} gathers into {len(gathers.slots)} slots")


def main() -> None:
    peer_memory.run(prove)


if __name__ == "__main__":
    main()
