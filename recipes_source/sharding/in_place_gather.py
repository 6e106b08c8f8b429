"""
FSDP2 without copies around its gathers
=======================================

One call, and an unchanged ``fully_shard`` model gathers its weights by peer copies, straight to
where they are used. Stock FSDP2 casts a unit's shards, copies them into a buffer, gathers with a
kernel that takes compute cores, and copies the result out; here one cast a forward is left, and
transfers that the GPU's copy engines make.
"""

# %%
# Imports and sizes
# -----------------

import os
import shutil
import tempfile
import types
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

UNITS, WIDTH, HIDDEN = 4, 24, 49  # blocks, each an FSDP unit; features
BATCH, STEPS = 8, 4  # samples per rank and step
ALIGNMENT = 512  # bytes, of each shard in the published copy
SMALL = 1 << 18  # bytes: smaller shards go by one kernel instead of a copy each

# %%
# Memory that the other ranks can read
# ------------------------------------


class PeerMemory:
    """Tensors of this rank that every rank of ``group`` can read and write, and a barrier.

    Use one object for each stream that calls ``barrier``: two barriers at a time on one object
    would take each other's signals.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.ranks = group.rank(), group.size()
        if device.type == "cuda":
            signals = symmetric_memory.empty(1, dtype=torch.int32, device=device)
            self.signals = symmetric_memory.rendezvous(signals, group)

    def empty(self, size: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
        """Uninitialised memory of every rank, by rank; a slow collective with equal arguments."""
        if self.device.type == "cuda":
            mine = symmetric_memory.empty(*size, dtype=dtype, device=self.device)
            handle = symmetric_memory.rendezvous(mine, self.group)
            others = [handle.get_buffer(rank, mine.shape, dtype) for rank in range(self.ranks)]
            return [mine if rank == self.rank else t for rank, t in enumerate(others)]
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
        else:
            dist.barrier(self.group)


# %%
# When peers cannot be read
# -------------------------


def why_not(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why the ranks of ``group`` cannot read each other's memory; None if they can. Collective."""
    seen, mine = {}, None
    if device.type == "cuda":
        seen = {
            str(torch.cuda.get_device_properties(i).uuid): i
            for i in range(torch.cuda.device_count())
        }
        mine = next(uuid for uuid, index in seen.items() if index == device.index)
    answers: list = [None] * group.size()
    dist.all_gather_object(answers, (os.uname().nodename, mine), group=group)
    others = [seen.get(uuid) for _, uuid in answers if uuid != mine]
    apart = any(
        not torch.cuda.can_device_access_peer(device.index, i) for i in others if i is not None
    )
    verdicts: list = [None] * group.size()
    dist.all_gather_object(verdicts, (None in others, apart), group=group)
    reasons = {
        "there is one rank": group.size() == 1,
        f"no symmetric memory on {device.type}": device.type not in ("cpu", "cuda"),
        "the ranks are on several hosts": len({host for host, _ in answers}) > 1,
        "a rank does not see the others' GPUs (CUDA_VISIBLE_DEVICES)": any(v[0] for v in verdicts),
        "not every GPU has peer access to every other": any(v[1] for v in verdicts),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


# %%
# FSDP2's units
# -------------

GROUP_NAMES = """
    unshard wait_for_unshard finalize_backward lazy_init fsdp_params is_sharded is_unsharded
    _to_unsharded _all_gather_result _training_state unshard_in_backward mesh_info comm_ctx modules
"""
PARAMETER_NAMES = """
    sharded_param padded_sharded_param_size _sharded_param_data fsdp_placement all_gather_outputs
    init_all_gather_outputs init_unsharded_param free_unsharded_param offload_to_cpu
"""


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
            for group in [state._fsdp_param_group] if several is None else several:
                groups |= {id(group): group} if group is not None else {}
    if not groups:
        raise RuntimeError("no parameter of the model is sharded: call fully_shard first")
    for group in groups.values():
        missing = [n for n in GROUP_NAMES.split() if not hasattr(group, n)]
        missing += [n for n in PARAMETER_NAMES.split() if not hasattr(group.fsdp_params[0], n)]
        if missing or not hasattr(torch._C, "_current_graph_task_id"):
            raise RuntimeError(f"FSDP2 of torch {torch.__version__} has no {missing}: not for it")
    return list(groups.values())


def why_stock(group, shard_group: dist.ProcessGroup | None) -> str | None:
    """Why FSDP2 must gather this group as before; None if copies can."""
    parameters = group.fsdp_params
    local = [p.sharded_param.to_local() for p in parameters]
    reasons = {
        "weights are replicated, not sharded": not hasattr(group.mesh_info, "shard_process_group"),
        "another process group": getattr(group.mesh_info, "shard_process_group", None)
        != shard_group,
        "weights are offloaded to the CPU": any(p.offload_to_cpu for p in parameters),
        "sharded on a dimension other than 0": any(p.fsdp_placement.dim != 0 for p in parameters),
        "tensors with an all-gather of their own": any(
            hasattr(t, "fsdp_pre_all_gather") for t in local
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def become(group, mixin: type) -> None:
    """Let ``mixin``'s methods come before those of FSDP2, for this group alone."""
    group.__class__ = type(mixin.__name__ + type(group).__name__, (mixin, type(group)), {})


# %%
# The published copy
# ------------------


class PublishedCopy:
    """The shards of all units in the dtype that is gathered, where the other ranks read them."""

    def __init__(self, groups: Sequence, memory: PeerMemory) -> None:
        self.groups, self.memory = groups, memory
        self.streams = torch.get_device_module(memory.device)
        self.stream = self.streams.Stream(priority=-1)
        self.parameters = [p for group in groups for p in group.fsdp_params]
        self.slots: list[torch.Tensor] = []
        self.in_forward, self.stale = False, True
        self.gathers = self.published = 0
        self.order: list[FSDPModule] | None = []  # of the units, in the first forward

    def begin_forward(self) -> None:
        self.drop()
        self.in_forward = self.stale = True

    def end_forward(self) -> None:
        self.in_forward = False
        self.drop()

    def drop(self) -> None:
        for group in self.groups:
            group.drop()

    def in_step(self) -> bool:
        """Whether a forward of the model or a backward is under way: nobody changes weights."""
        return self.in_forward or torch._C._current_graph_task_id() != -1

    @torch.inference_mode(False)
    def allocate(self) -> None:
        """Memory, views and FSDP2's full weights, once: behind whatever the user did to the model."""
        for group in self.groups:
            group.lazy_init()
        starts, end = [], 0
        for p in self.parameters:
            starts.append(end)
            nbytes = p.padded_sharded_param_size.numel() * (p.param_dtype or p.orig_dtype).itemsize
            end += -(-nbytes // ALIGNMENT) * ALIGNMENT
        of_ranks, place = self.memory.empty([end], torch.uint8), iter(starts)
        rank, ranks = self.memory.rank, self.memory.ranks
        for group in self.groups:
            group.large, group.small, group.full = [], ([], []), []
            for p in group.fsdp_params:
                start, dtype = next(place), p.param_dtype or p.orig_dtype
                numel = p.padded_sharded_param_size.numel()
                stop = start + numel * dtype.itemsize
                shards = [memory[start:stop].view(dtype) for memory in of_ranks]
                self.slots.append(shards[rank])
                p.init_all_gather_outputs([numel], [dtype], ranks, self.memory.device)
                (full,) = p.all_gather_outputs
                group.full.append((full.untyped_storage(), full.nbytes))
                full.untyped_storage().resize_(full.nbytes)
                p.init_unsharded_param()
                rows = full.data.view(ranks, -1)  # .data: autograd does not see what fills it
                for step in range(ranks):
                    source = (rank + step) % ranks  # no two ranks read from one at a time
                    if shards[0].nbytes > SMALL:
                        group.large.append((rows[source], shards[source]))
                    else:
                        group.small[0].append(rows[source])
                        group.small[1].append(shards[source])
                if group.is_sharded:
                    p.free_unsharded_param()

    def publish(self) -> None:
        """On the stream of the gathers, between two barriers: nobody reads while anybody writes."""
        self.memory.barrier()
        torch._foreach_copy_(self.slots, [p._sharded_param_data for p in self.parameters])
        self.memory.barrier()
        self.published += 1

    @torch.no_grad()
    def gather(self, group) -> None:
        """Queue the copies of a unit's full weights behind all that the current stream does."""
        if not self.slots:
            self.allocate()
        for storage, nbytes in group.full:
            storage.resize_(nbytes)
        current = self.streams.current_stream()
        self.stream.wait_stream(current)  # which may still use that memory
        if hasattr(group.comm_ctx, "all_gather_stream"):
            self.stream.wait_stream(group.comm_ctx.all_gather_stream)
        with self.streams.stream(self.stream):
            if (self.stale and self.in_forward) or not self.in_step():
                self.publish()
                self.stale = False
                current.wait_event(self.stream.record_event())  # weights may change behind it
            for full, shard in group.large:
                full.copy_(shard, non_blocking=True)
            if group.small[0]:
                torch._foreach_copy_(*group.small)
            event = self.stream.record_event()
        group._all_gather_result = types.SimpleNamespace(
            all_gather_event=event, all_gather_work=None
        )
        self.gathers += 1
        if self.order is not None and self.in_forward:
            self.order.append(group.modules[0])


# %%
# What FSDP2 calls
# ----------------


class InPlaceGather:
    """Methods of an FSDP2 group of parameters, in place of its own."""

    def unshard(self, async_op: bool = False) -> None:
        backward = self._training_state.name == "PRE_BACKWARD"
        if not self.copy.in_step():
            self.drop()  # weights may have changed since
        pending = self._all_gather_result is not None
        if not (pending or self.is_unsharded or (backward and not self.unshard_in_backward)):
            self.copy.gather(self)

    def wait_for_unshard(self) -> None:
        if self._all_gather_result is not None:
            event, self._all_gather_result = self._all_gather_result.all_gather_event, None
            self.copy.streams.current_stream().wait_event(event)
            self._to_unsharded()

    def finalize_backward(self) -> None:
        self.drop()
        super().finalize_backward()

    def drop(self) -> None:
        """Free what was gathered and not used."""
        if self._all_gather_result is not None:
            event, self._all_gather_result = self._all_gather_result.all_gather_event, None
            self.copy.streams.current_stream().wait_event(event)
            for p in self.fsdp_params:
                p.free_unsharded_param()


# %%
# One call
# --------


def gather_in_place(model: FSDPModule, ahead: int = 2) -> PublishedCopy | None:
    """Have every unit of ``model`` gather by peer copies, from its next forward on. Collective.

    Args:
        model: the module that the training loop calls.
        ahead: units that forward gathers before they are needed; 0 leaves FSDP2's own settings.

    Returns:
        What the peers read; None, after a warning that says why, if FSDP2 gathers as before.

    Raises:
        RuntimeError: nothing is sharded, or this PyTorch's FSDP2 is another one.
    """
    groups = param_groups(model)
    shard_group = getattr(groups[0].mesh_info, "shard_process_group", None)
    reasons = {group: why_stock(group, shard_group) for group in groups}
    chosen = [group for group, reason in reasons.items() if reason is None]
    found = set(filter(None, reasons.values()))
    if chosen and (reason := why_not(shard_group, chosen[0].device)):
        chosen, found = [], {reason, *found}
    for reason in sorted(found):
        warnings.warn(f"FSDP2 gathers as before: {reason}", stacklevel=2)
    if not chosen:
        return None
    copy = PublishedCopy(chosen, PeerMemory(shard_group, chosen[0].device))
    for group in chosen:
        group.copy = copy
        become(group, InPlaceGather)

    @torch.compiler.disable
    def begin(*_) -> None:
        copy.begin_forward()

    @torch.compiler.disable
    def end(*_) -> None:
        copy.end_forward()
        if copy.order:  # of the first forward
            prefetch(list(dict.fromkeys(copy.order)), ahead)
            copy.order = None

    model.register_forward_pre_hook(begin, prepend=True)
    model.register_forward_hook(end, always_call=True)
    return copy


def prefetch(units: Sequence[FSDPModule], ahead: int) -> None:
    """Gather ``ahead`` units early in forward and one in backward, in which units take longer."""
    for number, unit in enumerate(units if ahead else ()):
        unit.set_modules_to_forward_prefetch(list(units[number + 1 : number + 1 + ahead]))
        unit.set_modules_to_backward_prefetch([units[max(0, number - 1)]])


# %%
# Run it, and prove it
# --------------------


def build(device: torch.device, policy: MixedPrecisionPolicy) -> FSDPModule:
    """Blocks over (batch, WIDTH), float32 weights; 49 rows divide by none of 2, 3 and 4 ranks."""
    torch.manual_seed(0)
    pairs = [(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)) for _ in range(UNITS)]
    model = nn.Sequential(*(nn.Sequential(up, nn.GELU(), down) for up, down in pairs)).to(device)
    for unit in (*model, model):
        fully_shard(unit, mp_policy=policy)
        unit.set_modules_to_backward_prefetch([unit])  # the default one trips over evaluations
    return model


def train(model: FSDPModule, device: torch.device) -> list[torch.Tensor]:
    """Train, and change weights in ways no optimizer knows of; all losses and final weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    shards, found = [p.to_local().detach() for p in model.parameters()], []
    for number in range(STEPS):
        torch.manual_seed(1000 * number + dist.get_rank())
        batch = torch.randn(BATCH, WIDTH, device=device)
        found.append((model(batch) - batch).square().mean())
        found[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(model[1](batch).square().mean())  # those ahead are gathered in vain
            for shard in shards:
                shard.mul_(0.75)  # as a load or a swapped average would
            found.append(model(batch).square().mean())
    return [t.detach() for t in found] + shards


def same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def prove(device: torch.device) -> None:
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
        expected = train(build(device, policy), device)
        model = build(device, policy)
        copy = gather_in_place(model)
        assert same(train(model, device), expected), "not the bits of stock FSDP2"
        if copy is not None:
            assert copy.gathers > copy.published > STEPS, "FSDP2 gathered by itself"
            size = sum(slot.nbytes for slot in copy.slots)
            print(f"{copy.gathers} gathers of {size} published bytes a rank, every bit FSDP2's")


def main() -> None:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device.index)
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(**({} if "RANK" in os.environ else alone))
    try:
        prove(device)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
