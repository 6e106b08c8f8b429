# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, sharding/in_place_reduce.py
"""
FSDP2 without copies around its reductions
==========================================

One call, and a ``fully_shard`` model sends each gradient straight to the rank that owns it, from
where autograd left it, in the dtype that it is held in. On two ranks every bit stays stock FSDP2's,
for ``reduce_dtype`` float32, bfloat16 and None. :doc:`in_place_gather` shows what this call and its
own gain together.

**When not to bother:** many ranks, since each sends to all others and adds as many parts; several
hosts; or communication costs you little.

.. code-block:: python

   from in_place_gather import gather_in_place  # the recipe before
   from in_place_reduce import reduce_in_place

   for layer in model.layers:
       fully_shard(layer)  # as before; each module that it is called with is a unit
   fully_shard(model)
   gather_in_place(model)
   reduce_in_place(model)

Stock FSDP2 copies a unit's gradients into a buffer of ``reduce_dtype`` on the compute stream,
between the unit's backward and the next one's, and reduces that with a kernel that takes compute
cores (SMs). If bfloat16 gradients are reduced in float32, it sends twice their bytes.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * gradients taken before FSDP2 looks for them, a unit at a time
      * push, one barrier, one sum: why three slots save a second barrier
      * sums that round as FSDP2's do, whatever travels

   .. grid-item-card:: What you need

      * PyTorch 2.11 or later; ranks on one host, each GPU with peer access to the others
      * ``peer_memory.py`` beside it; the proof trains as ``in_place_gather.py`` does

.. verification-badge::

The idea
--------

A reduce-scatter is a transfer, which copy engines can make, and a sum, which needs the cores, but
only for as long as reading and writing take. Weights do not change between two updates, so whoever
needs them pulls them. Gradients are new each time: they are **pushed** as soon as backward has made
them, into a slot on the rank that owns them. Only the slots need memory that others can write to.
After the pushes comes one barrier. One unit later, the compute stream sums what all ranks have left
in the slot.

.. lanes:: Schematic, one rank. Slot A is written again after barrier 3, which no rank passes before all have summed what was there.

   compute:  0-6 backward 2; 6-12 backward 1; 12-13 sum 2; 13-19 backward 0; 19-20 sum 1; 22-24 sum 0
   reduce:   6-9 push to slots A ~; 12-15 push to slots B ~; 19-22 push to slots C ~
   @9 1
   @15 2
   @22 3
"""

# %%
# Imports
# -------

import importlib.util
from itertools import accumulate

import peer_memory
import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

ALIGNMENT = 512  # bytes, of each gradient's part in a slot
SLOTS = 3  # that units take turns in

NAMES = "post_backward pre_forward reduce_grads gradient_divide_factor _all_reduce_hook"


# %%
# Push, barrier, and the sum a unit later
# ---------------------------------------
# Pushes have a stream of their own. Like that of the gathers it has ordinary priority: on an H200,
# while a stream of high priority, as FSDP2's own are, ran kernels now and then, those of the compute
# stream started later, each of them. A unit's sum is made on the compute stream, when the next unit's
# gradients are there: by then the parts have arrived. On another stream a sum would run beside
# matrix products and take cores from them. A rank's own part is not sent: it is added from where it
# is. On a GPU with Triton, ``torch.compile`` makes a sum one kernel.
#
# A slot has a row for each other rank, so that no two write to the same one. A unit's pushes and
# its barrier come after all that the compute stream had queued before, which includes the sum of
# the unit before the last. So a rank that writes to one of three slots again has passed a barrier
# that every other rank reached only after it had summed what was there. With two slots each barrier
# would have to wait for one sum more; at the end of a backward, where nothing hides them, pushes
# and sums would take turns. ``plan`` works out once where the parts of a unit go.
#
# **What is rounded, and when.** FSDP2 casts gradients to ``reduce_dtype``, sums, divides, and casts
# to the parameter's dtype. Parts travel here in the dtype that they are held in, which loses
# nothing; the sum is made in float32 and rounded once to ``reduce_dtype``. For two summands the
# bits are the same. The rounded sum has memory of its own, since ``torch.compile`` leaves out a
# cast that the next one undoes. A gradient that is wider than ``reduce_dtype`` is rounded before it
# is sent, as FSDP2 does. With ``reduce_dtype=None`` PyTorch 2.15 takes the parameter's dtype; so
# does this recipe, since it asks FSDP2's group.


class PushedGradients:
    """Reduces gradients of one group of ranks by pushes into slots of their owners."""

    def __init__(self, memory: peer_memory.PeerMemory, groups: list) -> None:
        self.memory, self.streams = memory, torch.get_device_module(memory.device)
        self.parameters = [group.fsdp_params for group in groups]
        self.stream = self.streams.Stream()
        self.slots: list[list[torch.Tensor]] = []  # each by rank: (ranks - 1, bytes)
        self.waiting: list[tuple] = []  # pushed and not summed: one unit or none
        self.plans, self.retired, self.calls = {}, [], 0
        fused = memory.device.type == "cuda" and importlib.util.find_spec("triton") is not None
        self.average = torch.compile(average, dynamic=True) if fused else average

    def slot(self, nbytes: int) -> list[torch.Tensor]:
        """The slot whose turn it is, by rank. Larger ones, which are rare, are a collective."""
        if not self.slots or self.slots[0][0].shape[1] < nbytes:
            self.retired.append(self.slots)  # others may still write to them
            size = (self.memory.ranks - 1, max(nbytes, *map(largest, self.parameters)))
            self.slots = [self.memory.empty(size, torch.uint8) for _ in range(SLOTS)]
            self.plans.clear()
        return self.slots[self.calls % SLOTS]

    def plan(self, parameters: tuple, dtypes: tuple) -> tuple[list[int], dict, dict]:
        """Sizes of parts; where they go, by owner; where those for this rank arrive, by sender."""
        rank, ranks = self.memory.rank, self.memory.ranks
        numels = [p.padded_sharded_param_size.numel() for p in parameters]
        nbytes = [n * dtype.itemsize for n, dtype in zip(numels, dtypes, strict=True)]
        places = [0, *accumulate(-(-n // ALIGNMENT) * ALIGNMENT for n in nbytes)]
        slot, key = self.slot(places[-1]), (*map(id, parameters), dtypes, self.calls % SLOTS)
        if key not in self.plans:

            def parts(owner: int, sender: int) -> list[torch.Tensor]:
                row = slot[owner][(sender - owner - 1) % ranks]
                zipped = zip(places, nbytes, dtypes, strict=False)
                return [row[at : at + n].view(dtype) for at, n, dtype in zipped]

            others = [(rank + step) % ranks for step in range(1, ranks)]
            pushes = {owner: parts(owner, rank) for owner in others}
            self.plans[key] = (numels, pushes, {sender: parts(rank, sender) for sender in others})
        return self.plans[key]

    @torch.no_grad()
    def reduce(self, group, taken: list) -> None:
        """Queue the pushes of ``taken``, parameters and gradients of one unit; then the sums before."""
        parameters, flat, dtypes = tuple(p for p, _ in taken), [], []
        for p, gradient in taken:
            dtype = group._reduce_dtype or getattr(p, "unsharded_grad_dtype", None)
            dtypes.append(dtype or gradient.dtype)  # before torch 2.15
            if dtypes[-1].itemsize < gradient.itemsize:  # rounded before it is sent, as FSDP2 does
                gradient = gradient.to(dtypes[-1])
            flat.append(gradient.contiguous().view(-1))
        numels, places, arrived = self.plan(parameters, tuple(g.dtype for g in flat))
        if not self.waiting:
            Variable._execution_engine.queue_callback(self.finish)  # at the end of this backward
        current = self.streams.current_stream()
        if self.waiting and self.waiting[0][0] != current:
            self.finish()  # before others write to its slot
        self.stream.wait_stream(current)
        with self.streams.stream(self.stream):
            self.push(flat, numels, places)
            self.memory.barrier()
            event = self.stream.record_event()
        self.calls += 1  # first: a hook in `finish` may raise on one rank alone
        self.finish()
        self.waiting.append((current, event, group, parameters, dtypes, flat, numels, arrived))

    def push(self, flat: list[torch.Tensor], numels: list[int], places: dict) -> None:
        for owner, parts in places.items():
            for gradient, numel, part in zip(flat, numels, parts, strict=True):
                its = gradient[owner * numel : (owner + 1) * numel]  # the last may be short
                part[: len(its)].copy_(its, non_blocking=True)

    @torch.no_grad()
    def finish(self) -> None:
        """Sum what has been pushed, on the stream that its gradients were made on."""
        current = self.streams.current_stream()
        if self.waiting and (before := self.waiting[0][0]) != current:
            with self.streams.stream(before):
                self.finish()  # their memory goes back to that stream
            current.wait_stream(before)
        while self.waiting:
            _, event, group, parameters, dtypes, flat, numels, arrived = self.waiting.pop()
            current.wait_event(event)
            rank, ranks = self.memory.rank, self.memory.ranks
            for i, (p, dtype) in enumerate(zip(parameters, dtypes, strict=True)):
                mine = flat[i][rank * numels[i] : (rank + 1) * numels[i]]
                rows = [arrived[r][i][: len(mine)] if r != rank else mine for r in range(ranks)]
                wider = dtype.itemsize < p.orig_dtype.itemsize
                rounded = torch.empty_like(mine, dtype=dtype if wider else p.orig_dtype)
                if len(mine):
                    self.average(rounded, rows, group.gradient_divide_factor != 1)
                total = rounded.to(p.orig_dtype)
                add(p, total.as_strided(p.sharded_size, p.contiguous_sharded_stride))


def largest(parameters: list) -> int:
    """Bytes of a unit's row in a slot, if all its gradients come as its weights are gathered."""
    trained = [p for p in parameters if p.sharded_param.requires_grad]
    dtypes = [getattr(p, "param_dtype", None) or p.sharded_param.dtype for p in trained]
    items = zip((p.padded_sharded_param_size.numel() for p in trained), dtypes, strict=True)
    return sum(-(-n * dtype.itemsize // ALIGNMENT) * ALIGNMENT for n, dtype in items)


def average(total: torch.Tensor, rows: list[torch.Tensor], mean: bool) -> None:
    """The sum or the mean of ``rows``, rounded once, into ``total``; one pass."""
    total.copy_(sum(row.float() for row in rows) * (1 / len(rows) if mean else 1))


def add(p, gradient: torch.Tensor) -> None:
    """To the gradient of the shard, as FSDP2 does; then the hooks that wait for it."""
    sharded = p.sharded_param
    if sharded.grad is None:
        sharded.grad = p.to_sharded_dtensor(gradient)
    else:
        sharded.grad._local_tensor.add_(gradient)
    for hook in (getattr(sharded, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(sharded)


# %%
# What FSDP2 calls
# ----------------
# FSDP2 calls ``post_backward`` when a unit's gradients are there. They are taken first, so that
# FSDP2 finds none, reshards the unit and returns. What it reduces in other ways stays its own:
# HSDP's second reduction, float16 with its two divisions, float64, complex numbers, hooks, factors
# that are neither 1 nor the number of ranks. Gradients that ``set_requires_gradient_sync(False)``
# holds back wait as they do in stock FSDP2.


class InPlaceReduce:
    """Methods of an FSDP2 group of parameters, around its own."""

    _reduce_scatter_comm = peer_memory.settled("_reduce_scatter_comm")

    def post_backward(self, *unused) -> None:
        taken = self.take()  # FSDP2 finds no gradient, and reshards
        super().post_backward(*unused)
        if taken:
            self.pushed.reduce(self, taken)

    def take(self) -> list:
        taken: list = []
        for p in self.fsdp_params if self.reduce_grads and not self.why_stock() else ():
            if collect := getattr(p, "accumulate_unsharded_grad_if_needed", None):
                collect()  # before torch 2.15, whose .grad holds all of it
            if collect and p.unsharded_accumulated_grad is not None:
                taken.append((p, p.unsharded_accumulated_grad_data))
                p.unsharded_accumulated_grad = None
            elif hasattr(p, "_unsharded_param") and p.unsharded_param.grad is not None:
                taken.append((p, p.unsharded_grad_data))
                p.unsharded_param.grad = None
        return taken

    def why_stock(self) -> bool:
        """Whether this backward's reduction is one that FSDP2 must do."""
        dtype = self._reduce_dtype or (p := self.fsdp_params[0]).param_dtype or p.orig_dtype
        return (
            self.gradient_divide_factor not in (None, 1, self.pushed.memory.ranks)
            or self._all_reduce_hook is not None
            or getattr(self, "reduce_scatter_unused_params", False)
            or dtype not in (torch.float32, torch.bfloat16)
        )

    def pre_forward(self, *arguments):
        if torch._C._current_graph_task_id() == -1:
            self.pushed.waiting.clear()  # of a backward that raised: its gradients are not wanted
        return super().pre_forward(*arguments)

    def _reset_iter_state(self) -> None:
        self.pushed.waiting.clear()  # of the same: a backward may come next, not a forward
        super()._reset_iter_state()


# %%
# One call
# --------


def reduce_in_place(model: FSDPModule) -> PushedGradients | None:
    """Have every unit of ``model`` reduce its gradients by pushes, from now on. Collective."""
    groups = peer_memory.copying_groups(model)
    chosen = [g for g in groups if not hasattr(g.mesh_info, "replicate_process_group")]
    if not chosen:
        return None
    if missing := [name for name in NAMES.split() if not hasattr(chosen[0], name)]:
        raise RuntimeError(f"FSDP2 of torch {torch.__version__} has no {missing}: not for it")
    group = chosen[0].mesh_info.shard_process_group
    pushed = PushedGradients(peer_memory.PeerMemory(group, chosen[0].device), chosen)
    peer_memory.become(chosen, InPlaceReduce)
    for group in chosen:
        group.pushed = pushed
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
        assert dist.get_world_size() > 2 or peer_memory.same(found, expected), "not stock's bits"
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.01)
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
# ``fsdp2_in_place`` gathers and reduces in place; :doc:`in_place_gather` has more rows. First the
# bits: a stock Llama of a few layers trained for the number of steps below, under deterministic
# algorithms. Every loss on the way, and every weight at the end, was that of stock FSDP2. A race
# would show there.
#
# .. result-gain:: fsdp_overlap
#    :rows: fsdp2_in_place
#    :field: bitwise_steps
#
# .. result-table:: fsdp_overlap
#    :rows: fsdp2 fsdp2_reduce_group fsdp2_in_place
#    :where: model=llama-8b-blocks loop=reads compiled=no activation_checkpointing=no
#
# **Two communicators: do they pay?** ``fsdp2_reduce_group`` is stock FSDP2 with its reduce-scatters
# in a group of their own (:doc:`fsdp2_settings`), so that they do not wait for gathers. On two GPUs
# no: the interval of its speed against ``fsdp2`` contains 100 %. In place there is no communicator
# to share.
#
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built. For races between ranks, the ranks take turns
# in the worst order; a recorder of stream order reports a missing wait.
#
# .. recipe-controls::
#
# Memory
# ------
# Three slots of symmetric memory on each of :math:`N` ranks, outside the allocator's statistics:
#
# .. math::
#
#    3 \, \frac{N - 1}{N} \times \text{bytes of the gradients of the largest unit}
#
# and a unit's gradients until the next one's are there.
#
# When it is not worth it
# -----------------------
# * Many ranks: every rank writes to all others, where NCCL's ring adds while it passes parts on.
# * One enormous unit, an embedding say, makes slots of its size.
#
# Known limits
# ------------
# * All ranks must reduce the same gradients in the same order: one that skips a unit leaves the
#   others waiting, as in FSDP2.
# * A reduce-scatter of your own (``set_custom_reduce_scatter``) is kept, if it is set before the call;
#   set later it is an error.
# * Branches on streams of their own: each unit is summed on its own stream before the next stream's
#   unit is pushed, so the branches' backwards wait for each other.
# * Accumulation in float32 makes gradients twice as wide: slots grow once, in a collective.
# * When a backward raises, one unit's gradients that stock FSDP2 has added by then are missing here.
# * Two forwards, and the backward of the second raises: call ``model.reset_iter_state()`` (PyTorch 2.13
#   on) before the backward of the first. Without it stock FSDP2 reduces no gradient of the root; here
#   those of other units are missing, too.
# * A unit's gradient is in ``.grad`` one unit later than with stock FSDP2, the last unit's at the end
#   of backward. So an optimizer in backward steps one unit later. A unit that runs twice under reentrant
#   checkpointing is then recomputed with the weights of before that step, **without an error**.
# * After an exception in backward, call ``zero_grad()`` before you go on. ``reset_iter_state()`` also
#   drops gradients that were pushed and not summed, **without an error**: stock FSDP2 has them in
#   ``.grad`` by then.
# * The barrier's kernel is one thread block, which holds its place on an SM until the last rank has
#   pushed.
#
# Further reading
# ---------------
# * `Reduce-scatters in a group of their own <https://github.com/pytorch/pytorch/issues/186335>`__
# * `Symmetric memory <https://docs.pytorch.org/docs/stable/symmetric_memory.html>`__ in PyTorch
