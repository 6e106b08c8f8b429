# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, sharding/prefetch_schedule.py
"""
Look ahead: prefetch, fewer gathers, gradients reduced beside backward
======================================================================

Gather a unit before it is asked for, keep what is needed again soon, and move the reduce-scatters
out of the way of backward. A schedule that knows which unit comes next can do all three. This
recipe puts such a schedule beside the delayed release of :doc:`stream_context`, on models whose
units keep one order and on models whose order changes every pass.

**When not to bother:** your model uses FSDP2. :doc:`fsdp2_settings` and :doc:`in_place_gather` are
for it.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * one rule for prefetching and for keeping: memory goes to what is needed soonest
      * why the turn-around from forward to backward is the place to save gathers
      * reduce-scatters on a stream of their own, and the memory that they hold
      * what a wrong prediction costs, and why it must cost no bit

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks; CPU runs everything, CUDA devices overlap it
      * ``stream_context.py``, the recipe before: units, events and hooks come from it
      * memory for three units' full weights and for a few full gradients

.. verification-badge::

The idea
--------

Backward needs the units in the reverse order of forward. So the last units of forward are the first
of backward, and whoever releases them in between gathers them twice in a row. Keep them, and let
each release make room for the unit that is needed next:

.. lanes:: Schematic: four units, room for three. Only unit 1 is gathered a second time.

   compute:  4-8 fwd 1; 8-12 fwd 2; 12-16 fwd 3; 16-20 fwd 4; 20-28 bwd 4; 28-36 bwd 3; 36-44 bwd 2; 44-52 bwd 1
   gather:   0-4 1 ~; 4-8 2 ~; 8-12 3 ~; 12-16 4 ~; 28-32 1 ~
   reduce-scatter:  28-33 4 ~; 36-41 3 ~; 44-49 2 ~; 52-57 1 !
   @20 2, 3 and 4 are kept

With room for :math:`B` of :math:`L` units, a pass gathers :math:`2L - B` units where delayed
release gathers :math:`2L`. A gather that does not happen costs nothing: no bandwidth, no slower
matmul beside it.
"""

# %%
# Imports and sizes
# -----------------
# ``BUFFERS`` and ``GRADIENTS`` bound the memory. More buffers mean fewer gathers and an earlier
# start of each; more gradients in flight let backward run further ahead of a slow reduce-scatter.

from collections import deque
from collections.abc import Iterable

import torch
import torch.distributed as dist
from stream_context import FsdpContext, Unit, rows
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

BUFFERS = 3  # units whose full weights may be in memory at once
GRADIENTS = 4  # full gradients that may wait for their reduce-scatter


# %%
# The schedule
# ------------
# ``future()`` is all that the schedule believes about what is to come, soonest first: what is left
# of this forward, expected to be in the order of the last one (``upcoming``); the same in reverse;
# and the units that have run already, the last first (``returning``). In backward only the last
# part is left, and that part is no guess: it is the order in which this very forward ran.
#
# ``prefetch`` walks along the future and gathers what is not in memory. ``make_room`` decides what
# must go for it: **the unit that is needed last**, and only if it is needed after the one to be
# gathered; else nothing is done until more units have computed. That is Belady's rule for caches,
# which is optimal when the future is known. Nothing else is needed for keeping units over the
# turn-around: at the end of forward, the units needed soonest are those that ran last.
#
# A prediction may be wrong. When forward runs another unit than expected, the rest of the
# prediction is dropped (``upcoming.clear()``) and units are gathered when they are asked for, as
# under delayed release, until the pass is over. Units gathered in vain have no place in the future,
# so they are the first to go. The price is time; a unit computes with its own weights or not at
# all.
#
# ``release`` is the one of the recipe before: the gather stream waits for the ``consumed`` event of
# the unit that goes, so a gather never overwrites weights that are still read.
#
# Gradients on a stream of their own
# ----------------------------------
# ``reduce`` queues the reduce-scatter on ``reduce_stream``, behind the kernels that compute the
# gradient. The gradient that it reads and the result that it writes must outlive it. Both belong to
# the compute stream, whose next allocations would take their memory as soon as it is free. So they
# stay in the queue ``reducing``, and before they are dropped, the compute stream waits for the
# event behind the reduce-scatter. The queue's length bounds how much memory waits.
#
# The result belongs to the compute stream for a practical reason: a block of one stream's pool is
# of no use to another stream. In a pool of the reduce stream, memory would lie idle whenever no
# gradient is on its way.


class PrefetchContext(FsdpContext):
    """An :class:`FsdpContext` that looks ahead.

    Args:
        buffers: units whose full weights may be in memory at once, beside the root's; 2 or more.
            Units inside units count as well.
        gradients: full gradients that may wait for their reduce-scatter.
        options: as for :class:`FsdpContext`.
    """

    sum_dtype: torch.dtype | None = None  # of summed gradients; None: that of the gradients

    def __init__(
        self,
        root: nn.Module,
        units: Iterable[nn.Module],
        mesh: DeviceMesh,
        buffers: int = BUFFERS,
        gradients: int = GRADIENTS,
        **options,
    ) -> None:
        super().__init__(root, units, mesh, **options)
        self.root, self.buffers, self.gradients = self.units[-1], buffers, gradients
        self.reduce_stream = self.streams.Stream(priority=-1)
        self.reducing: deque = deque()  # (event behind it, what it reads, what it writes)
        self.order: list[Unit] = []  # of the units in this forward, or the last
        self.upcoming: list[Unit] = []  # expected in what is left of this forward
        self.returning: list[Unit] = []  # expected in backward: the last of forward first
        self.busy: set[Unit] = set()  # computing now
        self.late = self.mispredicted = 0  # gathers asked for when needed; units out of order

    # What will be needed, soonest first

    def future(self) -> list[Unit]:
        turn = self.upcoming[::-1] if self.training else []
        return self.upcoming + turn + self.returning

    def before_forward(self, unit: Unit) -> None:
        if unit is not self.root and not unit.grads_missing:
            if self.upcoming and self.upcoming[0] is not unit:
                self.mispredicted += 1
                self.upcoming.clear()
            del self.upcoming[:1]
            self.order.append(unit)
        super().before_forward(unit)

    def after_forward(self, unit: Unit, output: torch.Tensor) -> None:
        if unit is not self.root and self.training and not unit.grads_missing:
            self.returning.insert(0, unit)
        super().after_forward(unit, output)

    def before_backward(self, unit: Unit) -> None:
        if unit is not self.root:
            self.mispredicted += self.returning[:1] != [unit]
            if unit in self.returning:
                self.returning.remove(unit)
        super().before_backward(unit)

    # What is in memory

    def before(self, unit: Unit) -> None:
        self.busy.add(unit)
        if not unit.resident:
            self.late += 1
            self.make_room([unit, *self.future()], unit)
            self.unshard(unit)
        self.compute_stream.wait_event(unit.gathered)

    def after(self, unit: Unit) -> None:
        unit.consumed.record(self.compute_stream)
        self.busy.discard(unit)
        self.prefetch()
        if self.training and unit.resident and unit is not self.root and unit not in self.future():
            self.release(unit)

    def prefetch(self) -> None:
        """Gather what is needed next, as far as there is room."""
        future = self.future()
        for unit in future:
            if not unit.resident:
                if not self.make_room(future, unit):
                    return
                self.unshard(unit)

    def make_room(self, future: list[Unit], unit: Unit) -> bool:
        """Have a free buffer: release the unit needed last, if ``unit`` is needed before it."""
        resident = [u for u in self.units if u.resident and u is not self.root]
        if len(resident) < self.buffers:
            return True

        def position(u: Unit) -> int:
            return future.index(u) if u in future else len(future)

        last = max((u for u in resident if u not in self.busy), key=position, default=unit)
        if position(last) <= position(unit):
            return False
        self.release(last)
        return True

    def begin_forward(self) -> None:
        super().begin_forward()
        self.training = torch.is_grad_enabled()
        if not self.root.resident:
            self.unshard(self.root)
        self.prefetch()

    def predict(self) -> None:
        """Nothing in memory is up to date; expect the order of the last forward."""
        self.release_all()
        self.upcoming, self.order = self.order, []

    def end_forward(self) -> None:
        self.upcoming.clear()
        if self.training:
            self.prefetch()
        else:
            self.release_all()

    def release_all(self) -> None:
        self.returning.clear()
        self.busy.clear()
        super().release_all()

    # Gradients

    def reduce(self, p: rows.ShardedParameter, grad: torch.Tensor) -> None:
        reduced = torch.empty_like(p.shard, dtype=self.sum_dtype or grad.dtype)  # of its stream
        ready, done = self.streams.Event(), self.streams.Event()
        ready.record(self.compute_stream)
        with self.streams.stream(self.reduce_stream):
            self.reduce_stream.wait_event(ready)
            p.reduce(grad, reduced, self.reduce_scatter)
        done.record(self.reduce_stream)
        self.reducing.append((done, grad, reduced))
        self.drain_gradients(keep=self.gradients)

    def drain_gradients(self, keep: int) -> None:
        while len(self.reducing) > keep:
            self.compute_stream.wait_event(self.reducing[0][0])
            self.reducing.popleft()  # the memory goes back to the compute stream

    def end_backward(self) -> None:
        self.drain_gradients(keep=0)
        super().end_backward()


# %%
# Run it, and prove it
# --------------------
# Both schedules train two models, one whose blocks keep their order and one whose blocks run in
# another order each pass. Whatever the prediction was, the weights must be those of the unsharded
# run. The number of gathers is exact: with one order, all but the first pass know it, and every
# pass saves the gathers of the units that are kept.

PASSES = rows.STEPS * rows.MICRO_BATCHES  # forward and backward, each


def watch(collective: rows.Collective, context: FsdpContext, used: list) -> rows.Collective:
    """``collective``, noting the stream that it is queued on."""

    def call(output: torch.Tensor, source: torch.Tensor) -> None:
        used.append(context.streams.current_stream())
        collective(output, source)

    return call


def prove(schedule: type[FsdpContext], shuffled: bool, device: torch.device) -> FsdpContext:
    """Train under ``schedule`` and unsharded; compare the weights, print what it took."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model, reference = rows.Stack(device, shuffled), rows.Stack(device, shuffled)
    context, used = schedule(model, model.blocks, mesh), []
    context.reduce_scatter = watch(context.reduce_scatter, context, used)
    rows.train(model, context.backward)
    rows.train(reference)
    rows.prove_parity(model, reference)
    stream = getattr(context, "reduce_stream", context.compute_stream)
    assert all(where == stream for where in used) and context.live_bytes == 0
    units = context.peak_bytes // context.units[0].nbytes
    order = "another order each pass" if shuffled else "one order"
    print(f"{schedule.__name__}, {order}: {context.gathers} gathers, {units} units in memory")
    return context


def main() -> None:
    device = rows.start_rank()
    try:
        for shuffled in (False, True):
            delayed = prove(FsdpContext, shuffled, device)
            assert delayed.gathers == PASSES * 2 * (rows.BLOCKS + 1), (
                "each unit twice, and the root"
            )
            ahead = prove(PrefetchContext, shuffled, device)
            assert ahead.reduce_stream != ahead.compute_stream, "one stream for both"
            assert ahead.peak_bytes <= BUFFERS * ahead.units[0].nbytes + ahead.root.nbytes
            print(f"{ahead.late} gathers late, {ahead.mispredicted} units out of order")
            if shuffled:
                assert ahead.mispredicted > 0
            else:
                assert ahead.gathers == PASSES * (2 * rows.BLOCKS - BUFFERS + 1), "kept too few"
                assert ahead.late == rows.BLOCKS, "all but the first forward knows the order"
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

# %%
# What it buys
# ------------
# All rows are of a synthetic stack of matrices (:doc:`/guide/measured`). ``prefetch_copy_engine``
# is this schedule with copies between ranks in place of NCCL: ``gather=`` and ``reduce_scatter=``
# take any function that queues its work on the current stream. Its rows here are of an earlier
# version, which kept bfloat16 weights in memory that peers read. The present :doc:`peer_schedule`
# takes float32 weights too, casts once per unit and pass, and is slower: that page has its rows.
# ``megatron-fsdp`` is NVIDIA's package, with its stable and its experimental schedule
# (``megatron_fsdp.experimental``).
#
# .. result-figure:: fsdp_overlap
#    :rows: no_communication fsdp2 fsdp2_tuned delayed_release prefetch prefetch_copy_engine
#    :where: model=synthetic loop=–
#
# .. result-table:: fsdp_overlap
#    :rows: no_communication fsdp2 fsdp2_tuned megatron-fsdp megatron-fsdp-experimental delayed_release prefetch prefetch_copy_engine
#    :where: model=synthetic loop=–
#
# .. timeline:: fsdp_overlap delayed_release prefetch
#
# At every size ``prefetch`` is ahead of both FSDP2 rows, of delayed release and of the stable
# ``megatron-fsdp``. The experimental one is the strongest peer: it is ahead of the other peers
# throughout, and a little ahead of ``prefetch`` in the longest steps. ``prefetch_copy_engine`` is
# ahead of them all at every size, with less of the device's memory than FSDP2 or either peer
# (:doc:`/guide/results` has memory and bounds).
#
# Side by side:
#
# .. list-table::
#    :header-rows: 1
#    :stub-columns: 1
#
#    * - compared
#      - delayed release
#      - prefetch
#    * - order of units
#      - none needed
#      - the last pass's, checked; wrong predictions cost time
#    * - full weights in memory
#      - 2 units
#      - :math:`B` units
#    * - gathers a pass
#      - :math:`2L`
#      - :math:`2L - B`
#    * - exposed in forward
#      - the first gather, the ends of gathers that last longer than a unit's compute
#      - the first gather
#    * - exposed in backward
#      - every reduce-scatter, the first gather
#      - the last reduce-scatter
#
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built. The recorder of stream order knows how the
# caching allocator works: freed memory goes to the next allocation of its size on the same stream.
# What another stream still does with it is reported.
#
# .. recipe-controls::
#
# Memory
# ------
# On each rank, beside shards, gradients and optimizer states:
#
# .. math::
#
#    \text{root's own weights} \;+\; B \, \max_{u} \text{bytes}(u) \;+\; (G + 1) \, \max_{p}
#    \text{bytes}(\text{gradient of } p)
#
# for :math:`B` buffers and :math:`G` gradients in flight. A unit that backward has done with is
# released at once.
#
# When it is not worth it
# -----------------------
# * Units run in another order each pass: every pass gathers in vain what it predicted, then falls
#   back. :doc:`stream_context` does no worse with less memory.
# * Communication is short beside compute (many tokens a step): the two schedules differ less then.
# * Two units' weights are all that fits: ``buffers=2`` works, and keeps both over the turn-around.
#
# Known limits
# ------------
# * The prediction is the last pass's order. A model that alternates between two orders is
#   mispredicted every time.
# * Every rank must run the same units in the same order, and so make the same predictions:
#   collectives are queued by them.
# * Between micro-batches everything is released and gathered anew, although no weight has changed.
# * The first gather waits for the whole optimizer step, and the optimizer for the last
#   reduce-scatter: :doc:`update_in_order` hides both.
#
# Further reading
# ---------------
# * `fully_shard <https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html>`__:
#   ``set_modules_to_forward_prefetch`` and ``set_modules_to_backward_prefetch`` do this for FSDP2,
#   by lists that you write (:doc:`fsdp2_settings`)
# * `Explicit prefetch in Megatron-LM <https://github.com/NVIDIA/Megatron-LM/pull/5719>`__, which
#   took the place of delayed release there
# * `A study of replacement algorithms for a virtual-storage computer
#   <https://doi.org/10.1147/sj.52.0078>`__, Belady's rule, 1966
