# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, checkpoint/default_stager.py
"""
Stage while the next step runs: ``DefaultStager``
=================================================

Move the staging copy off the training thread, with torch's own stager. The copy runs while the next
step's forward and backward compute, and only ``optimizer.step()`` waits for it. Used as published,
``DefaultStager`` can write the weights of the previous step. This recipe adds the missing ordering.

**When not to bother:** you train on a CPU, which has no second engine to copy with. Or you have
PyTorch 2.11 or 2.12: they pin memory anew for each save, which takes longer than the copy. Or your
step is shorter than the copy: its end waits for the rest. :doc:`overlapped_stager` works with all
versions.

This is the loop; ``app`` is the ``AppState`` of :doc:`app_state`:

.. literalinclude:: default_stager.py
   :pyobject: train

Copy ``ValueAfter``, ``StagedApp`` and ``StagedCheckpoints`` beside the classes of
:doc:`async_save`.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * staging and upload as two futures, and what each one tells you
      * how to order the copy after the optimizer step on the device, without stopping the host
      * how to protect buffers that forward changes

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks
      * page-locked host memory for one copy of each rank's shards

.. verification-badge::

The idea
--------

Forward and backward only read the weights. So a copy that starts after one optimizer step and ends
before the next one sees the weights of a single step, whatever runs in between. Here are the same
steps with three ways to save:

.. lanes:: Schematic. ``async_save``: staging stops training.

   training:  0-3 fwd+bwd; 3-4 opt; 4-7 stage !; 7-10 fwd+bwd; 10-11 opt; 11-14 fwd+bwd
   upload:    7-13 write ~

.. lanes:: Schematic. Pinned buffers: the same stop, at the rate of the link.

   training:  0-3 fwd+bwd; 3-4 opt; 4-5 stage !; 5-8 fwd+bwd; 8-9 opt; 9-12 fwd+bwd
   upload:    5-11 write ~

.. lanes:: Schematic. ``DefaultStager``, ordered: the copy runs beside forward and backward.

   training:  0-3 fwd+bwd; 3-4 opt; 4-7 fwd+bwd; 7-8 opt; 8-11 fwd+bwd
   staging:   4-5.5 stage ~
   upload:    5.5-11.5 write ~
   @7 wait for staging
"""

# %%
# Imports
# -------
# The model, the test, and the writer that names complete checkpoints come from :doc:`async_save`.

import argparse
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from async_save import (
    AppState,
    AsyncCheckpoints,
    NamedWhenComplete,
    assert_same_bits,
    build_app,
    directory_of_rank_0,
    load_app,
    next_batch,
    snapshot,
    start_rank,
)
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

STEPS = 6
SAVE_EVERY = 2  # steps
REUSE_CRASHES = "2.11" <= torch.__version__ < "2.13"

# %%
# Order the copy after the step
# -----------------------------
# ``DefaultStager`` copies on its own stream, which waits for nothing (torch 2.9 to 2.15). Kernels
# are queued: when you call ``async_save``, those of the optimizer may not have run yet. The copy
# then overtakes them, and the checkpoint holds the weights of the previous step. A ``loss.item()``
# after the step hides the defect, because it waits for the device.
#
# The staging stream must wait for an event that is recorded after the step. That stream is
# private. But the stager copies the state dict *on* it, value by value and in order, and calls
# ``__deepcopy__`` of a value that it does not know. So the first value can make the stream wait,
# and then return plain data:


class ValueAfter:
    """A plain value; copying it makes the copying thread's current stream wait for ``event``."""

    def __init__(self, value: Any, event: torch.Event, device: torch.device) -> None:
        self.value, self.event, self.device = value, event, device

    def __deepcopy__(self, memo: dict) -> Any:
        torch.get_device_module(self.device).current_stream().wait_event(self.event)
        return self.value


# %%
# Clone what forward changes
# --------------------------
# The next forward begins at once, and changes buffers (BatchNorm's statistics, a token count)
# before they are copied. Waiting before ``optimizer.step()`` is too late for them. Buffers are
# small, so clone them on the compute stream, where the clone is already in order.
#
# The recipe finds buffers by their memory, not by their names. A state dict leaves out a buffer
# that is not persistent, drops the prefixes of DDP and ``torch.compile``, and names a shared buffer
# twice.


def storage_of(tensor: torch.Tensor) -> int:
    """The address of this rank's part of ``tensor``."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()


class StagedApp(Stateful):
    """``app`` for one asynchronous staging, ordered after its last step, with buffers cloned."""

    def __init__(self, app: AppState, device: torch.device) -> None:
        self.app, self.device = app, device

    def state_dict(self) -> dict:
        state = self.app.state_dict()
        changing = {storage_of(buffer) for buffer in self.app.model.buffers()}
        for name, value in state["model"].items():
            if torch.is_tensor(value) and storage_of(value) in changing:
                state["model"][name] = value.clone()
        after_step = torch.get_device_module(self.device).Event()
        after_step.record()
        return {"step": ValueAfter(state.pop("step"), after_step, self.device)} | state

    def load_state_dict(self, state_dict: dict) -> None:
        self.app.load_state_dict(state_dict)


# %%
# Two futures
# -----------
# With an asynchronous stager, ``async_save`` returns a response with two futures. Wait for
#
# * ``staging_completion`` before any optimizer steps, because the step changes what is being
#   copied. A hook that torch calls before every optimizer step does this, so you cannot forget
#   one;
# * ``upload_completion`` before the next save, which refills the buffers that are being written,
#   and before the end.
#
# Only the second future tells you whether the save failed. If staging has ended by the time
# ``async_save`` looks, ``staging_completion`` reports success whatever happened (torch 2.13).
#
# Build the stager once. Its pinned buffers make the second staging fast, and a stager that is
# never closed keeps its thread and its memory. In torch 2.11 and 2.12, using a stager a second
# time raises ``KeyError``, so there each save builds a new one.
#
# ``per_thread_copy_ahead=0`` tells the writer not to copy ahead: what it writes is in host memory
# already. By default it would still synchronize with the compute stream once per tensor, and an
# upload would take as many training steps as there are tensors.


def new_stager(device: torch.device) -> DefaultStager:
    on_cpu = device.type == "cpu"  # the other options need an accelerator
    return DefaultStager(StagingOptions(False, False, True, False) if on_cpu else StagingOptions())


class StagedCheckpoints(AsyncCheckpoints):
    """Save with staging in the background, each time to ``root/step<N>``, one save at a time."""

    def __init__(self, root: Path, device: torch.device) -> None:
        super().__init__(root)
        self.device = device
        self.stager = new_stager(device)
        self.staged: Future | None = None
        self.hook = register_optimizer_step_pre_hook(lambda *_: self.wait_staged())

    def save(self, app: AppState) -> None:
        """Begin to stage ``app``.

        Waits for the previous save first. If that one failed, logs its error.
        """
        self.end_last()
        if REUSE_CRASHES:
            self.stager.close()
            self.stager = new_stager(self.device)
        self.uploading = f"step{app.step}"
        directory, ranks = self.root / self.uploading, self.group.size()
        response = dcp.async_save(
            {"app": StagedApp(app, self.device)},
            storage_writer=NamedWhenComplete(directory, ranks, per_thread_copy_ahead=0),
            async_stager=self.stager,
            process_group=self.group,
        )
        self.staged, self.upload = response.staging_completion, response.upload_completion

    def wait_staged(self) -> None:
        """Return when the copy has ended, successfully or not, and the weights may change."""
        if self.staged is not None:
            self.staged.exception()  # waits; if interrupted, the copy still runs
            self.staged = None

    def close(self) -> None:
        self.hook.remove()
        try:
            super().close()
        finally:
            self.stager.close()


# %%
# Run it, and prove it
# --------------------
# As in :doc:`async_save`, the checkpoint must hold what the state is when the loop asks for its
# next batch. A save that cannot be staged must report an error.


def train(app: AppState, batches: Iterable[torch.Tensor], root: Path, device: torch.device) -> None:
    with StagedCheckpoints(root, device) as checkpoints:
        for batch in batches:
            app.model(batch).square().mean().backward()
            app.optimizer.step()
            app.optimizer.zero_grad()
            app.step += 1
            if app.step % SAVE_EVERY == 0:
                checkpoints.save(app)


def watched_batches(app: AppState, device: torch.device, saved: dict) -> Iterator[torch.Tensor]:
    """Batches up to step STEPS; store in ``saved`` what each checkpoint must hold."""
    while app.step < STEPS:
        yield next_batch(app, device)
        if app.step % SAVE_EVERY == 0:
            saved[app.step] = snapshot(app)


class Unstageable:
    """A value that cannot be copied, like a lock or an open file."""

    def __deepcopy__(self, memo: dict) -> None:
        raise TypeError("cannot copy an open file")


def assert_failed_staging_is_seen(app: AppState, root: Path, device: torch.device) -> None:
    app.optimizer.param_groups[0]["log"] = Unstageable()
    checkpoints = StagedCheckpoints(root / "unstageable", device)
    checkpoints.save(app)
    checkpoints.wait_staged()
    try:
        checkpoints.close()
    except RuntimeError as error:
        print(error)
    else:
        raise AssertionError("a failed staging looked like success")


def main(directory: Path) -> None:
    device = start_rank()
    try:
        root = directory_of_rank_0(directory)
        app, saved = build_app(device), {}
        train(app, watched_batches(app, device, saved), root, device)
        for step, bits in saved.items():
            assert_same_bits(load_app(root / f"step{step}", device), bits)
        print(f"checkpoints of steps {list(saved)} loaded back, every bit equal")
        assert_failed_staging_is_seen(app, root, device)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, help="where checkpoints go (default: temporary)")
    with tempfile.TemporaryDirectory() as temporary:
        main(parser.parse_args().dir or Path(temporary))

# %%
# What it buys
# ------------
# Where torch's stager can be used again, an ordered save need not stall a step that is longer than
# the copy. That has not been measured: the rows are of torch 2.11, which needs a new stager for each
# save. There, a save pins new buffers and stalls longer than ``pinned``, the save of
# :doc:`pinned_staging`.
#
# .. result-table:: checkpoint_stall
#    :rows: none pinned default_stager_ordered
#    :where: step=long storage=memory
#
# .. timeline:: checkpoint_stall pinned default_stager_ordered
#
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built. A CPU queues nothing, so the bits come out
# right there even without an ordering. A recorder that notes which stream touches which memory
# finds what is missing. Where a copy must lose a race, the test holds it until it has.
#
# .. recipe-controls::
#
# Memory
# ------
# Pinned host memory for one copy of this rank's state, from the first save until ``close()``: see
# the formula of :doc:`async_save`. On the device, one clone of the buffers until staging ends.
#
# PyTorch's staging thread does not know its rank's device (seen on 2.11). On every rank of a node
# but the first, it opens a second context on the first GPU, about half a gigabyte each.
# :doc:`overlapped_stager` tells its thread which device to use.
#
# Known limits
# ------------
# * The value that orders the copy must come first in the state dict. Whatever is copied before it
#   is not ordered.
# * A device-to-host read in mid-step waits for the whole copy, on the device: see
#   :doc:`staging_copies`. The limits of :doc:`async_save` hold here, too.
# * Parameters that forward changes (spectral norm, some quantizers) need the clone that buffers
#   get.
#
# Further reading
# ---------------
# * `torch.distributed.checkpoint.staging
#   <https://docs.pytorch.org/docs/stable/distributed.checkpoint.html>`__: ``DefaultStager``,
#   ``StagingOptions``
# * `The pull request that documented it <https://github.com/pytorch/tutorials/pull/3711>`__, and
#   why exit code 0 was not enough
