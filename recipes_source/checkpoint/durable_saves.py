"""
Commit a checkpoint: durable on every rank, or not there
========================================================

A save can be killed at any moment, a disk can fill up, a power cut can take what was not flushed.
This recipe adds to an overlapped save the few steps after which a checkpoint either is complete and
durable under its name, or has no name at all. A save that fails is reported on every rank and
training goes on.

.. code-block:: python

    from durable_saves import DurableSaves, newest_step

    with DurableSaves(root, device, model.buffers()) as saves:  # refuses a second job on root
        for step, batch in enumerate(data):
            train_step(batch)
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
      * one job a directory: a lease that a crash gives back

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks, a file system that all ranks share
      * ``overlapped_stager.py`` of this folder, whose ``OverlappedSaves`` this one extends

.. verification-badge::

The idea
--------

.. lanes:: Schematic. Until the rename nothing has the checkpoint's name; after it, all is flushed.

   every rank:  0-8 write shards; 8-11 flush, digest
   rank 0:      12-14 manifest; 14-16 flush directory; 16-17 rename; 17-19 flush; 19-21 pointer
   @12 all agree
   @17 committed

Five rules, each of them a line below:

1. **Aside.** Shards are written to ``step8.incomplete``. Whatever stops the save leaves that name.
2. **Flushed before named.** A file that is closed is still in the page cache. Each rank flushes its
   files, rank 0 the directory that lists them, and only then does the rename happen.
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
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from async_save import (
    AppState,
    assert_same_bits,
    build_app,
    directory_of_rank_0,
    load_app,
    snapshot,
    start_rank,
    train_step,
)
from overlapped_stager import OverlappedSaves
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

MANIFEST = "manifest.json"  # in each checkpoint: its files, their sizes and digests
POINTER = "latest"  # in the root: the name of the newest checkpoint, for people and other programs
STEPS, SAVE_EVERY = 10, 2  # of the run that proves it
GROUP_TIMEOUT = timedelta(minutes=10)  # longer than the slowest rank takes to write

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
    try:
        files = json.loads((directory / MANIFEST).read_text())["files"]
    except (OSError, ValueError) as error:
        return [f"{MANIFEST}: {error}"]
    found = []
    for name, expected in files.items():
        file = directory / name
        if not file.is_file():
            found.append(f"{name}: missing")
        elif file.stat().st_size != expected["bytes"]:
            found.append(f"{name}: {file.stat().st_size} bytes, not {expected['bytes']}")
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
# the directory aside, and ``commit`` when all ranks have written. This class extends both. Training
# takes no part in it, so the agreement has a process group of its own.
#
# ``agree`` is the heart: each rank does its part, tells the others how it went, and either all go
# on or all raise. ``BaseException``, because DCP's ``CheckpointException`` derives from it.


class DurableSaves(OverlappedSaves):
    """Overlapped saves below ``root`` that are durable once their future is done.

    The future of a save that failed raises the same ``RuntimeError`` on every rank; rank 0 prints
    it at once. Nothing of it stays on disk, older checkpoints are untouched, the next save is taken.

    Raises:
        RuntimeError: another job writes to ``root``.
    """

    def __init__(self, device: torch.device, changed_by_forward=(), if_busy="wait") -> None:
        super().__init__(device, changed_by_forward, if_busy)
        self.rank = dist.get_rank()
        self.committers = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
        self.latest: Future | None = None

    def save(self, state_dict: dict, directory: Path) -> Future | None:
        """As :meth:`OverlappedSaves.save`; ``directory`` is ``root/step<N>``."""
        self.latest = super().save(state_dict, directory) or self.latest
        return self.latest

    def wait(self) -> None:
        """Return when all saves have ended.

        Raises:
            RuntimeError: the latest one failed. Of earlier ones the failure is told already.
        """
        with suppress(RuntimeError):
            super().wait()
        if self.latest is not None:
            self.latest.result()

    def agree(self, what: str, action: Callable, *args: object) -> list:
        """Every rank's ``action(*args)``; on every rank a RuntimeError if it failed on any."""
        result, failed = None, {}
        try:
            result = action(*args)
        except CheckpointException as error:  # DCP has asked the others already
            failed = {rank: repr(cause) for rank, (cause, _) in error.failures.items()}
        except BaseException as error:
            failed = {self.rank: repr(error)}
        outcomes = [(result, failed)] * dist.get_world_size()
        dist.all_gather_object(outcomes, (result, failed), group=self.committers)
        failed = {rank: cause for _, failures in outcomes for rank, cause in failures.items()}
        if failed:
            raise RuntimeError(f"{what} failed, by rank: {failed}")
        return [result for result, _ in outcomes]

    def write(self, state: dict, directory: Path) -> None:
        """Write this rank's part of ``state`` and flush it; on rank 0, the manifest of all."""
        try:
            self.agree("prepare", self.prepare, state, directory)
            self.agree("write", super().write, state, directory)
            parts = self.agree("flush", self.flush_part, directory)
            self.agree("manifest", self.write_manifest, directory, parts)
        except RuntimeError as error:
            self.give_up(directory, error)

    def prepare(self, state: dict, directory: Path) -> None:
        """Remove what a crash has left of an earlier save of this step."""
        if self.rank == 0 and directory.exists():
            shutil.rmtree(directory)

    def flush_part(self, directory: Path) -> dict[str, dict]:
        """Flush the files that this rank wrote; return what the manifest says of them."""
        files = list(directory.glob(f"__{self.rank}_*"))
        if self.rank == 0:
            files.append(directory / ".metadata")
        for file in files:
            flush(file)
        return {file.name: described(file) for file in files}

    def write_manifest(self, directory: Path, parts: list[dict[str, dict]]) -> None:
        if self.rank == 0:
            files = {name: what for part in parts for name, what in part.items()}
            manifest = {"ranks": len(parts), "torch": torch.__version__, "files": files}
            write_durably(directory / MANIFEST, json.dumps(manifest, indent=1))

    def commit(self, aside: Path, directory: Path) -> None:
        """Give the checkpoint its name, durably; then tell the pointer. All ranks call it."""
        try:
            self.agree("commit", self.name_it, aside, directory)
        except RuntimeError as error:
            self.give_up(aside, error)

    def name_it(self, aside: Path, directory: Path) -> None:
        if self.rank == 0:
            aside.rename(directory)
            flush(directory.parent)
            write_durably(directory.with_name(POINTER), directory.name)

    def give_up(self, aside: Path, error: RuntimeError) -> None:
        """Give back the room that a failed save takes, and say at once why it failed."""
        if self.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
            print(f"{aside.name}: not saved, training goes on: {error}", file=sys.stderr)
        raise error


# %%
# Run it, and prove it
# --------------------
# A loop that saves every second step. Two of its saves must fail: the last rank alone has something
# in its state that cannot be pickled, and something stands where a checkpoint is to be named. Both
# fail on every rank, leave nothing, and the save after them is taken.


def train(app: AppState, root: Path, device: torch.device) -> dict[int, dict]:
    """Save every second step; return the bits of those whose save did not fail."""
    saved, uploads = {}, {}
    if dist.get_rank() == 0:
        (root / "step8" / "of somebody else").mkdir(parents=True)
    with DurableSaves(device, app.model.buffers()) as saves:
        for _ in range(STEPS):
            train_step(app, device)
            if app.step % SAVE_EVERY == 0:
                state = {"app": app}
                if app.step == 4 and dist.get_rank() == dist.get_world_size() - 1:
                    state["collate"] = lambda batch: batch
                saved[app.step] = snapshot(app)
                uploads[app.step] = saves.save(state, root / f"step{app.step}")
        failed = {step for step, upload in uploads.items() if upload.exception()}
        assert failed == {4, 8}, f"failed: {failed}"
    return {step: bits for step, bits in saved.items() if step not in failed}


# %%
# Then the checkpoints are judged: each has the bits of its step, the pointer names the newest, of
# the failed saves nothing is left. Last, damage to a copy: one byte in the middle of a shard.
# ``dcp.load`` takes it without a word and the sizes are right; the digests are not.


def prove(root: Path, device: torch.device, expected: dict[int, dict]) -> None:
    for step, bits in expected.items():
        assert_same_bits(load_app(root / f"step{step}", device), bits)
        assert not faults(root / f"step{step}", digests=True)
    assert committed_steps(root) == [10, 8, 6, 2] and not list(root.glob("*.incomplete"))
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
    device = start_rank()
    try:
        root = directory_of_rank_0(directory)
        expected = train(build_app(device), root, device)
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
