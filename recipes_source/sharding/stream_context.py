"""
Sharded training from scratch: a stream context with delayed release
====================================================================

Fully sharded training keeps a slice of every weight on each rank and gathers a layer's weights just
before it computes. This recipe builds it in plain torch, with the one object that decides whether
the gathers cost time: a context that owns their stream and knows when memory may be given back.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * how a module computes with weights that exist only while it needs them
      * why releasing a layer **late** is what lets the next gather run beside it
      * the three orderings between two streams, and what breaks without each
      * shards as ``DTensor``, so that checkpoints save and reshard them

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks; CPU runs everything, CUDA devices overlap it
      * a model that fits on one device before it is sharded
      * layers ("units") that return one tensor each

.. verification-badge::

The idea
--------

Memory decides the schedule. A layer's full weights can be released when its last kernel has read
them. Release them right behind the layer, and the next gather, which wants that memory, waits for
the layer to end: nothing overlaps. Release them **one layer later**, and two layers' weights are in
memory, one being computed with, one arriving:

.. lanes:: Schematic. The memory of layer 1 is given to layer 3, behind an event of layer 1.

   compute:  4-10 layer 1; 10-16 layer 2; 16-22 layer 3; 22-28 layer 4
   gather:   0-4 W1 ~; 4-8 W2 ~; 10-14 W3 ~; 16-20 W4 ~
   @10 layer 1 has read W1: its memory is free
   @16 layer 2 has read W2

The context needs no list of layers and no order known in advance: each layer, when its turn comes,
asks for its own weights. The host runs ahead of the device, so the request arrives early.
"""

# %%
# Imports
# -------

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

import sharded_parameter as rows
import torch
import torch.distributed as dist
from sharded_parameter import Collective, ShardedParameter
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class Unit:
    """The parameters of one module, without those of units inside it."""

    def __init__(self, parameters: list[ShardedParameter], streams) -> None:
        self.parameters = parameters
        self.nbytes = sum(p.nbytes for p in parameters)
        self.gathered, self.consumed = streams.Event(), streams.Event()
        self.resident = False  # gathered and not released, as the gather stream sees it
        self.grads_missing = 0

    def expose(self, full: bool) -> None:
        for p in self.parameters:
            p.expose(full)


class FsdpContext:
    """Shard ``root`` over ``mesh``, and gather each unit's weights on one stream when needed.

    Build the optimizer afterwards. Every rank must run the same units in the same order.

    Args:
        root: a module whose parameters are on the mesh's device and equal on every rank.
        units: modules inside ``root``, each returning one tensor; they may be nested. Parameters in
            none of them belong to ``root``.
        mesh: one-dimensional, over all ranks.
        dtype: of gathered weights and their gradients; None: the parameter's own. The shards, which
            the optimizer updates, keep theirs.
        gather: queues on the current stream the filling of its first argument, (ranks * rows, ...),
            from each rank's second, (rows, ...). None: ``all_gather`` on a communicator of its own.
        reduce_scatter: queues the sum over ranks of its second argument, (ranks * rows, ...), of
            which the first receives this rank's (rows, ...). None: on the mesh's communicator.
        empty: allocates the shards, like ``torch.empty``.

    Raises:
        ValueError: a parameter has no dimension to shard, or modules of two units share it.
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
        self.releases: deque[Unit] = deque()  # consumed, not yet released
        self.live_bytes = self.peak_bytes = 0  # of full weights
        self.gathers = 0  # of units
        self.units: list[Unit] = []  # the root's last
        owners = rows.owners_of_parameters(root)
        root.register_forward_pre_hook(lambda *_: self.begin_forward())
        for module in reversed(list(root.modules())):  # what is inside comes first
            if module is root or module in units:
                inside = set(module.modules())
                mine = [p for p in owners if owners[p][0][0] in inside]
                if any(owner not in inside for p in mine for owner, _ in owners[p]):
                    raise ValueError("two units share a parameter: make one unit of them")
                shards = [ShardedParameter(p, owners.pop(p), mesh, dtype, empty) for p in mine]
                self.add_unit(module, Unit(shards, self.streams))
        root.register_forward_hook(lambda *_: self.end_forward())

    def add_unit(self, module: nn.Module, unit: Unit) -> None:
        self.units.append(unit)
        module.register_forward_pre_hook(lambda *_: self.before_forward(unit))
        module.register_forward_hook(lambda _, args, output: self.after_forward(unit, output))
        for p in unit.parameters:
            if p.full.requires_grad:
                p.full.register_post_accumulate_grad_hook(partial(self.take_gradient, unit, p))

    # the schedule

    def before(self, unit: Unit) -> None:
        """Let the compute stream have the full weights of ``unit`` from here on."""
        if unit in self.releases:
            self.releases.remove(unit)
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

    # what it queues on the gather stream

    def unshard(self, unit: Unit) -> None:
        with self.streams.stream(self.gather_stream):
            for p in unit.parameters:
                p.unshard(self.gather)
        unit.gathered.record(self.gather_stream)
        unit.resident = True
        self.gathers += bool(unit.parameters)
        self.live_bytes += unit.nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def release(self, unit: Unit) -> None:
        with self.streams.stream(self.gather_stream):
            self.gather_stream.wait_event(unit.consumed)
            for p in unit.parameters:
                p.release()
        unit.resident = False
        self.live_bytes -= unit.nbytes

    # when: called by hooks

    def begin_forward(self) -> None:
        """The weights are as the compute stream leaves them: gather behind the optimizer."""
        self.compute_stream = self.streams.current_stream()
        self.gather_stream.wait_stream(self.compute_stream)

    def before_forward(self, unit: Unit) -> None:
        self.before(unit)
        unit.expose(full=True)

    def after_forward(self, unit: Unit, output: torch.Tensor) -> None:
        unit.expose(full=False)
        self.after(unit)
        if output.requires_grad:
            output.register_hook(lambda _: self.before_backward(unit))

    def end_forward(self) -> None:
        self.drain(keep=0)

    def before_backward(self, unit: Unit) -> None:
        unit.grads_missing = sum(p.full.requires_grad for p in unit.parameters)
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
        loss.backward(torch.full_like(loss, 1 / self.ranks))
        self.end_backward()


# %%
# Run it, and prove it
# --------------------


def prove_schedule(model: rows.Stack, context: FsdpContext) -> None:
    gather, used = context.gather, []

    def watched(full: torch.Tensor, shard: torch.Tensor) -> None:
        used.append(context.streams.current_stream())
        gather(full, shard)

    context.gather, context.peak_bytes = watched, 0
    with torch.no_grad():
        rows.loss_of(model, 0, dist.get_rank())
    context.gather = gather
    assert context.gather_stream != context.compute_stream, "one stream for both"
    assert all(stream == context.gather_stream for stream in used), "gathered elsewhere"
    largest = max(unit.nbytes for unit in context.units)
    assert 2 * largest <= context.peak_bytes < 3 * largest, "released too early, or too late"
    assert context.live_bytes == 0
    print(
        f"{len(used)} gathers on their stream; {context.peak_bytes / largest:.2f} units in memory"
    )


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
