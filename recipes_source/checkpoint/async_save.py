# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, checkpoint/async_save.py
"""
Save without stopping: ``async_save``
=====================================

Let training go on while a checkpoint is written. ``async_save`` of ``torch.distributed.checkpoint``
(DCP) stops training only for a copy to host memory; a thread writes that copy during the next
steps. ``async_save`` alone can lose the last checkpoint. It can end a run because one disk is full.
It can leave a directory that loads without an error and holds wrong values. This file closes these
gaps.

**When not to bother:** the state is small or you save rarely (call ``dcp.save``), or the host has
no room for a second copy of what all its ranks hold. If the copy itself takes too long,
:doc:`pinned_staging` makes it fast and :doc:`saves_beside_training` hides it.

**Scope.** A state dict of plain tensors, DTensors, numbers and text, on any number of ranks that
share a file system. All but DTensors must be the same on all ranks. With
``check=SameOnAllRanks()``, as below, the first save of any other state raises on every rank; later
saves compare all but the values of plain tensors. Without it, nothing checks the state.
:doc:`state_to_save` says how to get a state dict that a run can resume from, and how to load it.

.. result-gain:: checkpoint_stall
   :rows: async_save pinned overlapped_writer
   :field: cost_s
   :where: model=llama-1b step=long loop=reads compiled=no storage=memory

   :doc:`pinned_staging` has ``PinnedStager``, :doc:`saves_beside_training` ``CheckpointManager``.

This is the loop, with ``get_state_dict`` of ``torch.distributed.checkpoint.state_dict``:

.. literalinclude:: async_save.py
   :pyobject: train

Copy ``AsyncCheckpoints``, the first block of code below. It needs only torch and NumPy. Two more
parts are in ``_checks.py``: ``NamedWhenComplete`` and ``SameOnAllRanks``. ``AsyncCheckpoints``
works without them. But then a killed save leaves a directory that looks like a complete checkpoint,
and nothing compares the ranks.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * what a save costs the training thread, and what runs meanwhile
      * how to tell a complete checkpoint from an incomplete one
      * how a save can fail, and what must survive that

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later with NumPy, CPU or GPU, any number of ranks in a process group (one rank, too)
      * host memory for one copy of each rank's shards

.. verification-badge::

The idea
--------

An asynchronous save has two parts. *Staging* copies each rank's shards to host memory. The
*upload* serializes and writes that copy. After staging, the optimizer may change the weights
again.

.. lanes:: Schematic. Only staging stops training; the upload runs during the next steps.

   training:  0-4 step 1; 4-6 stage !; 6-10 step 2; 10-14 step 3; 14-18 step 4
   upload:    6-15 write checkpoint 1 ~
   @6 async_save returns
"""

# %%
# The block to copy
# -----------------
# 1. **A group of its own.** The upload thread talks to the other ranks. If training uses the same
#    gloo group at the same time, their messages mix, and the ranks abort or hang.
# 2. **One save at a time.** Two saves would need two copies of the state in host memory. Uploads
#    that share a group, a writer or a stager damage each other without an error.
# 3. **A failed save costs one checkpoint.** The save's future keeps the error. It is often a
#    ``CheckpointException``, which derives from ``BaseException``: ``except Exception`` does not
#    catch it. The next ``save`` logs the error and goes on. If no save follows, leaving the
#    ``with`` block raises it.
# 4. **The last save is awaited.** Leaving the ``with`` block waits for it. If an exception leaves
#    the block, the block still waits, and no other save begins. If the other ranks never join
#    this save, the wait ends after ``PATIENCE``. (The upload thread cannot be interrupted, and
#    Python waits for it at exit in any case.)
#
# ``per_thread_copy_ahead=0``: the writer need not copy ahead, because the state is in host memory
# already. By default it would wait for the compute stream once per tensor, and an upload could take
# as many training steps as there are tensors.

import logging
import operator
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager

LOG = logging.getLogger(__name__)
PATIENCE = timedelta(minutes=10)  # how long a rank that has written waits for the slowest one


class AsyncCheckpoints:
    """Save state dicts asynchronously, each to ``root/step<N>``, one save at a time.

    All ranks construct it, call ``save`` at the same steps and leave its ``with`` block. Two parts
    are in ``_checks.py``: a name that only a complete checkpoint gets
    (``writer=NamedWhenComplete``), and an error if ranks differ (``check=SameOnAllRanks()``).

    Args:
        root: a directory that all ranks see.
        stager: copies the state to host memory; torch's pageable copy if None. Its copy ends before
            the call returns, or it makes the next optimizer step wait for the copy, as
            ``OverlappedStager`` does.
        writer: called with a directory and options of ``FileSystemWriter``.
        check: called with step, state and group before each save; raises on all ranks or on none.

    Raises:
        TypeError: the stager is torch's ``DefaultStager``.
    """

    def __init__(
        self,
        root: Path,
        stager: object | None = None,
        writer: Callable[..., FileSystemWriter] = FileSystemWriter,
        check: Callable[[int, dict, dist.ProcessGroup], None] | None = None,
    ) -> None:
        if isinstance(stager, DefaultStager):
            raise TypeError("nothing waits for DefaultStager's copy: see default_stager.py")
        self.root = root
        self.stager = stager
        self.writer = writer
        self.check = check
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.upload: Future | None = None
        self.uploading = ""  # which checkpoint
        self.has_failed_alone = False

    def save(self, step: int, state: dict) -> None:
        """Stage ``state`` and write it on another thread.

        Waits for the save before it. If that one failed, logs its error.

        Args:
            step: how many steps have been taken. The checkpoint is named after it.
            state: the result of ``get_state_dict``, called now and on this thread. For a
                ``Stateful`` object, pass the result of its ``state_dict()``, not the object.

        Raises:
            TypeError: ``step`` is no whole number.
            RuntimeError: an earlier save could not be staged on this rank. End the job.
        """
        if self.has_failed_alone:
            raise RuntimeError("an earlier save failed on this rank alone: end the job")
        name = f"step{operator.index(step)}"
        self.end_last()
        if self.check is not None:
            self.check(step, state, self.group)
        self.uploading = name
        self.has_failed_alone = True  # if the call raises: the others are in it, and wait
        saved = dcp.async_save(
            state,
            storage_writer=self.writer(self.root / name, per_thread_copy_ahead=0),
            async_stager=self.stager,
            process_group=self.group,
        )
        self.has_failed_alone = False
        self.upload = getattr(saved, "upload_completion", saved)

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
            failures = getattr(error, "failures", {})  # of a CheckpointException, by rank
            causes = {rank: cause for rank, (cause, _) in failures.items()}
            raise RuntimeError(f"{self.uploading} is not saved: {causes or error!r}") from error

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
# What it leaves to ``_checks.py``
# --------------------------------
# **A name for complete checkpoints alone.** DCP writes ``.metadata`` last, yet ``.metadata`` does
# not prove that a checkpoint is complete. Suppose the process group is destroyed before the
# upload thread begins its save. The thread then finds no group and acts as if its rank were the
# only one. Each rank writes its files and ``.metadata`` over those of the others. The directory
# loads without an error, and a part of its weights was never written. Saving a step twice into
# one directory can do the same damage. So the files go to ``<directory>.incomplete``. Rank 0
# counts the ranks before any of them writes, and removes the suffix when all have written. **A
# directory without the suffix is complete.**
#
# .. literalinclude:: /recipes_source/checkpoint/_checks.py
#    :pyobject: NamedWhenComplete
#
# **A comparison of ranks.** DCP assumes that a plain tensor, one that is no DTensor, has the same
# values on all ranks, and saves those of one rank. It does the same with numbers. If the values
# differ (BatchNorm's statistics under DDP, a moment that an optimizer made of its shard, the
# position of a data loader), those of the other ranks are lost without an error. So ``fact_of``
# describes each leaf of the state dict, and the ranks compare the descriptions. They compare
# digests of plain tensors at the first save alone: for a digest, the host waits for the device
# and reads the whole tensor.
#
# .. dropdown:: ``SameOnAllRanks``, and what is a fact
#
#    .. literalinclude:: /recipes_source/checkpoint/_checks.py
#       :pyobject: SameOnAllRanks
#
#    .. literalinclude:: /recipes_source/checkpoint/_checks.py
#       :pyobject: fact_of
#
# Run it, and prove it
# --------------------
# ``train`` is the loop from the top of the page. Right after a save, it asks for its next batch.
# There the proof copies the state, and the checkpoint must hold the same bits. After that, three
# saves must fail: where a file is in the way, where ranks differ, where a rank is missing. The
# lines ``is not saved`` and ``refused`` below are expected. Toys and comparisons of bits are in
# ``_checks.py``, too.

import argparse
import tempfile
from collections.abc import Iterable

import torch
from _checks import (
    SAVE_EVERY,
    NamedWhenComplete,
    SameOnAllRanks,
    assert_all_right,
    assert_right,
    build,
    directory_of_rank_0,
    start_rank,
    watched_batches,
)
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[torch.Tensor], root: Path
) -> None:
    with AsyncCheckpoints(root, writer=NamedWhenComplete, check=SameOnAllRanks()) as checkpoints:
        for step, batch in enumerate(batches, start=1):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % SAVE_EVERY == 0:
                of_model, of_optimizer = get_state_dict(model, optimizer)
                checkpoints.save(step, {"model": of_model, "optimizer": of_optimizer})


def fail_to_save(root: Path) -> None:
    """Where a file is in the way, where ranks differ, where a rank is missing."""
    (root / "step7.incomplete").touch()
    state = {"ones": torch.ones(3)}
    with AsyncCheckpoints(root, writer=NamedWhenComplete, check=SameOnAllRanks()) as checkpoints:
        checkpoints.save(7, state)
        checkpoints.save(8, state)
        try:
            checkpoints.save(9, {"rank": dist.get_rank(), "dtype": torch.int8})
        except ValueError as error:
            print("refused:", error)
    assert not (root / "step7").exists(), "a failed save has a name"
    assert_right(root / "step8", state)
    assert not (root / "step9.incomplete").exists(), "a state that cannot be saved was written"
    writer = NamedWhenComplete(root / "step10")
    writer.ranks += 1
    try:
        dcp.save(state, storage_writer=writer)
    except CheckpointException as error:
        print("refused:", error.failures[0][0])
    assert not (root / "step10").exists(), "a checkpoint that lacks a rank has a name"


def main(directory: Path) -> None:
    device = start_rank()
    root = directory_of_rank_0(directory)
    model, optimizer = build(device)
    expected = {}
    train(model, optimizer, watched_batches(model, optimizer, device, expected), root)
    assert_all_right(root, expected)
    fail_to_save(root)
    dist.barrier()
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
# pageable host memory and copies the state into it, far below the rate of the link. Three rows
# are of other pages: ``PinnedStager`` of :doc:`pinned_staging`, which changes the memory and
# nothing else, ``OverlappedStager`` of :doc:`default_stager`, and ``CheckpointManager.save`` of
# :doc:`saves_beside_training`. ``dcp.save`` blocks. :doc:`/guide/measured` explains the columns.
#
# .. result-table:: checkpoint_stall
#    :rows: none dcp_save async_save pinned overlapped_stager overlapped_writer
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
# ranks. **DDP shards nothing:** each rank stages the whole state, eight copies on a node of eight.
#
# What breaks if you remove a line
# --------------------------------
# Each edit below was made and run when this page was built. Some of this damage depends on
# timing: a write may happen to end in time. There the test holds the write back, or makes ranks
# enter two collectives in opposite order, so that the damage is certain.
#
# .. recipe-controls::
#
# Known limits
# ------------
# * Plain tensors are compared at the first save alone, by their SHA-256. If they differ later,
#   only one rank's values are saved.
# * A save fails if a checkpoint of the same name exists. A job that goes back to an earlier step
#   must first move the later checkpoints away. ``CheckpointManager`` of
#   :doc:`saves_beside_training` does that.
# * A rank that dies during the upload fails that upload on the other ranks too (``Connection
#   closed by peer``). Their group is gone, so their next save raises.
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
#   tutorial whose loop this file completes
