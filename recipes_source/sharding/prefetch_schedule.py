# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.1, sharding/prefetch_schedule.py
"""
Look ahead: gather early, gather less, reduce beside
====================================================

Gather the weights of a sharded layer several layers before they are needed, keep the last layers
over the turn from forward to backward, and sum gradients on a stream of their own. What a step
leaves exposed is its first gather and its last reduce-scatter. :doc:`stream_context` shards the
model; this file has the same parameters and another schedule.

**Scope.** As there: a model of units that run once each, in one order, in every forward and on
every rank. Each unit returns one tensor, and the loss uses no other of it. Each parameter is trained,
belongs to one unit, has no hooks, and gets a gradient in every backward on every rank. Weights change
between steps. The model fits on one device before it is sharded, and computes in the dtype of its
weights. No unit is recomputed in backward. Most else raises: `Known limits`_ has what does not.

**When not to bother:** your model uses FSDP2. :doc:`peer_copies` hides more for it with one
call; :doc:`fsdp2_settings` shows what FSDP2 prefetches by itself.

This is the loop:

.. literalinclude:: prefetch_schedule.py
   :pyobject: train_sharded

The file needs torch alone. Copy it, and take its first half: down to ``PrefetchContext``.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * the rule that decides what to gather and what to drop, in two short methods
      * why the units at the turn are gathered once in place of twice
      * what must live until a reduce-scatter on another stream has ended

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks
      * device memory for a few units' whole weights

.. verification-badge::

The idea
--------

Units are needed in forward's order, then in the reverse: with four, 1 2 3 4 4 3 2 1. Keep in memory
the units that are needed **soonest**, as many as there are buffers. When one has computed, it is
taken off the list, and the rule says by itself what goes and what comes:

.. lanes:: Schematic, three buffers. Units 3 and 4 stay over the turn; 2 is there as well.

   compute:  4-10 fwd 1; 10-16 fwd 2; 16-22 fwd 3; 22-28 fwd 4; 28-38 bwd 4; 38-48 bwd 3; 48-58 bwd 2; 58-68 bwd 1
   gather:   0-4 1 ~; 4-8 2 ~; 8-12 3 ~; 12-16 4 ~; 38-42 1 ~
   reduce-scatter:  38-43 4 ~; 48-53 3 ~; 58-63 2 ~; 68-73 1 !

That is Belady's rule for caches: drop what is needed last. It is optimal when the future is known,
and here it is.
"""

# %%
# Imports
# -------

import math
import os
import weakref
from collections import Counter, deque
from collections.abc import Iterable
from functools import cache

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge, increment_version
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import register_optimizer_step_post_hook

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13 renames
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

BUFFERS = 3  # units whose whole weights may be in memory at once
WAITING = 1  # units whose whole gradients may wait for their reduce-scatter

# %%
# What is sharded
# ---------------
# A parameter in rows, a check of what this file is made for, and a unit. :doc:`stream_context`
# explains these definitions.


class ShardedParameter:
    """A parameter of shape (rows, ...), of which each rank keeps ceil(rows / ranks) rows or fewer.

    It takes the place of ``name`` in ``module``, with the values of rank 0.
    """

    def __init__(self, module: nn.Module, name: str, mesh: DeviceMesh) -> None:
        whole = getattr(module, name).detach().contiguous()
        dist.broadcast(whole, src=0)
        self.module = module
        self.name = name
        self.mesh = mesh
        self.shape = whole.shape
        self.stride = whole.stride()

        rows = math.ceil(len(whole) / mesh.size())
        first = rows * mesh.get_local_rank()
        mine = whole[first : first + rows]
        self.shard = whole.new_zeros(rows, *self.shape[1:])
        self.local = self.shard[: len(mine)]
        self.local.copy_(mine)
        self.sharded = nn.Parameter(self.distributed(self.local))
        self.sharded.is_shard = True  # for ``count_updates``
        self.counted = self.sharded.to_local().detach()  # counts changes behind the DTensor's back

        self.buffer = whole.new_empty(rows * mesh.size(), *self.shape[1:])
        self.nbytes = self.buffer.nbytes
        self.full = nn.Parameter(self.buffer.data[: len(whole)])
        self.release()

    def distributed(self, local: torch.Tensor) -> DTensor:
        """``local``, known as this rank's rows of a tensor of the full shape."""
        return DTensor.from_local(
            local, self.mesh, [Shard(0)], run_check=False, shape=self.shape, stride=self.stride
        )

    def expose(self, parameter: nn.Parameter) -> None:
        """Let the module see ``full`` or ``sharded``."""
        setattr(self.module, self.name, parameter)

    def gather(self, group: dist.ProcessGroup) -> None:
        """Queue on the current stream: give ``full`` memory, and fill it."""
        self.buffer.untyped_storage().resize_(self.nbytes)
        all_gather(self.buffer, self.shard, group=group)

    def release(self) -> None:
        """Give the memory of ``full`` back to the current stream, from which it must be."""
        self.buffer.untyped_storage().resize_(0)
        self.full.grad = None  # of a backward that raised
        self.expose(self.sharded)  # behind a forward that raised

    def reduce(self, group: dist.ProcessGroup) -> None:
        """Queue: add this rank's rows of the sum over ranks of ``full.grad`` to the shard's."""
        if has_hook(self.sharded):
            raise RuntimeError(f"{self.name} has a hook, which does not run: use its grad")
        gradient = self.full.grad
        self.full.grad = None
        missing = len(self.buffer) - len(gradient)
        if missing > 0:
            gradient = torch.cat([gradient, gradient.new_zeros(missing, *self.shape[1:])])
        mine = torch.empty_like(self.shard)
        reduce_scatter(mine, gradient.contiguous(), group=group)
        total = self.distributed(mine[: len(self.local)])
        if self.sharded.grad is None:
            self.sharded.grad = total
        else:
            self.sharded.grad.add_(total)

    def check(self) -> None:
        """Raise RuntimeError if the module has another parameter, or one in other memory."""
        parameter = getattr(self.module, self.name)
        is_same = parameter is self.sharded and parameter.requires_grad
        if not is_same or parameter.detach().to_local().data_ptr() != self.local.data_ptr():
            raise RuntimeError(
                f"{self.name} of {type(self.module).__name__} was replaced, moved or frozen: no "
                "load_state_dict(assign=True), model.to(), requires_grad_() behind the sharding"
            )


ORDER = "units must run once each, in the order that the context was given, in every forward"


def has_hook(parameter: nn.Parameter) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def check_scope(model: nn.Module, units: list[nn.Module]) -> None:
    """Raise ValueError unless each parameter is in one unit, trained, and can be cut into rows."""
    in_model = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
    in_units: Counter[nn.Parameter] = Counter()
    for unit in units:
        in_units.update(p for _, p in unit.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(f"{name} is sharded already")
        if in_model[parameter] != 1:
            raise ValueError(f"{name} is shared by several modules")
        if in_units[parameter] != 1:
            raise ValueError(f"{name} is in {in_units[parameter]} units: put it in one")
        if parameter.dim() == 0 or not parameter.requires_grad:
            raise ValueError(f"{name} has no rows, or is frozen")
        if has_hook(parameter):
            raise ValueError(f"{name} has a hook, which would not run")


class Unit:
    """The parameters of one module, which are gathered and released together."""

    def __init__(self, number: int, parameters: list[ShardedParameter], streams) -> None:
        self.number = number
        self.parameters = parameters
        self.gathered = streams.Event()  # behind its gathers
        self.consumed = streams.Event()  # behind the kernels that read its weights
        self.is_full = False  # as the gather stream sees it
        self.versions: list[int] = []  # of the shards when forward began

    def versions_now(self) -> list[int]:
        """Numbers that grow with each change in place, as far as PyTorch counts them."""
        of_parameters = [p.sharded._version for p in self.parameters]
        of_memory = [p.counted._version for p in self.parameters]
        return of_parameters + of_memory


@cache  # registered once
def count_updates() -> None:
    """Let a step of any optimizer count as a change: with ``foreach`` or ``fused`` it does not."""

    def count(optimizer: torch.optim.Optimizer, *_) -> None:
        for group in optimizer.param_groups:
            increment_version([p for p in group["params"] if hasattr(p, "is_shard")])

    register_optimizer_step_post_hook(count)


def check_graph(loss: torch.Tensor, units: list[Unit]) -> None:
    """Raise RuntimeError if backward can reach weights by another way than their unit's output.

    The hook on that output has them gathered: by another way they may be read before.
    """
    number_of = {}
    for unit in units:
        for p in unit.parameters:
            number_of[p.full] = unit.number
    seen = set()
    waiting = [(loss.grad_fn, None)]  # nodes, with the unit whose output was last on the way there
    while waiting:
        visit = waiting.pop()
        node, last = visit
        if node is None or visit in seen:
            continue
        seen.add(visit)
        last = node.metadata.get("output of", last)
        weight = getattr(node, "variable", None)
        if weight in number_of and number_of[weight] != last:
            raise RuntimeError(
                f"the loss comes to weights of unit {number_of[weight]} not by the unit's result: a "
                "tensor was kept beside it, or the result was changed in place or is the next unit's"
            )
        for after, _ in node.next_functions:
            waiting.append((after, last))


# %%
# What is in memory
# -----------------
# ``upcoming`` is what forward has still to run, ``returning`` what backward has. Both are known when
# a forward begins. ``soonest`` reads the next units from them, and ``prefetch`` makes memory hold
# just these: it releases the others, behind the kernels that read them, and gathers what is
# missing. It runs at the begin of a forward and behind each unit.
#
# Between the passes nothing special happens. When the last unit's forward has ended, the units that
# are needed soonest are those that ran last, and they are there.
#
# Gradients on a stream of their own
# ----------------------------------
# A unit's gradients are summed on ``reduce_stream``, behind the kernels that computed them. They are
# memory of the compute stream, whose next allocations would take it as soon as it is free. So they
# stay in the queue ``reducing``, and before they are dropped the compute stream waits for the event
# behind their reduce-scatters. ``WAITING`` bounds how many wait. The optimizer waits for all.


class PrefetchContext:
    """Shard ``model`` over all ranks; keep the BUFFERS units in memory that are needed soonest.

    All ranks construct it. Build the optimizer afterwards, from ``model.parameters()``.

    Args:
        model: on the device that it is trained on.
        units: modules of ``model`` in the order in which every forward runs them, once each. Each
            returns one tensor.

    Raises:
        ValueError: a parameter is shared, frozen, sharded already, not in exactly one unit, or has
            a hook.
        TypeError, in forward: a unit did not return one tensor.
        RuntimeError, in forward: a unit ran out of turn or in backward, a parameter was replaced, or
            weights were changed in forward.
    """

    def __init__(self, model: nn.Module, units: Iterable[nn.Module]) -> None:
        modules = list(units)
        check_scope(model, modules)
        device = next(model.parameters()).device
        self.streams = torch.get_device_module(device)
        self.gather_stream = self.streams.Stream(priority=-1)
        self.reduce_stream = self.streams.Stream(priority=-1)
        self.gather_group = dist.new_group()
        self.mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        self.replaced = [weakref.ref(parameter) for parameter in model.parameters()]
        self.units: list[Unit] = []
        self.upcoming: list[Unit] = []  # what this forward has still to run, in order
        self.returning: list[Unit] = []  # what its backward has
        self.reducing: deque = deque()  # (event behind the reduce-scatters, what they read)
        self.computing: Unit | None = None  # whose backward runs
        self.in_backward = False
        self.forwards = 0
        for module in modules:
            self.add(module)
        count_updates()

    def add(self, module: nn.Module) -> None:
        parameters = []
        for owner in module.modules():
            for name, _ in list(owner.named_parameters(recurse=False)):
                parameters.append(ShardedParameter(owner, name, self.mesh))
        unit = Unit(len(self.units), parameters, self.streams)
        self.units.append(unit)
        module.register_forward_pre_hook(lambda *_: self.before_forward(unit))
        module.register_forward_hook(lambda _, args, output: self.after_forward(unit, output))

    # The schedule

    def soonest(self) -> list[Unit]:
        """The units that are needed next, as many as there are buffers."""
        found: list[Unit] = []
        for unit in self.upcoming + self.returning:
            if unit not in found and len(found) < BUFFERS:
                found.append(unit)
        return found

    def prefetch(self) -> None:
        wanted = self.soonest()
        for unit in self.units:
            if unit.is_full and unit not in wanted:
                self.release(unit)
        for unit in wanted:
            if not unit.is_full:
                self.gather(unit)

    # What it queues on the gather stream

    def gather(self, unit: Unit) -> None:
        unit.is_full = True
        with self.streams.stream(self.gather_stream):
            for p in unit.parameters:
                p.gather(self.gather_group)
        unit.gathered.record(self.gather_stream)

    def release(self, unit: Unit) -> None:
        with self.streams.stream(self.gather_stream):
            self.gather_stream.wait_event(unit.consumed)
            for p in unit.parameters:
                p.release()
        unit.is_full = False

    def release_all(self) -> None:
        """Drop full weights, whatever pass they are from."""
        for unit in self.units:
            if unit.is_full:
                unit.consumed.record(self.compute_stream)
                self.release(unit)
        self.computing = None

    # Forward, called by hooks

    def before_forward(self, unit: Unit) -> None:
        if self.in_backward:
            raise RuntimeError("a unit ran inside backward: do not recompute activations")
        if unit is self.units[0]:
            self.begin_forward()
        self.check_turn(unit, self.upcoming)
        self.check_unchanged(unit)
        self.compute_stream.wait_event(unit.gathered)
        for p in unit.parameters:
            p.expose(p.full)

    def begin_forward(self) -> None:
        """The weights are as the compute stream leaves them: gather behind the optimizer."""
        self.release_all()  # what a forward without a backward has left
        for unit in self.units:
            for p in unit.parameters:
                p.check()
            unit.versions = unit.versions_now()
        self.compute_stream = self.streams.current_stream()
        self.gather_stream.wait_stream(self.compute_stream)
        self.upcoming = list(self.units)
        self.returning = []
        if torch.is_grad_enabled():
            self.returning = self.units[::-1]
        self.forwards += 1
        self.prefetch()

    def check_unchanged(self, unit: Unit) -> None:
        """Raise RuntimeError if weights have changed since forward began: the gather did not wait."""
        if unit.versions != unit.versions_now():
            raise RuntimeError(f"weights of unit {unit.number} have changed in this forward")

    def check_turn(self, unit: Unit, due: list[Unit]) -> None:
        if not due or due[0] is not unit:
            raise RuntimeError(f"unit {unit.number} ran out of turn: {ORDER}")

    def after_forward(self, unit: Unit, output: torch.Tensor) -> None:
        for p in unit.parameters:
            p.expose(p.sharded)
            if p.full._version > 0:
                raise RuntimeError(f"{p.name} was changed in forward: its shards would not follow")
        unit.consumed.record(self.compute_stream)
        self.upcoming.pop(0)
        self.prefetch()
        if not isinstance(output, torch.Tensor):
            raise TypeError(f"a unit gave a {type(output).__name__}: wrap it to return one tensor")
        if output.requires_grad:
            forward = self.forwards
            get_gradient_edge(output).node.metadata["output of"] = unit.number
            output.register_hook(lambda _: self.before_backward(unit, forward))

    # Backward

    def backward(self, loss: torch.Tensor) -> None:
        """Add the mean over ranks of the gradients of ``loss`` to the shards' ``.grad``.

        Raises:
            RuntimeError: a parameter has no gradient, a unit's output did not lead to ``loss``,
                ``loss`` is not of the last forward or was computed with what a unit kept, weights
                have changed since, a parameter has a hook, or something still holds the parameters
                that were there before the sharding.
        """
        if any(reference() is not None for reference in self.replaced):
            raise RuntimeError(
                "something holds parameters from before the sharding, an optimizer perhaps: build "
                "it behind the context, and delete other references"
            )
        check_graph(loss, self.units)
        self.in_backward = True
        try:
            (loss / self.mesh.size()).backward()
            self.reduce_computed()
            self.drain_gradients(keep=0)
        finally:
            self.in_backward = False
            self.release_all()
        if self.returning:
            raise RuntimeError(f"no gradient has come to unit {self.returning[0].number}: {ORDER}")

    def before_backward(self, unit: Unit, forward: int) -> None:
        """The gradient of the output of ``unit`` is complete, and all behind it has been queued."""
        if not self.in_backward:
            raise RuntimeError("call context.backward(loss) in place of loss.backward()")
        if forward != self.forwards or unit.versions != unit.versions_now():
            raise RuntimeError("this is not the last forward, or its weights have changed since")
        self.reduce_computed()
        self.check_turn(unit, self.returning)
        self.compute_stream.wait_event(unit.gathered)
        self.computing = unit

    def reduce_computed(self) -> None:
        """Reduce the gradients of the unit whose backward has ended, in one order on all ranks."""
        unit = self.computing
        if unit is None:
            return
        for p in unit.parameters:
            if p.full.grad is None:
                raise RuntimeError(f"{p.name} of unit {unit.number} has no gradient on this rank")
        gradients = [p.full.grad for p in unit.parameters]
        unit.consumed.record(self.compute_stream)
        with self.streams.stream(self.reduce_stream):
            self.reduce_stream.wait_event(unit.consumed)
            for p in unit.parameters:
                p.reduce(self.mesh.get_group())
        reduced = self.streams.Event()
        reduced.record(self.reduce_stream)
        self.reducing.append((reduced, gradients))
        self.drain_gradients(keep=WAITING)
        self.returning.pop(0)
        self.prefetch()
        self.computing = None

    def drain_gradients(self, keep: int) -> None:
        """Drop whole gradients when they have been read; wait for what was read last."""
        while len(self.reducing) > keep:
            reduced, _ = self.reducing[0]
            self.compute_stream.wait_event(reduced)
            self.reducing.popleft()  # the memory goes back to the compute stream


# %%
# Run it, and prove it
# --------------------
# Sharded and unsharded runs see the same samples. On one and two ranks they must agree in **every
# bit**, in gradients and weights; with more, the order of a sum of gradients is the collective's own,
# and rounding is allowed for.

WIDTH = 64  # features
HIDDEN = 509
BLOCKS = 5
BATCH = 8  # samples per rank and micro-batch
STEPS = 2
MICRO_BATCHES = 2  # whose gradients are added before a step


class Block(nn.Module):
    """x + an MLP of x."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def build(device: torch.device, seed: int, width: int = WIDTH, hidden: int = HIDDEN) -> nn.Module:
    torch.manual_seed(seed)
    blocks = [Block(width, hidden) for _ in range(BLOCKS)]
    return nn.Sequential(*blocks, nn.LayerNorm(width)).to(device)


def loss_of(model: nn.Module, turn: int, rank: int, device: torch.device) -> torch.Tensor:
    """The loss on one rank's samples of one micro-batch: to turn each sample around."""
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    samples = torch.randn(BATCH, WIDTH, generator=generator).to(device)
    return nn.functional.mse_loss(model(samples), samples.flip(1))


def train_sharded(model: nn.Sequential, device: torch.device) -> list[torch.Tensor]:
    """Return the gradients of the last step."""
    context = PrefetchContext(model, list(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        for turn in range(MICRO_BATCHES * step, MICRO_BATCHES * (step + 1)):
            loss = loss_of(model, turn, dist.get_rank(), device)
            context.backward(loss)
        optimizer.step()
    return [parameter.grad for parameter in model.parameters()]


def train_unsharded(model: nn.Sequential, device: torch.device) -> list[torch.Tensor]:
    ranks = dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        for turn in range(MICRO_BATCHES * step, MICRO_BATCHES * (step + 1)):
            total = sum(loss_of(model, turn, rank, device) for rank in range(ranks))
            (total / ranks).backward()
        optimizer.step()
    return [parameter.grad for parameter in model.parameters()]


def prove_equal(sharded: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    tolerance = {"rtol": 0.0, "atol": 0.0}
    if dist.get_world_size() > 2:
        tolerance = {"rtol": 1e-4, "atol": 1e-5}
    for mine, whole in zip(sharded, expected, strict=True):
        assert isinstance(mine, DTensor), "not sharded"
        torch.testing.assert_close(mine.detach().full_tensor(), whole.detach(), **tolerance)


# %%
# Then the schedule. Never are more units in memory than there are buffers. With as many units as
# forward runs and :math:`B` buffers, a pass gathers all in forward and all but :math:`B` in backward.
# Gradients are reduced on their own stream. And no gather was asked for late: when a unit begins, as
# many gathers are queued as there are buffers.


class Watched(PrefetchContext):
    """Records gathers by the units that they are of, and how many are full."""

    def __init__(self, model: nn.Module, units: Iterable[nn.Module]) -> None:
        super().__init__(model, units)
        self.gathers: list[int] = []
        self.ahead: list[int] = []  # gathers before each forward of a unit
        self.most_full = 0

    def gather(self, unit: Unit) -> None:
        super().gather(unit)
        self.gathers.append(unit.number)
        full = [unit for unit in self.units if unit.is_full]
        self.most_full = max(self.most_full, len(full))

    def before_forward(self, unit: Unit) -> None:
        super().before_forward(unit)
        self.ahead.append(len(self.gathers))


def prove_schedule(device: torch.device) -> None:
    model = build(device, seed=0)
    context = Watched(model, list(model))
    context.backward(loss_of(model, 0, dist.get_rank(), device))
    count = len(context.units)
    forward = list(range(count))
    backward = forward[::-1][BUFFERS:]
    assert context.most_full == BUFFERS, "another number of buffers"
    assert context.gathers == forward + backward, "kept too few, or others"
    assert context.ahead == [min(n + BUFFERS, count) for n in forward], "gathered late"
    streams = {context.gather_stream, context.reduce_stream, context.compute_stream}
    assert len(streams) == 3, "one stream for two"
    print(f"{count} units, {BUFFERS} buffers: gathered were {context.gathers}")


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


def main() -> None:
    device = start_rank()
    try:
        model = build(device, seed=dist.get_rank())
        reference = build(device, seed=0)
        gradients = train_sharded(model, device)
        expected = train_unsharded(reference, device)
        prove_equal(gradients, expected)
        prove_equal(list(model.parameters()), list(reference.parameters()))
        print(f"{STEPS} steps: gradients and weights are those of the unsharded run")
        prove_schedule(device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

# %%
# What it buys
# ------------
# Rows are of a synthetic stack of matrices (:doc:`/guide/measured`). ``prefetch`` is this schedule,
# ``delayed_release`` that of :doc:`stream_context`. ``megatron-fsdp`` is NVIDIA's package, with its
# stable and its experimental schedule (``megatron_fsdp.experimental``).
#
# .. result-table:: fsdp_overlap
#    :rows: no_communication fsdp2 fsdp2_tuned megatron-fsdp megatron-fsdp-experimental delayed_release prefetch
#    :where: model=synthetic loop=–
#
# .. timeline:: fsdp_overlap delayed_release prefetch
#
# Side by side, for :math:`L` units and :math:`B` buffers:
#
# .. list-table::
#    :header-rows: 1
#    :stub-columns: 1
#
#    * - compared
#      - delayed release
#      - look-ahead
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
# On each rank, beside shards, gradients of shards and optimizer states:
#
# .. math::
#
#    B \, \max_{u} \text{bytes}(u) \;+\; 2 \, \max_{u} \text{bytes}(\text{gradients of } u)
#
# for :math:`B` buffers: one unit's gradients are computed while another's are summed.
#
# When it is not worth it
# -----------------------
# * Communication is short beside compute (many samples a step): the two schedules differ less then.
# * Two units' weights are all that fits. Two buffers work, and keep both over the turn; but while
#   one unit computes, only one can arrive.
# * Many small parameters: each has its own collective here.
#
# Known limits
# ------------
# * Between micro-batches everything is released and gathered anew, although no weight has changed.
# * The first gather waits for the whole optimizer step, and the optimizer for the last
#   reduce-scatter. An update unit by unit, in the order of the next forward, can hide both.
# * Buffers of modules, such as the statistics of a batch norm, stay each rank's own.
# * **Without an error**: weights changed between the begin of forward and backward by ``.data``,
#   ``detach()`` or ``torch._foreach_*``.
# * A forward that raised, or has no backward, leaves full weights in memory until the next one.
#
# Further reading
# ---------------
# * `fully_shard <https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html>`__:
#   ``set_modules_to_forward_prefetch`` and ``set_modules_to_backward_prefetch`` do this for FSDP2,
#   by lists that you write
# * `Explicit prefetch in Megatron-LM <https://github.com/NVIDIA/Megatron-LM/pull/5719>`__, which
#   took the place of delayed release there
# * `A study of replacement algorithms for a virtual-storage computer
#   <https://doi.org/10.1147/sj.52.0078>`__, Belady's rule, 1966
