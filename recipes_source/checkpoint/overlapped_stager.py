# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, checkpoint/overlapped_stager.py
"""
Save beside training: one call
==============================

Save checkpoints while training goes on, with one call. ``Saves`` copies the state to
page-locked memory during the next forward and backward, even if your loop calls ``loss.item()``.
A thread writes the copy. A directory gets its final name only when the checkpoint in it is complete.

.. result-gain:: checkpoint_stall
   :rows: overlapped_writer torch_checkpointing none
   :field: staging_cost_s
   :where: model=llama-1b step=long loop=reads compiled=no storage=memory

``overlapped_writer`` stages with this recipe (:doc:`overlapped_writer`). ``torch_checkpointing`` is
a package that stages in the background. ``none`` is the same measurement without a save: the noise.

**When not to bother:** your state is a few megabytes, you save once an hour (:doc:`async_save`
costs next to nothing then), or the host cannot spare a copy of each rank's shards.

.. code-block:: python

   from pathlib import Path

   from overlap_recipes.checkpoint import Saves, TrainingState

   app = TrainingState(model, optimizer, schedule=scheduler)
   root = Path("checkpoints")
   with Saves(device, model.buffers) as saves:
       saves.prepare({"app": app})  # beside the first steps; without it the first save takes seconds
       for step, batch in enumerate(batches, scheduler.last_epoch + 1):
           train_step(batch)  # ends with optimizer.step(), scheduler.step(); loss.item() after save
           if step % 100 == 0:
               saves.save({"app": app}, root / f"step{step}")

Your project needs the package ``overlap_recipes``: ``pip install .`` in this repository, or a copy
of its folder ``overlap_recipes``. ``device`` is the rank's, such as
``torch.device("cuda", local_rank)``. To resume, call
``dcp.load({"app": app}, checkpoint_id=root / "step100")`` before the block; :doc:`keep_verify_prune` finds
the newest.

**Does anything but an optimizer's** ``step`` **write what you save**, such as an average of weights
(its update or its swap), a load, a CUDA graph, or another method of the optimizer (SAM's first step,
ScheduleFree's ``eval``)? Call ``saves.before_update()`` before it. Otherwise the checkpoint can hold
some tensors from before the change and some from after it, and nothing reports that.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * which four orderings a correct overlapped save needs, and what breaks without each
      * how all ranks agree that a checkpoint is complete, and why ``.metadata`` does not say so
      * how to end by an exception without a hang and without a wrong checkpoint

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later on Linux, any number of ranks, CPU or GPU
      * page-locked host memory for one copy of each rank's shards
      * one file system that all ranks see

.. verification-badge::

The idea
--------

:doc:`staging_copies` moves the bytes. Four orderings make that a *correct* save:

.. lanes:: Schematic. The copy after step 1 runs beside the next forward and backward; the write beside all that follows.

   compute:  0-6 step 1; 6-14 forward, backward; 14-16 update 2; 16-24 forward, backward; 24-26 update 3
   copy:     6-12 to the arena ~; 26-32 to the arena ~
   write:    12-24 write state 1 ~; 32-40 write state 3 ~
   @6 1: the copy waits for the step
   @14 2: the next update waits for the copy

1. **Copy after step**: the copies wait for an event that is recorded after ``optimizer.step()``.
2. **Update after copy**: within the ``with`` block, a hook before every optimizer's step waits until
   makes the GPU wait until the state has been read.
3. **Forward after snapshot**: buffers that forward changes are copied on the device first.
4. **Refill after write**: host memory is filled again only when its write has ended.

In the loop, the training thread waits for storage in one case: writing a checkpoint takes longer
than the time between two saves. The log says how long (``if_busy="skip"`` leaves such a save out).
At its end, the ``with`` block waits for all writes.

A checkpoint is first written to ``step100.incomplete``. When all ranks have written their part,
rank 0 renames the directory. **Trust the name, not** ``.metadata``. If the process group is
destroyed while a stock ``async_save`` is being written, each rank takes itself for the only one
and writes over the files of the others. The result has a ``.metadata``, loads without an error,
and is wrong.
"""

# %%
# Imports and numbers
# -------------------
# The numbers are the module's.
#
# .. literalinclude:: /overlap_recipes/checkpoint/saves.py
#    :language: python
#    :start-at: DEADLINE_S = 600.0
#    :end-at: FEWEST_THREADS = 2

import argparse
import tempfile
from pathlib import Path

import torch.distributed as dist

from overlap_recipes.checkpoint.saves import Saves

# %%
# The save
# --------
# ``save`` runs on the training thread. It reads whatever is not on the device, checks that the plan
# still fits, and queues snapshots and copies. A thread waits until they have arrived, and writes. It
# is told its device: a new thread would open a context on the first.
#
# The first save of a run locks memory and plans, for seconds. ``prepare`` does both beside the first
# steps, from the tensors of the state alone: no other thread ever touches an optimizer.
#
# ``together`` runs a function on all ranks, and raises on all of them if it failed on one. A full
# disk, memory that the driver refuses to lock, or a state that one rank cannot stage costs that
# checkpoint and nothing else. The error is logged when it happens, and stored in that save's
# future. ``saves.wait()`` and the end of the block raise the first. Training and later saves
# continue.
#
# If an exception leaves the ``with`` block, no further write starts, and the current one gets
# ``EXIT_S`` seconds. The training thread calls no collective then: the other ranks may never join it.
# The writing thread is a daemon and ends with the program.
#
# ``write`` is :doc:`overlapped_writer`.
#
# .. literalinclude:: /overlap_recipes/checkpoint/saves.py
#    :language: python
#    :pyobject: Saves
#
# Run it, and prove it
# --------------------
# The proof trains a model with a buffer that forward changes, and saves after each of five steps.
# Each must hold its own step's bits.


def main(directory: Path) -> None:
    import _toys as basic

    device = basic.start_rank()
    root, app, expected = basic.directory_of_rank_0(directory), basic.build_app(device), {}
    with Saves(device, app.model.buffers) as saves:
        for step in range(1, 6):
            basic.train_step(app, device)
            expected[step] = basic.snapshot(app)
            saves.save({"app": app}, root / f"step{step}")
    for step, bits in expected.items():
        basic.assert_same_bits(basic.load_app(root / f"step{step}", device), bits)
    print(f"checkpoints of steps {list(expected)} loaded back, every bit equal")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, help="where checkpoints go (default: temporary)")
    with tempfile.TemporaryDirectory() as temporary:
        main(parser.parse_args().dir or Path(temporary))

# %%
# What it buys
# ------------
# The tables are of a stock Llama. The loop calls ``loss.item()`` every step; transformers' mask check
# reads one scalar more (:doc:`/guide/measured`).
#
# .. result-table:: checkpoint_stall
#    :rows: none dcp_save overlapped_writer
#    :where: step=long storage=memory
#
# If the loop calls ``loss.item()`` and then saves, as in the tables, the device idles during the
# call: save first. The writing thread shares Python's interpreter lock with training.
#
# What breaks if you remove a line
# --------------------------------
# Streams do nothing on a CPU. A recorder of stream order finds accesses that no event orders.
#
# .. recipe-controls::
#
# Memory
# ------
# Page-locked host memory, from the first save until ``saves`` is deleted: the bytes of this rank's
# shards; ``host_bytes`` bounds it. The first save is a far longer call: it locks this memory, and
# the driver launches no kernel of this process meanwhile. ``prepare`` does it behind the second
# step. A save whose tensors have moved plans anew and waits for the device; it locks more memory
# only if the state has grown.
#
# Under DDP every rank stages the whole state, though only one copy is written. Shard the optimizer's
# state there.
#
# Known limits
# ------------
# * If a CUDA graph holds an optimizer's step, capture it before the first save. Never save during
#   a capture.
# * Ranks decide to save by step, not by a clock, and give each save its own name: one call more on
#   one rank can mix two steps under one name.
# * ``model.to`` can give a model new buffers. Pass ``model.buffers`` without parentheses, so that
#   each plan asks for those of now. With a list, new buffers are copied while forward changes them.
# * Save after ``optimizer.step()``: gradients of a half-done accumulation are not in the state.
# * ``nn.Embedding(max_norm=...)`` changes its weight in forward: pass it with the buffers.
# * A save to ``step100`` deletes ``step100.incomplete`` and ``step100.replaced``.
# * Ctrl-C and ``sys.exit`` count as exceptions: saves that wait are dropped, and logged. Either,
#   caught inside the block, can make later saves fail or, rarely, wait for ever. Very rarely, the
#   program's end waits for a second Ctrl-C.
# * A child that is forked during a copy hangs in an optimizer's ``step``.
# * A tensor that is new at every save, such as ``torch.get_rng_state()``, makes every save plan
#   anew and wait for the device. Save it as a list: ``.tolist()``.
# * A directory of that name that holds anything but a checkpoint is left alone: the save fails, and
#   its complete checkpoint stays in ``step100.incomplete``. Write a tokenizer elsewhere, or when
#   the future is done.
# * A state that calls ``get_state_dict`` at every save (``AppState``) works too; the call is longer.
# * A program that ends without leaving the block loses what is not yet written, without a word.
# * A directory is taken for a local path, even ``s3://...``: :doc:`object_storage` saves to a
#   store.
# * Call ``save`` on one thread. Two jobs that save to one path at once write over each other:
#   :doc:`keep_verify_prune` locks the root. Give no path that is a symlink; a link above it is fine.
# * The directory is not flushed, and an older checkpoint of the same name is replaced:
#   :doc:`keep_verify_prune`.
#
# Further reading
# ---------------
# * `torch.distributed.checkpoint
#   <https://docs.pytorch.org/docs/stable/distributed.checkpoint.html>`__
# * `register_optimizer_step_pre_hook
#   <https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.register_step_pre_hook.html>`__
