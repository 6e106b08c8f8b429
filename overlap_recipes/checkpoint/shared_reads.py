# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/shared_reads.py
"""What several ranks hold is read by one of them and broadcast: each byte leaves the storage once.

Under DDP each rank holds the whole model, under HSDP each shard is held by the ranks of a replicate
group. DCP has each of them read it: with N ranks N times the traffic of a network file system.
"""

import logging
from collections import defaultdict
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

LOG = logging.getLogger(__name__)
# Bytes. If what the same ranks hold on devices of one type is less than this, each rank reads all
# of it: a NCCL communicator takes .3 to 1 s, and a network file system of 1 GB/s reads it in one.
WORTH = 1 << 30
PACK = 8 << 20  # bytes; smaller items are sent together, up to about this
_ALIGNED = 16  # bytes; where an item begins in what is sent together: a multiple for any dtype


class Sent(NamedTuple):
    """What is sent of an item: the same on all ranks that share it."""

    storage_index: MetadataIndex
    storage_offsets: torch.Size
    lengths: torch.Size
    device: str
    dtype: torch.dtype

    def nbytes(self) -> int:
        return prod(self.lengths) * self.dtype.itemsize


@dataclass
class Bundle:
    """Items that one rank reads, and sends to others at once.

    Attributes:
        ranks: that hold them, by their numbers in the group that loads.
        device: the type of the device that they are on.
        nbytes: that are sent.
        owner: the rank that reads them.
        numbers: the places of its items in the list of all that this rank wants. They differ by
            rank, so each rank is told its own.
    """

    ranks: tuple[int, ...]
    device: str
    nbytes: int = 0
    owner: int = -1
    numbers: list[int] = field(default_factory=list)


@dataclass
class Shares:
    """What a rank is told: the groups that are made, and the bundles that it takes part in.

    All ranks have the groups in one order, and the bundles, too, so that none waits for another.
    """

    groups: list[tuple[int, ...]]
    bundles: list[Bundle] = field(default_factory=list)


class SharedReads(DefaultLoadPlanner):
    """Plans a load in which one rank reads what several hold; ``send`` then gives it to the others.

    ``dcp.load`` lies between the two. It raises on all ranks if one of them could not read, so that
    no rank waits for a broadcast that does not come. ``send`` does nothing that could fail on one
    rank alone: what it needs is made before.

    Args:
        group: of all ranks that load; the default group.

    Attributes:
        received_bytes: of tensors that this rank got from others.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.group = group
        self.received_bytes = 0
        self.shares = Shares([], [])
        self.items: list[ReadItem] = []  # all that this rank wants; a bundle has their numbers
        self.rooms: dict[str, torch.Tensor] = {}  # a buffer to send and receive, by type of device

    # -- the plan: what each rank wants, who reads it

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        devices = devices_of(self.group)
        self.items = plan.items
        sent = [self.sent_of(item, devices) for item in plan.items]
        return replace(plan, planner_data=sent)

    def sent_of(self, item: ReadItem, devices: set[torch.device]) -> Sent | None:
        """None for what each rank has to read for itself."""
        if item.type != LoadItemType.TENSOR:
            return None
        target = self.resolve_tensor(item)
        if target.device not in devices or not _can_be_sent(target):
            return None
        lengths = item.lengths
        device = target.device.type
        return Sent(item.storage_index, item.storage_offsets, lengths, device, target.dtype)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """On one rank: choose what is shared, and who reads it."""
        plans = super().create_global_plan(global_plan)
        can_make_groups = len(plans) == dist.get_world_size()  # all ranks of the job have to
        wanted = _wanted_by(plans)
        packs: list[tuple[Bundle, list[Sent]]] = []
        for (ranks, device), shared in _worth_sharing(wanted, len(plans), can_make_groups).items():
            packs.extend(in_bundles(Bundle(ranks, device), sorted(shared, key=self.place_of)))
        _choose_owners([bundle for bundle, _ in packs])
        groups = sorted({bundle.ranks for bundle, _ in packs if len(bundle.ranks) < len(plans)})
        told = [Shares(groups) for _ in plans]
        for bundle, items in packs:
            for rank in bundle.ranks:
                numbers = [wanted[sent][rank] for sent in items]
                told[rank].bundles.append(replace(bundle, numbers=numbers))
        return [replace(plan, planner_data=own) for plan, own in zip(plans, told, strict=True)]

    def place_of(self, sent: Sent) -> tuple[str, int]:
        """File and offset: what lies together is read by one rank."""
        places = self.metadata.storage_data or {}  # a reader need not have any
        info = places.get(sent.storage_index)
        return getattr(info, "relative_path", ""), getattr(info, "offset", 0)

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Leave out what this rank gets from others.

        Raises:
            RuntimeError: the reader has changed the plan, so numbers of items mean others.
        """
        if new_plan.items != self.items or not isinstance(new_plan.planner_data, Shares):
            raise RuntimeError(
                "the storage reader has changed the items or the planner_data of the plan: what it "
                "adds belongs in storage_data, by dataclasses.replace(plan, storage_data=...)"
            )
        self.shares = new_plan.planner_data
        rank = dist.get_rank(self.group)
        of_others: set[int] = set()
        for bundle in self.shares.bundles:
            if bundle.owner != rank:
                of_others.update(bundle.numbers)
                self.received_bytes += bundle.nbytes
            if self.is_packed(bundle):
                self.make_room(bundle)
        own = [item for number, item in enumerate(self.items) if number not in of_others]
        return replace(new_plan, items=own)

    def make_room(self, bundle: Bundle) -> None:
        room = self.rooms.get(bundle.device)
        if room is None or room.numel() < bundle.nbytes:
            device = self.target(bundle.numbers[0]).device
            self.rooms[bundle.device] = torch.empty(bundle.nbytes, dtype=torch.uint8, device=device)

    def target(self, number: int) -> torch.Tensor:
        return self.resolve_tensor(self.items[number]).detach()

    def is_packed(self, bundle: Bundle) -> bool:
        """Whether it goes through a buffer: no one tensor has its bytes as they are sent."""
        return len(bundle.numbers) > 1 or not _has_bytes_in_order(self.target(bundle.numbers[0]))

    # -- after the reads

    @torch.no_grad()
    def send(self) -> None:
        """Give what this rank has read to the others, and take what they have; all ranks call it.

        It goes on the current stream, which the reader's copies have been ordered before.
        """
        groups = {ranks: self.make_group(ranks) for ranks in self.shares.groups}
        for bundle in self.shares.bundles:
            self.broadcast(bundle, groups.get(bundle.ranks, self.group))
        if groups:
            wait_for_all(self.group)  # none is ended while another rank still receives by it
        for group in groups.values():
            if group != dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
        if self.received_bytes:
            LOG.info("%d bytes were read by other ranks", self.received_bytes)
        self.rooms.clear()

    def make_group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        members = [self.global_rank(rank) for rank in ranks]
        backend = None if self.group is None else dist.get_backend_config(self.group)
        return dist.new_group(members, backend=backend)  # None: as the default group

    def global_rank(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def broadcast(self, bundle: Bundle, group: dist.ProcessGroup | None) -> None:
        rank = dist.get_rank(self.group)
        source = self.global_rank(bundle.owner)
        if not self.is_packed(bundle):
            target = self.target(bundle.numbers[0])
            dist.broadcast(_bytes_of(target), source, group)
            torch.autograd.graph.increment_version(target)  # as any copy does
        else:
            data = self.rooms[bundle.device][: bundle.nbytes]
            if bundle.owner == rank:
                self.pack(bundle.numbers, data)
            dist.broadcast(data, source, group)
            if bundle.owner != rank:
                self.unpack(bundle.numbers, data)
        if bundle.owner != rank:
            for number in bundle.numbers:
                self.commit_tensor(self.items[number], self.target(number))

    def pack(self, numbers: list[int], data: torch.Tensor) -> None:
        begin = 0
        for number in numbers:
            target = self.target(number)
            _part_of(data, begin, target).copy_(target)
            begin = _aligned(begin + target.nbytes)

    def unpack(self, numbers: list[int], data: torch.Tensor) -> None:
        begin = 0
        for number in numbers:
            target = self.target(number)
            target.copy_(_part_of(data, begin, target))
            begin = _aligned(begin + target.nbytes)


def devices_of(group: dist.ProcessGroup | None) -> set[torch.device]:
    """The devices whose tensors this rank can broadcast in ``group``."""
    found = set()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    for pair in dist.get_backend_config(group).split(","):  # such as cpu:gloo,cuda:nccl
        kind, backend = pair.split(":")
        if kind == "cpu":
            found.add(torch.device("cpu"))
        elif accelerator is not None and kind == accelerator.type and backend != "gloo":
            # gloo would take the bytes to the host and back, each piece in turn
            found.add(torch.device(kind, torch.accelerator.current_device_index()))
    return found


def _can_be_sent(target: torch.Tensor) -> bool:
    """Whether its elements are its own bytes, each in one place."""
    if type(target.detach()) is not torch.Tensor or target.layout != torch.strided:
        return False
    if target.is_quantized:  # torch views none as bytes
        return False
    return target.numel() > 0 and not _may_overlap(target)


def _may_overlap(target: torch.Tensor) -> bool:
    """Whether two elements may be in one place, as in an expanded tensor or an unfolded one."""
    reach = 0  # of the dimensions with smaller strides: the last place that they come to
    for stride, size in sorted(zip(target.stride(), target.size(), strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _has_bytes_in_order(target: torch.Tensor) -> bool:
    return target.is_contiguous() and not target.is_conj() and not target.is_neg()


def _bytes_of(target: torch.Tensor) -> torch.Tensor:
    # as_strided: a tensor of one element may have any stride, and a view of bytes asks for 1
    return target.as_strided((target.numel(),), (1,)).view(torch.uint8)


def _part_of(data: torch.Tensor, begin: int, like: torch.Tensor) -> torch.Tensor:
    """What of ``data`` holds the elements of ``like``, row by row."""
    return data[begin : begin + like.nbytes].view(like.dtype).view(like.shape)


def _aligned(begin: int) -> int:
    return -(-begin // _ALIGNED) * _ALIGNED


def _wanted_by(plans: list[LoadPlan]) -> dict[Sent, dict[int, int]]:
    """By which ranks, and which item of each one's plan it is."""
    wanted: dict[Sent, dict[int, int]] = defaultdict(dict)
    for rank, plan in enumerate(plans):
        for number, sent in enumerate(plan.planner_data or []):
            if sent is not None:
                wanted[sent][rank] = number
    return wanted


def _worth_sharing(
    wanted: dict[Sent, dict[int, int]], ranks: int, can_make_groups: bool
) -> dict[tuple[tuple[int, ...], str], list[Sent]]:
    """What several ranks hold, if it is worth it, by those ranks and the type of device."""
    held: dict[tuple[tuple[int, ...], str], list[Sent]] = defaultdict(list)
    for sent, numbers in wanted.items():
        is_of_all = len(numbers) == ranks
        if len(numbers) > 1 and (is_of_all or can_make_groups):
            held[tuple(numbers), sent.device].append(sent)
    worth = {}
    for holders, shared in held.items():
        if sum(sent.nbytes() for sent in shared) >= WORTH:
            worth[holders] = shared
    return worth


def in_bundles(empty: Bundle, items: list[Sent]) -> list[tuple[Bundle, list[Sent]]]:
    """``items`` in as many copies of ``empty`` as they take, and what is in each."""
    packs: list[tuple[Bundle, list[Sent]]] = []
    for sent in items:
        if not packs or _aligned(packs[-1][0].nbytes) + sent.nbytes() > PACK:
            packs.append((replace(empty), []))
        bundle, inside = packs[-1]
        bundle.nbytes = _aligned(bundle.nbytes) + sent.nbytes()
        inside.append(sent)
    return packs


def _choose_owners(bundles: list[Bundle]) -> None:
    """So that the ranks read about as many bytes each: the longest first, to who has least."""
    reads: dict[int, int] = defaultdict(int)
    for bundle in sorted(bundles, key=lambda bundle: -bundle.nbytes):
        bundle.owner = min(bundle.ranks, key=lambda rank: reads[rank])
        reads[bundle.owner] += bundle.nbytes


def wait_for_all(group: dist.ProcessGroup | None) -> None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        torch.accelerator.synchronize()
    dist.barrier(group)
