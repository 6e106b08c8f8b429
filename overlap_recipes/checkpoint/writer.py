# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, overlap_recipes/checkpoint/writer.py
"""Saves that plan once, and then write the staged bytes to files that ``dcp.load`` reads."""

import ctypes
import io
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import WriteResult, _StorageInfo

from .saves import BUFFER_SETS, OverlappedSaves
from .state import is_staged

# Private by name: ``_StorageInfo``. ``.metadata`` is made of it, and DCP's reader expects it.

WRITERS = 7  # threads per rank, each with a file; more take cores from what launches kernels
PIECE = 256 << 20  # bytes that one system call writes at most


class WithoutTensor(io.BytesIO):
    """A file that keeps what ``torch.save`` writes, but for the tensor's bytes."""

    hole = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.hole = self.tell()
        return self.hole


@cache
def around(shape: torch.Size, dtype: torch.dtype) -> tuple[bytes, bytes]:
    """What ``torch.save`` writes before and after the bytes of a contiguous tensor."""
    file = WithoutTensor()
    with torch.serialization.skip_data():
        torch.save(torch.empty(shape, dtype=dtype, device="cpu"), file)
    return file.getvalue()[: file.hole], file.getvalue()[file.hole :]


def memory_of(tensor: torch.Tensor) -> tuple:
    """A key that is equal for two names of the same memory."""
    return tensor.data_ptr() if tensor.nbytes else 0, tensor.shape, tensor.dtype


def staged_items(planner, plan, staged: bool = True) -> list:
    """The items of ``plan`` that are staged tensors, or those that are not."""
    return [i for i in plan.items if is_staged(planner.state_dict[i.index.fqn]) == staged]


class Layout(dcp.FileSystemWriter):
    """The place of each tensor of this rank in its files; on rank 0 also ``.metadata``."""

    def write_data(self, plan, planner) -> torch.futures.Future:
        """Write nothing: give every staged tensor its place, and return the places."""
        tensors = [(planner.resolve_data(i), i) for i in staged_items(planner, plan)]
        self.others = staged_items(planner, plan, False)
        tensors.sort(key=lambda pair: pair[0].nbytes, reverse=True)
        writers = min(WRITERS, 1 + sum(tensor.nbytes for tensor, _ in tensors) // PIECE)
        self.names = [f"{plan.storage_data.prefix}{n}.distcp" for n in range(writers)]
        self.files, self.ends = [[] for _ in self.names], [0 for _ in self.names]
        self.calls, self.last_others, places, results = {}, None, {}, []
        for tensor, item in tensors:
            memory = memory_of(tensor)
            if memory not in places:
                n = self.ends.index(min(self.ends))
                length = tensor.nbytes + sum(map(len, around(tensor.shape, tensor.dtype)))
                places[memory] = _StorageInfo(self.names[n], self.ends[n], length)
                self.files[n].append(item)
                self.ends[n] += length
            results.append(WriteResult(item.index, tensor.nbytes, places[memory]))
        planned = torch.futures.Future()
        planned.set_result(results)
        return planned

    def finish(self, metadata, results) -> None:
        """On rank 0: keep the part of ``.metadata`` that does not change."""
        self.metadata, self.places = metadata, results

    def write_metadata(self, directory: Path, others: list[list[WriteResult]]) -> None:
        """Write ``.metadata``: the last one again, unless a place has changed."""
        file = directory / ".metadata"
        if others != self.last_others:
            self.reset(directory)
            super().finish(self.metadata, self.places + others)
            self.last_others, self.last_metadata = others, file.read_bytes()
        write_file(file, [(0, len(self.last_metadata), [self.last_metadata])])
        sync(directory)

    def pieces(self, planner, items: list) -> list[tuple[int, int, list]]:
        """The calls that write ``items``, found by ``planner``: offset, bytes, buffers."""
        pieces, offset, size, buffers = [], 0, 0, []
        for item in items:
            tensor = planner.resolve_data(item)
            head, tail = around(tensor.shape, tensor.dtype)
            memory = memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
            cuts = [memory[start : start + PIECE] for start in range(0, tensor.nbytes, PIECE)]
            for part in (head, *cuts, tail):
                if size + len(part) > PIECE or len(buffers) == os.sysconf("SC_IOV_MAX"):
                    pieces.append((offset, size, buffers))
                    offset, size, buffers = offset + size, 0, []
                size += len(part)
                buffers.append(part)
        return pieces + [(offset, size, buffers)]


def write_file(path: Path, pieces: list[tuple[int, int, list]]) -> None:
    """Write a file and return when the storage has it."""
    with open(path, "wb") as stream:
        file = stream.fileno()
        for offset, size, buffers in pieces:
            written = os.pwritev(file, buffers, offset)
            while written < size:  # some file systems take less at a time
                rest = memoryview(b"".join(buffers))[written:]
                written += os.pwrite(file, rest, offset + written)
        os.fsync(file)


def sync(directory: Path) -> None:
    """Return when the storage has the directory's entries."""
    file = os.open(directory, os.O_RDONLY)
    os.fsync(file)
    os.close(file)


def serialised(data: io.BytesIO | torch.Tensor) -> bytes:
    if isinstance(data, torch.Tensor):  # a sparse one, say, whose size differs from save to save
        torch.save(data, file := io.BytesIO())
        return file.getvalue()
    return data.getvalue()


def kind(leaf: object) -> object:
    """What a plan depends on, beside the leaf's name."""
    return id(leaf) if is_staged(leaf) else torch.is_tensor(leaf) and (leaf.shape, leaf.dtype)


class OverlappedWriter(OverlappedSaves):
    """``OverlappedSaves`` that plans once and then writes bytes; used in the same way."""

    layout: Layout | None = None
    plans = 0

    def write(self, state: dict, directory: Path) -> None:
        """Write this rank's part of ``state``. Every rank calls it, on its writing thread."""
        if any(self.arranged):
            layout, group = Layout(directory), self.groups[0] if self.groups else None
            dcp.save(state, storage_writer=layout, process_group=group, no_dist=group is None)
            layout.made_for, self.layout, self.plans = self.wanted, layout, self.plans + 1
        others = self.together(self.write_files, state, directory)
        if self.rank == 0:
            self.layout.write_metadata(directory, others)

    def arrange(self, state: dict) -> bool:
        """Whether this rank's state needs another layout than the kept one."""
        self.planner = planner = dcp.DefaultSavePlanner()
        planner.set_up_planner(state)
        self.key = tuple(planner.mappings.items()), tuple(map(kind, planner.state_dict.values()))
        self.wanted = made_for = self.layout and self.layout.made_for
        if self.layout is None or self.key not in self.layout.calls:
            plan, names = planner.create_local_plan(), {}
            memory = [memory_of(planner.resolve_data(item)) for item in staged_items(planner, plan)]
            self.wanted = plan, [names.setdefault(place, n) for n, place in enumerate(memory)]
        return self.wanted != made_for

    def write_files(self, state: dict, directory: Path) -> list[WriteResult]:
        """Write this rank's files; return the places of what is serialised anew."""
        if state is not self.state:
            raise RuntimeError("a subclass changes the state: change it in arrange, not in write")
        layout, planner = self.layout, self.planner
        if self.key not in layout.calls:
            if len(layout.calls) == BUFFER_SETS:
                layout.calls.clear()
            calls = [layout.pieces(planner, items) for items in layout.files]
            layout.calls[self.key] = planner.state_dict, calls  # keeps the staged memory alive
        _, calls = layout.calls[self.key]

        tail, places = bytearray(), []
        for item in layout.others:
            data = serialised(planner.resolve_data(item))
            place = _StorageInfo(layout.names[0], layout.ends[0] + len(tail), len(data))
            places.append(WriteResult(item.index, len(data), place))
            tail += data
        first = [*calls[0], (layout.ends[0], len(tail), [tail])]

        directory.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(len(calls), "write") as threads:
            paths = map(directory.joinpath, layout.names)
            list(threads.map(write_file, paths, [first, *calls[1:]]))
        return places
