# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, checkpoint/durable_saves.py
"""
Commit a checkpoint: durable on every rank, or not there
========================================================

A save can be killed at any moment, a disk can fill up, a power cut can take what was not flushed.
This recipe adds to an overlapped save the few steps after which a checkpoint either is complete and
durable under its name, or has no name at all. A save that fails is reported on every rank and
training goes on.

.. code-block:: python

    from durable_saves import DurableSaves, newest_step

    with DurableSaves(device, model.buffers()) as saves:
        for step, batch in enumerate(data):
            basic.train_step(batch)
            if step % 1000 == 0:
                saves.save({"app": app_state}, root / f"step{step}")

    newest_step(root)  # None, or the step to resume from; with digests=True every byte is read

The save costs training what it cost before: all of this runs on the thread that writes. Do not
bother for a run that you would simply start again.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * the order: write aside, flush, agree, rename, flush, then the pointer
      * what tells a complete checkpoint from one that loads and is wrong
      * failed saves that do not end training: disk full, permission, a directory that is gone

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks, a file system that all ranks share
      * ``overlapped_stager.py`` of this folder, whose ``OverlappedSaves`` this one extends

.. verification-badge::

The idea
--------

.. lanes:: Schematic. Until the rename nothing has the checkpoint's name; after it, all is flushed.

   every rank:  0-8 write shards; 8-10 flush; 10-13 digests, manifest
   rank 0:      14-15 rename; 15-18 flush; 18-21 pointer
   @14 all agree
   @18 durable

Five rules, each of them a line below:

1. **Aside.** Shards are written to ``step8.incomplete``. Whatever stops the save leaves that name.
2. **Flushed before named.** A file that is closed is still in the page cache. Each rank flushes its
   files and the directory that lists them, and only then does the rename happen.
3. **Agreed.** Rank 0 renames when *every* rank has said that its part is on storage. If one failed,
   all ranks raise the same error, and what was written is removed: a full disk gets its room back.
4. **One rename** makes the checkpoint. Then the directory above is flushed, or the rename itself may
   not outlive a power cut.
5. **Then the pointer**, which is written aside and renamed too. It may be one save late, never early.
"""

# %%
# Imports and names
# -----------------

import argparse
import hashlib
import json
import os
import shutil
import tempfile
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import state_to_save as basic
import torch
import torch.distributed as dist
from overlapped_stager import OverlappedSaves
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

MANIFEST = "manifest.{}.json"  # of each rank, in each checkpoint: its files, sizes, digests
POINTER = "latest"  # in the root: the name of the newest checkpoint, for people and other programs
STEPS, SAVE_EVERY = 10, 2  # of the run that proves it

# %%
# Flushing
# --------
# ``fsync`` of a file makes its content durable, ``fsync`` of a directory the names in it. Both are
# needed: a durable file without a durable name is lost, a name without content is an empty file.


def flush(path: Path) -> None:
    """Return when ``path``, a file or a directory, is on the storage."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` in one step: readers see the old content or the new."""
    aside = path.with_name(f"{path.name}.new")
    aside.write_text(text)
    flush(aside)
    aside.replace(path)
    flush(path.parent)


# %%
# What a complete checkpoint is
# -----------------------------
# DCP writes ``.metadata`` last, so its presence is often taken for completeness. It is not enough.
# It says which shards there should be and nothing about whether they are these: a save that was
# torn between two ranks, or written over an older one, has it, loads without an error, and is
# wrong. A file cut short by a full disk has it too. So the commit writes a manifest of all files
# with size and digest. ``faults`` reads it: sizes cost nothing and find what is missing or cut;
# digests read every byte and find what a disk or a copy changed.


def described(file: Path) -> dict[str, object]:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}


def faults(directory: Path, digests: bool = False) -> list[str]:
    """What is wrong with the checkpoint ``directory``, a line a file; nothing if it is whole."""
    parts = sorted(directory.glob(MANIFEST.format("*")))
    try:
        manifests = [json.loads(part.read_text()) for part in parts]
        files = {name: what for part in manifests for name, what in part["files"].items()}
        ranks = {part["ranks"] for part in manifests}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"a manifest cannot be read: {error!r}"]
    if ranks != {len(parts)}:
        return [f"{len(parts)} manifests, of a job of {ranks or 'no'} ranks"]
    found = []
    for name, expected in files.items():
        file = directory / name
        if not file.is_file():
            found.append(f"{name}: missing")
        elif file.stat().st_size != expected.get("bytes"):
            found.append(f"{name}: {file.stat().st_size} bytes, not {expected.get('bytes')}")
        elif digests and described(file) != expected:
            found.append(f"{name}: its content has changed")
    return found


def committed_steps(root: Path) -> list[int]:
    """The steps whose checkpoints have their final name, the newest first."""
    names = [path.name.removeprefix("step") for path in root.glob("step*")]
    return sorted((int(name) for name in names if name.isdigit()), reverse=True)


def newest_step(root: Path, digests: bool = False) -> int | None:
    """The newest step whose checkpoint is whole, None if there is none."""
    whole = (step for step in committed_steps(root) if not faults(root / f"step{step}", digests))
    return next(whole, None)


# %%
# The save
# --------
# ``OverlappedSaves`` stages beside training and then calls, on its writing thread, ``write`` with
# the directory aside and ``commit``. Each of the two begins on all ranks only when the step before
# has succeeded on all, and raises on all what failed on one: that is rule 3, and it is why a rank
# may leave the loop in the middle of ``write`` without leaving the others waiting.
#
# Each rank writes a manifest of its own files, so the digests of a thousand ranks need no gathering.
# Each says how many there must be: a rank that took itself for a job of its own is found out.


class DurableSaves(OverlappedSaves):
    """Overlapped saves that are durable once their future is done.

    The future of a save that failed raises a ``RuntimeError`` on every rank. Nothing of such a save
    stays on disk, older checkpoints are untouched, training goes on and the next save is taken.
    """

    latest: Future | None = None

    def save(self, state_dict: dict, directory: Path) -> Future | None:
        """As ``OverlappedSaves.save``; ``directory`` is ``root/step<N>``."""
        upload = super().save(state_dict, directory)
        if upload is not None:
            self.latest = upload
        return upload

    def wait(self) -> None:
        """Return when all saves have ended.

        Raises:
            RuntimeError: the latest one failed. Failures of earlier ones have been logged.
        """
        with suppress(RuntimeError):
            super().wait()
        if self.latest is not None:
            self.latest.result()

    def write(self, state: dict, directory: Path) -> None:
        """Write this rank's part of ``state``, flush it and describe it."""
        super().write(state, directory)
        files = list(directory.glob(f"__{self.rank}_*"))
        if self.rank == 0:
            files.append(directory / ".metadata")
        for file in files:
            flush(file)
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        manifest = {"ranks": ranks, "files": {file.name: described(file) for file in files}}
        write_durably(directory / MANIFEST.format(self.rank), json.dumps(manifest, indent=1))

    def commit(self, aside: Path, directory: Path) -> None:
        """Give the checkpoint its name, durably; then tell the pointer."""
        if self.rank != 0:
            return
        if directory.exists():
            if not faults(directory, digests=True):
                raise FileExistsError(f"{directory} is there and whole")
            directory.rename(directory.with_name(directory.name + ".damaged"))
        aside.rename(directory)
        flush(directory.parent)
        write_durably(directory.with_name(POINTER), directory.name)


# %%
# Run it, and prove it
# --------------------
# A loop that saves every second step. Two of its saves must fail: the last rank alone has something
# in its state that cannot be pickled, and step 8 is to take the name of step 6. Both fail on every
# rank, leave nothing and harm nothing, and the save after them is taken.


def train(app: basic.AppState, root: Path, device: torch.device) -> dict[int, dict]:
    """Save every second step; return the bits of those whose save did not fail."""
    saved, uploads = {}, {}
    with DurableSaves(device, app.model.buffers()) as saves:
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
# Then the checkpoints are judged: each has the bits of its step, the pointer names the newest, of
# the failed saves nothing is left. Last, damage to a copy: one byte in the middle of a shard.
# ``dcp.load`` takes it without a word and the sizes are right; the digests are not.


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
# Each edit was made and run when this page was built. What a flush is for, no run can show: nothing
# that was written is lost by a kill. So the tests also log every file operation of a job and look at
# each state that a power cut could leave after each of them; without one of the flushes, some of these
# states have a checkpoint under its name that is not whole.
#
# .. recipe-controls::
#
# What it was put through
# -----------------------
# ``make soak`` strikes a job of two ranks at a random moment of a save of :doc:`retention`, which
# commits as above; a second job resumes. An observer outside both knows the bits of each step and when
# its save was durable on every rank. *Lost or wrong*: that save or a newer one is not what the second
# job chooses, or differs in a bit, or the two end otherwise than a job that nothing struck. After
# *truncated* and *flipped* the newest checkpoint is damaged as well.
#
# .. result-table:: soak
#
# The same faults, where a way of saving comes to that point, and what each resumes from by its own
# rules. ``async_save`` writes every checkpoint to one directory; ``torch_checkpointing`` says nothing on
# what to resume from, so it is the newest that has its name.
#
# .. result-table:: save_faults
#
# When it is not worth it
# -----------------------
# * The run is short, or its last checkpoint is of no more use than its first.
# * Your storage commits by itself: an object store names an object when it is complete, and has no
#   rename. See :doc:`object_storage`.
#
# What it costs
# -------------
# Nothing on the training thread. On the writing thread: the flush takes as long as the storage needs to
# take the bytes, which a save without it only puts off; the digest reads the files again, from memory,
# at the rate of one core's SHA-256; each rank writes one more small file. Memory: none.
#
# Faster
# ------
# ``class Saves(RetainedSaves, OverlappedWriter): pass`` writes by the kept plan of
# :doc:`overlapped_writer` and commits as here.
#
# Known limits
# ------------
# * ``fsync`` is a request. Disks with a volatile cache that lie about it, and network file systems that
#   are mounted to ignore it, lose what they said they had.
# * A rank that dies or hangs during a save fails it on the others when the group's deadline has passed
#   (``DEADLINE_S`` of :doc:`overlapped_stager`). What it left has the name ``.incomplete``.
# * Digests are computed from what the file system gives back right after the write: they find what
#   changes later, not what memory changed before.
# * All ranks write to one directory that they share.
#
# Further reading
# ---------------
# * :doc:`retention`: what to delete and when, one job a directory, a command that verifies
# * :doc:`resume_and_reshard`, :doc:`preemption`: the other end of a save
# * `fsync(2) <https://man7.org/linux/man-pages/man2/fsync.2.html>`__, on files and directories
