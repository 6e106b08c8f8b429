# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, overlap_recipes/checkpoint/copies.py
"""Copies of a state to page-locked memory that let a read of the training loop through.

``CopyPlan`` prepares once which bytes go where; pieces with gaps between them let the copy engine
turn to a loop's own small copy.
"""

from collections.abc import Callable
from functools import cache, partial
from itertools import chain

import torch
from torch.distributed.tensor import DTensor

from ..page_locked import PageLocked

# Private by name: ``torch._foreach_copy_``, ``_local_tensor`` and ``_spec`` of DTensors, ``_cdata``
# of storages.

PIECE = 64 << 20  # bytes of copies in a row: a read of the training waits for one piece at most
FIRST_PIECE = 16 << 20  # bytes, of tensors of the first launch: forward may begin with a read
LAUNCH = 32  # pieces in one CUDA graph, each after its gap; launched in under a millisecond
SMALL = 1 << 20  # bytes; smaller tensors travel together
ALIGNMENT = 64  # bytes; where a tensor or a pack may start


class PinnedArena(PageLocked):
    """Page-locked host memory in which the tensors of a plan lie."""

    def tensor(self, offset: int | None, like: torch.Tensor) -> torch.Tensor:
        """A contiguous tensor with the shape and dtype of ``like``, ``offset`` bytes into it."""
        if like.numel() == 0:
            return torch.empty(like.shape, dtype=like.dtype, device="cpu")
        flat = torch.frombuffer(self.memory, dtype=like.dtype, count=like.numel(), offset=offset)
        return flat.view(like.shape)


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of ``tensor``."""
    return getattr(tensor, "_local_tensor", tensor)


def in_host_memory(tensor: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
    """``host`` as a DTensor of the same shards if ``tensor`` is a DTensor, else ``host`` itself."""
    if not isinstance(tensor, DTensor):
        return host
    if tensor.device_mesh.get_coordinate() is None:  # this rank holds none of it; DCP leaves it out
        return tensor
    mesh, groups = tensor.device_mesh, tensor.device_mesh.get_all_groups()
    names = mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(mesh.ndim))
    mesh = mesh.from_group(groups, "cpu", mesh=mesh.mesh, mesh_dim_names=names)
    shape = {"shape": tensor.shape, "stride": tensor.stride()}
    return DTensor.from_local(host, mesh, tensor.placements, **shape)


def identity(x: torch.Tensor) -> tuple:
    """A key that is equal for two shards of the same memory, as tied weights have."""
    memory = x.untyped_storage()._cdata, x.data_ptr()
    return memory, x.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg()


def layout(x: torch.Tensor) -> tuple:
    return identity(shard_of(x)), getattr(x, "_spec", None)


def kinds(tensors: list[torch.Tensor], shards: list[torch.Tensor]) -> list:
    """What ``is_set_to`` does not compare: addresses (a resized storage moves), flags, dtypes."""
    asked = torch.Tensor.data_ptr, torch.Tensor.is_conj, torch.Tensor.is_neg
    values = [x for ask in asked for x in map(ask, shards)] + [x.dtype for x in shards]
    return [id(getattr(x, "_spec", x)) for x in tensors] + values


def take(snapshots: list[tuple], small: list[torch.Tensor], pack: torch.Tensor) -> None:
    """Copy shards to their snapshots, and the bytes of small tensors into their pack."""
    if snapshots:
        torch._foreach_copy_(*zip(*snapshots, strict=True))
    torch.cat(small, out=pack)


capture_stream = cache(torch.cuda.Stream)  # cached: one for each device


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def copy_rows(rows: list[list[tuple]]) -> None:
    torch._foreach_copy_(*zip(*chain(*rows), strict=True), non_blocking=True)


def one_launch(work: Callable[[], object], like: torch.Tensor) -> Callable[[], object]:
    """Return what launches the kernels and copies of ``work`` on the current stream.

    On CUDA, ``work`` is captured: what it does on the host is done here alone.
    """
    if not like.is_cuda:
        return work
    graph, stream = torch.cuda.CUDAGraph(), capture_stream(like.device)
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        work()
    graph.work = work  # has the tensors: they must live as long
    return graph.replay


class CopyPlan:
    """Which bytes of ``tensors`` go where, prepared once and right as long as ``fits`` says so.

    Args:
        tensors: dense tensors or DTensors, anywhere.
        device: the device whose copies run beside training. ``queue`` copies tensors elsewhere
            itself.
        changed_by_forward: tensors that forward changes in place: snapshots are copied.
        snapshot_bytes: device memory for snapshots; the update need not wait for their copies.

    ``offsets`` are bytes in an arena, by identity. ``snapshots`` are pairs (snapshot, shard).
    ``in_place`` are pairs (offset, bytes of a tensor itself), ``from_copies`` the same of snapshots
    and of the pack of small tensors. ``elsewhere`` are on another device. A copy to ``gap``,
    64 bytes on the device, makes the stream wait for the other copy engine.
    """

    @torch.inference_mode(False)
    def __init__(self, tensors, device, changed_by_forward=(), snapshot_bytes: int = 0) -> None:
        self.tensors, self.shards = tensors, [shard_of(x).detach() for x in tensors]
        self.layouts, self.known = [*map(layout, tensors)], kinds(tensors, self.shards)
        self.gap = torch.zeros(ALIGNMENT, dtype=torch.uint8, device=device)
        self.nbytes, self.offsets, large, small = ALIGNMENT, {}, [], []
        self.snapshots, self.elsewhere, self.in_place = [], [], []

        changing = [shard_of(x) for x in changed_by_forward if x.layout == torch.strided]
        changing = {shard.untyped_storage().data_ptr() for shard in changing}
        unique = {identity(shard): shard for shard in self.shards if shard.numel()}
        for shard in sorted(unique.values(), key=torch.Tensor.element_size, reverse=True):
            if shard.device != self.gap.device:
                self.elsewhere.append(shard)
                self.offsets[identity(shard)] = self.place(shard.nbytes)
                continue
            source, is_large = shard, shard.nbytes >= SMALL
            within_budget = is_large and shard.nbytes <= snapshot_bytes
            is_changing = is_large and shard.untyped_storage().data_ptr() in changing
            is_view = not shard.is_contiguous() or shard.is_conj() or shard.is_neg()
            snapshot_bytes -= shard.nbytes if within_budget else 0
            if within_budget or is_changing or is_view:
                source = shard.new_empty(shard.shape)
                self.snapshots.append((source, shard))
            (large if is_large else small).append((shard, source))

        # the gap: cat needs an input
        in_pack = [self.gap, *(x.unsqueeze(-1).view(torch.uint8).view(-1) for _, x in small)]
        pack = torch.cat(in_pack)
        self.from_copies = [(offset := self.place(pack.nbytes), pack)]
        for (shard, _), before in zip(small, in_pack, strict=False):  # widest elements first
            self.offsets[identity(shard)] = offset = offset + before.nbytes
        for shard, source in sorted(large, key=lambda pair: pair[0].nbytes, reverse=True):
            self.offsets[identity(shard)] = offset = self.place(shard.nbytes)
            sources = self.in_place if source is shard else self.from_copies
            sources.append((offset, source.view(-1).view(torch.uint8)))
        take_all = partial(take, self.snapshots, in_pack, pack)
        take_all()  # loads kernels, which a capture must not
        self.take_snapshots = one_launch(take_all, self.gap)

    def place(self, nbytes: int) -> int:
        """Reserve room; return its offset."""
        offset, self.nbytes = self.nbytes, self.nbytes + nbytes + -nbytes % ALIGNMENT
        return offset

    def fits(self, tensors: list[torch.Tensor]) -> bool:
        """Whether these are the tensors of the plan, or others of the same memory and layout."""
        shards = [*map(shard_of, tensors)]
        same = kinds(tensors, shards) == self.known
        same = same and all(map(torch.Tensor.is_set_to, shards, self.shards))
        return same or [*map(layout, tensors)] == self.layouts

    def hosts(self, arena: PinnedArena) -> list[torch.Tensor]:
        """The tensors of the plan as they will lie in ``arena``; tied ones share their memory."""
        hosts = {identity(x): arena.tensor(self.offsets.get(identity(x)), x) for x in self.shards}
        return list(map(in_host_memory, self.tensors, [hosts[identity(x)] for x in self.shards]))

    def copies(self, arena: PinnedArena) -> list[list[Callable[[], object]]]:
        """Lists of launches: of what lies elsewhere (no graph), of tensors in place, of copies.

        The third list reads snapshots and the pack: the state may change when the second has ended.
        """
        # (target, source)
        gap = self.gap, arena.bytes.narrow(0, 0, self.gap.nbytes)
        hosts = [arena.tensor(self.offsets[identity(x)], x) for x in self.elsewhere]
        copies = [[partial(copy_each, hosts, self.elsewhere)]]
        for sources in (self.in_place, self.from_copies):
            # rows: each a gap and the copies of one piece; parts: the rows of one launch
            rows, in_a_row = [[gap]], 0
            for offset, source in sources:
                most = PIECE if len(rows) > LAUNCH else FIRST_PIECE
                for piece in source.split(most):
                    in_a_row += piece.nbytes
                    if in_a_row > most:
                        rows, in_a_row = [*rows, [gap]], piece.nbytes
                    rows[-1].append((arena.bytes.narrow(0, offset, piece.nbytes), piece))
                    offset += piece.nbytes
            parts = [rows[start : start + LAUNCH] for start in range(0, len(rows), LAUNCH)]
            copies.append([one_launch(partial(copy_rows, part), self.gap) for part in parts])
        return copies

    def queue(self, copies: list[list], streams, stream) -> list:
        """Launch ``copies`` on ``stream``, after what it waits for; an event after each list."""
        events = [streams.Event() for _ in copies]
        with streams.stream(stream):
            for launches, event in zip(copies, events, strict=True):
                for launch in launches:
                    launch()
                event.record(stream)
        return events
