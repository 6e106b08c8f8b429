# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, checkpoint/retention.py
"""
Keep, list, verify and prune checkpoints
========================================

Delete old checkpoints without ever losing the one that you need. Checkpoints fill disks, and
cleaning up is how jobs lose them: the good one goes before the new one is durable, a second job
writes to the same directory, or a crash comes in the middle of a deletion. This recipe adds the
cleaning to :doc:`durable_saves`. It keeps the newest few checkpoints and every n-th step, allows
one job per directory, checks for room before a save, and removes what a crash left.

**When not to bother:** your storage has room for all checkpoints of a run, so you need not delete
any. Or something else already deletes by age or by quota.

.. code-block:: python

    from pathlib import Path

    from overlap_recipes.checkpoint import AppState, RetainedSaves

    app, root = AppState(model, optimizer), Path("checkpoints")
    with RetainedSaves(root, device, model.buffers, keep_last=3, keep_every=10_000) as saves:
        for step, batch in enumerate(batches, 1):
            train_step(batch)
            if step % 1000 == 0:
                saves.save({"app": app}, root / f"step{step}")

Your project needs the package ``overlap_recipes``: ``pip install .`` in this repository, or a copy
of its folder ``overlap_recipes``. The package is a command, too:

.. code-block:: bash

    python -m overlap_recipes.checkpoint list ROOT
    python -m overlap_recipes.checkpoint verify ROOT  # every byte; exit code 1 if one has changed
    python -m overlap_recipes.checkpoint prune ROOT --keep-last 3 --dry-run

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * how to delete only after something newer is durable, and survive a crash half way
      * a lock that the kernel releases after a crash
      * how to fail before the first byte if the disk cannot hold the save
      * how often to save: Young's formula when a save costs next to nothing

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later on Linux, any number of ranks
      * one file system that all ranks see

.. verification-badge::

The idea
--------

.. lanes:: Schematic. A deletion begins when the new checkpoint and the pointer to it are durable.

   commit:    0-4 rename step8; 4-6 flush; 6-9 pointer
   deletion:  9-12 rename step2; 12-14 flush; 14-20 remove its files
   @9 step8 is durable
   @14 step2 is no checkpoint any more

The writing thread deletes after each commit, never before. A deletion first takes the name away:
what has no name is no checkpoint.
"""

# %%
# Imports and names
# -----------------
# The imports are the proof's. The names are the module's.
#
# .. literalinclude:: /overlap_recipes/checkpoint/retention.py
#    :language: python
#    :start-at: LOG = logging.getLogger(__name__)
#    :end-at: LEFTOVERS = ("*.incomplete", "*.deleted")

import argparse
import tempfile
from pathlib import Path

import _toys as basic
import torch
import torch.distributed as dist

from overlap_recipes.checkpoint.durable import committed_steps
from overlap_recipes.checkpoint.retention import (
    LEFTOVERS,
    RetainedSaves,
    prune,
    seconds_between_saves,
    show,
    take_lease,
)

STEPS, SAVE_EVERY = 12, 2  # of the run that proves it

# %%
# What stays, what goes
# ---------------------
# Only complete checkpoints count: three damaged ones are no reason to delete the fourth. A damaged
# one is not deleted either, and ``list`` shows it.
#
# Nothing deletes a directory in one step. So one rename first takes its name away, and that rename
# is flushed. If the job crashes after that, nobody takes what is left for a checkpoint.
#
# .. literalinclude:: /overlap_recipes/checkpoint/retention.py
#    :language: python
#    :pyobject: to_delete
#
# .. literalinclude:: /overlap_recipes/checkpoint/retention.py
#    :language: python
#    :pyobject: delete
#
# One job per directory
# ---------------------
# Two jobs that write to one directory would remove each other's unfinished saves. This happens if
# a scheduler starts a job twice, or if a job restarts while its old ranks still write. So a job
# locks a file, its *lease*. The kernel releases the lock when the process that holds it ends, for
# whatever reason. Nobody has to clean up after a crash, or guess from its age whether a lock is
# still held.
#
# A forked process, such as a data loader's worker, would hold the lock too, and can outlive a
# killed rank by seconds. So a forked process closes its copy of the lease at once. Whoever holds
# the lease may remove every unfinished save.
#
# .. literalinclude:: /overlap_recipes/checkpoint/retention.py
#    :language: python
#    :pyobject: take_lease
#
# .. literalinclude:: /overlap_recipes/checkpoint/retention.py
#    :language: python
#    :pyobject: remove_leftovers
#
# The save
# --------
# ``open_root`` runs before the first save, ``look_for_room`` before each one is written, and the
# deletions after each commit. A disk that fills up in the middle of a save would fail it too, but
# by then the save has taken the room of everybody else on that disk. The check multiplies the
# bytes of this rank by the number of ranks, which is close enough because shards are equally
# large.
#
# .. literalinclude:: /overlap_recipes/checkpoint/retention.py
#    :language: python
#    :pyobject: RetainedSaves
#
# .. literalinclude:: /overlap_recipes/checkpoint/retention.py
#    :language: python
#    :pyobject: nbytes
#
# How often to save
# -----------------
# A failure costs what was computed since the last durable checkpoint: half an interval on average.
# A save costs ``cost_s`` of training time. If a failure comes every ``mtbf_s`` seconds, the sum is
# smallest at Young's interval, :math:`\sqrt{2 \cdot \text{cost} \cdot \text{MTBF}}`. Daly's
# refinement matters only if a save costs a good part of the MTBF.
#
# A hidden save costs little, so the formula asks for saves closer together than the storage can
# take. Then the upload decides: save when the last upload has ended.
#
# .. literalinclude:: /overlap_recipes/checkpoint/retention.py
#    :language: python
#    :pyobject: seconds_between_saves
#
# The command
# -----------
#
# .. literalinclude:: /overlap_recipes/checkpoint/retention.py
#    :language: python
#    :pyobject: show
#
# .. literalinclude:: /overlap_recipes/checkpoint/retention.py
#    :language: python
#    :pyobject: prune
#
# Run it, and prove it
# --------------------
# The proof starts in a directory with the leftovers of a crash. It saves every second step, and
# keeps two checkpoints and every sixth step. A second job must be refused, and so must a state
# that no disk holds.


def train(app: basic.AppState, root: Path, device: torch.device) -> dict[int, dict]:
    """Save every second step; return the bits of each save."""
    saved = {}
    with RetainedSaves(root, device, app.model.buffers, keep_last=2, keep_every=6) as saves:
        assert not [path for pattern in LEFTOVERS for path in root.glob(pattern)]
        refused("a second job", take_lease, root)
        refused("no room", saves.look_for_room, {"x": torch.zeros(1).expand(10**15)})
        for _ in range(STEPS):
            basic.train_step(app, device)
            if app.step % SAVE_EVERY == 0:
                saved[app.step] = basic.snapshot(app)
                saves.save({"app": app}, root / f"step{app.step}")
    return saved


def refused(what: str, action, *args: object) -> None:
    try:
        action(*args)
    except (RuntimeError, OSError) as error:
        print(f"{what}: {error}")
    else:
        raise AssertionError(f"{what} was not refused")


def prove(root: Path, device: torch.device, saved: dict[int, dict]) -> None:
    assert committed_steps(root) == [12, 10, 6], committed_steps(root)
    for step in committed_steps(root):
        basic.assert_same_bits(basic.load_app(root / f"step{step}", device), saved[step])
    assert show(root, digests=True)
    prune(root, keep_last=1, keep_every=0, dry_run=True)
    assert committed_steps(root) == [12, 10, 6], "a dry run has deleted"
    print(f"10 ms a save, a failure a day: every {seconds_between_saves(0.01, 86400, 8):.0f} s")


def main(directory: Path) -> None:
    basic.HIDDEN = 512  # small: all of it is flushed, many times
    device = basic.start_rank()
    try:
        root = basic.directory_of_rank_0(directory)
        if dist.get_rank() == 0:
            (root / "step2.incomplete").mkdir(parents=True)
            (root / "step1.deleted").mkdir()
        saved = train(basic.build_app(device), root, device)
        prove(root, device, saved)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, help="where the proof writes (default: temporary)")
    with tempfile.TemporaryDirectory() as temporary:
        main(parser.parse_args().dir or Path(temporary))

# %%
# What breaks if you remove a line
# --------------------------------
#
# .. recipe-controls::
#
# The room it takes
# -----------------
# Room for ``keep_last`` + 1 checkpoints, because the new one is written before the oldest goes, and
# for one more at each step that ``keep_every`` divides. A checkpoint of float32 weights and AdamW's
# two moments has 12 bytes per parameter.
#
# Known limits
# ------------
# * A file lock holds on one host. NFS locks between hosts from version 4 on, Lustre if it is
#   mounted with ``flock``. Object stores have no locks.
# * A save of an older step than the newest in ``root`` fails. :doc:`resume_and_reshard` goes back.
# * The check for room looks once, and others may take the room later. The save then fails as any
#   other.
# * ``list`` checks names and sizes. Only ``verify`` reads the content of the files.
# * If a step is saved again and its older checkpoint is damaged, the older one is kept as
#   ``step<N>.damaged``.
#
# Further reading
# ---------------
# * Young, J. W.: *A first order approximation to the optimum checkpoint interval*, 1974
# * Daly, J. T.: *A higher order estimate of the optimum checkpoint interval for restart dumps*,
#   2006
# * :doc:`resume_and_reshard`: how a job resumes from what this recipe keeps
