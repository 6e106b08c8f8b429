# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.1, overlap_recipes/checkpoint/writer.py
"""Files that ``dcp.load`` reads, planned once and then written from where the bytes lie."""

import ctypes
import io
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Thread

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import WriteResult, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from .copies import form
from .state import SMALL, is_staged, shard_of

# Private by name: ``_StorageInfo``. ``.metadata`` is made of it, and DCP's reader expects it.

FILES = 8  # of a rank; a thread writes one at a time
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


def decides(name: str, leaf: object) -> object:
    """What of ``leaf`` decides on its items in a plan: the same for DTensors of one form."""
    if isinstance(leaf, DTensor):
        return form(leaf)
    if torch.is_tensor(leaf):
        return name, leaf.shape, leaf.dtype
    return name


class Planner(dcp.DefaultSavePlanner):
    """DCP's planner, which asks one DTensor of each form where its shard lies.

    DCP asks every one: .15 ms of the interpreter for each, .5 s for GPT-2 XL with its moments.
    """

    def create_local_plan(self) -> dcp.SavePlan:
        leaves = self.state_dict
        first_of_form: dict[object, str] = {}
        alike: dict[str, list[str]] = {}  # names of one form, by the first of them
        for name, leaf in leaves.items():
            first = first_of_form.setdefault(decides(name, leaf), name)
            alike.setdefault(first, []).append(name)
        self.state_dict = {first: leaves[first] for first in alike}
        plan = super().create_local_plan()
        self.state_dict = leaves
        items = []
        for item in plan.items:
            for name in alike[item.index.fqn]:
                items.append(replace(item, index=replace(item.index, fqn=name)))
        self.plan = replace(plan, items=items)
        return self.plan

    def create_global_plan(self, plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return super().create_global_plan(small_ones_of_first(plans))

    def shard(self, item: WriteItem) -> torch.Tensor:
        """What this rank writes for ``item``, a staged tensor."""
        return shard_of(self.state_dict[item.index.fqn]).detach()


def small_ones_of_first(plans: list[SavePlan]) -> list[SavePlan]:
    """``plans`` in which the first of the ranks that have a small tensor alone writes it.

    DCP takes any of them, though they may differ: BatchNorm counts on each rank for itself.
    """
    seen = set()
    found = []
    for plan in plans:
        items = []
        for item in plan.items:
            if is_small_replica(item):
                if item.index in seen:
                    continue
                seen.add(item.index)
            items.append(item)
        found.append(replace(plan, items=items))
    return found


def is_small_replica(item: WriteItem) -> bool:
    if item.type != WriteItemType.TENSOR:
        return False
    what = item.tensor_data
    return what.size.numel() * what.properties.dtype.itemsize <= SMALL


class Layout(dcp.FileSystemWriter):
    """The place of each tensor of this rank in its files; on rank 0 also ``.metadata``."""

    def write_data(self, plan, planner) -> torch.futures.Future:
        """Write nothing: give every staged tensor its place, and return the places."""
        tensors = []
        self.others = []
        for item in plan.items:
            if is_staged(planner.state_dict[item.index.fqn]):
                tensors.append((planner.shard(item), item))
            else:
                self.others.append(item)
        tensors.sort(key=lambda pair: pair[0].nbytes, reverse=True)
        writers = min(FILES, 1 + sum(tensor.nbytes for tensor, _ in tensors) // PIECE)
        self.names = [f"{plan.storage_data.prefix}{n}.distcp" for n in range(writers)]
        self.files, self.ends = [[] for _ in self.names], [0 for _ in self.names]
        self.forget()
        self.last_others, places, results = None, {}, []
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

    def forget(self) -> None:
        """Hold the memory of no state."""
        self.outline: tuple | None = None  # of the state that ``calls`` write
        self.leaves: dict[str, object] = {}  # of that state, by name
        self.paths: dict[str, tuple] = {}  # of these, by name
        self.calls: list[list] = []  # system calls of each file

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
            tensor = planner.shard(item)
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


def write_files(files: list[tuple[Path, list]], threads: int) -> None:
    """Write ``files``, paths and pieces, on so many threads; this one is among them.

    So it works at the end of the program, too, when no thread can be started any more.
    """
    left = list(files)
    errors: list[BaseException] = []

    def write_those_left() -> None:
        while True:
            try:
                path, pieces = left.pop()  # in one step: no two threads get the same
            except IndexError:
                return
            try:
                write_file(path, pieces)
            except BaseException as error:
                errors.append(error)

    others = []
    for _ in range(min(threads, len(files)) - 1):
        other = Thread(target=write_those_left, name="write", daemon=True)
        try:
            other.start()
        except RuntimeError:  # the interpreter is shutting down
            break
        others.append(other)
    write_those_left()
    for other in others:
        other.join()
    if errors:
        raise errors[0]


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


def outline(tree: object, found: list) -> None:
    """Add to ``found`` the names and kinds of all in nested dicts, lists and tuples, in order."""
    if isinstance(tree, dict):
        found.append(tuple(tree))
        for value in tree.values():
            outline(value, found)
    elif isinstance(tree, (list, tuple)):
        found.append((type(tree), len(tree)))
        for value in tree:
            outline(value, found)
    else:
        found.append(kind(tree))


def element(tree: object, path: tuple) -> object:
    for key in path:
        if isinstance(tree, dict) and key not in tree:
            key = int(key)  # a planner's paths have numbers as names
        tree = tree[key]
    return tree


class FileWriter:
    """Writes states of one layout again and again; plans anew where a state has another.

    Args:
        together: calls a function on all ranks, returns all results, and raises on all ranks if it
            failed on one.
        group: of ``together``, for DCP's planning; None without a process group.

    Attributes:
        plans: how many plans were made.
    """

    def __init__(self, together: Callable[..., list], group: dist.ProcessGroup | None) -> None:
        self.together = together
        self.group = group
        self.is_first_rank = group is None or dist.get_rank() == 0
        self.layout: Layout | None = None
        self.plans = 0

    def forget(self) -> None:
        """Hold the memory of no earlier state."""
        if self.layout is not None:
            self.layout.forget()

    def write(self, state: dict, directory: Path, threads: int) -> None:
        """Write this rank's part of ``state`` with so many threads. Every rank calls it."""
        self.plan(state, directory)
        others = self.together(self.write_files, directory, threads)
        if self.is_first_rank:
            self.layout.write_metadata(directory, others)

    def prepare(self, state: dict) -> None:
        """Plan before there is anything to write."""
        directory = Path(tempfile.mkdtemp())
        try:
            self.plan(state, directory)
        finally:
            directory.rmdir()

    def plan(self, state: dict, directory: Path) -> None:
        """Let DCP plan the write of ``state``, unless all ranks know its layout."""
        if any(self.together(self.arrange, state)):
            if self.is_known:  # another rank needs a new one
                self.take_apart(state)
            layout = Layout(directory)
            planner = Planner()
            group = {"process_group": self.group, "no_dist": self.group is None}
            dcp.save(state, storage_writer=layout, planner=planner, **group)
            layout.made_for = self.described()
            self.layout = layout
            self.plans += 1
        self.remember()

    def arrange(self, state: dict) -> bool:
        """Whether this rank's state needs another layout than the kept one.

        A state that has the outline of the last one is not taken apart: DCP's planner holds the
        interpreter for 30 ms to give names to 2,300 tensors, and training needs it.
        """
        layout = self.layout
        found: list = []
        outline(state, found)
        self.outline = tuple(found)
        self.is_known = layout is not None and self.outline == layout.outline
        if not self.is_known:
            self.take_apart(state)
            return layout is None or self.described() != layout.made_for
        self.planner = Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.planner.set_up_planner(state)
        names = [item.index.fqn for item in layout.others]
        self.planner.state_dict = {name: element(state, layout.paths[name]) for name in names}
        return False

    def take_apart(self, state: dict) -> None:
        """Let DCP's planner give names to all that is in ``state``."""
        self.planner = Planner()
        self.planner.set_up_planner(state)

    def described(self) -> tuple:
        """All that a layout depends on: paths, forms, and which names have the same memory."""
        forms = []
        numbers: dict[tuple, int] = {}
        shared = []
        for name, leaf in self.planner.state_dict.items():
            forms.append((name, decides(name, leaf)))
            if is_staged(leaf):
                memory = memory_of(shard_of(leaf))
                shared.append(numbers.setdefault(memory, len(numbers)))
        return tuple(self.planner.mappings.items()), forms, shared

    def remember(self) -> None:
        """Keep the system calls that write this state, for the next time."""
        layout = self.layout
        if self.outline == layout.outline:
            return
        layout.outline = self.outline
        layout.leaves = self.planner.state_dict  # alive, so the ids in the outline stay theirs
        layout.paths = self.planner.mappings
        layout.calls = [layout.pieces(self.planner, items) for items in layout.files]

    def write_files(self, directory: Path, threads: int) -> list[WriteResult]:
        """Write this rank's files; return the places of what is serialised anew."""
        layout = self.layout
        tail = bytearray()
        places = []
        for item in layout.others:
            data = serialised(self.planner.resolve_data(item))
            place = _StorageInfo(layout.names[0], layout.ends[0] + len(tail), len(data))
            places.append(WriteResult(item.index, len(data), place))
            tail += data
        first = [*layout.calls[0], (layout.ends[0], len(tail), [tail])]

        directory.mkdir(parents=True, exist_ok=True)
        paths = [directory / name for name in layout.names]
        write_files(list(zip(paths, [first, *layout.calls[1:]], strict=True)), threads)
        return places
