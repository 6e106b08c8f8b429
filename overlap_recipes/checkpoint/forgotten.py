# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/forgotten.py
"""What a loop has and its checkpoints do not: gradients, a scheduler, another optimizer, ..."""

import logging
from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from .state import TrainingState, shard_of
from .state.items import each_of
from .state.loaders import LoaderInPass

LOG = logging.getLogger(__name__)
_USED = "_overlap_recipes_used"  # of a gradient: its version when its optimizer stepped


class Forgotten:
    """Warns once of each at a save; a context manager around the loop."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._hooks: list = []
        self._has_looked = False
        self._has_warned_of_gradients = False
        self._given = {id(optimizer) for optimizer in state.optimizers}
        for item in each_of([*state.shared.values(), *state.per_rank.values()]):
            if isinstance(item, torch.optim.Optimizer):
                self._given.add(id(item))
        self._of_job: WeakKeyDictionary[torch.optim.Optimizer, bool] = WeakKeyDictionary()
        self._has_stepped = False  # whether an optimizer of the state has since the last save
        self._places: list[tuple] = []  # of its loaders, at the last save
        self._others: dict[int, torch.optim.Optimizer] = {}  # that have stepped since the last save
        self._warned_of: set[str] = set()

    def __enter__(self) -> "Forgotten":
        for optimizer in self._state.optimizers:
            self._hooks.append(optimizer.register_step_post_hook(_mark_used))
        self._hooks.append(register_optimizer_step_post_hook(self._note_step))
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _note_step(self, optimizer: torch.optim.Optimizer, *hooked: object) -> None:
        """After a step of any optimizer of the process."""
        if id(optimizer) in self._given:
            self._has_stepped = True
        else:
            self._others[id(optimizer)] = optimizer

    def count_from_here(self) -> None:
        """After a save: for its state, torch steps an optimizer that has none."""
        self._has_stepped = False

    def is_of_job(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it was given, or steps what the model or one that was given has.

        Another one may be of one rank alone, as that of a probe in an evaluation.
        """
        if id(optimizer) in self._given:
            return True
        if optimizer not in self._of_job:
            own = {id(parameter) for parameter in self._state.model.parameters()}
            for given in self._state.optimizers:
                own |= _parameters_of(given)
            self._of_job[optimizer] = not own.isdisjoint(_parameters_of(optimizer))
        return self._of_job[optimizer]

    def look(self, step: int) -> None:
        """Before the save of ``step``."""
        if not self._has_looked:
            self._has_looked = True
            self._look_for_scheduler()
            self._look_for_hooks()
            self._look_for_ranks_of_adapters()
        self._look_for_optimizers()
        self._look_for_loaders()
        if not self._has_warned_of_gradients and _has_unused_gradients(self._state.optimizers):
            self._has_warned_of_gradients = True
            LOG.warning(
                "step %d is saved with gradients that no optimizer of TrainingState has used: they "
                "are in no checkpoint, and a job that resumes goes on without them. Save where an "
                "optimizer has stepped",
                step,
            )

    def _look_for_scheduler(self) -> None:
        state = self._state
        if _has_scheduler(list(state.shared.values()) + list(state.per_rank.values())):
            return
        for optimizer in state.optimizers:
            if hasattr(optimizer.step, "_wrapped_by_lr_sched"):  # as ``LRScheduler`` leaves it
                LOG.warning(
                    "a scheduler sets the learning rate of %s and is in no checkpoint: a job that "
                    "resumes would begin its schedule again. Pass it: TrainingState(..., "
                    "scheduler=scheduler)",
                    type(optimizer).__name__,
                )
                return

    def _look_for_hooks(self) -> None:
        for module in self._state.model.modules():
            if isinstance(module, nn.parallel.DistributedDataParallel):
                for _, kept in module._comm_hooks:
                    if hasattr(kept, "error_dict"):  # as PowerSGD's, for each rank another one
                        LOG.warning(
                            "%s of DDP's communication hook is in no checkpoint: a job that "
                            "resumes goes on without what it has kept back. Give its parts to "
                            "per_rank, in an object with state_dict and load_state_dict",
                            type(kept).__name__,
                        )

    def _look_for_ranks_of_adapters(self) -> None:
        """Warn of what AdaLoRA ranks its adapters by, which no module has in its state."""
        given = {id(getattr(item, "values", None)) for item in each_of(self._state.shared.values())}
        for module in self._state.model.modules():
            allocator = vars(module).get("rankallocator")
            averages = getattr(allocator, "exp_avg_ipt", None)
            if averages is not None and id(averages) not in given:
                LOG.warning(
                    "what AdaLoRA ranks its adapters by is in no checkpoint: a job that resumes "
                    "would drop others. Pass it, of ranks = model.base_model.rankallocator: "
                    "TrainingState(..., ipt=ranks.ipt, exp_avg_ipt=ranks.exp_avg_ipt, "
                    "exp_avg_unc=ranks.exp_avg_unc)"
                )

    def _look_for_optimizers(self) -> None:
        """Warn of what steps the model's parameters and was not given, since it came later, say."""
        others = [each for each in self._others.values() if not self._is_inside(each)]
        self._others = {}
        if not others:
            return
        own = {id(parameter) for parameter in self._state.model.parameters()}
        for optimizer in others:
            kind = type(optimizer).__name__
            trains_model = not own.isdisjoint(_parameters_of(optimizer))
            if trains_model and kind not in self._warned_of:
                self._warned_of.add(kind)
                LOG.warning(
                    "%s steps parameters of the model and is in no checkpoint: a job that resumes "
                    "goes on without its state. Pass it to TrainingState; where the loop replaces "
                    "an optimizer, make another TrainingState and CheckpointManager after it",
                    kind,
                )

    def _is_inside(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether one that was given has its state: as one that it wraps."""
        return any(optimizer.state is given.state for given in self._state.optimizers)

    def _look_for_loaders(self) -> None:
        """Warn of a loader that gives the loop no batches, or no more."""
        loaders = []
        for item in each_of(self._state.per_rank.values()):
            if isinstance(item, LoaderInPass):
                loaders.append(item)
        places = [loader.place() for loader in loaders]
        is_where_it_was = places == self._places
        self._places = places
        if not self._has_stepped:
            return
        for loader in loaders:
            if loader.name in self._warned_of:
                continue
            if not loader.has_begun:
                self._warned_of.add(loader.name)
                LOG.warning(
                    "%s: the loop has trained, and taken no batch of this loader: a job that "
                    "resumes would begin its data again. Give TrainingState the loader that the "
                    "loop uses: what accelerator.prepare returns; in Lightning your own, with a "
                    "sampler of its rank and Trainer(use_distributed_sampler=False)",
                    loader.name,
                )
            elif is_where_it_was:
                self._warned_of.add(loader.name)
                LOG.warning(
                    "%s: the loop has trained since the last save, and taken no batch of this "
                    "loader: a job that resumes would go on with the data from there. A loader "
                    "that is made again for each pass is in no checkpoint: keep one",
                    loader.name,
                )


def _parameters_of(optimizer: torch.optim.Optimizer) -> set[int]:
    found: set[int] = set()
    for group in optimizer.param_groups:
        found.update(id(parameter) for parameter in group["params"])
    return found


def _first_gradient(optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                return parameter.grad
    return None


def _mark_used(optimizer: torch.optim.Optimizer, *hooked: object) -> None:
    gradient = _first_gradient(optimizer)
    if gradient is not None:
        setattr(gradient, _USED, shard_of(gradient)._version)


def _has_unused_gradients(optimizers: list[torch.optim.Optimizer]) -> bool:
    """Whether a backward came after the latest step of every optimizer that has gradients.

    What a step of another optimizer leaves, as the generator's in a discriminator, is cleared by
    the loop before it counts. Gradients that are zero or not finite would not be used.
    """
    unused = []
    for optimizer in optimizers:
        gradient = _first_gradient(optimizer)
        if gradient is None:
            continue
        if getattr(gradient, _USED, None) == shard_of(gradient)._version:
            return False
        unused.append(gradient)
    return any(_is_of_use(gradient) for gradient in unused)


def _is_of_use(gradient: torch.Tensor) -> bool:
    own = shard_of(gradient).detach()
    if own.is_sparse:
        own = own.coalesce().values()
    return bool(own.isfinite().all() and own.any())


def _has_scheduler(items: Iterable[object]) -> bool:
    """Whether one of ``items`` is a scheduler, a list of them, or has one."""
    for item in items:
        if isinstance(item, LRScheduler) or hasattr(item, "last_epoch"):
            return True
        for inner in getattr(item, "__dict__", {}).values():
            among = inner if isinstance(inner, (list, tuple)) else [inner]
            if any(isinstance(each, LRScheduler) for each in among):
                return True
    return False
