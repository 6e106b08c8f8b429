# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, overlap_recipes/checkpoint/state.py
"""The state of a job: asked for, undone where asking changes training, and loaded.

``AppState`` gets from DCP what a restart reads, and raises where a load would leave out optimizer
state that the checkpoint lists. ``read`` tells what of a state is copied beside training.
"""

import json
import logging
from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from itertools import chain

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

# what a save warns of, and why a load is refused
UNKNOWN = (
    "the checkpoint knows no %s: add what is new after the load; all ranks need the same names"
)
NOT_LOADED = (
    "no 'has_state' in this checkpoint: load it with set_state_dict (in memory: a deepcopy)"
)
NO_STATE = "%s never had a gradient: load with DefaultLoadPlanner(allow_partial_load=True)"
NO_ROOM = "no room here for the checkpoint's state of %s: frozen, left out, or added later?"


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
