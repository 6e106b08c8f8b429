# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, checkpoint/overlapped_writer.py
"""
Write at the speed of the storage
=================================

A checkpoint that lies in host memory has to be written beside training. DCP's writer plans anew
at every save, pickles and checksums each tensor, and holds Python's interpreter lock for much of
that time: the training thread, which needs the lock for every kernel that it launches, loses it.
This recipe lets DCP plan **once** and from then on writes bytes: few large system calls, which
leave the lock to training, in files that ``dcp.load`` and DCP's tools read as they are.

.. code-block:: python

   from pathlib import Path

   from overlapped_writer import OverlappedWriter
   from state_to_save import AppState

   app, root = AppState(model, optimizer), Path("checkpoints")
   with OverlappedWriter(device, model.buffers()) as saves:
       for step, batch in enumerate(batches):
           loss = train_step(batch)
           if step % 100 == 0:
               saves.save({"app": app}, root / f"step{step}")

Copy this file, ``overlapped_stager.py`` and ``staging_copies.py``. ``save`` stages beside training
and returns; ``root/step100`` appears when every rank has written and the storage has it all: the
name is the proof. **Not worth it** where saves are rare or small, or where the state has a few large tensors
and the storage is slow: then the writer of :doc:`overlapped_stager`, which is DCP's, takes the
lock for a moment only.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * what of a save stays the same from one to the next, and what does not
      * which calls leave the interpreter's lock to training
      * a planner and a storage writer of your own in DCP's protocol
      * an error on one rank that all ranks hear of, and nothing older harmed

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later on Linux, any number of ranks, CPU or GPU
      * one file system that all ranks see, as DCP has it
      * ``overlapped_stager.py``, and for the proof ``state_to_save.py``

.. verification-badge::

The idea
--------

.. lanes:: Schematic. The first save plans; each later one writes bytes from where they lie.

   training: 0-4 step 1; 4-5 save; 5-9 step 2; 9-13 step 3; 13-14 save; 14-18 step 4; 18-22 step 5
   copy:     4.4-7 stage ~; 13.4-16 stage ~
   writer:   7-10 plan once !; 10-12.5 write bytes ~; 16-18.5 write bytes ~

In DCP's format a file is a row of entries, and each entry is what ``torch.save`` makes of one
tensor: about 1.5 kB of zip headers and pickle *around* the tensor's bytes. What is around depends
on shape and dtype alone. So do the plan (who writes what), the offsets and all of ``.metadata``
that concerns tensors. What changes from save to save are the bytes in staged memory, and whatever
is no tensor: step counters, schedules, lists. That is pickled anew every time and goes to the end
of the file, where it may grow without moving a tensor.
"""

# %%
# Imports
# -------
# Torch, the standard library and the stager. ``_StorageInfo`` is the one private name, the same in
# torch 2.9 to 2.15: ``.metadata`` is made of it, and DCP's reader expects it.

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
from overlapped_stager import BUFFER_SETS, OverlappedSaves, is_staged
from torch.distributed.checkpoint.filesystem import WriteResult, _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

WRITERS = 8  # threads a rank, each with a file of its own
PIECE = 64 << 20  # bytes that one system call writes

# %%
# What is around a tensor
# -----------------------
# Under ``torch.serialization.skip_data()`` (torch 2.6 and later), ``torch.save`` does not write a
# tensor's bytes: it seeks over them. A file that notes where, and does not move, ends up with
# exactly what belongs before and behind.
#
# One field depends on the bytes: the zip's checksum. ``torch.load`` does not look at it, here or in
# any other checkpoint: flip a byte in a tensor, and it loads without a word. It is left 0, as
# ``torch.serialization.set_crc32_options(False)`` leaves it, and the writer saves the time that
# computing it takes, about as long as writing to memory. ``unzip -t`` would complain.


class WithoutTensor(io.BytesIO):
    """Takes what ``torch.save`` writes, and leaves no room for the tensor's bytes."""

    hole = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.hole = self.tell()
        return self.hole


@cache
def around(shape: torch.Size, dtype: torch.dtype) -> tuple[bytes, bytes]:
    """What ``torch.save`` writes before and after the bytes of a contiguous tensor."""
    file = WithoutTensor()
    with torch.serialization.skip_data():
        torch.save(torch.empty(shape, dtype=dtype), file)
    return file.getvalue()[: file.hole], file.getvalue()[file.hole :]


# %%
# Plan once
# ---------
# DCP plans in five steps and calls a *planner* and a *storage writer* for each: every rank lists
# what it holds, rank 0 removes what several ranks hold (replicated tensors) and hands out the
# rest, each rank writes, rank 0 writes ``.metadata``. Here DCP's own planner does the first three;
# the storage writer below only gives each tensor a place, the largest first, each to the shortest
# file so far. Names of one memory, as tied weights are, get one place.
#
# ``pieces`` turns places into system calls. ``os.pwritev`` writes a list of buffers from wherever
# they lie: header, tensor, header, tensor. Hundreds of small tensors are one call.


def memory_of(tensor: torch.Tensor) -> tuple:
    """Equal for two names of the same memory."""
    return tensor.data_ptr() if tensor.nbytes else id(tensor), tensor.shape, tensor.dtype


def staged_items(planner, plan, staged: bool = True) -> list:
    """The items of ``plan`` that are staged tensors, or those that are not."""
    return [i for i in plan.items if is_staged(planner.state_dict[i.index.fqn]) == staged]


class Layout(dcp.FileSystemWriter):
    """Where this rank's part of a state goes; on rank 0, ``.metadata`` too."""

    def write_data(self, plan, planner) -> torch.futures.Future:
        """Write nothing: give every staged tensor its place, and return the places."""
        tensors = [(planner.resolve_data(i), i) for i in staged_items(planner, plan)]
        self.others = staged_items(planner, plan, False)
        tensors.sort(key=lambda pair: pair[0].nbytes, reverse=True)
        writers = min(WRITERS, 1 + sum(tensor.nbytes for tensor, _ in tensors) // PIECE)
        self.names = [f"{plan.storage_data.prefix}{n}.distcp" for n in range(writers)]
        self.files, self.ends = [[] for _ in self.names], [0 for _ in self.names]
        self.calls, self.last_others = {}, None
        places, results = {}, []
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
        """On rank 0: keep what is known of ``.metadata``."""
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
# A system call gives up the interpreter's lock until it returns. A full disk is an ``OSError`` of the
# call that found no room. To reserve the room first (``posix_fallocate``) would notice it earlier, and
# makes a memory file system walk its pages twice. ``fsync`` makes the storage have the bytes; a
# directory's entries need it too.


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


class OverlappedWriter(OverlappedSaves):
    """``OverlappedSaves`` that plans once and then writes bytes; used in the same way."""

    layout: Layout | None = None
    plans = 0

    def write(self, state: dict, directory: Path) -> None:
        """Write this rank's part of ``state``. Every rank calls it, on its writing thread."""
        planner = dcp.DefaultSavePlanner()
        if any(self.together(self.differs, planner, state)):
            layout, group = Layout(directory), self.groups[0] if self.groups else None
            dcp.save(state, storage_writer=layout, process_group=group, no_dist=group is None)
            layout.made_for, self.layout, self.plans = self.wanted, layout, self.plans + 1
        others = self.together(self.write_files, planner, directory)
        if self.rank == 0:
            self.layout.write_metadata(directory, others)

    def differs(self, planner: dcp.DefaultSavePlanner, state: dict) -> bool:
        """Whether the layout was made for another state than this one of this rank."""
        planner.set_up_planner(state)
        self.staged = [leaf for leaf in planner.state_dict.values() if is_staged(leaf)]
        self.key = tuple(planner.mappings.items()), tuple(map(id, self.staged))
        if self.layout and self.key in self.layout.calls:
            return False
        plan, names = planner.create_local_plan(), {}
        tensors = [planner.resolve_data(item) for item in staged_items(planner, plan)]
        ties = [names.setdefault(memory_of(tensor), n) for n, tensor in enumerate(tensors)]
        self.wanted = plan, ties
        return self.layout is None or self.layout.made_for != self.wanted

    def write_files(self, planner: dcp.DefaultSavePlanner, directory: Path) -> list[WriteResult]:
        """Write this rank's files; return the places of what is serialised anew."""
        layout = self.layout
        if self.key not in layout.calls:
            if len(layout.calls) == BUFFER_SETS:
                layout.calls.clear()
            calls = [layout.pieces(planner, items) for items in layout.files]
            layout.calls[self.key] = self.staged, calls  # the memory must live as long
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
            paths = [directory / name for name in layout.names]
            list(threads.map(write_file, paths, [first, *calls[1:]]))
        return places


# %%
# ``together`` comes with ``OverlappedSaves``: it calls a function on every rank, gathers what they
# return, and raises on *every* rank if the function failed on one. Besides DCP's own collectives
# while it plans, nothing here waits for another rank in any other way, so a full disk on one rank
# cannot leave the others waiting; a rank that dies closes its connection, which the others see as an
# error. ``.metadata`` comes when all files are complete, the name of the directory after that.
#
# ``differs`` decides whether the plan holds. Staged tensors are the same objects at every other
# save, so looking at their ids is enough, and takes milliseconds for thousands. Only a state with
# other objects is compared as DCP sees it: names, shapes, shards, dtypes, and which names share
# memory. If one rank finds a difference, all plan again.
#
# Run it, and prove it
# --------------------
# The state has a list that grows with every step, so no two checkpoints have the same length. They
# are read twice: by ``dcp.load`` on these ranks, and as a whole on rank 0 alone, by the tool that
# turns a checkpoint into a file for ``torch.load``. Every bit is compared.


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
    with OverlappedWriter(device, app.model.buffers()) as saves:
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
# What a whole save costs training, and the rate of its writes (the columns: :doc:`async_save`).
#
# .. result-table:: checkpoint_stall
#    :rows: none overlapped_writer overlapped_snapshot
#
# How often one can save: the throughput that is kept when a save is called every so many steps. The
# checkpoint before the last is deleted, at the writer's cost.
#
# .. result-table:: save_interval
#    :rows: overlapped_writer
#
# ``benchmarks/writing.py`` compares ways of writing without an accelerator. A **process** that maps
# the same memory and is told what to write is no better than these threads. So this recipe uses no
# process.
#
# DCP has one: ``AsyncCheckpointerType.PROCESS`` plans and writes in a daemon, so training keeps the
# lock, at the price of a copy into shared memory on the training thread and an open file a tensor.
# Its daemon is never replaced when it dies, rank 0 picks its port long before opening it, it needs a
# ``__main__`` guard, and two saves in a row can lead ranks into different collectives.
#
# What breaks if you remove a line
# --------------------------------
#
# .. recipe-controls::
#
# Memory
# ------
# Nothing for tensors: they are written from where they were staged. The kept plan takes about
# 1.5 kB for each *kind* of tensor (shape and dtype), some hundred bytes for each tensor and set of
# buffers, and on rank 0 the ``.metadata`` of all ranks.
#
# When it is not worth it
# -----------------------
# * The storage is slower than DCP's writer, and steps are long: nobody misses the lock.
# * The layout changes at every save: each would be planned.
# * Checkpoints go to an object store: no file system, no ``pwritev``.
#
# Known limits
# ------------
# * ``skip_data`` is called an early prototype in torch's documentation, and ``_StorageInfo`` is
#   private. Both are the same in the sources of torch 2.11, 2.13 and 2.15. If one goes, the first save
#   fails loudly: nothing is written under the checkpoint's name.
# * The zip checksums of tensors are 0. ``torch.load`` and DCP never look; ``unzip`` does.
# * A tied weight is written once by each rank that writes it. Replicated tied weights can fall to two
#   ranks, which write one copy each.
# * A tensor that is not dense, a sparse one for example, is serialised anew at every save. DCP cannot
#   load sparse ones back.
#
# Further reading
# ---------------
# * `torch.serialization.skip_data
#   <https://docs.pytorch.org/docs/stable/notes/serialization.html>`__
# * `Writing a storage writer: torch.distributed.checkpoint
#   <https://docs.pytorch.org/docs/stable/distributed.checkpoint.html>`__: ``StorageWriter``,
#   ``SavePlanner``, the protocol followed here
# * `pwritev <https://man7.org/linux/man-pages/man2/pwritev.2.html>`__
