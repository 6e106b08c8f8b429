# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.1, overlap_recipes/checkpoint/state/optimizers.py
"""Optimizers: what is refused, and how a state of one is loaded as it was saved."""

from collections.abc import Callable
from itertools import chain

import torch
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor, Replicate

OTHER_GROUPS = "load into the groups of the save: change the groups after the load"
OTHER_KIND = "the checkpoint is of another kind of optimizer: %s needs %s, which it does not have"
PLAIN = (
    "the optimizer's state of %s is a plain tensor of this rank's shard, and ranks would get each "
    "other's: make it with torch.zeros_like(parameter), or as a DTensor (DTensor.from_local)"
)
MORE_STATE = (
    "%s has %s beside state and param_groups, which no checkpoint would have: give the optimizer "
    "inside it, and what has the rest by a name of its own"
)
FLAT = (
    "an optimizer trains a FlatParameter, whose state no job could load: make the model by "
    "FullyShardedDataParallel(..., use_orig_params=True), or by fully_shard"
)


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
