# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, overlap_recipes/fsdp2/shared_slots.py
"""A few slots for the full weights of many units, filled by peer copies."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from . import peer_memory

# Private by name, beside what ``peer_memory`` looks for: of FSDP2 ``_unsharded_param``,
# ``_module_info``, ``_states_to_forward_prefetch`` and ``_states_to_backward_prefetch``; of
# DTensors ``_local_tensor``, of storages ``_cdata``; ``torch._foreach_copy_``.

ALIGNMENT, GRAIN = 512, 8 << 20  # bytes, of each weight in a slot and of a slot
SMALL = 1 << 18  # bytes: smaller shards go by one kernel instead of a copy each
SAMPLE = 64  # elements of each shard that are compared with what was gathered, where used


@dataclass(eq=False)
class Slot:
    """Memory of full weights, by rank, for all units that share it."""

    of_ranks: list[torch.Tensor]  # bytes
    number: int  # of the unit that it was last given to
    group: object = None  # whose weights are in it
    in_forward: int = 0  # in which forward they were gathered
    exclusive: bool = False  # its unit keeps it until the end of backward
    stream: object = None  # where a unit last computed with it

    def busy(self) -> bool:
        group = self.group
        return group is not None and (group.is_unsharded or group._all_gather_result is not None)


def dtype_of(p) -> torch.dtype:
    """What a parameter is gathered in."""
    return p.param_dtype or p.orig_dtype


class Slots:
    """The slots of all units of one model."""

    def __init__(self, memory: peer_memory.PeerMemory, turns: int) -> None:
        self.memory, self.turns, self.given = memory, turns, 0
        self.slots: list[Slot] = []
        self.last: Slot | None = None  # of the last gather

    @torch.inference_mode(False)
    def give(self, group, exclusive: bool = False) -> None:
        """A slot for ``group``, and views of it; a new one is a slow collective."""
        if not hasattr(group.fsdp_params[0], "param_dtype"):
            group.lazy_init()  # once: it reads what is frozen, and reduces by that
        if getattr(group, "slot", None) is None:
            self.given += 1
        exclusive |= group.post_forward_mesh_info is None  # FSDP2 keeps it full over the forward
        parameters, rank, ranks = group.fsdp_params, self.memory.rank, self.memory.ranks
        nbytes = [p.padded_sharded_param_size.numel() * dtype_of(p).itemsize for p in parameters]
        places = [0, *accumulate(-(-ranks * n // ALIGNMENT) * ALIGNMENT for n in nbytes)]
        size = -(-places[-1] // GRAIN) * GRAIN
        fit = [
            slot
            for slot in self.slots
            if not (slot.busy() or slot.exclusive or exclusive)
            and self.given - slot.number >= self.turns
            and size <= slot.of_ranks[0].nbytes <= 2 * size
        ]
        if not fit:
            fit = [Slot(self.memory.empty([size], torch.uint8), 0, exclusive=exclusive)]
            self.slots.append(fit[0])
        group.slot = min(fit, key=lambda slot: slot.of_ranks[0].nbytes)
        group.slot.number, copies = self.given, []
        group.sample = None
        for p, n, place in zip(parameters, nbytes, places, strict=False):
            flat = [t.data[place:][: ranks * n].view(dtype_of(p)) for t in group.slot.of_ranks]
            rows = [t.data.view(ranks, -1) for t in flat]  # autograd does not see what fills it
            p.own = rows[rank][rank]
            for step in range(1, ranks):
                source = (rank + step) % ranks  # no two ranks read from one at a time
                copies.append((rows[rank][source], rows[source][source]))
            mine, p.sharded_param.is_gathered = flat[rank], True
            p.all_gather_outputs = [mine]
            p.init_unsharded_param()
            full = getattr(p._unsharded_param, "_local_tensor", p._unsharded_param)
            increment_version(full)  # a backward with views of where it was is an error
            group.full_versions = ()
            group.versions_in_use = ()
            full.data = mine.as_strided(full.size(), full.stride(), mine.storage_offset())
            p.free_unsharded_param = lambda: None  # its memory is the slot's
        small = [pair for pair in copies if pair[1].nbytes <= SMALL]
        group.large = [pair for pair in copies if pair[1].nbytes > SMALL]
        group.small = [list(tensors) for tensors in zip(*small, strict=True)]

    def make_room(self, group) -> None:
        """Have the slot for ``group``, or another one.

        Raises:
            RuntimeError: another unit is in it, and autograd knows where this one is.
        """
        other, in_backward = group.slot.group, torch._C._current_graph_task_id() != -1
        recomputed = group._training_state.name == "FORWARD" and in_backward
        if not other.is_unsharded:
            other.drop()
        elif recomputed or not group.in_graph:
            self.give(group, exclusive=True)
        else:
            names = [type(g.modules[0]).__name__ for g in (group, other)]
            raise RuntimeError(
                f"{' and '.join(names)}, which share a slot, are full at the same time. Behind an "
                "exception in a step: model.reset_iter_state() (PyTorch 2.13 on) and zero_grad(). "
                "Else gather_in_place with more `slots`, as many as there are units if you keep "
                "them full"
            )

    @torch.no_grad()
    def fill(self, group) -> None:
        """Queue the gather of a unit's full weights on the current stream."""
        if group.slot is self.last:
            self.memory.barrier()  # others may still copy from it
        group.filled_from = versions(group)
        pairs = [(p.own, p._sharded_param_data) for p in group.fsdp_params]
        casts = [(o, s) for o, s in pairs if o.dtype != s.dtype or o.nbytes <= SMALL]
        for own, shard in pairs:
            if own.dtype == shard.dtype and own.nbytes > SMALL:
                own.copy_(shard, non_blocking=True)  # on a copy engine
        if casts:
            torch._foreach_copy_(*map(list, zip(*casts, strict=True)))
        self.memory.barrier()
        for full, shard in group.large:
            full.copy_(shard, non_blocking=True)
        if group.small:
            torch._foreach_copy_(group.small[0], group.small[1])
        self.last, group.slot.group = group.slot, group

    def note_changes(self, group, noted: torch.Tensor) -> None:
        """Queue, behind a gather: ``noted`` is true from here on if shards have changed since."""
        shards = [p._sharded_param_data for p in group.fsdp_params]
        if group.sample is None or not group.sample.is_of(shards):
            group.sample = Sample([p.own for p in group.fsdp_params], shards)
        group.sample.compare(noted)


class Sample:
    """A few elements of each shard of a unit, as it was gathered and as it is now.

    Args:
        gathered: what the shards were cast to, one flat tensor each.
        shards: they themselves.
    """

    @torch.inference_mode(False)
    def __init__(self, gathered: list[torch.Tensor], shards: list[torch.Tensor]) -> None:
        self.shards = shards
        self.pairs = []  # for each dtype that is gathered
        for dtype in dict.fromkeys(own.dtype for own in gathered):
            then, now = [], []
            for own, shard in zip(gathered, shards, strict=True):
                if own.dtype == dtype:
                    every = -(-own.numel() // SAMPLE) or 1
                    then.append(own.detach()[::every])
                    now.append(shard.detach()[::every])
            casts = any(source.dtype != dtype for source in now)
            self.pairs.append((Copies(then, dtype, casts), Copies(now, dtype, casts)))

    def is_of(self, shards: list[torch.Tensor]) -> bool:
        return all(a is b for a, b in zip(self.shards, shards, strict=True))

    @torch.no_grad()
    def compare(self, noted: torch.Tensor) -> None:
        for then, now in self.pairs:
            noted.logical_or_(then.bytes().ne(now.bytes()).any())


class Copies:
    """Copies of a few elements, one behind the other, in one dtype.

    ``casts`` says whether they, or others that they are compared with, were cast: then NaN may
    have become another NaN.
    """

    def __init__(self, sources: list[torch.Tensor], dtype: torch.dtype, casts: bool) -> None:
        self.sources = sources
        self.has_other_nans = casts and dtype.is_floating_point and dtype.itemsize > 1
        lengths = [len(source) for source in sources]
        self.flat = sources[0].new_empty(sum(lengths), dtype=dtype)
        self.parts = list(self.flat.split(lengths))

    def bytes(self) -> torch.Tensor:
        """As they are now; NaN is equal to itself."""
        torch._foreach_copy_(self.parts, self.sources)
        if self.has_other_nans:
            largest = torch.finfo(self.flat.dtype).max
            self.flat.nan_to_num_(largest, torch.inf, -torch.inf)
        return self.flat.view(torch.uint8)


def versions(group) -> list:
    """Counts of the changes of a unit's shards, and the memory that they are in."""
    parameters = [p.sharded_param for p in group.fsdp_params]
    shards = [p._local_tensor for p in parameters]
    counts = [0 if t.is_inference() else t._version for t in parameters + shards]
    return counts + [StorageWeakRef(t.untyped_storage()) for t in shards]


def outdated(group) -> bool:
    """Whether a unit's weights were seen to change since it was filled."""
    return group.filled_from != versions(group)


def full_weights(group) -> list[torch.Tensor]:
    """What the modules of a unit compute with; of a DTensor its local tensor as well."""
    weights = []
    for p in group.fsdp_params:
        full = getattr(p, "_unsharded_param", None)
        if full is not None:
            weights.append(full)
        if hasattr(full, "_local_tensor"):
            weights.append(full._local_tensor)
    return weights


def forbid_reading(group) -> None:
    """Let a backward that reads the full weights of a unit, which lie there no more, be an error.

    It is the one that autograd raises for a tensor "modified by an inplace operation".

    Raises:
        RuntimeError: forward or its hooks have changed them, in memory that other ranks read.
    """
    weights = full_weights(group)
    found = tuple(weight._version for weight in weights)
    if group.versions_in_use not in ((), found):
        raise RuntimeError(
            f"{type(group.modules[0]).__name__} changes its full weights in place (an embedding's "
            "max_norm, a clamp), which peers copy and backward reads again: change the shards "
            "behind step(), or leave the model to stock FSDP2"
        )
    group.full_versions = found
    increment_version(weights)


def allow_reading(group) -> None:
    """The full weights of a unit lie where autograd knows them: take ``forbid_reading`` back."""
    weights = tuple(full_weights(group))
    if group.full_versions:
        torch._C._autograd._unsafe_set_version_counter(weights, group.full_versions)
    group.versions_in_use = tuple(weight._version for weight in weights)


def storage_of(tensor: torch.Tensor) -> int:
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata


def refuse_returned(group, output: object) -> None:
    """Refuse full weights in what a unit's forward has returned: the slot is another unit's next.

    Raises:
        RuntimeError: names the unit.
    """
    ours = {storage_of(weight) for weight in full_weights(group)}
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            if storage_of(leaf) in ours:
                raise RuntimeError(
                    f"{type(group.modules[0]).__name__} returns its full weights, or a view of "
                    "them, where another unit's will be: return a copy, weight.clone()"
                )


@cache
def counted() -> weakref.WeakSet:
    """Units of any model of whose shards an optimizer's step counts as a change."""
    groups = weakref.WeakSet()

    @torch.compiler.disable
    def count(optimizer: torch.optim.Optimizer, *_) -> None:
        # A sparse one has no storage.
        held = [p for g in optimizer.param_groups for p in g["params"] if p.layout is torch.strided]
        known = [p for p in held if hasattr(p, "is_gathered")]
        if len(known) < len(held):  # others may be views of ours
            ours = {storage_of(p.sharded_param) for group in groups for p in group.fsdp_params}
            known = [p for p in held if storage_of(p) in ours]
        increment_version(known)

    groups.hook = register_optimizer_step_post_hook(count)  # for good: not to be removed in a step
    return groups


def set_lists(groups: Sequence, ahead: int, first: int) -> None:
    """Have each of ``groups``, in the order of forward, gather those next to it ahead of time."""
    order = list(dict.fromkeys(group.modules[0] for group in groups))
    for number, unit in enumerate(order):
        state = unit._get_fsdp_state()
        if not state._states_to_forward_prefetch:
            last = number + 1 + min(ahead, max(first, number))
            unit.set_modules_to_forward_prefetch(order[number + 1 : last])
        if not state._states_to_backward_prefetch:
            unit.set_modules_to_backward_prefetch([order[max(0, number - 1)]])


def embeds(group) -> bool:
    """Whether all modules that use a unit's weights look up rows of them, and nothing else."""
    infos = [p._module_info for p in group.fsdp_params]
    users = [m for i in infos for m in (i.module, *i.shared_modules)]
    forwards = [getattr(m.forward, "__func__", None) for m in (*group.modules, *users)]
    return all(forward is nn.Embedding.forward for forward in forwards)
