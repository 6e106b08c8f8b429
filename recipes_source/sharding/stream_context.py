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
# Imports and sizes
# -----------------
# Only torch and the standard library. 509 rows divide by no number of ranks, so that every shard
# is uneven: the hard case is the tested one.

import os
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

WIDTH, HIDDEN = 64, 509  # features
UNITS = 5
BATCH = 8  # samples per rank and step
STEPS = 4
MICRO_BATCHES = 2  # gradients accumulated over them before a step

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13 renames
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

# %%
# One parameter, in two forms
# ---------------------------
# ``shard`` is what the rank keeps: its rows, as ``torch.chunk`` would cut them, padded to the same
# number on every rank. ``parameter`` is the same memory as a ``DTensor``: what the optimizer
# updates and a checkpoint saves. ``full`` is what the layer computes with.
#
# Row shards of equal size have a happy property: gathered one behind the other they **are** the
# full weight. The collective writes straight into ``buffer``, whose first rows ``full`` views;
# nothing is copied in or out. The price is one collective a parameter.
#
# Between uses ``full`` has no memory: its storage is resized to zero, and back before the next
# gather. The tensor object stays the same all along, and so do the views that autograd saves in
# forward and reads in backward: they find the gathered weights again, though at another address.
# ``.data`` gives ``full`` a version counter of its own, since for autograd a gather would
# otherwise be a forbidden change of a saved tensor. That the *values* are back in time is now
# this recipe's duty.


class ShardedParameter:
    """A parameter of shape (rows, ...), of which each rank keeps ceil(rows / ranks) rows or less.

    Args:
        parameter: the full parameter, equal on every rank; at least one dimension.
        owners: every (module, name) that holds it.
        dtype: of the gathered weight and of its gradient.
        empty: allocates the shard; called as ``empty(shape, dtype=, device=)``.
    """

    def __init__(self, parameter: nn.Parameter, owners: list, mesh: DeviceMesh, dtype, empty):
        ranks, rank = mesh.size(), mesh.get_local_rank()
        self.owners, self.mesh = owners, mesh
        self.shape, self.stride = parameter.shape, parameter.stride()
        rows = -(-self.shape[0] // ranks)
        mine = parameter.detach()[rank * rows : (rank + 1) * rows]
        shape, device = (rows, *self.shape[1:]), parameter.device
        self.shard = empty(shape, dtype=parameter.dtype, device=device).zero_()
        self.shard[: len(mine)] = mine
        self.local = self.shard[: len(mine)]
        self.parameter = nn.Parameter(self.distributed(self.local), parameter.requires_grad)
        shape = (ranks * rows, *self.shape[1:])
        self.buffer = torch.empty(shape, dtype=dtype or parameter.dtype, device=device)
        self.nbytes = self.buffer.nbytes
        self.full = nn.Parameter(self.buffer.data[: self.shape[0]], parameter.requires_grad)
        self.buffer.untyped_storage().resize_(0)

    def distributed(self, local: torch.Tensor) -> DTensor:
        shape = {"shape": self.shape, "stride": self.stride}
        return DTensor.from_local(local, self.mesh, [Shard(0)], run_check=False, **shape)

    def reduce_scatter(self, grad: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Add the sum over all ranks of ``grad`` (rows, ...) to this rank's rows of ``.grad``."""
        if missing := len(self.buffer) - len(grad):
            grad = torch.cat([grad, grad.new_zeros(missing, *grad.shape[1:])])
        reduced = torch.empty_like(self.shard, dtype=grad.dtype)
        reduce_scatter(reduced, grad.contiguous(), group=group)
        local = reduced[: len(self.local)].to(self.local.dtype)
        if self.parameter.grad is None:
            self.parameter.grad = self.distributed(local)
        else:
            self.parameter.grad.to_local().add_(local)


# %%
# One unit
# --------
# A unit is a module whose parameters are gathered and released together, as a rule one block of a
# transformer. Two events tell the streams about each other: ``gathered`` behind its gather,
# ``consumed`` behind the kernels that read the weights.


class Unit:
    """The parameters of one module, without those of units inside it."""

    def __init__(self, parameters: list[ShardedParameter], streams) -> None:
        self.parameters = parameters
        self.nbytes = sum(p.nbytes for p in parameters)
        self.gathered, self.consumed = streams.Event(), streams.Event()
        self.resident = False  # gathered and not released, as the gather stream sees it
        self.grads_missing = 0

    def expose(self, full: bool) -> None:
        """Let the modules see the full parameters, or the shards."""
        for p in self.parameters:
            for module, name in p.owners:
                setattr(module, name, p.full if full else p.parameter)


# %%
# The context
# -----------
# The root owns one context, and every unit below it, however deeply nested, uses that one: there is
# one gather stream a rank, so gathers never compete with each other, and one queue, so memory is
# bounded for the whole model. All of the schedule is in three methods.
#
# ``before`` a unit computes, in forward and in backward: drain the queue to one, gather, and let
# the compute stream wait. ``after`` it: record ``consumed`` and queue the release. ``release``
# makes the gather stream wait for ``consumed`` and frees there. Freeing on that stream is the
# point: the caching allocator hands a freed block at once to the next allocation **on the same
# stream**, and that is the next gather, which comes behind the wait. No ``record_stream``, nothing
# freed late or at random; the host waits for nothing.
#
# The hooks are the ordinary ones. In backward, a hook on the unit's output runs before the unit's
# gradients, and a hook on each full parameter runs when its gradient is complete: it is then
# reduced and scattered, here still on the compute stream, and dropped.


class FsdpContext:
    """Shard ``root`` over ``mesh``, and gather each unit's weights on one stream when needed.

    Build the optimizer afterwards. Every rank must run the same units in the same order.

    Args:
        root: a module whose parameters are on the mesh's device and equal on every rank.
        units: modules inside ``root``, each returning one tensor; they may be nested. Parameters in
            none of them belong to ``root``.
        mesh: one-dimensional.
        dtype: of gathered weights and their gradients; None: the parameter's own. The shards, which
            the optimizer updates, keep theirs.
        gather: queues on the current stream the filling of its first argument, (ranks * rows, ...),
            from each rank's second, (rows, ...). None: ``all_gather_into_tensor``.
        empty: allocates the shards, like ``torch.empty``.

    Raises:
        ValueError: a parameter has no dimension to shard, or belongs to two units.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Sequence[nn.Module],
        mesh: DeviceMesh,
        dtype: torch.dtype | None = None,
        gather: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
        empty: Callable[..., torch.Tensor] = torch.empty,
    ) -> None:
        self.streams = torch.get_device_module(mesh.device_type)
        self.gather_stream = self.streams.Stream(priority=-1)
        self.mesh, self.group, self.ranks = mesh, mesh.get_group(), mesh.size()
        self.gather = gather or partial(all_gather, group=self.group)
        self.releases: deque[Unit] = deque()
        self.live_bytes = self.peak_bytes = 0  # of full weights
        self.units: list[Unit] = []
        owners = defaultdict(list)
        for module in root.modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                owners[parameter].append((module, name))
        root.register_forward_pre_hook(lambda *_: self.begin_forward())
        for module in reversed(list(root.modules())):  # what is inside comes first
            if module is root or module in units:
                inside = set(module.modules())
                mine = [p for p in owners if any(owner in inside for owner, _ in owners[p])]
                for p in mine:
                    if p.ndim == 0 or not all(owner in inside for owner, _ in owners[p]):
                        raise ValueError(f"{owners[p]}: needs a dimension, and a single unit")
                self.add_unit(
                    module, [ShardedParameter(p, owners.pop(p), mesh, dtype, empty) for p in mine]
                )
        root.register_forward_hook(lambda *_: self.end_forward())

    def add_unit(self, module: nn.Module, parameters: list[ShardedParameter]) -> None:
        """Hook ``module`` and its full parameters to the schedule."""
        unit = Unit(parameters, self.streams)
        self.units.append(unit)
        unit.expose(full=False)
        module.register_forward_pre_hook(lambda *_: self.before_forward(unit))
        module.register_forward_hook(lambda _, args, output: self.after_forward(unit, output))
        for p in parameters:
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
                p.buffer.untyped_storage().resize_(p.nbytes)
                self.gather(p.buffer, p.shard.to(p.buffer.dtype))
        unit.gathered.record(self.gather_stream)
        unit.resident = True
        self.live_bytes += unit.nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def release(self, unit: Unit) -> None:
        with self.streams.stream(self.gather_stream):
            self.gather_stream.wait_event(unit.consumed)
            for p in unit.parameters:
                p.buffer.untyped_storage().resize_(0)
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
        p.reduce_scatter(grad, self.group)

    def end_backward(self) -> None:
        for unit in self.units:
            if unit.resident:  # not every one of its parameters got a gradient
                unit.consumed.record(self.compute_stream)
                self.release(unit)
        self.releases.clear()

    def backward(self, loss: torch.Tensor) -> None:
        """Add the mean over ranks of the gradients of ``loss`` to the shards' ``.grad``."""
        loss.backward(torch.full_like(loss, 1 / self.ranks))
        self.end_backward()


# %%
# Run it, and prove it
# --------------------
# A stack of residual MLPs stands for a model. Both runs below see the same samples: the sharded
# one a different part on each rank, the unsharded one all parts on every rank.


class Block(nn.Module):
    """x + an MLP of x, over (batch, WIDTH) float32."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def build_model(device: torch.device) -> nn.Sequential:
    """UNITS blocks and a norm that belongs to the root; equal on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(UNITS)), nn.LayerNorm(WIDTH)).to(device)


def start_rank() -> torch.device:
    """Join the group that torchrun describes, or a group of one; return this rank's device."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device.index)
    if "RANK" in os.environ:
        dist.init_process_group()
    else:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    return device


def loss_of(model: nn.Module, step: int, part: int, device: torch.device) -> torch.Tensor:
    """The loss on one part of a step's samples: how far the output is from them, reversed."""
    generator = torch.Generator().manual_seed(1000 * step + part)
    samples = torch.randn(BATCH, WIDTH, generator=generator).to(device)
    return nn.functional.mse_loss(model(samples), samples.flip(1))


def train(model: nn.Module, device: torch.device, context: FsdpContext | None) -> None:
    """STEPS steps of AdamW, sharded under ``context``, or on all ranks' samples without one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(STEPS):
        for micro in range(MICRO_BATCHES):
            parts = [ranks * micro + r for r in range(ranks)]
            if context:
                context.backward(loss_of(model, step, parts[rank], device))
            else:
                total = sum(loss_of(model, step, part, device) for part in parts)
                total.backward(torch.full_like(total, 1 / ranks))
        optimizer.step()
        optimizer.zero_grad()


# %%
# Parity: after training, every weight equals that of the unsharded run. A sum of two gradients has
# one order, so one and two ranks agree **bit for bit**; from three ranks on, the sum's order is the
# collective's own, and float32 rounding is allowed for.


def prove_parity(model: nn.Module, reference: nn.Module) -> None:
    bitwise = dist.get_world_size() <= 2
    tolerance = {"rtol": 0, "atol": 0} if bitwise else {"rtol": 1e-4, "atol": 1e-5}
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        torch.testing.assert_close(parameter.full_tensor(), expected[name], **tolerance)
    how = "bit for bit" if bitwise else f"within {tolerance}"
    print(f"{STEPS} steps of {MICRO_BATCHES} micro-batches: weights equal the unsharded, {how}")


# %%
# The schedule: every gather was queued on the context's stream, beside the compute stream; and in a
# forward, two units' weights were in memory at once (less, and nothing could overlap) but never
# three.


def prove_schedule(model: nn.Module, context: FsdpContext, device: torch.device) -> None:
    gather, used = context.gather, []

    def watched(full: torch.Tensor, shard: torch.Tensor) -> None:
        used.append(context.streams.current_stream())
        gather(full, shard)

    context.gather, context.peak_bytes = watched, 0
    with torch.no_grad():
        loss_of(model, 0, 0, device)
    context.gather = gather
    assert context.gather_stream != context.compute_stream, "one stream for both"
    assert all(stream == context.gather_stream for stream in used), "gathered elsewhere"
    largest = max(unit.nbytes for unit in context.units)
    assert 2 * largest <= context.peak_bytes < 3 * largest, "released too early, or too late"
    assert context.live_bytes == 0
    print(f"{len(used)} gathers; at most {context.peak_bytes / largest:.2f} units in memory")


def main() -> None:
    device = start_rank()
    try:
        model, reference = build_model(device), build_model(device)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        context = FsdpContext(model, [m for m in model if isinstance(m, Block)], mesh)
        train(model, device, context)
        train(reference, device, None)
        prove_parity(model, reference)
        prove_schedule(model, context, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
