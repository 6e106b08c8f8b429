# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.1, overlap_recipes/checkpoint/forgotten.py
"""What a loop has and its checkpoints do not: gradients, a scheduler, what a DDP hook keeps."""

import logging
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from .state import TrainingState, shard_of

LOG = logging.getLogger(__name__)

GRADIENTS = (
    "step %d is saved with gradients that no optimizer of TrainingState has used: they are in no "
    "checkpoint, and a job that resumes goes on without them. Save where an optimizer has stepped"
)
SCHEDULER = (
    "a scheduler sets the learning rate of %s and is in no checkpoint: a job that resumes would "
    "begin its schedule anew. Pass it: TrainingState(..., scheduler=scheduler)"
)
HOOK = (
    "%s of DDP's communication hook is in no checkpoint: a job that resumes goes on without what "
    "it has kept back. Give its parts to per_rank, in an object with state_dict and load_state_dict"
)
USED = "_overlap_recipes_used"  # of a gradient: its version when its optimizer stepped


class Forgotten:
    """Warns once of each at a save; a context manager around the loop."""

    def __init__(self, state: TrainingState) -> None:
        self.state = state
        self.hooks: list = []
        self.has_looked = False
        self.has_warned = False

    def __enter__(self) -> "Forgotten":
        for optimizer in self.state.optimizers:
            self.hooks.append(optimizer.register_step_post_hook(mark_used))
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        while self.hooks:
            self.hooks.pop().remove()

    def look(self, step: int) -> None:
        """Before the save of ``step``."""
        if not self.has_looked:
            self.has_looked = True
            self.look_for_scheduler()
            self.look_for_hooks()
        if not self.has_warned and has_unused_gradients(self.state.optimizers):
            self.has_warned = True
            LOG.warning(GRADIENTS, step)

    def look_for_scheduler(self) -> None:
        if has_scheduler(list(self.state.shared.values()) + list(self.state.per_rank.values())):
            return
        for optimizer in self.state.optimizers:
            if hasattr(optimizer.step, "_wrapped_by_lr_sched"):  # as ``LRScheduler`` leaves it
                LOG.warning(SCHEDULER, type(optimizer).__name__)
                return

    def look_for_hooks(self) -> None:
        for module in self.state.model.modules():
            if isinstance(module, nn.parallel.DistributedDataParallel):
                for _, kept in module._comm_hooks:
                    if hasattr(kept, "error_dict"):  # as PowerSGD's, for each rank another one
                        LOG.warning(HOOK, type(kept).__name__)


def first_gradient(optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                return parameter.grad
    return None


def mark_used(optimizer: torch.optim.Optimizer, *hooked: object) -> None:
    gradient = first_gradient(optimizer)
    if gradient is not None:
        setattr(gradient, USED, shard_of(gradient)._version)


def has_unused_gradients(optimizers: list[torch.optim.Optimizer]) -> bool:
    """Whether a backward came behind the latest step of every optimizer that has gradients.

    What a step of another optimizer leaves, as the generator's in a discriminator, is cleared by
    the loop before it counts. Gradients that are zero or not finite would not be used.
    """
    unused = []
    for optimizer in optimizers:
        gradient = first_gradient(optimizer)
        if gradient is None:
            continue
        if getattr(gradient, USED, None) == shard_of(gradient)._version:
            return False
        unused.append(gradient)
    return any(is_of_use(gradient) for gradient in unused)


def is_of_use(gradient: torch.Tensor) -> bool:
    own = shard_of(gradient).detach()
    if own.is_sparse:
        own = own.coalesce().values()
    return bool(own.isfinite().all() and own.any())


def has_scheduler(items: Iterable[object]) -> bool:
    """Whether one of ``items`` is a scheduler, a list of them, or has one."""
    for item in items:
        if isinstance(item, LRScheduler) or hasattr(item, "last_epoch"):
            return True
        for inner in getattr(item, "__dict__", {}).values():
            among = inner if isinstance(inner, (list, tuple)) else [inner]
            if any(isinstance(each, LRScheduler) for each in among):
                return True
    return False
