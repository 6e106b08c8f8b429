"""
Stage while the next step runs: ``DefaultStager``
=================================================

With a ``DefaultStager`` the staging copy, too, leaves the training thread: it runs while the next
step's forward and backward compute, and only ``optimizer.step()`` waits for it. Used as published,
it can write the weights of the step before; this recipe shows the order it needs.

It builds on :doc:`async_save` and changes when staging happens.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * staging and upload as two futures, and where to wait for each
      * how to order the copy after the optimizer step, on the device, without stopping anyone
      * how to keep buffers whole that forward changes
      * how a failed staging hides, and how to see it

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later (on 2.11 and 2.12, one stager a save: see below), any number of ranks
      * an accelerator, to gain anything: on CPU the copy competes with training for cores
      * page-locked host memory for one copy of each rank's shards

.. verification-badge::

The idea
--------

Forward and backward only read the weights. So a copy that starts after one optimizer step and ends
before the next one sees a single step's weights, whatever runs in between. Three ways to save,
the same steps:

.. lanes:: Schematic. ``async_save``: staging stops training.

   training:  0-3 fwd+bwd; 3-4 opt; 4-7 stage !; 7-10 fwd+bwd; 10-11 opt; 11-14 fwd+bwd
   upload:    7-13 write ~

.. lanes:: Schematic. Pinned buffers: the same stop, at link speed.

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
# Model, load-back and comparison are those of :doc:`async_save`.

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from async_save import (
    AppState,
    AsyncCheckpoints,
    assert_same_bits,
    build_app,
    directory_of_rank_0,
    forward_backward,
    load_app,
    snapshot,
    start_rank,
)
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

STEPS = 6
SAVE_EVERY = 2  # steps
REUSE_CRASHES = "2.11" <= torch.__version__ < "2.13"

# %%
# Order the copy after the step
# -----------------------------
# ``DefaultStager`` copies on a stream of its own and makes it wait for nothing (torch 2.9 to 2.13).
# Kernels are queued, so when ``async_save`` is called the optimizer's may not have run yet: the
# copy overtakes them, and the checkpoint holds the weights of the step before. ``loss.item()``
# after the step hides it, because it waits for the device.
#
# An event recorded after the step has to hold the staging stream. That stream is private, but the
# stager copies the state dict value by value *on* it, in order, and asks a value it does not know
# for its ``__deepcopy__``. So the first value can make the stream wait, and copies to plain data:


class ValueAfter:
    """A plain value; copying it makes the copying thread's current stream wait for ``event``."""

    def __init__(self, value: Any, event: torch.Event, device: torch.device) -> None:
        self.value, self.event, self.device = value, event, device

    def __deepcopy__(self, memo: dict) -> Any:
        torch.get_device_module(self.device).current_stream().wait_event(self.event)
        return self.value


# %%
# Keep whole what forward changes
# -------------------------------
# The next forward begins at once, and changes buffers (BatchNorm's statistics, a token count)
# while they wait to be copied; waiting before ``optimizer.step()`` is too late for them. They are
# small: clone them on the compute stream, where the clone is in order by itself. They are found by
# their memory, not by their names: the state dict leaves out a buffer that is not persistent, drops
# the prefixes of DDP and ``torch.compile``, and names a shared buffer twice.


def storage_of(tensor: torch.Tensor) -> int:
    """The address of this rank's part of ``tensor``."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()


class StagedApp(Stateful):
    """``app`` for one asynchronous staging: in order after its last step, buffers cloned."""

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
# Two futures, and a third
# ------------------------
# With an asynchronous stager, ``async_save`` returns a response with two futures. Wait for
#
# * ``staging_completion`` before ``optimizer.step()``, which would change what is being copied;
# * ``upload_completion`` before the next save, which would refill the buffers being written, and
#   before the end.
#
# ``staging_completion`` cannot be trusted with a failure: if staging has ended by the time
# ``async_save`` looks, it is set to success whatever happened (torch 2.13). The future that the
# stager itself returned tells the truth, so this stager keeps it.


class WatchedStager(DefaultStager):
    """A ``DefaultStager`` that keeps the future of its last staging in ``staged``."""

    def __init__(self, device: torch.device) -> None:
        on_cpu = device.type == "cpu"  # the other options need an accelerator
        super().__init__(StagingOptions(False, False, True, False) if on_cpu else StagingOptions())
        self.staged = None

    def stage(self, state_dict: dict, **kwargs: Any):
        self.staged = super().stage(state_dict, **kwargs)
        return self.staged


# %%
# The stager is built once: its pinned buffers are what makes the second staging fast, and one that
# is never closed keeps its thread and its memory. In torch 2.11 and 2.12 the second use of a stager
# raises ``KeyError``; there, each save has to pay for a new one.
#
# The writer is told not to copy ahead (``per_thread_copy_ahead=0``). What it writes is in host
# memory already; by default it would synchronise with the compute stream once a tensor all the
# same, and an upload would take as many training steps as there are tensors.


class StagedCheckpoints(AsyncCheckpoints):
    """Saves that stage in the background, each to ``root/step<N>``, one at a time."""

    def __init__(self, root: Path, device: torch.device) -> None:
        super().__init__(root)
        self.device = device
        self.stager = WatchedStager(device)

    def save(self, app: AppState) -> None:
        """Begin to stage ``app``; call :meth:`wait_staged` before its next optimizer step.

        Raises:
            RuntimeError: the save before this one failed; this one has not begun.
        """
        self.wait()
        if REUSE_CRASHES:
            self.stager.close()
            self.stager = WatchedStager(self.device)
        directory = self.root / f"step{app.step}"
        writer = FileSystemWriter(directory, overwrite=False, per_thread_copy_ahead=0)
        response = dcp.async_save(
            {"app": StagedApp(app, self.device)},
            storage_writer=writer,
            async_stager=self.stager,
            process_group=self.group,
        )
        self.upload = response.upload_completion

    def wait_staged(self) -> None:
        """Return when the copy is complete and the weights may change.

        Raises:
            BaseException: what stopped the copy, once; :meth:`wait` raises it too.
        """
        if self.stager.staged is not None:
            self.stager.staged.exception()  # waits; if that is interrupted, it is staging still
            staged, self.stager.staged = self.stager.staged, None
            staged.result()

    def close(self) -> None:
        try:
            super().close()
        finally:
            self.stager.close()


# %%
# The training step, with its wait
# --------------------------------


def train_step(app: AppState, checkpoints: StagedCheckpoints, device: torch.device) -> None:
    forward_backward(app, device)
    checkpoints.wait_staged()
    app.optimizer.step()
    app.optimizer.zero_grad()
    app.step += 1


# %%
# Run it, and prove it
# --------------------
# The proof keeps a copy of the state at each save and compares it with what is loaded back:
# weights, optimizer, buffer and step. A save that cannot be staged must say so.


class Unstageable:
    """A value that cannot be copied, like a lock or an open file."""

    def __deepcopy__(self, memo: dict) -> None:
        raise TypeError("cannot copy an open file")


def assert_failed_staging_is_seen(app: AppState, checkpoints: StagedCheckpoints) -> None:
    app.optimizer.param_groups[0]["log"] = Unstageable()
    app.step += 1
    checkpoints.save(app)
    for wait in (checkpoints.wait_staged, checkpoints.wait):
        try:
            wait()
        except TypeError as error:
            print(f"{wait.__name__} for step {app.step}: {error}")
        else:
            raise AssertionError(f"{wait.__name__}: a failed staging looked like success")


def main(directory: Path) -> None:
    device = start_rank()
    try:
        root = directory_of_rank_0(directory)
        app = build_app(device)
        checkpoints = StagedCheckpoints(root, device)
        expected = {}
        try:
            for _ in range(STEPS):
                train_step(app, checkpoints, device)
                if app.step % SAVE_EVERY == 0:
                    expected[app.step] = snapshot(app)
                    checkpoints.save(app)
            checkpoints.wait()
            for step, bits in expected.items():
                assert_same_bits(load_app(root / f"step{step}", device), bits)
            print(f"checkpoints of steps {list(expected)} loaded back, every bit equal")
            assert_failed_staging_is_seen(app, checkpoints)
        finally:
            checkpoints.close()
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
# An ordered stager that is used again need not stall a step that is longer than the copy. The rows
# show something else: they were measured with a PyTorch that needs a new stager for each save,
# which pins its buffers each time and stalls for longer than ``pinned``. ``default_stager_ordered``
# also frees those of the save before, in its call; of ``default_stager_as_published`` the benchmark
# frees them between the saves. And the rows show what order is worth: see ``Loads back bit by bit``
# and ``Elements that differ`` of ``default_stager_as_published``. Its upload takes long because its
# writer copies ahead (see above). (The other columns: :doc:`async_save`.)
#
# .. result-figure:: checkpoint_stall
#    :rows: pinned default_stager_as_published default_stager_ordered
#    :where: step=long
#
# .. result-table:: checkpoint_stall
#    :rows: none async_save pinned default_stager_as_published default_stager_ordered
#    :where: step=long
#
# .. timeline:: checkpoint_stall pinned default_stager_as_published default_stager_ordered
#
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built. On a CPU nothing is queued, so a missing
# order is found by recording which stream touches which memory; a copy that must be outrun is held
# until it has been.
#
# .. recipe-controls::
#
# Memory
# ------
# Pinned host memory for one copy of this rank's state, from the first save until ``close()``: the
# formula of :doc:`async_save`. On the device, one clone of the buffers until staging ends.
#
# PyTorch's staging thread does not know its rank's device (seen on 2.11): on every rank of a node
# but the first it opens a context on the first GPU too, about half a gigabyte there for each.
# :doc:`overlapped_stager` tells its thread which device is meant; the daemons of
# :doc:`process_checkpointer` open none.
#
# When it is not worth it
# -----------------------
# * Your PyTorch is 2.11 or 2.12: pinning anew for each save costs more than the copy.
#   :doc:`overlapped_stager` works there.
# * The step is shorter than the copy: the wait before ``optimizer.step()`` takes what is left.
# * On CPU: there is no second engine to copy with.
#
# Known limits
# ------------
# * The value that orders the copy must come first in the state dict: what is copied before it is
#   not ordered.
# * An exception from ``save`` or from staging on one rank alone must end the job. If that rank saves
#   again, DCP pairs it with the others' earlier save and reports success for a checkpoint that does
#   not load.
# * Parameters that forward changes (spectral norm, some quantisers) need the clone that buffers get.
#
# Further reading
# ---------------
# * `torch.distributed.checkpoint.staging
#   <https://docs.pytorch.org/docs/stable/distributed.checkpoint.html>`__: ``DefaultStager``,
#   ``StagingOptions``
# * `The pull request that documented it
#   <https://github.com/pytorch/tutorials/pull/3711>`__, and why exit code 0 was not enough
