# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, checkpoint/state_to_save.py
"""
How to know that a checkpoint is right
======================================

Test that a checkpoint holds the very bits of its step, and that a resumed job does what the first
would have done. ``assert_same_bits`` is the test that most recipes of this folder run on themselves,
with the model below. The state is the ``AppState`` of :doc:`app_state`.

**When not to bother:** never. A checkpoint that nobody has loaded may be none. ``dcp.save`` of
``torch.distributed.checkpoint`` (DCP) stops every rank until the last byte is on disk; the other
recipes of this folder shorten that stop or hide it, and must pass this test.

This saves and loads:

.. literalinclude:: state_to_save.py
   :pyobject: save_and_load

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * what it takes to say that a checkpoint is right
      * a model and a training step to try saves on

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks, CPU or GPU
      * a model sharded with ``fully_shard`` (FSDP2), under DDP, or a plain one

.. verification-badge::

The idea
--------

.. lanes:: Schematic. A resumed job does what the first job would have done.

   job:      0-4 step 1; 4-8 step 2; 8-10 save !; 10-14 step 3; 14-18 step 4
   resumed:  8-10 load !; 10-14 step 3 ~; 14-18 step 4 ~
   @10 the same bits
"""

# %%
# Imports
# -------

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from overlap_recipes.checkpoint.state import AppState

# %%
# The model that these recipes train
# ----------------------------------
# ``SampleCounter`` stands for every buffer that forward changes (BatchNorm's statistics, a token
# count). Its value has to be the same on all ranks. DCP assumes that plain tensors are replicated,
# and keeps **one** rank's copy: if the ranks hold different values, the other values are lost without
# an error.

WIDTH, HIDDEN = 512, 2048  # features
BATCH = 64  # samples per rank and step


def start_rank() -> torch.device:
    """Join the group that torchrun describes, or a group of one; return this rank's device."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device.index)
    if "RANK" in os.environ:
        dist.init_process_group()  # gloo for CPU tensors, NCCL for CUDA's, as far as built in
    else:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    return device


def directory_of_rank_0(directory: Path) -> Path:
    """The directory that rank 0 was given: a checkpoint is one directory for all ranks."""
    agreed = [directory]
    dist.broadcast_object_list(agreed)
    return agreed[0]


class SampleCounter(nn.Module):
    """Count the samples and the numbers that all ranks have seen, in a buffer of two int64."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("samples", torch.zeros(2, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.samples[0] += x.shape[0] * dist.get_world_size()
        self.samples[1] += x.numel() * dist.get_world_size()
        return x


def build_app(device: torch.device, seed: int = 0) -> AppState:
    """An MLP over (batch, WIDTH) float32, sharded over all ranks, and its AdamW; no step taken."""
    torch.manual_seed(seed)
    up, down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
    model = fully_shard(nn.Sequential(SampleCounter(), up, nn.GELU(), down).to(device))
    return AppState(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def load_app(directory: Path, device: torch.device) -> AppState:
    """A new application state, initialised with another seed, then loaded from ``directory``."""
    app = build_app(device, seed=1)
    dcp.load({"app": app}, checkpoint_id=directory)
    return app


def next_batch(app: AppState, device: torch.device) -> torch.Tensor:
    """A batch that depends on the step and the rank alone."""
    torch.manual_seed(1000 * app.step + dist.get_rank())
    return torch.randn(BATCH, WIDTH, device=device)


def forward_backward(app: AppState, device: torch.device) -> None:
    app.model(next_batch(app, device)).square().mean().backward()


def train_step(app: AppState, device: torch.device) -> None:
    forward_backward(app, device)
    app.optimizer.step()
    app.optimizer.zero_grad()
    app.step += 1


# %%
# The test
# --------
# A checkpoint is right when loading it gives back the very bits that you passed to ``save``: of
# the weights, both Adam moments, the optimizer's step counts and settings, the buffer, and the
# step.


def leaves(tree: object, path: str = "") -> dict[str, object]:
    """The leaves of a nested state dict by path; a DTensor counts as this rank's shard."""
    if isinstance(tree, dict):
        tree = tree.items()
    elif isinstance(tree, list):
        tree = enumerate(tree)
    else:
        return {path: tree.to_local() if isinstance(tree, DTensor) else tree}
    return {p: leaf for key, value in tree for p, leaf in leaves(value, f"{path}/{key}").items()}


def snapshot(app: AppState) -> dict[str, object]:
    """Copy every leaf, for :func:`assert_same_bits`; needs the memory of the state once more."""
    live = leaves(app.state_dict())
    return {p: leaf.detach().clone() if torch.is_tensor(leaf) else leaf for p, leaf in live.items()}


def staged_bytes(app: AppState) -> int:
    """Bytes that this rank's part of the state takes."""
    tensors = [leaf for leaf in leaves(app.state_dict()).values() if isinstance(leaf, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)


def same_bits(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):  # as bytes: 0.0 and -0.0 are equal numbers
        return torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (a, b)))
    return a == b


def assert_same_bits(app: AppState, expected: dict[str, object]) -> None:
    """Raise AssertionError naming the leaves of ``app`` that differ in any bit."""
    found = leaves(app.state_dict())
    assert found.keys() == expected.keys(), f"other keys: {found.keys() ^ expected.keys()}"
    differing = [path for path, leaf in expected.items() if not same_bits(found[path], leaf)]
    assert not differing, f"step {expected['/step']}: {differing[:3]} of {len(differing)} differ"


# %%
# Run it, and prove it
# --------------------
# A job saves before its first step and after its second, and trains on. Two other jobs start from
# the two checkpoints. All three must end with the bits of a job that never saved.


def save_and_load(app: AppState, directory: Path, device: torch.device) -> AppState:
    dcp.save({"app": app}, checkpoint_id=directory)
    resumed = build_app(device, seed=1)  # whatever your job begins with
    dcp.load({"app": resumed}, checkpoint_id=directory)
    return resumed


def train(app: AppState, last_step: int, device: torch.device) -> AppState:
    while app.step < last_step:
        train_step(app, device)
    return app


def main(directory: Path) -> None:
    device = start_rank()
    root, app = directory_of_rank_0(directory), build_app(device)
    never_saved = snapshot(train(build_app(device), 4, device))
    from_0 = save_and_load(app, root / "step0", device)
    from_2 = save_and_load(train(app, 2, device), root / "step2", device)
    assert_same_bits(from_2, snapshot(app))
    print("step 2 loaded back, every bit equal")
    for job in (app, from_0, from_2):
        assert_same_bits(train(job, 4, device), never_saved)
    print("saved and resumed jobs end like one that was never saved")
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
# Known limits
# ------------
# * ``dcp.save`` into a directory that holds a checkpoint writes over it, file by file. If that
#   fails half way, the directory loads, half old and half new: see :doc:`async_save`.
#
# Further reading
# ---------------
# * `torch.distributed.checkpoint
#   <https://docs.pytorch.org/docs/stable/distributed.checkpoint.html>`__: the reference
