# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/fsdp2/shared_slots.py
"""A few slots for the full weights of many units, filled by peer copies."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from . import peer_memory

# Private by name, besides what ``peer_memory`` looks for: of FSDP2 ``_unsharded_param``,
# ``_module_info``, ``_states_to_forward_prefetch`` and ``_states_to_backward_prefetch``; of
# DTensors ``_local_tensor``, of storages ``_cdata``; ``torch._foreach_copy_``.

_ALIGNMENT = 512  # bytes: where a weight may begin in a slot
_GRAIN = 8 << 20  # bytes: what the size of a slot is a multiple of
_SMALL = 1 << 18  # bytes: smaller shards go by one kernel instead of a copy each
_SAMPLE = 64  # elements of each shard that are compared with what was gathered, where used


@dataclass(eq=False)
class Slot:
    """Memory of full weights, by rank, for all units that share it."""

    of_ranks: list[torch.Tensor]  # bytes
    number: int  # of the unit that it was last given to
    group: object = None  # whose weights are in it
    of_forward: int = 0  # the number of the forward that has gathered them for a graph, or 0
    exclusive: bool = False  # its unit keeps it until the end of backward
    stream: object = None  # where a unit last computed with it

    def busy(self) -> bool:
        group = self.group
        return group is not None and (group.is_unsharded or group._all_gather_result is not None)

    def nbytes(self) -> int:
        return self.of_ranks[0].nbytes


def _dtype_of(p) -> torch.dtype:
    """What a parameter is gathered in."""
    return p.param_dtype or p.orig_dtype


def _rounded_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple


class Slots:
    """The slots of all units of one model."""

    def __init__(self, memory: peer_memory.PeerMemory, turns: int) -> None:
        self.memory = memory
        self.turns = turns  # units in a row that share no slot
        self.given = 0  # units that have been given a slot
        self.slots: list[Slot] = []
        self.last: Slot | None = None  # of the last gather

    @torch.inference_mode(False)
    def give(self, group, exclusive: bool = False) -> None:
        """A slot for ``group``, and views of it; a new one is a slow collective."""
        if not hasattr(group.fsdp_params[0], "param_dtype"):
            group.lazy_init()  # once: it reads what is frozen, and reduces by that
        if getattr(group, "slot", None) is None:
            self.given += 1
        if group.post_forward_mesh_info is None:  # FSDP2 keeps it full over the forward
            exclusive = True

        shard_bytes = []  # of each weight, on each rank
        places = []  # of each full weight in the slot
        end = 0
        for p in group.fsdp_params:
            nbytes = p.padded_sharded_param_size.numel() * _dtype_of(p).itemsize
            shard_bytes.append(nbytes)
            places.append(end)
            end += _rounded_up(self.memory.ranks * nbytes, _ALIGNMENT)

        group.slot = self.free_slot(_rounded_up(end, _GRAIN), exclusive)
        group.slot.number = self.given

        group.sample = None  # what was noted of the slot before
        group.full_versions = ()
        group.versions_in_use = ()

        group.large = []  # pairs: where to, and where from
        group.small_to = []
        group.small_from = []
        for p, nbytes, place in zip(group.fsdp_params, shard_bytes, places, strict=True):
            self.lay_out(group, p, nbytes, place)

    def free_slot(self, size: int, exclusive: bool) -> Slot:
        """The smallest slot that may be shared by one more unit; a new one if there is none."""
        fit = []
        for slot in self.slots:
            if not exclusive and self.may_share(slot, size):
                fit.append(slot)
        if fit:
            return min(fit, key=Slot.nbytes)
        slot = Slot(self.memory.empty([size], torch.uint8), 0, exclusive=exclusive)
        self.slots.append(slot)
        return slot

    def may_share(self, slot: Slot, size: int) -> bool:
        """Whether a slot is free, its last unit far enough away, and its size right."""
        return (
            not (slot.busy() or slot.exclusive)
            and self.given - slot.number >= self.turns
            and size <= slot.nbytes() <= 2 * size
        )

    def lay_out(self, group, p, nbytes: int, place: int) -> None:
        """Let a full weight be in its unit's slot, and note the copies that fill it.

        Args:
            p: FSDP2's parameter.
            nbytes: of one rank's shard.
            place: where the full weight begins in the slot.
        """
        rank = self.memory.rank
        ranks = self.memory.ranks
        flat = []  # by rank: the full weight
        rows = []  # by rank: the same, by the rank that a row's shard is of
        for memory in group.slot.of_ranks:
            whole = memory.data[place:][: ranks * nbytes].view(_dtype_of(p))
            flat.append(whole)
            rows.append(whole.data.view(ranks, -1))  # autograd does not see what fills it
        p.own = rows[rank][rank]

        copies = []
        for step in range(1, ranks):
            source = (rank + step) % ranks  # no two ranks read from one at a time
            copies.append((rows[rank][source], rows[source][source]))
        for to, shard in copies:
            if shard.nbytes > _SMALL:
                group.large.append((to, shard))
            else:
                group.small_to.append(to)
                group.small_from.append(shard)

        mine = flat[rank]
        p.sharded_param.is_gathered = True
        p.all_gather_outputs = [mine]
        p.init_unsharded_param()
        full = getattr(p._unsharded_param, "_local_tensor", p._unsharded_param)
        increment_version(full)  # a backward with views of where it was is an error
        full.data = mine.as_strided(full.size(), full.stride(), mine.storage_offset())
        p.free_unsharded_param = lambda: None  # its memory is the slot's

    def make_room(self, group) -> None:
        """Have the slot for ``group``, or another one.

        Raises:
            RuntimeError: another unit is in it, and autograd knows where this one is.
        """
        other = group.slot.group
        in_backward = torch._C._current_graph_task_id() != -1
        recomputed = group._training_state.name == "FORWARD" and in_backward
        if not other.is_unsharded:
            other.drop()  # a gather ahead of its turn, which nobody has used
        elif recomputed or not group.in_graph:
            self.give(group, exclusive=True)  # no view of the slot before is of this backward
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
        cast_to = []
        cast_from = []
        for p in group.fsdp_params:
            shard = p._sharded_param_data
            if p.own.dtype == shard.dtype and p.own.nbytes > _SMALL:
                p.own.copy_(shard, non_blocking=True)  # on a copy engine
            else:
                cast_to.append(p.own)
                cast_from.append(shard)
        if cast_to:
            torch._foreach_copy_(cast_to, cast_from)
        self.memory.barrier()
        for full, shard in group.large:
            full.copy_(shard, non_blocking=True)
        if group.small_to:
            torch._foreach_copy_(group.small_to, group.small_from)
        self.last = group.slot
        group.slot.group = group

    def note_changes(self, group, noted: torch.Tensor) -> None:
        """Queue, after a gather: ``noted`` is true from here on if shards have changed since."""
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
            then = []
            now = []
            for own, shard in zip(gathered, shards, strict=True):
                if own.dtype == dtype:
                    every = max(1, -(-own.numel() // _SAMPLE))
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
    """Copies of a few elements, one after the other, in one dtype.

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
    found = []
    for tensor in parameters + shards:
        found.append(0 if tensor.is_inference() else tensor._version)
    for shard in shards:
        found.append(StorageWeakRef(shard.untyped_storage()))
    return found


def outdated(group) -> bool:
    """Whether a unit's weights were seen to change since it was filled."""
    return group.filled_from != versions(group)


def _full_weights(group) -> list[torch.Tensor]:
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
    weights = _full_weights(group)
    found = tuple(weight._version for weight in weights)
    in_use = group.versions_in_use
    if in_use and in_use != found:
        raise RuntimeError(
            f"{type(group.modules[0]).__name__} changes its full weights in place (an embedding's "
            "max_norm, a clamp), which peers copy and backward reads again: change the shards "
            "after step(), or leave the model to stock FSDP2"
        )
    group.full_versions = found
    increment_version(weights)


def allow_reading(group) -> None:
    """The full weights of a unit lie where autograd knows them: take ``forbid_reading`` back."""
    weights = tuple(_full_weights(group))
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
    ours = {storage_of(weight) for weight in _full_weights(group)}
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
        """PyTorch counts no change by a fused step; here it counts, of what is in a unit."""
        held = []
        for settings in optimizer.param_groups:
            for parameter in settings["params"]:
                if parameter.layout is torch.strided:  # a sparse one has no storage
                    held.append(parameter)
        stepped = [parameter for parameter in held if hasattr(parameter, "is_gathered")]
        if len(stepped) < len(held):  # others may be views of ours: look at all, which is slow
            ours = set()
            for group in groups:
                for p in group.fsdp_params:
                    ours.add(storage_of(p.sharded_param))
            stepped = [parameter for parameter in held if storage_of(parameter) in ours]
        increment_version(stepped)

    groups.hook = register_optimizer_step_post_hook(count)  # for good: not to be removed in a step
    return groups


def set_lists(groups: Sequence, ahead: int, first: int) -> None:
    """Have each of ``groups``, in the order of forward, gather those next to it ahead of time."""
    order = list(dict.fromkeys(group.modules[0] for group in groups))
    for number, unit in enumerate(order):
        state = unit._get_fsdp_state()
        if not state._states_to_forward_prefetch:
            count = min(ahead, max(first, number))  # fewer while the device waits for the host
            unit.set_modules_to_forward_prefetch(order[number + 1 : number + 1 + count])
        if not state._states_to_backward_prefetch:
            before = max(0, number - 1)
            unit.set_modules_to_backward_prefetch([order[before]])


def embeds(group) -> bool:
    """Whether all modules that use a unit's weights look up rows of them, and nothing else."""
    users = list(group.modules)
    for p in group.fsdp_params:
        users.append(p._module_info.module)
        users += p._module_info.shared_modules
    for module in users:
        if getattr(module.forward, "__func__", None) is not nn.Embedding.forward:
            return False
    return True
