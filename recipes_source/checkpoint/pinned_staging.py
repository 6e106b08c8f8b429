# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, checkpoint/pinned_staging.py
"""
Stage into pinned memory, kept between saves
============================================

Stop training for a copy at the rate of the link, and no longer. A writer with
``cache_staged_state_dict=True`` copies every checkpoint into the same page-locked ("pinned")
buffers. The first save allocates and pins them; each later one only copies.

**When not to bother:** you have no accelerator (nothing is pinned then), you save rarely (the
memory is held all the time), or page-locked memory is short: it cannot be swapped. If a copy at the
rate of the link still stops training for too long, :doc:`overlapped_stager` runs it beside the next
step.

This is the loop; ``checkpoints`` is a ``PinnedCheckpoints(root)``:

.. literalinclude:: pinned_staging.py
   :pyobject: train_and_save

Copy ``PinnedCheckpoints`` and ``layout`` beside the classes of :doc:`async_save`. Its loop stays as
it is, with ``PinnedCheckpoints(root)`` in place of ``AsyncCheckpoints(root)``.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * why the first save is slow and the others are not
      * what stays allocated between saves, and how to free it
      * what a state with other keys does to the cache, and what to do then

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks
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
# Imports
# -------
# The model, the training step and the comparison come from :doc:`async_save`.

import argparse
import copy
import tempfile
import weakref
from pathlib import Path

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
    leaves,
    load_app,
    snapshot,
    start_rank,
    train_step,
)
from torch import nn
from torch.distributed.fsdp import fully_shard

SAVES = 3
MB = 1e6  # bytes

# %%
# One writer for all saves
# ------------------------
# The cache belongs to the writer (``state_dict_cache``), so the writer must outlive the save. A
# new writer per save would start without buffers each time. ``reset`` points the writer to the
# next directory.
#
# ``end_last`` waits for the upload before the next save. Here that wait protects the checkpoint:
# there is one set of buffers, and the upload reads from it. A second save would overwrite the
# values of the first one while they are being written.


class PinnedCheckpoints(AsyncCheckpoints):
    """Asynchronous saves of one application state through one set of pinned buffers."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        ranks = self.group.size()
        self.writer = NamedWhenComplete(root, ranks, cache_staged_state_dict=True)

    def save(self, app: AppState) -> None:
        """Stage ``app`` into the buffers of the first save and write it on another thread.

        Waits for the previous save first. If that one failed, logs its error.

        Raises:
            ValueError: ``app`` has other keys, shapes, dtypes or shards than the buffers.
        """
        self.end_last()
        state = {"app": app.state_dict()}
        self.check_layout(state)
        if not torch.accelerator.is_available() and self.writer.state_dict_cache is None:
            self.writer.state_dict_cache = copy.deepcopy(state)
        self.uploading = f"step{app.step}"
        self.writer.reset(self.root / f"{self.uploading}.incomplete")
        self.upload = dcp.async_save(state, storage_writer=self.writer, process_group=self.group)

    def check_layout(self, state: dict) -> None:
        """Raise ValueError unless ``state`` fits the buffers that there are."""
        if self.writer.state_dict_cache is None:
            return
        wanted, held = layout(state), layout(self.writer.state_dict_cache)
        if wanted != held:
            raise ValueError(
                "the state's layout has changed since its buffers were pinned: "
                f"{sorted(wanted ^ held, key=str)[:2]}; call release() and save again"
            )

    def release(self) -> None:
        """Free the buffers; the next save allocates and pins new ones."""
        self.end_last()
        self.writer.state_dict_cache = None


def layout(tree: object, path: str = "") -> set[tuple]:
    """Every path in a nested state dict, with the shape, dtype and placements of each tensor."""
    if isinstance(tree, torch.Tensor):
        return {(path, tuple(tree.shape), tree.dtype, getattr(tree, "placements", None))}
    if isinstance(tree, dict | list | tuple):
        children = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {(path,)}.union(*(layout(child, f"{path}/{key}") for key, child in children))
    return {(path,)}


# %%
# Two details in ``save``:
#
# * **A changed state** does not fit the buffers. Examples are a frozen or added layer, and a first
#   save before the optimizer has any state. For other keys, torch raises ``CompanionMismatch``,
#   which names neither the key nor a way out. For another dtype it raises nothing: float32 values
#   are rounded into a bfloat16 buffer. So ``check_layout`` looks before anything is copied.
# * **Without an accelerator**, torch refuses to make the cache, because there is nothing to pin it
#   for (``Cannot access accelerator device when none is available``, torch 2.13). Setting
#   ``state_dict_cache`` beforehand gives the same buffers and the same reuse.
#
# What stays allocated
# --------------------
# Between saves the writer holds, on every rank,
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


def buffers(checkpoints: PinnedCheckpoints) -> list[torch.Tensor]:
    """The tensors that the writer keeps between saves, scalars left out."""
    held = leaves(checkpoints.writer.state_dict_cache or {}).values()
    return [t for t in held if isinstance(t, torch.Tensor) and t.dim() > 0]


# %%
# Run it, and prove it
# --------------------
# The proof asserts three things. Every save went through the same buffers, pinned ones if there is
# an accelerator. Every checkpoint still gives back the bits of its step. ``release`` leaves no
# buffer alive.


def train_and_save(app: AppState, checkpoints: PinnedCheckpoints, device: torch.device) -> None:
    while app.step < SAVES:
        train_step(app, device)
        checkpoints.save(app)


class Watched(PinnedCheckpoints):
    """Record what each checkpoint must hold, and where the buffers of each save lie."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.expected, self.addresses = {}, set()

    def save(self, app: AppState) -> None:
        self.expected[app.step] = snapshot(app)
        super().save(app)
        self.addresses.add(tuple(t.data_ptr() for t in buffers(self)))


def add_head(app: AppState, device: torch.device) -> None:
    """Give the model another sharded layer, and its optimizer the state for it."""
    head = fully_shard(nn.Linear(app.model[-1].out_features, 1, device=device))
    app.model.append(head)
    app.optimizer.add_param_group({"params": list(head.parameters())})
    train_step(app, device)


def assert_change_is_refused(app: AppState, checkpoints: PinnedCheckpoints) -> None:
    try:
        checkpoints.save(app)
    except ValueError as error:
        print(f"changed state: {error}")
    else:
        raise AssertionError("a state with other keys was saved through the old buffers")


def main(directory: Path) -> None:
    device = start_rank()
    try:
        root = directory_of_rank_0(directory)
        app = build_app(device)
        with Watched(root) as checkpoints:
            train_and_save(app, checkpoints, device)
            checkpoints.wait()
            for step, bits in checkpoints.expected.items():
                assert_same_bits(load_app(root / f"step{step}", device), bits)
            print(f"checkpoints of steps {list(checkpoints.expected)}: every bit equal")
            assert len(checkpoints.addresses) == 1, "a save made buffers of its own"

            kept = buffers(checkpoints)
            assert device.type == "cpu" or all(t.is_pinned() for t in kept), "pageable buffers"
            size = sum(t.numel() * t.element_size() for t in kept) / MB
            print(f"{size:.1f} MB stay allocated", "(not pinned)" if device.type == "cpu" else "")

            add_head(app, device)
            assert_change_is_refused(app, checkpoints)
            alive = [weakref.ref(t) for t in kept]
            del kept
            checkpoints.release()
            assert not any(ref() is not None for ref in alive), "release() left buffers allocated"
            checkpoints.save(app)
        train_step(app, device)
        step, bits = checkpoints.expected.popitem()
        dcp.load({"app": app}, checkpoint_id=root / f"step{step}")
        assert_same_bits(app, bits)
        print(f"released; step {step}, with the new layer, saved and loaded back")
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
# Each save after the first one stalls training for one copy at the rate of the link. ``async_save``
# is the save of :doc:`async_save`. ``overlapped_writer``, that of :doc:`overlapped_writer`, copies
# during the next step, here a step longer than the copy. All of them save a stock model
# (:doc:`/guide/measured` explains the columns).
#
# .. result-table:: checkpoint_stall
#    :rows: none async_save pinned overlapped_writer
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
# * The cache holds one state. Saving two different objects through one writer fails as a changed
#   state does.
# * A value that is neither tensor, number, text, list, tuple nor dict (a dtype, a set) raises at
#   the call. The limits of :doc:`async_save` hold here, too.
# * This recipe sets ``state_dict_cache`` only on machines without an accelerator. If you set it on
#   others, to memory that is not pinned, you lose the gain without an error.
#
# Further reading
# ---------------
# * `FileSystemWriter <https://docs.pytorch.org/docs/stable/distributed.checkpoint.html>`__:
#   ``cache_staged_state_dict``
# * `pytorch#150517 <https://github.com/pytorch/pytorch/issues/150517>`__: pinned blocks are
#   rounded up to a power of two
