# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, overlap_recipes/checkpoint/kept_state.py
"""The state of a job, asked for once and kept from save to save while nothing in it has changed."""

from collections import OrderedDict
from itertools import chain
from operator import attrgetter, is_

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.utils._pytree import register_pytree_node

from .state import AppState, groups, is_staged


class Kept(dict):
    """Nested dicts of tensors that refuse changes; ``kept_tensors`` lists the tensors in order.

    Raises:
        TypeError: on a change. ``copy.deepcopy(kept)`` has ordinary dicts.
    """

    def __init__(self, nested: dict, metadata: dict | None = None) -> None:
        super().__init__({k: Kept(v) if isinstance(v, dict) else v for k, v in nested.items()})
        lists = (x.kept_tensors if isinstance(x, Kept) else [x] for x in self.values())
        self.kept_tensors, self._metadata = [*chain(*lists)], metadata  # versions of the modules

    def refuse(self, *_, **__) -> None:
        raise TypeError("later saves use this state: change a copy, copy.copy(state)")

    __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = refuse

    def __setitem__(self, key: str, value: object) -> None:
        if self.get(key) is not value:
            self.refuse()

    def __reduce__(self) -> tuple:
        # torch.load trusts an OrderedDict
        return OrderedDict, (), {"_metadata": self._metadata}, None, iter(self.items())


# without it, tree_map takes a Kept for one leaf
register_pytree_node(Kept, lambda x: ([*x.values()], [*x]), lambda x, k: dict(zip(k, x)))  # noqa: B905

# Private by name, though in torch 2.9 to 2.15: most of what is read here of modules, of optimizers
# and of their hooks. What defines what ``state_dict`` returns, and where it finds that:
METHODS = "state_dict", "_save_to_state_dict", "get_extra_state"
HOOKS = "_state_dict_hooks", "_state_dict_pre_hooks"
OPTIMIZER_HOOKS = "_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"
held_by = attrgetter("_modules", "_parameters", "_buffers", *HOOKS)
not_saved_of, methods_of = attrgetter("_non_persistent_buffers_set"), attrgetter(*METHODS)


def memory_of(tensor: torch.Tensor) -> tuple:
    x = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return x.data_ptr(), tensor.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg()


def is_stock(saved: nn.Module | torch.optim.Optimizer) -> bool:
    """Whether torch's own code alone, not decorated, decides what ``saved.state_dict`` returns."""
    hooks = (getattr(saved, name, {}).values() for name in (*HOOKS, *OPTIMIZER_HOOKS))
    code = [*chain(*hooks), *(getattr(saved, name) for name in METHODS if hasattr(saved, name))]
    origins = [getattr(x, "__module__", None) for x in code]
    origins += [getattr(x, "__globals__", {}).get("__name__") for x in code]
    of_torch = all(str(name).startswith("torch.") for name in origins)
    return of_torch and not isinstance(saved, torch.jit.ScriptModule)


class TrainingState(AppState):
    """The state of ``model``, ``optimizers`` and others for DCP; calls ``get_state_dict`` once.

    Args:
        others: objects with ``state_dict`` and ``load_state_dict``, by their key in the checkpoint:
            ``schedule=scheduler``, ``data=loader``.

    Raises:
        TypeError: an argument is not what it stands for.
        ValueError: a key is taken.
    """

    def __init__(self, model: nn.Module, *optimizers: torch.optim.Optimizer, **others) -> None:
        if taken := {"model", "optim", "has_state"} & set(others):
            raise ValueError(f"name it otherwise: {taken} is taken in the checkpoint")
        if wrong := [x for x in optimizers if not isinstance(x, torch.optim.Optimizer)]:
            raise TypeError(f"{type(wrong[0]).__name__} is no optimizer: pass it by a name")
        if wrong := [name for name, x in others.items() if not isinstance(x, Stateful)]:
            raise TypeError(f"{wrong[0]} has no state_dict and load_state_dict")
        super().__init__(model, [*optimizers])
        self.others, self.asked, self.lasting, self.modules = others, 0, False, []

    def held(self) -> tuple[list, list]:
        """All that modules and optimizers hold now, with names, and what to compare by value."""
        states = [optimizer.state for optimizer in self.optimizers]
        moments = chain.from_iterable(map(dict.values, states))
        dicts = [*chain.from_iterable(map(held_by, self.modules)), *states, *moments]
        lists = [*map(not_saved_of, self.modules), *(g["params"] for g in groups(self.optimizers))]
        full, methods = list(filter(None, dicts)), map(methods_of, self.modules)
        held = [self.model, *chain(*full), *chain(*map(dict.values, full)), *chain(*lists)]
        return held, [*map(len, dicts), *map(len, lists), *methods, *map(is_stock, self.optimizers)]

    def state_dict(self) -> dict:
        """What ``ask`` would return, and the state of the ``others``."""
        held, sizes = self.held()
        same = self.lasting and sizes == self.known_sizes and all(map(is_, held, self.known))
        pairs = zip(groups(self.optimizers) if same else self.keep(), self.names, strict=True)
        param_groups = [{"params": 0} | group | {"params": [*names]} for group, names in pairs]
        optim = {"state": self.kept_optim, "param_groups": param_groups}
        others = {name: other.state_dict() for name, other in self.others.items()}
        state = {"model": self.kept_model, "optim": optim, "has_state": self.has_state, **others}
        self.given = id(state)
        return state

    def keep(self) -> list[dict]:
        """Ask, and keep the result if nothing but known tensors is in it; return the groups."""
        self.asked += 1
        model, optim = self.ask()
        modules = list(self.model.modules())
        self.modules = modules if all(map(is_stock, [*modules, *self.optimizers])) else []
        self.known, self.known_sizes = self.held()
        tensors = [x for x in chain(self.model.parameters(), self.model.buffers()) if is_staged(x)]
        held = {memory_of(x): x for x in tensors}
        # two objects of one memory may part by `.data =`; empty shards stay empty
        own = [memory_of(x) for x in tensors if not isinstance(x, DTensor) or memory_of(x)[0]]
        self.kept_model = model
        self.kept_optim = {name: {**state} for name, state in optim.get("state", {}).items()}
        moments, known = map(dict.values, self.kept_optim.values()), set(map(id, self.known))
        self.lasting = bool(self.modules) and len(own) == len(set(own))
        self.lasting &= all(is_staged(x) and memory_of(x) in held for x in model.values())
        self.lasting &= all(is_staged(x) and id(x) in known for x in chain(*moments))
        if self.lasting:
            model = {key: held[memory_of(x)] for key, x in model.items()}
            self.kept_model, self.kept_optim = Kept(model, self.metadata), Kept(self.kept_optim)
        self.names = [tuple(group["params"]) for group in optim.get("param_groups", [])]
        return optim.get("param_groups", [])

    def load_state_dict(self, state: dict) -> None:
        self.lasting = False  # a load may have changed what is not compared
        self.load(state)
        for name, other in self.others.items():
            other.load_state_dict(state[name])
