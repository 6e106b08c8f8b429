# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, checkpoint/saves_beside_training.py
"""
Saves during training
=====================

One object around your loop saves checkpoints, deletes old ones, resumes, and saves before a
preemption. A save copies the state during the next step's forward and backward, and a thread writes
it during the steps after that. Checkpoints are durable and verified. A job that was killed goes on as
if nothing had happened: same losses, same bits.

.. result-gain:: checkpoint_stall
   :rows: overlapped_writer torch_checkpointing default_stager_ordered default_stager_2.13 async_save
   :field: cost_s
   :where: model=llama-1b step=long loop=reads compiled=no storage=memory

   Most eager models are bound by the host; there a save costs more: see *What it buys*.

.. index::
   single: save before exit on SIGTERM
   single: SLURM requeue, preemption, spot instance
   single: position of the data loader after a resume
   single: checkpoints in S3 or another bucket

**When not to bother:** your run is short enough to start again, or its state is a few megabytes. To
learn how such saves work, read :doc:`async_save`, :doc:`pinned_staging` and :doc:`default_stager`
first: each is one file without this library.

.. code-block:: python

   import sys

   from overlap_recipes.checkpoint import CheckpointManager, TrainingState

   state = TrainingState(model, optimizer, scheduler=scheduler, per_rank={"data": loader})
   with CheckpointManager("checkpoints", state, keep_last=2) as checkpoints:
       done = checkpoints.resume()  # 0 in a new run
       for step, batch in enumerate(loader, done + 1):
           train_step(batch)  # ends with optimizer.step() and scheduler.step()
           leave = checkpoints.preempted()  # SIGTERM has come to a rank
           if leave or step % 100 == 0:
               checkpoints.save(step)
           if leave:
               break
   sys.exit(checkpoints.exit_code)

``loader`` saves its position, as torchdata's ``StatefulDataLoader`` does. A stock ``DataLoader`` is
refused, and the error says what to do. Exit code 85 means: saved, start me again. ``torchrun`` reports
it as a crash, and itself ends with 1. :doc:`/guide/cluster` has job files for schedulers.

Your project needs the package ``overlap_recipes``: ``pip install .`` in the repository, or a copy of
its folder ``overlap_recipes``. It needs torch and NumPy.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * what a resumed job needs to continue exactly
      * which two orderings let a copy run during training
      * how to keep, check and delete checkpoints, and to leave before SIGKILL

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later on Linux, any number of ranks, CPU or GPU
      * page-locked host memory for one copy of each rank's shards
      * a directory that all ranks see, or a URL such as ``s3://bucket/run``

.. verification-badge::

The idea
--------

Forward and backward only read the weights. So a copy that begins after one optimizer step and ends
before the next one sees the weights of a single step. The copy engine does it while the compute cores
work. The optimizer waits for the copy, on the device; the host waits for nothing.

.. lanes:: Schematic. The copy runs during the next step, the write during the steps after it.

   training:  0-4 step 1; 4-4.4 save; 4.4-8 step 2; 8-12 step 3; 12-12.4 save; 12.4-16 step 4
   copy:      4.4-6.5 to host memory ~; 12.4-14.5 to host memory ~
   write:     6.5-11 files ~; 11-11.6 name ~; 14.5-18 files ~
   @4.4 the copy waits for the step
   @8 the optimizer waits for the copy
"""

# %%
# The job
# -------
# A stock Transformer with dropout, AdamW, a schedule, and a loader that saves its position. The states of
# all four must be restored. So must the random number generators, for dropout: ``TrainingState`` saves
# them unasked.

import argparse
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

from overlap_recipes.checkpoint import AGAIN, CheckpointManager, TrainingState
from overlap_recipes.ranks import start_rank

VOCABULARY, WIDTH, LENGTH, BATCH = 16384, 64, 16, 4  # tokens, features, tokens, sequences
LAST_STEP, SAVE_EVERY = 12, 4


class Loader:
    """Batches of token ids of this rank, (BATCH, LENGTH) int64, and how many have been taken."""

    def __init__(self) -> None:
        self.taken = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.taken < LAST_STEP:
            seed = 1000 * self.taken + dist.get_rank()
            self.taken += 1
            generator = torch.Generator().manual_seed(seed)
            yield torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.taken = state_dict["taken"]


class Job:
    """What a training script has."""

    def __init__(self, device: torch.device, seed: int) -> None:
        torch.manual_seed(seed)
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=64, batch_first=True)
        encoder = nn.TransformerEncoder(layer, num_layers=2)
        head = nn.Sequential(nn.Linear(WIDTH, VOCABULARY), nn.LogSoftmax(dim=-1))
        self.model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), encoder, head).to(device)
        for unit in (*encoder.layers, self.model):
            fully_shard(unit)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, LAST_STEP)
        self.loader = Loader()

    def step(self, tokens: torch.Tensor) -> float:
        """Train on a batch; returns the loss."""
        with sdpa_kernel(SDPBackend.MATH):  # a GPU's faster ones add in any order
            scores = self.model(tokens[:, :-1])
            loss = nn.functional.nll_loss(scores.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss.item()


# %%
# The loop
# --------
# The block from the top. ``before_step`` lets the proof interrupt the job.


def train(
    job: Job, root: Path, device: torch.device, before_step: Callable[[int], None]
) -> tuple[int, dict[int, float]]:
    """Train until LAST_STEP or SIGTERM; returns the exit code, and the losses by step."""
    losses = {}
    state = TrainingState(
        job.model, job.optimizer, scheduler=job.scheduler, per_rank={"data": job.loader}
    )
    with CheckpointManager(root, state, keep_last=2) as checkpoints:
        done = checkpoints.resume()
        for step, batch in enumerate(job.loader, done + 1):
            before_step(step)
            losses[step] = job.step(batch.to(device))
            leave = checkpoints.preempted()
            if leave or step % SAVE_EVERY == 0:
                checkpoints.save(step)
            if leave:
                break
    return checkpoints.exit_code, losses


# %%
# A save
# ------
# ``save`` takes a step, not a path, and makes the checkpoint's name from it.
#
# .. literalinclude:: /overlap_recipes/checkpoint/manager.py
#    :language: python
#    :pyobject: CheckpointManager.save
#
# Two orderings make it right. The copies run on a side stream, which first waits for the optimizer step
# that training has queued. The next optimizer step waits for an event after the copies: a hook of the
# optimizer queues that wait. Tensors below 1 MiB, and those that forward changes, are first copied on
# the device.
#
# .. literalinclude:: /overlap_recipes/checkpoint/staging.py
#    :language: python
#    :pyobject: Staging.queue
#
# .. literalinclude:: /overlap_recipes/checkpoint/staging.py
#    :language: python
#    :pyobject: Staging.before_update
#
# The writer thread flushes the files and stores their digests. When **every** rank has done so, rank 0
# gives the checkpoint its name. In a directory that is a rename; in a store, one object that lists the
# others. So a checkpoint called ``step<N>`` is complete.
#
# Your loop may read a scalar (``loss.item()``) during the copies. A copy engine stays with a stream as
# long as that has a copy ready, so the read would wait for all of them. Therefore a few bytes are copied
# *to* the device before each piece. The other copy engine does that, and meanwhile the first serves the
# read (`as TorchRec saw <https://github.com/meta-pytorch/torchrec/pull/4303>`__).
#
# .. literalinclude:: /overlap_recipes/checkpoint/copies.py
#    :language: python
#    :pyobject: Copies.queue_rows
#
# DCP's own writer plans at each save, and holds Python's interpreter lock, which training needs for each
# kernel. Here DCP plans **once**: a later save is a few system calls, which release the lock.
#
# .. literalinclude:: /overlap_recipes/checkpoint/writer.py
#    :language: python
#    :pyobject: write_file
#
# A restart
# ---------
# All ranks load the newest checkpoint whose files have the right sizes, and compare digests. Newer
# ones are renamed, so that no resume finds them. :doc:`load` has more.
#
# .. literalinclude:: /overlap_recipes/checkpoint/manager.py
#    :language: python
#    :pyobject: CheckpointManager.resume
#
# SIGTERM sets a flag. ``preempted()`` reduces the flag over all ranks. It returns the result of the
# reduction that began a step earlier, so no rank waits. All leave after the same step.
#
# Run it, and prove it
# --------------------
# One job runs to its end. Another is interrupted twice, by SIGTERM to one rank, and by an exception
# in the middle of a step. Each time a new job, built with another seed, resumes. Its losses and its
# weights at the end must be those of the first job, to the last bit.


class Interrupted(Exception):
    """A job that ends in the middle of a step."""


def undisturbed(step: int) -> None:
    pass


def terminated(step: int) -> None:
    if step == 6 and dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGTERM)


def raising(step: int) -> None:
    if step == 10:
        raise Interrupted


def prove_same_job(directory: Path, device: torch.device) -> None:
    first = Job(device, seed=0)
    exit_code, losses = train(first, directory / "whole", device, undisturbed)
    assert exit_code == 0

    root = directory / "interrupted"
    exit_code, until_signal = train(Job(device, seed=0), root, device, terminated)
    assert exit_code == AGAIN, "the job did not say that it is to be started again"
    left = max(until_signal)
    print(f"SIGTERM in step 6 to one rank: all saved step {left} and left")
    try:
        train(Job(device, seed=1), root, device, raising)
    except Interrupted:
        print("the next job raised in step 10, two steps after a save")
    last = Job(device, seed=2)
    exit_code, until_end = train(last, root, device, undisturbed)

    assert exit_code == 0
    assert min(until_end) == 9, f"resumed before step {min(until_end)}, not after step 8"
    for step, loss in (until_signal | until_end).items():
        assert loss == losses[step], f"step {step}: loss {loss}, uninterrupted {losses[step]}"
    for (name, one), other in zip(
        first.model.named_parameters(), last.model.parameters(), strict=True
    ):
        assert torch.equal(one.to_local(), other.to_local()), f"{name} differs at the end"
    print(
        f"steps {min(until_end)} to {LAST_STEP} and the weights: every bit as without interruption"
    )

    kept = sorted(path.name for path in root.glob("step*") if path.is_dir())
    assert kept == ["step12", "step8"], f"kept {kept}"


def main(directory: Path) -> None:
    device = start_rank()
    of_rank_0 = [directory]
    dist.broadcast_object_list(of_rank_0)  # a checkpoint is one directory for all ranks
    prove_same_job(of_rank_0[0], device)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, help="where checkpoints go (default: temporary)")
    with tempfile.TemporaryDirectory() as temporary:
        main(parser.parse_args().dir or Path(temporary))

# %%
# Keep, list, verify, prune
# -------------------------
# ``keep_last=2`` keeps the two newest, ``keep_every=10_000`` those of steps 10,000, 20,000 and so on, too.
# An old one is deleted once a newer one is durable.
#
# .. code-block:: bash
#
#     python -m overlap_recipes.checkpoint list checkpoints
#     python -m overlap_recipes.checkpoint verify checkpoints  # every byte; exit code 1: damaged, or none
#     # the rules of your job; without --dry-run it deletes, unless a job writes to that directory
#     python -m overlap_recipes.checkpoint prune checkpoints --keep-last 3 --keep-every 10000 --dry-run
#
# ``prune`` looks at names and sizes alone: run ``verify`` first. Delete renamed ones
# (``.set-aside-``) yourself.
#
# Leave in time
# -------------
# SIGTERM asks the job to leave: ``preempted()`` is true, it saves, and ends with 85. ``grace_s``
# (30 by default) must cover two steps, the rest of an earlier save, and a save. Otherwise the rank
# ends with 86, and the job resumes from the save before. Signal ``torchrun``, not a rank; else
# ``torchrun`` restarts all.
#
# :doc:`/guide/cluster` has files that ran under Slurm, Ray Train and ``torchrun`` on several hosts.
#
# For other signals give ``grace_s={SIGUSR1: 300}``. On a thread, as under Ray, give ``grace_s=None`` and
# call ``ask_to_leave()``.
#
# Where checkpoints lie
# ---------------------
# In a directory that all ranks see. If the hosts share none, in a store: ``"s3://bucket/run"`` needs
# ``fsspec``, ``obstore`` (or ``s3fs``, which is slower), and credentials in the environment.
#
# * Some disks and mounts report a finished ``fsync`` too early.
# * Two jobs cannot share a root. In a directory a file lock refuses the second (NFS has it between hosts
#   from version 4 on, Lustre if mounted with ``flock``). A store has no locks: there the second job takes
#   the root, and each later save of the first fails.
# * A store that ignores ``If-None-Match`` is refused on entry. Tested: SeaweedFS.
# * A killed upload leaves parts that no listing shows and that you pay for. Add this rule to the
#   bucket:
#
# .. code-block:: json
#
#     {"Rules": [{
#         "ID": "uploads that never end",
#         "Status": "Enabled",
#         "Filter": {"Prefix": "run/"},
#         "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 2}
#     }]}
#
# What it buys
# ------------
# What a save costs training, and how much slower steps are while it is written
# (:doc:`/guide/measured`). ``CheckpointManager.save`` was measured without retention:
#
# .. result-table:: checkpoint_stall
#    :rows: none dcp_save async_save pinned overlapped_writer
#    :where: step=long storage=memory
#
# A fault was injected into a job while it wrote, and a second job resumed. *Lost or wrong*: it resumed
# from an older step than the last durable one, or with other bits.
#
# .. result-table:: soak
#    :rows: kill raise full truncated flipped
#    :where: point=writing
#
# The same faults, other ways to save:
#
# .. result-table:: save_faults
#
# The copies alone, at once and with gaps:
#
# .. timeline:: staging_copies cure_at_once cure_gaps
#
# What breaks if you remove a line
# --------------------------------
# Each edit of the library was made and run when this page was built.
#
# .. recipe-controls::
#
# Memory
# ------
# Page-locked host memory for one save of each rank (``host_bytes`` bounds it): for parameters and AdamW in
# float32, 12 bytes per parameter, divided by the number of ranks. On storage, room for ``keep_last`` + 1
# checkpoints.
#
# Known limits
# ------------
# These can cost you a checkpoint or a result.
#
# .. warning::
#
#    Code that changes saved tensors without an optimizer of torch (an average of weights, a custom
#    kernel) must call ``checkpoints.before_update()`` first. Nothing tells you if you forget.
#
# * ``TrainingState`` saves what you give it, and nothing else: ``scheduler=``, ``ema=``,
#   ``per_rank={"data": loader}``. A loader that you do not pass begins again.
# * Buffers that differ between ranks, as BatchNorm's: all ranks resume with those of rank 0. The first
#   save names them in a warning.
# * After an exception the block waits at most 30 s for a write.
#
# These raise, and say what to do:
#
# * at the first save, a state that could not be restored exactly
# * a step older than the newest; each save after a rank has died or come too late
#
# Further reading
# ---------------
# * :doc:`load`: how the bytes come back, on any number of ranks
# * :doc:`/guide/reference`: ``Saves``, for directories and names of your own
# * :doc:`state_to_save`: how to test that a checkpoint is right
