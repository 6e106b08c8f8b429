"""
Stage into pinned memory, kept between saves
============================================

A writer with ``cache_staged_state_dict=True`` copies every checkpoint into the same page-locked
("pinned") buffers: the first save pays for them, each later one runs at the speed of the link
between device and host. The price is that this memory stays taken until you release it.

This recipe builds on :doc:`async_save` and changes its staging, nothing else.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * why the first save is slow and the others are not
      * what stays allocated between saves, and how to give it back
      * what a state with other keys does to the cache, and what to do then
      * what is left of it on a machine without an accelerator

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks
      * an accelerator, to gain anything: without one nothing is pinned, and the page says so
      * page-locked host memory for one copy of each rank's shards, all the time

.. verification-badge::

The idea
--------

A copy from the device to ordinary, pageable host memory goes through a small pinned buffer of the
driver's, piece by piece. A copy to pinned memory is one transfer at link speed. But pinning is
slow: the system must touch and lock every page. So pin once, and keep it.

.. lanes:: Schematic. The first save allocates and pins; the next ones only copy.

   training:  0-2 step 1; 2-8 pin and stage !; 8-10 step 2; 10-12 step 3; 12-13 stage !; 13-15 step 4; 15-17 step 5
   upload:    8-12 write 1 ~; 13-17 write 3 ~
"""

# %%
# Imports
# -------
# Model, training step, load-back and comparison are those of :doc:`async_save`.

import argparse
import copy
import tempfile
import time
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from async_save import (
    AppState,
    AsyncCheckpoints,
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
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.fsdp import fully_shard

SAVES = 3
MB = 1e6  # bytes

# %%
# One writer for all saves
# ------------------------
# The cache belongs to the writer (``state_dict_cache``), so the writer must outlive the save:
# a new one per save would begin each save without buffers, as the first one does (its stall is in
# the table below). Each save names its directory by ``checkpoint_id``; the writer turns to it.
#
# Waiting for the upload before the next save (``self.wait()``) now guards more than memory. There
# is one buffer, and the upload reads from it: a second save would overwrite the first one's values
# while they are being written.


class PinnedCheckpoints(AsyncCheckpoints):
    """Asynchronous saves of one application state through one set of pinned buffers."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.writer = FileSystemWriter(root, cache_staged_state_dict=True, overwrite=False)

    def save(self, app: AppState) -> None:
        """Stage ``app`` into the buffers of the first save and leave the writing to a thread.

        Raises:
            ValueError: ``app`` has other keys, shapes, dtypes or shards than the buffers.
            RuntimeError: the save before this one failed; this one has not begun.
        """
        self.wait()
        state = {"app": app.state_dict()}
        self.check_layout(state)
        if not torch.accelerator.is_available() and self.writer.state_dict_cache is None:
            self.writer.state_dict_cache = copy.deepcopy(state)
        directory = self.root / f"step{app.step}"
        self.upload = dcp.async_save(
            state, checkpoint_id=directory, storage_writer=self.writer, process_group=self.group
        )

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
        """Give the buffers back; the next save allocates and pins them anew."""
        self.wait()
        self.writer.state_dict_cache = None


def layout(tree: object, path: str = "") -> set[tuple]:
    """Every path in a nested state dict; of a tensor also what its buffer was made for."""
    if isinstance(tree, torch.Tensor):
        return {(path, tuple(tree.shape), tree.dtype, getattr(tree, "placements", None))}
    if isinstance(tree, dict | list | tuple):
        children = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {(path,)}.union(*(layout(child, f"{path}/{key}") for key, child in children))
    return {(path,)}


# %%
# Two details in ``save``:
#
# * **A changed state** (a layer frozen or added, a first save before the optimizer had any state)
#   does not fit the buffers. Other keys make torch raise ``CompanionMismatch``, which names neither
#   key nor way out; another dtype is converted in silence, float32 to the bfloat16 of its buffer.
#   So ``check_layout`` comes first, before anything is copied.
# * **Without an accelerator** torch refuses to make the cache, because there is nothing to pin it
#   for (``Cannot access accelerator device when none is available``, torch 2.13). Setting
#   ``state_dict_cache`` beforehand keeps all else as it is: the same buffers, the same reuse.
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
# because PyTorch's pinned allocator rounds each block up to a power of two
# (`pytorch#150517 <https://github.com/pytorch/pytorch/issues/150517>`__); scalars are not pinned.
# Exact without an accelerator; up to twice the shards' bytes with one. ``release()`` returns the
# blocks to PyTorch's pool of pinned memory, where the next pinned tensor of that size finds them.


def buffers(checkpoints: PinnedCheckpoints) -> list[torch.Tensor]:
    """The tensors that the writer keeps between saves, scalars left out."""
    held = leaves(checkpoints.writer.state_dict_cache or {}).values()
    return [t for t in held if isinstance(t, torch.Tensor) and t.dim() > 0]


# %%
# Run it, and prove it
# --------------------
# Three claims: every save went through the same buffers, pinned ones if there is an accelerator;
# every checkpoint gives back the bits of its step all the same; ``release`` leaves none alive.


def train_and_save(app: AppState, checkpoints: PinnedCheckpoints, device: torch.device) -> dict:
    """Train and save after every step; return the bits that each checkpoint must hold."""
    expected, addresses = {}, set()
    for _ in range(SAVES):
        train_step(app, device)
        expected[app.step] = snapshot(app)
        started = time.perf_counter()
        checkpoints.save(app)
        call_s = time.perf_counter() - started
        print(f"step {app.step}: save held training for {call_s * 1e3:.0f} ms")
        addresses.add(tuple(t.data_ptr() for t in buffers(checkpoints)))
    assert len(addresses) == 1, "a save made buffers of its own"
    checkpoints.wait()
    return expected


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
        checkpoints = PinnedCheckpoints(root)
        expected = train_and_save(app, checkpoints, device)
        for step, bits in expected.items():
            assert_same_bits(load_app(root / f"step{step}", device), bits)
        print(f"checkpoints of steps {list(expected)} loaded back, every bit equal")

        kept = buffers(checkpoints)
        pinned = all(t.is_pinned() for t in kept) if device.type != "cpu" else None
        assert pinned is not False, "the buffers are pageable"
        size = sum(t.numel() * t.element_size() for t in kept) / MB
        print(f"{size:.1f} MB stay allocated", "" if pinned else "(no accelerator: nothing pinned)")

        add_head(app, device)
        assert_change_is_refused(app, checkpoints)
        alive = [weakref.ref(t) for t in kept]
        del kept
        checkpoints.release()
        assert not any(ref() is not None for ref in alive), "release() left buffers allocated"
        expected = snapshot(app)
        checkpoints.save(app)
        checkpoints.close()
        train_step(app, device)
        dcp.load({"app": app}, checkpoint_id=root / f"step{expected['/step']}")
        assert_same_bits(app, expected)
        print(f"released; step {app.step}, with the new layer, saved and loaded back")
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
# The stall of a copy at the rate of the link. The dashed line, ``Bound``, is the state's bytes over
# that rate, measured in the same run beside training (the other columns: :doc:`async_save`).
#
# A stall can come out below the bound, for two reasons. A copy for which training stops has the
# link to itself; below the table is the link's rate alone. And after the pause the GPU runs the
# next step a little faster, which counts for the save.
#
# .. result-figure:: checkpoint_stall
#    :rows: async_save pinned
#    :where: step=long
#
# .. result-table:: checkpoint_stall
#    :rows: none async_save pinned
#    :where: step=long
#
# .. timeline:: checkpoint_stall async_save pinned
#
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built, with writes held where luck would decide.
#
# .. recipe-controls::
#
# When it is not worth it
# -----------------------
# * Page-locked memory is short: it cannot be swapped, and other ranks, the data loader and the
#   file cache need memory too.
# * Saves are rare: the memory is held all the time, the gain comes once a save.
# * Even a copy at link speed is too long a stop: :doc:`default_stager` and
#   :doc:`overlapped_stager` run it beside the next step.
#
# Known limits
# ------------
# * The cache holds one state. Saving two different objects through one writer fails like a changed
#   state does.
# * ``state_dict_cache`` is set here on machines without an accelerator only. Setting it on others,
#   to memory that is not pinned, gives up the gain in silence.
#
# Further reading
# ---------------
# * `FileSystemWriter
#   <https://docs.pytorch.org/docs/stable/distributed.checkpoint.html>`__: ``cache_staged_state_dict``
# * `pytorch#150517 <https://github.com/pytorch/pytorch/issues/150517>`__: pinned blocks are rounded
#   up to a power of two
