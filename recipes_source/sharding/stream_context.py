# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, sharding/stream_context.py
"""
Own the stream: gathers beside compute, released late
=====================================================

Gather the weights of a sharded layer while the layer before it computes. Whether a gather costs
time depends on two things: which stream the gathers are on, and when a layer's memory is given
back. This recipe is the object that decides both: one **context** for the whole model. It builds on
:doc:`sharded_parameter`.

**When not to bother:** you want to train, not to look inside. ``fully_shard`` does the same with
more care for corner cases, and :doc:`in_place_gather` makes it faster.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * why releasing a layer **late** is what lets the next gather run beside it
      * the three orderings between two streams, and what breaks without each
      * memory that is freed on the stream that will use it next
      * a schedule that needs no list of layers and no order known in advance

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks; CPU runs everything, CUDA devices overlap it
      * ``sharded_parameter.py``, the recipe before: shards, toy model and proof come from it
      * layers ("units") that return one tensor each

.. verification-badge::

The idea
--------

Memory decides the schedule. A unit's full weights may go when its last kernel has read them.
Release them right behind the unit, and the next gather, which is queued behind that release, waits
for the unit to end: nothing overlaps. Release them **one unit later**, and two units' weights are
in memory: one computes, one arrives.

.. lanes:: Schematic. Unit 3 is gathered into memory that unit 1 gave back, while unit 2 computes.

   compute:  4-10 unit 1; 10-16 unit 2; 16-22 unit 3; 22-28 unit 4
   gather:   0-4 unit 1 ~; 4-8 unit 2 ~; 10-14 unit 3 ~; 16-20 unit 4 ~
   @10 unit 1 has read its weights
   @16 unit 2 has

1. **Compute after gather**: the compute stream waits for a unit's ``gathered`` event.
2. **Release after compute**: the gather stream waits for a unit's ``consumed`` event and frees
   there.
3. **Gather after update**: the gather stream waits for the optimizer step.

No list of units is needed. Each unit asks for its own weights when its turn comes; the host runs
ahead of the device, so that it asks early.
"""

# %%
# Imports
# -------
# ``ShardedParameter``, from the recipe before, is a parameter in two forms: ``unshard`` and
# ``release`` queue what they do on the current stream, ``reduce`` adds a gradient to the shard.

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from weakref import finalize, ref

import sharded_parameter as rows
import torch
import torch.distributed as dist
from sharded_parameter import Collective, ShardedParameter
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# %%
# One unit
# --------
# A unit is a module whose parameters are gathered and released together, as a rule one block of a
# transformer. Two events tell the streams about each other: ``gathered`` stands behind its gathers,
# ``consumed`` behind the kernels that read the weights.


class Unit:
    """The parameters of one module, without those of units inside it."""

    def __init__(self, parameters: list[ShardedParameter], streams) -> None:
        self.parameters = parameters
        self.nbytes = sum(p.nbytes for p in parameters)
        self.gathered, self.consumed = streams.Event(), streams.Event()
        # Whether it is gathered, as the gather stream sees it; gradients that backward still owes.
        self.resident, self.grads_missing = False, 0

    def expose(self, full: bool) -> None:
        for p in self.parameters:
            p.expose(full)


# %%
# The context
# -----------
# All units of a model share one context. So a rank has one gather stream, and gathers never
# compete. It has one queue of releases, and memory is bounded for the whole model. The schedule is
# three methods.
#
# ``before`` a unit computes, in forward and in backward: drain the queue to one, gather, let the
# compute stream wait. ``after`` it: record ``consumed``, queue the release. ``drain`` releases the
# oldest.
#
# **Where memory is freed** is the point of it. PyTorch's caching allocator hands a freed block to
# the next allocation *of the same stream* at once, whatever other streams still do with it. Weights
# are allocated on the gather stream, so they are freed there, behind a wait for ``consumed``.
# Whatever comes into that memory comes after the wait. ``record_stream`` would free late and by
# chance.
#
# **Two communicators.** A communicator runs its collectives in the order in which the host launched
# them, on whatever streams. With one for both, the next gather of backward waits for this unit's
# reduce-scatter, which waits for its kernels: no gather of backward overlaps. So gathers have a
# communicator of their own.


class FsdpContext:
    """Shard ``root`` over ``mesh``, and gather each unit's weights on one stream when needed.

    Build the optimizer afterwards. Every rank must run the same units in the same order.

    Args:
        root: a module whose parameters are on the mesh's device and equal on every rank.
        units: modules inside ``root``, which like it return one tensor each; they may be nested. A
            parameter belongs to the smallest unit that holds all of its owners, or to ``root``.
        mesh: one-dimensional, over all ranks.
        dtype: of gathered weights and their gradients; None: the parameter's own. The shards, which
            the optimizer updates, keep theirs; inputs are not cast: pass them in it.
        gather: queues on the current stream the filling of its first argument, (ranks * rows, ...),
            from each rank's second, (rows, ...). None: ``all_gather`` on a communicator of its own.
        reduce_scatter: queues the sum over ranks of its second argument, (ranks * rows, ...), of
            which the first receives this rank's (rows, ...). None: on the mesh's communicator.
        empty: allocates the shards, like ``torch.empty``.

    Raises:
        ValueError: a parameter has no dimension to shard, or is sharded.
        TypeError: in forward, a unit or ``root`` did not return one tensor.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Iterable[nn.Module],
        mesh: DeviceMesh,
        dtype: torch.dtype | None = None,
        gather: Collective | None = None,
        reduce_scatter: Collective | None = None,
        empty: Callable[..., torch.Tensor] = torch.empty,
    ) -> None:
        self.streams = torch.get_device_module(mesh.device_type)
        self.gather_stream = self.streams.Stream(priority=-1)
        self.ranks, units = mesh.size(), set(units)
        self.gather = gather or partial(rows.all_gather, group=dist.new_group())
        self.reduce_scatter = reduce_scatter or partial(rows.reduce_scatter, group=mesh.get_group())
        # A context that is dropped frees its shards: not before its last gathers have read them.
        finalize(self, self.streams.current_stream().wait_stream, self.gather_stream).atexit = False
        self.live_bytes = self.peak_bytes = self.gathers = 0  # of full weights; of units
        self.units, self.releases = [], deque()  # the root's last; consumed, not yet released
        owners = rows.owners_of_parameters(root)
        if any(hasattr(p, "device_mesh") for p in owners):
            raise ValueError("the model is sharded already: it can have one context")
        root.register_forward_pre_hook(lambda *_: self.begin_forward())
        for module in reversed(list(root.modules())):  # what is inside comes first
            if module is root or module in units:
                inside = set(module.modules())
                mine = [p for p in owners if all(owner in inside for owner, _ in owners[p])]
                shards = [ShardedParameter(p, owners.pop(p), mesh, dtype, empty) for p in mine]
                self.add_unit(module, Unit(shards, self.streams))
        root.register_forward_hook(lambda *_: self.end_forward())

    def add_unit(self, module: nn.Module, unit: Unit) -> None:
        self.units.append(unit)
        module.register_forward_pre_hook(lambda *_: self.before_forward(unit))
        module.register_forward_hook(lambda _, args, output: self.after_forward(unit, output))
        for p in filter(lambda p: p.full.requires_grad, unit.parameters):
            p.take = partial(self.take_gradient, unit, p)
            take = ref(p.take)  # what autograd holds is not seen by Python's garbage collector
            p.full.register_post_accumulate_grad_hook(lambda full, take=take: take()(full))

    # The schedule

    def before(self, unit: Unit) -> None:
        """Let the compute stream have the full weights of ``unit`` from here on."""
        self.releases = deque(u for u in self.releases if u is not unit)
        self.drain(keep=1)
        if not unit.resident:
            self.unshard(unit)
        self.compute_stream.wait_event(unit.gathered)

    def after(self, unit: Unit) -> None:
        """The kernels queued so far are the last that read the weights of ``unit``."""
        unit.consumed.record(self.compute_stream)
        self.releases.append(unit)

    def drain(self, keep: int) -> None:
        while len(self.releases) > keep:
            self.release(self.releases.popleft())

    # What it queues on the gather stream

    def unshard(self, unit: Unit) -> None:
        with self.streams.stream(self.gather_stream):
            self.fill(unit)
        unit.gathered.record(self.gather_stream)
        unit.resident = True
        self.gathers += bool(unit.parameters)
        self.live_bytes += unit.nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def fill(self, unit: Unit) -> None:
        for p in unit.parameters:
            p.unshard(self.gather)

    def release(self, unit: Unit) -> None:
        with self.streams.stream(self.gather_stream):
            self.gather_stream.wait_event(unit.consumed)
            for p in unit.parameters:
                p.release()
        unit.expose(full=False)  # still full behind a forward that raised
        unit.resident, unit.grads_missing = False, 0
        self.live_bytes -= unit.nbytes

    # When: called by hooks

    def begin_forward(self) -> None:
        """The weights are as the compute stream leaves them: gather behind the optimizer."""
        self.in_backward = False
        self.compute_stream = self.streams.current_stream()
        self.gather_stream.wait_stream(self.compute_stream)
        self.check()
        self.predict()

    def predict(self) -> None:
        """Nothing in memory is up to date, and what comes next is not known."""
        self.release_all()

    def check(self) -> None:
        """Raise RuntimeError if a parameter was replaced, moved, frozen or thawed."""
        for p in (p for unit in self.units for p in unit.parameters):
            forms = {id(p.parameter), id(p.full)}  # the latter behind a forward that raised
            same = forms.issuperset(id(getattr(module, name)) for module, name in p.owners)
            same &= p.parameter._local_tensor.data_ptr() == p.local.data_ptr()
            if not same or p.parameter.requires_grad != p.full.requires_grad:
                raise RuntimeError(
                    f"{p.owners[0][1]} of {type(p.owners[0][0]).__name__} was replaced or moved: no "
                    "load_state_dict(assign=True), model.to(), requires_grad_() behind the sharding"
                )

    def before_forward(self, unit: Unit) -> None:
        self.before(unit)
        unit.expose(full=True)

    def after_forward(self, unit: Unit, output: torch.Tensor) -> None:
        unit.expose(full=False)
        if not unit.grads_missing:  # else it is computed again, inside its own backward
            self.after(unit)
        if not isinstance(output, torch.Tensor):
            raise TypeError(f"a unit gave a {type(output).__name__}: wrap it to return one tensor")
        if output.requires_grad:
            output.register_hook(lambda _: self.before_backward(unit))

    def end_forward(self) -> None:
        self.drain(keep=0)

    def before_backward(self, unit: Unit) -> None:
        if not self.in_backward:
            raise RuntimeError("call context.backward(loss) in place of loss.backward()")
        unit.grads_missing = len(unit.parameters)  # a frozen one's never comes
        self.before(unit)

    def take_gradient(self, unit: Unit, p: ShardedParameter, full: nn.Parameter) -> None:
        grad, full.grad = full.grad, None
        self.reduce(p, grad)
        unit.grads_missing -= 1
        if unit.grads_missing == 0:
            self.after(unit)

    def reduce(self, p: ShardedParameter, grad: torch.Tensor) -> None:
        p.reduce(grad, torch.empty_like(p.shard, dtype=grad.dtype), self.reduce_scatter)

    def release_all(self) -> None:
        """Release whatever is in memory: behind backward, or when weights change in another way."""
        for unit in self.units:
            if unit.resident:  # in the queue, or not every one of its parameters got a gradient
                unit.consumed.record(self.compute_stream)
                self.release(unit)
        self.releases.clear()

    def end_backward(self) -> None:
        self.release_all()

    def backward(self, loss: torch.Tensor) -> None:
        """Add the mean over ranks of the gradients of ``loss`` to the shards' ``.grad``."""
        self.in_backward = True
        loss.backward(torch.full_like(loss, 1 / self.ranks))
        self.end_backward()


# %%
# The hooks are the ordinary ones. Two on each module open and close its forward. A hook on the
# *output* of a unit runs in backward when the output's gradient is complete, just before the unit's
# own. A hook on each full parameter runs when its gradient is complete: the gradient is taken from
# autograd, summed over the ranks, here still on the compute stream, and dropped; behind the last
# one of a unit, its weights are not needed any more.
#
# ``backward`` takes the place of ``loss.backward()``: it starts from 1/N, so that sums over ranks
# are means, and afterwards releases whatever is left.
#
# Run it, and prove it
# --------------------
# The model runs its blocks in **another order each pass**, since nothing here knows an order: the
# weights must be those of the unsharded run all the same.
#
# Then the schedule. Every gather was queued on the context's stream. In a forward, two units'
# weights were in memory at once (with less, nothing could overlap) and never three.


def prove_schedule(model: rows.Stack, context: FsdpContext) -> None:
    gather, used, context.peak_bytes = context.gather, [], 0
    stream = context.streams.current_stream
    context.gather = lambda *tensors: (used.append(stream()), gather(*tensors))
    with torch.no_grad():
        rows.loss_of(model, 0, dist.get_rank())
    context.gather = gather
    assert context.gather_stream != context.compute_stream, "one stream for both"
    assert all(stream == context.gather_stream for stream in used), "gathered elsewhere"
    units = context.peak_bytes / max(unit.nbytes for unit in context.units)
    assert 2 <= units < 3 and not context.live_bytes, "released too early, or too late"
    print(f"{len(used)} gathers on their stream; {units:.2f} units in memory")


def main() -> None:
    device = rows.start_rank()
    try:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        model, reference = rows.Stack(device, shuffled=True), rows.Stack(device, shuffled=True)
        context = FsdpContext(model, model.blocks, mesh)
        rows.train(model, context.backward)
        rows.train(reference)
        rows.prove_parity(model, reference)
        prove_schedule(model, context)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

# %%
# What it buys
# ------------
# ``sync`` is this recipe with its gathers on the compute stream: one thing after another. Delayed
# release leaves exposed: the reduce-scatters, which are on the compute stream here; the first
# gather of forward and of backward; and the ends of gathers that take longer than a unit computes.
# :doc:`prefetch_schedule` moves the reduce-scatters to a stream of their own and gathers fewer
# units.
#
# .. timeline:: fsdp_overlap sync delayed_release
#
# ``no_communication`` is the same work on weights that are never sharded
# (:doc:`how it is measured </guide/measured>`). All rows are of a synthetic stack of matrices.
#
# .. result-figure:: fsdp_overlap
#    :rows: no_communication fsdp2 delayed_release
#    :where: model=synthetic loop=–
#
# .. result-table:: fsdp_overlap
#    :rows: no_communication fsdp2 delayed_release
#    :where: model=synthetic loop=–
#
# At few tokens a step, delayed release is ahead of ``fsdp2``; at many it is a little behind, since
# it exposes every reduce-scatter and FSDP2 hides them. It takes less of the device's memory at
# every size (:doc:`/guide/results` has it).
#
# What breaks if you remove a line
# --------------------------------
# CPU streams do nothing, so the bits come out right even without the events. A recorder of stream
# order finds what no event orders. It counts a release as a write: whatever comes next may use the
# memory.
#
# .. recipe-controls::
#
# Memory
# ------
# On each rank, beside shards, gradients and optimizer states:
#
# .. math::
#
#    \text{root's own weights} \;+\; 2 \, \max_{u} \text{bytes}(u) \;+\; \text{full gradients of one
#    parameter}
#
# The bound holds for forward and backward alike, and for any number of units. Units that enclose
# the computing one come on top. So does every unit if two forwards share one backward.
#
# When it is not worth it
# -----------------------
# * The order of the units is known: :doc:`prefetch_schedule` hides more, with less traffic.
# * The host is slower than the device (small layers, few tokens). Then a gather is asked for late.
#   Schedules that look ahead suffer less.
#
# Known limits
# ------------
# * A unit returns one tensor, and so does the root. Wrap a module that returns several.
# * A full gradient is dropped when its reduce-scatter is queued. On one stream that is right. On
#   two it is not: :doc:`prefetch_schedule` keeps it longer.
# * Every rank must run the same units in the same order; the order itself may change from pass to
#   pass.
# * Activation checkpointing inside a unit raises. Put it around each unit, with
#   ``use_reentrant=False``.
# * A unit with frozen parameters, alone or beside trained ones (LoRA), stays in memory until the
#   end of backward: no gradient tells when they were read last.
# * A forward that raised leaves full parameters in its modules and in memory; a unit that is called
#   alone leaves them in memory. The root's next forward drops them. To save, read or change
#   parameters before it, call ``release_all()`` first.
#
# Further reading
# ---------------
# * `Add FSDP stream context delayed release <https://github.com/NVIDIA/Megatron-LM/pull/5124>`__,
#   the design that this recipe follows, and `what was merged
#   <https://github.com/NVIDIA/Megatron-LM/pull/5513>`__
# * `Rethinking PyTorch Fully Sharded Data Parallel from first principles
#   <https://dev-discuss.pytorch.org/t/rethinking-pytorch-fully-sharded-data-parallel-fsdp-from-first-principles/1019>`__:
#   why ``record_stream`` and a host that runs ahead do not go together
# * `Memory of tensors passed between streams
#   <https://docs.pytorch.org/docs/stable/generated/torch.Tensor.record_stream.html>`__
