# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, checkpoint/durable_saves.py
"""
Commit a checkpoint: durable on every rank, or not there
========================================================

Lose no checkpoint to a kill, a full disk or a power cut, with no work for the training thread. This
recipe adds a commit to an overlapped save. After it, a checkpoint either is complete and durable
under its name, or has no name at all. A save that fails is reported on every rank, and training
goes on.

**When not to bother:** you would simply start a run again that was lost, or your storage commits by
itself, as an object store does (:doc:`object_storage`).

.. code-block:: python

    from pathlib import Path

    from overlap_recipes.checkpoint import AppState, DurableSaves, newest_step

    app, root = AppState(model, optimizer), Path("checkpoints")
    with DurableSaves(device, model.buffers) as saves:
        for step, batch in enumerate(batches, 1):
            train_step(batch)
            if step % 1000 == 0:
                saves.save({"app": app}, root / f"step{step}")

    newest_step(root)  # None, or the step to resume from; with digests=True every byte is read

Your project needs the package ``overlap_recipes``: ``pip install .`` in this repository, or a copy
of its folder ``overlap_recipes``.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * the order: write aside, flush, agree, rename, flush, then the pointer
      * what tells a complete checkpoint from one that loads and is wrong
      * failed saves that do not end training: disk full, no permission, a directory that is gone

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later on Linux, any number of ranks
      * one file system that all ranks see

.. verification-badge::

The idea
--------

.. lanes:: Schematic. Until the rename nothing has the checkpoint's name; after it, all is flushed.

   every rank:  0-8 write shards; 8-10 flush; 10-13 digests, manifest
   rank 0:      14-15 rename; 15-18 flush; 18-21 pointer
   @14 all agree
   @18 durable

All of this runs on the writing thread. It follows five rules, each of them a line below:

1. **Write aside.** Shards go to ``step8.incomplete``. Whatever stops the save leaves that name.
2. **Flush before the rename.** A closed file is still in the page cache. Each rank flushes its
   files and the directory that lists them, and only then does the rename happen.
3. **Agree.** Rank 0 renames when *every* rank has reported that its part is on storage. If one
   failed, all ranks raise the same error. What was written is removed, so that a full disk has
   room again.
4. **Rename once.** One rename makes the checkpoint. Then rank 0 flushes the directory above, or a
   power cut may undo the rename.
5. **Write the pointer last.** The file ``latest`` names the newest checkpoint. It is written aside
   and renamed, too. It may be one save late, never early.
"""

# %%
# Imports and names
# -----------------
# The imports are the proof's. The names are the module's.
#
# .. literalinclude:: /overlap_recipes/checkpoint/digests.py
#    :language: python
#    :start-at: MANIFEST = "manifest.{}.json"
#    :end-at: MANIFEST = "manifest.{}.json"
#
# .. literalinclude:: /overlap_recipes/checkpoint/durable.py
#    :language: python
#    :start-at: POINTER = "latest"
#    :end-at: POINTER = "latest"

import argparse
import os
import shutil
import tempfile
from pathlib import Path

import _toys as basic
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from overlap_recipes.checkpoint.durable import (
    POINTER,
    DurableSaves,
    committed_steps,
    faults,
    newest_step,
)

STEPS, SAVE_EVERY = 10, 2  # of the run that proves it

# %%
# Flush
# -----
# ``fsync`` of a file makes its content durable; ``fsync`` of a directory makes the names in it
# durable. You need both. A durable file without a durable name is lost, and a name without content
# is an empty file.
#
# .. literalinclude:: /overlap_recipes/checkpoint/durable.py
#    :language: python
#    :pyobject: flush
#
# .. literalinclude:: /overlap_recipes/checkpoint/durable.py
#    :language: python
#    :pyobject: write_durably
#
# Describe what is complete
# -------------------------
# DCP writes ``.metadata`` last, so people often take its presence for completeness. It is not
# enough. It says which shards there should be, not whether these are the ones. A save that was
# torn between two ranks, or written over an older one, has a ``.metadata``, loads without an
# error, and is wrong. So does a save with a file that a full disk cut short.
#
# The commit therefore writes a manifest of all files with size and digests, which ``faults`` reads.
# Checking sizes costs next to nothing and finds what is missing or cut. Checking digests reads
# every byte and finds what a disk or a copy changed. Each MiB has a digest, so a load checks the
# bytes that it reads, and need not read the others.
#
# .. literalinclude:: /overlap_recipes/checkpoint/digests.py
#    :language: python
#    :pyobject: described
#
# .. literalinclude:: /overlap_recipes/checkpoint/durable.py
#    :language: python
#    :pyobject: faults
#
# .. literalinclude:: /overlap_recipes/checkpoint/durable.py
#    :language: python
#    :pyobject: committed_steps
#
# .. literalinclude:: /overlap_recipes/checkpoint/durable.py
#    :language: python
#    :pyobject: newest_step
#
# The save
# --------
# ``Saves`` stages beside training. Then it calls ``write``, with the directory aside,
# and ``commit``, both on its writing thread. Each of the two begins on all ranks only when the
# step before it has succeeded on all. If it fails on one rank, it raises on all. That is rule 3,
# and it is why a rank may fail in the middle of ``write`` without leaving the others waiting.
#
# Each rank writes a manifest of its own files, so nobody has to gather the digests of a thousand
# ranks. Each manifest says how many there must be, which exposes a rank that took itself for a job
# of its own.
#
# .. literalinclude:: /overlap_recipes/checkpoint/durable.py
#    :language: python
#    :pyobject: DurableSaves
#
# Run it, and prove it
# --------------------
# The proof saves every second step. Two of its saves must fail. At step 4, the state of the last
# rank has something that cannot be pickled. At step 8, the save asks for the name of step 6. Both
# fail on every rank, leave nothing and harm nothing, and the save after them succeeds.


def train(app: basic.AppState, root: Path, device: torch.device) -> dict[int, dict]:
    """Save every second step; return the bits of those whose save did not fail."""
    saved, uploads = {}, {}
    with DurableSaves(device, app.model.buffers) as saves:
        for _ in range(STEPS):
            basic.train_step(app, device)
            if app.step % SAVE_EVERY == 0:
                state = {"app": app}
                if app.step == 4 and dist.get_rank() == dist.get_world_size() - 1:
                    state["collate"] = lambda batch: batch
                saved[app.step] = basic.snapshot(app)
                name = "step6" if app.step == 8 else f"step{app.step}"
                uploads[app.step] = saves.save(state, root / name)
        failed = {step for step, upload in uploads.items() if upload.exception()}
        assert failed == {4, 8}, f"failed: {failed}"
    return {step: bits for step, bits in saved.items() if step not in failed}


# %%
# The proof then judges the checkpoints. Each has the bits of its step, the pointer names the
# newest, and nothing is left of the failed saves. Last, it damages a copy: one byte in the middle
# of a shard. The copy loads without an error, and the sizes are right. Only the digests differ.


def prove(root: Path, device: torch.device, expected: dict[int, dict]) -> None:
    for step, bits in expected.items():
        basic.assert_same_bits(basic.load_app(root / f"step{step}", device), bits)
        assert not faults(root / f"step{step}", digests=True)
    assert committed_steps(root) == [10, 6, 2] and not list(root.glob("*.incomplete"))
    assert (root / POINTER).read_text() == "step10" and newest_step(root) == 10
    print(f"steps {sorted(expected)} are whole, every bit equal; {POINTER} names step10")


def damage(root: Path) -> None:
    """Change a byte in a copy of the newest checkpoint and load it, then cut the copy short."""
    shard = root / "step11" / "__0_0.distcp"
    shutil.copytree(root / "step10", shard.parent)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert newest_step(root) == 11 and newest_step(root, digests=True) == 10
    dcp_to_torch_save(shard.parent, root / "damaged.pt")  # reads everything
    (root / "damaged.pt").unlink()
    print(f"loaded without an error: {faults(shard.parent, digests=True)}")
    os.truncate(shard, 1000)
    assert newest_step(root) == 10, "a file that was cut short counts as whole"
    shutil.rmtree(shard.parent)


def main(directory: Path) -> None:
    basic.HIDDEN = 512  # small: all of it is flushed, many times
    device = basic.start_rank()
    try:
        root = basic.directory_of_rank_0(directory)
        expected = train(basic.build_app(device), root, device)
        prove(root, device, expected)
        dist.barrier()
        if dist.get_rank() == 0:
            damage(root)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, help="where checkpoints go (default: temporary)")
    with tempfile.TemporaryDirectory() as temporary:
        main(parser.parse_args().dir or Path(temporary))

# %%
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built. No run can show what a flush is for, because
# a kill loses nothing that was written. So the tests also log every file operation of a job, and
# look at each state that a power cut could leave after each operation. Without one of the flushes,
# in some of these states a checkpoint has its name and is not complete.
#
# .. recipe-controls::
#
# What it was put through
# -----------------------
# ``make soak`` interrupts a job of two ranks at a random moment of a save, and starts a second job
# that resumes. The job saves with :doc:`retention`, which commits as this page does. An observer
# outside both jobs knows the bits of each step, and when its save was durable on every rank. *Lost
# or wrong* counts the trials in which the second job chose an older step than the last durable
# one, or any bit differed, or the two jobs ended otherwise than an uninterrupted job. In
# *truncated* and *flipped*, the newest checkpoint was damaged as well.
#
# .. result-table:: soak
#
# The next table has the same faults for other ways to save, as far as a way reaches the moment in
# question. Each resumes by its own rules. ``async_save`` writes every checkpoint to one directory.
# ``torch_checkpointing`` has no rule for what to resume from, so there it is the newest that has
# its name. *Everything that was measured* also counts lost checkpoints, resumes with other bits,
# and jobs that hung.
#
# .. result-table:: save_faults
#
# What it costs
# -------------
# None of this runs on the training thread. On the writing thread, the flush takes as long as the
# storage needs to take the bytes; without a flush, that time only comes later. The digests read the
# files again, from memory, at the rate at which one core computes CRC-32. Each rank writes one
# more small file.
#
# Known limits
# ------------
# * ``fsync`` is a request. A disk with a volatile cache may lie about it, and a network file
#   system may be mounted to ignore it. Both lose what they said they had.
# * A rank that dies or hangs during a save fails that save on the others when the deadline of the
#   group has passed (``DEADLINE_S`` of :doc:`saves_beside_training`). What it left keeps the suffix
#   ``.incomplete``.
# * Digests are computed from what the file system returns right after the write. They find what
#   changes later, not what memory changed before.
# * All ranks write to one directory that they share.
#
# Further reading
# ---------------
# * :doc:`retention`: what to delete and when, one job per directory, a command that verifies
# * :doc:`resume_and_reshard`, :doc:`preemption`: how a job resumes, and how it stops
# * `fsync(2) <https://man7.org/linux/man-pages/man2/fsync.2.html>`__, on files and directories
