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
      * ``peer_memory.py``, the recipe before

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

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

import peer_memory
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

ALIGNMENT, GRAIN = 512, 8 << 20  # bytes, of each weight in a slot and of a slot
SMALL = 1 << 18  # bytes: smaller shards go by one kernel instead of a copy each

# %%
# Whose slot is it?
# -----------------
# A unit's full weights lie where they did in the step before: autograd keeps views of them, and a
# view cannot be moved. A unit gets its slot when it is first gathered: one that is free and was
# last given away at least ``turns`` units ago, or else a new one. So neighbours never share, and a
# stack of equal blocks has ``turns`` slots. A unit that needs its weights from forward to the end
# of backward has one for itself.


@dataclass(eq=False)
class Slot:
    """Memory of full weights, by rank, for all units that share it."""

    of_ranks: list[torch.Tensor]  # bytes
    number: int  # of the unit that it was last given to
    group: object = None  # whose weights are in it
    in_forward: int = 0  # in which forward they were gathered
    exclusive: bool = False  # its unit keeps it until the end of backward
    stream: object = None  # where a unit last computed with it

    def busy(self) -> bool:
        group = self.group
        return group is not None and (group.is_unsharded or group._all_gather_result is not None)


def dtype_of(p) -> torch.dtype:
    """What a parameter is gathered in."""
    return p.param_dtype or p.orig_dtype


# %%
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


class Slots:
    """The slots of all units of one model."""

    def __init__(self, memory: peer_memory.PeerMemory, turns: int) -> None:
        self.memory, self.turns, self.given = memory, turns, 0
        self.slots: list[Slot] = []
        self.last: Slot | None = None  # of the last gather

    @torch.inference_mode(False)
    def give(self, group, exclusive: bool = False) -> None:
        """A slot for ``group``, and views of it; a new one is a slow collective."""
        if not hasattr(group.fsdp_params[0], "param_dtype"):
            group.lazy_init()  # once: it reads what is frozen, and reduces by that
        if getattr(group, "slot", None) is None:
            self.given += 1
        exclusive |= group.post_forward_mesh_info is None  # FSDP2 keeps it full over the forward
        parameters, rank, ranks = group.fsdp_params, self.memory.rank, self.memory.ranks
        nbytes = [p.padded_sharded_param_size.numel() * dtype_of(p).itemsize for p in parameters]
        places = [0, *accumulate(-(-ranks * n // ALIGNMENT) * ALIGNMENT for n in nbytes)]
        size = -(-places[-1] // GRAIN) * GRAIN
        fit = [
            slot
            for slot in self.slots
            if not (slot.busy() or slot.exclusive or exclusive)
            and self.given - slot.number >= self.turns
            and size <= slot.of_ranks[0].nbytes <= 2 * size
        ]
        if not fit:
            fit = [Slot(self.memory.empty([size], torch.uint8), 0, exclusive=exclusive)]
            self.slots.append(fit[0])
        group.slot = min(fit, key=lambda slot: slot.of_ranks[0].nbytes)
        group.slot.number, copies = self.given, []
        for p, n, place in zip(parameters, nbytes, places, strict=False):
            flat = [t.data[place:][: ranks * n].view(dtype_of(p)) for t in group.slot.of_ranks]
            rows = [t.data.view(ranks, -1) for t in flat]  # autograd does not see what fills it
            p.own = rows[rank][rank]
            for step in range(1, ranks):
                source = (rank + step) % ranks  # no two ranks read from one at a time
                copies.append((rows[rank][source], rows[source][source]))
            mine, p.sharded_param.is_gathered = flat[rank], True
            p.all_gather_outputs = [mine]
            p.init_unsharded_param()
            full = getattr(p._unsharded_param, "_local_tensor", p._unsharded_param)
            increment_version(full)  # a backward with views of where it was is an error
            full.data = mine.as_strided(full.size(), full.stride(), mine.storage_offset())
            p.free_unsharded_param = lambda: None  # its memory is the slot's
        small = [pair for pair in copies if pair[1].nbytes <= SMALL]
        group.large = [pair for pair in copies if pair[1].nbytes > SMALL]
        group.small = [list(tensors) for tensors in zip(*small, strict=True)]

    def make_room(self, group) -> None:
        """Have the slot for ``group``, or another one.

        Raises:
            RuntimeError: another unit is in it, and autograd knows where this one is.
        """
        other, in_backward = group.slot.group, torch._C._current_graph_task_id() != -1
        recomputed = group._training_state.name == "FORWARD" and in_backward
        if not other.is_unsharded:
            other.drop()
        elif recomputed or not group.in_graph:
            self.give(group, exclusive=True)
        else:
            names = [type(g.modules[0]).__name__ for g in (group, other)]
            raise RuntimeError(
                f"{' and '.join(names)}, which share a slot, are full at the same time. Behind an "
                "exception in a step: model.reset_iter_state() (PyTorch 2.13 on) and zero_grad(). Else "
                "gather_in_place with more `slots`, as many as there are units if you keep them full"
            )

    @torch.no_grad()
    def fill(self, group) -> None:
        """Queue the gather of a unit's full weights on the current stream."""
        if group.slot is self.last:
            self.memory.barrier()  # others may still copy from it
        group.filled_from = versions(group)
        pairs = [(p.own, p._sharded_param_data) for p in group.fsdp_params]
        casts = [(o, s) for o, s in pairs if o.dtype != s.dtype or o.nbytes <= SMALL]
        for own, shard in pairs:
            if own.dtype == shard.dtype and own.nbytes > SMALL:
                own.copy_(shard, non_blocking=True)  # on a copy engine
        if casts:
            torch._foreach_copy_(*map(list, zip(*casts, strict=True)))
        self.memory.barrier()
        for full, shard in group.large:
            full.copy_(shard, non_blocking=True)
        if group.small:
            torch._foreach_copy_(group.small[0], group.small[1])
        self.last, group.slot.group = group.slot, group


# %%
# Changed since?
# --------------
# A slot that was filled ahead is outdated if the weights change, or move to other memory, before it
# is used. PyTorch counts the changes in place of each tensor. Most optimizers leave their own out,
# so a hook adds them (``counted``). A change by ``.data``, by ``torch._foreach_*`` over DTensors,
# by ``dcp.load`` into a state dict or by a collective is not counted.


def versions(group) -> list:
    """Counts of the changes of a unit's shards, and the memory that they are in."""
    parameters = [p.sharded_param for p in group.fsdp_params]
    shards = [p._local_tensor for p in parameters]
    counts = [0 if t.is_inference() else t._version for t in parameters + shards]
    return counts + [StorageWeakRef(t.untyped_storage()) for t in shards]


def outdated(group) -> bool:
    """Whether a unit's weights were seen to change since it was filled."""
    return group.filled_from != versions(group)


def storage_of(tensor: torch.Tensor) -> int:
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata


@cache
def counted() -> weakref.WeakSet:
    """Units of any model of whose shards an optimizer's step counts as a change."""
    groups = weakref.WeakSet()

    @torch.compiler.disable
    def count(optimizer: torch.optim.Optimizer, *_) -> None:
        # A sparse one has no storage.
        held = [p for g in optimizer.param_groups for p in g["params"] if p.layout is torch.strided]
        known = [p for p in held if hasattr(p, "is_gathered")]
        if len(known) < len(held):  # others may be views of ours
            ours = {storage_of(p.sharded_param) for group in groups for p in group.fsdp_params}
            known = [p for p in held if storage_of(p) in ours]
        increment_version(known)

    register_optimizer_step_post_hook(count)  # for good: who removes it may do so in a step
    return groups


# %%
# Ahead of their use
# ------------------
# Forward needs prefetch lists. Without them FSDP2 relies on the host running ahead, and a gather
# that waits for the compute stream would come too late. The lists are made from the order of the
# first forward. A unit lists the next ones, the first unit fewer: while it starts, the device waits
# for the host. In backward a unit lists the one before. An embedding's backward needs no weights,
# so an embedding is not gathered in backward.


def set_lists(groups: Sequence, ahead: int, first: int) -> None:
    """Have each of ``groups``, in the order of forward, gather those next to it ahead of time."""
    order = list(dict.fromkeys(group.modules[0] for group in groups))
    for number, unit in enumerate(order):
        state = unit._get_fsdp_state()
        if not state._states_to_forward_prefetch:
            last = number + 1 + min(ahead, max(first, number))
            unit.set_modules_to_forward_prefetch(order[number + 1 : last])
        if not state._states_to_backward_prefetch:
            unit.set_modules_to_backward_prefetch([order[max(0, number - 1)]])


def embeds(group) -> bool:
    """Whether all modules that use a unit's weights look up rows of them, and nothing else."""
    infos = [p._module_info for p in group.fsdp_params]
    users = [m for i in infos for m in (i.module, *i.shared_modules)]
    forwards = [getattr(m.forward, "__func__", None) for m in (*group.modules, *users)]
    return all(forward is nn.Embedding.forward for forward in forwards)


# %%
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
    groups = peer_memory.param_groups(model)
    if reason := peer_memory.why_not(dist.group.WORLD, device):
        return print(f"nothing to read: {reason}")
    slots = Slots(peer_memory.PeerMemory(dist.group.WORLD, device), turns=3)
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
# * A forward that changes its full weights in place (an embedding's ``max_norm``, a clamp) is not for
#   slots: others may still copy them, and backward may read the changed ones, **without an error**.
# * An optimizer's step counts as a change of its weights (``counted``). So a backward that needs
#   weights as they were before the step is an error. Stock FSDP2 lets it pass, with most optimizers.
# * Private names of FSDP2: :doc:`peer_memory` lists them.
#
# Further reading
# ---------------
# * `Symmetric memory <https://docs.pytorch.org/docs/stable/symmetric_memory.html>`__ in PyTorch
# * `fully_shard <https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html>`__
