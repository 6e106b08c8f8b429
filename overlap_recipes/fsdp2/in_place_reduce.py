# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/fsdp2/in_place_reduce.py
"""FSDP2's reductions by peer copies, from where backward leaves the gradients."""

from dataclasses import dataclass
from itertools import groupby

import torch
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule

from . import peer_memory, same_gradients

# Private by name, besides what ``peer_memory`` looks for: ``_reduce_dtype`` of groups,
# ``_post_accumulate_grad_hooks`` of parameters, ``_local_tensor`` of DTensors.

_ALIGNMENT = 512  # bytes, of each gradient's part in a slot
SLOTS = 3  # that units take turns in


def _rounded_up(nbytes: int) -> int:
    """With the gap after it, so that the next part in a slot is aligned."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


@dataclass
class _Plan:
    """Where the gradients of a unit's parameters go in a slot."""

    places: list[tuple[int, int]]  # of each parameter's part in a row: begin and end, in bytes
    pushes: dict[int, list[torch.Tensor]]  # by owner: memory there for its parts
    arrived: torch.Tensor  # memory here for this rank's parts: a row for each sender


@dataclass
class _Pushed:
    """Gradients of a unit that are on their way to the owners of their parts."""

    computed_on: torch.Stream
    event: torch.Event  # after the pushes of all ranks
    group: object
    parameters: tuple
    dtypes: list[torch.dtype]  # in which they are reduced
    flat: list[torch.Tensor]  # this rank's gradients, whole
    plan: _Plan


class PushedGradients:
    """Reduces gradients of one group of ranks by pushes into slots of their owners."""

    def __init__(self, memory: peer_memory.PeerMemory, groups: list) -> None:
        self.memory = memory
        self.streams = torch.get_device_module(memory.device)
        self.parameters = [group.fsdp_params for group in groups]
        self.stream = self.streams.Stream()
        self.slots: list[list[torch.Tensor]] = []  # each by rank: (ranks, bytes)
        self.retired: list[list] = []  # smaller ones from before
        self.calls = 0  # by which slots take turns
        self.plans: dict[tuple, _Plan] = {}
        self.waiting: list[_Pushed] = []  # pushed and not summed: one unit or none
        self.same = same_gradients.SameGradients(memory.group, groups)
        self.running: set[int] = set()  # numbers of backward passes whose end is to be agreed on

    def slot(self, nbytes: int) -> list[torch.Tensor]:
        """The slot whose turn it is, by rank. Larger ones, which are rare, are a collective."""
        if not self.slots or self.slots[0][0].shape[1] < nbytes:
            self.retired.append(self.slots)  # others may still write to them
            row = nbytes
            for parameters in self.parameters:
                row = max(row, largest(parameters))
            size = (self.memory.ranks, row)
            self.slots = [self.memory.empty(size, torch.uint8) for _ in range(SLOTS)]
            self.plans.clear()
        return self.slots[self.calls % SLOTS]

    def plan(self, parameters: tuple, dtypes: tuple) -> _Plan:
        """Where gradients of these dtypes go in the slot whose turn it is."""
        rank = self.memory.rank
        ranks = self.memory.ranks
        places = []
        begin = 0
        for p, dtype in zip(parameters, dtypes, strict=True):
            end = begin + p.padded_sharded_param_size.numel() * dtype.itemsize
            places.append((begin, end))
            begin = _rounded_up(end)
        slot = self.slot(begin)  # new slots drop all plans: before one is looked for
        ids = tuple(id(p) for p in parameters)
        key = (ids, dtypes, self.calls % SLOTS)
        if key in self.plans:
            return self.plans[key]

        pushes = {}
        for step in range(ranks):
            owner = (rank + step) % ranks  # no two ranks write to one at a time
            parts = []
            for (begin, end), dtype in zip(places, dtypes, strict=True):
                parts.append(slot[owner][rank, begin:end].view(dtype))
            pushes[owner] = parts
        self.plans[key] = _Plan(places, pushes, slot[rank])
        return self.plans[key]

    @torch.no_grad()
    def reduce(self, group, taken: list) -> None:
        """Queue the pushes of ``taken``, a unit's parameters and gradients; then earlier sums."""
        parameters = tuple(p for p, _ in taken)
        dtypes = []
        flat = []
        for p, gradient in taken:
            dtype = group._reduce_dtype or getattr(p, "unsharded_grad_dtype", None)
            if dtype is None:  # before torch 2.15
                dtype = gradient.dtype
            dtypes.append(dtype)
            narrower = dtype.itemsize < gradient.itemsize
            if narrower or group.accumulates:  # rounded before it is sent, as FSDP2 does
                gradient = gradient.to(dtype)
            flat.append(gradient.contiguous().view(-1))
        plan = self.plan(parameters, tuple(gradient.dtype for gradient in flat))
        if not self.waiting:
            Variable._execution_engine.queue_callback(self.finish)  # at the end of this backward
        current = self.streams.current_stream()
        if self.waiting and self.waiting[0].computed_on != current:
            self.finish()  # before others write to its slot
        self.stream.wait_stream(current)
        with self.streams.stream(self.stream):
            self.push(flat, plan)
            self.memory.barrier()
            event = self.stream.record_event()
        self.calls += 1  # first: a hook in `finish` may raise on one rank alone
        try:
            self.finish()
        except Exception:
            self.end()  # the other ranks do not wait for more
            raise
        self.waiting.append(_Pushed(current, event, group, parameters, dtypes, flat, plan))

    def agree(self, group, parameters: list) -> None:
        """Make sure that all ranks reduce gradients of the same parameters of a unit."""
        backward = torch._C._current_graph_task_id()
        if backward not in self.running:
            self.running.add(backward)
            Variable._execution_engine.queue_callback(self.end)
        if parameters:
            self.same.agree(group, parameters, group.accumulates)

    def end(self) -> None:
        backward = torch._C._current_graph_task_id()
        if backward in self.running:
            self.running.remove(backward)
            self.same.end()

    def push(self, flat: list[torch.Tensor], plan: _Plan) -> None:
        for owner, parts in plan.pushes.items():
            for gradient, part in zip(flat, parts, strict=True):
                numel = len(part)
                its = gradient[owner * numel : (owner + 1) * numel]  # the last may be short
                part[: len(its)].copy_(its, non_blocking=True)

    @torch.no_grad()
    def finish(self) -> None:
        """Sum what has been pushed, on the stream that its gradients were made on."""
        current = self.streams.current_stream()
        if self.waiting and self.waiting[0].computed_on != current:
            before = self.waiting[0].computed_on
            with self.streams.stream(before):
                self.finish()  # their memory goes back to that stream
            current.wait_stream(before)
        while self.waiting:
            unit = self.waiting.pop()
            current.wait_event(unit.event)
            for p, total in zip(unit.parameters, self.totals(unit), strict=True):
                add(p, total.as_strided(p.sharded_size, p.contiguous_sharded_stride))

    def totals(self, unit: _Pushed) -> list[torch.Tensor]:
        """This rank's part of each gradient of a unit, over all ranks; more may lie after it.

        Parameters in a row that are alike in their dtypes are one kernel: a kernel for each costs
        the host more than the device.
        """
        kinds = []
        for p, dtype, sent in zip(unit.parameters, unit.dtypes, unit.flat, strict=True):
            rounded = dtype if dtype.itemsize < p.orig_dtype.itemsize else p.orig_dtype
            kinds.append((sent.dtype, rounded, p.orig_dtype))
        mean = unit.group.gradient_divide_factor != 1
        found = []
        for (sent, rounded, dtype), alike in groupby(range(len(kinds)), kinds.__getitem__):
            places = [unit.plan.places[number] for number in alike]
            first = places[0][0]
            rows = unit.plan.arrived[:, first : places[-1][1]].view(sent)
            total = average(rows, rounded, mean).to(dtype)
            for begin, _ in places:
                found.append(total[(begin - first) // sent.itemsize :])
        return found


def largest(parameters: list) -> int:
    """Bytes of a unit's row in a slot, if all its gradients come as its weights are gathered."""
    total = 0
    for p in parameters:
        if p.sharded_param.requires_grad:
            dtype = getattr(p, "param_dtype", None) or p.sharded_param.dtype
            total += _rounded_up(p.padded_sharded_param_size.numel() * dtype.itemsize)
    return total


def average(rows: torch.Tensor, dtype: torch.dtype, mean: bool) -> torch.Tensor:
    """The sum or the mean of ``rows``, in float32, rounded once."""
    exact = dtype if dtype == rows.dtype else torch.float32
    total = rows.mean(0, dtype=exact) if mean else rows.sum(0, dtype=exact)
    return total.to(dtype)


def add(p, gradient: torch.Tensor) -> None:
    """To the gradient of the shard, as FSDP2 does; then the hooks that wait for it."""
    sharded = p.sharded_param
    if sharded.grad is None:
        sharded.grad = p.to_sharded_dtensor(gradient)
    else:
        sharded.grad._local_tensor.add_(gradient)
    hooks = getattr(sharded, "_post_accumulate_grad_hooks", None)
    if hooks:
        for hook in hooks.values():
            hook(sharded)


class InPlaceReduce:
    """Methods of an FSDP2 group of parameters, around its own."""

    _reduce_scatter_comm = peer_memory.settled("_reduce_scatter_comm")
    accumulates = False  # a backward since the last reduction has reduced nothing, on every rank

    def post_backward(self, *unused) -> None:
        if not self.reduce_grads:
            self.accumulates = True
            super().post_backward(*unused)
            return
        if self.why_stock():
            self.pushed.agree(self, self.reduced_by_fsdp2())
            super().post_backward(*unused)
        else:
            taken = self.take()
            self.pushed.agree(self, [p for p, _ in taken])
            self.reshard_alone(*unused)
            if taken:
                self.pushed.reduce(self, taken)
        self.accumulates = False

    def take(self) -> list:
        """The gradients that are to be reduced, with their parameters."""
        zeros = self.fills_with_zeros()
        taken: list = []
        for p in self.fsdp_params:
            # Before torch 2.15, which has all of it in ``.grad``, another tensor had sums.
            has_sums = hasattr(p, "accumulate_unsharded_grad_if_needed")
            if has_sums:
                p.accumulate_unsharded_grad_if_needed()
            if not hasattr(p, "_unsharded_param"):
                continue
            if has_sums and p.unsharded_accumulated_grad is not None:
                taken.append((p, p.unsharded_accumulated_grad_data))
                p.unsharded_accumulated_grad = None
            elif p.unsharded_param.grad is not None:
                taken.append((p, p.unsharded_grad_data))
                p.unsharded_param.grad = None
            elif zeros and p.unsharded_param.requires_grad:
                taken.append((p, p.unsharded_zero_grad_data))
        return taken

    def reshard_alone(self, *unused) -> None:
        """What FSDP2 does after a unit's backward, which finds no gradient to reduce."""
        zeros = self.fills_with_zeros()
        if zeros:
            self.reduce_scatter_unused_params = False
        super().post_backward(*unused)
        if zeros:
            self.reduce_scatter_unused_params = True

    def why_stock(self) -> bool:
        """Whether this backward's reduction is one that FSDP2 must do."""
        p = self.fsdp_params[0]
        dtype = self._reduce_dtype or p.param_dtype or p.orig_dtype
        return (
            self.gradient_divide_factor not in (None, 1, self.pushed.memory.ranks)
            or self._all_reduce_hook is not None
            or dtype not in (torch.float32, torch.bfloat16)
        )

    def reduced_by_fsdp2(self) -> list:
        """The parameters that FSDP2 finds a gradient of, or for which it takes zeros."""
        zeros = self.fills_with_zeros()
        found: list = []
        for p in self.fsdp_params:
            full = getattr(p, "_unsharded_param", None)
            if full is None:
                continue
            accumulated = getattr(p, "unsharded_accumulated_grad", None) is not None
            if accumulated or full.grad is not None or (zeros and full.requires_grad):
                found.append(p)
        return found

    def fills_with_zeros(self) -> bool:
        """Whether parameters that have no gradient on this rank are reduced as zeros."""
        return getattr(self, "reduce_scatter_unused_params", False)

    def pre_forward(self, *arguments):
        if torch._C._current_graph_task_id() == -1:
            self.pushed.running.clear()
            self.pushed.waiting.clear()  # of a backward that raised: its gradients are not wanted
        return super().pre_forward(*arguments)

    def _reset_iter_state(self) -> None:
        self.pushed.waiting.clear()  # of the same: a backward may come next, not a forward
        super()._reset_iter_state()


def reduce_in_place(model: FSDPModule) -> PushedGradients | None:
    """Have every unit of ``model`` reduce its gradients by pushes, from now on. Collective.

    Returns:
        What reduces them; None if FSDP2 reduces all as before: with HSDP, or after a warning that
        says why.

    Raises:
        RuntimeError: nothing is sharded, this PyTorch's FSDP2 is another one, or it was called for
            one of the units before.
    """
    groups = peer_memory.copying_groups(model)
    chosen = [g for g in groups if not hasattr(g.mesh_info, "replicate_process_group")]
    if not chosen:
        return None
    group = chosen[0].mesh_info.shard_process_group
    pushed = PushedGradients(peer_memory.PeerMemory(group, chosen[0].device), chosen)
    peer_memory.become(chosen, InPlaceReduce)
    for group in chosen:
        group.pushed = pushed
    return pushed
