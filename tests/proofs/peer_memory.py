"""A unit gathered by copies from ``PeerMemory`` has the bits of FSDP2's own gather, twice.

The full weight is the padded shards one after the other. Other proofs take the model from here.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from overlap_recipes.fsdp2.peer_memory import PeerMemory, param_groups, why_not
from overlap_recipes.ranks import start_rank

UNITS, WIDTH, HIDDEN = 5, 24, 49  # blocks, each an FSDP unit; features


def run(prove: Callable[[torch.device], None]) -> None:
    """``prove`` on this rank's device, in the group of all ranks."""
    device = start_rank()
    try:
        prove(device)
        dist.barrier()
    finally:
        dist.destroy_process_group()


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


def same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def prove(device: torch.device) -> None:
    group, *_ = param_groups(build(device, MixedPrecisionPolicy()))
    if reason := why_not(dist.group.WORLD, device):
        return print(f"nothing to read: {reason}")
    memory = PeerMemory(dist.group.WORLD, device)
    for p in group.fsdp_params:
        size = p.padded_sharded_param_size
        shards = memory.empty([size.numel()], torch.float32)
        full = torch.empty(memory.ranks, size.numel(), device=device)
        for round_number in range(2):
            memory.barrier()
            shards[memory.rank].copy_(p._sharded_param_data + round_number)
            memory.barrier()
            for row, shard in zip(full, shards, strict=True):
                row.copy_(shard, non_blocking=True)
            expected = p.sharded_param.detach().full_tensor() + round_number
            found = full.view(-1)[: expected.numel()].view(expected.shape)
            assert torch.equal(found, expected), "not the bits of FSDP2's gather"
    print(f"read the shards of {memory.ranks} ranks by copies")


def main() -> None:
    run(prove)


if __name__ == "__main__":
    main()
