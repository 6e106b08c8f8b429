"""
How far copies go: a reduce-scatter by peer reads
=================================================

The all-gather only moves bytes, so copy engines can do all of it. A reduce-scatter also adds,
which they cannot. This recipe has them do the transfer and leaves one addition to the compute
cores, plugged into an unchanged FSDP2 model, and says what that costs.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * a communication object for ``set_custom_reduce_scatter``
      * one barrier for each unit, and why two buffers save the second
      * what the additions and the extra memory leave of the gain

   .. grid-item-card:: What you need

      * PyTorch 2.11 or later; ranks on one host, each GPU with peer access to the others
      * ``copy_engine_gather.py``, the recipe before: memory, model and training come from it

.. verification-badge::

The idea
--------

Each rank writes its gradients to symmetric memory. Behind a barrier it copies *its own part* of
every other rank's gradients, and adds the parts to its own.

Weights change once a step, so their readers need two barriers a step. Gradients are new for every
unit, so their readers need one for every unit, and the writer must not overwrite what others still
read. Two buffers in turn make one barrier do for both:

.. lanes:: Schematic, one rank. Behind barrier 2, every rank has read buffer A of barrier 1.

   compute:         0-6 backward of unit 2; 6-12 unit 1, to buffer B; 12-18 unit 0, to buffer A
   reduce-scatter:  6-9 copy from A's ~; 9-10 add; 12-15 copy from B's ~; 15-16 add; 18-21 copy from A's ~; 21-22 add
   @6 1
   @12 2
   @18 3
"""

# %%
# Imports
# -------

import math
import os
from collections.abc import Sequence

import copy_engine_gather as copy_engine
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

# %%
# The reduce-scatter of all units
# -------------------------------
# FSDP2 asks ``allocate`` for two buffers a unit: on the compute stream for the input, in which it
# lays the gradients so that each rank's part is contiguous, then on its reduce-scatter stream for
# the output. It fills the next input only when this rank's reduce-scatter of the unit before has
# ended. So when a buffer comes round again, this rank has passed the barrier of the unit between,
# and so has every other rank, behind its own reads.


class CopyEngineReduceScatter:
    """The reduce-scatter of all units of a model, for ``FSDPModule.set_custom_reduce_scatter``.

    Args:
        memory: used for nothing else: its barriers run on another stream than the optimizer's.
        numel: elements of the largest unit, with FSDP2's padding.
        dtype: of the gradients that are reduced.
    """

    def __init__(self, memory: copy_engine.PeerMemory, numel: int, dtype: torch.dtype) -> None:
        self.memory, self.calls = memory, 0
        self.inputs = [memory.empty([numel], dtype=dtype) for _ in range(2)]
        self.input_is_next = True

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device):
        """The input, a part of the buffer whose turn it is, and then the output."""
        self.input_is_next = not self.input_is_next
        if self.input_is_next:
            return torch.empty(size, dtype=dtype, device=device)
        self.inputs.reverse()
        return self.inputs[0][: math.prod(size)]

    def __call__(self, output_tensor, input_tensor, group, op, async_op: bool = False) -> None:
        """Reduce this rank's part of all ranks' ``input_tensor`` to ``output_tensor``.

        Raises:
            ValueError: ``op`` is neither AVG nor SUM.
        """
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise ValueError(f"{op} is not supported: use gradients' mean or sum")
        self.calls += 1
        rank, ranks = self.memory.rank, self.memory.ranks
        of_all_ranks = self.memory.of_all_ranks[self.inputs[0].data_ptr()]
        self.memory.barrier()
        parts = output_tensor.new_empty(ranks - 1, output_tensor.numel())
        for step, part in enumerate(parts, 1):
            theirs = of_all_ranks[(rank + step) % ranks][: input_tensor.numel()]
            part.copy_(theirs.view(ranks, -1)[rank], non_blocking=True)
        total = input_tensor.view(ranks, -1)[rank]
        for part in parts:
            total = torch.add(total, part, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(ranks)


# %%
# Plugged in
# ----------
# One object serves all units, so that they share its two buffers.


def reduce_by_copy_engines(
    model: FSDPModule, gathers: Sequence[copy_engine.CopyEngineAllGather]
) -> CopyEngineReduceScatter:
    """Have every unit of ``model`` reduce its gradients by peer copies, from now on. Collective.

    Args:
        gathers: what ``gather_by_copy_engines`` returned for ``model``; at least one.
    """
    memory = copy_engine.PeerMemory(gathers[0].memory.group, gathers[0].memory.device)
    numel = memory.ranks * max(gather.shard.numel() for gather in gathers)
    scatter = CopyEngineReduceScatter(memory, numel, gathers[0].shard.dtype)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(scatter)
    return scatter


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
    scatter = reduce_by_copy_engines(model, gathers)
    found = copy_engine.train(model, optimizer, device)
    if dist.get_world_size() == 2:
        for name, tensors in expected.items():
            assert all(map(torch.equal, found[name], tensors)), f"{name} are not those of FSDP2"
    for loss, of_fsdp in zip(found["losses"], expected["losses"], strict=True):
        torch.testing.assert_close(loss, of_fsdp, rtol=1e-6, atol=0)
    assert scatter.calls == copy_engine.UNITS * copy_engine.STEPS, "FSDP2 reduced by itself"
    kept = sum(buffer.nbytes for buffer in scatter.inputs)
    print(f"{scatter.calls} reduce-scatters by peer copies, {kept} bytes of symmetric memory more")


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
# The transfer leaves the compute cores alone, the additions do not, and the parts that were copied
# are written and read once more than in NCCL's ring. Compare it with the recipe before, which
# leaves the reduce-scatter to NCCL:
#
# .. result-figure:: fsdp_overlap
#    :rows: fsdp2 fsdp2_copy_engine fsdp2_copy_engine_reduce
#
# .. result-table:: fsdp_overlap
#    :rows: fsdp2 fsdp2_copy_engine fsdp2_copy_engine_reduce
#
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built. For races between ranks, the ranks take turns
# in the worst order: rank 0 first or last between any two collectives.
#
# .. recipe-controls::
#
# Memory
# ------
# Symmetric memory for two inputs of the largest unit, and the copied parts of one on the device,
# with :math:`N` ranks:
#
# .. math::
#
#    \left(2 + \frac{N-1}{N}\right) \max_{\text{units}} \text{padded numel}
#    \times \text{bytes of the gradient's dtype}
#
# FSDP2 by itself holds one to two inputs. An input in symmetric memory is never given back between
# steps.
#
# When it is not worth it
# -----------------------
# * Mostly. Take it where profiles show NCCL's reduce-scatter slowing the products beside it by more
#   than the additions take. The all-gather is where copies pay: there are up to twice as many of
#   those, and nothing has to be added.
# * On more than a few ranks: every rank copies from all others, and sums as many parts.
#
# Known limits
# ------------
# * ``set_reduce_scatter_max_input_buffers`` must stay at 1, its default: with more inputs in flight
#   two buffers are too few.
# * Gradients in bf16 are rounded after each addition. ``reduce_dtype=torch.float32`` is not passed
#   on here: the buffers have the dtype that is gathered.
# * HSDP's all-reduce over hosts is FSDP2's own and follows as before.
#
# Further reading
# ---------------
# * `Symmetric memory <https://docs.pytorch.org/docs/stable/symmetric_memory.html>`__ in PyTorch,
#   whose own low-contention reduce-scatter also copies first and adds afterwards
