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
(:doc:`object_storage`), or their layout changes at every save. If
your storage is slower than DCP's writer and your steps are long, :doc:`overlapped_stager` does as
well.

.. code-block:: python

   from pathlib import Path

   from overlap_recipes.checkpoint import Saves, TrainingState

   app = TrainingState(model, optimizer, schedule=scheduler)
   root = Path("checkpoints")
   with Saves(device, model.buffers) as saves:
       for step, batch in enumerate(batches, scheduler.last_epoch + 1):
           train_step(batch)  # ends with optimizer.step() and scheduler.step()
           if step % 100 == 0:
               saves.save({"app": app}, root / f"step{step}")

Your project needs the package ``overlap_recipes``: ``pip install .`` in this repository, or a copy
of its folder ``overlap_recipes``. ``device`` is the rank's own. Copy and write run beside training.
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
      * page-locked host memory for one copy of each rank's shards
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
# Imports and sizes
# -----------------
# The imports are the proof's. The sizes are the module's.
#
# .. literalinclude:: /overlap_recipes/checkpoint/writer.py
#    :language: python
#    :start-at: # Private by name
#    :end-at: PIECE = 256 << 20

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from overlap_recipes.checkpoint.saves import Saves

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
#
# .. literalinclude:: /overlap_recipes/checkpoint/writer.py
#    :language: python
#    :pyobject: WithoutTensor
#
# .. literalinclude:: /overlap_recipes/checkpoint/writer.py
#    :language: python
#    :pyobject: around
#
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
#
# .. literalinclude:: /overlap_recipes/checkpoint/writer.py
#    :language: python
#    :pyobject: memory_of
#
# .. literalinclude:: /overlap_recipes/checkpoint/writer.py
#    :language: python
#    :pyobject: Planner
#
# .. literalinclude:: /overlap_recipes/checkpoint/writer.py
#    :language: python
#    :pyobject: Layout
#
# Write bytes
# -----------
# A system call releases the interpreter's lock until it returns. If the disk is full, the call
# that finds no room raises ``OSError``. Reserving the room first (``posix_fallocate``) would
# report that earlier, but makes a memory file system walk its pages twice. ``fsync`` returns when
# the storage has the bytes. A directory's entries need an ``fsync`` of their own.
#
# Two threads of each rank write. More write faster, and take cores and memory bandwidth from the
# thread that launches kernels; so their number doubles only when a save comes before the one before
# it is written. ``Saves(write_threads=...)`` sets it.
#
# .. literalinclude:: /overlap_recipes/checkpoint/writer.py
#    :language: python
#    :pyobject: write_file
#
# .. literalinclude:: /overlap_recipes/checkpoint/writer.py
#    :language: python
#    :pyobject: write_files
#
# .. literalinclude:: /overlap_recipes/checkpoint/writer.py
#    :language: python
#    :pyobject: sync
#
# The writer
# ----------
#
# .. literalinclude:: /overlap_recipes/checkpoint/writer.py
#    :language: python
#    :pyobject: serialised
#
# .. literalinclude:: /overlap_recipes/checkpoint/writer.py
#    :language: python
#    :pyobject: kind
#
# .. literalinclude:: /overlap_recipes/checkpoint/writer.py
#    :language: python
#    :pyobject: FileWriter
#
# ``together`` is that of :doc:`overlapped_stager`. It calls a function on every rank, gathers the
# results, and raises on *every* rank if the function failed on one. Apart from these calls, and
# from DCP's own collectives while planning, no rank waits for another. So a full disk on one rank
# cannot leave the others waiting. A rank that dies closes its connection, which the others see as
# an error. Rank 0 writes ``.metadata`` when all files are complete, and renames the directory after
# that.
#
# ``arrange`` decides whether the kept plan still holds. Staged tensors are the same objects at
# every save, because they lie in one buffer. So comparing their ids is enough. A state
# with other objects is compared as DCP sees it: names, shapes, shards, dtypes, and which names
# share memory. If one rank finds a difference, all ranks plan again.
#
# Run it, and prove it
# --------------------
# The first two steps run beside ``prepare``, so no save plans. The state of the proof has a list
# that grows with every step, so no two checkpoints have the same length. The proof reads each checkpoint twice: with ``dcp.load`` on these ranks, and on rank 0
# alone with the tool that turns a checkpoint into a file for ``torch.load``. Every bit is compared.


def whole(tree: object) -> object:
    """A nested state dict on the CPU, with the shards of all ranks put together."""
    if isinstance(tree, dict):
        return {key: whole(value) for key, value in tree.items()}
    tree = tree.full_tensor() if hasattr(tree, "full_tensor") else tree
    return tree.cpu() if torch.is_tensor(tree) else tree


def history(step: int) -> list[float]:
    return [0.5] * 10 ** (step - 2)


def main(directory: Path) -> None:
    import _toys as basic  # a model, its training step and what compares bits

    device = basic.start_rank()
    root, app, expected = basic.directory_of_rank_0(directory), basic.build_app(device), {}
    with Saves(device, app.model.buffers) as saves:
        prepared = saves.prepare({"app": app, "history": []})
        basic.train(app, 2, device)
        prepared.result()
        assert saves.files.plans == 1, "the first save would have to plan"
        for step in range(3, 6):
            basic.train_step(app, device)
            expected[step] = basic.snapshot(app)
            saves.save({"app": app, "history": history(step)}, root / f"step{step}")
    assert saves.files.plans == 1, "planned more than once"
    for step, bits in expected.items():
        loaded = basic.load_app(root / f"step{step}", device)
        basic.assert_same_bits(loaded, bits)
        state = {"app": whole(loaded.state_dict()), "history": history(step)}
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
# Steps shorter than the copy wait for it:
#
# .. result-table:: checkpoint_stall
#    :rows: none overlapped_writer
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
# The host memory of :doc:`overlapped_stager`. The kept plan takes about 1.5 kB for each *kind* of tensor (shape and dtype),
# some hundred bytes for each tensor and buffer, and on rank 0 the ``.metadata`` of all ranks.
#
# Known limits
# ------------
# * Those of :doc:`overlapped_stager`.
# * The files are flushed, the directory's name is not: :doc:`keep_verify_prune`.
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
