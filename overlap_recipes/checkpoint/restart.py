# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.1, overlap_recipes/checkpoint/restart.py
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
from .durable import POINTER, committed_steps, faults, newest_step, write_durably
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
    step = chosen_by_first_rank(root, there, step)
    if step is None:
        return None
    refuse_unless_whole(root, there, step)
    if is_first_rank():
        for newer in there:
            if newer > step:
                aside = set_aside(root, newer)
                LOG.warning("%s: newer than what is resumed", aside.name)
    wait_for_all_ranks()
    return step


def chosen_by_first_rank(root: Path, there: list[int], step: int | None) -> int | None:
    """Rank 0's ``step``, or the newest complete one of ``there``; None if there is nothing."""
    none_is_whole = None
    if step is None and is_first_rank():
        step = newest_step(root)
        if step is None and there:
            newest = root / name_of(there[0])
            none_is_whole = NONE_IS_WHOLE % (newest, "; ".join(faults(newest)))
    step, none_is_whole = of_all_ranks((step, none_is_whole))[0]
    if none_is_whole is not None:
        raise DamagedCheckpoint(none_is_whole)
    return step


def refuse_unless_whole(root: Path, there: list[int], step: int) -> None:
    """Raise on all ranks if one of them does not see a complete checkpoint of ``step``."""
    directory = root / name_of(step)
    if directory.exists():
        wrong = faults(directory)
    else:
        wrong = [f"there is none, only {there}"]
    wrong_by_rank = of_all_ranks(wrong)
    if any(wrong_by_rank):
        raise RuntimeError(f"step {step} is not whole, by rank: {dict(enumerate(wrong_by_rank))}")


def set_aside(root: Path, step: int) -> Path:
    """Give the checkpoint of ``step`` a name under which it is found no more.

    The pointer then names the newest that is left.
    """
    aside = root / f"{name_of(step)}.set-aside-{time.time_ns()}"
    (root / name_of(step)).rename(aside)
    pointer = root / POINTER
    if pointer.exists() and pointer.read_text() == name_of(step):
        newest = newest_step(root)
        if newest is not None:
            write_durably(pointer, name_of(newest))
    return aside


def is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def wait_for_all_ranks() -> None:
    of_all_ranks(None)


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
        DamagedCheckpoint: no checkpoint is as it was saved, or bytes of that of ``step`` are not.
        RuntimeError: a rank does not see the checkpoint, or files of that of ``step`` are missing.
        CheckpointException: the storage has failed on a rank.
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
        if is_first_rank():
            set_aside(root, chosen)
        wait_for_all_ranks()


def has_older(root: Path, step: int) -> bool:
    """Whether there is a complete checkpoint before that of ``step``; the same on all ranks."""
    has_one = False
    if is_first_rank():
        for older in committed_steps(root):
            if older < step and not faults(root / name_of(older)):
                has_one = True
                break
    return of_all_ranks(has_one)[0]


def damage_of(error: BaseException) -> DamagedCheckpoint | None:
    """What is damaged, if that is all that made a load fail; the same on all ranks."""
    if isinstance(error, DamagedCheckpoint):
        return error
    damages = []
    for rank in sorted(error.failures):
        failure, _ = error.failures[rank]
        if not isinstance(failure, DamagedCheckpoint):
            return None
        damages.append(failure)
    return damages[0] if damages else None


def differences(tensors: dict[str, torch.Tensor], directory: Path, prefix: str) -> list[str]:
    """List what differs between ``tensors`` and the tensors of ``directory`` below ``prefix``."""
    listed = Reader(directory).read_metadata().state_dict_metadata
    saved = {}
    for key, entry in listed.items():
        if key.startswith(prefix):
            saved[key.removeprefix(prefix)] = entry
    found = [f"  {key}: only in the model" for key in tensors if key not in saved]
    found += [f"  {key}: only in the checkpoint" for key in saved if key not in tensors]
    for key in tensors.keys() & saved.keys():
        if tuple(saved[key].size) != tuple(tensors[key].shape):
            found.append(f"  {key}: {tuple(tensors[key].shape)}, saved {tuple(saved[key].size)}")
    return sorted(found)


def load_weights(model: nn.Module, directory: Path, old_names: dict[str, str]) -> None:
    """Load the weights alone from a checkpoint of ``{"run": run}``.

    ``old_names`` maps their names to those in the checkpoint.
    """
    tensors = {old_names.get(key, key): x for key, x in get_model_state_dict(model).items()}
    dcp.load({"run": {"model": tensors}}, storage_reader=Reader(directory))
