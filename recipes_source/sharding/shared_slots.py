# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, sharding/shared_slots.py
"""
A few slots for the full weights of many units
==============================================

Keep the full weights of any number of units in a few places of memory. A *unit* is a module that
``fully_shard`` was called with, and a model needs the full weights of two or three units at a time.
Here they lie in **slots**: memory that all ranks of a host can read. A gather is then one cast (to
the dtype of the compute), one barrier and the copies of the other ranks' shards: no buffer, no
copy-in, no copy-out. This page is how the memory is laid out. To have FSDP2 use it, take
:doc:`in_place_gather`.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * which units can lie in one place, and when they cannot
      * one barrier a gather, and why it is enough
      * how autograd finds weights that come and go

   .. grid-item-card:: What you need

      * PyTorch 2.11 or later; ranks on one host, each GPU with peer access to the others
      * the package ``overlap_recipes``: ``pip install .`` in this repository, or a copy of its
        folder ``overlap_recipes``

.. verification-badge::

The idea
--------

FSDP2 frees a unit's full weights after use and allocates them again. Memory that peers read is slow
to allocate, for all ranks must exchange its addresses. So it stays, and units take turns in it.

.. lanes:: Schematic, one rank, three slots. Each gather casts, passes its barrier and copies. Unit 3 lies where unit 0 lay.

   compute:  5-10 unit 0; 10-15 unit 1; 15-20 unit 2; 20-25 unit 3; 25-33 backward 3
   gather:   0-1 cast 0; 1-5 slot A ~; 5-6 cast 1; 6-10 slot B ~; 10-11 cast 2; 11-15 slot C ~; 15-16 cast 3; 16-20 slot A ~
   @1 1
   @6 2
   @11 3
   @16 4
"""

# %%
# Imports and sizes
# -----------------
# The sizes are the module's. The imports are the proof's, whose model and start of the ranks come
# from :doc:`peer_memory`.
#
# .. literalinclude:: /overlap_recipes/fsdp2/shared_slots.py
#    :language: python
#    :start-at: ALIGNMENT = 512
#    :end-at: SMALL = 1 << 18

from itertools import pairwise

import peer_memory
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from overlap_recipes.fsdp2.peer_memory import PeerMemory, param_groups, why_not
from overlap_recipes.fsdp2.shared_slots import Slots, outdated

# %%
# Whose slot is it?
# -----------------
# A unit's full weights lie where they did in the step before: autograd keeps views of them, and a
# view cannot be moved. A unit gets its slot when it is first gathered: one that is free and was
# last given away at least ``turns`` units ago, or else a new one. So neighbours never share, and a
# stack of equal blocks has ``turns`` slots. A unit that needs its weights from forward to the end
# of backward has one for itself.
#
# .. literalinclude:: /overlap_recipes/fsdp2/shared_slots.py
#    :language: python
#    :pyobject: Slot
#
# .. literalinclude:: /overlap_recipes/fsdp2/shared_slots.py
#    :language: python
#    :pyobject: dtype_of
#
# Laid out once, filled each time
# -------------------------------
# FSDP2 keeps each full weight as the shards of all ranks one after the other. A gather casts this
# rank's shards to their place, passes a barrier, and copies the others' shards from where they were
# cast to. Views are made once. A gather is one kernel for all casts, one ``copy_`` a weight and
# peer, and one kernel for all norms and biases. Each unit's views have a version counter of their
# own: when a unit moves to another slot, autograd refuses a backward that still has views of the
# old one.
#
# **One barrier is enough.** Others may still copy from a slot that a rank wants to fill again. But
# between its two gathers there was a gather into another slot, with its barrier. Each rank reaches
# that barrier only after its copies from the first slot. If there was no gather between, ``fill``
# adds a barrier.
#
# .. literalinclude:: /overlap_recipes/fsdp2/shared_slots.py
#    :language: python
#    :pyobject: Slots
#
# Changed since?
# --------------
# A slot that was filled ahead is outdated if the weights change, or move to other memory, before it
# is used. PyTorch counts the changes in place of each tensor. Most optimizers leave their own out,
# so a hook adds them (``counted``). A change by ``.data``, by ``torch._foreach_*`` over DTensors,
# by ``dcp.load`` into a state dict or by a collective is not counted. For those, up to 64 elements of
# each shard are compared where a unit is used; the device notes a difference, the host reads it later.
#
# .. literalinclude:: /overlap_recipes/fsdp2/shared_slots.py
#    :language: python
#    :pyobject: versions
#
# .. literalinclude:: /overlap_recipes/fsdp2/shared_slots.py
#    :language: python
#    :pyobject: outdated
#
# .. literalinclude:: /overlap_recipes/fsdp2/shared_slots.py
#    :language: python
#    :pyobject: Sample
#
# .. literalinclude:: /overlap_recipes/fsdp2/shared_slots.py
#    :language: python
#    :pyobject: storage_of
#
# .. literalinclude:: /overlap_recipes/fsdp2/shared_slots.py
#    :language: python
#    :pyobject: counted
#
# Ahead of their use
# ------------------
# Forward needs prefetch lists. Without them FSDP2 relies on the host running ahead, and a gather
# that waits for the compute stream would come too late. The lists are made from the order of the
# first forward. A unit lists the next ones, the first unit fewer: while it starts, the device waits
# for the host. In backward a unit lists the one before. An embedding's backward needs no weights,
# so an embedding is not gathered in backward.
#
# .. literalinclude:: /overlap_recipes/fsdp2/shared_slots.py
#    :language: python
#    :pyobject: set_lists
#
# .. literalinclude:: /overlap_recipes/fsdp2/shared_slots.py
#    :language: python
#    :pyobject: embeds
#
# Run it, and prove it
# --------------------
# Units filled from their slots have the bits of FSDP2's own gather, also when one is filled again
# at once with other weights. Neighbours lie in different slots.


def whole(sharded: torch.Tensor) -> torch.Tensor:
    """The shards of all ranks, one after the other, on the CPU."""
    shards = [None] * dist.get_world_size()
    dist.all_gather_object(shards, sharded.to_local().cpu())
    return torch.cat(shards)


def prove(device: torch.device) -> None:
    model = peer_memory.build(device, MixedPrecisionPolicy(torch.bfloat16))
    groups = param_groups(model)
    if reason := why_not(dist.group.WORLD, device):
        return print(f"nothing to read: {reason}")
    slots = Slots(PeerMemory(dist.group.WORLD, device), turns=3)
    for group in groups:
        slots.give(group)
    for group in groups * 3:
        expected = [whole(p.sharded_param.detach()) for p in group.fsdp_params]
        for more in (0, 1):  # the second time while others may still copy from the first
            for p in group.fsdp_params:
                p.sharded_param._local_tensor.add_(more)
            assert not more or outdated(group), "a change was not counted"
            slots.fill(group)
            for p, full in zip(group.fsdp_params, expected, strict=True):
                bits = (full + more).bfloat16().to(device)
                assert torch.equal(p._unsharded_param, bits), "not the bits of FSDP2's gather"
    assert all(a.slot is not b.slot for a, b in pairwise(groups)), "neighbours share a slot"
    assert len(slots.slots) == 3 < len(groups) == peer_memory.UNITS
    print(f"{len(groups)} units of {slots.memory.ranks} ranks in {len(slots.slots)} slots")


def main() -> None:
    peer_memory.run(prove)


if __name__ == "__main__":
    main()

# %%
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built. A missing barrier is a race between ranks:
# for those edits the ranks take turns in the worst order.
#
# .. recipe-controls::
#
# Memory
# ------
# On each rank, outside the allocator's statistics, for units of equal size:
#
# .. math::
#
#    \text{turns} \times \text{bytes of a full unit, in the dtype that is gathered}
#
# and a slot for each size that differs much: an embedding, a head. A slot may be twice as large as
# its unit, not more.
#
# When it is not worth it
# -----------------------
# * All units are needed at once: then each has a slot, and nothing is shared.
#
# Known limits
# ------------
# * A unit's full weights are another unit's afterwards. FSDP2 frees them instead, so that a reference
#   kept beyond ``reshard()`` is an error there; here it reads other numbers.
# * A forward that changes its full weights in place (an embedding's ``max_norm``, a clamp) is refused:
#   others may still copy them, and backward may read the changed ones.
# * An optimizer's step counts as a change of its weights (``counted``). So a backward that needs
#   weights as they were before the step is an error. Stock FSDP2 lets it pass, with most optimizers.
# * Private names of FSDP2: :doc:`peer_memory` lists them.
#
# Further reading
# ---------------
# * `Symmetric memory <https://docs.pytorch.org/docs/stable/symmetric_memory.html>`__ in PyTorch
# * `fully_shard <https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html>`__
