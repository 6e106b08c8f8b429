# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, sharding/in_place_gather.py
"""
FSDP2 without copies around its gathers
=======================================

One call, and a ``fully_shard`` model of any kind gathers its weights by peer copies, straight to
where they are used. Every bit stays stock FSDP2's. In your training:

.. code-block:: python

   from in_place_gather import gather_in_place  # with peer_memory.py beside it
   from in_place_reduce import reduce_in_place  # the next recipe: the same for gradients

   fully_shard(model)  # as before, units first
   gather_in_place(model)
   reduce_in_place(model)

Stock FSDP2 casts a unit's shards, copies them into a buffer, gathers with a kernel that takes
compute cores, and copies the result out, twice a unit and step. Here one cast a forward is left, and
transfers that copy engines make. The host has less to do as well, which is what counts at few
tokens a step. Do not bother if your ranks are on several hosts, or if
communication costs you nothing: compare ``no_communication`` below at your tokens.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * why "has a weight changed?" has no reliable answer, and a rule that needs none
      * two barriers a forward, whatever the number of units
      * memory that is refilled while another stream may still read it

   .. grid-item-card:: What you need

      * PyTorch 2.11 or later; ranks on one host, each GPU with peer access to the others
      * ``peer_memory.py``, the recipe before

.. verification-badge::

The idea
--------

Peers read a **published copy** of the shards alone, cast to the dtype that is gathered. Your
parameters stay where they are, and whoever changes them, by an optimizer, a load, an average swapped
in or behind autograd's back, changes nothing that a peer may be reading.

When must the copy be renewed? Asking each parameter whether it has changed does not work: fused
optimizers, ``p.data.copy_`` and collectives leave version counters as they are. So nothing is asked.
**Each forward of the model begins by publishing all of it**, between two barriers; from there to the
end of its backward nobody changes weights. A gather outside a step, such as ``unshard()`` by hand or
a block called alone, publishes for itself.

.. lanes:: Schematic, one rank. At 1 all ranks have made the last step's copies, at 2 all have published.

   compute:  0-4 update; 11-16 unit 0; 16-21 unit 1; 21-26 unit 2; 26-34 backward 2
   gather:   4-7 publish; 8-11 unit 0 ~; 11-15 unit 1 ~; 15-19 unit 2 ~; 22-26 unit 1 ~
   @4 1
   @7 2
"""

# %%
# Imports and sizes
# -----------------

import types
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import peer_memory
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.utils._pytree import tree_leaves

BATCH, STEPS = 8, 4  # samples per rank and step
ALIGNMENT, GRAIN = 512, 8 << 20  # bytes, of each weight in a slot and of a slot
SMALL = 1 << 18  # bytes: smaller shards go by one kernel instead of a copy each

# %%
# Memory that units share
# -----------------------
# A unit's full weights lie where they did in the step before: autograd keeps views of them, and a
# view cannot be moved. Units that are never needed together can lie in the same place. A unit gets
# its ``Slot`` when it is first gathered: one that is free and was last given away more than
# ``ahead`` units ago, else a new one. A stack of equal blocks needs :math:`1 + \text{ahead}`.
#
# Where two units of one slot are needed after all, a prefetch waits until it is a demand, and a unit
# outside forward and backward gets a slot of its own. In between there is no way out but an error.
#
# FSDP2 keeps each full weight as the shards of all ranks one behind the other. A gather casts this
# rank's shards to their place, passes a barrier, and copies the others' shards from where they were
# cast to. Views are made once: a gather is one kernel for all casts, one ``copy_`` a weight and
# peer, and one kernel for all norms and biases.
#
# **One barrier is enough.** Who fills a slot again has passed the barrier of the gather between;
# every other rank has reached that one too, and so has queued before it the copies of the gather
# before. If there was no gather between, there is a barrier more.


@dataclass(eq=False)
class Slot:
    """Memory of full weights, by rank, for all units that share it."""

    of_ranks: list[torch.Tensor]  # bytes
    number: int  # of the unit that it was last given to
    group: object = None  # whose weights are in it
    in_forward: int = 0  # in which forward they were gathered
    exclusive: bool = False  # its unit keeps it until the end of backward

    def busy(self) -> bool:
        group = self.group
        return group is not None and (group.is_unsharded or group._all_gather_result is not None)


class Gathers:
    """The slots of all units of one model, and the stream of their gathers."""

    def __init__(self, groups: Sequence, memory: peer_memory.PeerMemory, ahead: int) -> None:
        self.groups, self.memory, self.ahead = groups, memory, ahead
        self.streams = torch.get_device_module(memory.device)
        self.stream = self.streams.Stream(priority=-1)
        self.slots: list[Slot] = []
        self.last: Slot | None = None  # of the last gather
        self.given = self.gathers = self.kept = self.forwards = 0
        self.in_forward = False
        self.order: list[FSDPModule] | None = []  # of the units, in the first forward

    @torch.compiler.disable
    def begin_forward(self, *_) -> None:
        self.drop()
        self.in_forward = True
        self.forwards += 1

    @torch.compiler.disable
    def end_forward(self, *_) -> None:
        self.in_forward = False
        self.drop()
        if self.order:  # of the first forward
            order, self.order = list(dict.fromkeys(self.order)), None
            for number, unit in enumerate(order if self.ahead else ()):
                ahead = order[number + 1 : number + 1 + self.ahead]
                unit.set_modules_to_forward_prefetch(ahead)
                unit.set_modules_to_backward_prefetch([order[max(0, number - 1)]])

    def drop(self) -> None:
        for group in self.groups:
            group.drop()

    def in_step(self) -> bool:
        """Whether a forward of the model or a backward is under way: nobody changes weights."""
        return self.in_forward or torch._C._current_graph_task_id() != -1

    @torch.inference_mode(False)
    def give(self, group, exclusive: bool = False) -> None:
        """A slot for ``group``, and views of it; a new one is a slow collective."""
        if group.slot is None:
            group.lazy_init()  # behind whatever the user did to the model
            self.given += 1
        parameters, ranks = group.fsdp_params, self.memory.ranks
        nbytes = [p.padded_sharded_param_size.numel() * dtype_of(p).itemsize for p in parameters]
        places = [0, *accumulate(-(-ranks * n // ALIGNMENT) * ALIGNMENT for n in nbytes)]
        size = -(-places[-1] // GRAIN) * GRAIN
        fit = [
            slot
            for slot in self.slots
            if not (slot.busy() or slot.exclusive or exclusive)
            and self.given - slot.number > max(1, self.ahead)
            and size <= slot.of_ranks[0].nbytes <= 2 * size
        ]
        if not fit:
            fit = [Slot(self.memory.empty([size], torch.uint8), 0, exclusive=exclusive)]
            self.slots.append(fit[0])
        group.slot = min(fit, key=lambda slot: slot.of_ranks[0].nbytes)
        group.slot.number, group.own, copies = self.given, [], []
        for p, n, place in zip(parameters, nbytes, places, strict=False):
            flat = [t[place : place + ranks * n].view(dtype_of(p)) for t in group.slot.of_ranks]
            rows = [t.data.view(ranks, -1) for t in flat]  # autograd does not see what fills it
            rank = self.memory.rank
            group.own.append(rows[rank][rank])
            for step in range(1, ranks):
                source = (rank + step) % ranks  # no two ranks read from one at a time
                copies.append((rows[rank][source], rows[source][source]))
            p.all_gather_outputs = [flat[rank]]
            p.init_unsharded_param()
            full = getattr(p._unsharded_param, "_local_tensor", p._unsharded_param)
            full.data = flat[rank].as_strided(
                full.size(), full.stride(), flat[rank].storage_offset()
            )
            p.free_unsharded_param = lambda: None  # its memory is the slot's
        small = [pair for pair in copies if pair[1].nbytes <= SMALL]
        group.large = [pair for pair in copies if pair[1].nbytes > SMALL]
        group.small = [list(tensors) for tensors in zip(*small, strict=True)]

    @torch.no_grad()
    def gather(self, group) -> None:
        """Queue the gather of a unit's full weights behind all that the current stream does."""
        if group.slot is None:
            self.give(group)
        slot, current = group.slot, self.streams.current_stream()
        forward = group._training_state.name == "FORWARD" and self.in_forward
        backward = group._training_state.name == "PRE_BACKWARD"
        if slot.group is group and slot.in_forward == self.forwards and backward:
            event = current.record_event()  # nothing has taken its place since the forward
            slot.in_forward, self.kept = 0, self.kept + 1
        else:
            self.stream.wait_stream(current)  # which may still compute with what the slot has
            if hasattr(group.comm_ctx, "all_gather_stream"):
                self.stream.wait_stream(group.comm_ctx.all_gather_stream)
            with self.streams.stream(self.stream):
                if slot is self.last:
                    self.memory.barrier()  # others may still copy from it
                torch._foreach_copy_(group.own, [p._sharded_param_data for p in group.fsdp_params])
                self.memory.barrier()
                for full, shard in group.large:
                    full.copy_(shard, non_blocking=True)
                if group.small:
                    torch._foreach_copy_(group.small[0], group.small[1])
                event = self.stream.record_event()
            self.last, slot.group, self.gathers = slot, group, self.gathers + 1
            slot.in_forward = self.forwards if forward else 0
        under_way = {"all_gather_event": event, "all_gather_work": None}
        group._all_gather_result = types.SimpleNamespace(**under_way)
        if self.order is not None and forward:
            self.order.append(group.modules[0])


def dtype_of(p) -> torch.dtype:
    """What a parameter is gathered in."""
    return p.param_dtype or p.orig_dtype


# %%
# What FSDP2 calls
# ----------------
# FSDP2's order of gathers, prefetches and releases stays its own; so do its settings. These methods
# come before its own, for one model's groups.
#
# A unit that was gathered ahead and did not run (an evaluation that leaves early) must not be found
# later with weights of then: what is under way is dropped when a forward begins and ends.
#
# A unit whose inputs have no gradient, an encoder's first say, is full until the end of backward: it
# shares its slot with none. An embedding's backward needs no weights, so it is not gathered for it.


class InPlaceGather:
    """Methods of an FSDP2 group of parameters, in place of its own."""

    slot: Slot | None = None
    in_graph = False  # a backward may come that has views of the slot
    refused = False  # a prefetch found the slot in use

    def unshard(self, async_op: bool = False) -> None:
        if not self.all.in_step():
            self.drop()  # weights may have changed since
        there = self._all_gather_result is not None or self.is_unsharded
        backward = self._training_state.name == "PRE_BACKWARD"
        if there or (backward and not self.unshard_in_backward):
            return
        self.refused = self.slot is not None and self.slot.busy()
        if not self.refused:
            self.all.gather(self)

    def wait_for_unshard(self) -> None:
        if self.refused:
            if self.slot.busy():
                self.make_room()
            self.refused = False
            self.all.gather(self)
        if self.copied():
            self._to_unsharded()
            self.in_graph |= self._training_state.name == "FORWARD" and torch.is_grad_enabled()

    def make_room(self) -> None:
        """Have the slot for this unit, or another one.

        Raises:
            RuntimeError: another unit is in it, and autograd knows where this one is.
        """
        other = self.slot.group
        if not other.is_unsharded:
            other.drop()
        elif not self.in_graph:
            self.all.give(self, exclusive=True)
        else:
            names = [type(group.modules[0]).__name__ for group in (self, other)]
            raise RuntimeError(
                f"{' and '.join(names)} are needed at the same time, which they were not in the "
                "first forward: call gather_in_place with a larger `ahead`"
            )

    def pre_forward(self, module, args, kwargs):
        inputs = tree_leaves((args, kwargs))
        alone = not any(getattr(t, "requires_grad", False) for t in inputs)
        graph = torch.is_grad_enabled() and self.unshard_in_backward and not self.in_graph
        if alone and graph and self.is_sharded and not (self.slot and self.slot.exclusive):
            self.drop()
            self.all.give(self, exclusive=True)  # full until the end of backward
        return super().pre_forward(module, args, kwargs)

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

    def copied(self) -> bool:
        """Whether a gather was under way; the current stream now waits for it."""
        if self._all_gather_result is None:
            return False
        event, self._all_gather_result = self._all_gather_result.all_gather_event, None
        self.all.streams.current_stream().wait_event(event)
        return True


# %%
# One call
# --------
# Forward needs lists to prefetch by: without one FSDP2 relies on its host running ahead, and a gather
# that waits for the compute stream would come too late. They are made from the order of the first
# forward. The last units of a forward are the first of its backward: their weights are still in
# their slots, and are not gathered again.


def gather_in_place(model: FSDPModule, ahead: int = 2) -> Gathers | None:
    """Have every unit of ``model`` gather by peer copies, from its next forward on. Collective.

    Args:
        model: the module that the training loop calls.
        ahead: units that forward gathers before they are needed; 0 leaves FSDP2's own settings.

    Returns:
        The slots; None, after a warning that says why, if FSDP2 gathers as before.

    Raises:
        RuntimeError: nothing is sharded, or this PyTorch's FSDP2 is another one.
    """
    chosen = peer_memory.copying_groups(model)
    if not chosen:
        return None
    group = chosen[0].mesh_info.shard_process_group
    gathers = Gathers(chosen, peer_memory.PeerMemory(group, chosen[0].device), ahead)
    for group in chosen:
        group.all = gathers
        infos = [p._module_info for p in group.fsdp_params]
        if all(type(m) is nn.Embedding for i in infos for m in (i.module, *i.shared_modules)):
            group.unshard_in_backward = False
        peer_memory.become(group, InPlaceGather)
    model.register_forward_pre_hook(gathers.begin_forward, prepend=True)
    model.register_forward_hook(gathers.end_forward, always_call=True)
    return gathers


# %%
# Run it, and prove it
# --------------------
# After each step the proof calls two blocks alone, so that others are gathered in vain, changes the
# weights in a way that no optimizer knows of, and evaluates. Every loss and every final weight must
# have the bits of stock FSDP2. ``tests/data/in_place_training.py`` in the repository does the same
# with 43 programs: tied weights, LoRA with two dtypes, ``fully_shard([norm, output])``, ignored
# parameters, accumulation, ``reshard_after_forward`` as an integer, activation checkpointing, HSDP,
# compiled blocks and models, inference mode, averages swapped in, loads by six roads, optimizers in
# backward.


def train(model: FSDPModule, device: torch.device) -> list[torch.Tensor]:
    """Train, and change weights in ways no optimizer knows of; all losses and final weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    shards, found = [p.to_local().detach() for p in model.parameters()], []
    for number in range(STEPS):
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
    return [t.detach() for t in found] + shards


def prove(device: torch.device) -> None:
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
        expected = train(peer_memory.build(device, policy), device)
        model = peer_memory.build(device, policy)
        gathers = gather_in_place(model)
        assert peer_memory.same(train(model, device), expected), "not the bits of stock FSDP2"
        if gathers is not None:
            assert gathers.gathers > STEPS * peer_memory.UNITS, "FSDP2 gathered by itself"
            size = sum(slot.of_ranks[0].nbytes for slot in gathers.slots) >> 20
            print(f"{gathers.gathers} gathers into {len(gathers.slots)} slots of {size} MiB in all")


def main() -> None:
    peer_memory.run(prove)


if __name__ == "__main__":
    main()

# %%
# What it buys
# ------------
# Stock blocks of Llama 3 8B on two GPUs, float32 weights and bfloat16 gathers; ``fsdp2_in_place``
# reduces in place as well (:doc:`in_place_reduce`). ``no_communication`` sends, gathers and copies
# nothing; ``fsdp2_no_collectives`` is stock FSDP2 whose collectives are copies on the device: to be
# ahead of it, copies around collectives must have gone.
#
# .. result-figure:: fsdp_overlap
#    :rows: no_communication fsdp2_no_collectives fsdp2 fsdp2_tuned fsdp2_in_place
#
# .. result-table:: fsdp_overlap
#    :rows: no_communication fsdp2_no_collectives fsdp2 fsdp2_tuned fsdp2_in_place
#
# **When do copy engines pay?** Where the host or the link bounds a step: few tokens, compiled blocks.
# At many tokens a step the gather is hidden either way, and what is gained is what the removed
# copies and casts took.
#
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built. A missing barrier is a race between ranks:
# for those edits the ranks take turns in the worst order. A missing wait between streams changes
# nothing on a CPU; there a recorder of the streams' order reports it.
#
# .. recipe-controls::
#
# Memory
# ------
# On each rank, of :math:`N`, outside the allocator's statistics:
#
# .. math::
#
#    \sum_{p} \frac{\text{padded numel}(p)}{N} \times \text{bytes of the gathered dtype}
#
# and :math:`1 + \text{ahead}` full units in forward, two in backward. FSDP2's buffers, as large as a
# unit each, are gone.
#
# When it is not worth it
# -----------------------
# * One rank, several hosts, GPUs that cannot read each other: a warning says which, and FSDP2 gathers
#   as before. With HSDP it is the ranks of the sharding dimension that must share a host.
# * Memory is short and weights are large beside activations: the published copy takes two bytes a
#   parameter over :math:`N`.
# * PyTorch 2.13 or later with a recent NCCL: ``FSDPModule.set_symm_mem_for_comm()`` with NCCL's
#   zero-CTA policy gathers by copy engines too. The copies around the gather stay.
#
# Known limits
# ------------
# * Pass the module that your loop calls. If you call its parts instead, each gather publishes for
#   itself: right, and slow.
# * ``unshard(async_op=True)`` before a forward gains nothing: the forward gathers that unit anew.
# * All ranks run the same forwards, evaluations included: each begins with two barriers.
# * Units that are offloaded, sharded on another dimension, over another group, or that bring an
#   all-gather of their own (float8) stay FSDP2's, with a warning.
# * Full weights that you keep over the end of a forward (``set_reshard_after_forward(False)``, the
#   root) are FSDP2's business: after an evaluation ``reshard()`` them before you change weights.
# * It uses private names of FSDP2 (:doc:`peer_memory`). A PyTorch without one of them is an error at
#   the call.
#
# Further reading
# ---------------
# * `FSDP2 with NCCL's copy engines <https://github.com/pytorch/pytorch/pull/176613>`__
# * `fully_shard <https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html>`__
