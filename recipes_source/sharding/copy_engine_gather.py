# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, sharding/copy_engine_gather.py
"""
Gather without the compute cores: peer copies in stock FSDP2
============================================================

This recipe moves FSDP2's all-gather to the GPU's copy engines: each rank reads the other ranks'
shards straight from their memory. NCCL's kernels take compute cores from the matmul beside
them; a copy engine takes none. It plugs into an unchanged ``fully_shard`` model with one call.

.. warning::

   To train a stock FSDP2 model, take :doc:`in_place_gather`: it is faster, and weights may change by
   any road. Here they may change in ``optimizer.step()`` of the one optimizer alone: after a load, an
   average swapped in or a second optimizer the other ranks go on reading old ones, without an error.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * symmetric memory: tensors that the other ranks read without asking
      * where the two barriers of a training step must stand, and why two are enough
      * a communication object for ``set_custom_all_gather``, and what FSDP2 expects of it
      * weights that live where the other ranks read them, in the ``Parameter`` they had before

   .. grid-item-card:: What you need

      * PyTorch 2.11 or later; ranks on one host, each GPU with peer access to the others
      * a model sharded with ``fully_shard``, on dimension 0, one dtype a unit
      * on the CPU the same file runs over memory-mapped files

.. verification-badge::

The idea
--------

An all-gather computes nothing: it moves bytes. A GPU has copy engines for that, which run beside
the compute cores. A copy needs no partner either: if the shards lie in *symmetric memory*, which
every rank maps into its own address space, a rank that needs a unit's weights copies them when it
needs them. Nobody else takes part.

Nobody else is asked either, so one thing must be settled beforehand: a shard must not change while
others read it. Weights change in one place, ``optimizer.step()``. Two barriers around it are
enough, whatever the number of units, prefetches and micro-batches between two steps:

.. lanes:: Schematic, one rank. All gathers lie between two barriers; none has a barrier of its own.

   compute:  0-5 unit 0; 5-10 unit 1; 10-15 unit 2; 15-24 backward; 26-29 step; 35-40 unit 0
   gather:   0-4 unit 1 ~; 5-9 unit 2 ~; 13-17 unit 1 ~; 18-22 unit 0 ~; 31-35 unit 0 ~; 36-40 unit 1 ~
   @25 1
   @30 2

1. **Update after reads**: no rank changes its shards before every rank has made its copies.
2. **Reads after update**: no rank copies before every rank has changed its shards.
"""

# %%
# Imports and sizes
# -----------------
# Symmetric memory is documented but young: its module has an underscore. 49 rows do not divide
# by 2, 3 or 4 ranks: FSDP2 pads such shards.

import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

UNITS, WIDTH, HIDDEN = 3, 24, 49  # blocks, each an FSDP unit; features
BATCH, STEPS = 8, 4  # samples per rank and step; steps before and after the change

# %%
# Memory that the other ranks can read
# ------------------------------------
# ``symmetric_memory.empty`` allocates, ``rendezvous`` exchanges the handles of all ranks and
# ``get_buffer`` gives another rank's memory as a tensor of this rank's device. The rendezvous is
# slow, so it is done once for each unit and never in a step.
#
# ``barrier`` is a small kernel on the current stream: it writes a signal into every other rank's
# memory and spins until theirs have come. The host does not wait.
#
# On the CPU the tensors are files that all ranks map, and the barrier is gloo's: other memory, the
# same readers, writers and order.


class PeerMemory:
    """Tensors of this rank that every rank of ``group`` can read, and a barrier.

    Use one object for each stream that calls ``barrier``: two barriers at a time on one object
    would take each other's signals.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.ranks = group.rank(), group.size()
        self.of_all_ranks: dict[int, list[torch.Tensor]] = {}  # by the address of this rank's own
        if device.type == "cuda":
            signals = symmetric_memory.empty(1, dtype=torch.int32, device=device)
            self.signals = symmetric_memory.rendezvous(signals, group)

    def empty(self, size: Sequence[int], *, dtype: torch.dtype, device=None) -> torch.Tensor:
        """Uninitialised memory; a slow collective, with one ``size`` and ``dtype`` on all ranks."""
        if self.device.type == "cuda":
            mine = symmetric_memory.empty(*size, dtype=dtype, device=self.device)
            handle = symmetric_memory.rendezvous(mine, self.group)
            tensors = [handle.get_buffer(rank, mine.shape, dtype) for rank in range(self.ranks)]
        else:
            mine = (tensors := self.map_files(size, dtype))[self.rank]
        self.of_all_ranks[mine.data_ptr()] = tensors
        return mine

    def map_files(self, size: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
        """One file a rank, mapped by all and unlinked at once: the mappings keep it alive."""
        agreed = [tempfile.mkdtemp() if self.rank == 0 else None]
        dist.broadcast_object_list(agreed, group=self.group, group_src=0)
        wanted = {"shared": True, "size": torch.Size(size).numel(), "dtype": dtype}
        flat = [torch.from_file(f"{agreed[0]}/{rank}", **wanted) for rank in range(self.ranks)]
        dist.barrier(self.group)
        if self.rank == 0:
            shutil.rmtree(agreed[0])
        return [tensor.view(size) for tensor in flat]

    def gather(self, out: torch.Tensor, shard: torch.Tensor, own: bool = True) -> None:
        """Queue copies of every rank's ``shard`` into ``out``, on the current stream.

        Args:
            out: contiguous, with as many elements as the shards of all ranks together.
            shard: what :meth:`empty` returned.
            own: False leaves out this rank's part, where ``out`` has it already.
        """
        parts, shards = out.view(self.ranks, -1), self.of_all_ranks[shard.data_ptr()]
        for step in range(0 if own else 1, self.ranks):
            source = (self.rank + step) % self.ranks  # no two ranks read from one at a time
            parts[source].copy_(shards[source].view(-1), non_blocking=True)

    def barrier(self) -> None:
        """All that any rank has queued before, on this stream, is done before what follows."""
        if self.device.type == "cuda":
            self.signals.barrier()
        else:
            dist.barrier(self.group)


# %%
# When peers cannot be read
# -------------------------
# Every rank must come to the same answer, so the answers are exchanged. FSDP2 then gathers as it
# always did.


def why_not(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why the ranks of ``group`` cannot read each other's memory; None if they can. Collective."""
    others = set(range(torch.cuda.device_count())) - {device.index}
    apart = [i for i in others if not torch.cuda.can_device_access_peer(device.index, i)]
    answers: list = [None] * group.size()
    dist.all_gather_object(answers, (os.uname().nodename, apart), group=group)
    reasons = {
        "there is one rank": group.size() == 1,
        f"no symmetric memory on {device.type}": device.type not in ("cpu", "cuda"),
        "the ranks are on several hosts": len({host for host, _ in answers}) > 1,
        "not every GPU has peer access to every other": any(apart for _, apart in answers),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


# %%
# The all-gather of a unit
# ------------------------
# FSDP2 calls the two methods of this object for each gather: ``allocate`` for the buffer of the
# gathered weights, in which it then places this rank's own part (cast and padded), and
# ``__call__``, on its all-gather stream, to fetch the other parts. Event edges, prefetching and the
# freeing of buffers stay FSDP2's. The other parts must lie ready, in FSDP2's layout:
#
# * Where the gathered dtype is the stored one and rows divide evenly, the **parameter itself
#   moves** into symmetric memory. ``swap_tensors`` keeps the ``Parameter`` object, so an optimizer
#   that was built before still holds it. Nothing is copied, nothing is stored twice. A slice of the
#   storage makes it a tensor that can be saved: ``deepcopy``, with which
#   ``torch.distributed.checkpoint`` stages on the CPU, fails for a DTensor whose local tensor begins
#   inside a storage.
# * Else (fp32 weights gathered in bf16, uneven rows) there is a **copy**, brought up to date once
#   a step, between the update and the second barrier.
#
# The first call compares FSDP2's own part with the shard: a wrong dtype, or a layout that a later
# version changes, is an error and not another model.


class CopyEngineAllGather:
    """The all-gather of one FSDP unit, for ``FSDPModule.set_custom_all_gather``.

    Args:
        unit: its parameters have one dtype and are sharded on dimension 0.
        memory: for this rank's part; barriers must stand around every change of it.
        dtype: ``param_dtype`` of the unit's mixed-precision policy; None if it has none.
    """

    def __init__(self, unit: FSDPModule, memory: PeerMemory, dtype: torch.dtype | None) -> None:
        parameters = list(dict.fromkeys(own_parameters(unit)))
        padded = [-(-p.shape[0] // memory.ranks) * p.shape[1:].numel() for p in parameters]
        self.memory, self.calls = memory, 0
        self.shard = memory.empty([sum(padded)], dtype=dtype or parameters[0].dtype).zero_()
        self.copied: list[tuple[torch.Tensor, nn.Parameter]] = []
        for parameter, slot in zip(parameters, self.shard.split(padded), strict=True):
            local = parameter.to_local().detach()
            slot = slot[: local.numel()].view(local.shape)
            slot.copy_(local)
            if parameter.shape[0] % memory.ranks == 0 and parameter.dtype == slot.dtype:
                move(parameter, slot)
            else:
                self.copied.append((slot, parameter))

    def publish(self) -> None:
        """Bring up to date what is a copy."""
        for slot, parameter in self.copied:
            slot.copy_(parameter.to_local().detach())

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op: bool = False) -> None:
        """Fill ``output_tensor``, which holds this rank's part, ``input_tensor``, already.

        Raises:
            ValueError: FSDP2 gathers other values, another layout or another dtype.
        """
        same = input_tensor.shape == self.shard.shape and input_tensor.dtype == self.shard.dtype
        if not same or (self.calls == 0 and not torch.equal(input_tensor, self.shard)):
            here = f"{tuple(self.shard.shape)} of {self.shard.dtype}"
            there = f"{tuple(input_tensor.shape)} of {input_tensor.dtype}"
            raise ValueError(
                f"FSDP2 gathers {there}, laid out here: {here}. Another dtype: pass param_dtype as "
                "dtype. Another shape: units of several modules or reshard_after_forward as an "
                "integer are not for this recipe. The same of both: weights changed outside the "
                "optimizer's step"
            )
        self.calls += 1
        self.memory.gather(output_tensor, self.shard, own=False)


def move(parameter: nn.Parameter, memory: torch.Tensor) -> None:
    """Let ``parameter``, a DTensor, live in ``memory``, which holds its local values."""
    start = memory.storage_offset() * memory.itemsize
    storage = memory.untyped_storage()[start : start + memory.nbytes]  # of its own, as a copy needs
    memory = memory.new_empty(0).set_(storage, 0, memory.shape)
    mesh, layout = parameter.device_mesh, {"shape": parameter.shape, "stride": parameter.stride()}
    moved = DTensor.from_local(memory, mesh, parameter.placements, **layout)
    torch.utils.swap_tensors(parameter, nn.Parameter(moved, parameter.requires_grad))


def own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that FSDP2 gathers with ``module``, in its order: children first."""
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from own_parameters(child)
    yield from module.parameters(recurse=False)


# %%
# Plugged in with one call
# ------------------------
# The two barriers become hooks of the optimizer. They are queued on the compute stream, where the
# update runs. FSDP2 makes its streams wait for the compute stream when a forward begins, which is
# how the copies come after the second barrier; and the compute stream has waited for each gather
# that it used, which is how they come before the first.


def gather_by_copy_engines(
    model: FSDPModule, optimizer: torch.optim.Optimizer, dtype: torch.dtype | None = None
) -> list[CopyEngineAllGather]:
    """Have every unit of ``model`` gather by peer copies, from the next forward on. Collective.

    Args:
        optimizer: the only one that changes the weights; built before or after.
        dtype: ``param_dtype`` of the mixed-precision policy; None if there is none.

    Returns:
        The gathers; none, after a warning that says why, if FSDP2 must gather as it did.
    """
    parameter = next(model.parameters())
    mesh, device = parameter.device_mesh, parameter.to_local().device
    group = mesh.get_group(mesh.ndim - 1)  # of the sharding dimension, with HSDP too
    if reason := why_not(group, device):
        warnings.warn(f"FSDP2 gathers as before: {reason}", stacklevel=2)
        return []
    units = [m for m in model.modules() if isinstance(m, FSDPModule) and [*own_parameters(m)]]
    memory = PeerMemory(group, device)
    gathers = [CopyEngineAllGather(unit, memory, dtype) for unit in units]
    for unit, gather in zip(units, gathers, strict=True):
        unit.set_custom_all_gather(gather)
    model.to(device)  # moves nothing: FSDP2 looks up where its shards are now

    def after_update(*_) -> None:
        for gather in gathers:
            gather.publish()
        memory.barrier()

    optimizer.register_step_pre_hook(lambda *_: memory.barrier())
    optimizer.register_step_post_hook(after_update)
    memory.barrier()
    return gathers


# %%
# Run it, and prove it
# --------------------
# Between backward and update the toy looks at its full weights, as one does to log their norms.
# Those gathers are followed by no reduce-scatter: nothing but the first barrier holds the update
# back until they are done.


def build(device: torch.device, dtype: torch.dtype | None) -> tuple[FSDPModule, torch.optim.AdamW]:
    """Blocks over (batch, WIDTH), float32 weights, computing in ``dtype`` if it is not None."""
    torch.manual_seed(0)
    pairs = [(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)) for _ in range(UNITS)]
    model = nn.Sequential(*(nn.Sequential(up, nn.GELU(), down) for up, down in pairs)).to(device)
    for unit in (*model, model):
        fully_shard(unit, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: FSDPModule, optimizer: torch.optim.Optimizer, device: torch.device) -> dict:
    """Take STEPS steps; return their losses, the norms of full weights, this rank's shards."""
    losses, norms = [], []
    for step in range(STEPS):
        torch.manual_seed(1000 * step + dist.get_rank())
        batch = torch.randn(BATCH, WIDTH, device=device)
        losses.append((model(batch) - batch).square().mean())
        losses[-1].backward()
        for unit in model:
            unit.unshard()
            norms += [torch.linalg.vector_norm(parameter) for parameter in unit.parameters()]
            unit.reshard()
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "shards": [p.to_local() for p in model.parameters()]}


# %%
# The proof: FSDP2 gathers in the first steps, the copy engines in the later ones, and every loss,
# norm and weight has the bits that FSDP2's own gathers give throughout: with weights that moved into
# symmetric memory, and with copies of them. Each unit was gathered three times a step: for forward,
# backward and norms.


def prove(device: torch.device, dtype: torch.dtype | None) -> None:
    model, optimizer = build(device, dtype)
    train(model, optimizer, device)
    expected = train(model, optimizer, device)
    model, optimizer = build(device, dtype)
    train(model, optimizer, device)
    gathers = gather_by_copy_engines(model, optimizer, dtype=dtype)
    found = train(model, optimizer, device)
    for name, tensors in expected.items():
        pairs = zip(found[name], tensors, strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), f"{name} are not those of FSDP2"
    assert all(gather.calls == 3 * STEPS for gather in gathers), "FSDP2 gathered by itself"
    print(f"{dtype or 'as stored'}: {len(gathers)} units by peer copies, every bit equal")


def main() -> None:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device.index)
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(**({} if "RANK" in os.environ else alone))
    try:
        for dtype in (None, torch.bfloat16):
            prove(device, dtype)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

# %%
# What it buys
# ------------
# ``no_communication`` is the same work on weights that are never sharded. The gain has two parts: a
# copy over NVLink is somewhat faster than NCCL's gather, and the matmul beside it keeps its compute
# cores. It still shares the memory's bandwidth with the copy, so that it is not as fast as alone.
# Both count most where communication is long beside compute, at few tokens a step. At every size
# the row is ahead of ``fsdp2`` and of ``fsdp2_tuned``, whose gathers stay NCCL's, and takes less of
# the device's memory than either. What the columns say: :doc:`stream_context`.
#
# .. result-figure:: fsdp_overlap
#    :rows: no_communication fsdp2 fsdp2_tuned fsdp2_copy_engine
#
# .. result-table:: fsdp_overlap
#    :rows: no_communication fsdp2 fsdp2_tuned fsdp2_copy_engine
#
# .. timeline:: fsdp_overlap fsdp2 fsdp2_copy_engine
#
# FSDP2 keeps two copies of its own on each gather: its part into the buffer, and the buffer out to
# the parameters. ``PeerMemory`` does not need FSDP2: its ``gather(out, shard)`` fits a schedule of
# your own, with each parameter gathered where it is used (:doc:`prefetch_schedule`).
#
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built. A missing barrier is a race between ranks,
# and a race may be won: for those edits the ranks take turns in the worst order, rank 0 first or
# last between any two collectives. The recipe itself passes in both orders.
#
# .. recipe-controls::
#
# Memory
# ------
# Symmetric memory for each rank, with :math:`N` ranks and rows padded to a multiple of :math:`N`:
#
# .. math::
#
#    \sum_{p} \frac{\text{padded numel}(p)}{N} \times \text{bytes of the gathered dtype}
#
# Of that, parameters that moved are not stored again, so bf16 training takes no more than before;
# fp32 weights gathered in bf16 take two bytes a parameter over :math:`N` more. It is not in the
# allocator's statistics: look at ``torch.cuda.mem_get_info``.
#
# When it is not worth it
# -----------------------
# * Communication is hidden already: at many tokens a step, what is left is the bandwidth that
#   copies and matmuls share, and that the copy engines take as well.
# * Ranks are on several hosts. Shard inside the host and replicate across hosts (HSDP) if that
#   fits.
# * PyTorch 2.13 or later with a recent NCCL: ``FSDPModule.set_symm_mem_for_comm()`` with NCCL's
#   zero-CTA policy has NCCL itself gather by copy engines. It synchronises the ranks in each gather
#   and needs no hooks; it is the better choice where weights change outside ``optimizer.step()``.
#
# Known limits
# ------------
# * Whatever else changes weights in place (loading a checkpoint, an average of weights swapped in)
#   must stand between barriers like the update. Do it, then take the hooks' way: barrier,
#   change, ``publish()`` of every gather, barrier.
# * Load in place: ``load_state_dict(assign=True)`` replaces parameters, and the other ranks go on
#   reading the old ones, without an error.
# * Call ``gather_by_copy_engines`` while no gradients wait for an update: a parameter that moves
#   loses its ``.grad``.
# * All ranks must call ``optimizer.step()`` equally often: a rank that skips a step (a gradient
#   scaler that found infinities on one rank alone) leaves the others waiting.
# * ``reshard_after_forward`` as an integer gathers over other groups and raises ``ValueError``.
# * ``unit.unshard(async_op=True)`` is right, but its copies run on the stream that calls it.
# * The barrier kernel occupies one block of a compute core until the slowest rank has come: twice a
#   step.
# * Gradients are reduced by NCCL as before; :doc:`copy_engine_reduce` changes that.
#
# Further reading
# ---------------
# * `Symmetric memory <https://docs.pytorch.org/docs/stable/symmetric_memory.html>`__ in PyTorch
# * `fully_shard <https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html>`__:
#   ``set_custom_all_gather`` and its protocol, ``Comm.allocate`` and ``AllGather``
# * `FSDP2 with NCCL's copy engines <https://github.com/pytorch/pytorch/pull/176613>`__
