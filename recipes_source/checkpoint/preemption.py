# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.1, checkpoint/preemption.py
"""
Preemption: save and leave before the deadline
==============================================

Keep all of your work when a scheduler takes your machines back. It sends SIGTERM and, some
seconds or minutes later, SIGKILL. This recipe uses the time in between. All ranks agree on the
step after which they stop, save it, and leave with an exit code that says *start me again*. The
signal may come in the middle of a step, of staging or of an upload, on one rank before another, or
twice.

**When not to bother:** you save every few minutes and a save is hidden; then the signal can save
you one interval at most. If an upload takes longer than the time that you are given, save more
often instead (:doc:`keep_verify_prune`). The exit code ``TOO_LATE`` then says that an older checkpoint
counts.

.. code-block:: python

    import sys
    from pathlib import Path

    from overlap_recipes.checkpoint import AGAIN, Preemption, RetainedSaves, Run, resume

    preemption = Preemption(grace_s=120)  # before anything else that takes time
    ...                                   # join the process group, build the model
    run, root = Run(model, optimizer, schedule), Path("checkpoints")
    with preemption, RetainedSaves(root, device, model.buffers) as saves:
        resume(run, root)
        while run.step < steps:
            train_step(run)
            leave = preemption.agreed()   # the same on all ranks, until an optimizer has stepped
            if leave or run.step % 1000 == 0:
                saves.save({"run": run}, root / f"step{run.step}")
            if leave:
                break
    if run.step == steps:
        (root / "finished").touch()
    sys.exit(0 if run.step == steps else AGAIN)

Your project needs the package ``overlap_recipes``: ``pip install .`` in this repository, or a copy
of its folder ``overlap_recipes``. In a Slurm job:

.. code-block:: bash

    #SBATCH --requeue --signal=TERM@120   # SIGTERM to srun's tasks 120 s before the end
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # or a restart may not connect: see below
    # --shutdown-timeout: from torch 2.12 on
    srun torchrun --shutdown-timeout 118 --max-restarts 3 ... train.py
    test -e $ROOT/finished || scontrol requeue $SLURM_JOB_ID

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * a signal handler that only sets a flag, and why it may do no more
      * one agreement per step that costs training nothing
      * what to do when the deadline comes first, and at the second signal
      * how torchrun treats a signal and an exit code, and what a scheduler sees

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks
      * the saves of :doc:`keep_verify_prune`

.. verification-badge::

The idea
--------

.. lanes:: Schematic. One rank hears the signal in step 4; all stop after step 5 and save it.

   rank 0:  0-4 step 4; 4-8 step 5; 8-13 save 5; 13-14 exit
   rank 1:  0-4 step 4; 4-8 step 5; 8-13 save 5; 13-14 exit
   @2 SIGTERM to rank 1
   @4 its flag goes round

The signal does not reach all ranks in the same step. If a rank stopped at once, the others would
wait for it in a collective. So each rank tells the others whether it was asked to leave. It does
so in a small all-reduce, which it starts in one step and reads in the next. By then the all-reduce
has ended, so reading it takes no time. A step has one answer, however often a loop asks: a second
one that said yes between the line that saves and the line that leaves would cost the last save. So
``agreed`` asks the others anew only when an optimizer has stepped, and its yes is for good.

SIGTERM has a second meaning. When a rank dies, torchrun sends SIGTERM to the other ranks, which
may hang in a collective that the dead rank never joins. A handler that only sets a flag would keep
them there until torchrun gives up. So a rank that hears the signal also checks whether the others
are still there.
"""

# %%
# Imports and exit codes
# ----------------------
# The imports are the proof's. The exit codes are the module's.
#
# .. literalinclude:: /overlap_recipes/checkpoint/preemption.py
#    :language: python
#    :start-at: AGAIN = 85
#    :end-at: TOO_LATE = 86

import argparse
import os
import signal
import tempfile
import time
from pathlib import Path

import _toys as basic
import torch
import torch.distributed as dist

from overlap_recipes.checkpoint.durable import DurableSaves, newest_step
from overlap_recipes.checkpoint.preemption import AGAIN, Preemption

STEPS, SAVE_EVERY, ASKED_IN = 8, 5, 4  # of the run that proves it

# %%
# The handler
# -----------
# Python runs a signal handler on the main thread, between two instructions of whatever that thread
# was doing: in the middle of a step, of staging, with a lock held. So the handler sets a flag,
# starts two threads, and does nothing else. A second signal changes nothing. It is common:
# schedulers repeat themselves, and torchrun passes its own signal on.
#
# ``watch`` handles a save that does not end in time. It ends the process while there is still time
# to print why. The checkpoint has no name yet, so it does not count.
#
# ``listen`` notices a rank that has died. It takes part in an all-reduce, in a process group of its
# own, that all ranks join when they leave together. If a rank has died instead, its connections
# close and the all-reduce fails at once. Then nothing can be saved together any more.
#
# ``give_back_handler`` runs in forked children: graders, the workers of a pool. With this handler
# they would not end when they are told to, and a pool that is ended would wait for them.
#
# .. literalinclude:: /overlap_recipes/checkpoint/preemption.py
#    :language: python
#    :pyobject: Preemption
#
# The loop
# --------
# At the end of its block, ``saves`` waits for the upload, so the last save is on disk before the
# process gives its exit code. The signal can also come during an earlier upload. That upload ends
# first, and the last save follows. A step that would be saved anyway is saved once, by one
# call: a second save of it would fail, since a complete checkpoint keeps its name.


def train(app: basic.AppState, root: Path, device: torch.device, on_step) -> int:
    """Train to ``STEPS`` or until asked to leave; return the exit code."""
    preemption = Preemption(grace_s=60)
    with preemption, DurableSaves(device, app.model.buffers) as saves:
        while app.step < STEPS:
            basic.train_step(app, device)
            on_step(app.step)
            leave = preemption.agreed()
            if leave or app.step % SAVE_EVERY == 0:
                saves.save({"app": app}, root / f"step{app.step}")
            if leave:
                break
    return AGAIN if app.step < STEPS else 0


# %%
# Run it, and prove it
# --------------------
# The last rank alone gets SIGTERM in step 4, and a second one right after it. All ranks must stop
# after the same step, with its checkpoint on disk. The next start continues from there and must
# end as a run without a signal. The tests send the signal in the middle of a step, of staging and
# of an upload, with a deadline that is too short, and under ``torchrun``.


def main(directory: Path) -> None:
    basic.HIDDEN = 512  # small: all of it is flushed, many times
    device = basic.start_rank()
    try:
        root = basic.directory_of_rank_0(directory)

        def asked_to_leave(step: int) -> None:
            if step == ASKED_IN and dist.get_rank() == dist.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)

        first = basic.build_app(device)
        began = time.perf_counter()
        assert train(first, root, device, asked_to_leave) == AGAIN
        left_s = time.perf_counter() - began
        steps: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(steps, first.step)
        assert set(steps) == {ASKED_IN + 1}, f"ranks stopped after steps {steps}"
        assert newest_step(root) == ASKED_IN + 1
        print(
            f"asked in step {ASKED_IN}, saved step {first.step}, left {left_s:.1f} s after the start"
        )

        second = basic.load_app(root / f"step{newest_step(root)}", device)
        assert train(second, root, device, lambda step: None) == 0
        whole = basic.build_app(device)
        while whole.step < STEPS:
            basic.train_step(whole, device)
        basic.assert_same_bits(second, basic.snapshot(whole))
        print(f"started again, {STEPS} steps: every bit as in a run that was left alone")
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
#
# .. recipe-controls::
#
# What torchrun does
# ------------------
# * torchrun passes SIGTERM on to its ranks. After ``--shutdown-timeout`` seconds (30 by default, and
#   always before torch 2.12: give ``grace_s=30`` then) it kills them. torchrun itself then ends with
#   code 1, whatever codes its ranks ended with. So a batch script cannot check for ``AGAIN``; it
#   checks whether the job has finished. ``srun`` without torchrun passes the ranks' code on.
# * When a rank dies, torchrun ends the others. With ``--max-restarts`` it starts all of them again
#   at once, on the same machine, and each resumes from the newest checkpoint. The table gives the
#   time from the kill to the end of the first step:
#
# .. result-table:: restart
#    :rows: max-restarts
#
# * torchrun keeps one store for all restarts (torch 2.13). A restarted rank may read there the
#   address of a rank that has ended: ``Gloo connectFullMesh failed``.
#   ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` gives each restart a store of its own.
# * A signal to the ranks alone (``scancel --full``, ``pkill``) makes them leave with ``AGAIN``.
#   torchrun takes that for a crash and restarts them on the machine that is going away. Signal
#   torchrun instead.
#
# Known limits
# ------------
# * Python handles a signal between two instructions. A rank that hangs in a kernel hears nothing.
#   The scheduler's SIGKILL ends it, and the newest checkpoint is that of the last save.
# * The time between the signals must hold two steps, the rest of an earlier save, and a save. An
#   evaluation between two steps does not end early.
# * A loop without torch's optimizers, or a rank without one, must ask once a step.
# * With ``if_busy="skip"``, set ``saves.if_busy = "wait"`` before the last save, or it may be left out.
# * NCCL's watchdog may end a rank whose peers have left. All ranks leave in the same step here, so
#   none waits.
