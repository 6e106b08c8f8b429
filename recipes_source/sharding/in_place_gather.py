# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, sharding/in_place_gather.py
"""
FSDP2 without copies around its gathers
=======================================

One call, and a ``fully_shard`` model of any kind gathers its weights by copies from the other GPUs,
straight to where they are used. On one and two ranks every bit is that of stock FSDP2.

.. result-gain:: fsdp_overlap
   :rows: fsdp2_in_place fsdp2
   :field: efficiency
   :where: model=llama-8b-blocks loop=reads compiled=no reduce_dtype=float32 activation_checkpointing=no tokens=4096

``fsdp2`` is stock FSDP2, without the two calls below; 100 % is a run that sends nothing.

**When not to bother:** your ranks are on several hosts; or communication costs you little (compare
``fsdp2`` with ``no_communication`` below, at your tokens).

.. code-block:: python

   from in_place_gather import gather_in_place  # peer_memory.py, shared_slots.py beside it
   from in_place_reduce import reduce_in_place  # the next recipe: the same for gradients

   for layer in model.layers:
       fully_shard(layer)  # as before; each module that it is called with is a unit
   fully_shard(model)
   gather_in_place(model)
   reduce_in_place(model)

Stock FSDP2 casts a unit's shards, copies them into a buffer, gathers with a kernel that takes
compute cores (SMs), and copies the result out, twice per unit and step. Here one cast per gather is
left, and copies by the GPU's copy engines, which take no cores.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * what FSDP2 calls when it gathers, and what has to stand there
      * what may be kept from a forward to its backward, and what not
      * memory that is refilled while another stream may still read it

   .. grid-item-card:: What you need

      * PyTorch 2.11 or later; ranks on one host, each GPU with peer access to the others
      * ``peer_memory.py`` and ``shared_slots.py``, the recipes before

.. verification-badge::

The idea
--------

A gather writes full weights. If they lie where peers can read, each rank casts its own shards to
their place in the full weights, and copies the others' shards from their places. Your parameters
stay where they are and are read at each gather: between two steps a load, an EMA swapped in or a
second optimizer needs no hook. One thing is kept: what the last units of a training forward
gathered, for the backward that follows at once.

Such memory is slow to set up, so units share it: a few **slots** serve any number of equal blocks.

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

from collections.abc import Sequence
from types import SimpleNamespace

import peer_memory
import shared_slots
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.utils._pytree import tree_leaves

BATCH, STEPS = 8, 4  # samples per rank and step

# %%
# One stream of gathers
# ---------------------
# :doc:`shared_slots` has the memory: who lies where, and how a slot is filled. Here is when.
#
# A slot may still be read by the compute that used it last, so the gathers' stream waits for all
# that the current one and that of its last unit have queued. A unit whose slot is in use is not
# prefetched: it is gathered on demand.
#
# The last units of a forward are the first of its backward. They are not gathered again, unless
# another unit has taken their slot or another forward, an evaluation say, has begun.


class Gathers(shared_slots.Slots):
    """The slots of all units of one model, and the stream of their gathers."""

    def __init__(self, groups: Sequence, ahead: int, slots: int) -> None:
        shards, device = groups[0].mesh_info.shard_process_group, groups[0].device
        super().__init__(peer_memory.PeerMemory(shards, device), max(slots, ahead + 1, 2))
        self.groups, self.ahead, self.streams = groups, ahead, torch.get_device_module(device)
        self.stream = self.streams.Stream()
        self.gathers = self.forwards = 0
        self.in_forward = self.with_graph = self.begun = False
        self.order: list | None = []  # of the groups, in the first forward
        self.first: list = []  # of them, those that each forward begins with

    def begin_next_forward(self) -> None:
        """Queue the next forward's first gathers; call it when no weight changes before that."""
        self.drop()
        self.begun = True
        for group in (*self.first, *(self.first[0].then if self.first else ())):
            group.unshard()

    @torch.compiler.disable
    def begin_forward(self, *_) -> None:
        if not self.begun:
            self.drop()
        self.begun = False
        self.in_forward, self.with_graph = True, torch.is_grad_enabled()
        self.forwards += 1  # what an earlier one has left is not kept
        for group in self.first:  # they are on their way while the host gets to the first unit
            group.unshard()

    @torch.compiler.disable
    def end_forward(self, *_) -> None:
        self.in_forward = self.with_graph = False
        self.drop()
        if self.order:  # of the first forward
            groups, self.order = list(dict.fromkeys(self.order)), None
            short = groups[0].embeds  # an embedding: its kernels are queued first
            self.first = groups[: min(self.ahead, 2 - short)]
            groups[0].then = groups[1 : 1 + min(self.ahead, 2)] if short else []
            if self.ahead:
                shared_slots.set_lists(groups, self.ahead, first=1 - short)

    def drop(self) -> None:
        for group in self.groups:
            group.drop()

    def gather(self, group) -> None:
        """Queue the gather of a unit's full weights after all that the current stream does."""
        backward = group._training_state.name == "PRE_BACKWARD"
        if backward and torch.is_grad_enabled() and group.reshard_after_backward:
            raise RuntimeError("create_graph needs set_reshard_after_backward(False)")
        if group.slot is None:
            if backward:
                raise RuntimeError("a forward came before gather_in_place: call it between steps")
            self.give(group)
        slot, current = group.slot, self.streams.current_stream()
        kept = slot.group is group and slot.in_forward == self.forwards > 0 and backward
        if kept and not shared_slots.outdated(group):
            event = current.record_event()  # nothing has taken its place since the forward
        else:
            self.stream.wait_stream(current)  # which may still compute with what the slot has
            if slot.stream and slot.stream != current:  # an evaluation's, or a branch's
                self.stream.wait_stream(slot.stream)
            if hasattr(group.comm_ctx, "all_gather_stream"):
                self.stream.wait_stream(group.comm_ctx.all_gather_stream)
            with self.streams.stream(self.stream):
                self.fill(group)
                event = self.stream.record_event()
            self.gathers += 1
        slot.in_forward = self.forwards if self.with_graph and not backward else 0
        group._all_gather_result = SimpleNamespace(all_gather_event=event, all_gather_work=None)


# %%
# What FSDP2 calls
# ----------------
# FSDP2's order of calls (:doc:`peer_memory` has them) and its settings stay its own.
#
# A unit that was gathered ahead and did not run (an evaluation that leaves early) must not be found
# later with outdated weights: what is under way is dropped when a forward begins and ends.
#
# A unit whose inputs have no gradient, an encoder's first say, is full until the end of backward:
# it shares its slot with none.


class InPlaceGather:
    """Methods of an FSDP2 group of parameters, in place of its own."""

    _all_gather_comm = peer_memory.settled("_all_gather_comm")
    slot: shared_slots.Slot | None = None
    in_graph = False  # a backward may come that has views of the slot
    refused = False  # a prefetch found the slot in use, or came for a unit that has none
    then: Sequence = ()  # groups to gather when its forward is queued

    def unshard(self, async_op: bool = False) -> None:
        if not self.all.in_forward and torch._C._current_graph_task_id() == -1:
            self.drop()  # between steps: weights may have changed since
        backward = self._training_state.name == "PRE_BACKWARD"
        if backward and self.embeds or self._all_gather_result is not None or self.is_unsharded:
            return
        self.refused = self.slot.busy() if self.slot else backward
        if not self.refused:
            self.all.gather(self)

    def wait_for_unshard(self) -> None:
        if self.refused or (self._all_gather_result and shared_slots.outdated(self)):
            self.drop()
            if self.slot and self.slot.busy():
                self.all.make_room(self)
            self.all.gather(self)
        if current := self.copied():
            self.slot.stream = current
            self._to_unsharded()
        self.in_graph |= self._training_state.name == "FORWARD" and torch.is_grad_enabled()

    def pre_forward(self, module, args, kwargs):
        if self.all.in_forward and self.all.order is not None:
            self.all.order.append(self)
        graph = torch.is_grad_enabled() and not self.embeds and not self.in_graph
        trains = graph and self.is_sharded and not (self.slot and self.slot.exclusive)
        if trains and not any(getattr(t, "requires_grad", 0) for t in tree_leaves((args, kwargs))):
            self.drop()
            self.all.give(self, exclusive=True)  # full until the end of backward
        return super().pre_forward(module, args, kwargs)

    def post_forward(self, *arguments):
        output = super().post_forward(*arguments)
        for group in self.then if self.all.in_forward else ():
            group.unshard()
        return output

    def finalize_backward(self) -> None:
        self.drop()
        self.in_graph = False
        if self.slot:
            self.slot.in_forward = 0
        super().finalize_backward()

    def drop(self) -> None:
        """Forget what was gathered and not used."""
        self.copied()
        self.refused = False

    def copied(self):
        """The current stream, which now waits for the gather under way; None if there was none."""
        result, self._all_gather_result = self._all_gather_result, None
        current = result and self.all.streams.current_stream()
        if current:
            current.wait_event(result.all_gather_event)
        return current


# %%
# One call
# --------
# When a loop has read its loss, the device waits for the host. So each forward begins by queueing
# the gathers of its first two units. If your loop changes no weights between the update and the
# next forward, say so, and these gathers run while it reads (row ``fsdp2_in_place_begun``):
#
# .. code-block:: python
#
#    optimizer.step()
#    gathers.begin_next_forward()  # from here to the forward, weights stay as they are
#    print(loss.item())


def gather_in_place(model: FSDPModule, ahead: int = 2, slots: int = 4) -> Gathers | None:
    """Have every unit of ``model`` gather by peer copies, from its next forward on. Collective.

    Args:
        model: the module that the training loop calls.
        ahead: units that forward gathers before they are needed; 0 leaves FSDP2's own settings.
        slots: that equal units take turns in, at least ``ahead + 1``; the more, the fewer gathers
            in backward.

    Returns:
        The slots; None, after a warning that says why, if FSDP2 gathers as before.

    Raises:
        RuntimeError: nothing is sharded, or this PyTorch's FSDP2 is another one.
    """
    if not (chosen := peer_memory.copying_groups(model)):
        return None
    gathers = Gathers(chosen, ahead, slots)
    peer_memory.become(chosen, InPlaceGather)
    for group in chosen:
        group.all, group.embeds = gathers, shared_slots.embeds(group)
    shared_slots.counted().update(chosen)
    model.register_forward_pre_hook(gathers.begin_forward, prepend=True)
    model.register_forward_hook(gathers.end_forward, always_call=True)
    return gathers


# %%
# Run it, and prove it
# --------------------
# After each step the proof calls two blocks alone, so that others are gathered in vain, changes the
# weights in a way that nothing knows of, and evaluates. Every loss and every final weight must have
# the bits of stock FSDP2. ``tests/data/in_place_training.py`` does the same with dozens of
# programs: tied weights, LoRA, torchtitan's grouping, accumulation, activation checkpointing, HSDP,
# compiled models, EMA swapped in, loads in six ways, optimizers in backward.


def train(model: FSDPModule, device: torch.device, gathers=None) -> list[torch.Tensor]:
    """Train, and change weights in ways no optimizer knows of; all losses and final weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    shards, found = [p.to_local().data for p in model.parameters()], []  # changes go uncounted
    for number in range(STEPS):
        if number == 1:  # more units ahead than there are slots
            model[0].set_modules_to_forward_prefetch(list(model)[1:])
        torch.manual_seed(1000 * number + dist.get_rank())
        batch = torch.randn(BATCH, peer_memory.WIDTH, device=device)
        found.append((model(batch) - batch).square().mean())
        found[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(model[-1](model[1](batch)).square().mean())  # others are gathered in vain
            for shard in shards:
                shard.mul_(0.75)  # as a load or a swapped average would
            found.append(model(batch).square().mean())
        if gathers is not None:
            gathers.begin_next_forward()
    return [t.detach() for t in found] + shards


def prove(device: torch.device) -> None:
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
        expected = train(peer_memory.build(device, policy), device)
        model = peer_memory.build(device, policy, stock=False)
        gathers = gather_in_place(model, slots=3)
        found = train(model, device, gathers)
        assert peer_memory.same(found, expected), "not the bits of stock FSDP2"
        if gathers is not None:
            assert gathers.gathers > STEPS * peer_memory.UNITS, "FSDP2 gathered by itself"
            print(f"{gathers.gathers} gathers into {len(gathers.slots)} slots")


def main() -> None:
    peer_memory.run(prove)


if __name__ == "__main__":
    main()

# %%
# What it buys
# ------------
# Stock blocks of Llama 3 8B, float32 weights, bfloat16 gathers and float32 reductions;
# ``fsdp2_in_place`` reduces in place as well (:doc:`in_place_reduce`). ``no_communication`` sends,
# gathers and copies nothing; ``fsdp2_no_collectives`` is stock FSDP2 whose collectives are copies
# on the device.
#
# .. result-figure:: fsdp_overlap
#    :rows: no_communication fsdp2_no_collectives fsdp2 fsdp2_tuned fsdp2_in_place
#    :where: model=llama-8b-blocks loop=reads compiled=no reduce_dtype=float32 activation_checkpointing=no
#
# .. result-table:: fsdp_overlap
#    :rows: no_communication fsdp2_no_collectives fsdp2 fsdp2_tuned fsdp2_in_place fsdp2_in_place_begun fsdp2_in_place_kept megatron-fsdp
#    :where: model=llama-8b-blocks loop=reads compiled=no reduce_dtype=float32 activation_checkpointing=no
#
# ``fsdp2_in_place_kept`` begins forwards early, too, with ten ``slots`` for twelve blocks: most
# units are still full in backward.
#
# With each block compiled:
#
# .. result-table:: fsdp_overlap
#    :rows: no_communication fsdp2 fsdp2_in_place
#    :where: model=llama-8b-blocks compiled=yes
#
# **When do copy engines pay?** On two GPUs every interval (:doc:`/guide/measured`) of the speed
# against stock FSDP2 is above 100 %. Below 4,096 tokens the host sets the pace. Above, the more
# tokens, the less there is to gain. ``fsdp2_tuned`` and ``megatron-fsdp`` ran on another host.
# There, in few pairs of windows, ``megatron-fsdp`` (no clipping, bfloat16 gradients) was ahead of
# in place at 2,048 tokens, whose row is newer here, and behind it at 8,192. :doc:`/guide/results`
# also has loops that read nothing, other reductions and recomputation.
#
# **What changes with four GPUs?** Three quarters of each weight come from peers instead of half,
# and each rank adds four parts. Against stock FSDP2 the gain is about that of two GPUs from 4,096
# tokens on; at 2,048 little is left. Those rows have four pairs: approximate. Eight GPUs: not
# measured.
#
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built. A missing barrier is a race between ranks:
# for those edits the ranks take turns in the worst order. A missing wait between streams changes
# nothing on a CPU; a recorder of stream order reports it.
#
# .. recipe-controls::
#
# Memory
# ------
# The slots, each as large as a full unit (:doc:`shared_slots`). FSDP2's buffers, as large as a unit
# each, are gone, and so are full weights in the allocator. Units that you keep over the turn-around
# (``unit.set_reshard_after_forward(False)``, the root) have a slot each.
#
# When it is not worth it
# -----------------------
# * One rank, several hosts, GPUs that cannot read each other: a warning says which, and FSDP2
#   gathers as before. With HSDP it is the ranks of the sharding dimension that must share a host.
# * PyTorch 2.13 or later with a recent NCCL: ``FSDPModule.set_symm_mem_for_comm()`` with NCCL's
#   zero-CTA policy gathers by copy engines too. The copies around the gather stay.
#
# Known limits
# ------------
# * Pass the module that your loop calls. Its parts may be called too; they gather on demand.
# * ``unshard(async_op=True)`` before a forward gains nothing: that unit is gathered anew.
# * Weights that change inside a forward or its hooks, before its backward, or behind
#   ``begin_next_forward()`` are gathered anew if all ranks change them and PyTorch counts it
#   (:doc:`shared_slots`). Changes by ``.data``, ``dcp.load``, collectives or ``torch._foreach_*`` are not
#   counted: units gathered ahead, or kept for backward, have the old weights, **without an error**.
# * Call it between steps. Your own prefetch lists and collectives stay, if set before.
# * A unit that queues work on other streams must wait for it, as under stock FSDP2.
# * A reference to full weights that is kept beyond ``reshard()`` reads another unit's numbers.
# * Two units that share a slot cannot both be full while a backward may come: an error. It comes with
#   ``set_reshard_after_backward(False)``, with two forwards under reentrant checkpointing, or if you
#   unshard all units after a forward without backward. More ``slots`` cure it.
# * ``create_graph=True`` needs ``set_reshard_after_backward(False)``, or is an error: stock FSDP2's next
#   backward fails.
# * ``torch.func`` and compiled autograd raise errors. After Ctrl-C in a forward, call the whole model
#   before its parts.
# * Units that are offloaded, sharded on another dimension, over another group, or that bring an
#   all-gather of their own (float8) stay FSDP2's, with a warning.
# * Full weights that you keep over the end of a forward (``set_reshard_after_forward(False)``, the
#   root) are FSDP2's business: after an evaluation ``reshard()`` them before you change weights.
# * It uses private names of FSDP2 (:doc:`peer_memory`). Without one of them the call is an error.
#
# Further reading
# ---------------
# * `FSDP2 with NCCL's copy engines <https://github.com/pytorch/pytorch/pull/176613>`__
# * `fully_shard <https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html>`__
