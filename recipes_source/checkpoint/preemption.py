# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, checkpoint/preemption.py
"""
Preemption: save and leave before the deadline
==============================================

A scheduler that takes your machines back sends SIGTERM and, some seconds or minutes later, SIGKILL.
This recipe uses the time: all ranks agree on the step after which they stop, save it, and leave with
an exit code that says *start me again*. The signal may come in the middle of a step, of staging or of
an upload, on one rank before another, or twice.

.. code-block:: python

    from preemption import AGAIN, Preemption

    preemption = Preemption(grace_s=60)  # before anything else that takes time
    with RetainedSaves(root, device, model.buffers()) as saves:
        while step < steps:
            train_step()
            if preemption.agreed():      # on all ranks, in the same step
                saves.save({"run": run}, root / f"step{step}")
                break
    sys.exit(AGAIN if step < steps else 0)

.. code-block:: bash

    #SBATCH --signal=TERM@120 --requeue   # SIGTERM to the ranks 120 s before the end
    srun torchrun --max-restarts 3 ... train.py || test $? -ne 85 || scontrol requeue $SLURM_JOB_ID

If a save takes longer than the grace you are given, save more often instead: what you lose is then
bounded by the interval (:doc:`retention`).

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * a handler that only sets a flag, and why it may do no more
      * one agreement a step that costs training nothing
      * what to do when the deadline comes first, and at the second signal
      * the exit code for a scheduler, ``torchrun --max-restarts``

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks
      * saves of :doc:`durable_saves`

.. verification-badge::

The idea
--------

.. lanes:: Schematic. One rank hears the signal in step 4; all stop after step 5 and save it.

   rank 0:  0-4 step 4; 4-8 step 5; 8-13 save 5; 13-14 exit
   rank 1:  0-4 step 4; 4-8 step 5; 8-13 save 5; 13-14 exit
   @2 SIGTERM to rank 1
   @4 its flag goes round

The signal does not reach all ranks in the same step. A rank that stopped at once would leave the
others waiting in a collective. So each rank tells the others whether it was asked, in a small
all-reduce that is started in one step and read in the next: by then it has ended, nobody waits.
"""

# %%
# Imports
# -------

import argparse
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import state_to_save as basic
import torch
import torch.distributed as dist
from durable_saves import DurableSaves, newest_step

AGAIN = 85  # exit code: saved, start me again
TOO_LATE = 86  # the deadline came before the save had ended; older checkpoints are whole
STEPS, ASKED_IN = 8, 4  # of the run that proves it

# %%
# The handler
# -----------
# A Python signal handler runs on the main thread between two instructions of whatever it was doing:
# in the middle of a step, of staging, with a lock held. It sets a flag and notes the time, no more. A
# second signal changes nothing: schedulers repeat themselves, and torchrun passes on its own. The
# watch is for the save that does not end in time: it ends the process while there is still time for
# the exit code; the checkpoint that is not named yet is none.


class Preemption:
    """Whether this job is asked to leave; ``grace_s``: seconds from SIGTERM to SIGKILL.

    Build it on the main thread of every rank, after the process group.
    """

    def __init__(self, grace_s: float, margin_s: float = 2.0) -> None:
        self.leave_s = grace_s - margin_s
        self.asked = False
        self.left = threading.Event()
        self.votes = dist.new_group(backend="gloo")
        self.vote: tuple[torch.Tensor, dist.Work] | None = None
        self.before = signal.signal(signal.SIGTERM, self.on_signal)

    def on_signal(self, number: int, frame: object) -> None:
        if not self.asked:
            self.asked = True
            threading.Thread(target=self.watch, name="preemption", daemon=True).start()

    def watch(self) -> None:
        if not self.left.wait(self.leave_s):
            os.write(2, b"preempted: no time left, the save has not ended\n")
            os._exit(TOO_LATE)

    def agreed(self) -> bool:
        """Whether any rank was asked before its latest step but one; the same answer on all ranks."""
        stop = False
        if self.vote is not None:
            asked, work = self.vote
            work.wait()
            stop = bool(asked)
        asked = torch.tensor(int(self.asked))
        self.vote = asked, dist.all_reduce(asked, dist.ReduceOp.MAX, self.votes, async_op=True)
        return stop

    def close(self) -> None:
        """After the last save: the watch is off, SIGTERM does what it did before."""
        self.left.set()
        if self.vote is not None:
            self.vote[1].wait()
        signal.signal(signal.SIGTERM, self.before)


# %%
# The loop
# --------
# Leaving the ``with`` block waits for the upload: the last save is on disk before the exit code is
# given. The signal may as well come while an earlier upload is under way; that one ends first, the
# last one follows it.


def train(app: basic.AppState, root: Path, device: torch.device, on_step) -> int:
    """Train to ``STEPS`` or until asked to leave; return the exit code."""
    preemption = Preemption(grace_s=60)
    with DurableSaves(device, app.model.buffers()) as saves:
        while app.step < STEPS:
            basic.train_step(app, device)
            on_step(app.step)
            if preemption.agreed() and app.step < STEPS:
                saves.save({"app": app}, root / f"step{app.step}")
                break
    preemption.close()
    return AGAIN if app.step < STEPS else 0


# %%
# Run it, and prove it
# --------------------
# The last rank alone gets SIGTERM in step 4, and a second one right behind it. All ranks stop after the
# same step, with its checkpoint on disk; the next start goes on from there and ends as a run that was
# left alone.


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
# When it is not worth it
# -----------------------
# * You save every few minutes and a save is hidden: what the signal can still win is one interval.
# * The grace is shorter than an upload. ``TOO_LATE`` then says so, and the older checkpoint counts.
#
# Known limits
# ------------
# * A signal is heard between two Python instructions. A rank that hangs in a kernel or a collective
#   hears nothing; the scheduler's SIGKILL ends it, and the newest checkpoint is that of the last save.
# * torchrun passes SIGTERM on to its ranks and kills them after 30 s, unless it is told otherwise
#   (``TORCHELASTIC_SIGNALS_TO_HANDLE``, and send the signal to the ranks themselves). An exit code
#   that is not 0 makes ``--max-restarts`` start the ranks again at once, which is what you want after a
#   crash and not when the machine goes away: there the scheduler starts the job, on other machines.
# * NCCL's watchdog may end a rank whose peers have left. All leave in the same step here, so none waits.
