# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, trainers/torchtitan_checkpointer.py
"""
Save during training in torchtitan
==================================

Keep torchtitan, and stop its checkpoints from stopping training. A subclass of its
``CheckpointManager`` hands them to ``Saves``: copied during the next step, written by a
thread, and renamed when complete.

.. result-gain:: checkpoint_stall
   :rows: overlapped_writer torchtitan_async_with_pinned_mem
   :field: cost_s
   :where: model=llama-1b step=long loop=reads compiled=no storage=memory

   ``CheckpointManager`` was measured in a loop without torchtitan. It stages as this recipe does, and
   writes with the faster writer of :doc:`/recipes/checkpoint/saves_beside_training`.
   ``torchtitan_async_with_pinned_mem`` is the mode of torchtitan that stages into pinned memory.

**When not to bother:** you save a few megabytes, or once an hour. torchtitan's
``async_mode="async"`` does as well then.

.. code-block:: python

   from overlap_recipes.trainers.torchtitan import OverlappedCheckpointManager

   config.checkpoint = OverlappedCheckpointManager.Config(enable=True, interval=100)

``config`` is the configuration of your torchtitan job. Nothing else changes: to resume, start the
job again. Your project needs the package ``overlap_recipes``: ``pip install .`` in this
repository, or a copy of its folder ``overlap_recipes``.

.. verification-badge::
"""

# %%
# .. literalinclude:: /overlap_recipes/trainers/torchtitan.py
#    :language: python
#    :pyobject: OverlappedCheckpointManager
#
# What each method is for
# -----------------------
#
# .. lanes:: Schematic. The copy runs during the next step, the write during the steps after it.
#
#    training:  0-6 step 1; 6-7 save; 7-15 step 2; 15-23 step 3; 23-31 step 4
#    copy:      7-13 to host memory ~
#    write:     13-26 step-1.incomplete ~; 26-27 its name ~
#
# ``Config``
#    torchtitan builds the class whose ``Config`` you give it, so a subclass needs its own
#    ``Config``. Without ``enable=True``, torchtitan saves nothing.
#
# ``dcp_save``
#    torchtitan collects the state (model, optimizers, schedulers, data loader, train state) and
#    decides when to save. It keeps the future that this method returns, and waits for it before the
#    next save and before the last one. The last save writes under the checkpoint's own name,
#    ``.metadata`` at the end. If an older checkpoint there still had its ``.metadata``, a mixture
#    of both would count as complete: so the method removes it first.
#
# ``_find_load_step``, ``_purge_stale_checkpoints``
#    torchtitan takes a folder for a checkpoint if its name *contains* ``step-`` and a number, and
#    if it holds ``.metadata``. A killed run can leave a ``step-4.*.incomplete`` that has both. It
#    would also count as one of ``keep_latest_k``, and a complete one would be deleted in its place.
#    These methods compare the whole name.
#
# ``__init__``, ``_close``
#    ``Saves`` is a context manager, and this one lasts as long as the checkpoint manager.
#    ``prepare`` locks its memory and plans during the first steps, so that the first save need not.
#    torchtitan calls ``close`` at the end of training, and then the block waits for what is being
#    written. torchtitan also calls ``close`` when training has raised. Then ``sys.exc_info()`` has
#    the exception, and the block does not wait for other ranks. After Ctrl-C, torchtitan does not
#    call ``close``; ``atexit`` does.
#
# You need no hook before the optimizer: ``Saves`` orders every ``optimizer.step()`` in
# the process after its copies. torchtitan's own ``async_with_pinned_mem`` waits there
# (``maybe_wait_for_staging``). But its copy does not wait for the *preceding* step. With work
# queued, that checkpoint holds the weights of an earlier step
# (:doc:`/recipes/checkpoint/default_stager`).
#
# Something to train
# ------------------
# The proof uses torchtitan's optimizers, schedulers and checkpoints. It writes the training loop
# out, because torchtitan's ``Trainer`` needs a GPU. Model and data are small. The state of the
# data loader is the number of its batches.
import argparse
import multiprocessing
import os
import signal
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from overlap_recipes.checkpoint.writing import Target
from overlap_recipes.ranks import start_rank
from overlap_recipes.trainers.torchtitan import OverlappedCheckpointManager

STEPS, SAVE_EVERY, KILLED_AT, WIDTH, SAMPLES = 8, 2, 4, 32, 8


class Batches(BaseDataLoader):
    """Random batches of this rank; iteration continues where the state says."""

    def __init__(self) -> None:
        self.batch = 0

    def __iter__(self):
        while True:
            seed = self.batch * dist.get_world_size() + dist.get_rank()
            self.batch += 1
            yield torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(seed))

    def state_dict(self) -> dict:
        return {"batch": self.batch}

    def load_state_dict(self, state_dict: dict) -> None:
        self.batch = state_dict["batch"]


class Training:
    """What torchtitan's ``Trainer`` builds, and its loop."""

    def __init__(self, device: torch.device, folder: Path | None, seed: int) -> None:
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(WIDTH, WIDTH, device=device) for _ in range(3)]
        self.model = torch.nn.Sequential(*layers)
        for module in (*layers, self.model):
            fully_shard(module)
        self.device, self.step = device, 0
        self.data = Batches()
        optimizer = default_adamw(lr=1e-2)
        optimizer.implementation = "for-loop" if device.type == "cpu" else "fused"
        self.optimizers = optimizer.build(model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=2)
        self.schedulers = schedule.build(optimizers=self.optimizers, training_steps=STEPS)
        self.checkpointer = OverlappedCheckpointManager.Config(
            enable=folder is not None,
            folder=str(folder),
            interval=SAVE_EVERY,
            last_save_model_only=False,
            initial_load_model_only=False,
        ).build(
            dataloader=self.data,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=None,
        )

    def state_dict(self) -> dict:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict) -> None:
        self.step = state_dict["step"]

    def train(self) -> dict[int, float]:
        """Resume if there is a checkpoint, train to the end; return the loss of each step."""
        self.checkpointer.load()
        losses = {}
        try:
            for batch in self.data:
                self.step += 1
                batch = batch.to(self.device)
                loss = (self.model(batch) - batch.flip(1)).square().mean()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.checkpointer.maybe_wait_for_staging()
                self.optimizers.step()
                self.schedulers.step()
                self.optimizers.zero_grad()
                losses[self.step] = loss.item()
                self.checkpointer.save(self.step, last_step=self.step == STEPS)
                if self.step == STEPS:
                    return losses
        finally:
            self.checkpointer.close()


# %%
# Kill it, resume it
# ------------------
# Each rank runs the first job in a process of its own. SIGKILL ends it at the worst moment: all
# files of the checkpoint are written, and its name is not. The second job resumes. Its model
# starts with other random weights, so whatever it knows comes from the checkpoint. The third job
# is never interrupted and never saves. The losses must be equal, bit by bit.


def killed_run(folder: Path) -> None:
    training = Training(start_rank("killed"), folder, seed=0)
    files = training.checkpointer.saves.writer
    write = files.write

    def write_and_die(state: dict, target: Target, *rest: object) -> None:
        write(state, target, *rest)
        if f"step-{KILLED_AT}" in Path(target.name).name:
            os.kill(os.getpid(), signal.SIGKILL)

    files.write = write_and_die
    training.train()


def main(directory: Path) -> None:
    # A fork has imported all this already; but a process that has used CUDA must not be forked.
    start = "spawn" if torch.accelerator.is_available() else "fork"
    first = multiprocessing.get_context(start).Process(target=killed_run, args=(directory,))
    first.start()
    first.join()
    assert first.exitcode != 0, "the first run was to be killed"

    device = start_rank("resumed")
    try:
        if dist.get_rank() == 0:
            print("after the kill:", *sorted(path.name for path in directory.iterdir()))
        dist.barrier()
        resumed = Training(device, directory, seed=1).train()
        print(f"resumed at step {min(resumed)}: loss {resumed[STEPS]:.6f} at the end")
        assert min(resumed) == KILLED_AT - SAVE_EVERY + 1, "not the last complete checkpoint"
        expected = Training(device, None, seed=0).train()
        assert resumed == {step: expected[step] for step in resumed}, "another run"
        print(f"steps {min(resumed)} to {STEPS}: the losses of the run without a kill, bit by bit")
        dist.barrier()
        left = sorted(path.name for path in directory.iterdir())
        assert left == [f"step-{step}" for step in range(SAVE_EVERY, STEPS + 1, SAVE_EVERY)], left
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "To get the last learning rate")  # torchtitan's own
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, help="where checkpoints go (default: temporary)")
    with tempfile.TemporaryDirectory() as temporary:
        main(parser.parse_args().dir or Path(temporary))

# %%
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built.
#
# .. recipe-controls::
#
# Memory and known limits
# -----------------------
# * :doc:`/recipes/checkpoint/saves_beside_training` says how much host memory a save takes, and what
#   else must call ``before_update()``.
# * torchtitan saves the last step synchronously, because its weights may be converted. It saves in
#   safetensors (``last_save_in_hf``) synchronously, too: a resume does not find that one, and
#   ``keep_latest_k`` does not count it.
# * At each save, torchtitan waits for the previous save and raises its error. Do not train inside
#   an ``except`` block: ``close`` then takes training for ended by that exception.
# * ``keep_latest_k`` counts complete checkpoints. The disk holds one more until the next save, and
#   two more at the end: torchtitan deletes none at the last step. A directory that a killed run has left as
#   ``.incomplete`` stays until that step is saved again.
# * A value that is no tensor and differs between ranks makes the first save raise, or the call after a
#   later one: all ranks would get the state of one. Give each rank's a name of its own.
# * torchtitan collects garbage at each save, which takes tens of milliseconds with many objects.
#   This recipe does not change that.
# * ``folder`` must be on a file system. A remote URI is refused, and so is
#   ``async_with_pinned_mem``.
#
# Further reading
# ---------------
# * torchtitan: `checkpointing
#   <https://github.com/pytorch/torchtitan/blob/main/docs/checkpoint.md>`__
