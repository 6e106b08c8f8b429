# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, sharding/peer_copies.py
"""
FSDP2 by peer copies
====================

After one call, the GPUs of a host copy weights and gradients directly between their memories. Your
loop does not change. On two ranks every bit of the results is the same.

.. result-gain:: fsdp_overlap
   :rows: fsdp2_in_place fsdp2
   :field: efficiency
   :where: model=llama-8b-blocks loop=reads compiled=no reduce_dtype=float32 activation_checkpointing=no

   ``fully_shard`` is without the call; 100 % is a run that sends nothing.

.. index::
   single: NCCL takes SMs from the matmuls
   single: faster FSDP2 all-gather on NVLink

**When not to bother:** your ranks are on several hosts (the call refuses them), or communication costs
you little. With few tokens a step the host sets the pace, and gains vary from run to run. The first 30
steps measure both ways and keep the faster. How sharded training works: :doc:`stream_context`.

.. code-block:: python

   from overlap_recipes.fsdp2 import use_peer_copies

   for layer in model.layers:
       fully_shard(layer)  # as before; each module that it is called with is a unit
   fully_shard(model)
   use_peer_copies(model)  # after all settings of FSDP2; an error where it cannot

Stock FSDP2 casts a unit's shards, copies them into a buffer, gathers with a kernel that takes
compute cores (SMs), and copies the result out. With peer copies, one cast per gather and one sum
per reduction remain; copy engines do the rest, and take no cores.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * how a rank reads and writes other ranks' memory directly
      * what FSDP2 calls for a gather, and what replaces it
      * which two orderings and which barriers make it right

   .. grid-item-card:: What you need

      * PyTorch 2.11 to 2.15; ranks on one host, each GPU with peer access to the others
      * the package ``overlap_recipes``: ``pip install .`` in this repository, or a copy of its
        folder ``overlap_recipes``
      * no GPU for this script: on the CPU it runs over files that all ranks map

.. verification-badge::

The idea
--------

Full weights lie in memory that all ranks read. Each rank casts its own shards to their place in the
full weights. A barrier ensures that all have done so, and each rank copies the other shards from
their places.

Such memory is slow to set up, for all ranks must exchange its addresses. So it stays, and units
take turns: a few **slots** serve any number of equal layers.

.. lanes:: Schematic, one rank, three slots. Each gather casts, passes its barrier and copies. Unit 3 lies where unit 0 lay.

   compute:  5-10 unit 0; 10-15 unit 1; 15-20 unit 2; 20-25 unit 3; 25-33 backward 3
   gather:   0-1 cast 0; 1-5 slot A ~; 5-6 cast 1; 6-10 slot B ~; 10-11 cast 2; 11-15 slot C ~; 15-16 cast 3; 16-20 slot A ~
   @1 1
   @6 2
   @11 3
   @16 4
"""

# %%
# The job
# -------
# A stock Transformer of torch, float32 weights, bfloat16 compute and float32 reductions. Neither 2
# nor 3 ranks divide its odd sizes, so FSDP2 pads shards. More layers than slots take turns.

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from overlap_recipes.fsdp2 import use_peer_copies
from overlap_recipes.ranks import start_rank

VOCABULARY, WIDTH, HIDDEN, LAYERS = 67, 32, 49, 5  # tokens, features, features, units
BATCH, LENGTH = 2, 9  # sequences of a micro-batch, tokens of each
STEPS, MICRO_BATCHES = 3, 2
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def build(device: torch.device, offload: OffloadPolicy | None = None) -> FSDPModule:
    """A Transformer whose layers and rest are units of FSDP2; the same on all ranks."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, HIDDEN, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, LAYERS)
    head = nn.Sequential(nn.Linear(WIDTH, VOCABULARY), nn.LogSoftmax(dim=-1))
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), encoder, head).to(device)
    for unit in (*encoder.layers, model):
        fully_shard(unit, mp_policy=POLICY, offload_policy=offload or OffloadPolicy())
    return model


# %%
# The loop
# --------
# Two micro-batches a step, clipping, a schedule, and an evaluation with averaged weights, which are
# exchanged without FSDP2's knowledge. ``begin_next_forward`` of what ``use_peer_copies`` returns is
# optional: if weights stay as they are until the next forward, its first gathers run while the host
# reads the loss. Not after the last step: nobody waits then.


class Average:
    """A moving average of a model's weights."""

    def __init__(self, model: FSDPModule) -> None:
        self.weights = [p.to_local().data for p in model.parameters()]  # changes go uncounted
        self.averages = [weight.clone() for weight in self.weights]

    def update(self) -> None:
        torch._foreach_lerp_(self.averages, self.weights, 0.5)

    def swap(self) -> None:
        """Exchange weights and averages."""
        for average, weight in zip(self.averages, self.weights, strict=True):
            trained = weight.clone()
            weight.copy_(average)
            average.copy_(trained)


def loss_of(model: FSDPModule, number: int, device: torch.device) -> torch.Tensor:
    """The loss of this rank's micro-batch of that number."""
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator).to(device)
    with sdpa_kernel(SDPBackend.MATH):  # a GPU's faster ones add in any order
        scores = model(tokens[:, :-1])
        return nn.functional.nll_loss(scores.flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: FSDPModule, average: Average, device: torch.device) -> torch.Tensor:
    """The loss with the averages as weights."""
    average.swap()
    loss = loss_of(model, STEPS * MICRO_BATCHES, device)
    model.reshard()  # FSDP2 leaves the root's weights full: the next forward would use them
    average.swap()
    return loss


def train(
    model: FSDPModule, device: torch.device, begin_next_forward: Callable[[], None]
) -> list[torch.Tensor]:
    """Train; returns every loss, every norm of gradients and, at the end, every shard."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    average = Average(model)
    found = []
    for step in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            model.set_requires_gradient_sync(micro_batch == MICRO_BATCHES - 1)
            loss = loss_of(model, step * MICRO_BATCHES + micro_batch, device)
            (loss / MICRO_BATCHES).backward()
            found.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        found.append(norm.full_tensor())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        average.update()
        if step % 2 == 0:
            found.append(evaluate(model, average, device))
        if step < STEPS - 1:
            begin_next_forward()
    return found + average.weights


# %%
# Memory that all ranks see
# -------------------------
# Each rank allocates symmetric memory in the same size, and the others read and write it.
# ``rendezvous`` exchanges the handles. ``get_buffer`` gives another rank's part as a tensor of this
# rank's device, so a copy from it is an ordinary ``copy_``.
#
# .. literalinclude:: /overlap_recipes/fsdp2/peer_memory.py
#    :language: python
#    :pyobject: PeerMemory.empty
#
# The barrier is a tiny kernel on the current stream. The host waits for nothing.
#
# .. literalinclude:: /overlap_recipes/fsdp2/peer_memory.py
#    :language: python
#    :pyobject: PeerMemory.barrier
#
# A slot is filled
# ----------------
# FSDP2 keeps each full weight as the shards of all ranks, one after the other: ``p.own`` is this
# rank's place. Casts go there, then comes the barrier, then the copies.
#
# One barrier per gather is enough, also when a rank refills a slot from which others have copied.
# In between there was a gather into another slot, and each rank reached its barrier only after its
# copies from the first. If there was none, ``fill`` adds a barrier.
#
# .. literalinclude:: /overlap_recipes/fsdp2/shared_slots.py
#    :language: python
#    :pyobject: Slots.fill
#
# What FSDP2 calls
# ----------------
# FSDP2's hooks call methods of a unit's group of parameters. Prefetch is ``unshard`` of another unit,
# ahead of its turn.
#
# .. list-table::
#    :header-rows: 1
#    :widths: 40 28 32
#
#    * - what is called
#      - stock FSDP2
#      - by peer copies
#    * - ``unshard`` before a unit's forward
#      - cast, copy-in, all-gather
#      - cast, barrier, copies
#    * - ``wait_for_unshard``, then
#      - wait, copy-out
#      - wait
#    * - ``reshard`` after it
#      - free the full weights
#      - another unit may have the slot
#    * - both of the first two before its backward
#      - all of it again
#      - nothing, if the slot still has them
#    * - ``post_backward`` after it
#      - free, copy-in, reduce-scatter
#      - push, barrier; sum a unit later
#    * - ``finalize_backward`` at the end
#      - wait for the last reduction
#      - sum the last unit
#
# Two orderings make a gather right. The stream of gathers waits for what the compute has queued:
# the update of the shards, and the last use of the slot. And the compute waits for the copies.
# Weights are read at each gather, so between two steps a load or a swapped average needs no hook.
# What the last units gather in a training forward is kept only for the backward that follows.
#
# .. literalinclude:: /overlap_recipes/fsdp2/in_place_gather.py
#    :language: python
#    :pyobject: Gathers.gather
#
# .. literalinclude:: /overlap_recipes/fsdp2/in_place_gather.py
#    :language: python
#    :pyobject: InPlaceGather.copied
#
# Gradients are pushed
# --------------------
# A gradient goes as soon as backward has made it, into a slot on the rank that owns it. Each sender
# has a row of its own there. After the pushes comes one barrier.
#
# .. literalinclude:: /overlap_recipes/fsdp2/in_place_reduce.py
#    :language: python
#    :pyobject: PushedGradients.push
#
# One unit later, when the parts have arrived, the compute stream sums, in float32, and rounds once,
# as FSDP2 does. Three such slots take turns: the barrier of a push ensures that all ranks have
# summed the contents of the next slot.
#
# .. literalinclude:: /overlap_recipes/fsdp2/in_place_reduce.py
#    :language: python
#    :pyobject: PushedGradients.finish
#
# Run it, and prove it
# --------------------
# The same job trains under stock FSDP2 and by peer copies. Every loss, every norm and every weight
# at the end must have the same bits. From three ranks on, sums are added in another order than by
# NCCL or gloo: there they must be close. (Tests do so with dozens of programs.)


def nothing() -> None:
    pass


def prove_same_bits(device: torch.device) -> None:
    expected = train(build(device), device, nothing)
    model = build(device)
    copies = use_peer_copies(model)
    found = train(model, device, copies.begin_next_forward)
    if dist.get_world_size() <= 2:
        for number, (ours, stock) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(ours, stock), f"number {number} has not the bits of stock FSDP2"
        print(f"{len(found)} losses, norms and weights: every bit that of stock FSDP2")
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.01)
    if dist.get_world_size() > 1:
        units = LAYERS + 1  # the root is one
        assert copies.pushed.calls == units * STEPS, "FSDP2 reduced by itself"
        assert copies.gathers.gathers > units * STEPS, "FSDP2 gathered by itself"
        slots = len(copies.gathers.slots)
        print(f"{copies.gathers.gathers} gathers of {units} units into {slots} slots")
        refused(model, "call it once")


def refused(model: FSDPModule, reason: str) -> None:
    try:
        use_peer_copies(model)
    except RuntimeError as error:
        assert reason in str(error), error
        print(f"refused: {reason}")
    else:
        raise AssertionError(f"not refused: {reason}")


def main() -> None:
    device = start_rank()
    try:
        prove_same_bits(device)
        offloaded = CPUOffloadPolicy(pin_memory=device.type == "cuda")
        refused(build(device, offloaded), "weights are offloaded to the CPU")
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

# %%
# What it buys
# ------------
# Stock blocks of Llama 3 8B, float32 weights, bfloat16 gathers, float32 reductions
# (:doc:`/guide/measured`). ``no_communication`` sends, gathers and copies nothing; ``tune`` has the
# best of FSDP2's own settings (:doc:`fsdp2_settings`).
#
# .. result-table:: fsdp_overlap
#    :rows: no_communication fsdp2 fsdp2_tuned fsdp2_in_place
#    :where: model=llama-8b-blocks loop=reads compiled=no reduce_dtype=float32 activation_checkpointing=no tokens=4096
#
# With many tokens there is less to gain. :doc:`/guide/results` has other tokens and ranks, compiled
# blocks and ``begin_next_forward``. Steps of a stock Llama with every bit of stock FSDP2:
#
# .. result-gain:: fsdp_overlap
#    :rows: fsdp2_in_place
#    :field: bitwise_steps
#
# What breaks if you remove a line
# --------------------------------
# Each edit of the library was made and run when this page was built. For races, the ranks take turns
# in the worst order; a recorder of stream order reports a missing wait.
#
# .. recipe-controls::
#
# Memory
# ------
# Outside the allocator's statistics, on each of :math:`N` ranks:
#
# * ``slots=4`` full units in the dtype that is gathered, and a slot for each size that differs much: an
#   embedding, a head
# * three times the gradients of the largest unit
#
# FSDP2's buffers are gone. Units that stay full until their backward
# (``set_reshard_after_forward(False)``, the root) have a slot each.
#
# What it refuses
# ---------------
# ``use_peer_copies`` raises on all ranks, before it changes anything:
#
# * ranks on several hosts, GPUs without peer access, or a rank that does not see the others' GPUs.
#   With HSDP the ranks of the sharding dimension must share a host; FSDP2 reduces its gradients.
# * units that are offloaded, replicated, sharded on another dimension than the first, or over
#   another group; tensors with an all-gather of their own (float8); your own collectives
# * a torch that nobody has tried, or whose FSDP2 lacks a private name that it needs
# * a second call for one model
#
# Limits that can be silent
# -------------------------
# * Weights changed between a gather and its use (inside a forward, before its backward, after
#   ``begin_next_forward()``) in a way that PyTorch does not count (``.data``, ``dcp.load``,
#   collectives): only a sample is compared. If it differs, the next forward raises; a few changed
#   elements can pass.
# * A reference to full weights that is kept beyond ``reshard()`` reads another unit's numbers;
#   a unit that returns them is an error.
# * All ranks run units in the same order, in an evaluation, too.
# * From three ranks on, last bits depend on which way was kept. Under
#   ``torch.use_deterministic_algorithms(True)`` it is always peer copies.
# * A gradient is in ``.grad`` one unit later. So an optimizer in backward steps a unit later.
# * After an exception in backward, call ``zero_grad()`` before you go on.
#
# Known limits
# ------------
# These say what to do:
#
# * two units that share a slot and are full at once: ``use_peer_copies(model, slots=6)`` cures it
# * a forward that changes its full weights in place; ``create_graph=True``; ``torch.func``
# * ranks that have gradients of different weights
#
# A rank that dies leaves the others waiting in a barrier; ``torchrun`` ends them.
#
# Further reading
# ---------------
# * :doc:`stream_context`: what to gather, and when
# * `Symmetric memory <https://docs.pytorch.org/docs/stable/symmetric_memory.html>`__ in PyTorch
# * `FSDP2 with NCCL's copy engines <https://github.com/pytorch/pytorch/pull/176613>`__: PyTorch 2.12
#   gathers so by ``set_symm_mem_for_comm()``; the copies around the gather stay
