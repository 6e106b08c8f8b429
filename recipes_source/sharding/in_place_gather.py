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

import peer_memory
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

BATCH, STEPS = 8, 4  # samples per rank and step
ALIGNMENT = 512  # bytes, of each shard in the published copy
SMALL = 1 << 18  # bytes: smaller shards go by one kernel instead of a copy each

# %%
# The published copy
# ------------------
# All is laid out at the first gather, behind whatever you did to the model before: meta-device
# initialisation, loads, casts. FSDP2 keeps each full weight as the shards of all ranks one behind
# the other, in a storage that it frees and allocates again; views of it are made once, so that a
# gather is one ``copy_`` a weight and rank. Norms and biases of a unit share one kernel.
#
# Freed memory is the trap. A weight's storage comes from the allocator of the compute stream, which
# may still be computing with what lay there. The copies run on another stream and must wait for it.
# And whoever publishes reads weights: the compute stream waits, lest an update overtake it.


def dtype_of(p) -> torch.dtype:
    """What a parameter is gathered in."""
    return p.param_dtype or p.orig_dtype


class PublishedCopy:
    """The shards of all units in the dtype that is gathered, where the other ranks read them."""

    def __init__(self, groups: Sequence, memory: peer_memory.PeerMemory, ahead: int) -> None:
        self.groups, self.memory, self.ahead = groups, memory, ahead
        self.streams = torch.get_device_module(memory.device)
        self.stream = self.streams.Stream(priority=-1)
        self.parameters = [p for group in groups for p in group.fsdp_params]
        self.slots: list[torch.Tensor] = []
        self.in_forward, self.stale = False, True
        self.gathers = self.published = 0
        self.order: list[FSDPModule] | None = []  # of the units, in the first forward

    @torch.compiler.disable
    def begin_forward(self, *_) -> None:
        self.drop()
        self.in_forward = self.stale = True

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
    def allocate(self) -> None:
        """Memory, views and FSDP2's full weights, once: behind whatever the user did to the model."""
        for group in self.groups:
            group.lazy_init()
        nbytes = [
            p.padded_sharded_param_size.numel() * dtype_of(p).itemsize for p in self.parameters
        ]
        aligned = [-(-n // ALIGNMENT) * ALIGNMENT for n in nbytes]
        of_ranks = [m.split(aligned) for m in self.memory.empty([sum(aligned)], torch.uint8)]
        places = dict(zip(self.parameters, zip(nbytes, *of_ranks, strict=True), strict=True))
        rank, ranks = self.memory.rank, self.memory.ranks
        for group in self.groups:
            copies, group.full = [], []
            for p in group.fsdp_params:
                size, *parts = places[p]
                shards = [part[:size].view(dtype_of(p)) for part in parts]
                self.slots.append(shards[rank])
                p.init_all_gather_outputs(
                    [len(shards[0])], [dtype_of(p)], ranks, self.memory.device
                )
                (full,) = p.all_gather_outputs
                group.full.append((full.untyped_storage(), full.nbytes))
                full.untyped_storage().resize_(full.nbytes)
                p.init_unsharded_param()
                rows = full.data.view(ranks, -1)  # .data: autograd does not see what fills it
                for step in range(ranks):
                    source = (rank + step) % ranks  # no two ranks read from one at a time
                    copies.append((rows[source], shards[source]))
                if group.is_sharded:
                    p.free_unsharded_param()
            small = [pair for pair in copies if pair[1].nbytes <= SMALL]
            group.large = [pair for pair in copies if pair[1].nbytes > SMALL]
            group.small = [list(tensors) for tensors in zip(*small, strict=True)]

    def publish(self) -> None:
        """On the stream of the gathers, between two barriers: nobody reads while anybody writes."""
        self.memory.barrier()
        torch._foreach_copy_(self.slots, [p._sharded_param_data for p in self.parameters])
        self.memory.barrier()
        self.published += 1

    @torch.no_grad()
    def gather(self, group) -> None:
        """Queue the copies of a unit's full weights behind all that the current stream does."""
        if not self.slots:
            self.allocate()
        for storage, nbytes in group.full:
            storage.resize_(nbytes)
        current = self.streams.current_stream()
        self.stream.wait_stream(current)  # which may still use that memory
        if hasattr(group.comm_ctx, "all_gather_stream"):
            self.stream.wait_stream(group.comm_ctx.all_gather_stream)
        with self.streams.stream(self.stream):
            if (self.stale and self.in_forward) or not self.in_step():
                self.publish()
                self.stale = False
                current.wait_event(self.stream.record_event())  # weights may change behind it
            for full, shard in group.large:
                full.copy_(shard, non_blocking=True)
            if group.small:
                torch._foreach_copy_(group.small[0], group.small[1])
            event = self.stream.record_event()
        under_way = {"all_gather_event": event, "all_gather_work": None}
        group._all_gather_result = types.SimpleNamespace(**under_way)
        self.gathers += 1
        if self.order is not None and self.in_forward:
            self.order.append(group.modules[0])


# %%
# What FSDP2 calls
# ----------------
# FSDP2's order of gathers, prefetches and releases stays its own; so do its settings. These methods
# come before its own, for one model's groups.
#
# A unit that was gathered ahead and did not run (an evaluation that leaves early) must not be found
# later with weights of then: what is under way is dropped when a forward begins and ends.


class InPlaceGather:
    """Methods of an FSDP2 group of parameters, in place of its own."""

    def unshard(self, async_op: bool = False) -> None:
        backward = self._training_state.name == "PRE_BACKWARD"
        if not self.copy.in_step():
            self.drop()  # weights may have changed since
        there = self._all_gather_result is not None or self.is_unsharded
        if not there and (self.unshard_in_backward or not backward):
            self.copy.gather(self)

    def wait_for_unshard(self) -> None:
        if self.copied():
            self._to_unsharded()

    def finalize_backward(self) -> None:
        self.drop()
        super().finalize_backward()

    def drop(self) -> None:
        """Free what was gathered and not used."""
        if self.copied():
            for p in self.fsdp_params:
                p.free_unsharded_param()

    def copied(self) -> bool:
        """Whether copies were under way; the current stream now waits for them."""
        if self._all_gather_result is None:
            return False
        event, self._all_gather_result = self._all_gather_result.all_gather_event, None
        self.copy.streams.current_stream().wait_event(event)
        return True


# %%
# One call
# --------
# Forward needs lists to prefetch by: without one FSDP2 relies on its host running ahead, and a gather
# that waits for the compute stream would come too late. They are made from the order of the first
# forward. More full units in flight cost memory; ``unit.set_reshard_after_forward(False)`` keeps
# units over the turn-around, as in :doc:`fsdp2_settings`.


def gather_in_place(model: FSDPModule, ahead: int = 2) -> PublishedCopy | None:
    """Have every unit of ``model`` gather by peer copies, from its next forward on. Collective.

    Args:
        model: the module that the training loop calls.
        ahead: units that forward gathers before they are needed; 0 leaves FSDP2's own settings.

    Returns:
        What the peers read; None, after a warning that says why, if FSDP2 gathers as before.

    Raises:
        RuntimeError: nothing is sharded, or this PyTorch's FSDP2 is another one.
    """
    chosen = peer_memory.copying_groups(model)
    if not chosen:
        return None
    group = chosen[0].mesh_info.shard_process_group
    copy = PublishedCopy(chosen, peer_memory.PeerMemory(group, chosen[0].device), ahead)
    for group in chosen:
        group.copy = copy
        peer_memory.become(group, InPlaceGather)
    model.register_forward_pre_hook(copy.begin_forward, prepend=True)
    model.register_forward_hook(copy.end_forward, always_call=True)
    return copy


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
        copy = gather_in_place(model)
        assert peer_memory.same(train(model, device), expected), "not the bits of stock FSDP2"
        if copy is not None:
            assert copy.gathers > copy.published > STEPS, "FSDP2 gathered by itself"
            size = sum(slot.nbytes for slot in copy.slots)
            print(f"{copy.gathers} gathers of {size} published bytes a rank, every bit FSDP2's")


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
