# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/state/frozen.py
"""Parameters that checkpoints leave out, and their digests, equal for any number of ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from ...ranks import on_all_ranks, own_rank
from .trees import parts_of, shard_of

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MODULUS = 1 << 64
_BLOCK = 1 << 17  # elements that are looked at together: they stay in a core's cache
_BLOCK_ON_DEVICE = 1 << 22
_ODD = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of splitmix64


class LeftOut:
    """What ``trainable_only`` leaves out: frozen parameters that no checkpoint of the run has had.

    What a checkpoint has had stays in all that follow: the job would not have it otherwise, when
    that one is pruned. So does what an optimizer has state for.

    Attributes:
        in_checkpoints: names of what a checkpoint of this run has, or one that was resumed.
        digests: of what is left out.
    """

    def __init__(self) -> None:
        self.in_checkpoints: set[str] = set()
        self.digests: dict[str, str] = {}
        self._places: list[tuple] = []  # where the parameters lay of which there are digests
        self._sums: dict[str, int] = {}  # what this rank adds to them

    def choose(
        self, parameters: dict[str, nn.Parameter], with_state: dict[str, list[str]]
    ) -> set[str]:
        """The names to leave out; makes their digests once.

        The ranks meet at the first call, and where names are left out that were not before: where
        something has changed on one rank alone, the others do not come.

        Raises:
            ValueError: one is on meta, or has changed since there is a digest of it.
        """
        chosen = {}
        for name, parameter in parameters.items():
            is_kept = name in self.in_checkpoints or with_state.get(name)
            if not parameter.requires_grad and not is_kept:
                chosen[name] = parameter
        places = []
        of_parts = {}
        for name, parameter in chosen.items():
            if shard_of(parameter).is_meta:
                raise ValueError(on_meta(name))
            of_parts[name] = parts_of(parameter)
            for part in of_parts[name]:
                shard = shard_of(part)
                places.append((name, shard.data_ptr(), shard._version, part._version))
        if places != self._places:
            self._look_again(of_parts)
            self._places = places
        self.in_checkpoints.update(parameters.keys() - chosen.keys())
        return set(chosen)

    def _look_again(self, of_parts: dict[str, list[torch.Tensor]]) -> None:
        sums = own_sums(of_parts)
        changed = []
        for name in sums.keys() & self._sums.keys():
            if sums[name] != self._sums[name]:
                changed.append(name)
        if changed:
            raise ValueError(
                f"{', '.join(sorted(changed))}: frozen, left out of checkpoints, and changed since "
                "the first of them: no load would bring back what is here now. Let it require grad "
                "or leave out trainable_only; an average goes outside the model, by a name of its "
                "own, or into buffers; if this is the base from now on, make a new TrainingState"
            )
        if sums.keys() <= self._sums.keys():
            self.digests = {name: self.digests[name] for name in sums}
        else:
            self.digests = digests_of_ranks(sums)
        self._sums = sums


def on_meta(name: str) -> str:
    return f"{name} is frozen and still lies on meta: load the base first"


# -- digests ----------------------------------------------------------------------------------


def own_sums(
    tensors: dict[str, list[torch.Tensor]], group: dist.ProcessGroup | None = None
) -> dict[str, int]:
    """What this rank adds to the digest of each list of tensors, as one of ``group``.

    A digest is a sum over all elements of a hash of the element and of its place in the whole
    tensor: it does not depend on how the ranks share it.
    """
    own = {}
    for name, parts in tensors.items():
        own[name] = sum(_sum_of(part, group) for part in parts)
    return own


def digests_of_ranks(own: dict[str, int], group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """The digests, from what each rank adds; all of ``group`` call it, with the same names."""
    of_ranks = on_all_ranks(lambda: own, group)
    found = {}
    for name in own:
        total = sum(sums.get(name, 0) for sums in of_ranks) % _MODULUS
        found[name] = f"{total:016x}"
    return found


@torch.no_grad()
def _sum_of(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> int:
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
    bits = tensor.contiguous().view(_INTEGERS[tensor.element_size()])
    of_block = _BLOCK if bits.device.type == "cpu" else _BLOCK_ON_DEVICE
    rows = max(1, of_block * bits.shape[0] // bits.numel())
    places = []  # a hash of each row, of each column, ...
    for dim, size in enumerate(bits.shape):
        numbers = torch.arange(offsets[dim], offsets[dim] + size, device=bits.device)
        along = _mixed(numbers.add_(1).mul_(_signed(_ODD[0] + 2 * dim)))
        places.append(along.view(-1, *[1] * (bits.dim() - dim - 1)))
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for begin in range(0, bits.shape[0], rows):
        block = bits[begin : begin + rows].to(torch.int64, copy=True)
        block += places[0][begin : begin + rows]
        for along in places[1:]:
            block += along
        total += _mixed(block).sum()
    return total.item() % _MODULUS


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """A hash of each of ``numbers``, in their place: one bit changes half of those of its own."""
    numbers *= _signed(_ODD[1])
    numbers ^= numbers >> 32
    numbers *= _signed(_ODD[2])
    numbers ^= numbers >> 29
    return numbers


def _signed(number: int) -> int:
    """The int64 of the same bits."""
    number %= _MODULUS
    return number - _MODULUS if number >= _MODULUS // 2 else number
