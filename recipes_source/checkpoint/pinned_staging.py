# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.1, checkpoint/pinned_staging.py
"""
Stage into pinned memory, kept between saves
============================================

Stop training for a copy at the rate of the link, and no longer. A writer with
``cache_staged_state_dict=True`` copies every checkpoint into the same page-locked ("pinned")
buffers. The first save allocates and pins them; each later one only copies.

**Scope.** As in :doc:`async_save`: a state dict of plain tensors, DTensors, numbers and text, what is
no DTensor being the same on all ranks. It keeps its keys, shapes and dtypes from save to save, so the
first save comes behind the first step. Everything else raises at the save.

**When not to bother:** you have no accelerator (nothing is pinned then), you save rarely (the
memory is held all the time), or page-locked memory is short: it cannot be swapped. If a copy at the
rate of the link still stops training for too long, :doc:`saves_beside_training` runs it beside the
next step.

This is the loop; ``checkpoints`` is a ``PinnedCheckpoints(root)``, used as a context manager:

.. literalinclude:: pinned_staging.py
   :pyobject: train_and_save

The file needs torch alone. Copy it, and take its first half: down to ``PinnedCheckpoints``.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * why the first save is slow and the others are not
      * what stays allocated between saves, and how to free it
      * what a state with other keys does to the cache, and what to do then

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks in a process group
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

import argparse
import copy
import ctypes
import hashlib
import logging
import operator
import os
import tempfile
import weakref
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

LOG = logging.getLogger(__name__)
PATIENCE = timedelta(minutes=10)  # how long a rank that has written waits for the slowest one
REFUSED = "cannot be saved"

# %%
# What every asynchronous save needs
# ----------------------------------
# A name for complete checkpoints alone, and a comparison of what DCP keeps one rank's copy of.
# :doc:`async_save` explains these four definitions.


class NamedWhenComplete(FileSystemWriter):
    """Write a checkpoint of ``ranks`` ranks; give it its name only when all have written it."""

    def __init__(self, directory: Path, ranks: int, **options) -> None:
        super().__init__(f"{directory}.incomplete", **options)
        self.ranks = ranks

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0, before any rank writes."""
        if len(plans) != self.ranks:
            raise RuntimeError(f"{len(plans)} of {self.ranks} ranks write {self.path.name}")
        return super().prepare_global_plan(plans)

    def finish(self, metadata: Metadata, results: list) -> None:
        """On rank 0, when all have written."""
        super().finish(metadata, results)
        self.path.rename(self.path.with_suffix(""))  # fails if there is a checkpoint of that name


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


def digest_of(tensor: torch.Tensor) -> str:
    """SHA-256 of its bytes in row-major order; waits for the device."""
    data = tensor.reshape(-1).view(torch.uint8).cpu()
    memory = (ctypes.c_char * data.nbytes).from_address(data.data_ptr())
    return hashlib.sha256(memory).hexdigest()


def fact_of(leaf: object, with_digest: bool) -> str:
    """What must be the same on all ranks; begins with REFUSED if DCP would not save it as it is."""
    if isinstance(leaf, int | float | str | None):
        return repr(leaf)
    if not isinstance(leaf, torch.Tensor):
        return f"{REFUSED}: a {type(leaf).__name__}"
    is_sharded = isinstance(leaf, DTensor)
    local = leaf.to_local() if is_sharded else leaf.detach()
    if type(local) is not torch.Tensor or local.layout != torch.strided:
        return f"{REFUSED}: a {type(local).__name__}, {local.layout}"
    if is_sharded and leaf.dim() == 0:
        return f"{REFUSED}: a DTensor without dimensions, which torch's stagers do not copy"
    fact = f"{leaf.dtype}, {tuple(leaf.shape)}"
    if with_digest and not is_sharded:
        fact += f", SHA-256 {digest_of(local)}"
    return fact


# %%
# One writer for all saves
# ------------------------
# The cache belongs to the writer (``state_dict_cache``), so the writer must outlive the save. A
# new writer per save would start without buffers each time. ``reset`` points the writer to the
# next directory.
#
# * **One save at a time.** There is one set of buffers, and the upload reads from it. A second save
#   would overwrite the values of the first one while they are being written.
# * **A changed state** does not fit the buffers. Examples are a frozen or added layer, and a first
#   save before the optimizer has any state. For other keys, torch raises ``CompanionMismatch``,
#   which names neither the key nor a way out. For another dtype it raises nothing: float32 values
#   are rounded into a bfloat16 buffer. So ``save`` compares layouts before anything is copied.
# * **Without an accelerator**, torch refuses to make the cache, because there is nothing to pin it
#   for (``Cannot access accelerator device when none is available``, torch 2.13). Setting
#   ``state_dict_cache`` beforehand gives the same buffers and the same reuse.


def layout_of(state: dict) -> dict[str, str]:
    """By path, what a buffer for this rank's part of each tensor must be."""
    layout = {}
    for path, leaf in leaves(state).items():
        local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
        layout[path] = ""
        if isinstance(local, torch.Tensor):
            layout[path] = f"{local.dtype}, {tuple(local.shape)}"
    return layout


class PinnedCheckpoints:
    """Save state dicts asynchronously through one set of pinned buffers, to ``root/step<N>``.

    All ranks construct it, call ``save`` at the same steps and leave its ``with`` block.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.writer = NamedWhenComplete(root, self.group.size(), cache_staged_state_dict=True)
        self.layout: dict[str, str] = {}  # of the buffers; empty: there are none
        self.upload: Future | None = None
        self.uploading = ""  # which checkpoint
        self.has_compared = False
        self.has_failed_alone = False

    def save(self, step: int, state: dict) -> None:
        """Stage ``state`` into the buffers of the first save and write it on another thread.

        Waits for the save before it. If that one failed, logs its error.

        Args:
            step: how many steps have been taken. The checkpoint is named after it.
            state: what ``get_state_dict`` gives now, on this thread; of a ``Stateful`` object, what
                its ``state_dict()`` gives.

        Raises:
            TypeError: ``step`` is no whole number.
            ValueError: on every rank; the state cannot be saved, or ranks differ where they may
                not; or it has another layout than the buffers.
            RuntimeError: an earlier save could not be staged on this rank. End the job.
        """
        if self.has_failed_alone:
            raise RuntimeError("an earlier save failed on this rank alone: end the job")
        name = f"step{operator.index(step)}"
        self.end_last()
        self.compare(step, state)
        layout = layout_of(state)
        if self.layout and layout != self.layout:
            changed = sorted(dict(layout.items() ^ self.layout.items()))
            raise ValueError(f"{changed[:2]} changed since buffers were made: call release() first")
        if not torch.accelerator.is_available() and not self.layout:
            self.writer.state_dict_cache = copy.deepcopy(state)
        self.layout = layout
        self.uploading = name
        self.writer.reset(self.root / f"{self.uploading}.incomplete")
        try:
            self.upload = dcp.async_save(
                state, storage_writer=self.writer, process_group=self.group
            )
        except BaseException:
            self.has_failed_alone = True  # the others are in that save, and wait for this rank
            raise

    def release(self) -> None:
        """Free the buffers; the next save allocates and pins new ones. All ranks call it."""
        self.end_last()
        self.writer.state_dict_cache = None
        self.layout = {}

    def compare(self, step: int, state: dict) -> None:
        """Raise on every rank unless all save this step, and agree where DCP keeps one copy."""
        mine = {"step": repr(step)}
        for path, leaf in leaves(state).items():
            mine[path] = fact_of(leaf, with_digest=not self.has_compared)
        of_ranks = [mine] * self.group.size()
        dist.all_gather_object(of_ranks, mine, group=self.group)
        problems = []
        for rank, theirs in enumerate(of_ranks):
            for path in sorted(of_ranks[0].keys() | theirs.keys()):
                fact = theirs.get(path, "not there")
                if fact != of_ranks[0].get(path) or fact.startswith(REFUSED):
                    problems.append(f"rank {rank}, {path}: {fact}")
        if problems:
            raise ValueError(f"not saved, {len(problems)} problems: {problems[:3]}")
        self.has_compared = True

    def wait(self) -> None:
        """Return when the save in flight is on disk.

        Raises:
            RuntimeError: it failed, on this rank or another; other checkpoints are complete.
        """
        if self.upload is None:
            return
        error = self.upload.exception()  # waits; if interrupted, the save is still in flight
        self.upload = None
        if error is not None:
            failures = getattr(error, "failures", {})  # of a CheckpointException, by rank
            causes = {rank: cause for rank, (cause, _) in failures.items()}
            raise RuntimeError(f"{self.uploading} is not saved: {causes or error!r}") from error

    def end_last(self) -> None:
        """Wait for the save in flight, and log its error: training goes on without it."""
        try:
            self.wait()
        except RuntimeError as error:
            LOG.error("%s", error)

    def close(self) -> None:
        """Wait as :meth:`wait` does, and destroy the process group."""
        try:
            self.wait()
        finally:
            dist.destroy_process_group(self.group)

    def __enter__(self) -> "PinnedCheckpoints":
        return self

    def __exit__(self, kind: type | None, *_) -> None:
        if kind is not None:
            self.end_last()  # a second error must not hide the one that leaves the block
        self.close()


# %%
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


@torch.no_grad()  # so that to_local() gives the buffer itself, not a view of it
def buffers(checkpoints: PinnedCheckpoints) -> list[torch.Tensor]:
    """The tensors that the writer keeps between saves, scalars left out."""
    held = []
    for leaf in leaves(checkpoints.writer.state_dict_cache or {}).values():
        local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
        if isinstance(local, torch.Tensor) and local.dim() > 0:
            held.append(local)
    return held


# %%
# Run it, and prove it
# --------------------
# The proof asserts three things. Every save went through the same buffers, pinned ones if there is
# an accelerator. Every checkpoint still gives back the bits of its step. ``release`` leaves no
# buffer alive, and a state of another layout is refused until it was called.

WIDTH = 512  # features
STEPS = 3


def train_and_save(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    checkpoints: PinnedCheckpoints,
    device: torch.device,
) -> None:
    for step in range(1, STEPS + 1):
        torch.manual_seed(1000 * step + dist.get_rank())
        model(torch.randn(64, WIDTH, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        of_model, of_optimizer = get_state_dict(model, optimizer)
        checkpoints.save(step, {"model": of_model, "optimizer": of_optimizer})


class Watched(PinnedCheckpoints):
    """Record what each checkpoint must hold, and where the buffers of each save lie."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.expected: dict[int, dict] = {}
        self.addresses: set[tuple] = set()

    def save(self, step: int, state: dict) -> None:
        self.expected[step] = copy.deepcopy(state)
        super().save(step, state)
        self.addresses.add(tuple(t.data_ptr() for t in buffers(self)))


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


def same_bits(a: object, b: object) -> bool:
    if isinstance(a, DTensor):
        return same_bits(a.to_local(), b.to_local())
    if isinstance(a, torch.Tensor):  # as bytes: 0.0 and -0.0 are equal numbers
        return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    return a == b


def assert_right(directory: Path, expected: dict) -> None:
    """Raise AssertionError unless the checkpoint holds every bit of ``expected``."""
    loaded = copy.deepcopy(expected)
    for leaf in leaves(loaded).values():
        if isinstance(leaf, torch.Tensor):
            leaf.fill_(7)
    dcp.load(loaded, checkpoint_id=directory)
    found = leaves(loaded)
    differing = [
        path for path, leaf in leaves(expected).items() if not same_bits(found[path], leaf)
    ]
    assert not differing, f"{directory.name}: {differing[:3]} of {len(differing)} differ"


def prove_release(checkpoints: PinnedCheckpoints, device: torch.device) -> None:
    alive = [weakref.ref(tensor) for tensor in buffers(checkpoints)]
    other = {"weight": torch.ones(4, device=device)}
    try:
        checkpoints.save(STEPS + 1, other)
    except ValueError as error:
        print(f"refused: {error}")
    else:
        raise AssertionError("a state with other keys was saved through the old buffers")
    checkpoints.release()
    assert not any(ref() is not None for ref in alive), "release() left buffers allocated"
    checkpoints.save(STEPS + 1, other)


def main(directory: Path) -> None:
    device = start_rank()
    of_rank_0 = [directory]
    dist.broadcast_object_list(of_rank_0)  # a checkpoint is one directory for all ranks
    root = of_rank_0[0]
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()).to(device))
    optimizer = torch.optim.AdamW(model.parameters())
    with Watched(root) as checkpoints:
        train_and_save(model, optimizer, checkpoints, device)
        checkpoints.wait()
        for step, state in checkpoints.expected.items():
            assert_right(root / f"step{step}", state)
        print(f"checkpoints of steps {list(checkpoints.expected)}: every bit equal")
        assert len(checkpoints.addresses) == 1, "a save made buffers of its own"
        pageable = [tensor for tensor in buffers(checkpoints) if not tensor.is_pinned()]
        assert device.type == "cpu" or not pageable, "pageable buffers"
        del pageable
        prove_release(checkpoints, device)
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
# Each save after the first one stalls training for one copy at the rate of the link. ``async_save``
# is the save of :doc:`async_save`. ``overlapped_writer``, that of :doc:`saves_beside_training`, copies
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
# * A value that is neither tensor, number, text, list, tuple nor dict (a dtype, a set) raises at
#   the call. The limits of :doc:`async_save` hold here, too.
# * This file sets ``state_dict_cache`` only on machines without an accelerator. If you set it on
#   others, to memory that is not pinned, you lose the gain without an error.
#
# Further reading
# ---------------
# * `FileSystemWriter <https://docs.pytorch.org/docs/stable/distributed.checkpoint.html>`__:
#   ``cache_staged_state_dict``
# * `pytorch#150517 <https://github.com/pytorch/pytorch/issues/150517>`__: pinned blocks are
#   rounded up to a power of two
