# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, checkpoint/default_stager.py
"""
Stage while the next step runs: ``DefaultStager``
=================================================

Move the staging copy out of training: it runs during the next step's forward and backward. The host
does not wait for it; the device does, before the optimizer's kernels. torch's own ``DefaultStager``
is made for this. As it stands it can write the weights of the previous step, and **it hides next to
nothing** (see `What it buys`_). So this file only takes page-locked memory from ``DefaultStager``.
It makes the copies itself, in 60 statements.

**When not to bother:** you train on a CPU, which has no second engine to copy with. Or the copy
(bytes of a rank's state over the rate of its link) takes longer than forward and backward together:
the optimizer step then waits for its end. :doc:`saves_beside_training` does the same for more kinds
of state, with a shorter call.

**Scope.** As in :doc:`async_save`: a state dict of plain tensors, DTensors, numbers and text; all
but DTensors are the same on all ranks. Until the copy has ended, only optimizers of torch and
forward may change the saved tensors. You name those that forward changes.

.. result-gain:: checkpoint_stall
   :rows: overlapped_stager default_stager_2.13 pinned overlapped_writer
   :field: cost_s
   :where: model=llama-1b step=long loop=reads compiled=no storage=memory

   ``OverlappedStager`` is this page's.

This is the loop:

.. literalinclude:: default_stager.py
   :pyobject: train

Copy ``OverlappedStager``, the first block of code below. It needs only torch and NumPy. Pass it to
``AsyncCheckpoints`` of :doc:`async_save`, which does the rest: it makes a process group for saves
alone, keeps one save in flight, and waits for the last one.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * staging and upload as two futures, and what each one tells you
      * how to order the copy between two optimizer steps on the device, without stopping the host
      * what else makes an asynchronous copy stop training: a read in mid-step, and the interpreter
      * how to protect buffers that forward changes

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later with NumPy, any number of ranks in a process group
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

.. lanes:: Schematic. ``OverlappedStager``: the copy runs during forward and backward.

   training:  0-3 fwd+bwd; 3-4 opt; 4-7 fwd+bwd; 7-8 opt; 8-11 fwd+bwd
   staging:   4-5.5 stage ~
   upload:    5.5-11.5 write ~
   @7 wait for staging
"""

# %%
# The block to copy
# -----------------
# **Two waits on the device, none on the host.** Kernels are queued: when you call ``async_save``,
# those of the optimizer may not have run yet. So the copying stream first waits for what the
# compute stream has queued. Before the next optimizer step, the compute stream waits for the last
# copy; a hook of torch queues this wait. ``DefaultStager``'s stream waits for nothing (torch 2.9
# to 2.15), so its copy can overtake the step. A ``loss.item()`` after the step hides this defect,
# because it waits for the device.
#
# **Gaps.** One copy engine serves each direction. It serves one stream as long as that stream has
# another copy ready. So a read of a number in mid-step, by ``loss.item()`` or inside a stock model,
# waits for all queued copies. A copy of 64 bytes in the other direction, before each piece, lets
# the read pass.
#
# **The interpreter.** ``DefaultStager`` copies storages by ``UntypedStorage.copy_``, which keeps
# the interpreter's lock until it returns. It does not pin memory of four bytes or less, and an
# optimizer has such a number for each parameter. The copy of that number to pageable memory waits
# for all copies queued before it. It keeps the lock, so the training thread waits, too. Here
# these numbers are pinned as well, and ``Tensor.copy_`` releases the lock.
#
# **What forward changes.** The next forward begins at once, and changes buffers (BatchNorm's
# statistics, a token count) before they are copied. The wait before ``optimizer.step()`` is too
# late for them. Buffers are small, so they are cloned on the compute stream, which runs the clone
# before the next forward. They are found by their address: a state dict drops the prefixes of DDP
# and ``torch.compile`` from names, and lists a shared buffer twice.
#
# Each tensor gets a new ``DefaultStager``, closed at once: torch 2.11 and 2.12 cannot use one
# twice (``KeyError``), and one that is not closed keeps its memory.

import copy
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

PIECE = 8 << 20  # elements of a copy; a read in mid-step waits for one at most


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def page_locked(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, page-locked if ``tensor`` is on a device; a DTensor stays one."""
    is_on_device = tensor.device.type != "cpu"
    stager = DefaultStager(StagingOptions(is_on_device, False, False, False))
    host = stager.stage(tensor)
    stager.close()
    is_left_out = is_on_device and type(host) is torch.Tensor and not host.is_pinned()
    return host.pin_memory() if is_left_out else host  # four bytes or less


class OverlappedStager:
    """Copy state dicts to page-locked memory on a stream of its own, during the next step.

    Pass it as ``async_stager`` of ``dcp.async_save``. One save at a time, and wait for the last
    one: ``AsyncCheckpoints`` of ``async_save.py`` does both.

    Args:
        device: of this rank.
        changing: returns the tensors that forward changes: ``model.buffers``.
    """

    def __init__(
        self, device: torch.device, changing: Callable[[], Iterable[torch.Tensor]]
    ) -> None:
        self.changing = changing
        self.streams = torch.get_device_module(device)
        self.stream = self.streams.Stream()
        self.copied = self.streams.Event()
        self.gap = torch.zeros(16, device=device)
        self.gap_on_host = page_locked(self.gap)
        self.hosts: dict[tuple, torch.Tensor] = {}  # by path; kept between saves
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.hook = register_optimizer_step_pre_hook(lambda *_: self.before_update())

    @torch.no_grad()
    def stage(self, state_dict: dict) -> Future:
        """Queue the copies; the future has the copied state dict, valid until the next call."""
        changed = {local(x).untyped_storage().data_ptr() for x in self.changing()}
        pieces: list[tuple[torch.Tensor, torch.Tensor]] = []  # (to, from)
        staged = self.on_host(state_dict, (), changed, pieces)
        self.stream.wait_stream(self.streams.current_stream())
        with self.streams.stream(self.stream):
            for host, source in pieces:
                self.gap.copy_(self.gap_on_host, non_blocking=True)
                host.copy_(source, non_blocking=True)
            self.copied.record()
        return self.thread.submit(self.when_copied, staged, pieces)

    def on_host(self, leaf: object, path: tuple, changed: set[int], pieces: list) -> object:
        """Return what will hold ``leaf``, and add the copies that fill it to ``pieces``."""
        if isinstance(leaf, dict):
            return {
                key: self.on_host(child, (*path, key), changed, pieces)
                for key, child in leaf.items()
            }
        if not isinstance(leaf, torch.Tensor):
            return copy.deepcopy(leaf)
        host = self.hosts.get(path)
        if host is None or (host.dtype, host.shape, getattr(host, "placements", None)) != (
            leaf.dtype,
            leaf.shape,
            getattr(leaf, "placements", None),
        ):
            host = self.hosts[path] = page_locked(leaf.contiguous())
        source = local(leaf).contiguous()
        if source.untyped_storage().data_ptr() in changed:
            source = source.clone()
        pieces += zip(local(host).view(-1).split(PIECE), source.view(-1).split(PIECE), strict=True)
        return host

    def when_copied(self, staged: dict, pieces: list) -> dict:
        """Wait for the copies. ``pieces`` keeps their sources alive: one may be a clone."""
        self.copied.synchronize()
        return staged

    def before_update(self) -> None:
        """Make the compute stream wait for the copies: its next kernels may change the state."""
        self.streams.current_stream().wait_event(self.copied)

    def close(self) -> None:
        self.hook.remove()
        self.thread.shutdown()


# %%
# Two futures
# -----------
# With an asynchronous stager, ``async_save`` returns a response with two futures. Only
# ``upload_completion`` tells you whether the save failed. ``AsyncCheckpoints`` waits for it at
# the end, and before the next save, because that save refills the buffers that the upload reads.
# ``staging_completion`` reports success even after a failure, if staging has ended before
# ``async_save`` looks (torch 2.13).
#
# Run it, and prove it
# --------------------
# As in :doc:`async_save`, the loop asks for its next batch right after a save, and the checkpoint
# must hold the state of that moment. A save whose copy fails must report an error. Toys and
# comparisons of bits are in ``_checks.py``.

import argparse
import tempfile
from pathlib import Path

import torch.distributed as dist
from _checks import (
    SAVE_EVERY,
    STEPS,
    NamedWhenComplete,
    SameOnAllRanks,
    assert_all_right,
    build,
    directory_of_rank_0,
    start_rank,
    watched_batches,
)
from async_save import AsyncCheckpoints
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[torch.Tensor],
    root: Path,
    device: torch.device,
) -> None:
    stager = OverlappedStager(device, changing=model.buffers)
    with AsyncCheckpoints(root, stager, NamedWhenComplete, SameOnAllRanks()) as checkpoints:
        for step, batch in enumerate(batches, start=1):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % SAVE_EVERY == 0:
                of_model, of_optimizer = get_state_dict(model, optimizer)
                checkpoints.save(step, {"model": of_model, "optimizer": of_optimizer})
    stager.close()


class LostCopies(OverlappedStager):
    """Its copies fail when they are waited for, as on a device that has gone."""

    def when_copied(self, staged: dict, pieces: list) -> dict:
        raise OSError("the copies are lost")


def assert_failed_staging_is_seen(root: Path, device: torch.device) -> None:
    stager = LostCopies(device, changing=list)
    checkpoints = AsyncCheckpoints(root, stager, NamedWhenComplete)
    checkpoints.save(STEPS + 1, {"one": torch.ones(1)})
    try:
        checkpoints.close()
    except RuntimeError as error:
        print(error)
    else:
        raise AssertionError("a failed staging looked like success")
    stager.close()


def main(directory: Path) -> None:
    device = start_rank()
    root = directory_of_rank_0(directory)
    model, optimizer = build(device)
    expected = {}
    train(model, optimizer, watched_batches(model, optimizer, device, expected), root, device)
    assert_all_right(root, expected)
    assert_failed_staging_is_seen(root, device)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, help="where checkpoints go (default: temporary)")
    with tempfile.TemporaryDirectory() as temporary:
        main(parser.parse_args().dir or Path(temporary))

# %%
# What it buys
# ------------
# The first table shows the copy alone: nothing is written. The model is stock, and its forward
# and backward take longer than the copy. ``default_stager_2.13`` is torch 2.13's stager (its two
# files on torch 2.11), changed to copy after the optimizer step. It hides nothing. Even a loop
# that reads no number waits, because the staging thread holds the interpreter's lock (*held by
# the interpreter*). With the optimizer's numbers page-locked, that loop goes on. A loop that
# reads waits for the copy engine, and only gaps help. ``overlapped_stager`` is this file; it
# still costs the call.
#
# .. result-table:: staging_overlap
#    :rows: none default_stager_2.13 default_stager_2.13_numbers_pinned overlapped_stager
#    :where: tokens=40960
#
# The second table shows the whole save. The loop reads a number in each step, and forward and
# backward take as long as the copy. ``default_stager_ordered`` is torch 2.11's stager, a new one
# for each save.
# ``CheckpointManager.save`` is that of :doc:`saves_beside_training`.
#
# .. result-table:: checkpoint_stall
#    :rows: none async_save pinned default_stager_ordered default_stager_2.13 overlapped_stager overlapped_stager_frozen overlapped_writer
#    :where: step=long storage=memory
#
# .. timeline:: checkpoint_stall pinned default_stager_2.13 overlapped_stager overlapped_writer
#
# **Every second to fourth save costs much more**, with all DCP stagers: a save makes many objects,
# so Python's garbage collector searches the whole process. Call ``gc.freeze()`` once, when model
# and optimizer are there, as ``overlapped_stager_frozen`` does: the collector then skips them. It
# never frees them either, so do not call it where models come and go.
#
# Does it pay? The copy takes *bytes of a rank's state over the rate of its link*. It is hidden if forward
# and backward take longer. At 12 bytes a parameter and 50 GB/s, a billion parameters a rank take 0.24 s.
#
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built. A CPU queues nothing, so the bits are right
# there even without a wait. A recorder notes which stream touches which memory, and finds the
# missing wait.
#
# .. recipe-controls::
#
# Memory
# ------
# The host keeps page-locked memory for one copy of this rank's state. The first save allocates
# it, and training waits: seconds for 10 GB, more on memory that the machine has never used. The
# device keeps one clone of the buffers until the copy has ended.
#
# Known limits
# ------------
# * **Code that changes saved tensors without an optimizer of torch, such as an average of
#   weights, must call** ``stager.before_update()`` **first. Nothing tells you if you forget it.**
# * **If forward changes a tensor that** ``changing()`` **does not return** (spectral norm, some
#   quantizers), **the checkpoint can mix two steps, without an error**: ``changing`` must return
#   that tensor, too.
# * The first save compares plain tensors, which makes the host wait for the device once.
# * Tensors within lists and tuples are cloned on the device and copied when they are written.
# * The limits of :doc:`async_save` hold here, too.
#
# Further reading
# ---------------
# * `torch.distributed.checkpoint.staging
#   <https://docs.pytorch.org/docs/stable/distributed.checkpoint.html>`__: ``DefaultStager``,
#   ``StagingOptions``
# * `The pull request that documented it <https://github.com/pytorch/tutorials/pull/3711>`__, and
#   why exit code 0 was not enough
