"""Accesses: which operator touched which bytes and when, and whether two of them conflict."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from rankproof.streams.lanes import Clock, Collective, Stream

Range = tuple[int, int]  # first address, address behind the last

MOST_RANGES = 1024  # of one strided tensor; beyond, its whole span counts as touched


class Access(NamedTuple):  # a tuple: some thousand a step are made
    """One operator's read or write of some bytes."""

    operator: str
    writes: bool
    where: str  # "recipe.py:120"
    on: Stream
    time: int
    ranges: tuple[Range, ...]
    collective: Collective | None = None  # whose access it is
    arrives: bool = False  # it is written by a copy that need not wait, from no host memory

    @property
    def verb(self) -> str:
        return "writes" if self.writes else "reads"

    def awaits_wait(self) -> bool:
        """Whether it is of a collective that nobody has waited for."""
        return self.collective is not None and not self.collective.waited

    def before(self, clock: Clock) -> bool:
        """Whether whoever knows ``clock`` comes after this access."""
        return self.time <= clock.get(self.on.lane, 0)

    def superseded_by(self, later: "Access") -> bool:
        """Whether all that must come after this access must come after ``later`` anyway."""
        as_strict = later.writes or not self.writes
        return as_strict and self.ranges == later.ranges and self.before(later.on.clock)

    def __str__(self) -> str:
        return f"{self.where} {self.verb} ({self.operator}) on {self.on.name}"


@dataclass(frozen=True)
class Conflict:
    """Two accesses to the same bytes, at least one a write, that nothing orders."""

    earlier: Access
    later: Access
    nbytes: int
    before_wait: bool = False  # the earlier one is a collective's that nobody has waited for

    def __str__(self) -> str:
        if self.before_wait:
            issued = f"{self.earlier.operator}, issued at {self.earlier.where}"
            return (
                f"{self.later} what {issued}, {self.earlier.verb} until it is waited for: "
                f"{self.nbytes} bytes in common; wait() for it before {self.later.where}"
            )
        return (
            f"{self.later}, {self.earlier}: {self.nbytes} bytes in common, and no event, wait or "
            f"synchronisation orders the two"
        )


def conflict_of(earlier: Access, later: Access) -> Conflict | None:
    """The conflict of two accesses of which ``later`` begins now; None if there is none."""
    some_write = earlier.writes or later.writes
    if not some_write or earlier.before(later.on.clock):
        return None
    nbytes = bytes_in_common(earlier.ranges, later.ranges)
    if not nbytes:
        return None
    return Conflict(earlier, later, nbytes, before_wait=earlier.awaits_wait())


def byte_ranges(tensor: torch.Tensor) -> tuple[Range, ...]:
    """The addresses that ``tensor`` covers, ascending and disjoint."""
    base = tensor.data_ptr()
    if tensor.is_contiguous():
        return ((base, base + tensor.nbytes),)
    return strided_ranges(base, tensor.element_size(), tensor.stride(), tensor.shape)


@lru_cache(maxsize=256)  # a training step touches what the one before it touched
def strided_ranges(
    base: int, item: int, strides: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[Range, ...]:
    """:func:`byte_ranges` of a tensor that is not contiguous, of elements of ``item`` bytes."""
    steps = zip(strides, shape, strict=True)
    dims = sorted((stride, size) for stride, size in steps if stride * (size - 1))
    run = 1  # elements that lie side by side
    while dims and dims[0][0] == run:
        _, size = dims.pop(0)
        run *= size
    starts = [0]  # of each run, in elements
    for stride, size in dims:
        if len(starts) * size > MOST_RANGES:
            starts = [0]
            run += sum(stride * (size - 1) for stride, size in dims)
            break
        starts = [first + step * stride for step in range(size) for first in starts]
    return tuple((base + first * item, base + (first + run) * item) for first in sorted(starts))


def bytes_in_common(a: tuple[Range, ...], b: tuple[Range, ...]) -> int:
    """How many addresses two ascending lists of ranges share."""
    i = j = common = 0
    while i < len(a) and j < len(b):
        start = max(a[i][0], b[j][0])
        end = min(a[i][1], b[j][1])
        common += max(0, end - start)
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common
