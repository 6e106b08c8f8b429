# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/state/optimizers.py
"""Optimizers: which are refused, and how one gets its state as it was saved."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor, Replicate

OTHER_GROUPS = "load into the groups of the save: change the groups after the load"


def groups(optimizers: list[torch.optim.Optimizer]) -> list[dict]:
    """Their parameter groups, in order."""
    found: list[dict] = []
    for optimizer in optimizers:
        found.extend(optimizer.param_groups)
    return found


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """What it trains, in the order of its ``state_dict``."""
    found = []
    for group in optimizer.param_groups:
        found.extend(group["params"])
    return found


def in_one_list(optimizers: tuple) -> list[torch.optim.Optimizer]:
    """The optimizers of a call with one, several, or a list of them.

    Raises:
        TypeError: one is none, or its state cannot be saved.
    """
    if len(optimizers) == 1 and isinstance(optimizers[0], (list, tuple)):
        optimizers = optimizers[0]
    found = []
    for each in optimizers:
        if not isinstance(each, torch.optim.Optimizer):
            raise TypeError(f"{type(each).__name__} is no optimizer: pass it by a name")
        optimizer = _unwrapped(each)
        _refuse_inner_state(optimizer)
        _refuse_more_state(optimizer)
        _refuse_flat_parameters(optimizer)
        found.append(optimizer)
    return found


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Without what accelerate and Lightning put around it, which has no state of its own."""
    package = type(optimizer).__module__.partition(".")[0]
    if package == "accelerate":
        return optimizer.optimizer
    if package in ("lightning", "pytorch_lightning"):
        return optimizer._optimizer
    return optimizer


def _refuse_inner_state(outer: torch.optim.Optimizer) -> None:
    """Raise if the state is in an optimizer inside, as in SAM's."""
    for name, inner in vars(outer).items():
        if isinstance(inner, torch.optim.Optimizer) and inner.state is not outer.state:
            raise TypeError(f"{type(outer).__name__} keeps its state in {name}: pass that")


def _refuse_more_state(optimizer: torch.optim.Optimizer) -> None:
    """Raise if its state has more than PyTorch's, as that of PostLocalSGDOptimizer has."""
    is_torchs = type(optimizer).state_dict is torch.optim.Optimizer.state_dict
    if is_torchs and not optimizer._optimizer_state_dict_post_hooks:
        return
    more = sorted(optimizer.state_dict().keys() - {"state", "param_groups"})
    if more:
        raise TypeError(
            f"{type(optimizer).__name__} has {', '.join(more)} besides state and param_groups, "
            "which no checkpoint would have: give the optimizer inside it, and what has the rest "
            "by a name of its own"
        )


def _refuse_flat_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Raise if it trains what ``FullyShardedDataParallel`` makes without ``use_orig_params``."""
    for parameter in parameters_of(optimizer):
        if isinstance(parameter, FlatParameter):
            raise TypeError(
                "an optimizer trains a FlatParameter, whose state no job could load: make the "
                "model by FullyShardedDataParallel(..., use_orig_params=True), or by fully_shard"
            )


def refuse_other_keys(optimizer: torch.optim.Optimizer) -> None:
    """Raise if it keeps state under what is no parameter."""
    for key in optimizer.state:
        if not torch.is_tensor(key):
            raise ValueError(
                f"{type(optimizer).__name__} keeps state under {key!r}, which is no parameter: no "
                "checkpoint would have it. Keep it in an object with state_dict and "
                "load_state_dict, and give that by a name"
            )


def refuse_plain_tensors(name: str, moments: object) -> None:
    """Raise if the state of a sharded parameter has tensors that do not say whose they are."""
    if isinstance(moments, dict):
        for value in moments.values():
            refuse_plain_tensors(name, value)
    elif isinstance(moments, (list, tuple)):
        for value in moments:
            refuse_plain_tensors(name, value)
    elif torch.is_tensor(moments) and not isinstance(moments, DTensor) and moments.numel() > 1:
        raise TypeError(
            f"the optimizer's state of {name} is a plain tensor of this rank's shard, and ranks "
            "would get each other's: make it with torch.zeros_like(parameter), or as a DTensor "
            "(DTensor.from_local)"
        )


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether ranks hold different parts of it."""
    if not isinstance(tensor, DTensor):
        return False
    for dim, placement in enumerate(tensor.placements):
        if not isinstance(placement, Replicate) and tensor.device_mesh.size(dim) > 1:
            return True
    return False


def is_new(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it has no state; an empty one for each parameter is none."""
    return not any(not isinstance(own, dict) or own for own in optimizer.state.values())


def kind_of_steps(optimizer: torch.optim.Optimizer) -> str | None:
    """The optimizer of torch that it is, or is made from; None of others, which may be any."""
    for cls in type(optimizer).__mro__:
        if cls.__module__.startswith("torch.optim.") and cls is not torch.optim.Optimizer:
            return cls.__name__
    return None


# -- loading ----------------------------------------------------------------------------------


def _lacking_settings(optimizer: torch.optim.Optimizer, group: dict, saved: set[str]) -> list[str]:
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


def _other_kind(optimizer: torch.optim.Optimizer, lacking: str) -> str:
    """Why a checkpoint is not loaded into ``optimizer``."""
    kind = type(optimizer).__name__
    return (
        f"the checkpoint is of another kind of optimizer: {kind} needs {lacking}, "
        "which it does not have"
    )


@dataclass
class SavedGroup:
    """A group of parameters in a checkpoint.

    Attributes:
        names: of its parameters.
        settings: their names.
        kind: the optimizer of torch that has stepped it; None if it is of others, or not known.
    """

    names: set[str]
    settings: set[str]
    kind: str | None


def saved_groups(param_groups: list[dict], kinds: list[str | None]) -> list[SavedGroup]:
    """Those of a state that was loaded, with ``kinds`` as ``Contents.kinds`` has them."""
    found = []
    for number, group in enumerate(param_groups):
        kind = kinds[number] if number < len(kinds) else None
        found.append(SavedGroup(set(group["params"]), set(group), kind))
    return found


def wrong_groups(
    optimizers: list[torch.optim.Optimizer],
    param_groups: list[dict],
    saved: list[SavedGroup],
    is_skipped: Callable[[str], bool],
) -> list[str]:
    """A line for each group that the checkpoint has otherwise, or that something else has stepped.

    Args:
        param_groups: of the optimizers, with names of parameters.
    """
    stepped_by: list[torch.optim.Optimizer] = []
    for optimizer in optimizers:
        stepped_by.extend([optimizer] * len(optimizer.param_groups))
    found = []
    for optimizer, group in zip(stepped_by, param_groups, strict=True):
        names = {name for name in group["params"] if not is_skipped(name)}
        if not names:
            continue
        matching = [each for each in saved if each.names == names]
        if not matching:
            found.append(f"  the group of {min(names)}: {OTHER_GROUPS}")
            continue
        here = kind_of_steps(optimizer)
        there = matching[0].kind
        lacking = _lacking_settings(optimizer, group, matching[0].settings)
        if lacking:
            found.append("  " + _other_kind(optimizer, ", ".join(lacking)))
        elif here is not None and there is not None and here != there:
            found.append(
                f"  the group of {min(names)}: the checkpoint is of another kind of optimizer: "
                f"saved with {there}, here is {here}: resume with {there}, and change it then"
            )
    return found


def load_as_saved(
    optimizer: torch.optim.Optimizer, moments: dict[int, dict], param_groups: list[dict]
) -> None:
    """Give it a state; of PyTorch's own optimizers, tensors keep the types that they had.

    Args:
        moments: by the number of the parameter.
    """
    try:
        optimizer.load_state_dict({"state": moments, "param_groups": param_groups})
    except KeyError as error:
        raise ValueError(_other_kind(optimizer, str(error))) from error
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return
    parameters = parameters_of(optimizer)
    for number, saved in moments.items():
        cast = optimizer.state[parameters[number]]
        optimizer.state[parameters[number]] = _uncast(cast, saved)


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


def _uncast(loaded: object, saved: object) -> object:
    """``loaded`` in the types of ``saved``: torch's optimizers cast to the parameter's type."""
    if isinstance(saved, dict):
        return {key: _uncast(loaded[key], value) for key, value in saved.items()}
    if isinstance(saved, (list, tuple)):
        values = [_uncast(cast, value) for cast, value in zip(loaded, saved, strict=True)]
        return type(saved)(*values) if hasattr(saved, "_fields") else type(saved)(values)
    if isinstance(saved, str):
        return saved  # torch takes its letters for a list
    if not torch.is_tensor(saved) or loaded.dtype == saved.dtype:
        return loaded
    return saved.to(loaded.device)
