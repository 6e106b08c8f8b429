# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, checkpoint/overlapped_writer.py
"""
Plan once, then write bytes
===========================

Write checkpoints faster than the writer of ``torch.distributed.checkpoint`` (DCP), and slow
training less. That writer plans anew at every save, pickles and checksums each tensor, and holds
Python's interpreter lock (the GIL) for much of that time. Training needs that lock for every kernel
that it launches. This recipe lets DCP plan **once**. From then on it writes bytes with a few large
system calls, which release the lock. ``dcp.load`` and DCP's tools read the files as they are.

.. result-gain:: checkpoint_stall
   :rows: overlapped_writer torch_checkpointing nvidia-resiliency-ext torchtitan_async_with_pinned_mem
   :field: write_bytes_per_s
   :where: model=llama-1b step=long loop=reads compiled=no storage=memory

torchtitan writes with DCP's writer; the two packages have their own. :doc:`/guide/results` has the
rate of a plain write to the same storage.

**When not to bother:** you save rarely, your checkpoints are small, they go to an object store
(:doc:`object_storage`), or their layout changes at every save, so that each save would plan. If
your storage is slower than DCP's writer and your steps are long, :doc:`overlapped_stager` does as
well.

.. code-block:: python

   from pathlib import Path

   from kept_state import TrainingState
   from overlapped_writer import OverlappedWriter

   app = TrainingState(model, optimizer, schedule=scheduler)
   root = Path("checkpoints")
   with OverlappedWriter(device, model.buffers) as saves:
       for step, batch in enumerate(batches, scheduler.last_epoch + 1):
           train_step(batch)  # ends with optimizer.step() and scheduler.step()
           if step % 100 == 0:
               saves.save({"app": app}, root / f"step{step}")

Your project needs this file, ``overlapped_stager.py``, ``staging_copies.py``,
:doc:`kept_state.py <kept_state>`, and ``app_state.py``; ``device`` is the rank's own. Copy and write run beside training.
``root/step100`` appears when every rank has written its part and the storage has all of it.
Whatever writes weights without an optimizer calls ``saves.before_update()`` first.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * what stays the same from one save to the next, and what does not
      * which calls release the interpreter's lock
      * a storage writer of your own in DCP's protocol
      * how all ranks learn of an error on one, and older checkpoints stay as they are

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later on Linux, any number of ranks, CPU or GPU
      * page-locked host memory for two copies of each rank's shards
      * one file system that all ranks see

.. verification-badge::

The idea
--------

.. lanes:: Schematic. The first save plans; each later one writes bytes from where they lie.

   training: 0-4 step 1; 4-5 save; 5-9 step 2; 9-13 step 3; 13-14 save; 14-18 step 4; 18-22 step 5
   copy:     4.4-7 stage ~; 13.4-16 stage ~
   writer:   7-10 plan once !; 10-12.5 write bytes ~; 16-18.5 write bytes ~

In DCP's format, a file is a row of entries. Each entry is what ``torch.save`` makes of one tensor:
the tensor's bytes, and about 1.5 kB of zip headers and pickle around them. The part around the
bytes depends on shape and dtype alone. So do the plan (who writes what), the offsets, and the
tensors' part of ``.metadata``. All of that can be kept.

Two things change from save to save: the bytes in staged memory, and whatever is not a tensor (step
counters, schedules, lists). The recipe pickles the latter at every save and puts it at the end of
the file, where it can grow without moving a tensor.
"""

# %%
# Imports
# -------
# This file needs torch, the standard library and the stager. ``_StorageInfo`` is the one private
# name: ``.metadata`` is made of it, and DCP's reader expects it.

import argparse
import ctypes
import io
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from app_state import is_staged
from overlapped_stager import BUFFER_SETS, OverlappedSaves
from torch.distributed.checkpoint.filesystem import WriteResult, _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

WRITERS = 7  # threads per rank, each with a file; more take cores from what launches kernels
PIECE = 256 << 20  # bytes that one system call writes at most

# %%
# What is around a tensor
# -----------------------
# Under ``torch.serialization.skip_data()``, ``torch.save`` does not write a tensor's bytes: it
# seeks over them. A file object that notes the place and stays there ends up with exactly the
# bytes before and after the tensor.
#
# One field depends on the tensor's bytes: the zip's checksum. ``torch.load`` does not check it,
# here or in any other checkpoint. To save the time, this recipe leaves it 0, as
# ``torch.serialization.set_crc32_options(False)`` does.


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


# %%
# Plan once
# ---------
# DCP plans and writes in five steps, and calls a *planner* and a *storage writer* for each:
#
# 1. Every rank lists what it holds.
# 2. Rank 0 gives what several ranks hold (replicated tensors) to one of them.
# 3. Rank 0 sends each rank its part of the plan.
# 4. Each rank writes.
# 5. Rank 0 writes ``.metadata``.
#
# Here DCP itself does the first three. The storage writer below only gives each tensor a place: the
# largest first, each in the shortest file so far. Several names of one memory, as tied weights
# have, get one place.
#
# ``pieces`` turns places into system calls. ``os.pwritev`` writes a list of buffers from wherever
# they lie: header, tensor, header, tensor. Hundreds of small tensors become one call.


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
        """The calls that write ``items`` from where ``planner`` finds them: offset, bytes, buffers."""
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


# %%
# Write bytes
# -----------
# A system call releases the interpreter's lock until it returns. If the disk is full, the call
# that finds no room raises ``OSError``. Reserving the room first (``posix_fallocate``) would
# report that earlier, but makes a memory file system walk its pages twice. ``fsync`` returns when
# the storage has the bytes. A directory's entries need an ``fsync`` of their own.
#
# More threads than ``WRITERS`` can write faster, and can take cores and memory bandwidth from the
# thread that launches kernels. If your host has few cores for each GPU, take fewer.


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


# %%
# The writer
# ----------


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


# %%
# ``together`` comes with ``OverlappedSaves``. It calls a function on every rank, gathers the
# results, and raises on *every* rank if the function failed on one. Apart from these calls, and
# from DCP's own collectives while planning, no rank waits for another. So a full disk on one rank
# cannot leave the others waiting. A rank that dies closes its connection, which the others see as
# an error. Rank 0 writes ``.metadata`` when all files are complete, and renames the directory after
# that.
#
# ``arrange`` decides whether the kept plan still holds. Staged tensors are the same objects at
# every other save, because two sets of buffers alternate. So comparing their ids is enough. A state
# with other objects is compared as DCP sees it: names, shapes, shards, dtypes, and which names
# share memory. If one rank finds a difference, all ranks plan again.
#
# Run it, and prove it
# --------------------
# The state of the proof has a list that grows with every step, so no two checkpoints have the same
# length. The proof reads each checkpoint twice: with ``dcp.load`` on these ranks, and on rank 0
# alone with the tool that turns a checkpoint into a file for ``torch.load``. Every bit is compared.


def whole(tree: object) -> object:
    """A nested state dict on the CPU, with the shards of all ranks put together."""
    if isinstance(tree, dict):
        return {key: whole(value) for key, value in tree.items()}
    tree = tree.full_tensor() if hasattr(tree, "full_tensor") else tree
    return tree.cpu() if torch.is_tensor(tree) else tree


def main(directory: Path) -> None:
    import state_to_save as basic  # a model, its training step and what compares bits

    device = basic.start_rank()
    root, app, expected = basic.directory_of_rank_0(directory), basic.build_app(device), {}
    with OverlappedWriter(device, app.model.buffers) as saves:
        for step in range(1, 4):
            basic.train_step(app, device)
            expected[step] = basic.snapshot(app)
            saves.save({"app": app, "history": [0.5] * 10**step}, root / f"step{step}")
    assert saves.plans == 1, "planned more than once"
    for step, bits in expected.items():
        loaded = basic.load_app(root / f"step{step}", device)
        basic.assert_same_bits(loaded, bits)
        state = {"app": whole(loaded.state_dict()), "history": [0.5] * 10**step}
        if saves.rank == 0:
            dcp_to_torch_save(root / f"step{step}", root / "whole.pt")
            found = basic.leaves(torch.load(root / "whole.pt", "cpu", weights_only=False))
            assert all(basic.same_bits(found[p], x) for p, x in basic.leaves(state).items()), step
    print(f"planned once; steps {list(expected)} loaded on all ranks and on one, every bit equal")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, help="where checkpoints go (default: temporary)")
    with tempfile.TemporaryDirectory() as temporary:
        main(parser.parse_args().dir or Path(temporary))

# %%
# What it buys
# ------------
# What a save costs training, and how much slower steps are while it is written
# (:doc:`/guide/measured`).
#
# .. result-table:: checkpoint_stall
#    :rows: none overlapped_writer
#    :where: step=long storage=memory
#
# Steps shorter than the copy wait for it. ``snapshot_bytes`` (``overlapped_snapshot``, with
# ``WRITERS = 2``) lowered staging; the interval of its whole save is wide:
#
# .. result-table:: checkpoint_stall
#    :rows: none overlapped_writer overlapped_snapshot
#    :where: step=short
#
# A save to a disk, long steps:
#
# .. result-table:: checkpoint_stall
#    :rows: overlapped_writer
#    :where: storage=disk
#
# The next table has the share of throughput that is left with a save every so many steps, each of
# which also deletes the checkpoint before the last.
#
# .. result-table:: save_interval
#    :rows: overlapped_writer
#
# With ``AsyncCheckpointerType.PROCESS``, DCP plans and writes in a daemon process. Training then
# keeps the lock, but its thread copies the state into shared memory, with an open file for each
# tensor. A daemon that died is never replaced. Two saves in a row can lead ranks into different
# collectives. :doc:`/guide/symptoms` lists the errors.
#
# What breaks if you remove a line
# --------------------------------
#
# .. recipe-controls::
#
# Memory
# ------
# The host memory of :doc:`overlapped_stager`. If the state's layout changes: twice that, until the
# new plan is made. The kept plan takes about 1.5 kB for each *kind* of tensor (shape and dtype),
# some hundred bytes for each tensor and buffer, and on rank 0 the ``.metadata`` of all ranks.
#
# Known limits
# ------------
# * Those of :doc:`overlapped_stager`.
# * The files are flushed, the directory's name is not: :doc:`durable_saves`.
# * torch's documentation calls ``skip_data`` an early prototype, and ``_StorageInfo`` is private.
#   The recipe runs on torch 2.9 to 2.15. If one disappears, the first save fails with an error and
#   no checkpoint gets its name.
# * The zip checksums of tensors are 0. ``torch.load`` and DCP never check them; ``unzip`` does.
# * Each rank that writes a tied weight writes it once. Replicated tied weights can fall to two
#   ranks, which write one copy each.
# * A tensor that is not dense, such as a sparse one, is serialized at every save. DCP cannot load
#   sparse tensors back.
#
# Further reading
# ---------------
# * `torch.serialization.skip_data
#   <https://docs.pytorch.org/docs/stable/notes/serialization.html>`__
# * `Writing a storage writer: torch.distributed.checkpoint
#   <https://docs.pytorch.org/docs/stable/distributed.checkpoint.html>`__: ``StorageWriter``,
#   ``SavePlanner``, the protocol followed here
