# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, sharding/update_in_order.py
"""
Hide the ends: update in the order of the next forward
======================================================

Hide the two transfers of a step that every schedule leaves exposed: the first gather, which waits
for the optimizer, and the last reduce-scatter, for which the optimizer waits. This recipe splits
the optimizer by unit and runs the parts in the order in which the next forward needs them, with
gathers and reduce-scatters beside them.

**When not to bother:** your steps are long, so that their ends are a small share; or you clip
gradients by their global norm.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * why the order of updates is free, and which order is best
      * an event for each unit where there was one wait for everything
      * what must be told to a schedule whose weights are gathered early

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks; CPU runs everything, CUDA devices overlap it
      * ``prefetch_schedule.py``, the recipe before
      * an optimizer that treats each parameter alone: SGD, Adam and their kin; no global clipping

.. verification-badge::

The idea
--------

AdamW updates each parameter from its own gradient and moments: the parts of the update may run in
any order. Gradients arrive in the order of backward, the first unit's last. Weights are needed in
the order of forward, the first unit's first. In between there is just enough freedom:

.. lanes:: Schematic, four units: the updates begin while unit 1 is reduced, and end while it is gathered.

   compute:  0-8 bwd 2; 8-16 bwd 1; 16-20 update 4; 20-24 update 1; 24-28 update 2; 28-32 update 3; 32-38 fwd 1; 38-44 fwd 2
   reduce-scatter:  0-4 3 ~; 8-12 2 ~; 16-20 1 ~
   gather:   24-28 1 ~; 28-32 2 ~; 32-36 3 ~; 38-42 4 ~
   @24 unit 1 is up to date

1. Start with the unit that is needed **last**. Its gradient arrived long ago, and its update gives
   the last reduce-scatter time to end.
2. Go on in the order of forward. Behind each update, its unit is gathered, as long as there is
   room.
3. When forward begins, as many units as there are buffers are in memory, or on their way.
"""

# %%
# Imports
# -------

from collections.abc import Callable
from functools import partial
from itertools import groupby

import prefetch_schedule as prefetch
import torch
import torch.distributed as dist
from prefetch_schedule import PrefetchContext, Unit, rows
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

# %%
# The context
# -----------
# Two waits of the schedule before are taken apart. ``end_backward`` waited for *all*
# reduce-scatters; now each update waits for the event behind *its* unit's. ``begin_forward`` made
# gathers wait for the *whole* step; now the gather stream waits for an event behind each update.
#
# ``step`` fills ``upcoming``, which is what the schedule expects of the next forward, with the
# units that are up to date, and lets it prefetch: it never learns of a unit whose weights are still
# old. What it gathers, and when it stops, is the rule it had before.
#
# ``fresh`` says whether early gathers may be used. Weights that were gathered before forward began
# are right only if nothing changes them in between. After ``step`` nothing does, so ``predict``
# keeps them. In all other cases it drops everything, as before. A program that loads a checkpoint
# or swaps weights after ``step`` must call ``release_all()``.


class UpdateContext(PrefetchContext):
    """A :class:`PrefetchContext` that owns the optimizer, one for each unit.

    Call ``optimize`` once, then ``backward(loss)`` for each micro-batch and ``step()``. Every step
    needs a forward before it.
    """

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.optimizers: dict[Unit, torch.optim.Optimizer] = {}
        self.reduced = {unit: self.streams.Event() for unit in self.units}
        self.updated = self.streams.Event()
        self.fresh = False  # whether what is in memory was gathered behind its update
        self.early = 0  # units gathered before their forward began

    def optimize(self, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
        """Give each unit an optimizer of its own: ``make`` of its sharded parameters."""
        for unit in self.units:
            if unit.parameters:
                self.optimizers[unit] = make([p.parameter for p in unit.parameters])

    def take_gradient(self, unit: Unit, p: rows.ShardedParameter, full: nn.Parameter) -> None:
        super().take_gradient(unit, p, full)
        self.reduced[unit].record(self.reduce_stream)

    def end_backward(self) -> None:
        """As before, but nothing waits for the reduce-scatters: each update waits for its own."""
        self.release_all()

    def step(self) -> None:
        """Update all units and drop their gradients; gather what the next forward needs first."""
        self.release_all()  # what a forward without backward has left
        self.fresh, self.upcoming = True, []
        *first, last = dict.fromkeys([self.root, *self.order])
        rest = [unit for unit in self.units if unit not in [*first, last]]
        for unit in [last, *rest, *first]:
            self.update(unit)
            if unit is self.root:
                self.unshard(unit)
            elif unit in first:
                self.upcoming.append(unit)
                self.prefetch()
        self.upcoming = list(self.order)
        self.early += sum(unit.resident for unit in self.units)
        self.drain_gradients(keep=0)

    def update(self, unit: Unit) -> None:
        if unit in self.optimizers:
            self.compute_stream.wait_event(self.reduced[unit])
            self.optimizers[unit].step()
            self.optimizers[unit].zero_grad()
        self.updated.record(self.compute_stream)
        self.gather_stream.wait_event(self.updated)

    def predict(self) -> None:
        """After a step, what is in memory is up to date."""
        if self.fresh:
            self.fresh, self.order = False, []
        else:
            super().predict()


# %%
# Run it, and prove it
# --------------------
# The training loop is that of the pages before, with one optimizer a unit. It notes what the last
# step queued. Expected are one update; then, in turn, the update and the gathers of the root and of
# each unit that has a buffer; then the updates of the other units. So the first gather is queued
# when two units are up to date, not when all are.


def train(model: rows.Stack, context: UpdateContext) -> list[str]:
    """Train as ``rows.train`` does; return what the last step queued, in order."""
    queued, gather = [], context.gather

    def watched(full: torch.Tensor, shard: torch.Tensor) -> None:
        queued.append("gather")
        gather(full, shard)

    context.gather = watched
    for optimizer in context.optimizers.values():
        optimizer.register_step_post_hook(lambda *_: queued.append("update"))
    for turn in range(prefetch.PASSES):
        context.backward(rows.loss_of(model, turn, dist.get_rank()))
        if turn % rows.MICRO_BATCHES == rows.MICRO_BATCHES - 1:
            queued.clear()
            context.step()
    return queued


# %%
# Updates in another order give the same bits, so the weights must equal those of one optimizer over
# all parameters, unsharded. And no gather is wasted: a pass gathers as often as before, plus, once,
# the units that the last step gathers for a forward that never comes.


def prove(shuffled: bool, device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model, reference = rows.Stack(device, shuffled), rows.Stack(device, shuffled)
    context = UpdateContext(model, model.blocks, mesh)
    context.optimize(partial(torch.optim.AdamW, lr=1e-3))
    queued = train(model, context)
    rows.train(reference)
    rows.prove_parity(model, reference)
    assert context.early == rows.STEPS * (prefetch.BUFFERS + 1), "each step fills the buffers"
    expected = ["update", "gather"] * (prefetch.BUFFERS + 1) + ["update"]
    assert [name for name, _ in groupby(queued)] == expected, "not each gather behind its update"
    if not shuffled:
        kept = prefetch.PASSES * (2 * rows.BLOCKS - prefetch.BUFFERS + 1) + prefetch.BUFFERS + 1
        assert context.gathers == kept, "no unit is gathered twice for one forward"
        assert context.late == rows.BLOCKS, "all but the first forward knows the order"
    order = "another order each pass" if shuffled else "one order"
    print(f"{order}: {context.early} units gathered behind their update, {context.late} late")
    context.release_all()
    assert context.live_bytes == 0


def main() -> None:
    device = rows.start_rank()
    try:
        for shuffled in (False, True):
            prove(shuffled, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

# %%
# What it buys
# ------------
# ``update_in_order`` gathers and reduces by peer copies, as ``prefetch_copy_engine`` does; they
# differ in the order of updates alone. The gain is bounded by what the ends of a step cost, and the
# gathers share the memory's bandwidth with the updates beside them. The gain is plain where steps
# are shortest; in longer ones it is hardly more than the pairs of windows disagree by, and in the
# longest ``prefetch_copy_engine`` is slightly ahead. Both take less of the device's memory than
# ``fsdp2`` (:doc:`/guide/results` has it). All rows are of a synthetic stack of matrices, those by
# peer copies of an earlier version (:doc:`prefetch_schedule` says what has changed).
#
# .. result-figure:: fsdp_overlap
#    :rows: no_communication fsdp2 prefetch prefetch_copy_engine update_in_order
#    :where: model=synthetic loop=–
#
# .. result-table:: fsdp_overlap
#    :rows: no_communication fsdp2 prefetch prefetch_copy_engine update_in_order
#    :where: model=synthetic loop=–
#
# .. timeline:: fsdp_overlap prefetch_copy_engine update_in_order
#
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built.
#
# .. recipe-controls::
#
# Memory
# ------
# As for :doc:`prefetch_schedule`, at other times: while the optimizer runs, all gradients, all
# moments and now :math:`B` units' full weights are in memory at once,
#
# .. math::
#
#    4 \, b \, \frac{P}{N} \;+\; B \, \max_{u} \text{bytes}(u)
#
# for :math:`P` parameters of :math:`b` bytes on :math:`N` ranks. Activations are gone by then, so
# that the peak of a step is elsewhere as a rule: what is allocated at most is about that of
# ``prefetch_copy_engine``. The allocator reserves more, though, and so the device holds more.
#
# When it is not worth it
# -----------------------
# * Steps are long: the ends are a fixed cost and a small share of a long step.
# * The optimizer is short beside a gather (SGD, or many ranks): there is little to hide behind.
# * Gradients are clipped by their global norm: every update then waits for every gradient. The
#   gathers can still follow the order; the last reduce-scatter is exposed again.
#
# Known limits
# ------------
# * One optimizer a unit: learning-rate schedulers, gradient scalers and checkpoints must be given
#   all of ``optimizers.values()``. ``get_state_dict`` takes several optimizers.
# * An optimizer that looks at all parameters at once (a global norm, a line search) is not split.
# * Many small units take many calls of the optimizer, which cost the host time.
# * Nothing waits for the reduce-scatters behind backward. Before you read a ``.grad`` (to log its
#   norm, say), call ``context.drain_gradients(keep=0)``.
# * An evaluation between two steps needs nothing. Before weights change in another way, call
#   ``release_all()``.
#
# Further reading
# ---------------
# * `How to save memory by fusing the optimizer step into the backward pass
#   <https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html>`__:
#   the same freedom, used for memory
# * `torch.distributed.checkpoint.state_dict
#   <https://docs.pytorch.org/docs/stable/distributed.checkpoint.html>`__: states of several
#   optimizers
