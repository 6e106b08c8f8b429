# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/fsdp2/peer_memory.py
"""Memory that the other ranks read, and the private names of FSDP2 that are relied upon."""

import os
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import nn
from torch.distributed.fsdp import FSDPModule


class PeerMemory:
    """Tensors of this rank that every rank of ``group`` can read and write, and a barrier.

    Use one object for each stream that calls ``barrier``: two barriers at a time on one object
    would take each other's signals.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.rank = group.rank()
        self.ranks = group.size()
        if device.type == "cuda":
            signals = symmetric_memory.empty(1, dtype=torch.int32, device=device)
            self.signals = symmetric_memory.rendezvous(signals, group)

    def empty(self, size: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
        """Uninitialised memory of every rank, by rank; a slow collective with equal arguments."""
        if self.device.type == "cuda":
            mine = symmetric_memory.empty(*size, dtype=dtype, device=self.device)
            handle = symmetric_memory.rendezvous(mine, self.group)
            of_ranks = [handle.get_buffer(rank, mine.shape, dtype) for rank in range(self.ranks)]
            of_ranks[self.rank] = mine
            return of_ranks
        agreed = [tempfile.mkdtemp() if self.rank == 0 else None]
        dist.broadcast_object_list(agreed, group=self.group, group_src=0)
        wanted = {"shared": True, "size": torch.Size(size).numel(), "dtype": dtype}
        flat = [torch.from_file(f"{agreed[0]}/{rank}", **wanted) for rank in range(self.ranks)]
        dist.barrier(self.group)
        if self.rank == 0:
            shutil.rmtree(agreed[0])  # the mappings keep the files alive
        return [tensor.view(size) for tensor in flat]

    def barrier(self) -> None:
        """All that any rank has queued before, on this stream, is done before what follows."""
        if self.device.type == "cuda":
            self.signals.barrier()
        else:  # gloo would keep, and drop at exit or later, the Python state of a backward
            with ThreadPoolExecutor(1) as thread:  # not one for all, who would wait for each other
                thread.submit(dist.barrier, self.group).result()


ONE_RANK = "there is one rank"
HOSTS = "the ranks are on several hosts"


def why_not(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why the ranks of ``group`` cannot read each other's memory; None if they can. Collective."""
    mine = None  # the uuid of this rank's GPU
    index_of = {}  # by the uuid of a GPU that this rank sees
    if device.type == "cuda":
        count = torch.cuda.device_count()
        uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]
        index_of = {uuid: index for index, uuid in enumerate(uuids)}
        mine = uuids[device.index]
    answers: list = [None] * group.size()
    dist.all_gather_object(answers, (os.uname().nodename, mine), group=group)

    unseen = False  # another rank's GPU
    apart = False  # one, to whose memory this GPU has no access
    for _, uuid in answers:
        if uuid == mine:
            continue
        if uuid not in index_of:
            unseen = True
        elif not torch.cuda.can_device_access_peer(device.index, index_of[uuid]):
            apart = True
    verdicts: list = [None] * group.size()
    dist.all_gather_object(verdicts, (unseen, apart), group=group)

    hosts = {host for host, _ in answers}
    if group.size() == 1:
        return ONE_RANK
    if device.type not in ("cpu", "cuda"):
        return f"no symmetric memory on {device.type}"
    if len(hosts) > 1:
        return HOSTS
    if any(unseen for unseen, _ in verdicts):
        return "a rank does not see the others' GPUs (CUDA_VISIBLE_DEVICES)"
    if any(apart for _, apart in verdicts):
        return "not every GPU has peer access to every other"
    return None


# Private names of FSDP2, of its groups and of its parameters, in torch 2.11 to 2.15. They stand for
# gathers and reductions (replaced) and the end of backward (wrapped), for full weights and padded
# shards, and for what the user has set and where the step is.
_GROUP_NAMES = """
    unshard wait_for_unshard finalize_backward lazy_init fsdp_params is_sharded is_unsharded
    _to_unsharded _all_gather_result _training_state unshard_in_backward mesh_info comm_ctx modules
    _all_gather_comm _reduce_scatter_comm post_forward_mesh_info _to_sharded
    _to_sharded_post_forward post_forward pre_forward post_backward reduce_grads
    gradient_divide_factor _all_reduce_hook
"""
_PARAMETER_NAMES = """
    sharded_param padded_sharded_param_size _sharded_param_data fsdp_placement all_gather_outputs
    init_all_gather_outputs init_unsharded_param free_unsharded_param offload_to_cpu
"""
_AUTOGRAD_NAMES = "_unsafe_set_version_counter _get_sequence_nr"


def param_groups(model: nn.Module) -> list:
    """FSDP2's groups of parameters that are gathered together, one or none a unit.

    Raises:
        RuntimeError: this PyTorch's FSDP2 lacks a private name that is used here.
    """
    groups: dict = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            several = getattr(state, "_fsdp_param_groups", None)  # PyTorch 2.12 on
            if several is None:
                several = [state._fsdp_param_group]
            for group in several:
                if group is not None:
                    groups[id(group)] = group
    if not groups:
        raise RuntimeError("no parameter of the model is sharded: call fully_shard first")
    for group in groups.values():
        missing = []
        for name in _GROUP_NAMES.split():
            if not hasattr(group, name):
                missing.append(name)
        for name in _PARAMETER_NAMES.split():
            if not hasattr(group.fsdp_params[0], name):
                missing.append(name)
        if not hasattr(torch._C, "_current_graph_task_id"):
            missing.append("torch._C._current_graph_task_id")
        for name in _AUTOGRAD_NAMES.split():
            if not hasattr(torch._C._autograd, name):
                missing.append(f"torch._C._autograd.{name}")
        if missing:
            raise RuntimeError(f"FSDP2 of torch {torch.__version__} has no {missing}: not for it")
    return list(groups.values())


def _why_stock(group, shard_group: dist.ProcessGroup | None) -> str | None:
    """Why FSDP2 must gather this group as before; None if copies can."""
    parameters = group.fsdp_params
    if not hasattr(group.mesh_info, "shard_process_group"):
        return "weights are replicated, not sharded"
    if group.mesh_info.shard_process_group != shard_group:
        return "another process group"
    if any(p.offload_to_cpu for p in parameters):
        return "weights are offloaded to the CPU"
    if any(p.fsdp_placement.dim != 0 for p in parameters):
        return "sharded on a dimension other than 0"
    if any(hasattr(p.sharded_param.to_local(), "fsdp_pre_all_gather") for p in parameters):
        return "tensors with an all-gather of their own"
    for collective in (group._all_gather_comm, group._reduce_scatter_comm):
        if not type(collective).__name__.startswith("Default"):
            return "a collective of your own (set_custom_all_gather, set_custom_reduce_scatter)"
    return None


def reasons_for_stock(groups: list) -> set[str]:
    """Why FSDP2 must gather some of ``groups`` as before; empty if copies can. Collective."""
    shard_group = getattr(groups[0].mesh_info, "shard_process_group", None)
    reasons = [_why_stock(group, shard_group) for group in groups]
    found = {reason for reason in reasons if reason is not None}
    if None in reasons:
        of_all = why_not(shard_group, groups[reasons.index(None)].device)
        if of_all is not None:
            found.add(of_all)
    return found


def copying_groups(model: nn.Module) -> list:
    """The groups of ``model`` whose ranks can copy from each other. Collective.

    Warns why, where FSDP2 must gather as before.
    """
    groups = param_groups(model)
    shard_group = getattr(groups[0].mesh_info, "shard_process_group", None)
    chosen = []
    found = set()
    for group in groups:
        reason = _why_stock(group, shard_group)
        if reason is None:
            chosen.append(group)
        else:
            found.add(reason)
    if chosen:
        of_all = why_not(shard_group, chosen[0].device)
        if of_all is not None:
            chosen = []
            found.add(of_all)
    for reason in sorted(found):
        warnings.warn(f"FSDP2 communicates as before: {reason}", stacklevel=3)
    return chosen


def settled(name: str) -> property:
    """An attribute of a group that is an error to set: nobody would look at it."""

    def refuse(group, value: object) -> None:
        raise RuntimeError(f"{type(value).__name__} would not be called: set it before the calls")

    return property(lambda group: group.__dict__[name], refuse)


_MIXINS = ("InPlaceGather", "InPlaceReduce")
ours: set[type] = set()  # of them, those of this copy of the library


def refuse_twice(groups: Sequence, mixin: type) -> None:
    """Raise if one of ``groups`` has methods of ``mixin``, or of another copy of the library.

    Raises:
        RuntimeError: one of them has.
    """
    for group in groups:
        for kind in type(group).__mro__:
            if kind is mixin:
                raise RuntimeError(
                    "units of this model have been given to peer copies before, by "
                    "use_peer_copies, gather_in_place or reduce_in_place: call it once"
                )
            if kind.__name__ in _MIXINS and kind not in ours:
                raise RuntimeError(
                    f"another copy of this library, {kind.__module__}, has this model's units "
                    "already: make both calls, for gathers and for reductions, by one copy"
                )


def become(groups: Sequence, mixin: type) -> None:
    """Let ``mixin``'s methods come before those of FSDP2, for these groups alone.

    Raises:
        RuntimeError: for one of them they do already, or another copy of this library's; none is
            changed.
    """
    refuse_twice(groups, mixin)
    ours.add(mixin)
    for group in groups:
        group.__class__ = type(mixin.__name__ + type(group).__name__, (mixin, type(group)), {})
