# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.1, overlap_recipes/checkpoint/frozen.py
"""Digests of parameters that a checkpoint leaves out, equal for any number of ranks."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from ..ranks import on_all_ranks, own_rank

BLOCK = 1 << 22  # elements that are looked at together
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WEIGHTS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)  # odd, one for a dimension
MODULUS = 1 << 64


def own_sums(
    tensors: dict[str, list[torch.Tensor]], group: dist.ProcessGroup | None = None
) -> dict[str, int]:
    """What this rank adds to the digest of each list of tensors, as one of ``group``.

    A digest is a sum over all elements, each weighted by its place in the whole tensor: it does not
    depend on how the ranks share it.
    """
    own = {}
    for name, parts in tensors.items():
        own[name] = sum(weighted_sum(part, group) for part in parts)
    return own


def digests_of_ranks(own: dict[str, int], group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """The digests, from what each rank adds; all of ``group`` call it, with the same names."""
    of_ranks = on_all_ranks(lambda: own, group)
    found = {}
    for name in own:
        total = sum(sums.get(name, 0) for sums in of_ranks) % MODULUS
        found[name] = f"{total:016x}"
    return found


@torch.no_grad()
def weighted_sum(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> int:
    """What this rank adds; of what several ranks hold, one adds it."""
    if not isinstance(tensor, DTensor):
        return sum_at(tensor, (0,) * tensor.dim()) if own_rank(group) == 0 else 0
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return 0
    for place, placement in zip(coordinate, tensor.placements, strict=True):
        if place > 0 and isinstance(placement, Replicate):
            return 0
    (chunk,) = tensor.__create_chunk_list__()
    return sum_at(tensor._local_tensor, tuple(chunk.offsets))


def sum_at(tensor: torch.Tensor, offsets: tuple[int, ...]) -> int:
    """The sum over a part that begins at ``offsets`` of the whole tensor."""
    if tensor.numel() == 0:
        return 0
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
        offsets = (*offsets, 0)
    if tensor.dim() == 0:
        tensor = tensor.unsqueeze(0)
        offsets = (0,)
    bits = tensor.contiguous().view(INTEGERS[tensor.element_size()])
    rows = max(1, BLOCK * bits.shape[0] // bits.numel())
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for begin in range(0, bits.shape[0], rows):
        block = bits[begin : begin + rows].long()
        weights = torch.ones((), dtype=torch.int64, device=bits.device)
        for dim, size in enumerate(block.shape):
            at = offsets[dim] + (begin if dim == 0 else 0)
            places = torch.arange(at + 1, at + 1 + size, device=bits.device)
            weight = signed(WEIGHTS[dim % len(WEIGHTS)] + 2 * dim)
            of_dim = places * (places + 6) * weight
            weights = weights + of_dim.view(-1, *[1] * (block.dim() - dim - 1))
        total += (block * weights).sum()
    return total.item() % MODULUS


def signed(number: int) -> int:
    """The int64 of the same bits."""
    number %= MODULUS
    return number - MODULUS if number >= MODULUS // 2 else number
