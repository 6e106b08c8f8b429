# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.1, checkpoint/default_stager.py
"""
Stage while the next step runs: ``DefaultStager``
=================================================

Move the staging copy off the training thread, with torch's own stager. The copy runs while the next
step's forward and backward compute, and only ``optimizer.step()`` waits for it. Used as published,
``DefaultStager`` can write the weights of the previous step. This file adds the missing ordering.

**Scope.** As in :doc:`async_save`: a state dict of plain tensors, DTensors, numbers and text, what is
no DTensor being the same on all ranks; everything else raises at the save. Until the copy has ended,
only optimizers of torch and forward change what was saved, and you name what forward changes.

**When not to bother:** you train on a CPU, which has no second engine to copy with. Or you have
PyTorch 2.11 or 2.12: they pin memory anew for each save, which takes longer than the copy. Or your
step is shorter than the copy: its end waits for the rest. :doc:`saves_beside_training` works
with all versions.

This is the loop:

.. literalinclude:: default_stager.py
   :pyobject: train

The file needs torch alone. Copy it, and take its first half: down to ``StagedCheckpoints``.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * staging and upload as two futures, and what each one tells you
      * how to order the copy after the optimizer step on the device, without stopping the host
      * how to protect buffers that forward changes

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks in a process group
      * page-locked host memory for one copy of each rank's shards; it is shared memory, so with a GPU
        ``/dev/shm`` must be as large (a container's is often 64 MB)

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

import argparse
import copy
import ctypes
import hashlib
import logging
import operator
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
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
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

LOG = logging.getLogger(__name__)
PATIENCE = timedelta(minutes=10)  # how long a rank that has written waits for the slowest one
REFUSED = "cannot be saved"
REUSE_CRASHES = "2.11" <= torch.__version__ < "2.13"

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
# and then return plain data. ``save`` puts the step there, which a checkpoint should hold anyway.


class NumberAfter:
    """A number; copying it makes the copying thread's current stream wait for ``event``."""

    def __init__(self, number: int, event: torch.Event, device: torch.device) -> None:
        self.number = number
        self.event = event
        self.device = device

    def __deepcopy__(self, memo: dict) -> int:
        torch.get_device_module(self.device).current_stream().wait_event(self.event)
        return self.number


# %%
# Clone what forward changes
# --------------------------
# The next forward begins at once, and changes buffers (BatchNorm's statistics, a token count)
# before they are copied. Waiting before ``optimizer.step()`` is too late for them. Buffers are
# small, so clone them on the compute stream, where the clone is already in order.
#
# They are found by their memory, not by their names: a state dict drops the prefixes of DDP and
# ``torch.compile``, and names a shared buffer twice.


def address_of(tensor: torch.Tensor) -> int:
    """Where this rank's part of ``tensor`` lies."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()


def with_clones(tree: object, addresses: set[int]) -> object:
    """Nested dicts and lists, with the tensors at ``addresses`` cloned."""
    if isinstance(tree, dict):
        return {key: with_clones(child, addresses) for key, child in tree.items()}
    if isinstance(tree, list):
        return [with_clones(child, addresses) for child in tree]
    if isinstance(tree, tuple):
        return tuple(with_clones(child, addresses) for child in tree)
    if isinstance(tree, torch.Tensor) and address_of(tree) in addresses:
        return tree.clone()
    return tree


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
    if device.type != "cpu":
        return DefaultStager(StagingOptions())
    options = StagingOptions(  # the others need an accelerator
        use_pinned_memory=False,
        use_shared_memory=False,
        use_async_staging=True,
        use_non_blocking_copy=False,
    )
    return DefaultStager(options)


class StagedCheckpoints:
    """Save with staging in the background, each time to ``root/step<N>``, one save at a time.

    All ranks construct it, call ``save`` at the same steps and leave its ``with`` block.

    Args:
        root: a directory that all ranks see.
        device: of this rank.
        changing: returns the tensors that forward changes: ``model.buffers``.
    """

    def __init__(
        self, root: Path, device: torch.device, changing: Callable[[], Iterable[torch.Tensor]]
    ) -> None:
        self.root = root
        self.device = device
        self.changing = changing
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.stager = new_stager(device)
        self.staged: Future | None = None
        self.hook = register_optimizer_step_pre_hook(lambda *_: self.wait_staged())
        self.upload: Future | None = None
        self.uploading = ""  # which checkpoint
        self.has_compared = False
        self.has_failed_alone = False

    def save(self, step: int, state: dict) -> None:
        """Begin to stage ``state``; it may change when :meth:`wait_staged` has returned.

        Waits for the save before it. If that one failed, logs its error.

        Args:
            step: how many steps have been taken. The checkpoint is named after it and holds it.
            state: what ``get_state_dict`` gives now, on this thread; of a ``Stateful`` object, what
                its ``state_dict()`` gives.

        Raises:
            TypeError: ``step`` is no whole number.
            ValueError: on every rank; the state cannot be saved, or ranks differ where they may
                not; or it has a key ``"step"``.
            RuntimeError: an earlier save could not be begun on this rank. End the job.
        """
        if self.has_failed_alone:
            raise RuntimeError("an earlier save failed on this rank alone: end the job")
        if "step" in state:
            raise ValueError("the key 'step' is taken: a checkpoint holds its step there")
        name = f"step{operator.index(step)}"
        self.end_last()
        self.compare(step, state)
        if REUSE_CRASHES:
            self.stager.close()
            self.stager = new_stager(self.device)
        addresses = {address_of(tensor) for tensor in self.changing()}
        cloned = with_clones(state, addresses)
        after_step = torch.get_device_module(self.device).Event()
        after_step.record()
        self.uploading = name
        directory = self.root / self.uploading
        try:
            response = dcp.async_save(
                {"step": NumberAfter(step, after_step, self.device)} | cloned,
                storage_writer=NamedWhenComplete(
                    directory, self.group.size(), per_thread_copy_ahead=0
                ),
                async_stager=self.stager,
                process_group=self.group,
            )
        except BaseException:
            self.has_failed_alone = True  # the others are in that save, and wait for this rank
            raise
        self.staged = response.staging_completion
        self.upload = response.upload_completion

    def wait_staged(self) -> None:
        """Return when the copy has ended, successfully or not, and the state may change."""
        if self.staged is not None:
            self.staged.exception()  # waits; if interrupted, the copy still runs
            self.staged = None

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
        """Wait as :meth:`wait` does, and give back stager, hook and process group."""
        self.hook.remove()
        try:
            self.wait()
        finally:
            self.stager.close()
            dist.destroy_process_group(self.group)

    def __enter__(self) -> "StagedCheckpoints":
        return self

    def __exit__(self, kind: type | None, *_) -> None:
        if kind is not None:
            self.end_last()  # a second error must not hide the one that leaves the block
        self.close()


# %%
# Run it, and prove it
# --------------------
# As in :doc:`async_save`, the checkpoint must hold what the state is when the loop asks for its
# next batch. A save that cannot be staged must report an error.

WIDTH = 512  # features
STEPS, SAVE_EVERY = 6, 2


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[torch.Tensor],
    root: Path,
    device: torch.device,
) -> None:
    with StagedCheckpoints(root, device, changing=model.buffers) as checkpoints:
        for step, batch in enumerate(batches, start=1):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % SAVE_EVERY == 0:
                of_model, of_optimizer = get_state_dict(model, optimizer)
                checkpoints.save(step, {"model": of_model, "optimizer": of_optimizer})


class SampleCounter(nn.Module):
    """Count the samples that all ranks have seen, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("samples", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.samples += x.shape[0] * dist.get_world_size()
        return x


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


def watched_batches(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, expected: dict
) -> Iterator[torch.Tensor]:
    """STEPS batches; store in ``expected`` what each checkpoint must hold, by step."""
    for step in range(STEPS):
        torch.manual_seed(1000 * step + dist.get_rank())
        yield torch.randn(64, WIDTH, device=device)
        if (step + 1) % SAVE_EVERY == 0:
            of_model, of_optimizer = get_state_dict(model, optimizer)
            expected[step + 1] = copy.deepcopy({"model": of_model, "optimizer": of_optimizer})


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


class Unstageable(str):
    """Text that cannot be copied."""

    def __deepcopy__(self, memo: dict) -> None:
        raise TypeError("cannot copy this text")


def assert_failed_staging_is_seen(root: Path, device: torch.device) -> None:
    checkpoints = StagedCheckpoints(root, device, changing=list)
    checkpoints.save(STEPS + 1, {"text": Unstageable("a")})
    checkpoints.wait_staged()
    try:
        checkpoints.close()
    except RuntimeError as error:
        print(error)
    else:
        raise AssertionError("a failed staging looked like success")


def main(directory: Path) -> None:
    device = start_rank()
    of_rank_0 = [directory]
    dist.broadcast_object_list(of_rank_0)  # a checkpoint is one directory for all ranks
    root = of_rank_0[0]
    torch.manual_seed(0)
    layers = nn.Sequential(SampleCounter(), nn.Linear(WIDTH, WIDTH), nn.GELU())
    model = fully_shard(layers.to(device))
    optimizer = torch.optim.AdamW(model.parameters())
    expected = {}
    train(model, optimizer, watched_batches(model, optimizer, device, expected), root, device)
    for step, state in expected.items():
        assert_right(root / f"step{step}", state)
    print(f"checkpoints of steps {list(expected)} loaded back, every bit equal")
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
# :doc:`saves_beside_training` tells its threads which device to use.
#
# Known limits
# ------------
# * The number that orders the copy comes first in the state dict. Whatever is copied before it is
#   not ordered.
# * Call ``wait_staged()`` before something but an optimizer writes saved tensors, such as an average
#   of the weights. Nothing tells you if you forget it.
# * The first save compares plain tensors, which makes the host wait for the device once.
# * A device-to-host read in mid-step waits for the whole copy, on the device: see
#   :doc:`saves_beside_training`. The limits of :doc:`async_save` hold here, too.
# * Parameters that forward changes (spectral norm, some quantizers) need the clone that buffers
#   get: ``changing`` returns them, too.
#
# Further reading
# ---------------
# * `torch.distributed.checkpoint.staging
#   <https://docs.pytorch.org/docs/stable/distributed.checkpoint.html>`__: ``DefaultStager``,
#   ``StagingOptions``
# * `The pull request that documented it <https://github.com/pytorch/tutorials/pull/3711>`__, and
#   why exit code 0 was not enough
