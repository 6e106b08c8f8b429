# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/state/trained.py
"""A model and its optimizers: asked for their states under DCP's names, and loaded."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.fsdp import FullyShardedDataParallel

from .names import Names, like
from .optimizers import (
    OTHER_GROUPS,
    groups,
    is_new,
    is_sharded,
    load_as_saved,
    parameters_of,
    refuse_other_keys,
    refuse_plain_tensors,
    take_group,
)
from .trees import Flattened, memory_of, shard_of, walk


@dataclass
class States:
    """What a model and its optimizers have.

    Attributes:
        model: parameters and buffers by name, with the versions of modules as ``_metadata``.
        optim: as ``get_state_dict`` gives it; groups list their parameters by name.
        real: of each parameter of an optimizer the names of its state, but not of state that was
            made up for an optimizer that has never stepped.
        frozen: the parameters that require no gradient.
        buffers: the tensors of the model that are no parameters.
        ties: the name of the parameter that it is, of each that has several names.
    """

    model: dict[str, object]
    optim: dict
    real: dict[str, list[str]]
    frozen: list[str] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    ties: dict[str, str] = field(default_factory=dict)


class Trained:
    """A model and its optimizers.

    Attributes:
        reads_as_dcp: whether modules and optimizers say of themselves what DCP says of them; None
            as long as that is not known. DCP takes six times as long for 580 parameters in 48
            layers, most of it to find names.
    """

    def __init__(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        self.model = model
        self.optimizers = optimizers
        self.reads_as_dcp: bool | None = None
        self._names_of_keys = Names(model)

    # -- names ------------------------------------------------------------------------------------

    def parameters_of_model(self) -> dict[str, nn.Parameter]:
        """By all their names: a tied one is there twice."""
        found = {}
        for key, parameter in self.model.named_parameters(remove_duplicate=False):
            found[self._names_of_keys.of(key)] = parameter
        return found

    def parameters_of_optimizers(self) -> dict[str, nn.Parameter]:
        """By the names that DCP gives them; of a tied one, by the first.

        Raises:
            ValueError: an optimizer has one that is not the model's.
        """
        if self.has_flat_parameters():
            return self._named_by_dcp(self.states())
        names = self._names()
        found = {}
        for optimizer in self.optimizers:
            for parameter in parameters_of(optimizer):
                found[names[id(parameter)]] = parameter
        return found

    def _names(self) -> dict[int, str]:
        """The names of parameters by their id; of a tied one the first."""
        names = {id(p): self._names_of_keys.of(key) for key, p in self.model.named_parameters()}
        for optimizer in self.optimizers:
            for parameter in parameters_of(optimizer):
                if id(parameter) not in names:
                    raise ValueError(
                        f"an optimizer trains a parameter of shape {list(parameter.shape)} that "
                        "the model does not have: make the optimizer after what replaces "
                        "parameters (fully_shard, model.to, to_empty, adapters), and give "
                        "TrainingState a model that has all that is trained: "
                        "nn.ModuleList([model, criterion])"
                    )
        return names

    def _named_by_dcp(self, states: States) -> dict[str, nn.Parameter]:
        """The optimizers' parameters by the names that ``states`` has; in DCP's groups' order."""
        found = {}
        for own, saved in zip(groups(self.optimizers), states.optim["param_groups"], strict=True):
            found.update(zip(saved["params"], own["params"], strict=False))
        return found

    def has_flat_parameters(self) -> bool:
        return any(isinstance(m, FullyShardedDataParallel) for m in self.model.modules())

    # -- asking -----------------------------------------------------------------------------------

    def states(self, keep_vars: bool = False) -> States:
        """What a checkpoint has of them. No optimizer steps, but for one that has no state yet.

        That one steps at rate 0, as DCP does it, and is then what it was.

        Args:
            keep_vars: give the parameters themselves where DCP need not be asked.

        Raises:
            ValueError: two optimizers hold one parameter, or one keeps state under no parameter.
            TypeError: an optimizer's state of a sharded parameter is a plain tensor.
        """
        for optimizer in self.optimizers:
            refuse_other_keys(optimizer)
        new = [optimizer for optimizer in self.optimizers if is_new(optimizer)]
        if (self.reads_as_dcp and not new) or self._has_nothing():
            states = self.read_states(keep_vars)
        else:
            states = self._ask_dcp_if_possible(new, keep_vars)
            if self.reads_as_dcp is None and not new:
                self.reads_as_dcp = self._would_read(states, keep_vars)
        new_groups = {id(group) for group in groups(new)}
        for own, saved in zip(groups(self.optimizers), states.optim["param_groups"], strict=True):
            _note_real(states, saved["params"], is_made_up=id(own) in new_groups)
            for parameter, name in zip(own["params"], saved["params"], strict=False):
                if is_sharded(parameter):
                    refuse_plain_tensors(name, states.optim["state"].get(name))
        return states

    def _has_nothing(self) -> bool:
        """Whether all that the job has is given elsewhere, as to ``per_rank``; DCP raises then."""
        return not self.optimizers and not self.model.state_dict()

    def current(self) -> States:
        """The states as they are: no optimizer is made to step."""
        if self.has_flat_parameters():
            return self.states()
        return self.read_states()

    def _ask_dcp_if_possible(self, new: list[torch.optim.Optimizer], keep_vars: bool) -> States:
        """DCP's answer; where a new optimizer cannot step at rate 0, states without its own."""
        try:
            return self.ask_dcp(new)
        except Exception as error:
            is_flat = self.has_flat_parameters()
            if isinstance(error, KeyError) and not is_flat:
                self._names()  # raises what is wrong, where DCP gives a number
            if not new or is_flat:
                raise
            return self.read_states(keep_vars)

    def ask_dcp(self, new: list[torch.optim.Optimizer]) -> States:
        """DCP's answer. It lets the optimizers ``new``, which have no state, step at rate 0."""
        before = {id(group): {**group} for group in groups(new)}
        gradients = []
        for optimizer in new:
            for parameter in parameters_of(optimizer):
                gradients.append((parameter, parameter.grad))
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
            states = States(model, optim, {})
            self._note_parameters(states)
            return states
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

    def read_states(self, keep_vars: bool = False) -> States:
        """What modules and optimizers return as their state, under the names that DCP uses."""
        states, names = self._read_model(keep_vars)
        states.optim = self._read_optimizers(names)
        if not keep_vars:  # which gives other tensors for parameters
            self._note_parameters(states)
        return states

    def _read_model(self, keep_vars: bool) -> tuple[States, dict[int, str]]:
        """The model's part, and names by the id of what it has; of what is tied the first."""
        own = self.model.state_dict(keep_vars=keep_vars)
        states = States(like({}, own), {}, {})
        names: dict[int, str] = {}
        for key, value in own.items():
            name = self._names_of_keys.of(key)
            states.model[name] = value
            first = names.setdefault(id(value), name)
            if first != name:
                states.ties[name] = first
            if keep_vars and not getattr(value, "requires_grad", True):
                if isinstance(value, nn.Parameter):  # which takes long to find out
                    states.frozen.append(name)
                else:
                    states.buffers.append(name)
        return states, names

    def _read_optimizers(self, names: dict[int, str]) -> dict:
        """Their part: ``state`` and ``param_groups`` of all, parameters by name.

        Args:
            names: by the id of what the model's state has, which may be no parameters.
        """
        of_optimizers = [parameters_of(optimizer) for optimizer in self.optimizers]
        trained: set[int] = set()
        for parameters in of_optimizers:
            trained.update(id(p) for p in parameters)
        if not trained <= names.keys():
            names = self._names()
        state = {}
        param_groups = []
        for optimizer, parameters in zip(self.optimizers, of_optimizers, strict=True):
            numbered = [names[id(p)] for p in parameters]
            saved = optimizer.state_dict()
            for number, moments in saved["state"].items():
                state[numbered[number]] = moments
            for group in saved["param_groups"]:
                group_names = [numbered[number] for number in group["params"]]
                param_groups.append(group | {"params": group_names})
        return {"state": state, "param_groups": param_groups}

    def _note_parameters(self, states: States) -> None:
        """Note of the model's parameters which are frozen, and which have several names."""
        states.frozen = []
        states.ties = {}
        names: dict[int, str] = {}
        parameters = self.parameters_of_model()
        others = states.model.keys() - parameters.keys()
        states.buffers = sorted(name for name in others if torch.is_tensor(states.model[name]))
        for name, parameter in parameters.items():
            if name not in states.model:
                continue
            if not parameter.requires_grad:
                states.frozen.append(name)
            first = names.setdefault(id(parameter), name)
            if first != name:
                states.ties[name] = first

    def _would_read(self, of_dcp: States, keep_vars: bool) -> bool:
        """Whether ``read_states`` gives the names and the memory of DCP's answer."""
        if self.has_flat_parameters():
            return False  # to find it out gathers the model, on some ranks alone
        try:
            own = self.read_states(keep_vars)
        except Exception:  # a ``state_dict`` without ``keep_vars``, a parameter of another model
            return False
        same_model = walk(own.model, memory_of) == walk(of_dcp.model, memory_of)
        return same_model and walk(own.optim, memory_of) == walk(of_dcp.optim, memory_of)

    # -- loading ----------------------------------------------------------------------------------

    def load_model(self, state: dict) -> None:
        """Give the model ``state``, which has all that its ``state_dict`` has.

        A ``state_dict`` of the model's own may leave out what strict loads would miss.
        """
        if not state:
            return
        some = dcp_state.StateDictOptions(strict=False)
        found = dcp_state.set_model_state_dict(self.model, state, options=some)
        missing = {self._names_of_keys.of(key) for key in found.missing_keys} & state.keys()
        if missing or found.unexpected_keys:
            raise RuntimeError(
                f"the model has not taken {sorted(missing)}, and does not know "
                f"{sorted(found.unexpected_keys)}"
            )

    def make_parts(self, model: dict, flattened: dict[tuple, Flattened]) -> None:
        """Give parameters the parts that they have not yet, such as a scale of float8."""
        for key, parameter in self.model.named_parameters():
            name = self._names_of_keys.of(key)
            how = flattened.get(("model", name))
            if how is not None and not how.is_sparse and isinstance(model.get(name), dict):
                local = shard_of(parameter)
                here, _ = local.__tensor_flatten__()
                for part in model[name].keys() - set(here):
                    setattr(local, part, shard_of(model[name][part]))

    def load_optimizers(self, optim: dict, is_skipped: Callable[[str], bool]) -> None:
        """Give the optimizers ``optim``, by name, and nothing else; bits are as they were saved."""
        if self.has_flat_parameters():
            self._load_flat_parameters(optim)
            return
        names = self._names()
        state = optim["state"]
        left = [*optim["param_groups"]]
        for optimizer in self.optimizers:
            numbers = {names[id(p)]: n for n, p in enumerate(parameters_of(optimizer))}
            param_groups = []
            for group in optimizer.param_groups:
                wanted = [names[id(p)] for p in group["params"]]
                saved = take_group(left, wanted, is_skipped, group)
                param_groups.append(saved | {"params": [numbers[name] for name in wanted]})
            moments = {number: state[name] for name, number in numbers.items() if name in state}
            load_as_saved(optimizer, moments, param_groups)

    def _load_flat_parameters(self, optim: dict) -> None:
        """Let DCP load; for ``FullyShardedDataParallel``, whose parameters are pieces of others."""
        optim = {**optim}
        own = self.states()
        saved_groups = [set(group["params"]) for group in optim["param_groups"]]
        for group in own.optim["param_groups"]:
            if group["params"] and set(group["params"]) not in saved_groups:
                raise ValueError(OTHER_GROUPS)
        # a name: DCP would take a state without names for another format
        optim["state"] = {"": {}} | optim["state"]
        frozen = []
        some = dcp_state.StateDictOptions(strict=False)  # not every parameter has state
        try:
            for optimizer in self.optimizers:  # one without state would step
                optimizer.state[""] = {}
            for name, parameter in self._named_by_dcp(own).items():
                if name in optim["state"] and not parameter.requires_grad:  # DCP would skip it
                    frozen.append(parameter.requires_grad_())
            if self.optimizers:
                dcp_state.set_optimizer_state_dict(self.model, self.optimizers, optim, options=some)
        finally:
            for optimizer in self.optimizers:
                optimizer.state.pop("", None)
            for parameter in frozen:
                parameter.requires_grad_(False)


def _note_real(states: States, names: list[str], is_made_up: bool) -> None:
    """Note in ``states.real`` what state the parameters ``names`` of a group have.

    Raises:
        ValueError: one is in a group of before.
    """
    for name in names:  # all before any is noted: a group may have one twice
        if name in states.real:
            raise ValueError("two optimizers hold one parameter: DCP has room for one state")
    for name in names:
        moments = states.optim["state"].get(name, {})
        if is_made_up:
            moments = {}
        states.real[name] = sorted(map(str, moments))
