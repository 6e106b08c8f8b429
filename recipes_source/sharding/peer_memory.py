# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, sharding/peer_memory.py
"""
Memory that the other ranks read, and where FSDP2 keeps its weights
===================================================================

Read the GPU memory of the other ranks of a host. Gathering a sharded weight then takes a few copies
by a copy engine, a part of the GPU that moves data without its compute cores; no other rank has to
take part in a copy. This page has the parts that the next pages are made of; alone it speeds up
nothing. To have FSDP2 use them, begin with :doc:`in_place_gather`.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * symmetric memory: tensors that the other ranks read without asking, and a barrier
      * when ranks cannot read each other, found out on all of them before the first copy
      * where FSDP2 keeps the shards and the full weights of a unit (a module that ``fully_shard``
        was called with)

   .. grid-item-card:: What you need

      * PyTorch 2.11 or later; ranks on one host, each GPU with peer access to the others
      * on the CPU the same code runs over memory-mapped files
      * the package ``overlap_recipes``: ``pip install .`` in this repository, or a copy of its
        folder ``overlap_recipes``

.. verification-badge::

The idea
--------

A collective needs all ranks at the same time. A copy needs one rank, on two conditions: what it
reads lies where it can be read, and does not change meanwhile. Barriers see to the second: one
before the shards change, one after.

.. lanes:: Schematic, two ranks. Between the barriers rank 1 writes; outside them anyone reads.

   rank 0:  0-6 read ~; 12-18 read ~; 18-24 read ~
   rank 1:  0-4 read ~; 7-10 write; 12-20 read ~
   @6 1
   @11 2
"""

# %%
# Imports and sizes
# -----------------
# They are the proof's. The ``HIDDEN`` rows do not divide by 2, 3 or 4 ranks: FSDP2 pads such shards.

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from overlap_recipes.fsdp2.peer_memory import PeerMemory, param_groups, why_not
from overlap_recipes.ranks import start_rank

UNITS, WIDTH, HIDDEN = 5, 24, 49  # blocks, each an FSDP unit; features

# %%
# A tensor on every rank
# ----------------------
# Symmetric memory is memory that each rank allocates in the same size and that the others can read
# and write. It is documented but young: its module has an underscore. ``symmetric_memory.empty``
# allocates, ``rendezvous`` exchanges the handles of all ranks and ``get_buffer`` gives another
# rank's memory as a tensor of this rank's device: to PyTorch, copying it is a copy on one device.
# ``barrier`` is a kernel of one thread block on the current stream; the host does not wait. On the
# CPU the tensors are files that all ranks map, and the barrier is gloo's.
#
# .. literalinclude:: /overlap_recipes/fsdp2/peer_memory.py
#    :language: python
#    :pyobject: PeerMemory
#
# When peers cannot be read
# -------------------------
# Every rank must come to the same answer, so what each sees is exchanged. Devices are told apart by
# their UUID: with one visible GPU a rank, all of them are number 0.
#
# .. literalinclude:: /overlap_recipes/fsdp2/peer_memory.py
#    :language: python
#    :pyobject: why_not
#
# A step of FSDP2
# ---------------
# FSDP2 hangs hooks on the modules of each unit. In a step they call methods of the unit's group of
# parameters, in this order. *Prefetch* is ``unshard`` of another unit, ahead of its turn.
#
# .. list-table::
#    :header-rows: 1
#    :widths: 40 28 32
#
#    * - what is called
#      - stock FSDP2
#      - the next pages
#    * - ``unshard`` before a unit's forward
#      - cast, copy-in, all-gather
#      - cast, barrier, peer copies
#    * - ``wait_for_unshard``, then
#      - wait, copy-out
#      - wait
#    * - ``reshard`` after it
#      - free the full weights
#      - another unit may have the memory
#    * - both of the first two before its backward
#      - all of it again
#      - nothing, if the memory still has them
#    * - ``post_backward`` after it
#      - free, copy-in, reduce-scatter
#      - push, barrier; sum a unit later
#    * - ``finalize_backward`` at the end
#      - wait for the last reduction
#      - sum the last unit
#
# FSDP2's groups of parameters
# ----------------------------
# FSDP2 gathers the parameters of a unit together, as one ``FSDPParamGroup``. There is no public way
# to it. The private names that the next pages use are listed here and looked for at the call, so
# that a PyTorch without one of them is a clear error, not another model. PyTorch 2.11 to 2.15 has
# them; public names for "the groups of a module", "gather", "gathered" and "reduce" would replace
# them all.
#
# ===============================================  ================================================
# name                                             what for
# ===============================================  ================================================
# ``_get_fsdp_state``, ``_fsdp_param_group(s)``    the groups of a module
# ``unshard``, ``wait_for_unshard``                replaced: queue a gather, wait for it
# ``post_backward``, ``finalize_backward``         wrapped: gradients are there, backward has ended
# ``_all_gather_result``, ``_to_unsharded``        "under way", and the change to full weights
# ``all_gather_outputs``, ``_sharded_param_data``  full weights and padded shards, flat
# ``_training_state``, ``reduce_grads``, ...       what the user has set, and where the step is
# ``_all_gather_comm``, ``_reduce_scatter_comm``   collectives of the user's own
# ===============================================  ================================================
#
# .. literalinclude:: /overlap_recipes/fsdp2/peer_memory.py
#    :language: python
#    :start-at: GROUP_NAMES = """
#    :end-before: def param_groups
#
# .. literalinclude:: /overlap_recipes/fsdp2/peer_memory.py
#    :language: python
#    :pyobject: param_groups
#
# .. literalinclude:: /overlap_recipes/fsdp2/peer_memory.py
#    :language: python
#    :pyobject: why_stock
#
# .. literalinclude:: /overlap_recipes/fsdp2/peer_memory.py
#    :language: python
#    :pyobject: copying_groups
#
# .. literalinclude:: /overlap_recipes/fsdp2/peer_memory.py
#    :language: python
#    :pyobject: settled
#
# .. literalinclude:: /overlap_recipes/fsdp2/peer_memory.py
#    :language: python
#    :pyobject: become
#
# Run it, and prove it
# --------------------
# A unit gathered by copies has the bits of FSDP2's own gather. The full weight is the padded shards
# one after the other.


def run(prove: Callable[[torch.device], None]) -> None:
    """``prove`` on this rank's device, in the group of all ranks."""
    device = start_rank()
    try:
        prove(device)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def build(device: torch.device, policy: MixedPrecisionPolicy, stock: bool = True) -> FSDPModule:
    """Blocks over (batch, WIDTH), float32 weights; 49 rows divide by none of 2, 3 and 4 ranks."""
    torch.manual_seed(0)
    pairs = [(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)) for _ in range(UNITS)]
    model = nn.Sequential(*(nn.Sequential(up, nn.GELU(), down) for up, down in pairs)).to(device)
    for unit in (*model, model):
        fully_shard(unit, mp_policy=policy)
        # stock FSDP2's default trips over evaluations
        unit.set_modules_to_backward_prefetch([unit] if stock else [])
    return model


def same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def prove(device: torch.device) -> None:
    group, *_ = param_groups(build(device, MixedPrecisionPolicy()))
    if reason := why_not(dist.group.WORLD, device):
        return print(f"nothing to read: {reason}")
    memory = PeerMemory(dist.group.WORLD, device)
    for p in group.fsdp_params:
        size = p.padded_sharded_param_size
        shards = memory.empty([size.numel()], torch.float32)
        full = torch.empty(memory.ranks, size.numel(), device=device)
        for round_number in range(2):
            memory.barrier()
            shards[memory.rank].copy_(p._sharded_param_data + round_number)
            memory.barrier()
            for row, shard in zip(full, shards, strict=True):
                row.copy_(shard, non_blocking=True)
            expected = p.sharded_param.detach().full_tensor() + round_number
            found = full.view(-1)[: expected.numel()].view(expected.shape)
            assert torch.equal(found, expected), "not the bits of FSDP2's gather"
    print(f"read the shards of {memory.ranks} ranks by copies")


def main() -> None:
    run(prove)


if __name__ == "__main__":
    main()

# %%
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built. A missing barrier is a race between ranks,
# and a race may be won: for those edits the ranks take turns in the worst order.
#
# .. recipe-controls::
#
# Memory
# ------
# What you ask for, on each rank. The statistics of PyTorch's allocator leave it out: look at
# ``torch.cuda.mem_get_info``. It is freed with the object.
#
# When it is not worth it
# -----------------------
# * Ranks are on several hosts: shard inside the host and replicate across hosts (HSDP).
# * Few bytes: then launching a copy takes longer than the copy.
#
# Known limits
# ------------
# * The barrier's kernel is one thread block, which occupies a place on an SM until the slowest rank
#   has come.
# * A rank that dies leaves the others spinning: start ranks under a supervisor that ends them all.
#
# Further reading
# ---------------
# * `Symmetric memory <https://docs.pytorch.org/docs/stable/symmetric_memory.html>`__ in PyTorch
# * `fully_shard <https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html>`__
