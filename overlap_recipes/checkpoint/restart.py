# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.0, overlap_recipes/checkpoint/restart.py
"""Resume from the newest complete checkpoint, on the same or another number of ranks."""

import logging
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from .digests import DamagedCheckpoint
from .durable import committed_steps, faults, newest_step
from .loading import load
from .names import name_of
from .reader import Reader
from .state import TrainingState

LOG = logging.getLogger(__name__)

NONE_IS_WHOLE = (
    "%s: %s; there is no older checkpoint. To begin anew, remove it or take another directory"
)


class Run(TrainingState):
    """A ``TrainingState`` that counts the samples that all ranks have taken.

    ``optimizer`` may be a list; ``schedule`` is whatever has ``state_dict`` and
    ``load_state_dict``.
    """

    COUNTERS = ("step", "samples")

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, schedule) -> None:
        super().__init__(model, optimizer, schedule=schedule)
        self.optimizer = optimizer
        self.schedule = schedule
        self.samples = 0


def choose(root: Path | str, step: int | None = None) -> int | None:
    """The step to resume from, the same on all ranks; None if there is no complete checkpoint.

    Names, sizes and manifests are looked at; the load checks the bytes that it reads.

    Raises:
        RuntimeError: a rank does not see this checkpoint, or sees another content.
        DamagedCheckpoint: there are checkpoints, and none is complete; they stay where they are.
    """
    root = Path(root)
    there = committed_steps(root)  # before the choice: another job may save meanwhile
    is_first_rank = not dist.is_initialized() or dist.get_rank() == 0
    lost = None
    if step is None and is_first_rank:
        step = newest_step(root)
        if step is None and there:
            newest = root / name_of(there[0])
            lost = NONE_IS_WHOLE % (newest, "; ".join(faults(newest)))
    step, lost = of_all_ranks((step, lost))[0]
    if lost is not None:
        raise DamagedCheckpoint(lost)
    wrong = []
    if step is not None and not (root / name_of(step)).exists():
        wrong = [f"there is none, only {there}"]
    elif step is not None:
        wrong = faults(root / name_of(step))
    seen = of_all_ranks(wrong)
    if any(seen):
        raise RuntimeError(f"step {step} is not whole, by rank: {dict(enumerate(seen))}")
    if is_first_rank:
        for newer in there:
            if step is None or newer > step:
                aside = set_aside(root, newer)
                LOG.warning("%s: newer than what is resumed", aside.name)
    of_all_ranks(None)
    return step


def set_aside(root: Path, step: int) -> Path:
    """Give the checkpoint of ``step`` a name under which it is found no more."""
    aside = root / f"{name_of(step)}.set-aside-{time.time_ns()}"
    (root / name_of(step)).rename(aside)
    return aside


def of_all_ranks(own: object) -> list:
    """What each rank gave, by rank; this process's alone without a process group."""
    if not dist.is_initialized():
        return [own]
    found = [own] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def resume(run: Run, root: Path | str, step: int | None = None, skip: Iterable[str] = ()) -> int:
    """Load the newest complete checkpoint below ``root``, or that of ``step``; its step or 0.

    Args:
        skip: as for ``load``.

    Raises:
        ValueError: it does not fit; the message lists what differs.
        DamagedCheckpoint: no checkpoint is as it was saved, or that of ``step`` is not.
    """
    chosen = load_newest({"run": run}, Path(root), step, skip)
    return 0 if chosen is None else run.step


def load_newest(
    states: dict[str, object], root: Path, step: int | None, skip: Iterable[str]
) -> int | None:
    """Load the newest checkpoint that is as it was saved, or that of ``step``; return its step.

    A newer one that turns out to be damaged while it is read is set aside, but the last stays: a
    job that is started again would begin anew otherwise.
    """
    while True:
        chosen = choose(root, step)
        if chosen is None:
            return None
        try:
            load(states, root / name_of(chosen), skip=skip)
        except (DamagedCheckpoint, CheckpointException) as error:
            damage = damage_of(error)
            if damage is None:
                raise
            if step is not None:
                raise damage from error
            if not has_older(root, chosen):
                raise DamagedCheckpoint(NONE_IS_WHOLE % (name_of(chosen), damage)) from error
        else:
            return chosen
        LOG.error("%s is damaged, an older one is loaded: %s", name_of(chosen), damage)
        if not dist.is_initialized() or dist.get_rank() == 0:
            set_aside(root, chosen)
        of_all_ranks(None)


def has_older(root: Path, step: int) -> bool:
    """Whether there is a complete checkpoint before that of ``step``; the same on all ranks."""
    found = False
    if not dist.is_initialized() or dist.get_rank() == 0:
        older = [each for each in committed_steps(root) if each < step]
        found = any(not faults(root / name_of(each)) for each in older)
    return of_all_ranks(found)[0]


def damage_of(error: BaseException) -> DamagedCheckpoint | None:
    """What is damaged, if that is all that made a load fail; the same on all ranks."""
    if isinstance(error, DamagedCheckpoint):
        return error
    found = None
    for rank in sorted(error.failures):
        failure, _ = error.failures[rank]
        if not isinstance(failure, DamagedCheckpoint):
            return None
        found = found or failure
    return found


def differences(tensors: dict[str, torch.Tensor], directory: Path, prefix: str) -> list[str]:
    """List what differs between ``tensors`` and the tensors of ``directory`` below ``prefix``."""
    saved = Reader(directory).read_metadata().state_dict_metadata
    saved = {key.removeprefix(prefix): m for key, m in saved.items() if key.startswith(prefix)}
    found = [f"  {key}: only in the model" for key in tensors if key not in saved]
    found += [f"  {key}: only in the checkpoint" for key in saved if key not in tensors]
    for key in tensors.keys() & saved.keys():
        if tuple(saved[key].size) != tuple(tensors[key].shape):
            found.append(f"  {key}: {tuple(tensors[key].shape)}, saved {tuple(saved[key].size)}")
    return sorted(found)


def load_weights(model: nn.Module, directory: Path, old_names: dict[str, str]) -> None:
    """Load the weights alone. ``old_names`` maps their names to those in the checkpoint."""
    tensors = {old_names.get(key, key): x for key, x in get_model_state_dict(model).items()}
    dcp.load({"run": {"model": tensors}}, storage_reader=Reader(directory))
