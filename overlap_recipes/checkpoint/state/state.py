# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.1, overlap_recipes/checkpoint/state/state.py
"""The state of a job: asked for, undone where asking changes training, and loaded.

``AppState`` gets from DCP what a restart reads, and raises where a load would leave out optimizer
state that the checkpoint lists. ``read`` tells what of a state is copied beside training.
"""

import json
import logging
from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ...ranks import own_rank, world_size
from ..frozen import digests_of_ranks, own_sums
from .alike import PER_RANK, RECIPES
from .contents import FORMAT, described, differences, parse, survey
from .items import as_stateful, in_one_list, refuse_taken
from .optimizers import (
    OTHER_GROUPS,
    groups,
    is_new,
    is_sharded,
    load_kind,
    refuse_flat_parameters,
    refuse_more_state,
    refuse_plain_tensors,
    take_group,
    uncast,
    unwrapped,
)
from .random_numbers import RandomNumbers
from .tensor_classes import has_parts, in_parts, joined, parts_of
from .trees import is_staged, memory_of, packed, shard_of, unpacked, walk

LOG = logging.getLogger(__name__)
TAKEN = {"model", "optim", "has_state", PER_RANK, RECIPES}  # keys of a state
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
OTHER_MODEL = "the checkpoint does not fit this model:\n"
REPLICAS_DIFFER = (
    "ranks differ in %s: the checkpoint has those of rank 0, and all resume with them. "
    "SyncBatchNorm keeps buffers alike that forward changes; what is of each rank goes to per_rank"
)
ON_META = "%s is frozen and still lies on meta: load the base first"
NOT_OF_THE_MODEL = (
    "an optimizer trains a parameter of shape %s that the model does not have: make the optimizer "
    "behind what replaces parameters (fully_shard, model.to, to_empty, adapters), and give "
    "TrainingState a model that has all that is trained: nn.ModuleList([model, criterion])"
)
OTHER_KEYS = (
    "%s keeps state under %r, which is no parameter: no checkpoint would have it. Keep it in an "
    "object with state_dict and load_state_dict, and give that by a name"
)
FROZEN_CHANGED = (
    "%s: frozen, left out of checkpoints, and changed since the first of them: no load would bring "
    "back what is here now. Let it require grad or leave out trainable_only; if this is the base "
    "from now on, make a new TrainingState"
)
OTHER_VALUES = "%s: frozen, left out of the checkpoint, and of other values than at the save"
# what ``torch.compile`` and ``checkpoint_wrapper`` add to names
WRAPPERS = "_orig_mod", "_checkpoint_wrapped_module"


def prefixes_of_ddp(model: nn.Module) -> list[str]:
    """What names of parameters begin with where DDP adds ``module.``; the innermost first."""
    prefixes = []
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            prefixes.append(f"{name}." if name else "")
    return sorted(prefixes, key=len, reverse=True)


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

    def take_new_parts(self, model: dict, recipes: dict[tuple, tuple]) -> None:
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
