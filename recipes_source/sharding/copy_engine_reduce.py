# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, sharding/copy_engine_reduce.py
"""
Reduce by copies: push the parts, add them once
===============================================

A reduce-scatter moves bytes, which copy engines can do, and adds, which they cannot. Here each rank
writes its gradients' parts straight into the memory of the ranks that own them, and the compute
cores are needed for one addition. It is a drop-in for schedules of your own, where it gains time,
and for FSDP2, where it does not.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * why to push gradients, where weights are pulled
      * one barrier for each reduce-scatter, and why two slots save the second
      * a communication object for ``set_custom_reduce_scatter``

   .. grid-item-card:: What you need

      * PyTorch 2.11 or later; ranks on one host, each GPU with peer access to the others
      * ``copy_engine_gather.py``, the recipe before: memory, model and training come from it

.. verification-badge::

The idea
--------

NCCL's reduce-scatter keeps compute cores busy for as long as the bytes are on their way. Split it:
the transfer goes to the copy engines, and a kernel adds what has arrived at the full speed of the
memory.

Weights lie still between two updates, so whoever needs them pulls them, and nothing must be agreed
for each gather. Gradients are new each time and go away at once. They are **pushed**: the copy
starts when they are computed, without asking whether the other ranks are as far; they need no
special memory, only the slots do that they are written to. Behind the copies stands one barrier,
and behind it each rank adds what lies in its slot to its own part.

.. lanes:: Schematic, one rank. When slot A is written again, every rank has passed barrier 2, and added before.

   compute:  0-6 backward of unit 2; 6-12 unit 1; 12-18 unit 0
   reduce:   6-9 push to slots A ~; 10-11 add; 12-15 push to slots B ~; 16-17 add; 18-21 push to slots A ~; 22-23 add
   @9 1
   @15 2
   @21 3
"""

# %%
# Imports
# -------

import os
from collections.abc import Sequence

import copy_engine_gather as copy_engine
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

SLOTS = 2  # written in turn; one would need a second barrier

# %%
# Push, barrier, add
# ------------------
# A slot has a place for each other rank, so that no two write to the same one. When a rank writes
# to a slot for the second time, it has passed the barrier of the call between. Every other rank has
# reached that barrier, too, and so has queued before it the addition that read the slot.
#
# ``reduce_scatter(out, gradient)`` is all that a schedule of one's own needs. FSDP2 passes the
# reduction as well, and asks ``allocate`` for its buffers: they may be anywhere.


class PushReduceScatter:
    """The sum or mean over ranks of a gradient, of which each rank gets its part.

    Args:
        memory: used for nothing else: its barrier runs on the stream of the reductions.
        numel: elements of the largest part, which is a gradient over the number of ranks.
        dtype: of the gradients.

    All ranks must call it for the same gradients in the same order, on one stream.

    Raises:
        ValueError: there is one rank only.
    """

    def __init__(self, memory: copy_engine.PeerMemory, numel: int, dtype: torch.dtype) -> None:
        if memory.ranks == 1:
            raise ValueError("one rank has nobody to push to: its gradients are reduced already")
        size = (memory.ranks - 1, numel)
        self.slots = [memory.empty(size, dtype=dtype) for _ in range(SLOTS)]
        self.memory, self.calls = memory, 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor, input_tensor, group=None, op=dist.ReduceOp.SUM, async_op=False
    ) -> None:
        """Queue on the current stream the reduction of this rank's part of ``input_tensor``.

        Args:
            output_tensor: contiguous, receives the part.
            input_tensor: contiguous, the parts of all ranks one behind the other.
            op: SUM or AVG.

        Raises:
            ValueError: ``op`` is another reduction.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"a push adds or averages: {op} is neither")
        rank, ranks = self.memory.rank, self.memory.ranks
        slot = self.slots[self.calls % len(self.slots)]
        self.calls += 1
        parts, total = input_tensor.view(ranks, -1), output_tensor.view(-1)
        of_all_ranks = self.memory.of_all_ranks[slot.data_ptr()]
        for step in range(1, ranks):
            owner = (rank + step) % ranks
            place = of_all_ranks[owner][step - 1]
            place[: len(total)].copy_(parts[owner], non_blocking=True)
        self.memory.barrier()
        mine = parts[rank]
        for arrived in slot:
            mine = torch.add(mine, arrived[: len(total)], out=total)
        if op == dist.ReduceOp.AVG:
            total.div_(ranks)


# %%
# Plugged into FSDP2
# ------------------
# One object serves all units: FSDP2 calls it on its reduce-scatter stream, one unit after another.


def reduce_by_copy_engines(
    model: FSDPModule, gathers: Sequence[copy_engine.CopyEngineAllGather]
) -> PushReduceScatter:
    """Have every unit of ``model`` reduce its gradients by pushes, from now on. Collective.

    Args:
        gathers: what ``gather_by_copy_engines`` returned for ``model``; at least one.
    """
    memory = copy_engine.PeerMemory(gathers[0].memory.group, gathers[0].memory.device)
    numel = max(gather.shard.numel() for gather in gathers)
    push = PushReduceScatter(memory, numel, gathers[0].shard.dtype)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(push)
    return push


# %%
# Run it, and prove it
# --------------------
# The sum of two numbers does not depend on their order, so on two ranks every bit must be that of
# FSDP2's own reduce-scatter. On more ranks the order of the additions differs, each of which may
# round the last bit of a gradient; the losses must agree to a few roundings.


def prove(device: torch.device) -> None:
    expected = copy_engine.train(*copy_engine.build(device, None), device)
    model, optimizer = copy_engine.build(device, None)
    gathers = copy_engine.gather_by_copy_engines(model, optimizer)
    if not gathers:
        return
    push = reduce_by_copy_engines(model, gathers)
    found = copy_engine.train(model, optimizer, device)
    if dist.get_world_size() == 2:
        for name, tensors in expected.items():
            pairs = zip(found[name], tensors, strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), f"{name} are not those of FSDP2"
    for loss, of_fsdp in zip(found["losses"], expected["losses"], strict=True):
        torch.testing.assert_close(loss, of_fsdp, rtol=1e-6, atol=0)
    assert push.calls == copy_engine.UNITS * copy_engine.STEPS, "FSDP2 reduced by itself"
    kept = sum(slot.nbytes for slot in push.slots)
    print(f"{push.calls} reduce-scatters by pushes, {kept} bytes of slots")


def main() -> None:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device.index)
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(**({} if "RANK" in os.environ else alone))
    try:
        prove(device)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

# %%
# What it buys
# ------------
# Under FSDP2 it costs time, in a schedule of one's own it saves much. FSDP2 lays a unit's gradients
# into one buffer before it reduces them: the push begins late, is long, and the addition comes
# last. A schedule that reduces each parameter as its gradient comes (:doc:`prefetch_schedule`) has
# many short pushes beside the matmuls that follow: ``prefetch_copy_engine`` gathers by peer copies
# and pushes, where ``prefetch`` uses NCCL for both. It is ahead at every size, most at few tokens a
# step, and takes less of the device's memory. What the columns say: :doc:`stream_context`.
#
# .. result-figure:: fsdp_overlap
#    :rows: fsdp2 fsdp2_copy_engine prefetch prefetch_copy_engine
#
# .. result-table:: fsdp_overlap
#    :rows: fsdp2 fsdp2_copy_engine prefetch prefetch_copy_engine
#
# .. timeline:: fsdp_overlap prefetch prefetch_copy_engine
#
# Pushes under FSDP2 are in a table of their own. It is of an earlier run, which compared steps that
# were timed apart instead of windows in turn: shares by the two methods differ by up to a few
# points. By that earlier method, ``fsdp2_copy_engine_reduce`` was, at both sizes, behind
# ``fsdp2_copy_engine``, which leaves gradients to NCCL.
#
# .. result-table:: fsdp_overlap
#    :rows: fsdp2_copy_engine_reduce
#
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built. These are races between ranks, so the ranks
# take turns in the worst order: rank 0 first or last between any two collectives. The recipe itself
# passes in both orders.
#
# .. recipe-controls::
#
# Memory
# ------
# Symmetric memory for the slots, with :math:`N` ranks:
#
# .. math::
#
#    2 \, (N - 1) \max_{\text{gradients}} \frac{\text{padded numel}}{N}
#    \times \text{bytes of the gradient's dtype}
#
# "Gradients" are those of a whole unit under FSDP2, and of one parameter in a schedule that reduces
# them one by one: a quarter of what FSDP2's slots take, if a unit has four matrices of one size.
#
# When it is not worth it
# -----------------------
# * Many ranks: every rank writes to all others and adds as many parts, where NCCL's ring adds while
#   it passes them on.
# * Communication is hidden, and the matmuls beside it are not slowed down enough to notice.
# * Under FSDP2, unless your own measurement says otherwise: take :doc:`copy_engine_gather` alone.
#
# Known limits
# ------------
# * Gradients in bfloat16 are rounded after each addition; on two ranks that is as in NCCL.
# * Parts travel in the dtype that is gathered and are added in ``reduce_dtype``. bf16 weights
#   reduced in fp32 lose nothing, unless gradients were accumulated in fp32 before
#   (``set_requires_gradient_sync(False)``): those are rounded on the way, without an error.
# * All ranks must reduce the same gradients: a rank that skips a unit leaves the others waiting.
# * The barrier's kernel holds one block of a compute core until the last rank has pushed.
#
# Further reading
# ---------------
# * `Symmetric memory <https://docs.pytorch.org/docs/stable/symmetric_memory.html>`__ in PyTorch,
#   whose own low-contention reduce-scatter pushes into a workspace in the same way, with a barrier
#   on either side
