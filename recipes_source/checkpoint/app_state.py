# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, checkpoint/app_state.py
"""
Ask for a state, and load it
============================

Save model and optimizers with ``torch.distributed.checkpoint`` (DCP), and load them, also with frozen
layers, several optimizers, or a save before the first step. ``AppState`` gets from DCP what a restart
reads, undoes what asking has done to training, and raises where a load would leave out optimizer
state that the checkpoint lists.

**When not to bother:** every parameter is trained from the first step to the last by one optimizer,
and you save after the first step. Then ``get_state_dict`` and ``set_state_dict`` suffice.

.. code-block:: python

   import torch.distributed.checkpoint as dcp
   from overlap_recipes.checkpoint import AppState

   app = AppState(model, optimizer)                                  # or a list of optimizers

   app.step += 1                                                     # at each step

   dcp.save({"app": app}, checkpoint_id="checkpoints/step1000")      # at each save

   dcp.load({"app": app}, checkpoint_id="checkpoints/step1000")      # to resume

Your project needs the package ``overlap_recipes``: ``pip install .`` in this repository, or a copy
of its folder ``overlap_recipes``. Before you load, make model and optimizer as they were at the
save; freeze, regroup and add after the load.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * what a save before the first step does to training
      * which optimizer state a load leaves out or makes up without a word
      * how a checkpoint can say what it holds

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks, CPU or GPU
      * a model sharded with ``fully_shard`` (FSDP2), under DDP, or a plain one

.. verification-badge::

The idea
--------

.. lanes:: Schematic. A layer is trained, then frozen, then trained again; the job restarts between.

   job:      0-4 train both; 4-8 layer frozen; 8-10 save !
   resumed:  10-12 load !; 12-16 layer frozen; 16-20 train both
   moments:  0-10 of the layer ~; 12-20 still there ~

DCP names optimizer state after its parameter and returns each rank's shards as DTensors. That is
why you can load the checkpoint on another number of ranks. Three things go wrong without a word:

* An optimizer that has not stepped has no state. ``get_state_dict`` therefore makes it step once,
  with zero gradients and a learning rate of zero. That step leaves marks: a counted step, weight
  decay in the moments of ``Adam``, a momentum buffer that was not there. Saving before the first
  step would thus change training (`pytorch#164929
  <https://github.com/pytorch/pytorch/issues/164929>`__).
* A load needs made-up state, too, because DCP fills tensors that exist. State in the checkpoint for
  which the new job has no tensor is left out. State that the checkpoint lacks makes DCP raise, or,
  in a partial load, stays made up.
* ``set_state_dict`` leaves out the state of parameters that are frozen, and torch's optimizers cast
  state to the type of its parameter.

So the checkpoint says in ``has_state`` which parameters the optimizers hold, and which state each
really has. After a load, those have it, and no others. If the new job has no room for something,
the load raises. ``load`` of ``overlap_recipes.checkpoint`` reads that list first: it makes the room,
lets no optimizer step, and says on all ranks what differs before anything changes.
"""

# %%
# Imports
# -------
# They are the proof's. The module needs torch and the standard library alone.

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

# %%
# The state
# ---------
# DCP calls ``state_dict()`` on every ``Stateful`` object that you pass to it, on the calling
# thread. ``ask`` gets the state, and undoes what asking has done to optimizers that have not
# stepped: their state is saved, so that a checkpoint of step 0 loads as later ones do, but they do
# not keep it.
#
# ``dcp.load`` calls ``state_dict()`` first, fills the tensors of that dict (``given`` is its ``id``),
# and hands it to ``load_state_dict``. If ``has_state`` was not filled, other code has saved the
# checkpoint, or there was none. ``compare`` raises for what differs, ``take`` loads.
#
# ``noted`` is what ``has_state`` says: parameter names, each with the keys of its state. ``split``
# has the names of this job's groups, ``self.named`` pairs of parameter and name, ``room`` the state
# keys into which DCP can load. ``made_up`` are ids of groups whose state DCP has made.
#
# .. literalinclude:: /overlap_recipes/checkpoint/state.py
#    :language: python
#    :pyobject: AppState.state_dict
#
# .. literalinclude:: /overlap_recipes/checkpoint/state.py
#    :language: python
#    :pyobject: AppState.ask_dcp
#
# .. literalinclude:: /overlap_recipes/checkpoint/state.py
#    :language: python
#    :pyobject: AppState.compare
#
# .. literalinclude:: /overlap_recipes/checkpoint/state.py
#    :language: python
#    :pyobject: AppState.take
#
# .. literalinclude:: /overlap_recipes/checkpoint/state.py
#    :language: python
#    :pyobject: AppState.load_optimizers
#
# What is copied beside training
# ------------------------------
# :doc:`overlapped_stager` reads a state with ``read``: it lists dense tensors and DTensors, for a
# ``CopyPlan``, and copies everything else (Python numbers, sparse tensors) at once. Tensors that are
# made of others (float8 weights, 8-bit moments) are in a state by their parts.
#
# .. literalinclude:: /overlap_recipes/checkpoint/state.py
#    :language: python
#    :pyobject: is_staged
#
# .. literalinclude:: /overlap_recipes/checkpoint/state.py
#    :language: python
#    :pyobject: walk
#
# .. literalinclude:: /overlap_recipes/checkpoint/state.py
#    :language: python
#    :pyobject: read
#
# Run it, and prove it
# --------------------
# A job saves before its first step. After its second it freezes a layer and saves again. It loads
# that checkpoint itself, and so does another job. The first thaws the layer, and both train on: they
# must end with the same bits. A third job loads step 0, and must have no optimizer state.


def main(directory: Path) -> None:
    import state_to_save as basic

    device = basic.start_rank()
    root, app = basic.directory_of_rank_0(directory), basic.build_app(device)
    dcp.save({"app": app}, checkpoint_id=root / "step0")
    assert not app.optimizer.state, "the save made a state for the optimizer"
    basic.train(app, 2, device)
    saved = basic.snapshot(app)
    app.model[1].requires_grad_(False)
    dcp.save({"app": app}, checkpoint_id=root / "step2")

    dcp.load({"app": app}, checkpoint_id=root / "step2")
    later = basic.load_app(root / "step2", device)
    app.model[1].requires_grad_()
    for job in (app, later):
        basic.assert_same_bits(job, saved)
    ended = basic.snapshot(basic.train(app, 4, device))
    basic.assert_same_bits(basic.train(later, 4, device), ended)
    print("a layer that was frozen at the save goes on with its moments, in both jobs")

    first = basic.load_app(root / "step0", device)
    assert not first.optimizer.state, "the load made a state for the optimizer"
    print("a job that loads step 0 has no optimizer state")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, help="where checkpoints go (default: temporary)")
    with tempfile.TemporaryDirectory() as temporary:
        main(parser.parse_args().dir or Path(temporary))

# %%
# What breaks if you remove a line
# --------------------------------
# .. recipe-controls::
#
# What is not here
# ----------------
# The learning-rate schedule, the random number generators, the position in the data, an average of
# the weights. ``TrainingState`` has random numbers always, and takes the others by name:
# ``TrainingState(model, optimizer, scheduler=scheduler, ema=ema, per_rank={"data": loader})``.
#
# Known limits
# ------------
# * On all ranks, the optimizers must hold the same parameters. If they do not (pipeline stages,
#   experts of a rank), ``Saves`` refuses them. Give each rank's state a key of its own:
#   ``{f"app{rank}": app}``.
# * What ``dcp.load`` of torch cannot do, and ``load`` does: a parameter that no backward has reached
#   (``Missing key``), state that an optimizer adds after its first step, lists that are longer than in
#   the new job, another number of ranks. A ``dcp.load`` that raises may have overwritten weights.
# * An in-memory state is refused if it is the very dict that was returned: pass a deep copy.
# * Optimizers that wrap another are refused. Pass what they wrap (``sam.base_optimizer``). Instead of
#   ``ZeroRedundancyOptimizer``, use ``fully_shard``.
# * An optimizer that keeps nothing in ``state``, and moments in attributes of its own, makes a step
#   whenever the state is asked for: its moments shrink, and are not saved.
# * ``SparseAdam`` and ``LBFGS`` cannot make the step of an optimizer that is new: use ``load``. With
#   ``Adam(eps=0)`` a save before the first step makes weights NaN. Made in mid-accumulation with Accelerate's wrapped optimizer, that checkpoint never loads: pass
#   ``optimizer.optimizer``.
# * The step that ``get_state_dict`` makes runs the optimizer's hooks. If a hook updates an average
#   of the weights, it counts the first weights once more.
# * Plain tensors in the state of a sharded parameter are refused: nobody knows whose they are.
# * DCP assumes that plain tensors are replicated, and keeps one rank's copy of each. Under DDP,
#   BatchNorm's statistics differ between ranks: use ``SyncBatchNorm``, or broadcast the buffers.
# * DCP cannot write sparse or nested tensors and raises: save the dense tensors that they are made
#   of. A named tuple may come back as a tuple.
#
# Further reading
# ---------------
# * `torch.distributed.checkpoint.state_dict
#   <https://docs.pytorch.org/docs/stable/distributed.checkpoint.html>`__: the reference
