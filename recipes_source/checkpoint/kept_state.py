# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, checkpoint/kept_state.py
"""
Ask for the state once
======================

``get_state_dict`` takes milliseconds for a small model and far longer for thousands of tensors,
at every save, on the training thread. Almost nothing of what it returns changes: the same
tensors lie in the same places. ``TrainingState`` asks once, and from then on looks whether model and
optimizers still hold the very tensors that it knows.

.. code-block:: python

   from kept_state import TrainingState

   app = TrainingState(model, optimizer, schedule=scheduler)   # once

   saves.save({"app": app}, root / f"step{step}")              # as always
   dcp.load({"app": app}, checkpoint_id=root / "step100")

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * what stays the same from save to save, and what can replace it behind your back
      * how to notice that by comparing identities alone

   .. grid-item-card:: When not to bother

      * Your saves stop training anyway, or come once an hour.

.. verification-badge::

The idea
--------

Parameters, buffers and optimizer state live in dicts: of each module, and of each optimizer. What
these hold is compared, by identity, with what they held when ``get_state_dict`` was asked:

.. lanes:: Schematic. What a save costs the training thread.

   get_state_dict:  0-8 save !; 14-22 save !; 28-36 save !
   kept:            0-8 save !; 14-15 save; 28-29 save

A load, a new layer, ``assign=True``, an optimizer that makes its state anew: all put another object
into one of the dicts, and the state is asked for again. ``p.data = ...`` does not, and moves the
memory instead; the state holds the parameter itself, so whoever copies it sees the new memory.
"""

# %%
# Imports
# -------
# Torch and the standard library: copy this file as it is.

import operator
from itertools import chain

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

# %%
# A dict that stays as it is
# --------------------------
# ``OverlappedSaves`` does not walk a dict that has an attribute ``tensors`` again.


class Kept(dict):
    """Nested dicts of tensors alone; ``tensors`` lists them in the order of the dicts."""

    def __init__(self, nested: dict) -> None:
        super().__init__(nested)
        self.tensors: list[torch.Tensor] = []
        waiting = list(reversed(nested.values()))
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict):
                waiting += reversed(value.values())
            else:
                self.tensors.append(value)


# %%
# The state of a training
# -----------------------
# ``get_state_dict`` gives each parameter a new alias; the state puts the parameter in its place. What
# is no tensor is read at every save: the groups of the optimizers, whose learning rate a schedule
# changes, and everything passed by name. A step count that is a Python number is another object at
# each step, and so makes the state be asked for again.


def memory_of(tensor: torch.Tensor) -> tuple:
    shard = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return shard.data_ptr(), tensor.shape, tensor.dtype


def only_tensors(nested: object) -> bool:
    if isinstance(nested, dict):
        return all(map(only_tensors, nested.values()))
    return isinstance(nested, torch.Tensor)


class TrainingState(Stateful):
    """State of ``model``, ``optimizers`` and whatever else has a ``state_dict``, for DCP.

    Args:
        others: objects with ``state_dict`` and ``load_state_dict``, by their key in the checkpoint.
    """

    def __init__(self, model: nn.Module, *optimizers: torch.optim.Optimizer, **others) -> None:
        self.model, self.optimizers, self.others = model, optimizers, others
        self.asked = 0  # times
        self.known: list[object] = []
        self.containers: list[dict] = []

    def held(self) -> list[object]:
        """All that the known dicts of the modules, and those of the optimizers, hold now."""
        states = [optimizer.state for optimizer in self.optimizers]
        moments = chain.from_iterable(state.values() for state in states)
        dicts = chain(self.containers, states, moments)
        return list(chain.from_iterable(held.values() for held in dicts))

    def state_dict(self) -> dict:
        """As ``get_state_dict`` would give it, and the ``others``.

        Raises:
            RuntimeError: an optimizer has never stepped. To ask DCP for its state would make one,
                and change the training (pytorch#164929).
        """
        held = self.held()
        if len(held) != len(self.known) or not all(map(operator.is_, held, self.known)):
            self.ask()
        groups = chain.from_iterable(optimizer.param_groups for optimizer in self.optimizers)
        now = [{**group, "params": names} for group, names in zip(groups, self.names, strict=True)]
        optim = {"state": self.kept_optim, "param_groups": now}
        others = {name: other.state_dict() for name, other in self.others.items()}
        return {"model": self.kept_model, "optim": optim, **others}

    def ask(self) -> None:
        if not all(optimizer.state for optimizer in self.optimizers):
            raise RuntimeError("save after the first step of each optimizer, which makes its state")
        self.asked += 1
        model, optim = get_state_dict(self.model, self.optimizers)
        modules = list(self.model.modules())
        self.containers = [module._modules for module in modules]
        self.containers += [module._parameters for module in modules]
        self.containers += [module._buffers for module in modules]
        owners = {memory_of(x): x for x in chain(self.model.parameters(), self.model.buffers())}
        with_owners = {name: owners.get(memory_of(x), x) for name, x in model.items()}
        self.kept_model = Kept(with_owners) if only_tensors(model) else model
        self.kept_optim = Kept(optim["state"]) if only_tensors(optim["state"]) else optim["state"]
        self.names = [group["params"] for group in optim["param_groups"]]
        self.known = self.held()

    def load_state_dict(self, state: dict) -> None:
        set_state_dict(
            self.model,
            self.optimizers,
            model_state_dict=dict(state["model"]),
            optim_state_dict={**state["optim"], "state": dict(state["optim"]["state"])},
        )
        for name, other in self.others.items():
            other.load_state_dict(state[name])


# %%
# Run it, and prove it
# --------------------
# After each of several changes the kept state is compared with one that was just asked for: the same
# keys, the same memory, the same numbers.


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


def main() -> None:
    import async_save as basic

    device = basic.start_rank()
    trained = basic.build_app(device)
    schedule = torch.optim.lr_scheduler.ExponentialLR(trained.optimizer, 0.9)
    app = TrainingState(trained.model, trained.optimizer, schedule=schedule)
    for _ in range(3):
        basic.train_step(trained, device)
        schedule.step()
        assert same_state(app), "the kept state is not the state"
    assert app.asked == 1, "three steps were three states"

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
    main()

# %%
# What breaks if you remove a line
# --------------------------------
# .. recipe-controls::
#
# What it costs
# -------------
# A comparison of identities for each tensor, module and moment at every save, and the references that
# keep the known tensors alive: an optimizer state that was replaced lives until the next save.
#
# Known limits
# ------------
# * ``_parameters``, ``_buffers`` and ``_modules`` of ``nn.Module`` are private by name, and older
#   than every version that this gallery runs on.
# * ``FullyShardedDataParallel`` (FSDP1) and models that change their layers at every step gain nothing.
# * A root that ``fully_shard`` leaves gathered after an evaluation holds other parameters than before
#   it: the state is asked for again, which is right, and slow.
