# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, overlap_recipes/checkpoint/restart.py
"""Resume from the newest complete checkpoint, on the same or another number of ranks."""

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
from .state import TrainingState


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


def choose(root: Path, step: int | None = None) -> int | None:
    """The step to resume from, the same on all ranks; None if there is no complete checkpoint.

    Raises:
        RuntimeError: a rank does not see this checkpoint, or sees another content.
    """
    there = committed_steps(root)
    chosen = [step if step is not None else newest_step(root, digests=True)]
    dist.broadcast_object_list(chosen)
    step = chosen[0]
    wrong = faults(root / f"step{step}") if step is not None else []
    seen: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(seen, wrong)
    if any(seen):
        raise RuntimeError(f"step {step} is not whole, by rank: {dict(enumerate(seen))}")
    if dist.get_rank() == 0:
        for newer in there:
            if step is None or newer > step:
                aside = root / f"step{newer}.set-aside-{time.time_ns()}"
                (root / f"step{newer}").rename(aside)
                print(f"{aside.name}: newer than what is resumed")
    dist.barrier()
    return step


def resume(run: Run, root: Path, step: int | None = None, skip: Iterable[str] = ()) -> int:
    """Load the newest complete checkpoint below ``root``, or that of ``step``; its step or 0.

    Args:
        skip: as for ``load``.

    Raises:
        ValueError: it does not fit; the message lists what differs.
    """
    step = choose(root, step)
    if step is None:
        return 0
    load({"run": run}, root / f"step{step}", skip=skip)
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
