# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, checkpoint/pinned_staging.py
"""
Stage into pinned memory, kept between saves
============================================

Stop training for a copy at the rate of the link, and no longer. A writer with
``cache_staged_state_dict=True`` copies every checkpoint into the same page-locked ("pinned")
buffers. The first save allocates and pins them; each later one only copies.

**When not to bother:** you have no accelerator (nothing is pinned then), you save rarely (the
memory is held all the time), or page-locked memory is short: it cannot be swapped. If a copy at the
rate of the link still stops training for too long, :doc:`default_stager` runs it during the next step.

**Scope.** As in :doc:`async_save`: a state dict of plain tensors, DTensors, numbers and text; all
but DTensors are the same on all ranks. Save first after the first step, which makes the optimizer's
state: if keys, shapes or dtypes change, new buffers are pinned.

.. index::
   single: pin_memory tutorial

.. result-gain:: checkpoint_stall
   :rows: pinned async_save default_stager_ordered default_stager_2.13 overlapped_writer
   :field: cost_s
   :where: model=llama-1b step=long loop=reads compiled=no storage=memory

This is the loop:

.. literalinclude:: pinned_staging.py
   :pyobject: train

Copy ``PinnedStager``, the first block of code below. It needs only torch and NumPy. Pass it to
``AsyncCheckpoints`` of :doc:`async_save`, which does the rest: it makes a process group for saves
alone, keeps one save in flight, and waits for the last one.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * why the first save is slow and the others are not
      * what stays allocated between saves, and how to free it
      * what a state with other keys does to the cache

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later with NumPy, any number of ranks in a process group
      * page-locked host memory for one copy of each rank's shards, all the time

.. verification-badge::

The idea
--------

A copy from the device to ordinary, pageable host memory goes piece by piece through a small pinned
buffer of the driver. A copy to pinned memory is one transfer at the rate of the link. But pinning
is slow: the system must touch and lock every page. So pin once, and keep the memory.

.. lanes:: Schematic. The first save allocates and pins; the next ones only copy.

   training:  0-2 step 1; 2-8 pin and stage !; 8-10 step 2; 10-12 step 3; 12-13 stage !; 13-15 step 4; 15-17 step 5
   upload:    8-12 write 1 ~; 13-17 write 3 ~
"""

# %%
# The block to copy
# -----------------
# torch's ``BlockingAsyncStager`` keeps its buffers between saves. ``FileSystemWriter(
# cache_staged_state_dict=True)`` is the same stager in a writer that must then outlive the save.
#
# * **One save at a time.** There is one set of buffers, and the upload reads from it. A second save
#   would overwrite the values of the first one while they are being written.
# * **A changed state** does not fit the buffers: a layer was frozen or added, or the first save came
#   before the optimizer had any state. For other keys, torch raises ``CompanionMismatch``,
#   which names neither the key nor a way out. For another dtype it raises nothing: float32 values
#   are rounded into a bfloat16 buffer. So ``stage`` compares layouts before anything is copied, and
#   makes new buffers.
# * **Without an accelerator**, torch refuses to make the buffers, because there is nothing to pin
#   them for (``Cannot access accelerator device when none is available``, torch 2.13). Setting
#   ``state_dict_cache`` beforehand gives the same buffers and the same reuse.

import copy
import logging

import torch
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor

LOG = logging.getLogger(__name__)


def layout_of(tree: object, path: str = "") -> dict[str, str]:
    """By path, what a buffer for this rank's part of each tensor must be; "" for other leaves."""
    if isinstance(tree, torch.Tensor):
        local = tree.to_local() if isinstance(tree, DTensor) else tree
        of_all = f"{tuple(tree.shape)}, {getattr(tree, 'placements', 'whole')}"
        return {path: f"{local.dtype}, {tuple(local.shape)} of {of_all}"}
    if isinstance(tree, dict):
        children = tree.items()
    elif isinstance(tree, list | tuple):
        children = enumerate(tree)
    else:
        return {path: ""}
    layout = {}
    for key, child in children:
        layout |= layout_of(child, f"{path}/{key}")
    return layout


def own_copies(tree: object) -> object:
    """``tree`` with a copy of each leaf, which shares memory with no other, as tied weights do."""
    if isinstance(tree, dict):
        return {key: own_copies(child) for key, child in tree.items()}
    if isinstance(tree, list | tuple):
        make = getattr(tree, "_make", type(tree))  # of a named tuple
        return make(own_copies(child) for child in tree)
    return copy.deepcopy(tree)


class PinnedStager(BlockingAsyncStager):
    """Copy every state dict into the same page-locked buffers, while the caller waits.

    Pass it as ``async_stager`` of ``dcp.async_save``. One save at a time, and wait for the last
    one: ``AsyncCheckpoints`` of ``async_save.py`` does both.
    """

    def __init__(self) -> None:
        super().__init__(cache_staged_state_dict=True)
        self.layout: dict[str, str] = {}  # of the buffers; empty: there are none

    def stage(self, state_dict: dict) -> dict:
        """The buffers, filled; valid until the next call."""
        layout = layout_of(state_dict)
        if self.layout and layout != self.layout:
            changed = sorted(dict(layout.items() ^ self.layout.items()))
            LOG.warning("new buffers are pinned: %s changed since the last save", changed[:2])
            self.release()
        if not torch.accelerator.is_available() and not self.layout:
            self.state_dict_cache = own_copies(state_dict)
        self.layout = layout
        return super().stage(state_dict)

    def release(self) -> None:
        """Free the buffers, after the upload has ended; the next save pins new ones."""
        self.state_dict_cache = None
        self.layout = {}


# %%
# What stays allocated
# --------------------
# Between saves the stager holds, on every rank,
#
# .. math::
#
#    \sum_{t\,\in\,\text{state}} \text{size}(t), \qquad
#    \text{size}(t) = 2^{\lceil \log_2 \text{bytes of the local shard of } t \rceil}
#
# because PyTorch's pinned allocator rounds each block up to a power of two (`pytorch#150517
# <https://github.com/pytorch/pytorch/issues/150517>`__). Scalars are not pinned. With an
# accelerator that is up to twice the bytes of the shards; without one it is exactly their bytes.
# ``release()`` returns the blocks to PyTorch's pool of pinned memory, where the next pinned tensor
# of that size finds them.
#
# Run it, and prove it
# --------------------
# The proof asserts three things. Every save went through the same buffers, pinned ones if there is
# an accelerator. Every checkpoint still gives back the bits of its step. A state of another layout
# gets new buffers, and ``release`` leaves none alive. Toys and comparisons of bits are in
# ``_checks.py``.

import argparse
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path

import torch.distributed as dist
from _checks import (
    SAVE_EVERY,
    NamedWhenComplete,
    SameOnAllRanks,
    assert_all_right,
    assert_right,
    build,
    directory_of_rank_0,
    leaves,
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
    stager: PinnedStager,
) -> None:
    with AsyncCheckpoints(root, stager, NamedWhenComplete, SameOnAllRanks()) as checkpoints:
        for step, batch in enumerate(batches, start=1):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % SAVE_EVERY == 0:
                of_model, of_optimizer = get_state_dict(model, optimizer)
                checkpoints.save(step, {"model": of_model, "optimizer": of_optimizer})


@torch.no_grad()  # so that to_local() gives the buffer itself, not a view of it
def buffers(stager: PinnedStager) -> list[torch.Tensor]:
    """The tensors that the stager keeps between saves, scalars left out."""
    held = []
    for leaf in leaves(stager.state_dict_cache or {}).values():
        local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
        if isinstance(local, torch.Tensor) and local.dim() > 0:
            held.append(local)
    return held


class Watched(PinnedStager):
    """Record where the buffers of each save lie."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: set[tuple] = set()

    def stage(self, state_dict: dict) -> dict:
        staged = super().stage(state_dict)
        self.addresses.add(tuple(buffer.data_ptr() for buffer in buffers(self)))
        return staged


def prove_new_layout(stager: PinnedStager, root: Path, device: torch.device) -> None:
    """Another state is saved through buffers of its own; the old ones are freed."""
    alive = [weakref.ref(buffer) for buffer in buffers(stager)]
    other = {"weight": torch.ones(4, device=device)}
    with AsyncCheckpoints(root, stager, NamedWhenComplete, SameOnAllRanks()) as checkpoints:
        checkpoints.save(7, other)
    assert not any(ref() is not None for ref in alive), "buffers of the old layout are left"
    assert_right(root / "step7", other)
    alive = [weakref.ref(buffer) for buffer in buffers(stager)]
    stager.release()
    assert not any(ref() is not None for ref in alive), "release() left buffers allocated"


def main(directory: Path) -> None:
    device = start_rank()
    root = directory_of_rank_0(directory)
    model, optimizer = build(device)
    stager = Watched()
    expected = {}
    train(model, optimizer, watched_batches(model, optimizer, device, expected), root, stager)
    assert_all_right(root, expected)
    assert len(stager.addresses) == 1, "a save made buffers of its own"
    pageable = [buffer for buffer in buffers(stager) if not buffer.is_pinned()]
    assert device.type == "cpu" or not pageable, "pageable buffers"
    del pageable
    prove_new_layout(stager, root, device)
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
# Each save after the first one stalls training for one copy at the rate of the link. The last two
# rows, of :doc:`default_stager` and of :doc:`saves_beside_training`, copy during the next step,
# whose forward and backward are here as long as the copy. All rows save a stock model
# (:doc:`/guide/measured` explains the columns).
#
# .. result-table:: checkpoint_stall
#    :rows: none async_save pinned overlapped_stager overlapped_writer
#    :where: step=long storage=memory
#
# .. timeline:: checkpoint_stall async_save pinned
#
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built. Where chance would decide, the test holds
# the writes.
#
# .. recipe-controls::
#
# Known limits
# ------------
# * The limits of :doc:`async_save` hold here, too.
# * This file sets ``state_dict_cache`` only on machines without an accelerator. If you set it on
#   others, to memory that is not pinned, you lose the gain without an error.
#
# Further reading
# ---------------
# * `FileSystemWriter <https://docs.pytorch.org/docs/stable/distributed.checkpoint.html>`__:
#   ``cache_staged_state_dict``
# * `pytorch#150517 <https://github.com/pytorch/pytorch/issues/150517>`__: pinned blocks are
#   rounded up to a power of two
