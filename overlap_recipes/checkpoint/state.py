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


# what ``torch.compile`` and ``checkpoint_wrapper`` add to names
WRAPPERS = "_orig_mod", "_checkpoint_wrapped_module"


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
        self.reads_as_dcp: bool | None = None
        self.keep_vars = False  # whether ``state_dict`` has the parameters themselves
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

        A job whose optimizers have state is asked by ``read_states``, if that gives what DCP gives:
        580 parameters in 48 layers cost DCP about six times as long, most of it to find names.
        """
        new = [optimizer for optimizer in self.optimizers if not optimizer.state]
        if self.reads_as_dcp and not new:
            model, optim = self.read_states()
        else:
            model, optim = self.ask_dcp(new)
            if self.reads_as_dcp is None and not new:
                self.reads_as_dcp = self.would_read((model, optim))
        made_up = [*map(id, groups(new))]
        self.metadata, state = getattr(model, "_metadata", None), optim["state"]
        self.split, self.named, noted = [], [], {}
        for own, saved in zip(groups(self.optimizers), optim["param_groups"], strict=True):
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

    def ask_dcp(self, new: list[torch.optim.Optimizer]) -> tuple[dict, dict]:
        """DCP's answer. It lets the optimizers ``new``, which have no state, step at rate 0."""
        rates = [(group, group["lr"]) for group in groups(new) if "lr" in group]
        gradients = [(p, p.grad) for group in groups(new) for p in group["params"]]
        try:
            for parameter, _ in gradients:  # with gradients there, DCP would make no state
                parameter.grad = None
            model, optim = dcp_state.get_state_dict(self.model, self.optimizers)
            return model, {"state": {}, "param_groups": []} | optim  # empty without optimizers
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for group, rate in rates:
                group["lr"] = rate
            for optimizer in new:
                optimizer.state.clear()

    def read_states(self) -> tuple[dict, dict]:
        """What modules and optimizers return as their state, under the names that DCP uses."""
        own = self.model.state_dict(keep_vars=self.keep_vars)
        model = OrderedDict()
        names: dict[int, str] = {}  # of parameters, by id; of a tied one the first
        for key, value in own.items():
            name = self.name_of(key)
            model[name] = value
            names.setdefault(id(value), name)
        model._metadata = getattr(own, "_metadata", None)
        parameters = []
        for optimizer in self.optimizers:
            parameters.append([p for group in optimizer.param_groups for p in group["params"]])
        if not all(id(p) in names for own_parameters in parameters for p in own_parameters):
            names = {id(p): self.name_of(key) for key, p in self.model.named_parameters()}
        state, param_groups = {}, []
        for optimizer, own_parameters in zip(self.optimizers, parameters, strict=True):
            numbered = [names[id(p)] for p in own_parameters]
            saved = optimizer.state_dict()
            for number, moments in saved["state"].items():
                state[numbered[number]] = moments
            for group in saved["param_groups"]:
                group_names = [numbered[number] for number in group["params"]]
                param_groups.append(group | {"params": group_names})
        return model, {"state": state, "param_groups": param_groups}

    def name_of(self, key: str) -> str:
        """``key`` without what DDP, ``torch.compile`` and ``checkpoint_wrapper`` add to it."""
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            key = key.removeprefix("module.")
        if not any(wrapper in key for wrapper in WRAPPERS):
            return key
        return ".".join(part for part in key.split(".") if part not in WRAPPERS)

    def would_read(self, of_dcp: tuple[dict, dict]) -> bool:
        """Whether ``read_states`` gives the names and the memory of DCP's answer."""
        try:
            own = self.read_states()
        except Exception:  # a ``state_dict`` without ``keep_vars``, a parameter of another model
            return False
        return walk(own, memory_of) == walk(of_dcp, memory_of)

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


class TrainingState(AppState):
    """The state of ``model``, ``optimizers`` and others for DCP.

    Args:
        others: objects with ``state_dict`` and ``load_state_dict``, by their key in the checkpoint:
            ``schedule=scheduler``, ``data=loader``.

    Raises:
        TypeError: an argument is not what it stands for.
        ValueError: a key is taken.
    """

    def __init__(self, model: nn.Module, *optimizers: torch.optim.Optimizer, **others) -> None:
        taken = {"model", "optim", "has_state"} & set(others)
        if taken:
            raise ValueError(f"name it otherwise: {taken} is taken in the checkpoint")
        for optimizer in optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise TypeError(f"{type(optimizer).__name__} is no optimizer: pass it by a name")
        for name, other in others.items():
            if not isinstance(other, Stateful):
                raise TypeError(f"{name} has no state_dict and load_state_dict")
        super().__init__(model, [*optimizers])
        self.others = others

    def state_dict(self) -> dict:
        model, optim = self.ask()
        others = {name: other.state_dict() for name, other in self.others.items()}
        state = {"model": model, "optim": optim, "has_state": self.has_state, **others}
        self.given = id(state)
        return state

    def load_state_dict(self, state_dict: dict) -> None:
        self.load(state_dict)
        for name, other in self.others.items():
            other.load_state_dict(state_dict[name])


def memory_of(leaf: object) -> object:
    """Where a tensor lies and how it is read; of all else, its type."""
    if not torch.is_tensor(leaf):
        return type(leaf)
    x = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
    if not is_staged(leaf):
        return type(x), x.shape
    return x.data_ptr(), leaf.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg()


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


def state_of(stateful: Stateful) -> dict:
    """Its state, for a save, which detaches by itself: DTensors take long for that."""
    if not isinstance(stateful, AppState):
        return stateful.state_dict()
    stateful.keep_vars = True
    try:
        return stateful.state_dict()
    finally:
        stateful.keep_vars = False


def read(tree: object, tensors: list[torch.Tensor]) -> object:
    """Copy ``tree`` as it is now, except what will be staged: add that to ``tensors``."""

    def read_leaf(leaf: object) -> object:
        if not is_staged(leaf) and torch.is_tensor(leaf):
            leaf = leaf.detach()  # a subclass of Parameter becomes a tensor
        if is_staged(leaf):
            tensors.append(leaf)
            return leaf
        if isinstance(leaf, DTensor):
            raise TypeError(f"save the plain tensor in a DTensor of {type(leaf._local_tensor)}")
        if torch.is_tensor(leaf):
            return leaf.clone().to("cpu")
        return deepcopy(leaf)

    if hasattr(tree, "state_dict"):
        tree = state_of(tree)
    if isinstance(tree, dict):
        return {key: read(value, tensors) for key, value in tree.items()}
    return walk(tree, read_leaf)
