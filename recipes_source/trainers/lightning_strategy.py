# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, trainers/lightning_strategy.py
"""
Save during training in Lightning
=================================

Keep Lightning's ``Trainer``, and let it train while it saves. Lightning's own
``ModelParallelStrategy`` moves model and optimizer to the CPU and writes them while training
stops; ``AsyncCheckpointIO`` does nothing for it. This strategy stages sharded checkpoints during
the next step and writes them on a thread.

.. result-gain:: checkpoint_stall
   :rows: overlapped_writer none
   :field: cost_s
   :where: model=llama-1b step=long loop=reads compiled=no storage=memory

   That was measured in a loop without Lightning, with the faster writer of
   :doc:`/recipes/checkpoint/saves_beside_training`. ``none`` is the same measurement without a save: the
   noise.

.. index::
   single: PyTorch Lightning slow checkpoint

**When not to bother:** a save takes a few seconds, and you save once per epoch.

.. code-block:: python

   from lightning.pytorch import Trainer
   from lightning.pytorch.callbacks import ModelCheckpoint
   from overlap_recipes.trainers.lightning import OverlappedStrategy

   checkpoints = ModelCheckpoint("run", "last-{step}", every_n_train_steps=100)
   trainer = Trainer(strategy=OverlappedStrategy(), callbacks=[checkpoints])
   trainer.fit(model, data)  # to resume: trainer.fit(model, data, ckpt_path="last")

``configure_model`` divides ``model`` over the ranks, as ``ModelParallelStrategy`` asks. The
arguments are that strategy's, too: without any, the GPUs of a host are its dimension
``tensor_parallel``. For FSDP2 alone, give it the number of ranks and ``tensor_parallel_size=1``.
Your project needs the package ``overlap_recipes``: ``pip install .`` in this repository, or a copy
of its folder ``overlap_recipes``.

.. verification-badge::
"""

# %%
# .. literalinclude:: /overlap_recipes/trainers/lightning.py
#    :language: python
#    :pyobject: LightningFiles
#
# .. literalinclude:: /overlap_recipes/trainers/lightning.py
#    :language: python
#    :pyobject: OverlappedStrategy
#
# What each method is for
# -----------------------
#
# .. lanes:: Schematic. The copy runs during the next step, the write during the steps after it.
#
#    training:  0-6 step 1; 6-7 save; 7-15 step 2; 15-23 step 3; 23-31 step 4
#    copy:      7-13 to host memory ~
#    write:     13-26 last-step=1.ckpt.incomplete ~; 26-27 its name ~
#
# ``lightning_module_state_dict``, ``optimizer_state``
#    Lightning's versions copy both states to the CPU on the training thread. These return the live
#    tensors.
# ``save_checkpoint``
#    Whatever is not a tensor of model or optimizer (loops, callbacks, schedules) is a few
#    kilobytes. It is serialized at once and lies next to the shards as ``meta.pt``, where
#    Lightning's loading looks. The name is that of rank 0: ranks may have other metrics in it. A
#    save after an exception (``OnExceptionCheckpoint``) is waited for.
# ``remove_checkpoint``, ``remove_if_saved``
#    ``ModelCheckpoint`` deletes the old checkpoint as soon as a save has *returned*. Here the new
#    one is not complete by then. So the writing thread deletes the old one when it is. If the save
#    failed, the old one stays for good. A deletion begins with a change of name: of a run that is
#    killed in it, ``ckpt_path="last"`` would take what is left for the newest. A deletion that fails
#    is logged.
# ``file_exists``
#    ``ModelCheckpoint`` asks this before it chooses a name. It must not miss the checkpoint that
#    is being written: two callbacks would share its name, and one would delete what the other
#    keeps. ``save_last="link"`` asks it, too, and so never links to what is not complete. With
#    ``enable_version_counter=False``, Lightning asks in neither case.
# ``LightningFiles``
#    Writes ``meta.pt`` next to the shards. ``save_last=True`` replaces ``last.ckpt`` at every save. If
#    other files lie in it, the save fails and leaves them alone.
# ``optimizer_step``
#    Lightning runs forward and backward **inside** ``optimizer.step``, as its closure. A hook
#    before the step therefore runs before forward. ``Saves`` has such a hook, which
#    makes the step wait for the copy, so nothing would run during the copy. This method runs
#    forward and backward first. An optimizer that asks again (LBFGS) gets new ones.
# ``setup``, ``teardown``
#    ``Saves`` is a context manager, and this one lasts as long as a ``fit``. ``prepare`` locks its
#    memory and plans during the first steps, so that the first save need not. Lightning
#    calls ``teardown`` even when training has raised. Then ``sys.exc_info()`` has the exception,
#    and the block does not wait for other ranks. It calls ``teardown`` a second time if the first
#    has raised, and nothing is left to end then. ``trainer.save_checkpoint`` after ``fit`` saves as
#    Lightning does.
#
# A checkpoint gets its name when it is complete. ``fit(ckpt_path="last")`` looks for names
# that begin with ``last`` and end in ``.ckpt``. What a killed run leaves ends in ``.incomplete`` or
# ``.replaced``. Remains of a deletion stay until you remove them.
#
# Something to train
# ------------------
# A resume needs two things that Lightning does not keep. The first is the position in the data:
# if a loader has ``state_dict``, Lightning asks it for its position. The second is the random numbers:
# Lightning stores none, so each step's dropout has a seed of its own here.
import argparse
import multiprocessing
import os
import signal
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import dropout
from torch.optim.optimizer import register_optimizer_step_pre_hook

from overlap_recipes.checkpoint.writing import Target
from overlap_recipes.ranks import start_rank
from overlap_recipes.trainers.lightning import LightningFiles, OverlappedStrategy

STEPS, SAVE_EVERY, KILLED_AT, WIDTH, SAMPLES = 8, 2, 4, 32, 8


class Batches:
    """Random batches of this rank; iteration continues where the state says."""

    def __init__(self) -> None:
        self.batch = 0

    def __len__(self) -> int:
        return 2 * STEPS

    def __iter__(self):
        while self.batch < len(self):
            seed = self.batch * dist.get_world_size() + dist.get_rank()
            self.batch += 1
            yield torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(seed))

    def state_dict(self) -> dict:
        return {"batch": self.batch}

    def load_state_dict(self, state_dict: dict) -> None:
        self.batch = state_dict["batch"]


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.losses: dict[int, float] = {}

    def configure_model(self) -> None:
        for module in (*self.layers, self.layers):
            fully_shard(module, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        torch.manual_seed(self.global_step * dist.get_world_size() + dist.get_rank())
        loss = (dropout(self.layers(batch), 0.1) - batch.flip(1)).square().mean()
        self.losses[self.global_step + 1] = loss.item()
        return loss

    def configure_optimizers(self) -> tuple[list, list]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
}  # Lightning asks


def train(folder: Path, seed: int, save: bool = True, resume: str | None = None) -> dict:
    """Train to the end, from ``resume`` if there is one; return the loss of each step."""
    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
    torch.manual_seed(seed)
    model = Model()
    checkpoints = ModelCheckpoint(folder, filename="last-{step}", every_n_train_steps=SAVE_EVERY)
    trainer = Trainer(
        max_steps=STEPS,
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=OverlappedStrategy(dist.get_world_size(), tensor_parallel_size=1),
        plugins=[TorchElasticEnvironment()],
        callbacks=[checkpoints] if save else [],
        enable_checkpointing=save,
        enable_progress_bar=False,
        logger=False,
    )
    forwards = []  # before each optimizer step: how many forwards there were
    hook = register_optimizer_step_pre_hook(lambda *_: forwards.append(len(model.losses)))
    trainer.fit(model, Batches(), ckpt_path=resume)
    hook.remove()
    assert forwards[-1] == len(model.losses), "the step waits for the copy before forward"
    return model.losses


# %%
# Kill it, resume it
# ------------------
# Each rank runs the first job in a process of its own. SIGKILL ends it at the worst moment: all
# files of the checkpoint are written, and its name is not. The second job resumes. Its model
# starts with other random weights, so whatever it knows comes from the checkpoint. The third job
# is never interrupted and never saves. The losses must be equal, bit by bit.


def killed_run(folder: Path) -> None:
    start_rank("killed")
    write = LightningFiles.write

    def write_and_die(self: LightningFiles, state: dict, target: Target, *rest: object) -> None:
        write(self, state, target, *rest)
        if f"step={KILLED_AT}" in Path(target.name).name:
            os.kill(os.getpid(), signal.SIGKILL)

    LightningFiles.write = write_and_die
    train(folder, seed=0)


def main(directory: Path) -> None:
    # A fork has imported all this already; but a process that has used CUDA must not be forked.
    start = "spawn" if torch.accelerator.is_available() else "fork"
    first = multiprocessing.get_context(start).Process(target=killed_run, args=(directory,))
    first.start()
    first.join()
    assert first.exitcode != 0, "the first run was to be killed"

    start_rank("resumed")
    resumed = train(directory, seed=1, resume="last")
    assert min(resumed) == KILLED_AT - SAVE_EVERY + 1, "not the last complete checkpoint"
    expected = train(directory, seed=0, save=False)
    assert resumed == {step: expected[step] for step in resumed}, "another run"
    print(f"steps {min(resumed)} to {STEPS}: the losses of the run without a kill, bit by bit")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
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
#   else must call ``before_update()`` (a weight-averaging callback that swaps weights, for
#   example).
# * The class needs ``save_distributed_checkpoint=True``, the default. It ignores
#   ``storage_options``.
# * The states of callbacks, loops and loaders are kept of each rank, and each resumes with its own. On
#   another number of ranks all get that of rank 0; if loaders were at other positions, that raises.
#   So do sharded weights in a callback, such as an average, at the save.
# * With ``accumulate_grad_batches``, Lightning's ``every_n_train_steps`` saves once more after a
#   resume, in mid-accumulation. A resume from *that* checkpoint lacks the gradients so far.
# * ``trainer.save_checkpoint`` within ``fit`` returns before the checkpoint has its name. So do not
#   let Lightning requeue a SLURM job by itself: it would end before the save.
# * A job killed between the two renames that replace ``last.ckpt`` leaves ``last.ckpt.replaced``, and
#   ``ckpt_path="last"`` starts from the beginning with no more than a warning. So does one with
#   ``save_last="link"`` that is killed between the deletion of the old checkpoint and the new link.
#   Names that begin with ``last-`` have no such gap.
# * Lightning calls a barrier after each save. With NCCL, the host waits there for the steps that
#   are queued; the GPU does not.
# * While a save is being written, the disk holds one checkpoint more than ``save_top_k``.
# * ``ModelCheckpoint`` waits for the save before it when it chooses a name. ``save_last=True`` saves
#   twice at each interval, and the second holds up training while the first is written. Names that
#   begin with ``last-`` need one.
# * A failed save is logged and raises when ``fit`` ends, so a full disk does not end training. It is
#   only logged if you call ``fit`` inside an ``except`` block: its end looks like that of a ``fit`` that
#   has raised.
# * With another strategy, such as DDP, a ``Callback`` may save by ``CheckpointManager``. Enter it and
#   call ``resume`` in ``on_fit_start``. Give it your ``StatefulDataLoader``, and
#   ``Trainer(use_distributed_sampler=False)``. Set
#   ``trainer.fit_loop.epoch_progress.current.processed`` to the epoch of the save: Lightning counts
#   from 0, and the loader raises. Lightning's own handler of SIGTERM lets jobs on several ranks fail.
#   So keep ``signal.getsignal(signal.SIGTERM)`` after you have entered the manager, and set it again
#   by ``signal.signal`` in ``on_train_start``.
# * With ``automatic_optimization = False`` you call ``optimizer.step()`` yourself, after backward.
#   Then you do not need ``optimizer_step``.
#
# Further reading
# ---------------
# * Lightning: `ModelParallelStrategy
#   <https://lightning.ai/docs/pytorch/stable/advanced/model_parallel/tp_fsdp.html>`__
# * `Asynchronous sharded checkpoints asked for
#   <https://github.com/Lightning-AI/pytorch-lightning/issues/21557>`__
