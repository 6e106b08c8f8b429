"""
Asynchronous Saving with Distributed Checkpoint (DCP)
=====================================================

Checkpointing is often a bottleneck in the critical path of distributed training. With
``torch.distributed.checkpoint.async_save``, training stops only while the state is copied to host
memory. A thread writes that copy while the next steps run. With ``DefaultStager``, the copy runs
during training, too.

.. grid:: 2

    .. grid-item-card:: :octicon:`mortar-board;1em;` What you will learn
       :class-card: card-prerequisites

       * How to save asynchronously without losing the last checkpoint
       * Why a save needs a process group of its own
       * How to stage during training, and which two orderings that needs
       * How to check that a checkpoint holds the bits of its step

    .. grid-item-card:: :octicon:`list-unordered;1em;` Prerequisites
       :class-card: card-prerequisites

       * PyTorch 2.9 or later
       * `FullyShardedDataParallel <https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html>`__
       * `Getting Started with Distributed Checkpoint <https://docs.pytorch.org/tutorials/recipes/distributed_checkpoint_recipe.html>`__
       * No GPU, or two of them

"""

######################################################################
# The file runs as ``python distributed_async_checkpoint_recipe.py``. It then starts itself on two
# ranks; see the end. Nothing below needs ``torchrun`` to be called, and no port is fixed.

import copy
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

RANKS = 2
STEPS = 6
SAVE_EVERY = 2
REUSE_CRASHES = "2.11" <= torch.__version__ < "2.13"  # a DefaultStager works once there

######################################################################
# The state
# ---------
#
# ``async_save`` calls ``state_dict()`` of every ``Stateful`` object on the calling thread, so it
# sees the state of this moment. ``get_state_dict`` names optimizer state after its parameter and
# returns each rank's shards as DTensors. It makes an optimizer that has not stepped take a step of
# zero size first, which leaves marks in some optimizers: save behind the first step.


class AppState(Stateful):
    """The model, its optimizer, and how many steps have been taken."""

    def __init__(self, model, optimizer):
        self.model = model
        self.optimizer = optimizer
        self.step = 0

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"step": self.step, "model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict):
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        self.step = state_dict["step"]


def build_app(device, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8)).to(device)
    model = fully_shard(model)
    return AppState(model, torch.optim.AdamW(model.parameters(), lr=0.01))


def train_step(app, device):
    app.model(torch.rand(8, 16, device=device)).square().mean().backward()
    app.optimizer.step()
    app.optimizer.zero_grad()
    app.step += 1


######################################################################
# Saving asynchronously
# ---------------------
#
# Four lines decide whether the checkpoints are there, and right:
#
# * **A group of its own.** The thread that writes talks to the other ranks. If training uses the
#   same gloo group at that time, their messages mix, and the ranks abort or hang.
# * **One save at a time.** ``upload.result()`` before the next save: two saves need two copies of
#   the state in host memory, and two that share a stager or a writer overwrite each other's values
#   without an error.
# * **The step in the name** is the number of steps that the state has taken.
# * **The last save is awaited** before the process group is destroyed. A program that ends without
#   waiting exits with code 0 and leaves an empty directory.


def save_and_train(app, root, device):
    group = dist.new_group(backend="gloo")
    expected = {}
    upload = None
    while app.step < STEPS:
        train_step(app, device)
        if app.step % SAVE_EVERY == 0:
            if upload is not None:
                upload.result()
            directory = root / f"step{app.step}"
            upload = dcp.async_save({"app": app}, checkpoint_id=directory, process_group=group)
            expected[directory] = copy_of(app)
    if upload is not None:
        upload.result()
    dist.destroy_process_group(group)
    return expected


######################################################################
# Staging during training
# -----------------------
#
# ``DefaultStager`` copies on a thread and a stream of its own. ``async_save`` then returns two
# futures. Two orderings are yours to add:
#
# * **The copy comes behind the step.** The stager's stream waits for nothing: kernels of
#   ``optimizer.step()`` that are queued may run after the copy, which then takes the weights of the
#   step before. ``synchronize`` makes sure that they have run. It costs the host what is queued;
#   an event that the stager's stream waits for would cost nothing, but the stream is private.
# * **The next step comes behind the copy.** ``staging_completion`` is awaited before
#   ``optimizer.step()``. Forward and backward only read the weights, and run beside the copy.
#   A buffer that forward changes has to be cloned before the save.
#
# ``upload_completion`` alone tells whether the save has failed. Build the stager once: its pinned
# buffers make every staging but the first fast. Close it, or it keeps its thread and its memory.


def new_stager(device):
    if device.type != "cpu":
        return DefaultStager(StagingOptions())
    options = StagingOptions(  # the others need an accelerator
        use_pinned_memory=False,
        use_shared_memory=False,
        use_async_staging=True,
        use_non_blocking_copy=False,
    )
    return DefaultStager(options)


def stage_and_train(app, root, device):
    group = dist.new_group(backend="gloo")
    stager = new_stager(device)
    expected = {}
    response = None
    while app.step < STEPS:
        app.model(torch.rand(8, 16, device=device)).square().mean().backward()
        if response is not None:
            response.staging_completion.result()
        app.optimizer.step()
        app.optimizer.zero_grad()
        app.step += 1
        if app.step % SAVE_EVERY == 0:
            if response is not None:
                response.upload_completion.result()
            if REUSE_CRASHES:
                stager.close()
                stager = new_stager(device)
            if device.type != "cpu":
                torch.accelerator.synchronize()
            directory = root / f"step{app.step}"
            response = dcp.async_save(
                {"app": app}, checkpoint_id=directory, async_stager=stager, process_group=group
            )
            expected[directory] = copy_of(app)
    if response is not None:
        response.upload_completion.result()
    stager.close()
    dist.destroy_process_group(group)
    return expected


######################################################################
# Checking a checkpoint
# ---------------------
#
# An exit code of 0 does not prove that a checkpoint is there, and a checkpoint that loads may be
# of another step. So load it into a job that was built with another seed, and compare every bit.


def copy_of(app):
    return copy.deepcopy(app.state_dict())


def differing(found, expected, path="app"):
    """Paths of the leaves that differ in any bit."""
    if isinstance(expected, dict):
        keys = expected.keys()
    elif isinstance(expected, list):
        keys = range(len(expected))
    elif isinstance(expected, DTensor):
        return differing(found.to_local(), expected.to_local(), path)
    elif isinstance(expected, torch.Tensor):
        bits = [tensor.reshape(-1).view(torch.uint8) for tensor in (found, expected)]
        return [] if torch.equal(*bits) else [path]
    else:
        return [] if found == expected else [path]
    paths = []
    for key in keys:
        paths += differing(found[key], expected[key], f"{path}.{key}")
    return paths


def check(expected, device):
    for directory, state in expected.items():
        loaded = build_app(device, seed=1)
        dcp.load({"app": loaded}, checkpoint_id=directory)
        paths = differing(loaded.state_dict(), state)
        assert not paths, f"{directory.name} differs in {paths[:3]}"
        if dist.get_rank() == 0:
            print(f"{directory.parent.name}/{directory.name}: every bit loaded back", flush=True)


######################################################################
# Running on two ranks
# --------------------
#
# A rank gets its number from the launcher. Each of the two loops saves three checkpoints.


def run_rank(root):
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    torch.manual_seed(dist.get_rank())
    check(save_and_train(build_app(device, seed=0), root / "async_save", device), device)
    check(stage_and_train(build_app(device, seed=0), root / "default_stager", device), device)
    dist.barrier()
    dist.destroy_process_group()


######################################################################
# The launcher starts this file once for each rank, on a free port, and prints what they print. It
# uses ``sys.argv[0]``, since a gallery that runs the file does not define ``__file__``. Two ranks
# cannot share one GPU, so on a machine with a single one the run is left out, and says so.


def launch():
    gpus = torch.accelerator.device_count()
    if 0 < gpus < RANKS:
        print(f"Skipped: {RANKS} ranks need {RANKS} accelerators, or none; there is {gpus}.")
        return
    with tempfile.TemporaryDirectory() as root:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={RANKS}", sys.argv[0], root]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    if done.returncode != 0:
        raise RuntimeError(f"a rank failed; the launcher ended with code {done.returncode}")


if __name__ == "__main__":
    if "RANK" in os.environ:
        run_rank(Path(sys.argv[1]))
    else:
        launch()

######################################################################
# Conclusion
# ----------
#
# ``async_save`` takes storage out of the critical path, and ``DefaultStager`` the copy. A save
# needs a group of its own, one save in flight, an awaited last save, and with a stager two
# orderings. Load a checkpoint back before you rely on it.
#
# * `torch.distributed.checkpoint <https://docs.pytorch.org/docs/stable/distributed.checkpoint.html>`__
