# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, sharding/stream_context.py
"""
Fully sharded training: gathers on a stream of their own, released late
=======================================================================

Each rank keeps some rows of every weight, gradient and optimizer state. The weights of a layer are
gathered while the layer before it computes, and are freed when the last kernel has read them. FSDP
does the same; this file does it in plain PyTorch.

**When not to bother:** you want to train, not to look inside. ``fully_shard`` uses the same idea
and handles many more cases; :doc:`peer_copies` makes it faster.

**Scope.** A model of layers ("units") that run once each, in one order, in every forward and on
every rank. Each unit returns one tensor, and the loss uses nothing else of it. Each parameter is
trained, belongs to one unit, has no hooks, and gets a gradient in every backward on every rank. Weights change
between steps. The model fits on one device before it is sharded, and computes in the dtype of its
weights. No unit is recomputed in backward. Anything else raises, except what `Known limits`_ lists.

.. result-gain:: fsdp_overlap
   :rows: delayed_release fsdp2
   :field: efficiency
   :where: model=synthetic loop=–

This is the loop:

.. literalinclude:: stream_context.py
   :pyobject: train_sharded

The file needs only torch. Copy its first half, down to ``FsdpContext``.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * a shard layout that needs no copy
      * how autograd finds a weight again that was freed after forward
      * why releasing a layer **late** lets the next gather run during it
      * the three orderings between two streams, and what breaks without each

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks
      * CPU runs everything; CUDA devices overlap it

.. verification-badge::

The idea
--------

An **all-gather** makes weights whole before they are used. A **reduce-scatter** sums gradients over
the ranks and leaves each the rows that it updates.

Memory decides the schedule. Release a unit's weights right after the unit, and the next gather,
which is queued after that release, waits for the unit to end: nothing overlaps. Release them **one
unit later**, and two units' weights are in memory: one computes, one arrives.

.. lanes:: Schematic. Unit 3 is gathered into memory that unit 1 gave back, while unit 2 computes.

   compute:  4-10 unit 1; 10-16 unit 2; 16-22 unit 3; 22-28 unit 4
   gather:   0-4 unit 1 ~; 4-8 unit 2 ~; 10-14 unit 3 ~; 16-20 unit 4 ~
   @10 unit 1 has read its weights
   @16 unit 2 has

1. **Compute after gather**: the compute stream waits for a unit's ``gathered`` event.
2. **Release after compute**: the gather stream waits for a unit's ``consumed`` event, and frees
   there.
3. **Gather after update**: the gather stream waits for the optimizer step.
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

# %%
# One parameter, in two forms
# ---------------------------
# A rank keeps ``shard``: its rows, padded to the same number on every rank. ``sharded`` is that
# memory without the padding, as a ``DTensor``: the optimizer updates it, and DCP saves it and loads
# it on any number of ranks. ``full`` is what the layer computes with.
#
# All shards have one size. So the all-gather writes them one after the other, and that **is** the
# weight, with the padding at its end: nothing is copied in or out.
#
# Between its uses ``full`` has no memory: the storage is resized to zero, and back before the next
# gather. The tensor object stays, and so do the views that autograd saved in forward: in backward
# they find the weights that were gathered again. ``.data`` gives ``full`` a version counter of its
# own; otherwise autograd would take the second gather for a change of a saved tensor.


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
        self.counted = self.sharded.to_local().detach()  # counts hidden changes

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
        self.expose(self.sharded)  # after a forward that raised

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
                "load_state_dict(assign=True), model.to(), requires_grad_() after the sharding"
            )


# %%
# What is in scope
# ----------------
# If one rank gathers unit 3 while another gathers unit 4, of the same
# size, each computes with parts of two units, without an error. So the order is fixed from the
# start, and each rank checks it by itself (``take_turn``, below). Likewise a parameter without a
# gradient raises: its collective is not skipped.

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
        self.gathered = streams.Event()  # after its gathers
        self.consumed = streams.Event()  # after the kernels that read its weights
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
                "tensor was kept with it, or the result was changed in place or is the next unit's"
            )
        for after, _ in node.next_functions:
            waiting.append((after, last))


# %%
# The context
# -----------
# A rank has one gather stream and one queue of releases, so memory is bounded for the whole model.
# The schedule is the first three methods.
#
# **Where memory is freed** is the point of it. PyTorch's caching allocator hands a freed block to
# the next allocation *of the same stream* at once, whatever other streams still do with it. Weights
# are allocated on the gather stream, so they are freed there, after a wait for ``consumed``:
# whatever comes into that memory comes after the wait.
#
# **Two communicators.** A communicator runs its collectives in the order in which the host launched
# them, on whatever streams. With one for gathers and reduce-scatters, the next gather of backward
# waits for this unit's reduce-scatter, which waits for its kernels: no gather of backward overlaps.
# So gathers have a communicator of their own.


class FsdpContext:
    """Shard ``model`` over all ranks, and gather each unit's weights on one stream when needed.

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
        self.gather_group = dist.new_group()
        self.mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        self.replaced = [weakref.ref(parameter) for parameter in model.parameters()]
        self.units: list[Unit] = []
        self.due: list[Unit] = []  # what this pass has still to run, in order
        self.releases: deque[Unit] = deque()  # consumed and not yet released, the oldest first
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

    def before(self, unit: Unit) -> None:
        """Let the compute stream have the full weights of ``unit`` from here on."""
        self.drain(keep=1)
        self.gather(unit)
        self.compute_stream.wait_event(unit.gathered)

    def after(self, unit: Unit) -> None:
        """The kernels queued so far are the last that read the weights of ``unit``."""
        unit.consumed.record(self.compute_stream)
        self.releases.append(unit)

    def drain(self, keep: int) -> None:
        while len(self.releases) > keep:
            self.release(self.releases.popleft())

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
        self.releases.clear()
        self.computing = None

    # Forward, called by hooks

    def before_forward(self, unit: Unit) -> None:
        if self.in_backward:
            raise RuntimeError("a unit ran inside backward: do not recompute activations")
        if unit is self.units[0]:
            self.begin_forward()
        self.take_turn(unit)
        self.check_unchanged(unit)
        self.before(unit)
        for p in unit.parameters:
            p.expose(p.full)

    def begin_forward(self) -> None:
        """The weights are as the compute stream leaves them: gather after the optimizer."""
        self.release_all()  # what a forward that raised has left
        for unit in self.units:
            for p in unit.parameters:
                p.check()
            unit.versions = unit.versions_now()
        self.compute_stream = self.streams.current_stream()
        self.gather_stream.wait_stream(self.compute_stream)
        self.due = list(self.units)
        self.forwards += 1

    def check_unchanged(self, unit: Unit) -> None:
        """Raise RuntimeError if weights have changed since forward began: the gather did not wait."""
        if unit.versions != unit.versions_now():
            raise RuntimeError(f"weights of unit {unit.number} have changed in this forward")

    def take_turn(self, unit: Unit) -> None:
        if not self.due or self.due[0] is not unit:
            raise RuntimeError(f"unit {unit.number} ran out of turn: {ORDER}")
        self.due.pop(0)

    def after_forward(self, unit: Unit, output: torch.Tensor) -> None:
        for p in unit.parameters:
            p.expose(p.sharded)
            if p.full._version > 0:
                raise RuntimeError(f"{p.name} was changed in forward: its shards would not follow")
        self.after(unit)
        if not self.due:
            self.drain(keep=0)
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
                "it after the context, and delete other references"
            )
        self.due = self.units[::-1]
        check_graph(loss, self.units)
        self.in_backward = True
        try:
            (loss / self.mesh.size()).backward()
            self.reduce_computed()
        finally:
            self.in_backward = False
            self.release_all()
        if self.due:
            raise RuntimeError(f"no gradient has come to unit {self.due[0].number}: {ORDER}")

    def before_backward(self, unit: Unit, forward: int) -> None:
        """The gradient of the output of ``unit`` is complete, and all after it has been queued."""
        if not self.in_backward:
            raise RuntimeError("call context.backward(loss) in place of loss.backward()")
        if forward != self.forwards or unit.versions != unit.versions_now():
            raise RuntimeError("this is not the last forward, or its weights have changed since")
        self.reduce_computed()
        self.take_turn(unit)
        self.before(unit)
        self.computing = unit

    def reduce_computed(self) -> None:
        """Reduce the gradients of the unit whose backward has ended, in one order on all ranks."""
        unit = self.computing
        if unit is None:
            return
        for p in unit.parameters:
            if p.full.grad is None:
                raise RuntimeError(f"{p.name} of unit {unit.number} has no gradient on this rank")
        for p in unit.parameters:
            p.reduce(self.mesh.get_group())
        self.after(unit)
        self.computing = None


# %%
# A hook on the *output* of a unit runs in backward, when the gradient of that output is complete:
# then all gradients of the unit after it are complete, too. They are summed over the ranks, in this
# file on the compute stream, and the unsharded gradients are freed.
#
# Call ``backward`` instead of ``loss.backward()``. It first divides the loss by the number of ranks,
# so that summed gradients are means. A second call adds to the shards' gradients.
#
# Run it, and prove it
# --------------------
# In the sharded run each rank sees its own samples. It begins with weights of its own, and the
# context replaces them by those of rank 0. In the unsharded run every rank sees all samples. On one
# and two ranks they agree in **every bit** of gradients and weights, because the sum of two numbers
# has no order. From three ranks on the collective chooses the order of the sum, and rounding is
# allowed.

WIDTH = 64  # features
HIDDEN = 509
BLOCKS = 3
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
    context = FsdpContext(model, list(model))
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
# Then the schedule. In a forward, two units' weights are in memory at once, never three. On a device,
# events say when: with layers that keep it busy for longer than the host needs, each gather begins
# before the unit before it has ended.

LARGE = (4096, 8192)  # features; samples


class Watched(FsdpContext):
    """Records how many units are full, and on a device when gathers begin and units end."""

    def __init__(self, model: nn.Module, units: Iterable[nn.Module]) -> None:
        super().__init__(model, units)
        self.most_full = 0
        self.begun = []
        self.ended = []

    def gather(self, unit: Unit) -> None:
        self.begun.append(self.mark(self.gather_stream))
        super().gather(unit)
        full = [unit for unit in self.units if unit.is_full]
        self.most_full = max(self.most_full, len(full))

    def after(self, unit: Unit) -> None:
        super().after(unit)
        self.ended.append(self.mark(self.compute_stream))

    def mark(self, stream):
        if self.mesh.device_type == "cpu":
            return None
        event = self.streams.Event(enable_timing=True)
        event.record(stream)
        return event


def prove_schedule(device: torch.device) -> None:
    width, samples = (WIDTH, BATCH)
    if device.type != "cpu":
        width, samples = LARGE
    model = build(device, 0, width, width)
    context = Watched(model, list(model))
    batch = torch.randn(samples, width, device=device)
    for _ in range(2):  # the first one finds nothing in the allocator's pools
        context.begun.clear()
        context.ended.clear()
        with torch.no_grad():
            model(batch)
    assert context.gather_stream != context.compute_stream, "one stream for both"
    assert context.most_full == 2, "released too early, or too late"
    print(f"{len(context.units)} units, {context.most_full} of them full at a time")
    if device.type != "cpu":
        context.streams.synchronize()
        for begun, ended in zip(context.begun[1:], context.ended, strict=False):
            assert begun.elapsed_time(ended) > 0, "a gather waited for the unit before it"
        print("each gather began before the unit before it had ended")


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
# Rows are of a synthetic stack of matrices. ``sync`` has its gathers on the compute stream.
# ``no_communication`` is the same work on weights that are never sharded
# (:doc:`how it is measured </guide/measured>`).
#
# .. timeline:: fsdp_overlap sync delayed_release
#
# .. result-table:: fsdp_overlap
#    :rows: no_communication fsdp2 delayed_release
#    :where: model=synthetic loop=–
#
# Exposed are the reduce-scatters, on the compute stream here; the first gather of forward
# and of backward; and the end of each gather that takes longer than a unit's compute.
#
# A look-ahead
# ------------
# More memory hides most of these. Gather as many of the **next** units as there are buffers, keep
# the last ones from forward to backward, and reduce on another stream: :doc:`fsdp2_settings`.
#
# What breaks if you remove a line
# --------------------------------
# On a CPU the bits come out right even without the events. A recorder finds what no event orders. It
# counts a release as a write.
#
# .. recipe-controls::
#
# Memory
# ------
# On each of :math:`N` ranks, for :math:`P` parameters of :math:`b` bytes and AdamW:
#
# .. math::
#
#    4 \, b \, \frac{P}{N} \;+\; 2 \, \max_{u} \text{bytes}(u) \;+\; \text{full gradients of one unit}
#
# A step moves, to and from each rank, :math:`2 \frac{N-1}{N}` of the weights and
# :math:`\frac{N-1}{N}` of the gradients: one and a half times an all-reduce.
#
# When it is not worth it
# -----------------------
# * The whole state fits on each device: data parallelism moves less.
# * The model has many small parameters: each needs a collective, and the device waits for the host.
#
# Known limits
# ------------
# * Buffers, such as the statistics of a batch norm, stay each rank's own.
# * **Without an error**: weights changed between the begin of forward and backward by ``.data``,
#   ``detach()`` or ``torch._foreach_*``.
# * A forward that raised leaves full weights in its modules, until the next forward or
#   ``release_all()``.
#
# Further reading
# ---------------
# * `Add FSDP stream context delayed release <https://github.com/NVIDIA/Megatron-LM/pull/5124>`__,
#   `what was merged <https://github.com/NVIDIA/Megatron-LM/pull/5513>`__, `explicit prefetch
#   <https://github.com/NVIDIA/Megatron-LM/pull/5719>`__
# * `Rethinking PyTorch Fully Sharded Data Parallel from first principles
#   <https://dev-discuss.pytorch.org/t/rethinking-pytorch-fully-sharded-data-parallel-fsdp-from-first-principles/1019>`__:
#   why not ``record_stream``
# * `ZeRO: memory optimizations toward training trillion parameter models
#   <https://arxiv.org/abs/1910.02054>`__: this is stage three
