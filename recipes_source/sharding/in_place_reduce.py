# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, sharding/in_place_reduce.py
"""
FSDP2 without copies around its reductions
==========================================

One call, and a ``fully_shard`` model sends each gradient straight to the rank that owns it, from
where autograd left it, in the dtype that it is held in. On two ranks every bit stays stock FSDP2's,
for ``reduce_dtype`` float32, bfloat16 and None. What both calls gain: :doc:`in_place_gather`.

**When not to bother:** many ranks, since each sends to all others and adds as many parts; several
hosts; or communication costs you little.

.. code-block:: python

   from in_place_gather import gather_in_place  # the recipe before
   from in_place_reduce import reduce_in_place

   fully_shard(model)  # as before, units first
   gather_in_place(model)
   reduce_in_place(model)

Stock FSDP2 copies a unit's gradients into a buffer of ``reduce_dtype`` on the compute stream,
between the unit's backward and the next one's, and reduces that with a kernel that takes compute
cores: with bfloat16 gradients reduced in float32, twice the bytes cross the link.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * gradients taken before FSDP2 looks for them, a unit at a time
      * push, one barrier, one sum: why two slots save a second barrier
      * sums that round as FSDP2's do, whatever travels

   .. grid-item-card:: What you need

      * PyTorch 2.11 or later; ranks on one host, each GPU with peer access to the others
      * ``peer_memory.py`` beside it; the proof trains as ``in_place_gather.py`` does

.. verification-badge::

The idea
--------

A reduce-scatter is a transfer, which copy engines can make, and a sum, which needs the cores for as
long as reading and writing take. Weights lie still between two updates, so whoever needs them pulls
them. Gradients are new each time: they are **pushed** as soon as they are there, into a slot of the
rank that owns them, and only the slots need memory that others can write to. Behind the pushes
stands one barrier, and behind that one kernel sums what all ranks have left in the slot.

.. lanes:: Schematic, one rank. When slot A is written again, every rank has passed barrier 2, and summed before.

   compute:  0-6 backward 2; 6-12 backward 1; 12-18 backward 0
   reduce:   6-9 push to slots A ~; 10-11 sum; 12-15 push to slots B ~; 16-17 sum; 18-21 push to slots A ~; 22-23 sum
   @9 1
   @15 2
   @21 3
"""

# %%
# Imports and sizes
# -----------------

import importlib.util
from collections import deque

import peer_memory
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

BATCH_BYTES = 128 << 20  # of gradients that are pushed between two barriers
ALIGNMENT = 512  # bytes, of a slot's rows
WAITING = 2  # units whose gradients are kept until they have been pushed

NAMES = "post_backward finalize_backward reduce_grads gradient_divide_factor _all_reduce_hook"


# %%
# Push, barrier, sum
# ------------------
# A slot has a row for each rank, so that no two write to the same one. Sums have a stream of their
# own: the next batch is pushed meanwhile. A rank that writes to a slot for the second time has passed
# the barrier of the batch between; every other rank has reached that barrier too, and waits before it
# for the sum that read the slot.
#
# A batch is a few matrices of one unit, not a parameter and not a whole unit: one barrier serves
# all, and the next batch is pushed while backward goes on. Where the parts of a batch go is worked
# out once, in ``plan``. This rank's part of a batch of one matrix is added from where it is.
#
# **What is rounded, and when.** FSDP2 casts gradients to ``reduce_dtype``, sums, divides, and casts
# to the parameter's dtype. Parts travel here in the dtype that they are held in, which loses
# nothing; the sum is made in float32 and rounded once to ``reduce_dtype``. Of two summands that is
# the same bit. The rounded sum has memory of its own, since a compiler leaves out a cast that the next
# one undoes. A gradient that is wider than ``reduce_dtype`` is rounded before it is sent, as
# FSDP2 does. PyTorch 2.15 reads ``reduce_dtype=None`` from the parameter: so does this, as it asks
# FSDP2's group.
#
# **Where sums are kept.** They become ``.grad`` and live to the update. Their memory is taken from
# the compute stream's allocator, which has just got the activations' back: of the reducing stream
# it would be memory beside the activations' peak. So the reducing stream waits for the compute
# before it writes there, and nothing is let go before its event.


class PushedGradients:
    """Reduces gradients of one group of ranks by pushes into slots of their owners."""

    def __init__(self, memory: peer_memory.PeerMemory) -> None:
        self.memory, self.streams = memory, torch.get_device_module(memory.device)
        self.stream, self.sums = (self.streams.Stream(priority=-1) for _ in range(2))
        self.slots: list[list[torch.Tensor]] = []  # two, each by rank: (ranks, bytes)
        self.plans: dict[tuple, tuple] = {}
        self.under_way: deque = deque()
        self.retired: list = []
        self.calls = self.batches = 0
        fused = memory.device.type == "cuda" and importlib.util.find_spec("triton") is not None
        self.average = torch.compile(average, dynamic=True) if fused else average

    def slot(self, nbytes: int) -> list[torch.Tensor]:
        """The slot whose turn it is, by rank. Larger ones, which are rare, are a collective."""
        if not self.slots or self.slots[0][0].shape[1] < nbytes:
            self.retired.append(self.slots)  # others may still write to them
            size = (self.memory.ranks, -(-nbytes // ALIGNMENT) * ALIGNMENT)
            self.slots = [self.memory.empty(size, torch.uint8) for _ in range(2)]
            self.plans.clear()
        return self.slots[self.batches % 2]

    def plan(self, parameters: tuple, dtype: torch.dtype) -> tuple:
        """Where the parts of a batch go: by owner and parameter, and this rank's slot as a table."""
        key = (*map(id, parameters), dtype, self.batches % 2)
        numels = [p.padded_sharded_param_size.numel() for p in parameters]
        slot = self.slot(sum(numels) * dtype.itemsize)
        if key not in self.plans:
            rank = self.memory.rank
            flat = [t[:, : sum(numels) * dtype.itemsize].view(dtype) for t in slot]
            places = [owner[rank].split(numels) for owner in flat]
            self.plans[key] = (numels, places, flat[rank])
        return self.plans[key]

    @torch.no_grad()
    def reduce(self, group, taken: list) -> None:
        """Queue the reduction of ``taken``, parameters and gradients of one unit."""
        current, totals = self.streams.current_stream(), []
        for batch in batches(taken):
            numel = sum(p.padded_sharded_param_size.numel() for p, _ in batch)
            totals.append(batch[0][1].new_empty(numel, dtype=batch[0][0].orig_dtype))  # see above
        self.stream.wait_stream(current)
        with self.streams.stream(self.stream):
            for batch, total in zip(batches(taken), totals, strict=True):
                self.reduce_batch(group, batch, total)
        event = self.sums.record_event()
        self.calls += 1
        self.under_way.append((event, taken, totals))
        self.drain(WAITING)

    def reduce_batch(self, group, batch: list, total: torch.Tensor) -> None:
        rank, ranks = self.memory.rank, self.memory.ranks
        parameters, gradients = tuple(p for p, _ in batch), [g for _, g in batch]
        dtype = group._reduce_dtype or getattr(parameters[0], "unsharded_grad_dtype", None)
        dtype = dtype or gradients[0].dtype  # before torch 2.15
        if dtype.itemsize < gradients[0].itemsize:  # rounded before they are sent, as FSDP2 does
            gradients = [g.to(dtype) for g in gradients]
        numels, places, arrived = self.plan(parameters, gradients[0].dtype)
        self.batches += 1
        flat = [g.contiguous().view(-1) for g in gradients]
        rows, mine = list(arrived), flat[0][rank * numels[0] : (rank + 1) * numels[0]]
        if sum(numels) == len(mine) and flat[0].data_ptr() == batch[0][1].data_ptr():
            rows[rank] = mine  # of a single matrix, and no copy: it is added from where it is
        for step in range(1, ranks + (rows[rank] is not mine)):  # the last is this rank itself
            owner = (rank + step) % ranks
            for grad, numel, place in zip(flat, numels, places[owner], strict=True):
                part = grad[owner * numel : (owner + 1) * numel]  # the last may be short or empty
                place[: len(part)].copy_(part, non_blocking=True)
        self.stream.wait_stream(self.sums)  # of the batch before, whose slot is next
        self.memory.barrier()
        self.sums.wait_stream(self.stream)
        with self.streams.stream(self.sums):
            wider = dtype.itemsize < total.dtype.itemsize
            rounded = torch.empty_like(total, dtype=dtype) if wider else total
            self.average(rounded, rows, group.gradient_divide_factor != 1)
            if wider:
                total.copy_(rounded)
            for p, part in zip(parameters, total.split(numels), strict=True):
                self.accumulate(p, part.as_strided(p.sharded_size, p.contiguous_sharded_stride))

    def accumulate(self, p, gradient: torch.Tensor) -> None:
        sharded = p.sharded_param
        if sharded.grad is None:
            sharded.grad = p.to_sharded_dtensor(gradient)
        else:
            sharded.grad._local_tensor.add_(gradient)
        for hook in (getattr(sharded, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(sharded)

    def drain(self, keep: int) -> None:
        """Let the compute stream wait for all but the last ``keep`` units; free their gradients."""
        while len(self.under_way) > keep:
            self.streams.current_stream().wait_event(self.under_way.popleft()[0])


def average(total: torch.Tensor, rows: list[torch.Tensor], mean: bool) -> None:
    """The sum or the mean of ``rows``, rounded once, into ``total``; one pass."""
    total.copy_(sum(row.float() for row in rows) * (1 / len(rows) if mean else 1))


def batches(taken: list) -> list[list]:
    """Parts of ``taken`` of one dtype and at most BATCH_BYTES, or one parameter."""
    found: list[list] = [[]]
    for item in taken:
        batch = found[-1]
        full = sum(g.nbytes for _, g in [*batch, item]) > BATCH_BYTES
        if batch and (full or item[1].dtype != batch[0][1].dtype):
            found.append([])
        found[-1].append(item)
    return found


# %%
# What FSDP2 calls
# ----------------
# FSDP2 calls ``post_backward`` when a unit's gradients are there. They are taken first, so that it
# finds none, reshards the unit and returns. What it reduces in other ways stays its own: HSDP's
# second reduction, float16 with its two divisions, float64, hooks, factors that are neither 1 nor the number
# of ranks. Gradients that ``set_requires_gradient_sync(False)`` holds back wait as they do there.


class InPlaceReduce:
    """Methods of an FSDP2 group of parameters, around its own."""

    _reduce_scatter_comm = peer_memory.settled("_reduce_scatter_comm")

    def post_backward(self, *unused) -> None:
        taken = self.take()  # FSDP2 finds no gradient, and reshards
        super().post_backward(*unused)
        if taken:
            self.pushed.reduce(self, taken)

    def take(self) -> list:
        if not self.reduce_grads or self.why_stock():
            return []
        taken = []
        for p in self.fsdp_params:
            accumulate = getattr(p, "accumulate_unsharded_grad_if_needed", None)
            if accumulate is not None:  # before torch 2.15, whose .grad holds all of it
                accumulate()
            if accumulate is not None and p.unsharded_accumulated_grad is not None:
                taken.append((p, p.unsharded_accumulated_grad_data))
                p.unsharded_accumulated_grad = None
            elif hasattr(p, "_unsharded_param") and p.unsharded_param.grad is not None:
                taken.append((p, p.unsharded_grad_data))
                p.unsharded_param.grad = None
        return taken

    def why_stock(self) -> bool:
        """Whether this backward's reduction is one that FSDP2 must do."""
        factor = self.gradient_divide_factor
        return (
            factor not in (None, 1, self.pushed.memory.ranks)
            or self._all_reduce_hook is not None
            or getattr(self, "reduce_scatter_unused_params", False)
            or (self._reduce_dtype or self.fsdp_params[0].orig_dtype)
            in (torch.float16, torch.float64)
        )

    def finalize_backward(self) -> None:
        super().finalize_backward()
        self.pushed.drain(0)


# %%
# One call
# --------


def reduce_in_place(model: FSDPModule) -> PushedGradients | None:
    """Have every unit of ``model`` reduce its gradients by pushes, from now on. Collective."""
    groups = peer_memory.copying_groups(model)
    chosen = [g for g in groups if not hasattr(g.mesh_info, "replicate_process_group")]
    if not chosen:
        return None
    group = chosen[0].mesh_info.shard_process_group
    pushed = PushedGradients(peer_memory.PeerMemory(group, chosen[0].device))
    for group in chosen:
        if missing := [name for name in NAMES.split() if not hasattr(group, name)]:
            raise RuntimeError(f"FSDP2 of torch {torch.__version__} has no {missing}: not for it")
        group.pushed = pushed
        peer_memory.become(group, InPlaceReduce)
    return pushed


# %%
# Run it, and prove it
# --------------------
# A sum of two does not depend on its order: on one and two ranks every loss and weight must have
# the bits of stock FSDP2, in each reduction's dtype. More ranks sum in another order.


def prove(device: torch.device) -> None:
    import in_place_gather as in_place

    for dtypes in ((), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)):
        policy = MixedPrecisionPolicy(*dtypes)
        expected = in_place.train(peer_memory.build(device, policy), device)
        model = peer_memory.build(device, policy, stock=False)
        in_place.gather_in_place(model)
        pushed = reduce_in_place(model)
        found = in_place.train(model, device)
        if dist.get_world_size() <= 2:
            assert peer_memory.same(found, expected), "not the bits of stock FSDP2"
        for tensor, of_fsdp in zip(found, expected, strict=True):
            torch.testing.assert_close(tensor, of_fsdp, rtol=0.05, atol=0.01)
        if pushed is not None:
            assert pushed.calls == peer_memory.UNITS * in_place.STEPS, "FSDP2 reduced by itself"
            print(f"{pushed.calls} reductions by pushes")


def main() -> None:
    peer_memory.run(prove)


if __name__ == "__main__":
    main()

# %%
# What it buys
# ------------
# ``fsdp2_in_place`` gathers and reduces in place. The table of :doc:`in_place_gather` has all ways;
# this one has the bits: ``bitwise_steps`` of a stock Llama on two GPUs under deterministic
# algorithms, after which every weight was that of stock FSDP2. A race would show there, where the
# noise of losses hides it.
#
# .. result-table:: fsdp_overlap
#    :rows: fsdp2 fsdp2_reduce_group fsdp2_in_place
#
# **Two communicators: do they pay?** ``fsdp2_reduce_group`` is stock FSDP2 with its reduce-scatters
# in a group of their own (:doc:`fsdp2_settings`), so that they do not wait for gathers. On two GPUs
# no: the interval of its speed against ``fsdp2`` holds 1. In place there is no communicator to share.
#
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built. For races between ranks these take turns in
# the worst order; a recorder of stream order reports a wait that is missing.
#
# .. recipe-controls::
#
# Memory
# ------
# Two slots of symmetric memory, outside the allocator's statistics, for batches of at most
# :math:`B` bytes of gradients or one parameter:
#
# .. math::
#
#    2 \, \max(B, \text{bytes of the largest gradient})
#
# and the gradients of two units until they have been pushed.
#
# When it is not worth it
# -----------------------
# * Many ranks: every rank writes to all others, where NCCL's ring adds while it passes parts on.
# * One enormous parameter, an embedding say, makes slots of its size.
#
# Known limits
# ------------
# * All ranks must reduce the same gradients in the same order: one that skips a unit leaves the
#   others waiting, as in FSDP2.
# * A reduce-scatter of your own (``set_custom_reduce_scatter``) is kept, if it is set before the call;
#   set later it is an error.
# * Accumulation in float32 makes gradients twice as wide: slots grow once, in a collective.
# * The barrier's kernel holds one block of a compute core until the last rank has pushed.
#
# Further reading
# ---------------
# * `Reduce-scatters in a group of their own <https://github.com/pytorch/pytorch/issues/186335>`__
# * `Symmetric memory <https://docs.pytorch.org/docs/stable/symmetric_memory.html>`__ in PyTorch
