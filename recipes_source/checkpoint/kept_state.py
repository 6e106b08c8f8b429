# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, checkpoint/kept_state.py
"""
Ask for the state once
======================

Make each save's call shorter. ``get_state_dict`` runs on the training thread at every save, and
takes longer the more tensors there are. Yet almost nothing of its result changes: the same tensors
lie in the same places. For stock modules and optimizers, ``TrainingState`` calls it again only when
they hold other tensor objects.

.. result-gain:: checkpoint_stall
   :rows: overlapped_writer torch_checkpointing torchtitan_async_with_pinned_mem
   :field: call_s
   :where: model=llama-1b step=long loop=reads compiled=no storage=memory

Times of whole save calls, not of this recipe alone. ``overlapped_writer`` saves a
``TrainingState``. The other two, a package and a mode of torchtitan, save in the background as well.

**When not to bother:** your state has few tensors, your saves stop training anyway, or you save
once an hour.

.. code-block:: python

   import torch.distributed.checkpoint as dcp
   from overlap_recipes.checkpoint import TrainingState

   app = TrainingState(model, optimizer, schedule=scheduler)                     # once

   saved = dcp.async_save({"app": app}, checkpoint_id=f"checkpoints/step{step}")  # at each save
   ...                                                                            # train
   saved.result()                                              # before the next save, and at the end

   dcp.load({"app": app}, checkpoint_id="checkpoints/step100")                   # to resume

Pass it to any save of DCP; that of the figure is :doc:`overlapped_writer`. Your project needs the
package ``overlap_recipes``: ``pip install .`` in this repository, or a copy of its folder
``overlap_recipes``. Pass several optimizers one after the other, and what ``AppState`` calls
``step`` by a name, as the schedule. ``async_save`` itself needs gloo beside NCCL:
``init_process_group()`` without a backend has both.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * what stays the same from save to save, and what can replace tensors unnoticed
      * how to detect that by comparing object identities alone

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks, CPU or GPU
      * a model sharded with ``fully_shard`` (FSDP2), under DDP, or a plain one

.. verification-badge::

The idea
--------

Parameters, buffers and optimizer state live in dicts: those of each module and of each optimizer.
At each save the recipe compares, by identity, what these dicts hold with what they held when it
last called ``get_state_dict``:

.. lanes:: Schematic. What a save costs the training thread.

   get_state_dict:  0-8 save !; 14-22 save !; 28-36 save !
   kept:            0-8 save !; 14-15 save; 28-29 save

``optimizer.load_state_dict``, a new layer and ``model.load_state_dict`` with ``assign=True`` each
put another object into one of the dicts. Then the recipe calls ``get_state_dict`` again. (After
``assign=True`` the optimizer has to be made anew, with any kind of save.)
``p.data = ...`` keeps the object and replaces its memory. The kept state holds the parameter itself,
so whoever copies it sees the new memory.
"""

# %%
# Imports
# -------
# They are the proof's. The module builds on :doc:`app_state`, whose ``AppState`` asks for the state
# and loads it.

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.utils._pytree import tree_map_only

from overlap_recipes.checkpoint.kept_state import TrainingState, memory_of

# %%
# A dict that does not change
# ---------------------------
# A save that writes in the background may look at the state steps later. So what ``TrainingState``
# returns is a copy of the dicts, and refuses changes. ``kept_tensors`` lists its tensors, for saves
# that need no more than those on the training thread (:doc:`overlapped_stager`).
#
# .. literalinclude:: /overlap_recipes/checkpoint/kept_state.py
#    :language: python
#    :pyobject: Kept
#
# .. literalinclude:: /overlap_recipes/checkpoint/kept_state.py
#    :language: python
#    :start-at: # without it, tree_map takes a Kept for one leaf
#    :end-at: register_pytree_node(Kept,
#
# The state of a training job
# ---------------------------
# ``get_state_dict`` gives each parameter a new tensor object; ``TrainingState`` puts the parameter
# itself in its place. What is not a tensor is read at every save: the groups of the optimizers,
# whose learning rate a schedule changes, and everything that you pass by name. A step count that is
# a Python number would be kept as it is now, so such an optimizer makes every save call
# ``get_state_dict``. So does a model or an optimizer with code of its own in ``state_dict``, or with
# state-dict hooks: that code may decide later what to add. Other hooks do not matter.
#
# .. literalinclude:: /overlap_recipes/checkpoint/kept_state.py
#    :language: python
#    :start-at: # Private by name
#    :end-at: not_saved_of, methods_of = attrgetter(
#
# .. literalinclude:: /overlap_recipes/checkpoint/kept_state.py
#    :language: python
#    :pyobject: memory_of
#
# .. literalinclude:: /overlap_recipes/checkpoint/kept_state.py
#    :language: python
#    :pyobject: is_stock
#
# .. literalinclude:: /overlap_recipes/checkpoint/kept_state.py
#    :language: python
#    :pyobject: TrainingState
#
# Run it, and prove it
# --------------------
# After each of several changes, the proof compares the kept state with the result of a new
# ``get_state_dict``: the same keys, the same memory, the same numbers. Between them, one new model
# loads the checkpoint of step 3, and another that of step 0.


def same_state(app: TrainingState) -> bool:
    kept, fresh = app.state_dict(), app.ask()
    kept = kept["model"], kept["optim"]
    kept, fresh = tree_map_only(torch.Tensor, memory_of, (kept, fresh))
    return kept == fresh


def main(directory: Path) -> None:
    import async_save as basic

    device = basic.start_rank()
    root, trained = basic.directory_of_rank_0(directory), basic.build_app(device)
    schedule = torch.optim.lr_scheduler.ExponentialLR(trained.optimizer, 0.9)
    app = TrainingState(trained.model, trained.optimizer, schedule=schedule)
    dcp.save({"app": app}, checkpoint_id=root / "step0")
    assert not trained.optimizer.state, "the save made a state for the optimizer"
    for _ in range(3):
        basic.train_step(trained, device)
        schedule.step()
        assert same_state(app), "the kept state is not the state"
    assert app.asked == 2, "three steps were three states"

    dcp.save({"app": app}, checkpoint_id=root / "step3")
    for step in (3, 0):
        other = basic.build_app(device, seed=1)
        rate = torch.optim.lr_scheduler.ExponentialLR(other.optimizer, 0.9)
        loaded = TrainingState(other.model, other.optimizer, schedule=rate)
        dcp.load({"app": loaded}, checkpoint_id=root / f"step{step}")
        assert bool(other.optimizer.state) == (step > 0) and rate.last_epoch == step
        if step == 3:
            other.step = trained.step
            basic.assert_same_bits(other, basic.snapshot(trained))

    trained.optimizer.load_state_dict(trained.optimizer.state_dict())
    assert same_state(app), "a loaded optimizer was not noticed"
    trained.model.append(nn.LayerNorm(4, device=device))
    assert same_state(app), "a new layer was not noticed"
    trained.model[-1].weight.data = torch.zeros(4, device=device)
    assert same_state(app), "a weight in new memory was not noticed"
    print(f"asked {app.asked} times, right every time")
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
# What it costs
# -------------
# Every save compares the identity of each tensor, module and moment. The recipe keeps references to
# the tensors that it knows, so an optimizer state that was replaced lives until the next save.
#
# Known limits
# ------------
# * Private by name, though in every torch that these pages run on: ``_parameters``,
#   ``_buffers``, ``_modules``, ``_non_persistent_buffers_set``, ``_save_to_state_dict``, the dicts of
#   hooks of ``nn.Module`` and ``Optimizer``, ``_local_tensor`` of ``DTensor``, and the module
#   ``torch.utils._pytree``.
# * ``get_state_dict`` runs at every save, right and without a gain, for:
#   ``FullyShardedDataParallel`` (FSDP1); a model or an optimizer with its own ``state_dict`` or
#   state-dict hooks (Accelerate's optimizer: pass ``optimizer.optimizer``); extra state; a scripted
#   model; weights that share memory but are not one object, since one of them can move away; two
#   empty plain tensors of one shape; subclasses of ``nn.Parameter``; quantized tensors; optimizer
#   state with dicts or numbers in it.
# * The values are the parameters themselves: call ``detach()``, or work under ``no_grad``. With an
#   attribute that cannot be pickled on a parameter, such as a lock or a process group,
#   ``DefaultStager`` raises.
# * A checkpoint of other code has no ``has_state``. ``dcp.load`` of it raises, also with
#   ``allow_partial_load=True``: load it with ``get_state_dict`` and ``set_state_dict``.
# * What ``state_dict`` returns may refuse changes, because later saves use it. To leave a name out,
#   build a dict of your own from it.
# * A save or load before the first step calls ``optimizer.step`` at rate 0, as ``get_state_dict``
#   does. Your hooks on ``step`` run. Optimizers that draw noise, count their own steps or set their
#   own rate (Adafactor with relative steps and decay) change the training. Save after a step.
# * Models that change their layers at every step gain nothing.
# * It saves no random state and no position in the data: pass objects that do, by name.
# * The limits of :doc:`app_state` apply, such as those of BatchNorm under DDP.
# * After an evaluation, ``fully_shard`` can leave the root module gathered. That module then holds
#   other parameters than before, and the next save calls ``get_state_dict`` again: right, and slow.
