# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, checkpoint/state_to_save.py
"""
How to know that a checkpoint is right
======================================

Test that a checkpoint holds every bit of its step, and that a resumed job does what the first job
would have done. Exit code 0 proves neither; only a load does.

**When not to bother:** never. Nobody knows whether a checkpoint that was never loaded is complete.

**Scope.** This file saves with ``torch.distributed.checkpoint`` (DCP): one model and one optimizer
of ``torch.optim`` that trains all of its parameters and keeps a state for each, as ``AdamW`` does.
The first save comes after the first step, and the resumed job builds both by the same code. Outside
this scope DCP loses state without an error, so ``AppState`` raises. Frozen parameters, several
optimizers, schedules, data and random numbers: ``TrainingState`` of :doc:`saves_beside_training`.

The test of a save, in three lines (the functions are below):

.. literalinclude:: state_to_save.py
   :pyobject: save_and_compare

The file needs only torch and NumPy. Copy it, keep ``AppState`` and the functions around it, and put
your model in place of ours.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * what it takes to say that a checkpoint is right
      * which state DCP loses or changes without an error
      * how to refuse such a state at the save, not after a month

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later with NumPy, any number of ranks in a process group, CPU or GPU
      * a model sharded with ``fully_shard`` (FSDP2), under DDP, or a plain one

.. verification-badge::

The idea
--------

A checkpoint is right if two comparisons hold. The loaded job has the same bits as the saved one.
After more steps both still have the same bits, so nothing that training depends on is missing.

.. lanes:: Schematic. A resumed job does what the first job would have done.

   job:      0-4 step 1; 4-8 step 2; 8-10 save !; 10-14 step 3; 14-18 step 4
   resumed:  8-10 load !; 10-14 step 3 ~; 14-18 step 4 ~
   @10 the same bits
"""

# %%
# Imports
# -------

import argparse
import copy
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

# %%
# What DCP does not bring back
# ----------------------------
# ``get_state_dict`` names optimizer state after its parameter and gives each rank's shards as
# DTensors. ``set_state_dict`` puts it back. Between the two, this is lost or changed without an
# error (torch 2.13):
#
# * Optimizer state of a **frozen** parameter is left out of the load.
# * State of **another dtype** than its parameter (bfloat16 or 8-bit moments) comes back in the
#   parameter's dtype.
# * State that an optimizer made from **this rank's shard** as a plain tensor is taken for
#   replicated: one rank's is kept for all.
# * A DTensor **without dimensions** is not copied by torch's asynchronous stagers: the checkpoint
#   holds its value at the time of the write.
#
# ``problem_of`` looks for these. Parameters that are made of several tensors (float8 weights) it
# refuses as well.


def problem_of(parameter: nn.Parameter, state: dict) -> str:
    """Why DCP would not bring back a parameter and its optimizer state; empty if it would."""
    local = parameter.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
        if local.dim() == 0:
            return "is a DTensor without dimensions"
    if type(local) is not torch.Tensor:
        return f"is a {type(local).__name__}"
    if not parameter.requires_grad:
        return "is frozen"
    if not state:
        return "has no optimizer state (save after the first step)"
    for key, value in state.items():
        if key == "step":
            continue
        if not isinstance(value, torch.Tensor) or value.dtype != parameter.dtype:
            return f"has optimizer state {key!r} of another type"
        if value.dim() > 0 and isinstance(value, DTensor) != isinstance(parameter, DTensor):
            return f"has optimizer state {key!r} that is not sharded as it is"
    return ""


# %%
# A load fills only what the new job has. In a partial load, a renamed layer keeps its random
# weights. Values of another dtype are cast. So the checkpoint lists its contents, and a load
# compares.


def contents_of(model: dict, optimizer: dict) -> list[str]:
    """What two state dicts hold: every leaf by its path, with its dtype."""
    contents = []
    for path, leaf in leaves({"model": model, "optimizer": optimizer}).items():
        contents.append(f"{path} {getattr(leaf, 'dtype', '')}")
    return contents


def leaves(tree: object, path: str = "") -> dict[str, object]:
    """The leaves of nested dicts and lists by path."""
    if isinstance(tree, dict):
        children = tree.items()
    elif isinstance(tree, list | tuple):
        children = enumerate(tree)
    else:
        return {path: tree}
    found = {}
    for key, child in children:
        found |= leaves(child, f"{path}/{key}")
    return found


# %%
# DCP assumes that a plain tensor is the same on all ranks, and saves one rank's. BatchNorm's
# statistics differ between ranks under DDP (use ``SyncBatchNorm``). ``check_buffers`` compares the
# buffers of all ranks at the first save of a job, a resumed one, too.
#
# A learning-rate schedule leaves ``initial_lr`` in the optimizer's groups. Its position is not in
# this state, and a resumed schedule would begin again, so that is refused, too.


class AppState(Stateful):
    """What a resumed job needs: the model, its optimizer, the number of steps that are taken.

    Raises:
        ValueError: on asking or loading, where a job could not be resumed from it as it is.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.step = 0
        self.buffers_compared = False

    def state_dict(self) -> dict:
        """Live tensors; all ranks ask together."""
        if not self.buffers_compared:
            self.check_buffers()
        self.check_optimizer()
        model, optimizer = get_state_dict(self.model, self.optimizer)
        contents = contents_of(model, optimizer)
        return {"step": self.step, "contents": contents, "model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict) -> None:
        """Take what DCP has loaded."""
        own = contents_of(*get_state_dict(self.model, self.optimizer))
        saved = state_dict["contents"]
        if saved != own:
            raise ValueError(f"saved and built are not the same: {sorted(set(saved) ^ set(own))}")
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        self.step = state_dict["step"]
        self.buffers_compared = False

    def check_optimizer(self) -> None:
        if not type(self.optimizer).__module__.startswith("torch.optim."):
            raise ValueError(f"{type(self.optimizer).__name__} is no optimizer of torch.optim")
        if any("initial_lr" in group for group in self.optimizer.param_groups):
            raise ValueError("a schedule drives the optimizer, and its position is not saved")
        for name, parameter in self.model.named_parameters():
            problem = problem_of(parameter, self.optimizer.state.get(parameter, {}))
            if problem:
                raise ValueError(f"{name} {problem}")

    def check_buffers(self) -> None:
        mine = {}
        for name, buffer in self.model.named_buffers():
            if not isinstance(buffer, DTensor):
                mine[name] = buffer.cpu()
        of_ranks = [{}] * dist.get_world_size()
        dist.all_gather_object(of_ranks, mine)
        for name in mine:
            for other in of_ranks:
                if not torch.equal(other[name], of_ranks[0][name]):
                    raise ValueError(f"{name} differs between ranks, and one rank's would be kept")
        self.buffers_compared = True


# %%
# DCP fills tensors that exist. An optimizer that has not stepped has none, so a new job makes them
# before it loads: ``get_state_dict`` steps once, with zero gradients and a learning rate of zero.
# The load overwrites every mark of that step. In a job that goes on, the marks would stay, as a
# counted step or decay in the moments (`pytorch#164929
# <https://github.com/pytorch/pytorch/issues/164929>`__). That is why ``AppState`` refuses to be
# saved before the first step.


def load(app: AppState, directory: Path) -> AppState:
    """Load a checkpoint into ``app``, which may be new; all ranks call it."""
    get_state_dict(app.model, app.optimizer)
    dcp.load({"app": app}, checkpoint_id=directory)
    return app


# %%
# The test
# --------
# A checkpoint is right when loading it gives back the very bits that were saved: of the weights,
# both Adam moments, the optimizer's step counts and settings, the buffers, and the step.


def snapshot(app: AppState) -> dict[str, object]:
    """A copy of every leaf by its path; needs the memory of the state once more."""
    return copy.deepcopy(leaves(app.state_dict()))


def same_bits(a: object, b: object) -> bool:
    if isinstance(a, DTensor):
        return same_bits(a.to_local(), b.to_local())
    if isinstance(a, torch.Tensor):  # as bytes: 0.0 and -0.0 are equal numbers
        return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    return a == b


def assert_same_bits(app: AppState, expected: dict[str, object]) -> None:
    """Raise AssertionError that names leaves of ``app`` which differ in any bit."""
    found = leaves(app.state_dict())
    assert found.keys() == expected.keys(), f"other keys: {found.keys() ^ expected.keys()}"
    differing = [path for path in expected if not same_bits(found[path], expected[path])]
    assert not differing, f"step {expected['/step']}: {differing[:3]} of {len(differing)} differ"


def save_and_compare(app: AppState, resumed: AppState, directory: Path) -> None:
    dcp.save({"app": app}, checkpoint_id=directory)
    load(resumed, directory)  # ``resumed`` was built with another seed
    assert_same_bits(resumed, snapshot(app))


# %%
# The model to try it on
# ----------------------
# The buffer ``samples`` stands for every buffer that training changes. Its value has to be the same
# on all ranks. A batch depends on the step and the rank alone, so that a resumed job sees the
# batches that the first job would have seen.

WIDTH = 512  # features
BATCH = 64  # samples per rank and step


def start_rank() -> torch.device:
    """Join the group that torchrun describes, or a group of one; return this rank's device."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device.index)
    if "RANK" in os.environ:
        dist.init_process_group()  # NCCL where there are GPUs, else gloo
    else:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    return device


def build_app(device: torch.device, seed: int = 0) -> AppState:
    """A layer over (batch, WIDTH) float32, sharded over all ranks, and its AdamW."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()).to(device)
    model.register_buffer("samples", torch.zeros(1, dtype=torch.int64, device=device))
    model = fully_shard(model)
    return AppState(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def train(app: AppState, last_step: int, device: torch.device) -> AppState:
    while app.step < last_step:
        torch.manual_seed(1000 * app.step + dist.get_rank())
        batch = torch.randn(BATCH, WIDTH, device=device)
        app.model.samples += BATCH * dist.get_world_size()
        app.model(batch).square().mean().backward()
        app.optimizer.step()
        app.optimizer.zero_grad()
        app.step += 1
    return app


# %%
# Run it, and prove it
# --------------------
# A job saves after its second step and trains on, and so does the job that has loaded. Both must
# end like a job that never saved. Then three states that cannot be brought back are refused.


def assert_refused(app: AppState, why: str) -> None:
    try:
        app.state_dict()
    except ValueError as error:
        assert why in str(error), f"refused, but by: {error}"
        print(f"refused: {error}")
    else:
        raise AssertionError(f"a state could be saved, although it {why}")


def main(directory: Path) -> None:
    device = start_rank()
    of_rank_0 = [directory]
    dist.broadcast_object_list(of_rank_0)  # a checkpoint is one directory for all ranks
    never_saved = snapshot(train(build_app(device), 4, device))

    app = train(build_app(device), 2, device)
    resumed = build_app(device, seed=1)
    save_and_compare(app, resumed, of_rank_0[0] / "step2")
    print("step 2 loaded back, every bit equal")
    for job in (app, resumed):
        assert_same_bits(train(job, 4, device), never_saved)
    print("saved and resumed jobs end like one that never saved")

    assert_refused(build_app(device), "has no optimizer state")
    app.model[0].bias.requires_grad_(False)
    assert_refused(app, "is frozen")
    resumed.model.samples += dist.get_rank()
    if dist.get_world_size() > 1:
        resumed.buffers_compared = False  # as in a job that has not saved yet
        assert_refused(resumed, "differs between ranks")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, help="where checkpoints go (default: temporary)")
    with tempfile.TemporaryDirectory() as temporary:
        main(parser.parse_args().dir or Path(temporary))

# %%
# What breaks if you remove a line
# --------------------------------
# Each edit below was made and run when this page was built.
#
# .. recipe-controls::
#
# Memory
# ------
# ``snapshot`` needs the memory of the state once more, on the device. Test with a small model of the
# same code, or a few layers of yours.
#
# Known limits
# ------------
# * A run whose steps depend on more than model, optimizer and step (dropout's random numbers, the
#   position in the data) does not go on as it would have. The second comparison shows it.
# * Buffers are compared at a job's first save. If they differ later, one rank's are saved.
# * ``dcp.save`` into a directory that holds a checkpoint writes over it, file by file. If that
#   fails half way, the directory loads, half old and half new: see :doc:`async_save`.
# * ``dcp.save`` stops every rank until the last byte is on disk: see :doc:`async_save`.
#
# Further reading
# ---------------
# * `torch.distributed.checkpoint
#   <https://docs.pytorch.org/docs/stable/distributed.checkpoint.html>`__: the reference
# * `torch.distributed.checkpoint.state_dict
#   <https://docs.pytorch.org/docs/stable/distributed.checkpoint.html>`__: ``get_state_dict``
