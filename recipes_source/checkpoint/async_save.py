"""
Save without stopping: ``async_save``
=====================================

``torch.distributed.checkpoint.async_save`` writes a sharded checkpoint while training goes on:
the training thread only copies the state to host memory, a background thread does the rest.
This recipe shows what it moves away, what it leaves on the training thread, and the five lines
without which it exits 0 with a checkpoint missing.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * what a save costs the training thread, and what runs beside it
      * a process group of its own, one save in flight, the last save awaited
      * errors that ``except Exception`` does not catch
      * the host memory it takes, as a formula and as observed

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks, CPU or GPU
      * a model sharded with ``fully_shard`` (FSDP2); DDP and plain modules work alike
      * host memory for one copy of each rank's shards

.. verification-badge::

The idea
--------

A synchronous save holds every rank until the last byte is written. An asynchronous one splits it:
*staging* copies each rank's shards to host memory, *upload* serialises and writes that copy.
After staging, the optimizer may change the weights again.

.. lanes:: Schematic. Only staging stops training; the upload runs beside the next steps.

   training:  0-4 step 1; 4-6 stage !; 6-10 step 2; 10-14 step 3; 14-18 step 4
   upload:    6-15 write checkpoint 1 ~
   @6 async_save returns
"""

# %%
# Imports and sizes
# -----------------
# Only torch and the standard library. The model is small so that the page runs anywhere; its
# Adam state makes the checkpoint three times the size of its parameters.

import argparse
import ctypes
import os
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

WIDTH, HIDDEN = 512, 8192  # features
BATCH = 64  # samples per rank and step
STEPS = 6
SAVE_EVERY = 2  # steps

# %%
# A rank, with or without torchrun
# --------------------------------
# ``init_process_group()`` without a backend takes gloo for CPU tensors and NCCL for CUDA tensors,
# whichever are built in. No port is fixed: torchrun passes one, and a single rank needs none.


def start_rank() -> torch.device:
    """Join the group that torchrun describes, or a group of one; return this rank's device."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device.index)
    if "RANK" in os.environ:
        dist.init_process_group()
    else:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    return device


def directory_of_rank_0(directory: Path) -> Path:
    """The directory that rank 0 was given: a checkpoint is one directory for all ranks."""
    agreed = [directory]
    dist.broadcast_object_list(agreed)
    return agreed[0]


# %%
# Something to train
# ------------------
# ``SampleCounter`` stands for every buffer that forward changes (BatchNorm's running statistics, a
# token count). All ranks agree on its value: DCP (``torch.distributed.checkpoint``) takes a plain
# tensor for replicated and keeps **one** rank's copy of it, so a buffer that differs between ranks
# would be lost in silence.


class SampleCounter(nn.Module):
    """Count the samples that all ranks have seen, in a buffer (int64 scalar)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("samples", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.samples += x.shape[0] * dist.get_world_size()
        return x


# %%
# The application state
# ---------------------
# DCP calls ``state_dict()`` on every ``Stateful`` it is given, always on the caller's thread.
# ``get_state_dict`` names parameters and optimizer state alike and returns each rank's shards as
# DTensors, which is why the checkpoint can be loaded on another number of ranks.
#
# An optimizer that has not stepped has no state, so ``get_state_dict`` makes it step once, with
# gradients and a learning rate of zero. Adam counts that step, and from then on corrects its
# moments for one step too many: saving would change the training. So the count is set back.
# (Torch 2.9 to 2.13, `issue 164929 <https://github.com/pytorch/pytorch/issues/164929>`_.)


class AppState(Stateful):
    """All that a restart needs: model, optimizer and the number of steps taken."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.step = 0

    def state_dict(self) -> dict:
        never_stepped = not self.optimizer.state
        model, optimizer = get_state_dict(self.model, self.optimizer)
        if never_stepped:
            for state in self.optimizer.state.values():
                if "step" in state:
                    state["step"].zero_()
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state_dict: dict) -> None:
        model, optim = state_dict["model"], state_dict["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optim)
        self.step = state_dict["step"]


def build_app(device: torch.device, seed: int = 0) -> AppState:
    """An MLP over (batch, WIDTH) float32, sharded over all ranks, and its AdamW; no step taken."""
    torch.manual_seed(seed)
    up, down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
    model = fully_shard(nn.Sequential(SampleCounter(), up, nn.GELU(), down).to(device))
    return AppState(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def forward_backward(app: AppState, device: torch.device) -> None:
    """Leave the gradients of one batch, which depends on the step and the rank alone."""
    torch.manual_seed(1000 * app.step + dist.get_rank())
    batch = torch.randn(BATCH, WIDTH, device=device)
    app.model(batch).square().mean().backward()


def train_step(app: AppState, device: torch.device) -> None:
    forward_backward(app, device)
    app.optimizer.step()
    app.optimizer.zero_grad()
    app.step += 1


# %%
# The save, with its five lines
# -----------------------------
# 1. **A group of its own.** The upload thread talks to the other ranks. If training uses the same
#    gloo group at the same time, their messages mix, and the ranks abort or hang.
# 2. **One save in flight.** Two would need two copies of the state in host memory, and uploads
#    that share a group, a writer or a stager damage each other without an error.
# 3. **A fresh directory a save.** Shards go straight to their final names; only ``.metadata``
#    comes last. Written in place, a failed save leaves old and new shards mixed, and they load.
# 4. **Errors wait in the future.** Nobody sees them until ``result()``, and then as a
#    ``CheckpointException``, which derives from ``BaseException``.
# 5. **The last save is awaited**, before the process group goes: ``close()``.


class AsyncCheckpoints:
    """Asynchronous saves of one application state, each to ``root/step<N>``, one at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.group = dist.new_group(backend="gloo")
        self.upload: Future | None = None

    def save(self, app: AppState) -> None:
        """Stage ``app`` on the calling thread and leave the writing to a thread.

        Raises:
            RuntimeError: the save before this one failed; this one has not begun.
        """
        self.wait()
        writer = FileSystemWriter(self.root / f"step{app.step}", overwrite=False)
        self.upload = dcp.async_save({"app": app}, storage_writer=writer, process_group=self.group)

    def wait(self) -> None:
        """Return when the save in flight is on disk.

        Raises:
            RuntimeError: the save failed, on this rank or another; earlier checkpoints are whole.
        """
        if self.upload is None:
            return
        self.upload.exception()  # waits; if that is interrupted, the save is still in flight
        upload, self.upload = self.upload, None
        try:
            upload.result()
        except CheckpointException as error:
            causes = {rank: cause for rank, (cause, _) in error.failures.items()}
            raise RuntimeError(f"checkpoint not written: {causes}") from error

    def close(self) -> None:
        self.wait()
        dist.destroy_process_group(self.group)


# %%
# What to compare
# ---------------
# A checkpoint is right when loading it gives back the very bits that were passed to ``save``, so
# the proof keeps a copy of every leaf of the state: weights, both Adam moments, the optimizer's
# step counts and settings, the buffer, the step.


def leaves(tree: object, path: str = "") -> dict[str, object]:
    """The leaves of a nested state dict by their path; of a DTensor, this rank's shard."""
    if isinstance(tree, dict):
        tree = tree.items()
    elif isinstance(tree, list):
        tree = enumerate(tree)
    else:
        return {path: tree.to_local() if isinstance(tree, DTensor) else tree}
    return {p: leaf for key, value in tree for p, leaf in leaves(value, f"{path}/{key}").items()}


def snapshot(app: AppState) -> dict[str, object]:
    """A copy of every leaf, for :func:`assert_same_bits`; its tensors take the state's bytes."""
    live = leaves(app.state_dict())
    return {p: leaf.detach().clone() if torch.is_tensor(leaf) else leaf for p, leaf in live.items()}


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


def load_app(directory: Path, device: torch.device) -> AppState:
    """A new application state, initialised with another seed, then loaded from ``directory``."""
    app = build_app(device, seed=1)
    dcp.load({"app": app}, checkpoint_id=directory)
    return app


# %%
# The memory it takes
# -------------------
# Staging keeps one copy of this rank's part of the state in host memory until the upload ends:
#
# .. math::
#
#    \text{host bytes per rank} = \sum_{t\,\in\,\text{state}} \text{numel}(\text{local shard of } t)
#    \times \text{bytes per element}
#
# For parameters and AdamW in float32 that is 12 bytes a parameter over the number of ranks, plus
# the replicated tensors, which every rank stages although only one writes them.


def staged_bytes(app: AppState) -> int:
    """Bytes that staging ``app`` takes in this rank's host memory."""
    tensors = [leaf for leaf in leaves(app.state_dict()).values() if isinstance(leaf, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)


def resident_bytes() -> int:
    """This process's resident set (Linux), bytes, without what the allocator keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


# %%
# Run it, and prove it
# --------------------
# First the training loop, and the proof: every checkpoint, the last one too, gives back the bits
# of its step in a newly built model.


def train_and_load_back(app: AppState, root: Path, device: torch.device) -> None:
    checkpoints = AsyncCheckpoints(root)
    expected = {}
    for _ in range(STEPS):
        train_step(app, device)
        if app.step % SAVE_EVERY == 0:
            expected[app.step] = snapshot(app)
            checkpoints.save(app)
    checkpoints.wait()
    for step, bits in expected.items():
        assert_same_bits(load_app(root / f"step{step}", device), bits)
    print(f"checkpoints of steps {list(expected)} loaded back, every bit equal")

    checkpoints.save(app)
    try:
        checkpoints.close()
    except RuntimeError as error:
        print(f"step {app.step} a second time: {error}")
    else:
        raise AssertionError("a checkpoint was overwritten")
    assert_same_bits(load_app(root / f"step{app.step}", device), expected[app.step])


# %%
# The last lines above save step 6 a second time, on purpose: the writer refuses to overwrite, the
# error arrives as an ordinary exception on every rank, and the checkpoint that was there is whole.
#
# Then both saves side by side. Times on a machine that does other things prove nothing, so they
# are printed, not asserted.


def compare_stall(app: AppState, root: Path, device: torch.device) -> None:
    """Print how long ``dcp.save`` and ``async_save`` each hold the training thread."""
    started = time.perf_counter()
    dcp.save({"app": app}, checkpoint_id=root / "synchronous")
    print(f"dcp.save held training for {(time.perf_counter() - started) * 1e3:.0f} ms")

    checkpoints = AsyncCheckpoints(root / "asynchronous")
    before = resident_bytes()
    started = time.perf_counter()
    checkpoints.save(app)
    call_s = time.perf_counter() - started
    grown = resident_bytes() - before
    checkpoints.close()
    on_disk_s = time.perf_counter() - started
    print(f"async_save held it for {call_s * 1e3:.0f} ms; on disk after {on_disk_s * 1e3:.0f} ms")
    print(f"staging took {grown / 1e6:.1f} MB, by the formula {staged_bytes(app) / 1e6:.1f} MB")


def main(directory: Path) -> None:
    device = start_rank()
    try:
        root = directory_of_rank_0(directory)
        app = build_app(device)
        train_and_load_back(app, root, device)
        compare_stall(app, root, device)
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
# For a large state on a GPU: the right order, and not yet the time. Every save here makes host
# memory anew, pageable, and copies the state into it. In the figure this alone stalls training for
# longer than ``dcp_save`` takes for everything; only the write runs beside training.
# :doc:`pinned_staging` changes the memory and nothing else, and comes down to the dashed line,
# ``Bound``: the bytes of the state over the rate of the link.
#
# ``Exposed stall`` is what one save adds to the time of training. ``Call`` is how long the call
# holds the training thread, the steps still queued on the GPU included. ``Staged after`` counts
# from the call, ``Uploaded after`` from the end of staging. ``none`` is training without a save;
# ``95 % from`` and ``to`` are explained in :doc:`overlapped_stager`.
#
# ``Step time during upload`` is against steps without a save. After a stall a GPU's clocks swing
# for some seconds and step times with them, so a change of a per cent or two, up or down, says
# nothing about the upload; a negative one is no speed-up.
#
# .. result-figure:: checkpoint_stall
#    :rows: dcp_save async_save
#
# .. result-table:: checkpoint_stall
#    :rows: none torch_save dcp_save async_save
#    :where: step=long
#
# .. timeline:: checkpoint_stall dcp_save async_save
#
# What breaks if you remove a line
# --------------------------------
# Each edit below was made and run when this page was built. Where luck would decide (a write that
# happens to end in time), the test holds the write, or crosses two collectives, until the damage
# is certain.
#
# .. recipe-controls::
#
# When it is not worth it
# -----------------------
# * The state is small or saves are rare: a synchronous save costs less than a second copy.
# * Host memory does not hold another copy of the shards of every rank on the node.
# * Staging itself is the problem: :doc:`pinned_staging` makes it fast, :doc:`default_stager` and
#   :doc:`overlapped_stager` move it beside the next step.
#
# Known limits
# ------------
# * A rank that dies during the upload fails it on the others too (``Connection closed by peer``);
#   the directory then has no ``.metadata`` and is no checkpoint. Delete it before you save that
#   step again.
# * An exception from ``save`` on one rank alone must end the job. If that rank saves again, DCP
#   pairs it with the others' earlier save and reports success for a checkpoint that does not load.
# * A rank that has written waits for the slowest one. After 30 minutes, gloo's timeout, the save
#   fails on it; where ranks can be that far apart, give ``new_group`` a longer ``timeout=``.
# * Several nodes need a file system that they share: all ranks write to one directory.
# * A parameter that no backward has reached yet has no optimizer state, so neither has the checkpoint;
#   the new job's optimizer has, and ``dcp.load`` ends with ``Missing key``. Freeze such a parameter
#   (``requires_grad=False``) on both sides, or save after each has had a gradient.
# * A DTensor without dimensions (a scale, replicated by hand) is not copied by torch 2.13's stagers:
#   what it holds at the time of the write is what is saved. :doc:`overlapped_stager` copies it.
# * ``FileSystemWriter(thread_count=2)`` or more loses the error of a writing thread: a full disk
#   looks like success (`pytorch#191391 <https://github.com/pytorch/pytorch/issues/191391>`__).
#   Keep the default of 1.
# * The directory itself is not flushed: after a power cut the last checkpoint may be gone.
# * ``resident_bytes`` calls ``malloc_trim``: this page runs on Linux with glibc. The class does not
#   need it.
#
# Further reading
# ---------------
# * `torch.distributed.checkpoint
#   <https://docs.pytorch.org/docs/stable/distributed.checkpoint.html>`__: the reference
# * `Asynchronous saving with DCP
#   <https://docs.pytorch.org/tutorials/recipes/distributed_async_checkpoint_recipe.html>`__: the
#   tutorial whose loops this recipe completes
