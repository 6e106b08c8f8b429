# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.1, overlap_recipes/checkpoint/state.py
"""The state of a job: asked for, undone where asking changes training, and loaded.

``AppState`` gets from DCP what a restart reads, and raises where a load would leave out optimizer
state that the checkpoint lists. ``read`` tells what of a state is copied beside training.
"""

import ctypes
import hashlib
import importlib
import io
import json
import logging
import operator
import random
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from functools import cache
from inspect import isgeneratorfunction
from itertools import chain, islice
from types import ModuleType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from ..ranks import own_rank, world_size
from .frozen import digests_of_ranks, own_sums

LOG = logging.getLogger(__name__)
PER_RANK = "per_rank"
RECIPES = "made_of_tensors"
PLAIN_TYPES = {torch.Tensor, nn.Parameter, int, float, bool, str, bytes, type(None)}
TAKEN = {"model", "optim", "has_state", PER_RANK, RECIPES}  # keys of a state
SMALL = 1 << 20  # bytes of a tensor that rank 0 writes if all ranks have it
SEEDS_A_STEP = 1_000_003
SEEDED_ANEW = "random numbers are seeded anew: %d ranks, %d at the save"
OTHER_RANKS = (
    "%s of %d ranks for %d: it needs a method load_state_dicts, which gets the states of all ranks"
)
OTHER_RANKS_ALONE = "saved on %d ranks, loaded on %d: use overlap_recipes.checkpoint.load"

# why a load is refused
UNKNOWN = (
    "the checkpoint knows no %s: add what is new after the load; all ranks need the same names"
)
NOT_LOADED = (
    "no 'has_state': this is no checkpoint of a TrainingState. dcp.load it into what "
    "get_state_dict(model, optimizer) gives, and call set_state_dict (a state in memory: load a "
    "deepcopy of it)"
)
NO_ROOM = (
    "no room here for the checkpoint's state of %s: frozen, left out, or added later? "
    "overlap_recipes.checkpoint.load makes room"
)
OTHER_GROUPS = "load into the groups of the save: change the groups after the load"
OTHER_MODEL = "the checkpoint does not fit this model:\n"

# why a save is refused
DIFFERING = "ranks differ in %s, and all would resume with the state of one: %s"
PASS_PER_RANK = "pass what is of each rank as TrainingState(..., per_rank={name: object})"
REPLICAS_DIFFER = (
    "ranks differ in %s: the checkpoint has those of rank 0, and all resume with them. "
    "SyncBatchNorm keeps buffers alike that forward changes; what is of each rank goes to per_rank"
)
PLAIN = (
    "the optimizer's state of %s is a plain tensor of this rank's shard, and ranks would get each "
    "other's: make it with torch.zeros_like(parameter), or as a DTensor (DTensor.from_local)"
)
ON_META = "%s is frozen and still lies on meta: load the base first"
NOT_OF_THE_MODEL = (
    "an optimizer trains a parameter of shape %s that the model does not have: make the optimizer "
    "behind what replaces parameters (fully_shard, model.to, to_empty, adapters), and give "
    "TrainingState a model that has all that is trained: nn.ModuleList([model, criterion])"
)
MORE_STATE = (
    "%s has %s beside state and param_groups, which no checkpoint would have: give the optimizer "
    "inside it, and what has the rest by a name of its own"
)
FLAT = (
    "an optimizer trains a FlatParameter, whose state no job could load: make the model by "
    "FullyShardedDataParallel(..., use_orig_params=True), or by fully_shard"
)
OTHER_KEYS = (
    "%s keeps state under %r, which is no parameter: no checkpoint would have it. Keep it in an "
    "object with state_dict and load_state_dict, and give that by a name"
)
OTHER_KIND = "the checkpoint is of another kind of optimizer: %s needs %s, which it does not have"
REPLACED = (
    "%s is a %s: a load would put another one into the dict, and what holds this one would not "
    "know. Give it by a name of its own"
)
FROZEN_CHANGED = (
    "%s: frozen, left out of checkpoints, and changed since the first of them: no load would bring "
    "back what is here now. Let it require grad or leave out trainable_only; if this is the base "
    "from now on, make a new TrainingState"
)
OTHER_VALUES = "%s: frozen, left out of the checkpoint, and of other values than at the save"
PARTS = (
    "%s is a %s whose parts are of other sizes than its shards: shard it evenly along its first "
    "dimension"
)
KEY = "a checkpoint keeps names and whole numbers as keys of a dict, not %r (in %s)"

NO_POSITION = (
    "%s is a DataLoader that does not know where it is: use torchdata's StatefulDataLoader, or "
    "skip batches yourself; accelerate has "
    "DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)"
)
NO_ORDER = (
    "%s is a DataLoader whose %s draws another order after a restart: what it has drawn is in no "
    "state. Use StatefulDataLoader(shuffle=True), or a sampler with a seed (accelerate: "
    "DataLoaderConfiguration(use_seedable_sampler=True))"
)

DRAWS_AT_ONCE = (
    "%s: what %s draws in iter() is in no state, so a job that resumes would have another order: "
    "make its __iter__ a generator (yield from ...), or let it draw from a seed and its epoch"
)

FORMAT = 2  # of ``has_state``; the first was the optimizers' keys alone

# what ``torch.compile`` and ``checkpoint_wrapper`` add to names
WRAPPERS = "_orig_mod", "_checkpoint_wrapped_module"


def groups(optimizers: list[torch.optim.Optimizer]) -> list[dict]:
    return [*chain.from_iterable(optimizer.param_groups for optimizer in optimizers)]


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Without what accelerate and Lightning put around it, which has no state of its own."""
    package = type(optimizer).__module__.partition(".")[0]
    if package == "accelerate":
        return optimizer.optimizer
    if package in ("lightning", "pytorch_lightning"):
        return optimizer._optimizer
    return optimizer


def is_new(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it has no state; an empty one for each parameter is none."""
    return not any(not isinstance(own, dict) or own for own in optimizer.state.values())


def prefixes_of_ddp(model: nn.Module) -> list[str]:
    """What names of parameters begin with where DDP adds ``module.``; the innermost first."""
    prefixes = []
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            prefixes.append(f"{name}." if name else "")
    return sorted(prefixes, key=len, reverse=True)


def refuse_more_state(optimizer: torch.optim.Optimizer) -> None:
    """Raise if its state has more than PyTorch's, as that of PostLocalSGDOptimizer has."""
    is_torchs = type(optimizer).state_dict is torch.optim.Optimizer.state_dict
    if is_torchs and not optimizer._optimizer_state_dict_post_hooks:
        return
    more = sorted(optimizer.state_dict().keys() - {"state", "param_groups"})
    if more:
        raise TypeError(MORE_STATE % (type(optimizer).__name__, ", ".join(more)))


def refuse_flat_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Raise if it trains what ``FullyShardedDataParallel`` makes without ``use_orig_params``."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, FlatParameter):
                raise TypeError(FLAT)


class AppState(Stateful):
    """Model, optimizer or several, and the number of steps taken.

    Raises:
        TypeError: an optimizer keeps its state in another one or beside PyTorch's, or plain tensors
            of a shard, or trains a ``FlatParameter``.
        ValueError: two optimizers share a parameter, or a checkpoint does not fit this job.
    """

    COUNTERS = ("step",)  # attributes that are saved and loaded

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | list) -> None:
        self.model = model
        self.optimizer = optimizer
        self.in_ddp = prefixes_of_ddp(model)
        self.step = 0
        self.given: int | None = None  # the id of the latest state
        self.has_state = ""
        self.reads_as_dcp: bool | None = None
        self.trainable_only = False
        self.left_out: dict[str, torch.Tensor] = {}  # of the model
        self.frozen_seen: list[tuple] = []  # where the parameters lay of which there are digests
        self.frozen_sums: dict[str, int] = {}  # what this rank adds to them
        self.frozen_digests: dict[str, str] = {}
        self.keep_vars = False  # whether ``state_dict`` has the parameters themselves
        given = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        self.optimizers = [unwrapped(each) for each in given]
        for outer in self.optimizers:
            for name, inner in vars(outer).items():
                if isinstance(inner, torch.optim.Optimizer) and inner.state is not outer.state:
                    raise TypeError(f"{type(outer).__name__} keeps its state in {name}: pass that")
            refuse_more_state(outer)
            refuse_flat_parameters(outer)

    def state_dict(self) -> dict:
        """What a checkpoint holds, and what ``dcp.load`` fills."""
        model, optim = self.ask()
        state = {"model": model, "optim": optim, **self.more_state()}
        for name in self.COUNTERS:
            state[name] = getattr(self, name)
        self.own_model = {name: described(leaf) for name, leaf in model.items()}
        if self.trainable_only:
            self.leave_out(model)
        self.has_state = json.dumps(self.contents(state), sort_keys=True)  # equal on all ranks
        state["has_state"] = self.has_state
        self.take_apart(state)
        self.given = id(state)
        return state

    def more_state(self) -> dict:
        """What a subclass saves beside."""
        return {}

    def contents(self, state: dict) -> dict:
        """What a load compares, and what DCP's names do not tell."""
        int_keys: list[list] = []
        empty: list[list] = []
        for key in state.keys() - {"model", PER_RANK}:
            if isinstance(state[key], (dict, list)):
                survey(state[key], [key], int_keys, empty)
        return {
            "format": FORMAT,
            "ranks": world_size(),
            "optim": self.noted,
            "model": {name: self.own_model[name] for name in state["model"]},
            "left_out": {name: self.own_model[name] for name in self.left_out},
            "digests": self.frozen_digests,
            "int_keys": sorted(int_keys, key=repr),
            "empty": sorted(empty, key=repr),
        }

    def leave_out(self, model: dict) -> None:
        """Take from ``model`` the parameters that are not trained; make digests of them once.

        The ranks meet where other names are frozen than at the last call, as at the first: where
        something has changed on one rank alone, the others do not come.
        """
        frozen = {}
        for key, parameter in self.model.named_parameters(remove_duplicate=False):
            if not parameter.requires_grad:
                frozen[self.name_of(key)] = parameter
        self.left_out = {name: model.pop(name) for name in frozen if name in model}
        frozen = {name: frozen[name] for name in self.left_out}
        for name, parameter in frozen.items():
            if shard_of(parameter).is_meta:
                raise ValueError(ON_META % name)
        seen = []
        of_parts = {}
        for name, parameter in frozen.items():
            of_parts[name] = parts_of(parameter)
            for part in of_parts[name]:
                shard = shard_of(part)
                seen.append((name, shard.data_ptr(), shard._version, part._version))
        if seen == self.frozen_seen:
            return
        sums = own_sums(of_parts)
        if sums.keys() != self.frozen_sums.keys():
            self.frozen_digests = digests_of_ranks(sums)
        elif sums != self.frozen_sums:
            changed = [name for name in sums if sums[name] != self.frozen_sums[name]]
            raise ValueError(FROZEN_CHANGED % ", ".join(changed))
        self.frozen_sums = sums
        self.frozen_seen = seen

    def differing_frozen(
        self,
        contents: dict,
        is_skipped: Callable[[str], bool],
        group: dist.ProcessGroup | None = None,
    ) -> list[str]:
        """Lines for parameters that the checkpoint has left out, and that are others here.

        All ranks of ``group`` call it.
        """
        if not contents.get("left_out"):
            return []
        parameters = {}
        for key, parameter in self.model.named_parameters(remove_duplicate=False):
            parameters[self.name_of(key)] = parameter
        found = []
        of_parts = {}
        for name, spec in contents.get("left_out", {}).items():
            if name not in parameters or is_skipped(name):
                continue  # told elsewhere
            if shard_of(parameters[name]).is_meta:
                found.append("  " + ON_META % name)
            elif described(parameters[name]) == spec:
                of_parts[name] = parts_of(parameters[name])
        sums = own_sums(of_parts, group)
        for name, here in digests_of_ranks(sums, group).items():
            if here != contents["digests"][name]:
                found.append("  " + OTHER_VALUES % name)
        return found

    def take_apart(self, state: dict) -> None:
        """Put the tensors of which others are made in their place, and how to join them."""
        if not has_parts(state):
            return
        recipes: dict[tuple, tuple] = {}
        for key in state.keys() - {PER_RANK}:
            if key != "model":
                state[key] = in_parts(state[key], (key,), recipes)
        for name, leaf in state["model"].items():
            parts = in_parts(leaf, ("model", name), recipes)
            if parts is not leaf:
                state["model"][name] = parts
        if recipes:
            state[RECIPES] = packed(recipes)

    def load_state_dict(self, state_dict: dict) -> None:
        """Take what ``dcp.load`` has filled; ``overlap_recipes.checkpoint.load`` takes more."""
        optim = self.compare(state_dict)
        self.take({**state_dict, "optim": optim}, parse(state_dict["has_state"]))

    def take(
        self, state: dict, contents: dict, is_skipped: Callable[[str], bool] = lambda name: False
    ) -> None:
        """Load a state that has been compared with this job.

        Args:
            contents: what its ``has_state`` says.
            is_skipped: whether what has this name stays as it is; its own is in ``state``.
        """
        recipes = unpacked(state[RECIPES]) if RECIPES in state else {}
        if recipes:
            self.take_new_parts(state["model"], recipes)
            state = {key: joined(value, (key,), recipes) for key, value in state.items()}
        self.load_optimizers(state["optim"], is_skipped)
        model = OrderedDict({**self.left_out, **state["model"]})
        model._metadata = self.metadata
        dcp_state.set_model_state_dict(self.model, model)
        for name in self.COUNTERS:
            if name in state:
                setattr(self, name, state[name])

    def ask(self) -> tuple[dict, dict]:
        """The states of model and optimizers; a step that DCP has made is undone.

        Notes in ``noted`` which parameters have which state.

        A job whose optimizers have state is asked by ``read_states``, if that gives what DCP gives:
        580 parameters in 48 layers cost DCP about six times as long, most of it to find names.
        """
        for optimizer in self.optimizers:
            for key in optimizer.state:
                if not torch.is_tensor(key):
                    raise ValueError(OTHER_KEYS % (type(optimizer).__name__, key))
        new = [optimizer for optimizer in self.optimizers if is_new(optimizer)]
        if self.reads_as_dcp and not new:
            model, optim = self.read_states()
        else:
            model, optim = self.ask_dcp_if_possible(new)
            if self.reads_as_dcp is None and not new:
                self.reads_as_dcp = self.would_read((model, optim))
        made_up = [*map(id, groups(new))]
        self.metadata = getattr(model, "_metadata", None)
        self.split: list[list[str]] = []  # names of the parameters of each group
        self.named: list[tuple[nn.Parameter, str]] = []
        self.noted: dict[str, list[str]] = {}
        for own, saved in zip(groups(self.optimizers), optim["param_groups"], strict=True):
            if not self.noted.keys().isdisjoint(saved["params"]):
                raise ValueError("two optimizers hold one parameter: DCP has room for one state")
            real = {} if id(own) in made_up else optim["state"]
            for name in saved["params"]:
                self.noted[name] = sorted(str(key) for key in real.get(name, ()))
            self.split.append(saved["params"])
            self.named.extend(zip(own["params"], saved["params"], strict=False))
        for parameter, name in self.named:
            if is_sharded(parameter):
                refuse_plain_tensors(name, optim["state"].get(name))
        return model, optim

    def ask_dcp_if_possible(self, new: list[torch.optim.Optimizer]) -> tuple[dict, dict]:
        """DCP's answer; where a new optimizer cannot step at rate 0, states without its own."""
        try:
            return self.ask_dcp(new)
        except Exception as error:
            if isinstance(error, KeyError) and not self.has_flat_parameters():
                self.names_of_parameters()  # raises what is wrong, where DCP gives a number
            if not new or self.has_flat_parameters():
                raise
            return self.read_states()

    def ask_dcp(self, new: list[torch.optim.Optimizer]) -> tuple[dict, dict]:
        """DCP's answer. It lets the optimizers ``new``, which have no state, step at rate 0."""
        before = {id(group): {**group} for group in groups(new)}
        gradients = [(p, p.grad) for group in groups(new) for p in group["params"]]
        empty = [(optimizer, {**optimizer.state}) for optimizer in new]
        try:
            for optimizer in new:
                optimizer.state.clear()
            for parameter, _ in gradients:  # with gradients there, DCP would make no state
                parameter.grad = None
            model, optim = dcp_state.get_state_dict(self.model, self.optimizers)
            optim = {"state": {}, "param_groups": []} | optim  # empty without optimizers
            found = zip(groups(self.optimizers), optim["param_groups"], strict=True)
            for own, saved in found:  # a step may count in its group
                if id(own) in before:
                    names = saved["params"]
                    saved.clear()
                    saved.update(before[id(own)], params=names)
            return model, optim
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for group in groups(new):
                kept = before[id(group)]
                group.clear()
                group.update(kept)
            for optimizer, state in empty:
                optimizer.state.clear()
                optimizer.state.update(state)

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
            names = self.names_of_parameters()
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

    def names_of_parameters(self) -> dict[int, str]:
        """The names of parameters by their id; of a tied one the first.

        Raises:
            ValueError: an optimizer has one that is not the model's.
        """
        names = {id(p): self.name_of(key) for key, p in self.model.named_parameters()}
        for group in groups(self.optimizers):
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise ValueError(NOT_OF_THE_MODEL % list(parameter.shape))
        return names

    def name_of(self, key: str) -> str:
        """``key`` without what DDP, ``torch.compile`` and ``checkpoint_wrapper`` add to it."""
        for outer in self.in_ddp:
            if key.startswith(f"{outer}module."):
                key = outer + key.removeprefix(f"{outer}module.")
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

    def take_new_parts(self, model: dict, recipes: dict[tuple, "Recipe"]) -> None:
        """Give parameters the parts that they have not yet, such as a scale of float8."""
        for key, parameter in self.model.named_parameters():
            name = self.name_of(key)
            if ("model", name) in recipes and isinstance(model.get(name), dict):
                local = shard_of(parameter)
                here, _ = local.__tensor_flatten__()
                for part in model[name].keys() - set(here):
                    setattr(local, part, shard_of(model[name][part]))

    def current(self) -> tuple[dict, dict]:
        """The states as they are: no optimizer is made to step."""
        if self.has_flat_parameters():
            return self.ask()
        model, optim = self.read_states()
        self.metadata = model._metadata
        return model, optim

    def has_flat_parameters(self) -> bool:
        return any(isinstance(m, FullyShardedDataParallel) for m in self.model.modules())

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """Those of the optimizers."""
        if self.has_flat_parameters():
            return {name: parameter for parameter, name in self.named}
        names = self.names_of_parameters()
        return {names[id(p)]: p for group in groups(self.optimizers) for p in group["params"]}

    def compare(self, state: dict) -> dict:
        """Raise if ``state`` does not fit; return of its ``optim`` what ``has_state`` lists."""
        if self.given is None:
            self.state_dict()
        if state["has_state"] is self.has_state and id(state) == self.given:
            raise ValueError(NOT_LOADED)
        contents = parse(state["has_state"])
        noted = contents["optim"]
        if "model" in contents:
            saved = contents["model"] | contents.get("left_out", {})
            wrong = differences(saved, self.own_model)
            wrong += self.differing_frozen(contents, lambda name: False)
            if wrong:
                raise ValueError(OTHER_MODEL + "\n".join(wrong))
        there = state["optim"]["state"]
        room = {}
        for names in self.split:
            for name in names:
                room[name] = {str(key) for key in there.get(name, ())}
        lost = [n for n, keys in noted.items() if n not in room or not room[n].issuperset(keys)]
        if lost:
            raise ValueError(NO_ROOM % lost)
        if unknown := room.keys() - noted.keys():
            raise ValueError(UNKNOWN % sorted(unknown))
        kept = {}
        for name, keys in noted.items():
            if keys:
                kept[name] = {k: v for k, v in there[name].items() if str(k) in keys}
        return {"state": kept, "param_groups": state["optim"]["param_groups"]}

    def load_optimizers(self, optim: dict, is_skipped: Callable[[str], bool]) -> None:
        """Give the optimizers ``optim``, by name, and nothing else; bits are as they were saved."""
        if self.has_flat_parameters():
            self.load_flat_parameters(optim)
            return
        names = self.names_of_parameters()
        state = optim["state"]
        left = [*optim["param_groups"]]
        for optimizer in self.optimizers:
            own = [p for group in optimizer.param_groups for p in group["params"]]
            numbers = {names[id(p)]: number for number, p in enumerate(own)}
            found = []
            for group in optimizer.param_groups:
                wanted = [names[id(p)] for p in group["params"]]
                saved = take_group(left, wanted, is_skipped, group)
                found.append(saved | {"params": [numbers[name] for name in wanted]})
            moments = {number: state[n] for n, number in numbers.items() if n in state}
            load_kind(optimizer, {"state": moments, "param_groups": found})
            if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
                for number, saved in moments.items():
                    cast = optimizer.state[own[number]]
                    optimizer.state[own[number]] = uncast(cast, saved)

    def load_flat_parameters(self, optim: dict) -> None:
        """Let DCP load; for ``FullyShardedDataParallel``, whose parameters are pieces of others."""
        optim = {**optim}
        own_groups = [set(names) for names in self.split]
        saved_groups = [set(group["params"]) for group in optim["param_groups"]]
        if any(names and names not in saved_groups for names in own_groups):
            raise ValueError(OTHER_GROUPS)
        # a name: DCP would take a state without names for another format
        optim["state"] = {"": {}} | optim["state"]
        frozen = []
        some = dcp_state.StateDictOptions(strict=False)  # not every parameter has state
        try:
            for optimizer in self.optimizers:  # one without state would step
                optimizer.state[""] = {}
            for parameter, name in self.named:
                if name in optim["state"] and not parameter.requires_grad:  # DCP would skip it
                    frozen.append(parameter.requires_grad_())
            if self.optimizers:
                dcp_state.set_optimizer_state_dict(self.model, self.optimizers, optim, options=some)
        finally:
            for optimizer in self.optimizers:
                optimizer.state.pop("", None)
            for parameter in frozen:
                parameter.requires_grad_(False)


def load_kind(optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Load ``state``; raise if it is of an optimizer that steps with other settings."""
    own: set[str] = set()
    saved: set[str] = set()
    for group in optimizer.param_groups:
        own.update(group)
    for group in state["param_groups"]:
        saved.update(group)
    needed = own & optimizer.defaults.keys()
    unknown = {name for name in saved - own if not name.endswith("_lr")}  # a scheduler's
    try:
        optimizer.load_state_dict(state)
    except KeyError as error:
        raise ValueError(OTHER_KIND % (type(optimizer).__name__, error)) from error
    for group in optimizer.param_groups:
        lacking = sorted(needed - group.keys())
        if lacking and unknown:  # a later version of an optimizer may need more
            raise ValueError(OTHER_KIND % (type(optimizer).__name__, ", ".join(lacking)))


def lacking_settings(optimizer: torch.optim.Optimizer, group: dict, saved: set[str]) -> list[str]:
    """Settings of ``group`` that the saved group lacks; [] if both are of one kind of optimizer.

    Later versions of an optimizer have more switches, so ``None`` and bools do not count.

    Args:
        saved: the names of the settings of the saved group.
    """
    unknown = {name for name in saved - group.keys() if not name.endswith("_lr")}  # a scheduler's
    if not unknown:
        return []
    lacking = []
    for name in sorted(optimizer.defaults.keys() & group.keys() - saved):
        is_switch = group[name] is None or isinstance(group[name], bool)
        if not is_switch:
            lacking.append(name)
    return lacking


def take_group(
    left: list[dict], wanted: list[str], is_skipped: Callable[[str], bool], own: dict
) -> dict:
    """Remove from ``left`` the group of the parameters ``wanted``, and return it.

    A group that has none but skipped ones stays as it is: ``own``.
    """
    names = {name for name in wanted if not is_skipped(name)}
    for number, group in enumerate(left):
        if {name for name in group["params"] if not is_skipped(name)} == names:
            return left.pop(number)
    if names:
        raise ValueError(OTHER_GROUPS)
    return own


def uncast(loaded: object, saved: object) -> object:
    """``loaded`` in the types of ``saved``: torch's optimizers cast to the parameter's type."""
    if isinstance(saved, dict):
        return {key: uncast(loaded[key], value) for key, value in saved.items()}
    if isinstance(saved, (list, tuple)):
        values = [uncast(cast, value) for cast, value in zip(loaded, saved, strict=True)]
        return type(saved)(*values) if hasattr(saved, "_fields") else type(saved)(values)
    if isinstance(saved, str):
        return saved  # torch takes its letters for a list
    if not torch.is_tensor(saved) or loaded.dtype == saved.dtype:
        return loaded
    return saved.to(loaded.device)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether ranks hold different parts of it."""
    if not isinstance(tensor, DTensor):
        return False
    for dim, placement in enumerate(tensor.placements):
        if not isinstance(placement, Replicate) and tensor.device_mesh.size(dim) > 1:
            return True
    return False


def refuse_plain_tensors(name: str, moments: object) -> None:
    """Raise if the state of a sharded parameter has tensors that do not say whose they are."""
    if isinstance(moments, dict):
        for value in moments.values():
            refuse_plain_tensors(name, value)
    elif isinstance(moments, (list, tuple)):
        for value in moments:
            refuse_plain_tensors(name, value)
    elif torch.is_tensor(moments) and not isinstance(moments, DTensor) and moments.numel() > 1:
        raise TypeError(PLAIN % name)


def survey(tree: object, path: list, int_keys: list[list], empty: list[list]) -> None:
    """List the paths that DCP's names do not tell: of keys that are numbers, and of empty dicts."""
    if isinstance(tree, list):
        for number, value in enumerate(tree):
            if isinstance(value, (dict, list)):
                survey(value, [*path, number], int_keys, empty)
        return
    if not tree:
        empty.append(path)
    for key, value in tree.items():
        if type(key) is int:
            int_keys.append([*path, str(key)])
        elif not isinstance(key, str):
            raise TypeError(KEY % (key, ".".join(map(str, path))))
        if isinstance(value, (dict, list)):
            survey(value, [*path, str(key)], int_keys, empty)


def described(leaf: object) -> str:
    """What a load compares of a part of the model."""
    if not torch.is_tensor(leaf):
        return "no tensor"
    spec = spec_of(leaf.dtype, leaf.shape)
    if is_made_of_tensors(leaf):
        return f"{type(shard_of(leaf)).__name__} of {spec}"
    return spec


@cache
def spec_of(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {[*shape]}"


class Recipe(NamedTuple):
    """How a tensor that is made of others is joined again."""

    module: str
    name: str
    context: object
    shape: tuple[int, ...]  # of this rank's part
    stride: tuple[int, ...]
    is_dtensor: bool


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of ``tensor``."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_made_of_tensors(leaf: object) -> bool:
    """Whether it is of a class that wraps others, such as float8 weights and 8-bit moments."""
    if not torch.is_tensor(leaf):
        return False
    local = shard_of(leaf)
    if type(local) in (torch.Tensor, nn.Parameter):
        return False
    return hasattr(type(local), "__tensor_flatten__") and not local.is_nested


def has_parts(tree: object) -> bool:
    """Whether it has a tensor that is made of others, which is rare."""
    values = tree
    if isinstance(tree, dict):
        values = tree.values()
    for value in values:
        if isinstance(value, (dict, list)):
            if has_parts(value):
                return True
        elif type(value) not in PLAIN_TYPES and is_made_of_tensors(value):
            return True
    return False


def in_parts(tree: object, path: tuple, recipes: dict[tuple, tuple]) -> object:
    """``tree`` with the parts of tensors that are made of others; adds their ``recipes``."""
    if isinstance(tree, dict):
        found = {key: in_parts(value, (*path, str(key)), recipes) for key, value in tree.items()}
        return found if any(found[key] is not tree[key] for key in tree) else tree
    if isinstance(tree, list):
        values = [in_parts(value, (*path, n), recipes) for n, value in enumerate(tree)]
        return values if any(map(operator.is_not, values, tree)) else tree
    if not is_made_of_tensors(tree):
        return tree
    local = shard_of(tree)
    with torch.no_grad():
        names, context = local.__tensor_flatten__()
    cls = type(local)
    layout = tuple(local.shape), tuple(local.stride()), isinstance(tree, DTensor)
    recipes[path] = tuple(Recipe(cls.__module__, cls.__qualname__, context, *layout))
    parts = {}
    for name in names:
        part = part_of(tree, getattr(local, name), path)
        parts[name] = in_parts(part, (*path, name), recipes)
    return parts


@torch.no_grad()
def part_of(whole: torch.Tensor, part: torch.Tensor, path: tuple) -> torch.Tensor:
    """``part`` of this rank's ``whole``, sharded as that is; equal on all ranks if it is a number.

    Raises:
        TypeError: no checkpoint can say whose it is.
    """
    if not is_made_of_tensors(part):
        part = part.detach()
    if not isinstance(whole, DTensor) or part.dim() == 0:
        return part
    mesh = whole.device_mesh
    if part.shape == whole._local_tensor.shape:
        layout = {"shape": whole.shape, "stride": whole.stride()}
        return DTensor.from_local(part, mesh, whole.placements, run_check=False, **layout)
    ranks = 1
    for dim, placement in enumerate(whole.placements):
        if placement == Shard(0):
            ranks *= mesh.size(dim)
        elif not isinstance(placement, Replicate):
            raise TypeError(PARTS % (".".join(map(str, path)), type(whole._local_tensor).__name__))
    if whole.shape[0] != ranks * whole._local_tensor.shape[0]:
        raise TypeError(PARTS % (".".join(map(str, path)), type(whole._local_tensor).__name__))
    return DTensor.from_local(part, mesh, whole.placements, run_check=False)


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that it is made of; itself, if of none."""
    parts: list[torch.Tensor] = []
    walk(in_parts(tensor, (), {}), parts.append)
    return parts


def joined(tree: object, path: tuple, recipes: dict[tuple, tuple]) -> object:
    """``tree`` with the tensors that were taken apart; the inverse of ``in_parts``."""
    if isinstance(tree, list):
        return [joined(value, (*path, n), recipes) for n, value in enumerate(tree)]
    if not isinstance(tree, dict):
        return tree
    for key, value in tree.items():
        inner = joined(value, (*path, str(key)), recipes)
        if inner is not value:
            tree = {**tree, key: inner}
    if path not in recipes:
        return tree
    recipe = Recipe(*recipes[path])
    cls = importlib.import_module(recipe.module)
    for name in recipe.name.split("."):
        cls = getattr(cls, name)
    locals_ = {name: shard_of(part) for name, part in tree.items()}
    local = cls.__tensor_unflatten__(locals_, recipe.context, recipe.shape, recipe.stride)
    if not recipe.is_dtensor:
        return local
    like = next(x for x in tree.values() if isinstance(x, DTensor) and is_of_shape(x, recipe))
    layout = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, **layout)


def is_of_shape(part: DTensor, recipe: Recipe) -> bool:
    return tuple(part._local_tensor.shape) == recipe.shape


def differences(saved: dict[str, str], here: dict[str, str]) -> list[str]:
    """A line for each part of a model that the checkpoint has otherwise."""
    found = []
    for name in sorted(saved.keys() | here.keys()):
        if name not in here:
            found.append(f"  {name}: only in the checkpoint")
        elif name not in saved:
            found.append(f"  {name}: only in the model")
        elif saved[name] != here[name]:
            found.append(f"  {name}: {here[name]}, saved {saved[name]}")
    return found


def parse(has_state: str) -> dict:
    """What ``contents`` gave; of an old checkpoint, the optimizers' keys alone."""
    contents = json.loads(has_state)
    if isinstance(contents.get("format"), int):
        return contents
    return {"optim": contents, "int_keys": [], "empty": []}


class TrainingState(AppState):
    """The state of a job: model, optimizers, scheduler, step, random numbers, position in the data.

    ``step`` is saved and loaded, and set by the caller or by ``CheckpointManager``. The random
    numbers of each rank are always in it: of Python, NumPy (if it was imported), torch, and this
    rank's accelerator.

    Args:
        model: the model.
        optimizers: one, several, a list of them, or none.
        per_rank: what is at another place on each rank, by name: ``{"data": loader}``. Each rank
            saves its own and loads its own. A pass of a loader that goes on behind a load has the
            order of its samples, and draws none of the job's random numbers; those of its workers
            begin anew, from the same seeds. On another number of ranks, an object with a method
            ``load_state_dicts`` gets the list of what all ranks have saved; for any other the load
            raises.
        trainable_only: leave out parameters without ``requires_grad``, as of LoRA's base; never
            buffers. The checkpoint has their names, shapes and digests, and a load raises if the
            base that is here is another one: load the base first. To make the digests, the first
            save reads all that is left out once, and waits for all ranks. A save fails if what is
            left out has changed since; writes that PyTorch does not count, through ``.data`` or in
            ``torch._foreach_*`` over DTensors, are not seen.
        shared: what is equal on all ranks, by name: ``scheduler=scheduler``, or a list of them. A
            save fails if it is not; of tensors, the first save names in a warning those that are
            not, up to 1 MiB each, and rank 0's are saved.

    Objects in ``per_rank`` and ``shared`` have ``state_dict`` and ``load_state_dict``, or are
    generators of torch, Python or NumPy, or are dicts of values, which a load changes in place:
    ``progress={"epoch": 0, "best": 0.0}``. PyTorch's own ``dcp.load`` loads on as many ranks as
    have saved; on more it misses the keys of ``per_rank``.

    Raises:
        TypeError: an argument is not what it stands for.
        ValueError: a name is taken.
    """

    def __init__(
        self,
        model: nn.Module,
        *optimizers: torch.optim.Optimizer | list[torch.optim.Optimizer],
        per_rank: dict[str, object] | None = None,
        trainable_only: bool = False,
        **shared: object,
    ) -> None:
        refuse_taken(shared, TAKEN | {*self.COUNTERS})
        refuse_taken(per_rank or {}, {RandomNumbers.NAME})
        super().__init__(model, in_one_list(optimizers))
        self.trainable_only = trainable_only
        self.shared = {name: as_stateful(name, item) for name, item in shared.items()}
        self.per_rank = {RandomNumbers.NAME: RandomNumbers(self)}
        for name, item in (per_rank or {}).items():
            self.per_rank[name] = as_stateful(name, item)

    def more_state(self) -> dict:
        state = {name: item.state_dict() for name, item in self.shared.items()}
        state[PER_RANK] = {str(own_rank()): self.of_this_rank()}
        return state

    def of_this_rank(self) -> dict[str, bytes]:
        states = {}
        for name, item in self.random_last():
            states[name] = packed(item.state_dict())
        return states

    def random_last(self) -> list[tuple[str, Stateful]]:
        """What each rank has for itself; others may draw random numbers as they save or load."""
        return sorted(self.per_rank.items(), key=lambda item: item[0] == RandomNumbers.NAME)

    def take(
        self, state: dict, contents: dict, is_skipped: Callable[[str], bool] = lambda name: False
    ) -> None:
        super().take(state, contents, is_skipped)
        for name, item in self.shared.items():
            if not is_skipped(name):
                item.load_state_dict(state[name])
        of_ranks = state.get(PER_RANK, {})
        for name, item in self.random_last():
            if of_ranks and not is_skipped(name):
                take_of_ranks(name, item, of_ranks, contents["ranks"])


def take_of_ranks(name: str, item: Stateful, of_ranks: dict[str, dict], ranks: int) -> None:
    """Give ``item`` its own state, or those of all ``ranks`` if there are others now."""
    if ranks == world_size():
        item.load_state_dict(unpacked(of_ranks[str(own_rank())][name]))
    elif not hasattr(item, "load_state_dicts"):
        raise ValueError(OTHER_RANKS % (name, ranks, world_size()))
    elif len(of_ranks) == ranks:
        item.load_state_dicts([unpacked(of_ranks[str(rank)][name]) for rank in range(ranks)])
    else:
        raise ValueError(OTHER_RANKS_ALONE % (ranks, world_size()))


class RandomNumbers:
    """The state of this rank's random numbers; on another number of ranks, all seed anew."""

    NAME = "random"

    def __init__(self, job: TrainingState) -> None:
        self.job = weakref.proxy(job)  # which has this object, and loaders that end with it

    def state_dict(self) -> dict:
        state = numbers_of_host()
        for name, source in torch_generators().items():
            state[name] = source.get_rng_state()
        return state

    def load_state_dict(self, state: dict) -> None:
        set_numbers_of_host(state)
        for name, source in torch_generators().items():
            if name in state:
                source.set_rng_state(state[name])

    def load_state_dicts(self, states: list[dict]) -> None:
        seed = SEEDS_A_STEP * self.job.step + own_rank()
        random.seed(seed)
        torch.manual_seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        LOG.warning(SEEDED_ANEW, world_size(), len(states))


def numbers_of_host() -> dict:
    """The random numbers of Python, NumPy (if it was imported) and torch on the host."""
    numpy = sys.modules.get("numpy")
    state = {"python": random.getstate(), "host": torch.get_rng_state()}
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    return state


def set_numbers_of_host(state: dict) -> None:
    """Take what ``numbers_of_host`` gave; checkpoints of earlier versions have fewer."""
    if "python" in state:
        random.setstate(state["python"])
    if "numpy" in state:
        importlib.import_module("numpy.random").set_state(state["numpy"])
    if "host" in state:
        torch.set_rng_state(state["host"])


def has_drawn_more_than_a_seed(before: dict) -> bool:
    """Whether random numbers were drawn since ``before``, but for what a loader draws itself."""
    after = numbers_of_host()
    if after["python"] != before["python"]:
        return True
    if "numpy" in before and value_of_numpy(after) != value_of_numpy(before):
        return True
    if torch.equal(after["host"], before["host"]):
        return False
    torch.set_rng_state(before["host"])
    torch.empty((), dtype=torch.int64).random_()  # as ``DataLoader`` draws the seed of workers
    of_seed = torch.get_rng_state()
    torch.set_rng_state(after["host"])
    return not torch.equal(after["host"], of_seed)


def draw_first(iterator: Iterator) -> None:
    """Let a sampler that is to skip what was taken do so now, with the numbers of its pass."""
    rest = getattr(iterator, "_sampler_iter", None)
    if isinstance(rest, islice):
        first = list(islice(rest, 1))
        iterator._sampler_iter = chain(first, rest)


def value_of_numpy(numbers: dict) -> tuple:
    kind, keys, *position = numbers["numpy"]
    return kind, keys.tobytes(), *position


def maker_of_iterators(loader: DataLoader) -> Callable[[], Iterator]:
    """What makes them up to now. It does not keep ``loader``, whose workers end with it."""
    own = weakref.ref(loader)
    before = vars(loader).get("_get_iterator")  # of another state of the job

    def make() -> Iterator:
        alive = own()
        return type(alive)._get_iterator(alive) if before is None else before()

    return make


def begun_by(owner: weakref.ref, make: Callable[[], Iterator]) -> Callable[[], Iterator]:
    """``LoaderInPass.begin`` of ``owner`` as long as there is one."""

    def begin() -> Iterator:
        alive = owner()
        return make() if alive is None else alive.begin()

    return begin


class LoaderInPass:
    """A loader that knows where it is, with the random numbers from which its pass began.

    The order of a sampler, the seeds of the workers and what a dataset draws come from them. A pass
    that goes on behind a load begins with them again, and leaves the job's own as they are.
    """

    KEY = "overlap_recipes.pass"  # in the state of the loader

    def __init__(self, name: str, item: Stateful, loader: DataLoader) -> None:
        self.item = item
        self.name = name
        self.generator = loader.generator
        sampler = type(innermost_sampler(loader))
        has_sampler = not isinstance(loader.dataset, IterableDataset)
        self.draws_at_once = has_sampler and not isgeneratorfunction(sampler.__iter__)
        self.sampler = sampler.__name__
        self.unknown_order = False
        self.began: dict | None = None  # None: before this object was made
        self.goes_on = False  # whether a load has given the pass that comes next
        self.make_iterator = maker_of_iterators(loader)
        loader._get_iterator = begun_by(weakref.ref(self), self.make_iterator)
        if hasattr(item, "load_state_dicts"):
            self.load_state_dicts = item.load_state_dicts

    def begin(self) -> Iterator:
        """Make the iterator of a pass, for the loader."""
        own = self.numbers()
        if not self.goes_on:
            self.began = own
            iterator = self.make_iterator()
            if self.draws_at_once and has_drawn_more_than_a_seed(own):
                self.unknown_order = True
            return iterator
        self.goes_on = False
        try:
            if self.began is not None:
                self.set_numbers(self.began)
            iterator = self.make_iterator()
            draw_first(iterator)
            return iterator
        finally:
            self.set_numbers(own)

    def numbers(self) -> dict:
        numbers = numbers_of_host()
        if self.generator is not None:
            numbers["generator"] = self.generator.get_state()
        return numbers

    def set_numbers(self, numbers: dict) -> None:
        set_numbers_of_host(numbers)
        if self.generator is not None and "generator" in numbers:
            self.generator.set_state(numbers["generator"])

    def state_dict(self) -> dict:
        state = self.item.state_dict()  # may begin a pass
        if self.unknown_order:
            raise ValueError(DRAWS_AT_ONCE % (self.name, self.sampler))
        if not isinstance(state, dict):
            return state
        of_pass = {"began": self.began, "now": self.numbers().get("generator")}
        return {**state, self.KEY: of_pass}

    def load_state_dict(self, state: dict) -> None:
        of_pass = {}
        if isinstance(state, dict):
            of_pass = state.get(self.KEY, {})  # not in checkpoints of earlier versions
            state = {key: value for key, value in state.items() if key != self.KEY}
        self.item.load_state_dict(state)
        self.goes_on = True
        self.began = of_pass.get("began")
        if self.generator is not None and of_pass.get("now") is not None:
            self.generator.set_state(of_pass["now"])


def torch_generators() -> dict[str, ModuleType]:
    """What has torch's random numbers: the host, and this rank's accelerator if there is one."""
    generators = {"host": torch}
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None:
        generators["device"] = torch.get_device_module(device)
    return generators


class Several:
    """A list of objects with a state, such as one scheduler for each optimizer."""

    def __init__(self, items: list[Stateful]) -> None:
        self.items = items

    def state_dict(self) -> dict:
        return {str(number): item.state_dict() for number, item in enumerate(self.items)}

    def load_state_dict(self, state: dict) -> None:
        for number, item in enumerate(self.items):
            item.load_state_dict(state[str(number)])


class Values:
    """A dict of a job's own values, such as its epoch; a load changes it in place."""

    def __init__(self, name: str, values: dict) -> None:
        refuse_objects(name, values)
        self.name = name
        self.values = values

    def state_dict(self) -> dict:
        refuse_objects(self.name, self.values)
        return {**self.values}

    def load_state_dict(self, state: dict) -> None:
        self.values.clear()
        self.values.update(state)


def refuse_objects(name: str, value: object) -> None:
    """Raise ``TypeError`` if ``value``, or what is in it, is more than a value."""
    if isinstance(value, dict):
        for key, inner in value.items():
            refuse_objects(f"{name}[{key!r}]", inner)
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            refuse_objects(f"{name}[{number}]", inner)
    elif isinstance(value, Stateful) or as_generator(value) is not None:
        raise TypeError(REPLACED % (name, type(value).__name__))


class Generator:
    """A source of random numbers of the job's own."""

    def __init__(self, read: Callable[[], object], write: Callable[[object], None]) -> None:
        self.read = read
        self.write = write

    def state_dict(self) -> dict:
        return {"numbers": self.read()}

    def load_state_dict(self, state: dict) -> None:
        self.write(state["numbers"])


def as_generator(item: object) -> Generator | None:
    """The state of ``item``, if it is a generator of torch, Python or NumPy."""
    if isinstance(item, torch.Generator):
        return Generator(item.get_state, item.set_state)
    if isinstance(item, random.Random):
        return Generator(item.getstate, item.setstate)
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(item, numpy.random.RandomState):
        return Generator(item.get_state, item.set_state)
    if isinstance(item, numpy.random.Generator):
        bits = item.bit_generator
        return Generator(lambda: bits.state, lambda state: setattr(bits, "state", state))
    return None


def refuse_taken(names: Iterable[str], taken: set[str]) -> None:
    found = taken & set(names)
    if found:
        raise ValueError(f"name it otherwise: {found} is taken in the checkpoint")


def in_one_list(optimizers: tuple) -> list[torch.optim.Optimizer]:
    """The optimizers of a call with one, several, or a list of them."""
    if len(optimizers) == 1 and isinstance(optimizers[0], (list, tuple)):
        optimizers = optimizers[0]
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"{type(optimizer).__name__} is no optimizer: pass it by a name")
    return [*optimizers]


def as_stateful(name: str, item: object) -> Stateful:
    if isinstance(item, (list, tuple)):
        items = [as_stateful(f"{name}[{number}]", each) for number, each in enumerate(item)]
        return Several(items)
    if isinstance(item, dict):
        return Values(name, item)
    generator = as_generator(item)
    if generator is not None:
        return generator
    if isinstance(item, DataLoader):
        inner = getattr(item, "base_dataloader", item)  # accelerate's has the methods, and no state
        if not isinstance(inner, Stateful):
            raise TypeError(NO_POSITION % name)
        sampler = innermost_sampler(inner)
        if draws_without_a_state(sampler):
            raise TypeError(NO_ORDER % (name, type(sampler).__name__))
        return LoaderInPass(name, item, inner)
    if not isinstance(item, Stateful):
        raise TypeError(f"{name} has no state_dict and load_state_dict; a dict of values would do")
    return item


def innermost_sampler(loader: DataLoader) -> object:
    """What gives the order of the samples, below all that makes batches of them."""
    found: object = loader
    while True:
        inner = getattr(found, "batch_sampler", None)
        if inner is None:
            inner = getattr(found, "sampler", None)
        if inner is None:
            return found
        found = inner


def draws_without_a_state(sampler: object) -> bool:
    """Whether it is one of PyTorch's own samplers that draw; torchdata's RandomSampler is not."""
    is_torchs_own = type(sampler).__module__ == RandomSampler.__module__
    return is_torchs_own and not isinstance(sampler, SequentialSampler)


def packed(state: object) -> bytes:
    """One leaf of a checkpoint, whatever the state has inside; ``torch.load`` reads it."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def unpacked(data: bytes) -> object:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def shared_digests(tree: dict) -> dict[str, str]:
    """Digests of what ``tree`` shares between ranks, by name: of all that is no tensor.

    Args:
        tree: what ``read`` has returned. Of its entries, those of ``AppState`` and its subclasses
            count.
    """
    digests = {}
    for key, state in tree.items():
        if not isinstance(state, dict) or "has_state" not in state:
            continue
        for name in state.keys() - {"model", "optim", PER_RANK, RECIPES}:
            digests[f"{key}.{name}"] = digest(state[name])
        settings = [{**group, "params": None} for group in state["optim"]["param_groups"]]
        digests[f"{key}.optim.param_groups"] = digest(settings)
    return digests


class DifferingRanks(RuntimeError):
    """Ranks share what differs between them: all would resume with the state of one."""


def refuse_differing(of_ranks: list[dict[str, str]], advice: str = PASS_PER_RANK) -> None:
    """Raise ``DifferingRanks`` if a name has several digests."""
    differing = differing_names(of_ranks)
    if differing:
        raise DifferingRanks(DIFFERING % (", ".join(differing), advice))


def differing_names(of_ranks: list[dict[str, str]]) -> list[str]:
    """The names that have several digests."""
    names: set[str] = set()
    for digests in of_ranks:
        names |= digests.keys()
    differing = []
    for name in sorted(names):
        if len({digests[name] for digests in of_ranks if name in digests}) > 1:
            differing.append(name)
    return differing


def digests_of_replicas(tree: dict) -> dict[str, str]:
    """Digests of small tensors that are no shards, of the model and of what is shared, by name.

    Args:
        tree: as of ``shared_digests``; its tensors lie in host memory.
    """
    digests: dict[str, str] = {}
    for key, state in tree.items():
        if isinstance(state, dict) and "has_state" in state:
            for name in state.keys() - {"optim", PER_RANK, RECIPES}:
                add_digests_of_replicas(state[name], f"{key}.{name}", digests)
    return digests


def add_digests_of_replicas(tree: object, name: str, digests: dict[str, str]) -> None:
    if isinstance(tree, dict):
        for key, value in tree.items():
            add_digests_of_replicas(value, f"{name}.{key}", digests)
    elif isinstance(tree, (list, tuple)):
        for number, value in enumerate(tree):
            add_digests_of_replicas(value, f"{name}.{number}", digests)
    elif is_staged(tree) and not isinstance(tree, DTensor) and tree.nbytes <= SMALL:
        content = ctypes.string_at(tree.data_ptr(), tree.nbytes)
        digests[name] = hashlib.sha256(content).hexdigest()


def digest(tree: object) -> str:
    found = hashlib.blake2b(digest_size=16)
    add_to_digest(tree, found)
    return found.hexdigest()


def add_to_digest(tree: object, found: "hashlib._Hash") -> None:
    """Equal values have equal digests, in any process; tensors do not count."""
    if torch.is_tensor(tree):
        return
    found.update(type(tree).__name__.encode())
    if isinstance(tree, dict):
        for key in sorted(tree, key=repr):
            found.update(repr(key).encode())
            add_to_digest(tree[key], found)
    elif isinstance(tree, (list, tuple)):
        found.update(str(len(tree)).encode())
        for value in tree:
            add_to_digest(value, found)
    elif isinstance(tree, (set, frozenset)):
        found.update(repr(sorted(tree, key=repr)).encode())
    elif hasattr(tree, "tobytes"):  # an array of NumPy
        found.update(f"{tree.dtype} {tree.shape}".encode() + tree.tobytes())
    elif isinstance(tree, bytes):
        found.update(tree)
    elif type(tree).__repr__ is not object.__repr__:
        found.update(repr(tree).encode())
    else:
        add_to_digest(getattr(tree, "__dict__", None), found)


def memory_of(leaf: object) -> object:
    """Where a tensor lies and how it is read; of all else, its type."""
    if not torch.is_tensor(leaf):
        return type(leaf)
    x = shard_of(leaf)
    if not is_staged(leaf):
        return type(x), x.shape
    return x.data_ptr(), leaf.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg()


def is_staged(leaf: object) -> bool:
    """Whether ``leaf`` is a dense tensor or a DTensor of one."""
    x = shard_of(leaf)
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
        if torch.is_tensor(leaf) and not is_staged(leaf):
            leaf = leaf.detach()  # a subclass of Parameter becomes a tensor
        if is_staged(leaf):
            tensors.append(leaf)
            return leaf
        if isinstance(leaf, DTensor):
            raise TypeError(f"save the plain tensor in a DTensor of {type(leaf._local_tensor)}")
        if torch.is_tensor(leaf):
            return leaf.clone().to("cpu")
        return deepcopy(leaf)

    if is_staged(tree):
        tensors.append(tree)
        return tree
    if hasattr(tree, "state_dict"):
        tree = state_of(tree)
    if isinstance(tree, dict):
        return {key: read(value, tensors) for key, value in tree.items()}
    return walk(tree, read_leaf)
