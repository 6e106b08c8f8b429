# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, checkpoint/kept_state.py
"""
Ask for the state once
======================

Shorten the call of a save when the state has many tensors. ``get_state_dict`` runs on the training
thread at every save, and takes longer the more tensors there are. Yet almost nothing of its result
changes: the same tensors lie in the same places. ``TrainingState`` calls it
again only if model or optimizers hold other tensor objects than at the last call.

.. result-gain:: checkpoint_stall
   :rows: overlapped_writer torch_checkpointing torchtitan_async_with_pinned_mem
   :field: call_s
   :where: model=llama-1b step=long loop=reads compiled=no storage=memory

These are the times that the call of a save takes. ``overlapped_writer`` saves a ``TrainingState``.
The other two, a package and a mode of torchtitan, save in the background as well.

**When not to bother:** your state has few tensors, your saves stop training anyway, or you save
once an hour.

.. code-block:: python

   import torch.distributed.checkpoint as dcp
   from kept_state import TrainingState

   app = TrainingState(model, optimizer, schedule=scheduler)   # once

   saves.save({"app": app}, root / f"step{step}")              # saves: see overlapped_stager
   dcp.load({"app": app}, checkpoint_id=root / "step100")      # to resume

Your project needs this file alone: what it imports in ``main()`` is for the proof.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * what stays the same from save to save, and what can replace it without your noticing
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
put another object into one of the dicts. Then the recipe calls ``get_state_dict`` again.
``p.data = ...`` keeps the object and moves its memory. The kept state holds the parameter itself,
so whoever copies it sees the new memory.
"""

# %%
# Imports
# -------
# This file needs torch and the standard library alone.

import argparse
import logging
import operator
import tempfile
from copy import copy
from itertools import chain
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

# %%
# A dict that does not change
# ---------------------------
# ``OverlappedSaves`` of :doc:`overlapped_stager` does not walk a dict that has an attribute
# ``kept_tensors``: it takes that list.


class Kept(dict):
    """Nested dicts of tensors alone; ``kept_tensors`` lists them in the order of the dicts."""

    def __init__(self, nested: dict) -> None:
        super().__init__(nested)
        self.kept_tensors: list[torch.Tensor] = []
        waiting = list(reversed(nested.values()))
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict):
                waiting += reversed(value.values())
            else:
                self.kept_tensors.append(value)


# %%
# The state of a training job
# ---------------------------
# ``get_state_dict`` gives each parameter a new tensor object; ``TrainingState`` puts the parameter
# itself in its place. What is not a tensor is read at every save: the groups of the optimizers,
# whose learning rate a schedule changes, and everything that you pass by name. A step count that is
# a Python number is a new object at each step, so such an optimizer makes every save call
# ``get_state_dict``. The caller gets copies of the outer dicts: a name that you delete there is
# still in the next save.


def memory_of(tensor: torch.Tensor) -> tuple:
    shard = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    read_as = tensor.shape, shard.stride(), tensor.dtype, shard.is_conj(), shard.is_neg()
    return shard.data_ptr(), *read_as


def is_plain(leaf: object) -> bool:
    local = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
    return type(local) in (torch.Tensor, nn.Parameter) and local.layout == torch.strided


def all_in(nested: object, held: dict[tuple, torch.Tensor]) -> bool:
    """Whether ``nested`` consists of tensors that are ``held``, and of nothing computed."""
    if isinstance(nested, dict):
        return all(all_in(value, held) for value in nested.values())
    return is_plain(nested) and memory_of(nested) in held


class TrainingState(Stateful):
    """The state of ``model``, ``optimizers`` and others for DCP; calls ``get_state_dict`` once.

    Args:
        others: objects with ``state_dict`` and ``load_state_dict``, by their key in the checkpoint:
            ``schedule=scheduler``, ``data=loader``.

    Raises:
        TypeError: an argument is not what it stands for.
        ValueError: a key is taken.
    """

    def __init__(self, model: nn.Module, *optimizers: torch.optim.Optimizer, **others) -> None:
        if taken := {"model", "optim", "stepped"} & set(others):
            raise ValueError(f"name it otherwise: {taken} is taken in the checkpoint")
        for optimizer in optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise TypeError(f"{type(optimizer).__name__} is no optimizer: pass it by a name")
        for name, other in others.items():
            if not (hasattr(other, "state_dict") and hasattr(other, "load_state_dict")):
                raise TypeError(f"{name} has no state_dict and load_state_dict")
        self.model, self.optimizers, self.others = model, optimizers, others
        self.asked, self.kept_model = 0, None  # how many times; the model's state
        self.known: list[object] = []
        self.containers: list[dict] = []

    def held(self) -> list[object]:
        """Everything that modules and optimizers hold now, and its names."""
        states = [optimizer.state for optimizer in self.optimizers]
        moments = chain.from_iterable(state.values() for state in states)
        dicts = list(chain(self.containers, states, moments))
        groups = chain.from_iterable(optimizer.param_groups for optimizer in self.optimizers)
        trained = chain.from_iterable((*group["params"], group) for group in groups)
        return [*chain(*dicts), *chain(*map(dict.values, dicts)), *trained]

    def state_dict(self) -> dict:
        """What ``get_state_dict`` would return, and the state of the ``others``.

        ``stepped`` says of each optimizer whether it had state. Asking for the state of one that
        has never stepped creates it, and would change the training (pytorch#164929).
        """
        held = self.held()
        same = len(held) == len(self.known) and all(map(operator.is_, held, self.known))
        if not (same and isinstance(self.kept_model, Kept) and isinstance(self.kept_optim, Kept)):
            self.ask()
        stepped = [bool(optimizer.state) for optimizer in self.optimizers]
        groups = chain.from_iterable(optimizer.param_groups for optimizer in self.optimizers)
        now = [{**group, "params": names} for group, names in zip(groups, self.names, strict=True)]
        optim = {"state": copy(self.kept_optim), "param_groups": now}
        others = {name: other.state_dict() for name, other in self.others.items()}
        return {"model": copy(self.kept_model), "optim": optim, "stepped": stepped, **others}

    def ask(self) -> None:
        self.asked += 1
        new = [optimizer for optimizer in self.optimizers if not optimizer.state]
        groups = chain.from_iterable(optimizer.param_groups for optimizer in new)
        gradients = [(p, p.grad) for group in groups for p in group["params"]]
        try:
            for parameter, _ in gradients:  # with gradients there, no state would be created
                parameter.grad = None
            model, optim = get_state_dict(self.model, self.optimizers)
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for optimizer in new:
                optimizer.state.clear()
        self.warn_of_missing_state()
        modules = list(self.model.modules())
        self.containers = [module._modules for module in modules]
        self.containers += [module._parameters for module in modules]
        self.containers += [module._buffers for module in modules]
        self.known = self.held()
        tensors = {id(x): x for x in self.known if is_plain(x)}.values()
        held = {memory_of(x): x for x in tensors}
        shared = sum(memory_of(x)[0] > 0 for x in tensors) > sum(key[0] > 0 for key in held)
        self.kept_model, self.kept_optim = model, optim.get("state", {})  # none without optimizers
        if all_in(model, held) and not shared:  # two objects of one memory may part by `.data =`
            self.kept_model = Kept({key: held[memory_of(x)] for key, x in model.items()})
        if all_in(self.kept_optim, held):
            self.kept_optim = Kept(self.kept_optim)
        self.names = [group["params"] for group in optim.get("param_groups", [])]

    def warn_of_missing_state(self) -> None:
        """Say which trainable parameters never had a gradient, unlike others of their group."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                trained = [p for p in group["params"] if p.requires_grad]
                missing = [names.get(p, "?") for p in trained if not optimizer.state.get(p)]
                if 0 < len(missing) < len(trained):
                    logging.getLogger(__name__).warning(
                        "no optimizer state yet for %s, which never had a gradient: dcp.load needs "
                        "planner=DefaultLoadPlanner(allow_partial_load=True)",
                        missing,
                    )

    def load_state_dict(self, state: dict) -> None:
        set_state_dict(
            self.model,
            self.optimizers,
            model_state_dict=dict(state["model"]),
            optim_state_dict={**state["optim"], "state": dict(state["optim"]["state"])},
        )
        for optimizer, stepped in zip(self.optimizers, state["stepped"], strict=True):
            if not stepped:
                optimizer.state.clear()
        for name, other in self.others.items():
            other.load_state_dict(state[name])


# %%
# Run it, and prove it
# --------------------
# After each of several changes, the proof compares the kept state with the result of a new
# ``get_state_dict``: the same keys, the same memory, the same numbers. Then one new job loads the
# checkpoint of step 3, and another one that of step 0.


def same_state(app: TrainingState) -> bool:
    model, optim = get_state_dict(app.model, app.optimizers)
    fresh, kept = {"model": model, "optim": optim}, app.state_dict()
    pairs = [(fresh["model"], kept["model"]), (optim["state"], kept["optim"]["state"])]
    while pairs:
        a, b = pairs.pop()
        if isinstance(a, dict):
            if list(a) != list(b):
                return False
            pairs += [(a[key], b[key]) for key in a]
        elif memory_of(a) != memory_of(b):
            return False
    return optim["param_groups"] == kept["optim"]["param_groups"]


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
    weight = trained.model[-1].weight
    weight.data = torch.zeros_like(weight)
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
# * ``_parameters``, ``_buffers`` and ``_modules`` of ``nn.Module`` are private by name. They are
#   older than every version of torch that these pages run on.
# * A state that is computed from the tensors of the model or of an optimizer is asked for at every
#   save: right, and no gain. This holds for ``FullyShardedDataParallel`` (FSDP1), hooks on
#   ``state_dict``, extra state, nested optimizer state, subclasses of ``nn.Parameter``, and weights
#   that share memory but are not one object: one of them can move away.
# * **Some changes are not noticed, and the checkpoint is wrong without a word.** Make a new
#   ``TrainingState`` after each of these: hooks or extra state that begin to act after the first save,
#   a buffer that becomes persistent or stops being so, a ``_parameters`` dict replaced as a whole. A
#   nested dict in the optimizer's state that is empty at first is not noticed when it fills.
# * The kept state holds the dicts of ``optimizer.state``, and a save beside training reads them when it
#   writes. Until its future is done, add, remove or replace nothing in them: ``before_update`` does not
#   help. An optimizer that puts new tensors there at each step can lose saves, with a ``KeyError``.
# * The inner dicts of what ``state_dict`` returns are those of the optimizer. Change none.
# * A save before the first step calls ``optimizer.step`` at rate 0, as ``get_state_dict`` does. That
#   changes optimizers that draw noise or count their own steps, Adafactor with relative steps and
#   decay, and runs your hooks on ``step`` once more. Save after a step.
# * Models that change their layers at every step gain nothing.
# * It saves no random state and no position in the data: pass objects that do, by name.
# * A parameter that never had a gradient has no optimizer state. Load with
#   ``DefaultLoadPlanner(allow_partial_load=True)`` then.
# * After an evaluation, ``fully_shard`` can leave the root module gathered. That module then holds
#   other parameters than before, and the next save calls ``get_state_dict`` again: right, and slow.
