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
   from app_state import AppState

   app = AppState(model, optimizer)                                  # or a list of optimizers

   app.step += 1                                                     # at each step

   dcp.save({"app": app}, checkpoint_id="checkpoints/step1000")      # at each save

   dcp.load({"app": app}, checkpoint_id="checkpoints/step1000")      # to resume

Your project needs this file alone: what it imports in ``main()`` is for the proof. Before
you load, make model and optimizer as they were at the save; freeze, regroup and add after the load.

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
* ``set_state_dict`` leaves out the state of parameters that are frozen.

So the checkpoint says in ``has_state`` which parameters the optimizers hold, and which state each
really has. After a load, those have it, and no others. If the new job has no room for something,
the load raises.
"""

# %%
# Imports
# -------
# ``AppState`` needs torch and the standard library alone.

import argparse
import json
import logging
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from itertools import chain
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

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
# checkpoint, or there was none. While DCP sets the optimizer's state, ``load`` sets ``requires_grad``
# of frozen parameters that have state, and lets no optimizer look new: DCP would make it step.
#
# ``noted`` is what ``has_state`` says: parameter names, each with the keys of its state. ``split``
# has the names of this job's groups, ``self.named`` pairs of parameter and name, ``room`` the state
# keys into which DCP can load. ``made_up`` are ids of groups whose state DCP has made.

NO_STATE = "%s never had a gradient: load with DefaultLoadPlanner(allow_partial_load=True)"
NO_ROOM = "no room here for the checkpoint's state of %s: frozen, left out, or added later?"
UNKNOWN = (
    "the checkpoint knows no %s: add what is new after the load; all ranks need the same names"
)
NOT_LOADED = (
    "no 'has_state' in this checkpoint: load it with set_state_dict (in memory: a deepcopy)"
)


def groups(optimizers: list[torch.optim.Optimizer]) -> list[dict]:
    return [*chain.from_iterable(optimizer.param_groups for optimizer in optimizers)]


class AppState(Stateful):
    """Model, optimizer or several, and the number of steps taken.

    Raises:
        TypeError: an optimizer keeps its state in another one.
        ValueError: two optimizers share a parameter, or a checkpoint does not fit this job.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | list) -> None:
        self.model, self.optimizer, self.step, self.given = model, optimizer, 0, None
        alone = isinstance(optimizer, torch.optim.Optimizer)
        self.optimizers = [optimizer] if alone else [*optimizer]
        for outer in self.optimizers:
            for name, inner in vars(outer).items():
                if isinstance(inner, torch.optim.Optimizer) and inner.state is not outer.state:
                    raise TypeError(f"{type(outer).__name__} keeps its state in {name}: pass that")

    def state_dict(self) -> dict:
        model, optim = self.ask()
        state = {"model": model, "optim": optim, "step": self.step, "has_state": self.has_state}
        self.given = id(state)
        return state

    def load_state_dict(self, state_dict: dict) -> None:
        self.load(state_dict)
        self.step = state_dict["step"]

    def ask(self) -> tuple[dict, dict]:
        """The states of model and optimizers; a step that DCP has made is undone.

        Notes in ``has_state`` which parameters have which state; warns where some is missing.
        """
        new = [optimizer for optimizer in self.optimizers if not optimizer.state]
        made_up, rates = [*map(id, groups(new))], [(g, g["lr"]) for g in groups(new) if "lr" in g]
        gradients = [(p, p.grad) for group in groups(new) for p in group["params"]]
        try:
            for parameter, _ in gradients:  # with gradients there, DCP would make no state
                parameter.grad = None
            model, optim = dcp_state.get_state_dict(self.model, self.optimizers)
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for group, rate in rates:  # DCP steps with rate 0
                group["lr"] = rate
            for optimizer in new:
                optimizer.state.clear()
        self.metadata, state = getattr(model, "_metadata", None), optim.get("state", {})
        self.split, self.named, noted = [], [], {}
        for own, saved in zip(groups(self.optimizers), optim.get("param_groups", []), strict=True):
            if not noted.keys().isdisjoint(saved["params"]):
                raise ValueError("two optimizers hold one parameter: DCP has room for one state")
            real = {} if id(own) in made_up else state
            noted |= {name: [*map(str, real.get(name, ()))] for name in saved["params"]}
            named = [*zip(own["params"], saved["params"], strict=False)]
            missing = [name for p, name in named if p.requires_grad and not noted[name]]
            if missing and any(noted[name] for _, name in named):
                logging.getLogger(__name__).warning(NO_STATE, missing)
            self.split, self.named = [*self.split, saved["params"]], self.named + named
        self.has_state = json.dumps(noted)
        return model, optim

    def load(self, state: dict) -> None:
        """Load ``model`` and ``optim``; what ``has_state`` lists gets its state, all else none."""
        if self.given is None:
            self.ask()
        if state["has_state"] is self.has_state and id(state) == self.given:
            raise ValueError(NOT_LOADED)
        noted, optim, frozen = json.loads(state["has_state"]), {**state["optim"]}, []
        there = optim["state"]
        room = {name: {*map(str, there.get(name, ()))} for names in self.split for name in names}
        lost = [n for n, keys in noted.items() if n not in room or not room[n].issuperset(keys)]
        if lost:
            raise ValueError(NO_ROOM % lost)
        if unknown := room.keys() - noted.keys():
            raise ValueError(UNKNOWN % sorted(unknown))
        saved_groups = [noted.keys() & group["params"] for group in optim["param_groups"]]
        own_groups = [noted.keys() & names for names in self.split]
        if any(names and names not in saved_groups for names in own_groups):
            raise ValueError("load into the groups of the save: change the groups after the load")
        optim["state"] = {"": {}}  # a name: DCP would take a state without names for another format
        for name, keys in noted.items():
            if keys:
                optim["state"][name] = {k: v for k, v in there[name].items() if str(k) in keys}
        some = dcp_state.StateDictOptions(strict=False)  # not every parameter has state
        try:
            for optimizer in self.optimizers:  # one without state would step
                optimizer.state[""] = {}
            for parameter, name in self.named:
                if noted.get(name) and not parameter.requires_grad:  # DCP would skip its state
                    frozen.append(parameter.requires_grad_())
            if self.optimizers:
                dcp_state.set_optimizer_state_dict(self.model, self.optimizers, optim, options=some)
        finally:
            for optimizer in self.optimizers:
                optimizer.state.pop("", None)
            for parameter in frozen:
                parameter.requires_grad_(False)
        model = OrderedDict(state["model"])
        model._metadata = self.metadata
        dcp_state.set_model_state_dict(self.model, model)


# %%
# What is copied beside training
# ------------------------------
# :doc:`overlapped_stager` reads a state with ``read``: it lists dense tensors and DTensors, for a
# ``CopyPlan``, and copies everything else (Python numbers, sparse tensors) at once. A DTensor of another
# library's tensor is a ``TypeError``. A dict with an attribute ``kept_tensors`` promises not to
# change, so ``read`` does not walk it again (:doc:`kept_state` makes such dicts).


def is_staged(leaf: object) -> bool:
    """Whether ``leaf`` is a dense tensor or a DTensor of one."""
    x = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
    is_dense = type(x) in (torch.Tensor, nn.Parameter) and x.layout == torch.strided
    return is_dense and not (x.is_quantized or x.is_meta)


def walk(tree: object, function: Callable[[object], object]) -> object:
    """A copy of nested dicts, lists and tuples, with ``function`` applied to all else but names."""
    if isinstance(tree, dict):
        return {key: walk(value, function) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        values = [walk(value, function) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return tree if isinstance(tree, str) else function(tree)


def read(tree: object, tensors: list[torch.Tensor]) -> object:
    """Copy ``tree`` as it is now, except what will be staged: add that to ``tensors``."""

    def read_leaf(leaf: object) -> object:
        leaf = leaf.detach() if torch.is_tensor(leaf) and not is_staged(leaf) else leaf
        if is_staged(leaf):
            tensors.append(leaf)
            return leaf
        if isinstance(leaf, DTensor):
            raise TypeError(f"save the plain tensor in a DTensor of {type(leaf._local_tensor)}")
        return leaf.clone().to("cpu") if torch.is_tensor(leaf) else deepcopy(leaf)

    tree = tree.state_dict() if hasattr(tree, "state_dict") else tree
    if hasattr(tree, "kept_tensors"):
        tensors += tree.kept_tensors
        return tree
    if isinstance(tree, dict):
        return {key: read(value, tensors) for key, value in tree.items()}
    return walk(tree, read_leaf)


# %%
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
# the weights. Add each as another entry of the dict that you save: :doc:`resume_and_reshard` does
# so. :doc:`kept_state` takes them by name, and asks less often.
#
# Known limits
# ------------
# * On all ranks, the optimizers must hold the same parameters. If they do not (pipeline stages,
#   experts of a rank), the load raises on some ranks, and the others wait for them. Give each rank's
#   state a key of its own: ``{f"app{rank}": app}``.
# * A parameter that no backward has reached has no optimizer state, so the checkpoint has none for
#   it; the save logs a warning, if others of its group have some. The job that loads the checkpoint
#   expects some, and ``dcp.load`` ends with ``Missing key``. Load with
#   ``DefaultLoadPlanner(allow_partial_load=True)``.
# * State that an optimizer adds after its first step makes a load into a new job raise. State that
#   grows inside a list or a dict is cut to what the new job has.
# * A load that raises may have overwritten weights and moments already.
# * An in-memory state is refused if it is the very dict that was returned: pass a deep copy.
# * Optimizers that wrap another are refused. Pass what they wrap (``sam.base_optimizer``). Instead of
#   ``ZeroRedundancyOptimizer``, use ``fully_shard``.
# * An optimizer that keeps nothing in ``state``, and moments in attributes of its own, makes a step
#   whenever the state is asked for: its moments shrink, and are not saved.
# * ``SparseAdam`` and ``LBFGS`` cannot make the step of an optimizer that is new: a save before the
#   first step, and a load into a new job, raise. With ``Adam(eps=0)`` that save makes weights NaN.
#   Made in mid-accumulation with Accelerate's wrapped optimizer, that checkpoint never loads: pass
#   ``optimizer.optimizer``.
# * The step that ``get_state_dict`` makes runs the optimizer's hooks. If a hook updates an average
#   of the weights, it counts the first weights once more.
# * Torch's optimizers cast state to the dtype of its parameter at a load: float32 masters of a
#   bfloat16 model, or NAdam's ``mu_product`` there, are rounded.
# * DCP assumes that plain tensors are replicated, and keeps one rank's copy of each. Under DDP,
#   BatchNorm's statistics differ between ranks: use ``SyncBatchNorm``, or broadcast the buffers.
# * DCP cannot write sparse or nested tensors and raises: save the dense tensors that they are made
#   of. A named tuple may come back as a tuple.
#
# Further reading
# ---------------
# * `torch.distributed.checkpoint.state_dict
#   <https://docs.pytorch.org/docs/stable/distributed.checkpoint.html>`__: the reference
