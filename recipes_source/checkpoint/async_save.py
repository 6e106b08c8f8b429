# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, checkpoint/async_save.py
"""
Save without stopping: ``async_save``
=====================================

Let training go on while a checkpoint is written. ``async_save`` of
``torch.distributed.checkpoint`` (DCP) stops training only for a copy to host memory; a thread
writes that copy during the next steps. Used as it comes, it can lose the last checkpoint, end a run
because one disk is full, or leave a directory that loads and is wrong. This recipe closes these
gaps.

**When not to bother:** the state is small or you save rarely (call ``dcp.save``), or the host has
no room for a second copy of what all its ranks hold. If the copy itself takes too long,
:doc:`pinned_staging` makes it fast and :doc:`overlapped_stager` hides it.

This is the loop; ``app`` is the ``AppState`` of :doc:`app_state`:

.. literalinclude:: async_save.py
   :pyobject: train

Copy ``NamedWhenComplete`` and ``AsyncCheckpoints`` from this file, with the two constants above
them. For ``AppState``, your project needs the package ``overlap_recipes``: ``pip install .`` in this
repository, or a copy of its folder ``overlap_recipes``.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * what a save costs the training thread, and what runs beside it
      * how to tell a complete checkpoint from an incomplete one
      * how a save can fail, and what must survive that

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, CPU or GPU, any number of ranks in a process group (one rank, too)
      * a model sharded with ``fully_shard`` (FSDP2); DDP and plain modules: see *Memory*
      * host memory for one copy of each rank's shards

.. verification-badge::

The idea
--------

An asynchronous save has two parts. *Staging* copies each rank's shards to host memory. The
*upload* serializes and writes that copy. After staging, the optimizer may change the weights
again.

.. lanes:: Schematic. Only staging stops training; the upload runs beside the next steps.

   training:  0-4 step 1; 4-6 stage !; 6-10 step 2; 10-14 step 3; 14-18 step 4
   upload:    6-15 write checkpoint 1 ~
   @6 async_save returns
"""

# %%
# Imports
# -------
# The model and the test come from :doc:`state_to_save`.

import argparse
import logging
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from state_to_save import (  # noqa: F401 (later recipes take the model and the test from here)
    AppState,
    SampleCounter,
    assert_same_bits,
    build_app,
    directory_of_rank_0,
    forward_backward,
    leaves,
    load_app,
    next_batch,
    same_bits,
    snapshot,
    staged_bytes,
    start_rank,
    train_step,
)
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

LOG = logging.getLogger(__name__)
PATIENCE = timedelta(minutes=10)  # how long a rank that has written waits for the slowest one

# %%
# Name only what is complete
# --------------------------
# DCP writes ``.metadata`` last, yet ``.metadata`` does not prove that a checkpoint is complete.
# Suppose an exception destroys the process group while an upload waits its turn. The upload thread
# finds no group and takes its rank for the only one. Each rank then writes its files and
# ``.metadata`` over those of the others. The directory loads without an error, and a part of its
# weights was never written. Saving a step twice into one directory can do the same damage to what
# the directory held before.
#
# So the files go to ``<directory>.incomplete``, and rank 0 removes the suffix when all ranks have
# reported. **A directory without the suffix is complete.** Two checks guarantee that: every rank
# takes part, and all of them write the same checkpoint. Without the second check, a rank whose
# ``save`` raised could go on, and its next save would be paired with the current save of the
# others.


class NamedWhenComplete(FileSystemWriter):
    """Write a checkpoint of ``ranks`` ranks; give it its name only when all have written it."""

    def __init__(self, directory: Path, ranks: int, **options) -> None:
        super().__init__(f"{directory}.incomplete", **options)
        self.ranks = ranks

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return replace(super().prepare_local_plan(plan), storage_data=self.path.name)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0, before any rank writes."""
        if [plan.storage_data for plan in plans] != [self.path.name] * self.ranks:
            raise RuntimeError(f"not all {self.ranks} ranks write {self.path.name}")
        for file in self.path.iterdir():  # left by a save that was interrupted
            file.unlink()
        return super().prepare_global_plan([replace(plan, storage_data=None) for plan in plans])

    def finish(self, metadata: Metadata, results: list) -> None:
        """On rank 0, when all have written."""
        super().finish(metadata, results)
        named = self.path.with_suffix("")
        if named.exists():  # the job went back to an earlier step and came here again
            named.rename(f"{named}.replaced-{time.time_ns()}")
        self.path.rename(named)


# %%
# The saves
# ---------
# 1. **A group of its own.** The upload thread talks to the other ranks. If training uses the same
#    gloo group at the same time, their messages mix, and the ranks abort or hang.
# 2. **One save at a time.** Two saves would need two copies of the state in host memory. Uploads
#    that share a group, a writer or a stager damage each other without an error.
# 3. **A failed save costs one checkpoint.** Its error waits in the future, often as a
#    ``CheckpointException``, which derives from ``BaseException``. The next ``save`` logs that
#    error and goes on. If no save follows, leaving the ``with`` block raises it.
# 4. **The last save is awaited**, also when an exception leaves the ``with`` block; no other save
#    begins then. If the other ranks never join this save, ``PATIENCE`` ends the wait. (Nobody can
#    interrupt the thread, and Python waits for it at exit in any case.)


class AsyncCheckpoints:
    """Save one application state asynchronously, each time to ``root/step<N>``, one save at a time.

    All ranks construct it, call ``save`` at the same steps and leave its ``with`` block.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.upload: Future | None = None
        self.uploading = ""  # which checkpoint

    def save(self, app: AppState) -> None:
        """Stage ``app`` on the calling thread and write it on another thread.

        Waits for the previous save first. If that one failed, logs its error.
        """
        self.end_last()
        self.uploading = f"step{app.step}"
        writer = NamedWhenComplete(self.root / self.uploading, self.group.size())
        self.upload = dcp.async_save({"app": app}, storage_writer=writer, process_group=self.group)

    def wait(self) -> None:
        """Return when the save in flight is on disk.

        Raises:
            RuntimeError: it failed, on this rank or another; other checkpoints are complete.
        """
        if self.upload is None:
            return
        error = self.upload.exception()  # waits; if interrupted, the save is still in flight
        self.upload = None
        if error is not None:
            failures = getattr(error, "failures", {})
            causes = {rank: cause for rank, (cause, _) in failures.items()} or repr(error)
            raise RuntimeError(f"{self.uploading} is not saved: {causes}") from error

    def end_last(self) -> None:
        """Wait for the save in flight, and log its error: training goes on without it."""
        try:
            self.wait()
        except RuntimeError as error:
            LOG.error("%s", error)

    def close(self) -> None:
        """Wait as :meth:`wait` does, and destroy the process group."""
        try:
            self.wait()
        finally:
            dist.destroy_process_group(self.group)

    def __enter__(self) -> "AsyncCheckpoints":
        return self

    def __exit__(self, kind: type | None, *_) -> None:
        if kind is not None:
            self.end_last()  # a second error must not hide the one that leaves the block
        self.close()


# %%
# Run it, and prove it
# --------------------
# ``train`` is the loop from the top of the page. When it asks for its next batch, it has just
# saved, so the checkpoint must hold the state of that moment. After that, two saves must fail: the
# lines ``is not saved`` and ``refused`` below are expected.

STEPS = 6
SAVE_EVERY = 2  # steps


def train(app: AppState, batches: Iterable[torch.Tensor], root: Path) -> None:
    with AsyncCheckpoints(root) as checkpoints:
        for batch in batches:
            app.model(batch).square().mean().backward()
            app.optimizer.step()
            app.optimizer.zero_grad()
            app.step += 1
            if app.step % SAVE_EVERY == 0:
                checkpoints.save(app)


def watched_batches(app: AppState, device: torch.device, saved: dict) -> Iterator[torch.Tensor]:
    """Batches up to step STEPS; store in ``saved`` what each checkpoint must hold."""
    while app.step < STEPS:
        yield next_batch(app, device)
        if app.step % SAVE_EVERY == 0:
            saved[app.step] = snapshot(app)


def assert_right(root: Path, device: torch.device, saved: dict[int, dict]) -> None:
    for step, bits in saved.items():
        assert_same_bits(load_app(root / f"step{step}", device), bits)
    print(f"checkpoints of steps {list(saved)} loaded back, every bit equal")


def fail_to_save(app: AppState, root: Path, device: torch.device) -> None:
    """Two saves that fail: one where a file is in the way, one that lacks a rank."""
    (root / "step7.incomplete").touch()
    with AsyncCheckpoints(root) as checkpoints:
        while app.step < STEPS + 2:
            train_step(app, device)
            checkpoints.save(app)
    assert not (root / "step7").exists()
    assert_right(root, device, {8: snapshot(app)})
    try:
        writer = NamedWhenComplete(root / "step9", dist.get_world_size() + 1)
        dcp.save({"app": app}, storage_writer=writer)
    except CheckpointException as error:
        print("refused:", error.failures[0][0])
    assert not (root / "step9").exists(), "a checkpoint that lacks a rank has a name"


def main(directory: Path) -> None:
    device = start_rank()
    try:
        root = directory_of_rank_0(directory)
        app, saved = build_app(device), {}
        train(app, watched_batches(app, device, saved), root)
        assert_right(root, device, saved)

        app = load_app(root / f"step{SAVE_EVERY}", device)  # go back, and train these steps again
        train(app, watched_batches(app, device, saved), root)
        assert_right(root, device, saved)
        fail_to_save(app, root, device)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, help="where checkpoints go (default: temporary)")
    with tempfile.TemporaryDirectory() as temporary:
        main(parser.parse_args().dir or Path(temporary))

# %%
# What it buys
# ------------
# Training no longer waits for storage. It still waits for staging: each save here allocates
# pageable host memory and copies the state into it, far below the rate of the link. ``pinned`` is
# the save of :doc:`pinned_staging`, which changes the memory and nothing else. ``dcp_save`` blocks.
# :doc:`/guide/measured` explains the columns.
#
# .. result-table:: checkpoint_stall
#    :rows: none dcp_save async_save pinned
#    :where: step=long storage=memory
#
# In the timeline, the training thread waits in the call while the state is copied:
#
# .. timeline:: checkpoint_stall async_save
#
# Memory
# ------
# Staging keeps one copy of this rank's part of the state in host memory until the upload ends:
#
# .. math::
#
#    \text{host bytes per rank} = \sum_{t\,\in\,\text{state}} \text{numel}(\text{local shard of } t)
#    \times \text{bytes per element}
#
# For parameters and AdamW in float32, that is 12 bytes per parameter, divided by the number of
# ranks.
#
# **DDP shards nothing.** Each rank stages the whole state: eight copies on a node of eight,
# although each tensor is written once. Under DDP, pass ``{}`` instead of ``{"app": app}`` on all
# ranks but rank 0. Then rank 0 alone stages and writes.
#
# What breaks if you remove a line
# --------------------------------
# Each edit below was made and run when this page was built. Where chance would decide (a write
# that happens to end in time), the test holds the write, or crosses two collectives, until the
# damage is certain.
#
# .. recipe-controls::
#
# Known limits
# ------------
# * A rank that dies during the upload fails that upload on the other ranks too (``Connection
#   closed by peer``). Their group is gone, so every later save is logged as failed. End the job.
# * A rank whose ``save`` raises (no host memory, a value that cannot be copied) must end the job.
#   If it goes on, all later saves of the job fail. The logs say so, and no wrong checkpoint gets a
#   name.
# * Several nodes need a file system that they share: all ranks write to one directory.
# * Torch 2.13's stagers do not copy a DTensor without dimensions (a scale that was replicated by
#   hand). The checkpoint holds its value at the time of the write. :doc:`overlapped_stager` copies
#   it.
# * ``FileSystemWriter(thread_count=2)`` or more loses the error of a writing thread
#   (`pytorch#191391 <https://github.com/pytorch/pytorch/issues/191391>`__). A full disk then looks
#   like success, and the directory gets its name. Keep the default of 1.
# * The directory is not flushed: after a power cut the last checkpoint may be gone.
#
# Further reading
# ---------------
# * `torch.distributed.checkpoint
#   <https://docs.pytorch.org/docs/stable/distributed.checkpoint.html>`__: the reference
# * `Asynchronous saving with DCP
#   <https://docs.pytorch.org/tutorials/recipes/distributed_async_checkpoint_recipe.html>`__: the
#   tutorial whose loops this recipe completes
