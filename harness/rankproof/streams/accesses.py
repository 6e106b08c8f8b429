"""Accesses: which operator touched which bytes and when, and whether two of them conflict."""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import torch

from rankproof.streams.lanes import Clock, Collective, Stream
from rankproof.streams.lines import Line

Range = tuple[int, int]  # first byte, the one behind the last
Place = tuple[int, tuple[Range, ...]]  # an address, and which bytes from there on

MOST_RANGES = 1024  # of one strided tensor; beyond, its whole span counts as touched


class Access(NamedTuple):  # a tuple: some thousand a step are made
    """One operator's read or write of some bytes."""

    operator: str
    writes: bool
    line: Line
    on: Stream
    time: int
    place: Place
    collective: Collective | None = None  # whose access it is
    arrives: bool = False  # it is written by a copy that need not wait, from no host memory

    @property
    def where(self) -> str:  # "recipe.py:120"
        return str(self.line)

    @property
    def verb(self) -> str:
        return "writes" if self.writes else "reads"

    def awaits_wait(self) -> bool:
        """Whether it is of a collective that nobody has waited for."""
        return self.collective is not None and not self.collective.waited

    def before(self, clock: Clock) -> bool:
        """Whether whoever knows ``clock`` comes after this access."""
        return self.time <= clock.get(self.on.lane, 0)

    def __str__(self) -> str:
        return f"{self.where} {self.verb} ({self.operator}) on {self.on.name}"


new_access = partial(tuple.__new__, Access)  # of its fields in a tuple: in half the time


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
    """The conflict of two accesses that nothing orders; None if there is none."""
    if not (earlier.writes or later.writes):
        return None
    nbytes = bytes_in_common(earlier.place, later.place)
    if not nbytes:
        return None
    return Conflict(earlier, later, nbytes, before_wait=earlier.awaits_wait())


def place_of(tensor: torch.Tensor) -> Place:
    """The bytes that ``tensor`` covers, ascending and disjoint."""
    if tensor.is_contiguous():
        return tensor.data_ptr(), ((0, tensor.nbytes),)
    ranges = strided_ranges(tensor.element_size(), tensor.stride(), tensor.shape)
    return tensor.data_ptr(), ranges


@lru_cache(maxsize=1024)  # a training step touches what the one before it touched
def strided_ranges(
    item: int, strides: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[Range, ...]:
    """The bytes of a tensor that is not contiguous, of elements of ``item`` bytes."""
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
    return tuple((first * item, (first + run) * item) for first in sorted(starts))


def addresses(place: Place) -> list[Range]:
    start, ranges = place
    return [(start + first, start + behind) for first, behind in ranges]


def bytes_in_common(one: Place, other: Place) -> int:
    """How many addresses two places share."""
    a = addresses(one)
    b = addresses(other)
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
