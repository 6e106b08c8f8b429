# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.1, checkpoint/resume_and_reshard.py
"""
Resume: the same run, on the same or another number of ranks
============================================================

Continue a run as if nothing had stopped it: the same losses and the same bits on the same number
of ranks, and the same state on any other number. Everything that decides the next step has to come
back: weights, optimizer, schedule, step, random numbers, and the position in the data. This recipe
saves and loads all of these, makes all ranks agree on the checkpoint, goes back to an older one if
you ask, and lists the differences when a checkpoint does not fit.

**When not to bother:** the result of your run does not depend on random numbers or on the order of
the samples. Then seed anew, start the data where you like, and load with ``load``.

.. code-block:: python

    from pathlib import Path

    from overlap_recipes.checkpoint import RetainedSaves, Run, resume

    run, root = Run(model, optimizer, schedule), Path("checkpoints")
    with RetainedSaves(root, device, model.buffers) as saves:  # first: one job per directory
        resume(run, root)  # on all ranks; begins at step 0 if there is no checkpoint yet
        # or: resume(run, root, step=40_000) goes back; newer ones are set aside, not deleted
        while run.step < steps:
            train_step(run)  # counts run.step, and run.samples of all ranks
            if run.step % 1000 == 0:
                saves.save({"run": run}, root / f"step{run.step}")

Your project needs the package ``overlap_recipes``: ``pip install .`` in this repository, or a copy
of its folder ``overlap_recipes``.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * which rank gets which state when the number of ranks changes
      * how all ranks agree on the newest complete checkpoint, and how a rollback lasts
      * how to load a part, or under other names, and read an error that lists the differences
      * what you trust when you load

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks in a process group (one rank, too)
      * checkpoints of :doc:`keep_verify_prune`

.. verification-badge::

The idea
--------

Each part of the state is of one of three kinds:

* **Sharded** (weights, optimizer). It is saved as DTensors, which DCP
  (``torch.distributed.checkpoint``) divides anew for any number of ranks.
* **Shared** (step, schedule, position in the data). It is equal on every rank. The position in the
  data counts the samples that *all* ranks have taken. On any number of ranks ``n``, rank ``r``
  continues with every ``n``-th sample from there on.
* **Of one rank** (random numbers). It is saved under the number of the rank. On the same number of
  ranks, each takes its own again, and the run continues bit by bit. On another number, no
  assignment is right: every rank seeds anew from the step and its number, and logs that it does.
"""

# %%
# Imports and sizes
# -----------------
# They are the proof's.

import argparse
import tempfile
from pathlib import Path

import _toys as basic
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from overlap_recipes.checkpoint.durable import DurableSaves, committed_steps, newest_step
from overlap_recipes.checkpoint.restart import Run, differences, load_weights, resume

WIDTH, SAMPLES_A_STEP = 64, 12  # features; samples of all ranks together, for 1 to 4 and 6 ranks
STEPS, INTERRUPTED_AT = 8, (2, 3, 5)
TOLERANCE = 1e-5  # of a loss, relative, on another number of ranks: sums in another order

# %%
# All that decides the next step
# ------------------------------
# A ``Run`` is a ``TrainingState`` that counts samples. ``load`` reads the checkpoint's own list first,
# and says on all ranks what differs before anything changes. The list says how many ranks there were.
#
# .. literalinclude:: /overlap_recipes/checkpoint/restart.py
#    :language: python
#    :pyobject: Run
#
# .. literalinclude:: /overlap_recipes/checkpoint/state/random_numbers.py
#    :language: python
#    :pyobject: RandomNumbers
#
# Which checkpoint
# ----------------
# Rank 0 chooses, and all ranks check. A rank that does not see what rank 0 sees (another mount, a
# stale cache of a network file system) must stop the job here, and not continue from another step.
#
# After a rollback, the next restart would choose the newer checkpoints again, and new saves would
# collide with them. So the rollback renames them, but only those that existed when it began to
# choose. A second job that somebody started by mistake must not rename what the first one saves
# meanwhile.
#
# .. literalinclude:: /overlap_recipes/checkpoint/restart.py
#    :language: python
#    :pyobject: choose
#
# .. literalinclude:: /overlap_recipes/checkpoint/restart.py
#    :language: python
#    :pyobject: refuse_unless_whole
#
# .. literalinclude:: /overlap_recipes/checkpoint/restart.py
#    :language: python
#    :pyobject: resume
#
# Load a part, load under other names, list the differences
# ---------------------------------------------------------
# ``dcp.load`` writes into the tensors that you give it, under the keys that you give it. So you
# load a part by asking for a part, and a renamed parameter by asking for it under its old name.
# ``differences`` lists what of a checkpoint does not fit such a part: ``dcp.load`` names one key and
# stops.
#
# .. literalinclude:: /overlap_recipes/checkpoint/restart.py
#    :language: python
#    :pyobject: differences
#
# .. literalinclude:: /overlap_recipes/checkpoint/restart.py
#    :language: python
#    :pyobject: load_weights
#
# What you trust: loading a checkpoint runs code. ``.metadata`` is a pickle, and so is every leaf
# that is not a tensor. Digests tell you that a file has not changed, not who wrote it.
#
# To load without running code, use safetensors. :doc:`export` converts a checkpoint where you trust
# it, and its ``load_export`` reads names, shapes and bytes alone. An export has the weights; the
# optimizer begins anew.
#
# Run it, and prove it
# --------------------
# The model's input gets noise, so that random numbers matter, and the learning rate changes every
# step. The proof interrupts a run three times and compares it with a run without interruptions. It
# loads a part under other names. Then it goes back to the first interruption with one rank less.


def build(device: torch.device) -> Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).to(device)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    torch.manual_seed(1 + dist.get_rank())
    return Run(model, optimizer, schedule)


def train_step(run: Run, device: torch.device, noise: float) -> float:
    """Take a step on the next samples of the sequence that all ranks share; return the mean loss."""
    ranks = dist.get_world_size()
    own = range(run.samples + dist.get_rank(), run.samples + SAMPLES_A_STEP, ranks)
    samples = [torch.sin(torch.arange(WIDTH) * (sample + 1.0)) for sample in own]
    batch = torch.stack(samples) + noise * torch.randn(len(samples), WIDTH)
    loss = run.model(batch.to(device)).square().mean()
    loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.schedule.step()
    run.step, run.samples = run.step + 1, run.samples + SAMPLES_A_STEP
    total = loss.detach()
    dist.all_reduce(total)
    return total.item() / ranks


def train(run: Run, root: Path, device: torch.device, until: int, noise: float) -> list[float]:
    """Train to step ``until`` and save there; return the losses."""
    with DurableSaves(device) as saves:
        losses = [train_step(run, device, noise) for _ in range(until - run.step)]
        saves.save({"run": run}, root / f"step{until}")
    return losses


def interrupted(root: Path, device: torch.device, noise: float) -> tuple[Run, list[float]]:
    """A run that is thrown away and resumed at each of ``INTERRUPTED_AT``."""
    losses = []
    for until in (*INTERRUPTED_AT, STEPS):
        run = build(device)
        resume(run, root)
        losses += train(run, root, device, until, noise)
    return run, losses


def prove_same_ranks(root: Path, device: torch.device) -> list[float]:
    """Compare runs with and without interruptions; return the losses of the run without noise."""
    for noise in (0.1, 0.0):
        whole = build(device)
        losses = train(whole, root / f"whole{noise}", device, STEPS, noise)
        resumed, again = interrupted(root / f"interrupted{noise}", device, noise)
        assert losses == again, "the losses differ"
        expected, found = basic.leaves(whole.state_dict()), basic.leaves(resumed.state_dict())
        assert expected.keys() == found.keys()
        assert all(basic.same_bits(found[path], leaf) for path, leaf in expected.items())
    print(f"interrupted at {INTERRUPTED_AT}: all {STEPS} losses and every bit as without")
    return losses


def prove_parts(root: Path, device: torch.device) -> None:
    directory = root / f"step{STEPS}"
    run = build(device)
    names = {f"input.{kind}": f"0.{kind}" for kind in ("weight", "bias")}
    renamed = nn.ModuleDict({"input": nn.Linear(WIDTH, WIDTH)}).to(device)
    load_weights(renamed, directory, names)
    resume(run, root)
    whole = run.model.state_dict()["0.weight"].full_tensor()
    assert basic.same_bits(renamed["input"].weight.detach(), whole)
    narrow = nn.Linear(WIDTH // 2, WIDTH)
    wrong = differences({"0.weight": narrow.weight, "9.bias": narrow.bias}, directory, "run.model.")
    print("\n".join(["what differs:", *wrong]))
    assert len(wrong) == 5


def prove_fewer_ranks(root: Path, device: torch.device, losses: list[float]) -> None:
    """Go back to the first interruption, on fewer ranks."""
    run = build(device)
    assert resume(run, root, step=INTERRUPTED_AT[0]) == INTERRUPTED_AT[0]
    again = train(run, root, device, STEPS, noise=0.0)
    expected = losses[INTERRUPTED_AT[0] :]
    assert all(abs(a - b) <= TOLERANCE * abs(b) for a, b in zip(again, expected, strict=True))
    print(f"on {dist.get_world_size()} ranks from step {INTERRUPTED_AT[0]}: losses as before")
    assert newest_step(root) == STEPS and committed_steps(root) == [STEPS, INTERRUPTED_AT[0]]


def main(directory: Path) -> None:
    device = basic.start_rank()
    rank, fewer = dist.get_rank(), max(dist.get_world_size() - 1, 1)
    try:
        root = basic.directory_of_rank_0(directory)
        losses = prove_same_ranks(root, device)
        prove_parts(root / "interrupted0.0", device)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    if rank < fewer:  # one rank does not come back
        store = dist.FileStore(str(root / "rendezvous"), fewer)
        dist.init_process_group(store=store, rank=rank, world_size=fewer)
        try:
            prove_fewer_ranks(root / "interrupted0.0", device, losses)
        finally:
            dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, help="where checkpoints go (default: temporary)")
    with tempfile.TemporaryDirectory() as temporary:
        main(parser.parse_args().dir or Path(temporary))

# %%
# What breaks if you remove a line
# --------------------------------
#
# .. recipe-controls::
#
# Known limits
# ------------
# * A load writes into the weights at once. In mid-run, call ``saves.wait()`` first. Otherwise a
#   save that is still copying gets a mixture.
# * Bits are equal on the same number of ranks of the same hardware with deterministic kernels.
#   Another number of ranks adds in another order: the state is equal after the load, and the
#   losses are close.
# * All ranks here share one sequence of samples. A shuffling loader saves its seed and position
#   instead. A loader with workers also saves what the workers have prefetched (``torchdata``'s
#   ``StatefulDataLoader``).
# * The random numbers are those of Python, NumPy and torch, of the host and of the rank's accelerator.
#   A generator of your own goes in ``TrainingState(..., per_rank={"noise": generator})``; on another
#   number of ranks its load raises.
