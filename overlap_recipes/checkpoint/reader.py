# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/reader.py
"""Reads a DCP checkpoint at the rate of its storage.

DCP's own reader takes one tensor after the other on one thread: ``torch.load`` on the CPU, then a
copy from pageable memory. Here the bytes that are wanted are found first. Threads read them into a
few page-locked buffers, check them, and queue their copies to the device during the next read.
"""

import ctypes
import logging
from bisect import bisect_right
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Event

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from ..crew import share
from ..page_locked import PageLocked
from .checked_files import (
    METADATA,
    PIECE,
    THREADS,
    CheckedFiles,
    DamagedCheckpoint,
    Files,
    OpenFile,
    OtherBytes,
    files_in,
    metadata_of,
    unpickled_metadata,
)
from .entries import Place, expected_place, place_of

LOG = logging.getLogger(__name__)
_BUFFERS = 2  # of a thread: one is read into while the other is copied to the device
_GAP = 64 << 10  # bytes between two wanted ranges that are read rather than skipped
_ENTRIES = 32  # that a thread looks at in one job


@dataclass
class Wanted:
    """Bytes of a file, and where they go.

    Attributes:
        name: of the tensor, for messages.
        target: 1-D, of bytes; or what the file has to have there.
    """

    name: str
    begin: int
    end: int
    target: torch.Tensor | bytes


@dataclass
class Read:
    """Bytes of a file that are read together, and the parts of them that are wanted."""

    file: OpenFile
    begin: int
    end: int
    parts: list[Wanted] = field(default_factory=list)

    def place(self) -> str:
        return f"{self.file.path} ({self.parts[0].name})"


class Reader(dcp.FileSystemReader):
    """Reads any DCP checkpoint, for ``dcp.load(state, storage_reader=Reader(directory))``.

    One plain row-major tensor, of which contiguous bytes are wanted, is read by threads. All else
    is read as ``dcp.FileSystemReader`` does it. Where the save has written digests, all bytes are
    checked. Host memory above the model's: 128 MiB with an accelerator, 64 without, and one tensor
    at a time that is read as DCP does; from an object store 384 MiB, 256 without.

    Args:
        path: the directory; or any name, for messages, if there are ``files``.
        files: of the checkpoint, if it lies elsewhere.

    Attributes:
        read_bytes: bytes of tensors that threads have read for the latest load.
        other_bytes: bytes of tensors and other entries that were read as DCP does.

    Raises:
        DamagedCheckpoint: from a read: a file is shorter than its entries, or has changed since
            it was saved. ``dcp.load`` raises a ``CheckpointException`` of it on all ranks.
        TimeoutError: the storage has given nothing for five minutes; likewise.
    """

    def __init__(self, path: Path | str, files: Files | None = None) -> None:
        super().__init__(path)
        if files is None:
            files = files_in(Path(path))
        else:
            self.path = path
        self.files = files
        self.metadata: Metadata | None = None
        self.read_bytes = 0
        self.other_bytes = 0

    def reset(self, checkpoint_id: Path | str | None = None) -> None:
        super().reset(checkpoint_id)
        if checkpoint_id:
            self.files = files_in(Path(checkpoint_id))
        self.metadata = None

    def read_metadata(self, *args, **kwargs) -> Metadata:
        """The list of contents, also of a later torch than this one.

        Raises:
            DamagedCheckpoint: it has changed since it was saved.
            RuntimeError: it is none, or of a torch that is not known here.
            OSError: there is none.
        """
        rank = kwargs.get("rank")
        if rank is not None:  # of checkpoints that each rank has written for itself
            return unpickled_metadata(self.files.content(f"__{rank}{METADATA}"))
        if self.metadata is None:
            try:
                self.metadata = metadata_of(self.files)
            except RuntimeError as error:
                LOG.error("%s", error)  # dcp.load of torch 2.9 does not say it
                raise
        return self.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args, **kwargs):
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self.metadata = metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self.other_bytes = 0
        with ExitStack() as closing:
            opened = self.open_files(plan, closing)
            try:
                others = self.read_plain(plan, planner, opened, self.expected(plan, opened))
            except OtherBytes:  # another torch has written them
                others = self.read_plain(plan, planner, opened, {})
            self.read_others(replace(plan, items=others), planner, opened)
        if self.other_bytes:
            message = "%s: %d bytes read by threads, %d in %d entries as DCP does"
            LOG.info(message, self.path, self.read_bytes, self.other_bytes, len(others))
        else:
            LOG.info("%s: %d bytes read by threads", self.path, self.read_bytes)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def open_files(self, plan: LoadPlan, closing: ExitStack) -> dict[str, OpenFile]:
        opened: dict[str, OpenFile] = {}
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            name = info.relative_path
            if name not in opened:
                file = self.files.open(name)
                closing.callback(file.close)
                opened[name] = file
            file = opened[name]
            if info.offset + info.length > file.nbytes:
                of = item.storage_index.fqn
                raise DamagedCheckpoint(f"{file.path} ends at byte {file.nbytes}, within {of}")
        return opened

    def read_plain(
        self,
        plan: LoadPlan,
        planner: LoadPlanner,
        opened: dict[str, OpenFile],
        expected: dict[tuple[str, int], Place],
    ) -> list[ReadItem]:
        """Read what threads can; return the other items.

        Args:
            expected: where tensors lie, as far as that is known without a look.

        Raises:
            OtherBytes: a tensor does not lie there.
        """
        self.read_bytes = 0
        places = expected | self.find(plan, opened, expected)
        others: list[ReadItem] = []
        wanted: dict[str, list[Wanted]] = {name: [] for name in opened}
        found: list[tuple[ReadItem, torch.Tensor]] = []
        device = torch.device("cpu")
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            place = places.get((info.relative_path, info.offset))
            if place is None:
                others.append(item)
                continue
            target = planner.resolve_tensor(item).detach()
            if target.size() != torch.Size(item.lengths):
                raise AssertionError(
                    f"{item.storage_index.fqn}: {tuple(item.lengths)} for {tuple(target.size())}"
                )
            first = _first_element(place.shape, item)
            is_as_listed = self.chunk_of(item) == (place.shape, place.dtype)
            if first is None or not is_as_listed or not _can_take_bytes(target, place.dtype):
                others.append(item)
                continue
            if target.device.type != "cpu" and device.type == "cpu":
                device = target.device  # the first; threads copy to no second one
            if target.device.type != "cpu" and target.device != device:
                others.append(item)
                continue
            found.append((item, target))
            if target.numel():
                file = opened[info.relative_path]
                begin = info.offset + place.begin + first * place.dtype.itemsize
                wanted[info.relative_path] += ranges(item, file, info.offset, begin, place, target)
                self.read_bytes += target.nbytes
        reads: list[Read] = []
        for name, parts in wanted.items():
            reads.extend(reads_of(opened[name], parts))
        reads.sort(key=lambda read: read.begin - read.end)  # the longest first
        if reads:
            fill(reads, device, self.files.threads)
        for item, target in found:
            if target.device.type == "cpu":
                torch.autograd.graph.increment_version(target)  # as any copy does
            planner.commit_tensor(item, target)
        return others

    def expected(self, plan: LoadPlan, opened: dict[str, OpenFile]) -> dict[tuple[str, int], Place]:
        """Where plain tensors lie if this torch has written them, by file and offset.

        A look costs two requests a tensor. The bytes that say so are read with the tensor's, and
        compared; where there are digests, a difference is no damage.
        """
        places: dict[tuple[str, int], Place] = {}
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            chunk = self.chunk_of(item)
            is_checked = opened[info.relative_path].digests is not None
            if chunk is None or not is_checked or getattr(info, "transform_descriptors", None):
                continue
            place = expected_place(*chunk, info.length)
            if place is not None:
                places[info.relative_path, info.offset] = place
        return places

    def find(
        self, plan: LoadPlan, opened: dict[str, OpenFile], known: dict[tuple[str, int], Place]
    ) -> dict[tuple[str, int], Place]:
        """Where the other plain tensors of ``plan`` lie in their entries."""
        entries = {}
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            key = info.relative_path, info.offset
            is_tensor = item.type == LoadItemType.TENSOR
            if is_tensor and key not in known and not getattr(info, "transform_descriptors", None):
                entries[key] = item.storage_index.fqn, info.length
        places: dict[tuple[str, int], Place] = {}

        def look(keys: list[tuple[str, int]]) -> None:
            for key in keys:
                name, offset = key
                tensor, length = entries[key]
                read = partial(_bytes_of_entry, opened[name], tensor, offset)
                place = place_of(read, length)
                if place is not None:
                    places[key] = place

        def path_of(keys: list[tuple[str, int]]) -> str:
            name, _ = keys[0]
            tensor, _ = entries[keys[0]]
            return f"{opened[name].path} ({tensor})"

        in_order = sorted(entries)
        jobs = [in_order[at : at + _ENTRIES] for at in range(0, len(in_order), _ENTRIES)]
        share(jobs, self.files.threads, lambda: look, path_of)
        return places

    def chunk_of(self, item: ReadItem) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Shape and type of what ``item`` reads of, as the list of contents has them."""
        index = item.storage_index
        stored = self.metadata.state_dict_metadata.get(index.fqn)
        if not isinstance(stored, TensorStorageMetadata):
            return None
        chunks = stored.chunks
        if index.index is not None and index.index < len(chunks):  # where it should be
            chunk = chunks[index.index]
            if chunk.offsets == index.offset:
                return tuple(chunk.sizes), stored.properties.dtype
        for chunk in chunks:
            if index.offset is None or chunk.offsets == index.offset:
                return tuple(chunk.sizes), stored.properties.dtype
        return None

    def read_others(
        self, plan: LoadPlan, planner: LoadPlanner, opened: dict[str, OpenFile]
    ) -> None:
        """Let DCP's reader read what is left of ``plan``."""
        if not plan.items:
            return
        for item in plan.items:
            self.other_bytes += self.storage_data[item.storage_index].length
        own = self.fs
        stream = current_stream()
        self.fs = CheckedFiles(opened)
        base = super()

        def read(item: ReadItem) -> None:
            try:
                with stream:
                    base.read_data(replace(plan, items=[item]), planner)
            except (DamagedCheckpoint, OSError):
                raise
            except Exception as error:
                raise RuntimeError(f"{path_of(item)}: {error}") from error

        def path_of(item: ReadItem) -> str:
            name = self.storage_data[item.storage_index].relative_path
            return f"{opened[name].path} ({item.storage_index.fqn})"

        try:
            share(plan.items, 1, lambda: read, path_of)
        finally:
            self.fs = own


def current_stream():
    """A context in which another thread queues its work where this one does."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return nullcontext()
    module = torch.get_device_module(accelerator)
    return module.stream(module.current_stream())


def _bytes_of_entry(file: OpenFile, name: str, offset: int, begin: int, nbytes: int) -> bytes:
    return file.bytes_at(name, offset + begin, nbytes)


def _first_element(shape: tuple[int, ...], item: ReadItem) -> int | None:
    """The first element that ``item`` wants of a row-major tensor; None if it wants gaps, too."""
    lengths, offsets = item.lengths, item.storage_offsets
    if len(lengths) != len(shape):
        return None
    is_within_row = False  # a dimension after this one is not wanted as a whole
    first = 0
    stride = 1
    for size, length, offset in zip(
        reversed(shape), reversed(lengths), reversed(offsets), strict=True
    ):
        if offset + length > size or (is_within_row and length != 1):
            return None
        is_within_row = is_within_row or length != size
        first += offset * stride
        stride *= size
    return first


def _can_take_bytes(target: torch.Tensor, dtype: torch.dtype) -> bool:
    return (
        type(target) in (torch.Tensor, torch.nn.Parameter)
        and target.dtype == dtype
        and target.layout == torch.strided
        and target.is_contiguous()
        and not target.is_conj()
        and not target.is_neg()
        and not target.is_meta
    )


def ranges(
    item: ReadItem, file: OpenFile, entry: int, begin: int, place: Place, target: torch.Tensor
) -> list[Wanted]:
    """What is read for ``item``: its bytes, and with digests those that say where they are."""
    name = item.storage_index.fqn
    # as_strided: a tensor of one element may have any stride, and a view of bytes asks for 1
    flat = target.as_strided((target.numel(),), (1,)).view(torch.uint8)
    found = [Wanted(name, begin, begin + target.nbytes, flat)]
    if file.digests is not None:
        for at, data in ((entry, place.head), (entry + place.tail_begin, place.tail)):
            found.append(Wanted(name, at, at + len(data), data))
    return found


def reads_of(file: OpenFile, wanted: list[Wanted]) -> list[Read]:
    """Pieces of ``file``, in whole blocks, that hold all that is wanted; each byte once."""
    reads: list[Read] = []
    for begin, end in _pieces_of(file, wanted):
        if not reads:
            reads.append(Read(file, begin, end))
            continue
        last = reads[-1]
        is_near = begin <= last.end + _GAP
        if is_near and max(end, last.end) - last.begin <= PIECE:
            last.end = max(end, last.end)
        elif end > last.end:
            reads.append(Read(file, max(begin, last.end), end))
    begins = [read.begin for read in reads]
    for part in wanted:
        number = max(0, bisect_right(begins, part.begin) - 1)  # the read that its first byte is in
        while number < len(reads) and reads[number].begin < part.end:
            reads[number].parts.append(part)
            number += 1
    return reads


def _pieces_of(file: OpenFile, wanted: list[Wanted]) -> list[tuple[int, int]]:
    """Begins and ends, in order, of whole blocks that hold ``wanted``; cut at multiples of a piece.

    They may overlap: two parts may want bytes of one block.
    """
    found: set[tuple[int, int]] = set()
    for part in wanted:
        begin, end = file.whole_blocks(part.begin, part.end)
        for at in range(begin // PIECE * PIECE, end, PIECE):
            found.add((max(at, begin), min(at + PIECE, end)))
    return sorted(found)


class Ring:
    """The buffers of one thread, which are read into and copied from in turns."""

    def __init__(
        self, memory: torch.Tensor, device: torch.device, stream: torch.Stream, given_up: Event
    ) -> None:
        self.module = torch.get_device_module(device)
        self.device = device
        self.stream = stream
        self.given_up = given_up
        self.buffers = memory.split(PIECE)
        self.copied = [self.module.Event() for _ in self.buffers]
        self.next = 0

    def take(self, read: Read) -> None:
        """Read, check, and copy to the targets or queue the copies."""
        number = self.next
        self.next = (number + 1) % len(self.buffers)
        self.copied[number].synchronize()
        buffer = self.buffers[number][: read.end - read.begin]
        read.file.read_into(memoryview(buffer.numpy()), read.begin, read.parts[0].name)
        if self.given_up.is_set():  # the load has failed meanwhile
            return
        with self.module.stream(self.stream):
            for part in read.parts:
                self.hand_out(part, read, buffer)
            self.copied[number].record(self.stream)

    def hand_out(self, part: Wanted, read: Read, buffer: torch.Tensor) -> None:
        begin = max(part.begin, read.begin)
        end = min(part.end, read.end)
        source = buffer[begin - read.begin : end - read.begin]
        if isinstance(part.target, bytes):
            if source.numpy().tobytes() != part.target[begin - part.begin : end - part.begin]:
                raise OtherBytes(f"{read.file.path}: {part.name} changes while it is read")
            return
        target = part.target[begin - part.begin : end - part.begin]
        if target.device.type == "cpu":
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)  # on this thread
        else:
            target.copy_(source, non_blocking=True)


def fill(reads: list[Read], device: torch.device, threads: int = THREADS) -> None:
    """Do ``reads``, whose targets are on ``device`` or the CPU.

    The copies wait for what the current stream has been given, and it waits for them.
    """
    module = torch.get_device_module(device)
    threads = min(threads, len(reads))
    buffers = 1 if device.type == "cpu" else _BUFFERS
    nbytes = threads * buffers * PIECE
    locked = None
    if device.type == "cpu":
        memory = torch.empty(nbytes, dtype=torch.uint8)  # whose pages come as they are written
    else:
        locked = PageLocked(nbytes, device)
        memory = locked.bytes
    shares = list(memory.split(buffers * PIECE))
    current = module.current_stream(device) if device.type != "cpu" else module.current_stream()
    stream = module.Stream(device) if device.type != "cpu" else module.Stream()
    stream.wait_stream(current)
    given_up = Event()

    def worker():
        return Ring(shares.pop(), device, stream, given_up).take

    try:
        share(reads, threads, worker, Read.place)
    except TimeoutError:
        given_up.set()
        raise
    finally:
        copied = module.Event()
        copied.record(stream)
        copied.synchronize()
        if locked is not None:
            locked.close()
    current.wait_stream(stream)
