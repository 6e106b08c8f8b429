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

``fsdp2`` is stock FSDP2, without the call below; 100 % is a run that sends nothing.

**When not to bother:** your ranks are on several hosts; or communication costs you little (compare
``fsdp2`` with ``no_communication`` below, at your tokens).

.. code-block:: python

   from overlap_recipes.fsdp2 import use_peer_copies

   for layer in model.layers:
       fully_shard(layer)  # as before; each module that it is called with is a unit
   fully_shard(model)
   use_peer_copies(model)  # gather_in_place and reduce_in_place; an error where they cannot

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
      * the package ``overlap_recipes``: ``pip install .`` in this repository, or a copy of its
        folder ``overlap_recipes``

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
# They are the proof's.

import peer_memory
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from overlap_recipes.fsdp2 import gather_in_place

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
#
# .. literalinclude:: /overlap_recipes/fsdp2/in_place_gather.py
#    :language: python
#    :pyobject: Gathers
#
# What FSDP2 calls
# ----------------
# FSDP2's order of calls (:doc:`peer_memory` has them) and its settings stay its own.
#
# A unit that was gathered ahead and did not run (an evaluation that leaves early) must not be found
# later with outdated weights: what is under way is dropped when a forward begins and ends.
#
# A unit whose inputs have no gradient, an encoder's first say, is full until the end of backward:
# it shares its slot with none.
#
# .. literalinclude:: /overlap_recipes/fsdp2/in_place_gather.py
#    :language: python
#    :pyobject: InPlaceGather
#
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
#
# .. literalinclude:: /overlap_recipes/fsdp2/in_place_gather.py
#    :language: python
#    :pyobject: gather_in_place
#
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
# tokens, the less to gain. ``fsdp2_tuned`` and ``megatron-fsdp`` ran on another host.
# There ``megatron-fsdp`` (no clipping, bfloat16 gradients) was ahead of in place at 2,048 tokens and
# behind it at 8,192. :doc:`/guide/results`
# also has loops that read nothing, other reductions and recomputation.
#
# **What changes with four GPUs?** Three quarters of each weight come from peers instead of half,
# and each rank adds four parts. Against stock FSDP2 the gain is about that of two GPUs from 4,096
# tokens on; at 2,048 little is left. Those rows are approximate.
#
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built. A missing wait between streams changes
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
# * One rank, several hosts, GPUs that cannot read each other: an error, or a warning of
#   ``gather_in_place``, says which. With HSDP the ranks of the sharding dimension must share a host.
# * PyTorch 2.13 or later with a recent NCCL: ``FSDPModule.set_symm_mem_for_comm()`` with NCCL's
#   zero-CTA policy gathers by copy engines too. The copies around the gather stay.
#
# Limits that can be silent
# -------------------------
# Weights changed inside a forward, before its backward, or behind ``begin_next_forward()`` are gathered
# anew if all ranks change them and PyTorch counts it (:doc:`shared_slots`). It does not count ``.data``,
# ``dcp.load`` or collectives: a sample is compared, and the next forward raises on ranks that saw
# it. A few changed elements can pass.
#
# Known limits
# ------------
# * Pass the module that your loop calls. Its parts may be called too; they gather on demand.
# * Call it between steps. Your own prefetch lists and collectives stay, if set before.
# * A gradient that comes by a tensor without FSDP2's hook (a view changed in place, an object of your
#   class, a tensor kept on the module) is right; stock FSDP2 raises. If that tensor is kept
#   elsewhere, autograd raises "modified by an inplace operation": return it from forward.
# * A reference to full weights that is kept beyond ``reshard()`` reads another unit's numbers; a unit
#   that returns them is an error.
# * Two units that share a slot cannot both be full while a backward may come: an error. It comes with
#   ``set_reshard_after_backward(False)``, with two forwards under reentrant checkpointing, or if you
#   unshard all units after a forward without backward. More ``slots`` cure it.
# * ``create_graph=True`` needs ``set_reshard_after_backward(False)``, or is an error: stock FSDP2's next
#   backward fails.
# * ``torch.func`` and compiled autograd raise errors.
# * Units that are offloaded, sharded on another dimension or over another group, or that bring an
#   all-gather of their own (float8) are refused; with ``gather_in_place`` they stay FSDP2's.
# * Full weights that you keep over the end of a forward (``set_reshard_after_forward(False)``, the
#   root) are FSDP2's business: after an evaluation ``reshard()`` them before you change weights.
# * Without one of FSDP2's private names (:doc:`peer_memory`) the call is an error.
#
# Further reading
# ---------------
# * `FSDP2 with NCCL's copy engines <https://github.com/pytorch/pytorch/pull/176613>`__
# * `fully_shard <https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html>`__
