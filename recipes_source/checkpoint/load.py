# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, checkpoint/load.py
"""
Load at the rate of the storage
===============================

Restart sooner: several threads read a DCP checkpoint, and each piece is copied to the device while the
next is read. PyTorch's own reader takes one tensor after the other on one thread, so a restarting job
waits for one core of the CPU, not for the storage. The loaded bits are the same, on any number of ranks. If the save left digests, each byte is checked. The same threads start a sharded
model from a folder of the Hugging Face Hub.

.. index::
   single: load takes forever
   single: slow checkpoint load
   single: resume on fewer GPUs, or on more
   single: resume on another number of GPUs

.. result-gain:: restart
   :rows: resume dcp_load torch_load_mmap torch_checkpointing
   :field: load_s
   :where: storage=memory

**When not to bother:** you resume through ``CheckpointManager`` or one of the trainers' plugs: they
load like this already. Or your checkpoints are a few hundred megabytes.

.. code-block:: python

    import torch.distributed.checkpoint as dcp

    from overlap_recipes.checkpoint import Reader, TrainingState, load

    # A checkpoint of this library. If names or shapes differ, it lists them and changes nothing.
    # skip=["scheduler", "data"] leaves these two as they are.
    load({"app": TrainingState(model, optimizer)}, "checkpoints/step1000")

    # Its weights alone.
    weights = {"app": {"model": model.state_dict()}}
    dcp.load(weights, storage_reader=Reader("checkpoints/step1000"))

    # A checkpoint of dcp.save, on any number of ranks. To load an optimizer, too, take the
    # state of get_state_dict(model, optimizer), and call set_state_dict afterwards.
    tensors = {"model": model.state_dict()}
    dcp.load(tensors, storage_reader=Reader("pretrained"))

Your project needs the package ``overlap_recipes``: ``pip install .`` in this repository, or a copy
of its folder ``overlap_recipes``. It needs torch and NumPy.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * why a load is slower than the disk, and what makes it as fast
      * how bytes that have changed are found
      * what comes back on another number of ranks, and how a new run starts

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later on Linux, any number of ranks, CPU or GPU
      * a checkpoint in a directory
      * 128 MiB of page-locked memory a rank

.. verification-badge::

The idea
--------

A DCP file is a sequence of small archives, one for each tensor. In it, a plain tensor's bytes are
contiguous. So the needed bytes are known before the first read, and nothing is unpickled. Eight
threads then take pieces of 8 MiB. Each has two page-locked buffers. It reads a piece into one,
checks it, and queues its copies to the device. While these run, it reads into the other.

.. lanes:: Schematic, one of eight threads. A buffer is read into again when its copies have ended.

   read:        0-4 piece 1; 4.8-8.8 piece 2; 9.6-13.6 piece 3; 14.4-18.4 piece 4
   check:       4-4.8 ok; 8.8-9.6 ok; 13.6-14.4 ok; 18.4-19.2 ok
   to device:   4.8-7.3 buffer 1 ~; 9.6-12.1 buffer 2 ~; 14.4-16.9 buffer 1 ~; 19.2-21.7 buffer 2 ~
   @9.6 buffer 1 is free

Small tensors near each other are read at once, with the bytes between them. A shard for another
number of ranks is contiguous, too.
"""

# %%
# The job
# -------
# A stock Transformer, sharded, and its AdamW. Your model takes its place.

import argparse
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from overlap_recipes.checkpoint import (
    CheckpointManager,
    DamagedCheckpoint,
    Reader,
    TrainingState,
    load,
)
from overlap_recipes.ranks import start_rank

WIDTH, LENGTH, BATCH = 64, 8, 4  # features, tokens, sequences
STEPS = 3


class Job:
    """What a training script has."""

    def __init__(self, device: torch.device, seed: int, width: int = WIDTH) -> None:
        torch.manual_seed(seed)
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=96, batch_first=True)
        self.device = device
        self.model = nn.TransformerEncoder(layer, num_layers=2).to(device)
        for unit in (*self.model.layers, self.model):
            fully_shard(unit)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.state = TrainingState(self.model, self.optimizer)

    def step(self) -> None:
        tokens = torch.randn(BATCH, LENGTH, WIDTH, device=self.device)
        self.model(tokens).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def bits(self) -> list[torch.Tensor]:
        """Weights and moments, each whole, on every rank."""
        tensors = []
        for parameter in self.model.parameters():
            moments = self.optimizer.state[parameter]
            tensors.append(parameter.detach())
            tensors.extend(moments[name] for name in sorted(moments))
        whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
        return [tensor.cpu().clone() for tensor in whole]


def save_both(job: Job, root: Path) -> list[Path]:
    """Save by PyTorch and by the library; return the two directories."""
    for _ in range(STEPS):
        job.step()
    stock = root / "stock"
    dcp.save({"app": job.state}, checkpoint_id=stock)
    with CheckpointManager(root / "ours", job.state) as checkpoints:
        checkpoints.save(STEPS)
    return [stock, root / "ours" / f"step{STEPS}"]


# %%
# Read
# ----
# ``Reader`` is a storage reader of DCP. So DCP plans as always which rank needs which part of which
# tensor. The threads read plain, row-major tensors whose needed bytes are contiguous. PyTorch's own
# reader takes the rest, such as strided tensors and Python objects; their files are checked, too.
# The log says how many bytes each of the two has read.
#
# .. literalinclude:: /overlap_recipes/checkpoint/reader.py
#    :language: python
#    :pyobject: Reader.read_data
#
# Before a thread refills a buffer, it waits for the copies from it: the events ``self.copied``.
#
# .. literalinclude:: /overlap_recipes/checkpoint/reader.py
#    :language: python
#    :pyobject: Ring.take
#
# Two waits make it right on a device. The copies wait for the kernels that made the targets, and
# training waits for the copies.
#
# .. literalinclude:: /overlap_recipes/checkpoint/reader.py
#    :language: python
#    :pyobject: fill
#
# Check
# -----
# A save of ``CheckpointManager`` stores a CRC-32 of each MiB. A thread reads whole blocks, and
# compares each with its CRC-32 before the block is used. So a load reads no file twice, and a
# resume can choose a checkpoint without reading all of it.
#
# .. literalinclude:: /overlap_recipes/checkpoint/checked_files.py
#    :language: python
#    :pyobject: OpenFile.read_into
#
# .. literalinclude:: /overlap_recipes/checkpoint/checked_files.py
#    :language: python
#    :pyobject: Digests.check
#
# If a read fails on one rank, all ranks raise: a file is missing, short or changed, or the storage has
# given nothing for five minutes. The message names the file.
#
# ``load`` adds two things. First it compares names, shapes and dtypes, and if some differ, all ranks
# list them before anything has changed. Then it makes the optimizer's state. ``dcp.load`` only fills
# state that exists, and a new optimizer has none before its first step.
#
# Several ranks may hold the same tensors: all of them under DDP, each shard under HSDP. The storage is
# read once: each of these ranks reads a share, and broadcasts it.
#
# .. literalinclude:: /overlap_recipes/checkpoint/shared_reads.py
#    :language: python
#    :pyobject: SharedReads.send
#
# Run it, and prove it
# --------------------
# Both checkpoints are loaded into new jobs, once by PyTorch and once by the library: all bits must be
# equal. A model of another width must be refused, and stay as it is. In a copy, one bit of a file of
# the last rank is flipped: every rank must name that file. Then one rank leaves; the others form a new
# job, which must load the same bits.


def prove_as_pytorch(directory: Path, device: torch.device, saved: list[torch.Tensor]) -> None:
    job = Job(device, seed=1)
    job.step()  # PyTorch loads into a state that is there
    dcp.load({"app": job.state}, checkpoint_id=directory)
    assert_same(job.bits(), saved, f"{directory.name}, read by PyTorch")


def prove_by_threads(directory: Path, device: torch.device, saved: list[torch.Tensor]) -> None:
    job = Job(device, seed=2)
    reader = Reader(directory)
    load({"app": job.state}, reader)
    assert_same(job.bits(), saved, f"{directory.name}, read by threads")
    assert reader.read_bytes > reader.other_bytes, "threads have read little of it"
    ranks = dist.get_world_size()
    print(f"{directory.name}, {ranks} ranks: every bit, {reader.read_bytes} bytes by threads")


def assert_same(found: list[torch.Tensor], saved: list[torch.Tensor], what: str) -> None:
    for one, other in zip(found, saved, strict=True):
        assert torch.equal(one, other), f"{what}: other bits than were saved"


def prove_refused(directory: Path, device: torch.device) -> None:
    wider = Job(device, seed=1, width=2 * WIDTH)
    before = [parameter.full_tensor().clone() for parameter in wider.model.parameters()]
    try:
        load({"app": wider.state}, directory)
    except ValueError as error:
        first, *differing = str(error).splitlines()
        print(f"a wider job: {len(differing)} differ, such as {differing[0].strip()}")
    else:
        raise AssertionError("a job of another width was loaded")
    after = [parameter.full_tensor() for parameter in wider.model.parameters()]
    assert_same(after, before, "a job that was refused")


def prove_damage_is_named(directory: Path, device: torch.device) -> None:
    copy = directory.with_name("damaged")
    file = copy / f"__{dist.get_world_size() - 1}_0.distcp"
    if dist.get_rank() == 0:
        shutil.copytree(directory, copy)
        entries = dcp.FileSystemReader(copy).read_metadata().storage_data.values()
        in_file = [entry for entry in entries if entry.relative_path == file.name]
        longest = max(in_file, key=lambda entry: entry.length)
        content = bytearray(file.read_bytes())
        content[longest.offset + longest.length // 2] ^= 1  # in the bytes of a tensor
        file.write_bytes(content)
    dist.barrier()
    try:
        load({"app": Job(device, seed=1).state}, copy)
    except CheckpointException as error:
        failures = [failure for failure, _ in error.failures.values()]
    else:
        raise AssertionError("a flipped bit was loaded")
    assert all(isinstance(failure, DamagedCheckpoint) for failure in failures), failures
    assert file.name in str(failures[0]), failures
    print(f"a flipped bit: {failures[0]}")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(copy)


def main(directory: Path) -> None:
    device = start_rank()
    of_rank_0 = [directory]
    dist.broadcast_object_list(of_rank_0)  # a checkpoint is one directory for all ranks
    root = of_rank_0[0]
    job = Job(device, seed=0)
    directories = save_both(job, root)
    saved = job.bits()
    for directory in directories:
        prove_as_pytorch(directory, device, saved)
        prove_by_threads(directory, device, saved)
    prove_refused(directories[1], device)
    prove_damage_is_named(directories[1], device)

    rank = dist.get_rank()
    fewer = dist.get_world_size() - 1
    dist.barrier()
    dist.destroy_process_group()
    if rank < fewer:  # one rank does not come back
        store = dist.FileStore(str(root / "rendezvous"), fewer)
        dist.init_process_group(store=store, rank=rank, world_size=fewer)
        for directory in directories:
            prove_by_threads(directory, device, saved)
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, help="where checkpoints go (default: temporary)")
    with tempfile.TemporaryDirectory() as temporary:
        main(parser.parse_args().dir or Path(temporary))

# %%
# Resume, on the same or another number of ranks
# ----------------------------------------------
# ``checkpoints.resume()`` of :doc:`saves_beside_training` chooses the newest checkpoint that is whole on
# all ranks, and loads it like this. ``resume(step=40_000)`` goes back to that step, and sets newer
# checkpoints aside; it deletes none. On another number of ranks:
#
# * **sharded** state (weights, optimizer) is divided for the new number;
# * **shared** state (step, schedule) comes back on every rank;
# * state **of one rank** cannot be divided. Random numbers get a new seed from step and rank, and the log
#   says so. An object in ``per_rank=`` needs a method ``load_state_dicts``, which is given the states of
#   all ranks; without it, ``resume`` raises.
#
# On the same number of ranks every bit of the run is as without an interruption. On another, sums
# are added in another order: losses are close, not equal.
#
# Start from a folder of the Hub
# ------------------------------
# No rank ever holds the whole model. The model is made without memory and sharded; then each rank reads
# its own rows. The result equals that of ``from_pretrained`` bit by bit, also in buffers that no file has.
#
# .. code-block:: python
#
#     import torch
#     from torch.distributed.fsdp import fully_shard
#     from transformers import AutoConfig, AutoModelForCausalLM
#
#     from overlap_recipes.checkpoint.hub_folder import load_folder
#
#     config = AutoConfig.from_pretrained(folder)
#     with torch.device("meta"):  # shapes alone
#         model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
#     for layer in model.model.layers:
#         fully_shard(layer)
#     fully_shard(model)
#     load_folder(model, folder)  # memory, then this rank's rows of each tensor
#
# A job that resumes calls ``give_memory(model, device)`` of the same module instead of ``load_folder``;
# the weights are noise until ``resume``. ``from_config`` makes a model in training mode. Change the model
# (new tokens, adapters) after ``load_folder``.
#
# What it buys
# ------------
# A model with Adam's state, from memory (``/dev/shm``). *Plain read* is eight threads that read the
# same files. ``reader_digests`` and ``resume`` check every byte, with ``pip install zlib-ng``.
# ``torch_load_mmap`` maps a file of ``torch.save``, and ``torch_checkpointing`` reads what it has written:
#
# .. result-table:: restart
#    :rows: plain_read reader_digests resume torch_load_mmap torch_checkpointing dcp_load
#    :where: storage=memory
#
# Where every rank holds the whole model, as under DDP, ``each`` rank reads all of it, or it is read
# ``once_and_broadcast``:
#
# .. result-table:: restart
#    :rows: each once_and_broadcast
#    :where: storage=memory
#
# The same as the first table from a disk that is read cold:
#
# .. result-table:: restart
#    :rows: plain_read reader_digests resume dcp_load
#    :where: storage=disk
#
# What breaks if you remove a line
# --------------------------------
# Each edit of the library was made and run when this page was built. ``tests/checkpoint/test_reader.py``
# proves the orders on devices.
#
# .. recipe-controls::
#
# Memory
# ------
# 128 MiB of page-locked memory a rank during a load, 64 MiB without an accelerator. From a store,
# 384 and 256 MiB. The device needs nothing more, unless a folder has another dtype than the model:
# then 256 MiB and one tensor.
#
# Known limits
# ------------
# These can give you other numbers than you expect:
#
# * A checkpoint of ``dcp.save`` or of a trainer has no digests, and neither has a folder of the Hub. Only
#   the lengths of their files are compared; changed bytes are not found.
# * A load that fails halfway has changed a part of the state. Load another checkpoint, or end the
#   job.
# * A load writes directly into the weights. During a save, call ``checkpoints.wait()`` first.
# * Loading a checkpoint **runs code**: ``.metadata`` and what is no tensor are pickles. Digests say that a
#   file has not changed, not who wrote it. Safetensors have no code: :doc:`export`.
#
# These cost time, or raise:
#
# * With ``dcp.load`` and ``Reader``, every rank reads replicated weights. ``load`` reads 1 GiB or
#   more of them once, if the group can broadcast.
# * A tensor that is compressed, strided, or goes into another dtype is read by PyTorch's reader, on one thread.
#   The log says how much.
# * A folder whose tensors transformers transposes or joins when it loads is not supported. Nor is a buffer
#   that the model's initialisation does not fill, nor tied weights that differ.
#
# Further reading
# ---------------
# * :doc:`saves_beside_training`: what is saved, and what stays
# * `torch.distributed.checkpoint <https://docs.pytorch.org/docs/stable/distributed.checkpoint.html>`__
