# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/writer.py
"""Files that ``dcp.load`` reads, planned once and then written from where the bytes lie."""

import ctypes
import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem, WriteResult, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from ..ranks import keep_quiet_alone
from .copies import form
from .entries import around
from .state import SMALL, is_staged, names_of_buffers, shard_of
from .talk import Talk
from .writing import Target

# Private by name: ``_StorageInfo``. ``.metadata`` is made of it, and DCP's reader expects it.

FILES = 8  # of a rank; a thread writes one at a time
PIECE = 256 << 20  # bytes that one system call writes at most
_BUFFERS = os.sysconf("SC_IOV_MAX")  # that one system call writes at most


def place_of_memory(tensor: torch.Tensor) -> tuple:
    """A key that is equal for two names of the same memory."""
    return tensor.data_ptr() if tensor.nbytes else 0, tensor.shape, tensor.dtype


def _decides(name: str, leaf: object) -> object:
    """What of ``leaf`` decides on its items in a plan: the same for DTensors of one form."""
    if isinstance(leaf, DTensor):
        return form(leaf)
    if torch.is_tensor(leaf):
        return name, leaf.shape, leaf.dtype
    return name


class _Planner(dcp.DefaultSavePlanner):
    """DCP's planner, which asks one DTensor of each form where its shard lies.

    DCP asks every one: .15 ms of the interpreter for each, .5 s for GPT-2 XL with its moments.
    """

    metadata: Metadata | None = None  # on rank 0, of all ranks' plans: the list of contents

    def create_local_plan(self) -> dcp.SavePlan:
        leaves = self.state_dict
        first_of_form: dict[object, str] = {}
        alike: dict[str, list[str]] = {}  # names of one form, by the first of them
        for name, leaf in leaves.items():
            first = first_of_form.setdefault(_decides(name, leaf), name)
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
        buffers = names_of_buffers(self.state_dict)
        plans, _ = super().create_global_plan(_those_of_first(plans, buffers))
        return plans, Metadata({})  # which DCP sends to all ranks: they need no list

    def shard(self, item: WriteItem) -> torch.Tensor:
        """What this rank writes for ``item``, a staged tensor."""
        return shard_of(self.state_dict[item.index.fqn]).detach()


def _those_of_first(plans: list[SavePlan], buffers: set[str]) -> list[SavePlan]:
    """``plans`` in which the first of the ranks that have a buffer or a small tensor writes it.

    DCP takes any of them, though they may differ: BatchNorm counts on each rank for itself.
    """
    seen = set()
    found = []
    for plan in plans:
        items = []
        for item in plan.items:
            is_buffer = item.type == WriteItemType.TENSOR and item.index.fqn in buffers
            if is_buffer or _is_small_replica(item):
                if item.index in seen:
                    continue
                seen.add(item.index)
            items.append(item)
        found.append(replace(plan, items=items))
    return found


def _is_small_replica(item: WriteItem) -> bool:
    if item.type != WriteItemType.TENSOR:
        return False
    what = item.tensor_data
    return what.size.numel() * what.properties.dtype.itemsize <= SMALL


class _InMemory(FileSystem):
    """Keeps the one file that DCP's writer writes at the end of a plan: the list of contents."""

    def __init__(self) -> None:
        self.file = io.BytesIO()

    @contextmanager
    def create_stream(self, path: object, mode: str) -> Iterator[io.BytesIO]:
        self.file = io.BytesIO()
        yield self.file

    def mkdir(self, path: object) -> None: ...

    def exists(self, path: object) -> bool:
        return False

    def rename(self, path: object, new_path: object) -> None: ...

    def rm_file(self, path: object) -> None: ...


class _Layout(dcp.FileSystemWriter):
    """The place of each tensor of this rank in its files; on rank 0 also ``.metadata``.

    Args:
        place: of the files, for whoever asks DCP where it writes.
    """

    def __init__(self, place: str) -> None:
        super().__init__(place, sync_files=False)
        self.fs = _InMemory()
        self.names: list[str] = []  # of the files
        self.files: list[list[WriteItem]] = []  # staged tensors, by file
        self.ends: list[int] = []  # bytes of tensors in each file
        self.others: list[WriteItem] = []  # what is serialised again for each save
        self.metadata: Metadata | None = None
        self.places: list[list[WriteResult]] = []  # of all ranks' tensors
        self.last_others: list[list[WriteResult]] | None = None
        self.last_metadata = b""
        self.made_for: tuple = ()
        self.forget()

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
        self.files = [[] for _ in self.names]
        self.ends = [0 for _ in self.names]
        places: dict[tuple, _StorageInfo] = {}
        results = []
        for tensor, item in tensors:
            memory = place_of_memory(tensor)
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
        """On rank 0: keep the places, which do not change."""
        self.places = results

    def metadata_with(self, others: list[list[WriteResult]]) -> bytes:
        """The bytes of ``.metadata``: the last ones again, unless a place has changed."""
        if others != self.last_others:
            super().finish(self.metadata, self.places + others)
            self.last_others = others
            self.last_metadata = self.fs.file.getvalue()
        return self.last_metadata

    def pieces(self, planner, items: list[WriteItem]) -> list["Piece"]:
        """The calls that write ``items``, found by ``planner``."""
        pieces = [Piece()]
        for item in items:
            tensor = planner.shard(item)
            head, tail = around(tensor.shape, tensor.dtype)
            memory = memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
            cuts = [memory[start : start + PIECE] for start in range(0, tensor.nbytes, PIECE)]
            for part in (head, *cuts, tail):
                if not pieces[-1].has_room(len(part)):
                    pieces.append(Piece())
                pieces[-1].add(part)
        return pieces


@dataclass
class Piece:
    """What one call writes: buffers that follow each other in a file."""

    nbytes: int = 0
    buffers: list = field(default_factory=list)

    def has_room(self, nbytes: int) -> bool:
        return self.nbytes + nbytes <= PIECE and len(self.buffers) < _BUFFERS

    def add(self, buffer: bytes | bytearray | memoryview) -> None:
        self.buffers.append(buffer)
        self.nbytes += len(buffer)


def write_file(target: Target, name: str, pieces: list[Piece]) -> None:
    """Write a file and return when the storage has it."""
    with target.create(name) as sink:
        for piece in pieces:
            if piece.nbytes:
                sink.write(piece.nbytes, piece.buffers)


def write_files(target: Target, files: list[tuple[str, list[Piece]]], threads: int) -> None:
    """Write ``files``, names and pieces, on so many threads; this one is among them.

    So it works at the end of the program, too, when no thread can be started any more.
    """
    left = list(files)
    errors: list[BaseException] = []

    def write_those_left() -> None:
        while True:
            try:
                name, pieces = left.pop()  # in one step: no two threads get the same
            except IndexError:
                return
            try:
                write_file(target, name, pieces)
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


def serialised(data: io.BytesIO | torch.Tensor) -> bytes:
    """What is written of a leaf that is no staged tensor, as DCP's planner gives it."""
    if isinstance(data, io.BytesIO):
        return data.getvalue()
    file = io.BytesIO()
    torch.save(data, file)  # a sparse tensor, say, whose size differs from save to save
    return file.getvalue()


def kind(leaf: object) -> object:
    """What a plan depends on, besides the leaf's name; of what is no tensor, nothing."""
    if is_staged(leaf):
        return id(leaf)  # system calls have its address
    if torch.is_tensor(leaf):
        return leaf.shape, leaf.dtype
    return None


def _outline(tree: object, found: list) -> None:
    """Add to ``found`` the names and kinds of all in nested dicts, lists and tuples, in order."""
    if isinstance(tree, dict):
        found.append(tuple(tree))
        for value in tree.values():
            _outline(value, found)
    elif isinstance(tree, (list, tuple)):
        found.append((type(tree), len(tree)))
        for value in tree:
            _outline(value, found)
    else:
        found.append(kind(tree))


def _element(tree: object, path: tuple) -> object:
    for key in path:
        if isinstance(tree, dict) and key not in tree:
            key = int(key)  # a planner's paths have numbers as names
        tree = tree[key]
    return tree


class FileWriter:
    """Writes states of one layout again and again; plans again where a state has another.

    Args:
        folder: below each target, for what is written there by several.

    Attributes:
        plans: how many plans were made.
    """

    def __init__(self, folder: str = "") -> None:
        self.folder = folder
        self.layout: _Layout | None = None
        self.plans = 0

    def forget(self) -> None:
        """Hold the memory of no earlier state."""
        if self.layout is not None:
            self.layout.forget()

    def write(self, state: dict, target: Target, talk: Talk, threads: int) -> None:
        """Write this rank's part of ``state`` with so many threads. Every rank calls it."""
        planner = self.plan(state, self.below(target.place), talk)
        others = talk.together(self.write_files, planner, target, threads)
        if talk.rank == 0:
            metadata = Piece()
            metadata.add(self.layout.metadata_with(others))
            write_file(target, self.named(".metadata"), [metadata])

    def below(self, place: str) -> str:
        return f"{place}/{self.folder}" if self.folder else place

    def named(self, name: str) -> str:
        return f"{self.folder}/{name}" if self.folder else name

    def prepare(self, state: dict, talk: Talk) -> None:
        """Plan before there is anything to write."""
        directory = tempfile.mkdtemp()
        try:
            self.plan(state, directory, talk)
        finally:
            Path(directory).rmdir()

    def plan(self, state: dict, place: str, talk: Talk) -> _Planner:
        """Let DCP plan the write of ``state``, unless all ranks know its layout.

        Returns:
            A planner that finds what is written.
        """
        found: list[Arranged] = []

        def needs_plan() -> bool:
            found.append(self.arranged(state))
            return found[0].needs_plan

        a_rank_needs_plan = any(talk.together(needs_plan))
        arranged = found[0]
        planner = arranged.planner
        if a_rank_needs_plan:
            if arranged.is_known:  # another rank needs a new one
                planner = _taken_apart(state)
            layout = _Layout(place)
            group = {"process_group": talk.group, "no_dist": talk.group is None}
            keep_quiet_alone()
            planner_of_all = _Planner()
            dcp.save(state, storage_writer=layout, planner=planner_of_all, **group)
            layout.metadata = planner_of_all.metadata
            layout.made_for = _described(planner)
            self.layout = layout
            self.plans += 1
        self.remember(planner, arranged.outline)
        return planner

    def arranged(self, state: dict) -> "Arranged":
        """How this rank's state relates to the kept layout.

        A state that has the outline of the last one is not taken apart: DCP's planner holds the
        interpreter for 30 ms to give names to 2,300 tensors, and training needs it.
        """
        layout = self.layout
        parts: list = []
        _outline(state, parts)
        own_outline = tuple(parts)
        if layout is None or own_outline != layout.outline:
            planner = _taken_apart(state)
            needs_plan = layout is None or _described(planner) != layout.made_for
            return Arranged(planner, own_outline, False, needs_plan)
        planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(state)
        names = [item.index.fqn for item in layout.others]
        planner.state_dict = {name: _element(state, layout.paths[name]) for name in names}
        return Arranged(planner, own_outline, True, False)

    def remember(self, planner: _Planner, own_outline: tuple) -> None:
        """Keep the system calls that write this state, for the next time."""
        layout = self.layout
        if own_outline == layout.outline:
            return
        layout.outline = own_outline
        layout.leaves = planner.state_dict  # alive, so the ids in the outline stay theirs
        layout.paths = planner.mappings
        layout.calls = [layout.pieces(planner, items) for items in layout.files]

    def write_files(self, planner: _Planner, target: Target, threads: int) -> list[WriteResult]:
        """Write this rank's files; return the places of what is serialised again."""
        layout = self.layout
        tail = bytearray()
        places = []
        for item in layout.others:
            data = serialised(planner.resolve_data(item))
            place = _StorageInfo(layout.names[0], layout.ends[0] + len(tail), len(data))
            places.append(WriteResult(item.index, len(data), place))
            tail += data
        last = Piece()
        last.add(tail)
        calls = [[*layout.calls[0], last], *layout.calls[1:]]
        files = []
        for name, pieces in zip(layout.names, calls, strict=True):
            files.append((self.named(name), pieces))
        write_files(target, files, threads)
        return places


@dataclass
class Arranged:
    """How a state relates to a kept layout.

    Attributes:
        planner: finds what is written; all of it, unless the state is known.
        outline: of the state.
        is_known: it has the outline of the last one that was written.
        needs_plan: it has another layout.
    """

    planner: _Planner
    outline: tuple
    is_known: bool
    needs_plan: bool


def _taken_apart(state: dict) -> _Planner:
    """DCP's planner with names for all that is in ``state``."""
    planner = _Planner()
    planner.set_up_planner(state)
    return planner


def _described(planner: _Planner) -> tuple:
    """All that a layout depends on: paths, forms, and which names have the same memory."""
    forms = []
    numbers: dict[tuple, int] = {}
    shared = []
    for name, leaf in planner.state_dict.items():
        forms.append((name, _decides(name, leaf)))
        if is_staged(leaf):
            memory = place_of_memory(shard_of(leaf))
            shared.append(numbers.setdefault(memory, len(numbers)))
    return tuple(planner.mappings.items()), forms, shared
