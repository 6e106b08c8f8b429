# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, sharding/peer_schedule.py
"""
A schedule of one's own, by peer copies
=======================================

Shard a model without FSDP2, and move its weights and gradients by copies between the ranks. The
schedule is that of :doc:`prefetch_schedule`, which uses collectives. Here copy engines move the
data; the compute cores only cast and add. Float32 weights are gathered in bfloat16, and any program
may change weights in place between two steps.

**When not to bother:** your model is sharded by FSDP2. :doc:`in_place_gather` does the same for it
with one call.

.. code-block:: python

   from peer_schedule import PeerContext  # and the files it imports, beside it

   context = PeerContext(model, model.blocks, mesh, dtype=torch.bfloat16)
   optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
   context.backward(loss_of(model, batch))  # in place of loss.backward()

This page is for training code without FSDP2, and for readers who want to see the whole.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * one cast and one barrier per unit and pass, in place of one per gather
      * why backward gathers without a barrier
      * sums in the weights' own dtype of what travelled in bfloat16

   .. grid-item-card:: What you need

      * PyTorch 2.11 or later; ranks on one host, each GPU with peer access to the others
      * ``prefetch_schedule.py``, ``stream_context.py`` and ``sharded_parameter.py`` beside it
      * for the peers' memory the package ``overlap_recipes``: ``pip install .`` in this repository,
        or a copy of its folder ``overlap_recipes``

.. verification-badge::

The idea
--------

Each rank keeps its rows of each weight twice: the parameter, which the optimizer updates, and a
copy in the dtype that is gathered, in memory that peers read. A forward casts a unit's rows into
the copy, passes a barrier and copies the others' rows. Backward copies the same rows again: they
still lie there.

.. lanes:: Schematic, one rank. Forward casts and passes a barrier; backward only copies.

   compute:  6-12 forward 0; 12-18 forward 1; 18-27 backward 1; 27-36 backward 0
   gather:   0-1 cast 0; 1-5 copy 0 ~; 6-7 cast 1; 7-11 copy 1 ~; 19-23 copy 0 ~
   reduce:   27-30 push 1 ~; 31-32 sum; 36-39 push 0 ~; 40-42 sum
   @1 1
   @7 2
   @30 3
   @39 4
"""

# %%
# Imports
# -------

from collections.abc import Iterable
from itertools import accumulate

import prefetch_schedule
import torch
import torch.distributed as dist
from prefetch_schedule import PrefetchContext, Unit, rows
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from overlap_recipes.fsdp2 import peer_memory

ALIGNMENT = 512  # bytes, of each parameter's place

# %%
# The context
# -----------
# ``fill`` casts when a unit is first gathered in a pass. So it sees every change of weights in
# place since the last pass: by an optimizer, a load, an average swapped in. A parameter that is
# replaced, or gets other memory, is an error: ``check`` of :doc:`stream_context` raises. Before the
# first cast of a pass stands one more barrier: for their last backward, the others may still copy
# what the cast overwrites.
#
# ``push`` stands in for the reduce-scatter. A slot has a row for each rank, so that no two write to
# one place. A rank that writes to a slot for the second time has passed the barrier of the gradient
# between; every other rank has reached that one, too, and so has queued before it the sum that read
# the slot. The sum is made in the weight's own dtype, whatever travelled.


class PeerContext(PrefetchContext):
    """A :class:`PrefetchContext` that gathers and reduces by copies between ranks.

    Args:
        dtype: of gathered weights and their gradients; None: the parameters' own.
        options: as for :class:`PrefetchContext`.

    Raises:
        ValueError: the ranks cannot read each other's memory, or there are several dtypes; the
            message says which.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Iterable[nn.Module],
        mesh: DeviceMesh,
        dtype: torch.dtype | None = None,
        **options,
    ) -> None:
        self.published: set[Unit] = set()  # whose copies are those of this pass
        parameter, group = next(root.parameters()), mesh.get_group()
        if any(p.dtype != parameter.dtype for p in root.parameters()):
            raise ValueError("parameters of several dtypes: sums would be rounded to one of them")
        reason = peer_memory.why_not(group, parameter.device)
        if reason and mesh.size() > 1:
            raise ValueError(f"no copies between ranks: {reason}")
        self.memory = peer_memory.PeerMemory(group, parameter.device)  # of the gathers' stream
        self.pushes = peer_memory.PeerMemory(group, parameter.device)  # of the reductions'
        options |= {
            "gather": rows.all_gather,
            "reduce_scatter": self.push,
        }  # the first is not called
        super().__init__(root, units, mesh, dtype=dtype, **options)
        self.sum_dtype, dtype = parameter.dtype, dtype or parameter.dtype
        parameters = [p for unit in self.units for p in unit.parameters]
        grain = ALIGNMENT // dtype.itemsize
        places = [0, *accumulate(-(-p.shard.numel() // grain) * grain for p in parameters)]
        whole = self.memory.empty([places[-1]], dtype)
        self.copies = {  # by parameter and rank
            p: [t[place : place + p.shard.numel()] for t in whole]
            for p, place in zip(parameters, places, strict=False)
        }
        largest = max(p.shard.numel() for p in parameters)
        self.slots = [self.pushes.empty([mesh.size(), largest], dtype) for _ in range(2)]
        self.pushed = 0

    def release_all(self) -> None:
        super().release_all()
        self.published.clear()  # behind backward, an evaluation, or before a forward

    @torch.no_grad()
    def fill(self, unit: Unit) -> None:
        rank, ranks = self.memory.rank, self.memory.ranks
        if unit not in self.published and unit.parameters:
            if not self.published:
                self.memory.barrier()  # others may still copy what is cast anew
            own = [self.copies[p][rank] for p in unit.parameters]
            torch._foreach_copy_(own, [p.shard.view(-1) for p in unit.parameters])
            self.memory.barrier()
            self.published.add(unit)
        for p in unit.parameters:
            p.buffer.untyped_storage().resize_(p.nbytes)
            parts = p.buffer.view(ranks, -1)
            for step in range(ranks):
                source = (rank + step) % ranks  # no two ranks read from one at a time
                parts[source].copy_(self.copies[p][source], non_blocking=True)

    def push(self, total: torch.Tensor, gradient: torch.Tensor) -> None:
        """Queue the sum over ranks of this rank's part of ``gradient``, into ``total``."""
        rank, ranks = self.pushes.rank, self.pushes.ranks
        parts, total = gradient.view(ranks, -1), total.view(-1)
        slot = [t[:, : len(total)] for t in self.slots[self.pushed % 2]]
        self.pushed += 1
        for step in range(1, ranks):
            owner = (rank + step) % ranks
            slot[owner][rank].copy_(parts[owner], non_blocking=True)
        self.pushes.barrier()
        total.copy_(parts[rank])
        for source in range(ranks):
            if source != rank:
                total.add_(slot[rank][source])


# %%
# Run it, and prove it
# --------------------
# In float32 the weights must be those of the unsharded run, whatever order the blocks run in: every
# bit on one and two ranks. In bfloat16 gathers must have the bits of the collective. A load between
# two forwards must be seen, and a replaced parameter must be an error.


def prove_rows(model: rows.Stack, reference: rows.Stack) -> None:
    """This rank's rows are those of the unsharded weights."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tolerance = {"rtol": 0, "atol": 0} if ranks <= 2 else {"rtol": 1e-4, "atol": 1e-5}
    for p, whole in zip(model.parameters(), reference.parameters(), strict=True):
        count = -(-len(whole) // ranks)
        mine = whole.detach()[rank * count :][:count]
        torch.testing.assert_close(p.to_local().detach(), mine, **tolerance)


def prove(shuffled: bool, device: torch.device) -> PeerContext:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model, reference = rows.Stack(device, shuffled), rows.Stack(device, shuffled)
    context = PeerContext(model, model.blocks, mesh)
    rows.train(model, context.backward)
    rows.train(reference)
    prove_rows(model, reference)
    gathers = prefetch_schedule.PASSES * (2 * rows.BLOCKS - prefetch_schedule.BUFFERS + 1)
    assert shuffled or context.gathers == gathers, "not the schedule of the recipe before"
    print(f"{context.gathers} gathers by copies, {context.pushed} gradients by pushes")
    return context


def alone(model: rows.Stack, context: PrefetchContext, batch: torch.Tensor) -> list[torch.Tensor]:
    """What one block returns by itself, twice, with other weights each time."""
    found = []
    for _ in range(2):
        for p in model.blocks[0].parameters():
            p.to_local().detach().mul_(0.5)
        context.release_all()
        context.gather_stream.wait_stream(context.compute_stream)
        with torch.no_grad():
            found.append(model.blocks[0](batch))
    return found


def prove_changes(device: torch.device) -> None:
    """A load between two forwards is seen; a parameter that was replaced or moved is an error."""
    mesh, half = init_device_mesh(device.type, (dist.get_world_size(),)), torch.bfloat16
    models = [rows.Stack(device).requires_grad_(True) for _ in range(2)]
    contexts = [
        PeerContext(models[0], models[0].blocks, mesh, dtype=half),
        PrefetchContext(models[1], models[1].blocks, mesh, dtype=half, gather=rows.all_gather),
    ]
    batch = torch.randn(rows.BATCH, rows.WIDTH, device=device).to(half)
    for change in (1.0, 0.75):
        found = []
        for model, context in zip(models, contexts, strict=True):
            model.load_state_dict({k: v * change for k, v in model.state_dict().items()})
            output = model(batch, 0)
            found.append(output.detach())
            context.backward(output.float().square().mean())
        assert torch.equal(*found), "not the bits of a gather by the collective"
    for p, of_collective in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(
            p.grad.to_local(), of_collective.grad.to_local(), rtol=0.1, atol=1e-2
        )
    found = [alone(*pair, batch) for pair in zip(models, contexts, strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), "gathered while cast anew"
    for model in models:
        model.load_state_dict(
            model.state_dict() | {"norm.weight": model.norm.weight + 1}, assign=True
        )
        try:
            model(batch, 0)
        except RuntimeError as error:
            assert "replaced" in str(error)
        else:
            raise AssertionError("a replaced parameter was not noticed")


def main() -> None:
    device = rows.start_rank()
    try:
        for shuffled in (False, True):
            prove(shuffled, device)
        prove_changes(device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

# %%
# What it buys
# ------------
# On a synthetic stack of matrices in bfloat16. ``prefetch_copy_engine`` is this page:
#
# .. result-table:: fsdp_overlap
#    :rows: no_communication fsdp2 fsdp2_in_place prefetch_copy_engine
#    :where: model=synthetic loop=free
#
# It is ahead of ``fsdp2`` and behind ``fsdp2_in_place``, which is FSDP2 with :doc:`in_place_gather`
# and :doc:`in_place_reduce`. Float32 weights under this schedule have not been measured. An earlier
# version kept the parameters themselves in memory that peers read, and so cast and copied nothing
# before a gather: faster, for bfloat16 weights alone. ``prefetch`` is the same schedule with
# collectives. In this table ``prefetch_copy_engine`` is that earlier version:
#
# .. result-table:: fsdp_overlap
#    :rows: no_communication fsdp2 prefetch prefetch_copy_engine
#    :where: model=synthetic loop=–
#
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built. A missing barrier is a race between ranks:
# for those edits the ranks take turns in the worst order.
#
# .. recipe-controls::
#
# Memory
# ------
# On each of :math:`N` ranks, beside the memory of :doc:`prefetch_schedule` and outside the
# allocator's statistics:
#
# .. math::
#
#    \frac{P \, b}{N} \;+\; 2 \max_{p} \text{bytes}(p)
#
# for :math:`P` parameters gathered in :math:`b` bytes.
#
# When it is not worth it
# -----------------------
# * The model is sharded by FSDP2: :doc:`in_place_gather`.
# * Ranks are on several hosts, or cannot read each other's memory: the context says so and raises.
# * Many small parameters: each gradient costs a barrier.
#
# Known limits
# ------------
# * Those of :doc:`prefetch_schedule`: units that return one tensor, inputs in the gathered dtype,
#   the same units in the same order on every rank.
# * Weights that change between a forward and its backward are not seen by the backward, unless
#   another forward has run in between.
# * Parameters have one dtype. Several are an error. So are ``loss.backward()`` in place of
#   ``context.backward``, and ``requires_grad_`` after the context was made.
# * A copy of the model (``deepcopy``, ``AveragedModel``) has no context and fails: average in
#   place.
#
# Further reading
# ---------------
# * `Symmetric memory <https://docs.pytorch.org/docs/stable/symmetric_memory.html>`__ in PyTorch
