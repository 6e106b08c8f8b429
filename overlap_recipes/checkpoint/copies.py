# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/copies.py
"""Copies of a state to page-locked memory that let a read of the training loop through.

``CopyPlan`` prepares once which bytes go where; pieces with gaps between them let the copy engine
turn to a loop's own small copy.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..page_locked import PageLocked
from .state import shard_of

# Private by name: ``torch._foreach_copy_``, ``_spec`` of DTensors and their constructor, ``_cdata``
# of storages.

PIECE = 32 << 20  # bytes of copies in a row: a read of the training waits for one piece at most
_LOCKED = 1 << 30  # bytes of an arena that are page-locked at a time: no copy crosses a multiple
_SMALL = 1 << 20  # bytes; smaller tensors travel together
ALIGNMENT = 64  # bytes; where a tensor or a pack may start


class PinnedArena(PageLocked):
    """Page-locked host memory in which the tensors of a plan lie."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        super().__init__(nbytes, device, piece=_LOCKED)

    def tensor(self, offset: int | None, like: torch.Tensor) -> torch.Tensor:
        """A contiguous tensor with the shape and dtype of ``like``, ``offset`` bytes into it."""
        if like.numel() == 0:
            return torch.empty(like.shape, dtype=like.dtype, device="cpu")
        flat = torch.frombuffer(self.memory, dtype=like.dtype, count=like.numel(), offset=offset)
        return flat.view(like.shape)


def _host_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh of type ``cpu`` over the process groups of ``mesh``."""
    names = mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(mesh.ndim))
    groups = mesh.get_all_groups()
    return mesh.from_group(groups, "cpu", mesh=mesh.mesh, mesh_dim_names=names)


def form(tensor: DTensor) -> tuple:
    """All that decides which part of ``tensor`` a rank holds, and how."""
    return tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride(), tensor.dtype


class _HostDTensors:
    """Makes DTensors in host memory with the shards of those on a device.

    One mesh for all, .5 ms of the interpreter each, and one ``DTensor.from_local`` for all of one
    form, .15 ms each: GPT-2 XL has 1,740 tensors.
    """

    def __init__(self) -> None:
        self.meshes: dict[DeviceMesh, DeviceMesh] = {}
        self.made: dict[tuple, DTensor] = {}

    def like(self, tensor: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
        """``host`` as a DTensor if ``tensor`` is one; else ``host`` itself."""
        if not isinstance(tensor, DTensor):
            return host
        mesh = tensor.device_mesh
        if mesh.get_coordinate() is None:  # this rank holds none of it; DCP leaves it out
            return tensor
        alike = self.made.get(form(tensor))
        if alike is not None:
            return DTensor(host, alike._spec, requires_grad=False)
        if mesh not in self.meshes:
            self.meshes[mesh] = _host_mesh(mesh)
        shape = {"shape": tensor.shape, "stride": tensor.stride()}
        new = DTensor.from_local(host, self.meshes[mesh], tensor.placements, **shape)
        self.made[form(tensor)] = new
        return new


def _identity(x: torch.Tensor) -> tuple:
    """A key that is equal for two shards of the same memory, as tied weights have."""
    memory = x.untyped_storage()._cdata, x.data_ptr()
    return memory, x.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg()


def layout(x: torch.Tensor) -> tuple:
    return _identity(shard_of(x)), getattr(x, "_spec", None)


_Row = list[tuple[torch.Tensor, torch.Tensor]]
"""Copies without a gap between them: pairs (target, source)."""


@dataclass
class Copies:
    """What a plan copies into one arena.

    Attributes:
        gap: what stands before each row: a few bytes in the other direction.
        elsewhere: of tensors on other devices.
        in_place: of the tensors of the state themselves.
        from_copies: of their snapshots, and of the pack of small tensors.
    """

    gap: tuple[torch.Tensor, torch.Tensor]
    elsewhere: _Row
    in_place: list[_Row]
    from_copies: list[_Row]

    def queue(self, streams, stream) -> tuple:
        """Queue all on ``stream``, after what it waits for.

        Args:
            streams: the module of the device, such as ``torch.cuda``.

        Returns:
            Two events. After the first, the state may change: what is copied after it is
            snapshots and the pack. After the second, all is in the arena.
        """
        for host, shard in self.elsewhere:
            host.copy_(shard)
        has_been_read = streams.Event()
        copied = streams.Event()
        with streams.stream(stream):
            self.queue_rows(self.in_place)
            has_been_read.record(stream)
            self.queue_rows(self.from_copies)
            copied.record(stream)
        return has_been_read, copied

    def queue_rows(self, rows: list[_Row]) -> None:
        """A stream of copies alone would hold the copy engine; the gap is the other engine's work.

        So whoever waits for a read of another stream waits for one row: without the gaps a loop
        that reads in mid-step waits for the whole copy, .2 s for 10 GB.
        """
        to_device, from_host = self.gap
        for row in rows:
            to_device.copy_(from_host, non_blocking=True)
            for target, source in row:
                target.copy_(source, non_blocking=True)


class CopyPlan:
    """Which bytes of ``tensors`` go where, prepared once and right as long as ``fits`` says so.

    Args:
        tensors: dense tensors or DTensors, anywhere.
        device: the device whose copies run during training. Tensors elsewhere are copied
            when the copies are queued.
        changed_by_forward: tensors that forward changes in place: snapshots are copied.

    Attributes:
        nbytes: of the arena that it needs.
        offsets: bytes in an arena, by ``_identity``.
        snapshots: pairs (snapshot, shard).
        small: the bytes of the shards that travel together, as ``pack``.
        in_place, from_copies: pairs (offset, bytes).
        gap: 64 bytes on the device: a copy to them makes the stream wait for the other copy engine.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        tensors: list[torch.Tensor],
        device: torch.device,
        changed_by_forward: Iterable[torch.Tensor] = (),
    ) -> None:
        self.tensors = tensors
        self.shards = [shard_of(x).detach() for x in tensors]
        self.layouts = [layout(x) for x in tensors]
        self.gap = torch.zeros(ALIGNMENT, dtype=torch.uint8, device=device)
        self.nbytes = ALIGNMENT  # the gap's place in the arena
        self.offsets: dict[tuple, int] = {}
        self.host_dtensors = _HostDTensors()
        self.elsewhere: list[torch.Tensor] = []
        self.snapshots: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.in_place: list[tuple[int, torch.Tensor]] = []
        self.from_copies: list[tuple[int, torch.Tensor]] = []

        changing = _storages(changed_by_forward)
        unique = {_identity(shard): shard for shard in self.shards if shard.numel()}
        small, large = [], []
        for shard in unique.values():
            if shard.device != self.gap.device:
                self.offsets[_identity(shard)] = self.place(shard.nbytes)
                self.elsewhere.append(shard)
            elif shard.nbytes < _SMALL:
                small.append(shard)
            else:
                large.append(shard)
        self.place_small(small)
        for shard in sorted(large, key=lambda shard: shard.nbytes, reverse=True):
            offset = self.place(shard.nbytes)
            self.offsets[_identity(shard)] = offset
            if is_view(shard) or shard.untyped_storage().data_ptr() in changing:
                self.from_copies.append((offset, _as_bytes(self.snapshot(shard))))
            else:
                self.in_place.append((offset, _as_bytes(shard)))

    def place(self, nbytes: int) -> int:
        """Reserve room; return its offset."""
        offset = self.nbytes
        self.nbytes += nbytes + -nbytes % ALIGNMENT
        return offset

    def snapshot(self, shard: torch.Tensor) -> torch.Tensor:
        """Room for a contiguous copy of ``shard``, which ``take_snapshots`` makes."""
        snapshot = shard.new_empty(shard.shape)
        self.snapshots.append((snapshot, shard))
        return snapshot

    def place_small(self, shards: list[torch.Tensor]) -> None:
        """Give small tensors their places in one pack, the widest elements first."""
        self.small = []
        nbytes = 0
        for shard in sorted(shards, key=torch.Tensor.element_size, reverse=True):
            self.small.append(_as_bytes(self.snapshot(shard) if is_view(shard) else shard))
            self.offsets[_identity(shard)] = self.nbytes + nbytes
            nbytes += shard.nbytes
        if not self.small:
            self.small.append(self.gap)  # cat needs an input
            nbytes = self.gap.nbytes
        self.pack = torch.empty(nbytes, dtype=torch.uint8, device=self.gap.device)
        self.from_copies.append((self.place(nbytes), self.pack))

    def fits(self, tensors: list[torch.Tensor]) -> bool:
        """Whether these are the tensors of the plan, or others of the same memory and layout."""
        return [layout(x) for x in tensors] == self.layouts

    def hosts(self, arena: PinnedArena) -> list[torch.Tensor]:
        """The tensors of the plan as they will lie in ``arena``; tied ones share their memory."""
        placed: dict[tuple, torch.Tensor] = {}
        hosts = []
        for tensor, shard in zip(self.tensors, self.shards, strict=True):
            memory = _identity(shard)
            if memory not in placed:
                placed[memory] = arena.tensor(self.offsets.get(memory), shard)
            hosts.append(self.host_dtensors.like(tensor, placed[memory]))
        return hosts

    def copies(self, arena: PinnedArena) -> Copies:
        """The copies of this plan into ``arena``."""
        elsewhere = []
        for shard in self.elsewhere:
            elsewhere.append((arena.tensor(self.offsets[_identity(shard)], shard), shard))
        gap = self.gap, arena.bytes[: self.gap.nbytes]
        return Copies(gap, elsewhere, rows(arena, self.in_place), rows(arena, self.from_copies))

    def take_snapshots(self) -> None:
        """Copy, on the device, what may change before its turn to be copied to the host."""
        if self.snapshots:
            torch._foreach_copy_(*zip(*self.snapshots, strict=True))
        torch.cat(self.small, out=self.pack)


def _storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Where the memory of dense ``tensors`` begins."""
    found = set()
    for x in tensors:
        if x.layout == torch.strided:
            found.add(shard_of(x).untyped_storage().data_ptr())
    return found


def is_view(shard: torch.Tensor) -> bool:
    """Whether its memory, read from begin to end, is not what it holds."""
    return not shard.is_contiguous() or shard.is_conj() or shard.is_neg()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, 1-D."""
    elements = tensor.unsqueeze(-1)  # a single one may have any stride
    return elements.view(torch.uint8).view(-1)


def rows(arena: PinnedArena, sources: list[tuple[int, torch.Tensor]]) -> list[_Row]:
    """The copies of ``sources`` into ``arena``, each row at most ``PIECE`` bytes."""
    found: list[_Row] = [[]]
    room = PIECE
    for offset, source in sources:
        begin = 0
        while begin < source.nbytes:
            at = offset + begin
            nbytes = min(source.nbytes - begin, PIECE, _LOCKED - at % _LOCKED)
            if nbytes > room:
                found.append([])
                room = PIECE
            target = arena.bytes.narrow(0, at, nbytes)
            found[-1].append((target, source.narrow(0, begin, nbytes)))
            room -= nbytes
            begin += nbytes
    return found
