"""Gathers and reductions in place: on one and two ranks all losses and weights are stock FSDP2's.

After each step two blocks are called alone, so that others are gathered in vain. Then weights
change in a way that nothing knows of, and the model is evaluated; so twice with its last block
alone. A sum of two does not depend on its order; more ranks sum in another.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from overlap_recipes.fsdp2.in_place_gather import gather_in_place
from overlap_recipes.fsdp2.in_place_reduce import reduce_in_place
from overlap_recipes.ranks import start_rank

UNITS, WIDTH, HIDDEN = 5, 24, 49  # blocks, each an FSDP unit; features
BATCH, STEPS = 8, 4  # samples per rank and step
HALF = torch.bfloat16
DTYPES = ((), (HALF, torch.float32), (HALF, HALF))  # of weights, of what travels


def build(device: torch.device, policy: MixedPrecisionPolicy, stock: bool = True) -> FSDPModule:
    """Blocks over (batch, WIDTH), float32 weights; 49 rows divide by none of 2, 3 and 4 ranks."""
    torch.manual_seed(0)
    pairs = [(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)) for _ in range(UNITS)]
    model = nn.Sequential(*(nn.Sequential(up, nn.GELU(), down) for up, down in pairs)).to(device)
    for unit in (*model, model):
        fully_shard(unit, mp_policy=policy)
        # stock FSDP2's default trips over evaluations
        unit.set_modules_to_backward_prefetch([unit] if stock else [])
    return model


def train(model: FSDPModule, device: torch.device, gathers=None) -> list[torch.Tensor]:
    """Train, and change weights in ways no optimizer knows of; all losses and final weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    shards = [p.to_local().data for p in model.parameters()]  # changes go uncounted
    found = []
    for number in range(STEPS):
        if number == 1:  # more units ahead than there are slots
            model[0].set_modules_to_forward_prefetch(list(model)[1:])
        torch.manual_seed(1000 * number + dist.get_rank())
        batch = torch.randn(BATCH, WIDTH, device=device)
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        found.append(loss)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(model[-1](model[1](batch)).square().mean())  # others are gathered in vain
            for run in (model, model[-1], model[-1]):
                for shard in shards:
                    shard.mul_(0.9)  # as a load or a swapped average would
                found.append(run(batch).square().mean())
        if gathers is not None and number < STEPS - 1:
            gathers.begin_next_forward()
    return [t.detach() for t in found] + shards


def prove(device: torch.device) -> None:
    for dtypes in DTYPES:
        policy = MixedPrecisionPolicy(*dtypes)
        expected = train(build(device, policy), device)
        model = build(device, policy, stock=False)
        gathers = gather_in_place(model, slots=3)
        pushed = reduce_in_place(model)
        found = train(model, device, gathers)
        same = all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert dist.get_world_size() > 2 or same, "not stock's bits"
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.01)
        if pushed is not None:
            assert gathers.gathers > STEPS * UNITS, "FSDP2 gathered by itself"
            assert pushed.calls == UNITS * STEPS, "FSDP2 reduced by itself"
            print(f"{gathers.gathers} gathers into {len(gathers.slots)} slots, {pushed.calls} sums")


def main() -> None:
    device = start_rank()
    try:
        prove(device)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
