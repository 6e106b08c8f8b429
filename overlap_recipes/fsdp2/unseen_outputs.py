# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/fsdp2/unseen_outputs.py
"""Gradients that reach a unit by tensors on which FSDP2 has no hook.

FSDP2 gathers a unit for its backward when a gradient reaches a tensor that its forward returned. It
finds such tensors in lists, dicts and what else pytree knows, and loses its hook where a program
changes a view in place. Other tensors that a gradient may come by are looked for here.
"""

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

_OF_MODULES = frozenset(vars(nn.Module()))  # what every module has: parameters, hooks, submodules


def own_modules(group) -> list[nn.Module]:
    """The modules of a unit, without those of units inside it."""
    found: list[nn.Module] = []
    waiting = list(group.modules)
    while waiting:
        module = waiting.pop()
        found.append(module)
        waiting += [m for m in module.children() if not isinstance(m, FSDPModule)]
    return found


def gather_before(group, output: object) -> None:
    """Have a unit gathered before a gradient goes through what its forward, just over, has made."""
    if not torch.is_grad_enabled():
        return
    state = group.modules[0]._get_fsdp_state()

    def gather(gradients: tuple) -> None:
        if not group.is_unsharded:
            state._pre_backward(gradients[0])

    for tensor in unseen(group, output):
        node = tensor.grad_fn
        if node is not None and node._sequence_nr() >= group.first_node:
            node.register_prehook(gather)


def unseen(group, output: object) -> Iterator[torch.Tensor]:
    """Tensors that an output is made of, and those that the modules of a unit keep."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            if leaf.requires_grad and leaf._base is not None:
                yield leaf._base  # a change of the view in place leaves it in the graph
        elif hasattr(leaf, "__dict__"):
            yield from _tensors_in(list(vars(leaf).values()))
    for module in group.keepers:
        if len(vars(module)) > len(_OF_MODULES):
            kept = [v for name, v in vars(module).items() if name not in _OF_MODULES]
            yield from _tensors_in(kept)


def _tensors_in(values: list) -> Iterator[torch.Tensor]:
    """The tensors among ``values``, or in lists, tuples and dicts among them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple, dict)) and value:
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
