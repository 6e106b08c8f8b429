# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, overlap_recipes/checkpoint/restart.py
"""Resume from the newest complete checkpoint, on the same or another number of ranks."""

import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from .durable import committed_steps, faults, newest_step
from .state import AppState


class Run(AppState):
    """Model, optimizer, step, schedule, position in the data and random numbers of one run.

    ``optimizer`` may be a list; ``schedule`` is whatever has ``state_dict`` and
    ``load_state_dict``.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, schedule) -> None:
        super().__init__(model, optimizer)
        self.schedule, self.samples, self.ranks_saved = schedule, 0, dist.get_world_size()

    def state_dict(self) -> dict:
        state = super().state_dict() | {"schedule": self.schedule.state_dict()}
        state["samples"] = self.samples
        if self.ranks_saved == dist.get_world_size():
            random = {kind: source.get_rng_state() for kind, source in random_numbers().items()}
            state[f"random_of_rank_{dist.get_rank()}"] = random
        return state

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        self.schedule.load_state_dict(state["schedule"])
        self.samples = state["samples"]
        random = state.get(f"random_of_rank_{dist.get_rank()}")
        if random is not None:
            for kind, source in random_numbers().items():
                source.set_rng_state(random[kind])
        else:
            torch.manual_seed(1_000_003 * self.step + dist.get_rank())
            print(f"{dist.get_world_size()} ranks, {self.ranks_saved} saved: seeded anew")


def random_numbers() -> dict:
    """The sources of random numbers: the host, and this rank's accelerator if there is one."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return {"host": torch} | ({"device": torch.get_device_module(device)} if device else {})


def choose(root: Path | str, step: int | None = None) -> int | None:
    """The step to resume from, the same on all ranks; None if there is no complete checkpoint.

    Raises:
        RuntimeError: a rank does not see this checkpoint, or sees another content.
    """
    root = Path(root)
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


def resume(run: Run, root: Path | str, step: int | None = None) -> int:
    """Load the newest complete checkpoint below ``root``, or that of ``step``; its step or 0.

    Raises:
        RuntimeError: it does not fit; the message lists what differs.
    """
    step = choose(root, step)
    if step is None:
        return 0
    directory = Path(root, f"step{step}")
    saved = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    run.ranks_saved = sum(key.startswith("run.random") and key.endswith("host") for key in saved)
    if wrong := differences(get_model_state_dict(run.model), directory, "run.model."):
        raise RuntimeError(f"{directory} does not fit this model:\n" + "\n".join(wrong))
    dcp.load({"run": run}, checkpoint_id=directory)
    run.ranks_saved = dist.get_world_size()
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
