# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, overlap_recipes/checkpoint/restart.py
"""Resume from the newest complete checkpoint, on the same or another number of ranks."""

import logging
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from .durable import committed_steps, faults, newest_step
from .loading import load
from .names import name_of
from .state import TrainingState

LOG = logging.getLogger(__name__)


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

    Raises:
        RuntimeError: a rank does not see this checkpoint, or sees another content.
    """
    root = Path(root)
    there = committed_steps(root)  # before the choice: another job may save meanwhile
    is_first_rank = not dist.is_initialized() or dist.get_rank() == 0
    if step is None and is_first_rank:
        step = newest_step(root, digests=True)
    step = of_all_ranks(step)[0]
    wrong = faults(root / name_of(step)) if step is not None else []
    seen = of_all_ranks(wrong)
    if any(seen):
        raise RuntimeError(f"step {step} is not whole, by rank: {dict(enumerate(seen))}")
    if is_first_rank:
        for newer in there:
            if step is None or newer > step:
                aside = root / f"{name_of(newer)}.set-aside-{time.time_ns()}"
                (root / name_of(newer)).rename(aside)
                LOG.warning("%s: newer than what is resumed", aside.name)
    of_all_ranks(None)
    return step


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
    """
    step = choose(root, step)
    if step is None:
        return 0
    load({"run": run}, Path(root, name_of(step)), skip=skip)
    return run.step


def differences(tensors: dict[str, torch.Tensor], directory: Path, prefix: str) -> list[str]:
    """List what differs between ``tensors`` and the tensors of ``directory`` below ``prefix``."""
    saved = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
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
    dcp.load({"run": {"model": tensors}}, checkpoint_id=directory)
