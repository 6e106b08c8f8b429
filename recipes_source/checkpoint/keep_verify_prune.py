# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.1, checkpoint/keep_verify_prune.py
"""
Keep, verify and prune checkpoints
==================================

Lose no checkpoint to a kill, a full disk, a power cut, or to your own cleaning up. A checkpoint of
``CheckpointManager`` is complete and durable on every rank, or it has no name. A damaged one is
found before a job trains on it. An old one goes when a newer one is durable. All of this happens
beside training.

**When not to bother:** you would start a lost run again. Or your storage commits by itself, as an
object store does (:doc:`object_storage`).

.. code-block:: python

    from overlap_recipes.checkpoint import CheckpointManager, TrainingState

    state = TrainingState(model, optimizer)
    with CheckpointManager("checkpoints", state, keep_last=3, keep_every=10_000) as checkpoints:
        done = checkpoints.resume()  # 0 in a new run
        for step, batch in enumerate(batches, done + 1):
            train_step(batch)
            if step % 1000 == 0:
                checkpoints.save(step)

The three newest checkpoints stay, and those of steps 10,000, 20,000 and so on. What else your run
needs to go on, a scheduler or the place in the data, goes into ``TrainingState``, too
(:doc:`saves_beside_training`). The package is a command:

.. code-block:: bash

    python -m overlap_recipes.checkpoint list checkpoints
    python -m overlap_recipes.checkpoint verify checkpoints  # every byte; exit code 1: damaged, or none
    # the rules of your job; without --dry-run it deletes, unless a job writes there
    python -m overlap_recipes.checkpoint prune checkpoints --keep-last 3 --keep-every 10000 --dry-run

Your project needs the package ``overlap_recipes``: ``pip install .`` in this repository, or a copy
of its folder ``overlap_recipes``. It needs torch alone.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * the five rules of a commit: write aside, flush, agree, rename, pointer
      * what tells a complete checkpoint from one that loads and is wrong
      * how to delete, and survive a crash half way
      * how often to save when a save costs next to nothing

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later on Linux, any number of ranks, CPU or GPU
      * one file system that all ranks see
      * room for one checkpoint more than you keep

.. verification-badge::

The idea
--------

What is called ``step8`` is whole. So a checkpoint gets its name last, and loses it first.

.. lanes:: Schematic. The name comes when all is on storage. The old one goes when the new one stays.

   every rank:  0-7 write shards aside; 7-9 flush; 9-12 digests, manifest
   rank 0:      13-15 rename; 15-17 flush; 17-19 pointer
   deletion:    19-21 rename step2; 21-23 flush; 23-28 delete files
   @13 all agree
   @17 step8 is durable
   @23 step2 has no name

All of it runs on the writing thread, by five rules:

1. **Write aside.** Shards go to ``step8.incomplete``. Whatever stops the save leaves that name.
2. **Flush before the rename.** A closed file is still in the page cache. Each rank flushes its files
   and the directory that lists them.
3. **Agree.** Rank 0 renames when *every* rank has reported that its part is on storage. If one
   failed, the save fails on all. What was written is removed, so that a full disk has room again.
4. **Rename once,** then flush the directory above. Else a power cut may undo the rename.
5. **Write the pointer last.** The file ``latest`` names the newest checkpoint, for people and other
   programs. It may be one save late.
"""

# %%
# The job
# -------
# A stock Transformer, AdamW, and the loop from the top. At step 4, the disk of the last rank is full:
# the save must fail on all ranks, and training goes on. Inside the block a second job asks for the
# same directory.

import argparse
import errno
import os
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from overlap_recipes.checkpoint import (
    CheckpointManager,
    TrainingState,
    committed_steps,
    faults,
    load,
    name_of,
)
from overlap_recipes.checkpoint.__main__ import main as command
from overlap_recipes.ranks import start_rank

WIDTH, LENGTH, BATCH = 64, 8, 4  # features, tokens, sequences
LAST_STEP, SAVE_EVERY, DISK_FULL_AT = 12, 2, 4


class Job:
    """What a training script has."""

    def __init__(self, device: torch.device, seed: int) -> None:
        torch.manual_seed(seed)
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=64, batch_first=True)
        self.device = device
        self.model = nn.TransformerEncoder(layer, num_layers=2).to(device)
        for unit in (*self.model.layers, self.model):
            fully_shard(unit)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.state = TrainingState(self.model, self.optimizer)

    def step(self) -> None:
        tokens = torch.randn(BATCH, LENGTH, WIDTH, device=self.device)
        self.model(tokens).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def bits(self) -> list[torch.Tensor]:
        """Copies of this rank's weights and moments."""
        tensors = []
        for parameter in self.model.parameters():
            moments = self.optimizer.state[parameter]
            tensors.append(parameter.detach())
            tensors.extend(moments[name] for name in sorted(moments))
        local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        return [tensor.clone() for tensor in local]


def train(job: Job, root: Path) -> dict[int, list[torch.Tensor]]:
    """Save every second step, keep two and every sixth; return the bits of each save."""
    saved = {}
    with CheckpointManager(root, job.state, keep_last=2, keep_every=6) as checkpoints:
        left = sorted(path.name for path in root.iterdir() if path.is_dir())
        assert not left, f"left by a crash, and still there: {left}"
        refuse_second_job(root, job.device)
        for step in range(1, LAST_STEP + 1):
            job.step()
            if step == DISK_FULL_AT:
                checkpoints.wait()
                with full_disk_of_last_rank():
                    failure = checkpoints.save(step).exception()
                assert failure is not None, "a save that lacked bytes was reported as done"
                print(f"step {step}: {failure}")
            elif step % SAVE_EVERY == 0:
                saved[step] = job.bits()
                checkpoints.save(step)
    return saved


def full_disk_of_last_rank():
    def no_room(*_) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    is_last = dist.get_rank() == dist.get_world_size() - 1
    return mock.patch.object(os, "pwritev", no_room if is_last else os.pwritev)


def refuse_second_job(root: Path, device: torch.device) -> None:
    second = Job(device, seed=1)
    try:
        with CheckpointManager(root, second.state):
            pass
    except RuntimeError as error:
        print(f"a second job: {error}")
    else:
        raise AssertionError("a second job was not refused")


# %%
# The commit
# ----------
# The writing thread calls ``write``, and ``commit`` when ``write`` has succeeded on all ranks. Rule 2
# needs two flushes: ``fsync`` of a file makes its content durable, of a directory the names in it.
#
# .. literalinclude:: /overlap_recipes/checkpoint/durable.py
#    :language: python
#    :pyobject: flush
#
# .. literalinclude:: /overlap_recipes/checkpoint/durable.py
#    :language: python
#    :pyobject: write_durably
#
# .. literalinclude:: /overlap_recipes/checkpoint/durable.py
#    :language: python
#    :pyobject: DurableSaves.write
#
# .. literalinclude:: /overlap_recipes/checkpoint/durable.py
#    :language: python
#    :pyobject: DurableSaves.commit
#
# What is complete
# ----------------
# DCP writes ``.metadata`` last, so many take its presence for completeness. It says which shards
# there should be, not whether these are the ones. A save that was torn between two ranks, or cut
# short by a full disk, has a ``.metadata``, and may load without an error and be wrong.
#
# So each rank leaves a *manifest* of its files: their sizes, and a CRC-32 of each MiB. It also says
# how many manifests there must be. Names and sizes are compared when a checkpoint is chosen, which
# costs next to nothing. The digests are compared with the bytes that a load reads, and by ``verify``
# with all.
#
# .. literalinclude:: /overlap_recipes/checkpoint/durable.py
#    :language: python
#    :pyobject: faults
#
# If the newest checkpoint turns out to be damaged, ``resume`` gives it another name
# (``.set-aside-``) and loads the one before it. If there is none, it raises. Nothing deletes what is
# damaged: that is up to you.
#
# What stays, what goes
# ---------------------
# Only complete checkpoints count: three damaged ones are no reason to delete the fourth. And nothing
# deletes a directory in one step. So a rename first takes the name away.
#
# .. literalinclude:: /overlap_recipes/checkpoint/retention.py
#    :language: python
#    :pyobject: to_delete
#
# .. literalinclude:: /overlap_recipes/checkpoint/retention.py
#    :language: python
#    :pyobject: delete
#
# Two jobs in one directory would remove each other's unfinished saves. It happens when a scheduler
# starts a job twice, or when old ranks still write. So a job locks a file, its *lease*. The kernel
# gives the lock back when the process ends. Whoever holds the lease may remove every leftover of a
# crash.
#
# .. literalinclude:: /overlap_recipes/checkpoint/retention.py
#    :language: python
#    :pyobject: take_lease
#
# How often to save
# -----------------
# A failure costs half an interval on average. If a save costs ``cost_s`` of training and a failure
# comes every ``mtbf_s``, the sum is smallest at Young's interval,
# :math:`\sqrt{2 \cdot \text{cost} \cdot \text{MTBF}}`. A hidden save costs so little that the
# storage decides: save when the last upload has ended.
#
# .. literalinclude:: /overlap_recipes/checkpoint/retention.py
#    :language: python
#    :pyobject: seconds_between_saves
#
# Run it, and prove it
# --------------------
# The directory holds what two crashes have left: an unfinished save, and a deletion half way. Behind
# the run, each checkpoint that stayed must have the bits of its step. Then two copies of the
# directory are damaged. In one, a byte of the newest checkpoint flips, and a job resumes: it must
# have the bits of the one before. In the other, the newest is cut short, and ``prune`` is to keep
# one: it must keep the one that is whole.


def prove_kept(root: Path, device: torch.device, saved: dict[int, list[torch.Tensor]]) -> None:
    kept = committed_steps(root)
    assert kept == [12, 10, 6], f"kept {kept}"
    assert (root / "latest").read_text() == "step12"
    for step in kept:
        other = Job(device, seed=1)
        load({"app": other.state}, root / name_of(step))
        assert_same(other.bits(), saved[step], f"step {step}")
    print(f"kept {kept}, every bit of each as it was saved")


def prove_damage_is_found(
    root: Path, device: torch.device, saved: dict[int, list[torch.Tensor]]
) -> None:
    copy = copied_by_rank_0(root, "flipped")
    if dist.get_rank() == 0:
        shard = copy / "step12" / "__0_0.distcp"
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    dist.barrier()
    assert not faults(copy / "step12"), "its sizes are right"
    job = Job(device, seed=1)
    with CheckpointManager(copy, job.state) as checkpoints:
        step = checkpoints.resume()
    assert step == 10, f"resumed from step {step}, and the newest that is whole is 10"
    assert_same(job.bits(), saved[10], "what was resumed")
    print(f"a byte of step12 has changed: resumed from step {step}, every bit")
    if dist.get_rank() == 0:
        shutil.rmtree(copy)


def prove_command(root: Path) -> None:
    copy = copied_by_rank_0(root, "cut")
    if dist.get_rank() == 0:
        os.truncate(copy / "step12" / "__0_0.distcp", 1000)
        assert command(["verify", str(root)]) == 0
        assert command(["verify", str(copy)]) == 1
        command(["prune", "--keep-last", "1", str(copy)])
        kept = committed_steps(copy)
        assert 10 in kept, f"kept {kept}: of these, none is whole"
        assert kept == [12, 10], f"kept {kept}"
        shutil.rmtree(copy)
    dist.barrier()


def copied_by_rank_0(root: Path, name: str) -> Path:
    copy = root.with_name(f"{root.name}-{name}")
    if dist.get_rank() == 0:
        shutil.copytree(root, copy)
    dist.barrier()
    return copy


def assert_same(found: list[torch.Tensor], saved: list[torch.Tensor], what: str) -> None:
    for one, other in zip(found, saved, strict=True):
        assert torch.equal(one, other), f"{what}: other bits than were saved"


def main(directory: Path) -> None:
    device = start_rank()
    of_rank_0 = [directory]
    dist.broadcast_object_list(of_rank_0)  # a checkpoint is one directory for all ranks
    root = of_rank_0[0] / "checkpoints"
    if dist.get_rank() == 0:
        (root / "step2.incomplete").mkdir(parents=True)
        (root / "step1.deleted").mkdir()
    dist.barrier()
    saved = train(Job(device, seed=0), root)
    prove_kept(root, device, saved)
    prove_damage_is_found(root, device, saved)
    prove_command(root)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, help="where checkpoints go (default: temporary)")
    with tempfile.TemporaryDirectory() as temporary:
        main(parser.parse_args().dir or Path(temporary))

# %%
# What it buys
# ------------
# Jobs of two ranks were struck while they wrote, and a second job resumed. *Lost or wrong* counts
# second jobs that chose an older step than the last durable one, or had other bits
# (:doc:`/guide/measured`).
#
# .. result-table:: soak
#    :rows: kill raise full truncated flipped
#    :where: point=writing
#
# The same faults, other ways to save, each resumed by its own rules:
#
# .. result-table:: save_faults
#
# What breaks if you remove a line
# --------------------------------
# Each edit of the library was made and run when this page was built. No run shows what a flush is
# for: a kill loses nothing that was written. The tests also look at each state that a power cut could
# leave behind each file operation of a job.
#
# .. recipe-controls::
#
# Memory and room
# ---------------
# Memory as :doc:`saves_beside_training` has it, and none for digests: the writing thread reads the
# files again, from the page cache, at a core's rate of CRC-32. On disk, room for
# ``keep_last`` + 1 checkpoints, since the new one is written before the oldest goes, and for those of
# ``keep_every``. A save looks for room before its first byte.
#
# Known limits
# ------------
# These can cost you a checkpoint:
#
# * ``fsync`` is a request. A disk with a volatile cache may lie about it, and a network file system
#   may be mounted to ignore it.
# * The lease is a file lock. On NFS it holds between hosts from version 4 on, on Lustre if it is
#   mounted with ``flock``. Elsewhere a second job on another host is not refused, or each job is, by
#   an error that says so.
# * Digests are of what the file system returns right behind the write. They find what changes later,
#   not what memory had changed before.
# * ``list`` and ``prune`` look at names and sizes. A checkpoint whose bytes have changed counts as
#   whole there: ``verify`` first.
#
# These are told:
#
# * A save of an older step than the newest in the directory raises: resume from it, or take another.
# * A rank that dies in a save, or comes ten minutes late, fails it; the next save raises. What it
#   left has the suffix ``.incomplete``.
# * Others may take the room between look and write. Then the save fails as step 4's here.
#
# Further reading
# ---------------
# * :doc:`resume_and_reshard`, :doc:`preemption`: how a job resumes, and how it stops
# * :doc:`two_hosts`: local disks, with a copy on a second host
# * Young, J. W.: *A first order approximation to the optimum checkpoint interval*, 1974
# * `fsync(2) <https://man7.org/linux/man-pages/man2/fsync.2.html>`__
