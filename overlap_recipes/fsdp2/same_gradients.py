# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/fsdp2/same_gradients.py
"""Ranks of one host agree, in host memory, on which gradients they reduce, before they do."""

import mmap
import shutil
import tempfile
import time
import zlib
from pathlib import Path

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

_LIMIT_S = 600.0  # as NCCL's own for a collective
_SPINS = 50  # looks before the first pause
_PAUSE_S = 2e-5
_TURNS = 2  # a rank is never more than one turn ahead
_BYTES = 8  # of a word
_END = 0xFFFF  # in place of a unit's number: a backward is over
_SETTING = "set_reduce_scatter_unused_params"


class SameGradients:
    """Raises on every rank where the ranks' backward passes do not reduce the same gradients.

    Each rank writes a word for each reduction and one for the end of a backward, and reads those of
    the others. A word has the number of its turn, that of a unit, and a checksum of which of the
    unit's parameters have a gradient, and whether it is that of several backward passes.
    """

    def __init__(self, group: dist.ProcessGroup, units: list) -> None:
        self.rank = group.rank()
        self.ranks = group.size()
        self.units = units
        self.number = {id(unit): n for n, unit in enumerate(units)}
        self.turn = 0
        self.words = _shared_words(group, _TURNS * group.size())

    def agree(self, unit, taking_part: list, accumulated: bool) -> None:
        """Wait for the other ranks' next reduction. Collective.

        Args:
            unit: FSDP2's group of parameters.
            taking_part: those of its parameters that have a gradient, in its order.
            accumulated: whether a backward before this one has left its gradients unreduced.

        Raises:
            RuntimeError: it is another one on one of the ranks, or does not come in LIMIT_S.
        """
        known = {id(p) for p in taking_part}
        flags = [accumulated]
        for p in unit.fsdp_params:
            flags.append(id(p) in known)
        seen = self.exchange(self.number[id(unit)], zlib.crc32(bytes(flags)))
        if seen.count(seen[0]) == len(seen):
            return
        missing = [_name_of(p) for p in unit.fsdp_params if _lacks_gradient(p, known)]
        here = f"{title(unit)} has gradients of all its weights"
        if missing:
            here = f"{title(unit)} has no gradient of {', '.join(missing)}"
        if accumulated:
            here += ", with what set_requires_gradient_sync(False) had left"
        self.compare(here, seen)

    def end(self) -> None:
        """Wait until the other ranks' backward is over. Collective.

        Raises:
            RuntimeError: another rank reduces one more unit, or does not come in LIMIT_S.
        """
        self.compare("backward is over", self.exchange(_END, 0))

    def exchange(self, number: int, checksum: int) -> list[int]:
        self.turn += 1
        turn = self.turn & 0xFFFF
        first = self.turn % _TURNS * self.ranks
        self.words[first + self.rank] = turn << 48 | number << 32 | checksum
        seen = []
        for rank in range(self.ranks):
            deadline = time.monotonic() + _LIMIT_S
            looks = 0
            while self.words[first + rank] >> 48 != turn:
                looks += 1
                if looks > _SPINS:
                    time.sleep(_PAUSE_S)
                if time.monotonic() > deadline:
                    raise RuntimeError(f"rank {rank} has not come to a reduction in {_LIMIT_S} s")
            seen.append(self.words[first + rank])
        return seen

    def compare(self, here: str, seen: list[int]) -> None:
        for rank, word in enumerate(seen):
            if word == seen[self.rank]:
                continue
            number = word >> 32 & 0xFFFF
            there = "backward is over"
            if number != _END:
                there = f"{title(self.units[number])} has gradients of other weights"
                if number != seen[self.rank] >> 32 & 0xFFFF:
                    there = f"{title(self.units[number])} has gradients"
            raise RuntimeError(
                f"the ranks have gradients of different weights: on rank {self.rank} {here}, while "
                f"on rank {rank} {there}. None of them was reduced. {advice(self.units)}"
            )


def advice(units: list) -> str:
    """What to do about weights without a gradient on one rank, by what this torch has."""
    ours = (
        "Use every unit and weight in forward on every rank, for example by adding 0 times their "
        "sum to an output that the loss depends on"
    )
    if all(getattr(unit, _SETTING.removeprefix("set_"), False) for unit in units):
        return f"{_SETTING} does not help where ranks reduce units in another order. {ours}"
    if hasattr(FSDPModule, _SETTING):
        return f"Call model.{_SETTING}(True), which reduces zeros for them. Or: {ours}"
    return f"This torch has no {_SETTING} (2.13 has). {ours}"


def _lacks_gradient(p, known: set[int]) -> bool:
    return p.sharded_param.requires_grad and id(p) not in known


def _name_of(p) -> str:
    return getattr(p, "_param_fqn", None) or p._module_info.param_name


def title(unit) -> str:
    """A unit's class, and its name in the model where FSDP2 knows it."""
    kind = type(unit.modules[0]).__name__
    name = getattr(unit, "_module_fqn", None)
    return f"{kind} ({name})" if name else kind


def _shared_words(group: dist.ProcessGroup, words: int) -> memoryview:
    """Zeros in memory that all ranks of a group share, a word of 8 bytes each. Collective."""
    agreed = [tempfile.mkdtemp() if group.rank() == 0 else None]
    if agreed[0] is not None:
        (Path(agreed[0]) / "words").write_bytes(bytes(words * _BYTES))
    dist.broadcast_object_list(agreed, group=group, group_src=0)
    with open(Path(agreed[0]) / "words", "r+b") as file:
        mapped = mmap.mmap(file.fileno(), words * _BYTES)
    dist.barrier(group)
    if group.rank() == 0:
        shutil.rmtree(agreed[0])  # the mappings keep the file alive
    return memoryview(mapped).cast("Q")
