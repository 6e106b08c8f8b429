# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, sharding/fsdp2_settings.py
"""
What FSDP2's own settings do, gather by gather
==============================================

See what each setting of ``fully_shard`` does: when weights are gathered, how long they are kept,
which group gradients are reduced in. This recipe writes down every gather of a training step under
each setting, in its order beside the compute, and counts the units whose full weights exist at a
time. To try three of them at once, call ``tune(list(model.layers))``.

**When not to bother:** a profile of the default shows no gaps between the matmuls.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * ``reshard_after_forward``, explicit prefetch, ``unshard(async_op=True)``: what each moves
      * how many full units each setting keeps, next to the gathers it saves
      * an evaluation between steps costs a gather in the next backward, and what prevents it
      * meta-device initialisation and mixed precision, with what is stored in which dtype

   .. grid-item-card:: What you need

      * PyTorch 2.11 or later, any number of ranks, CPU or GPU
      * a model whose units run in the same order each step

.. verification-badge::

The idea
--------

A gather is hidden if it is queued before the compute that it runs beside. While it is early, it
costs one more full unit in memory. Every setting trades memory for time. By default, forward queues
the gather of a unit when the host comes to that unit, and backward one unit ahead; the last unit is
gathered again at the turn-around, where nothing hides it:

.. lanes:: Schematic. Below, units 1 and 2 are kept over the turn-around and gathers are queued earlier.

   compute (default):  4-9 f0; 9-14 f1; 14-19 f2; 24-32 b2; 32-40 b1; 40-48 b0
   gather (default):   0-4 g0 ~; 5-9 g1 ~; 10-14 g2 ~; 20-24 g2 ~; 24-28 g1 ~; 32-36 g0 ~
   compute (tuned):    4-9 f0; 9-14 f1; 14-19 f2; 19-27 b2; 27-35 b1; 35-43 b0
   gather (tuned):     0-4 g0 ~; 4-8 g1 ~; 8-12 g2 ~; 19-23 g0 ~
"""

# %%
# Imports and sizes
# -----------------

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

UNITS, WIDTH, HIDDEN = 5, 16, 40  # blocks, each an FSDP unit; features
BATCH, STEPS = 4, 3  # samples per rank and step
FLOAT32 = MixedPrecisionPolicy()
BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# %%
# A model that no device holds in full
# ------------------------------------
# On the meta device a model has shapes and no memory. ``fully_shard`` cuts it, ``to_empty``
# allocates the shards alone, and ``set_model_state_dict`` fills them from rank 0, one tensor at a
# time; rank 0 alone has it in full, in host memory. The main weights, gradients and the optimizer's
# state stay in float32 under mixed precision: only what is gathered and computed with is bfloat16.


def blocks() -> nn.Sequential:
    pairs = [(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)) for _ in range(UNITS)]
    return nn.Sequential(*(nn.Sequential(up, nn.GELU(), down) for up, down in pairs))


def build(
    device: torch.device, policy: MixedPrecisionPolicy, reshard: bool | int = True
) -> FSDPModule:
    """Blocks over (batch, WIDTH), each a unit, the same weights each time; shards in float32."""
    torch.manual_seed(0)
    full = blocks().state_dict() if dist.get_rank() == 0 else {}
    with torch.device("meta"):
        model = blocks()
    for unit in model:
        fully_shard(unit, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mp_policy=policy).to_empty(device=device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full, options=options)
    return model


# %%
# Written down
# ------------
# An all-gather of our own, set by ``set_custom_all_gather``, sees every gather. Hooks on the
# activation between a unit's two layers mark its forward and its backward. A unit's weights count
# as full from its gather until its parameters are shards again.


class Journal:
    """The order of gathers (g), forwards (f) and backwards (b) by unit, and how many are full."""

    def __init__(self, units: Sequence[FSDPModule]) -> None:
        self.units, self.underway = units, set()
        self.clear()
        for number, unit in enumerate(units):
            unit.set_custom_all_gather(NotedAllGather(self, number))
            unit[1].register_forward_pre_hook(lambda *_, n=number: self.note("f", n))
            unit[1].register_full_backward_pre_hook(lambda *_, n=number: self.note("b", n))

    def clear(self) -> None:
        self.events, self.most_full, self.gathered_bytes = [], 0, 0

    def note(self, what: str, number: int) -> None:
        self.events.append(f"{what}{number}")
        self.underway |= {number} if what == "g" else set()
        full = {n for n, unit in enumerate(self.units) if not isinstance(unit[0].weight, DTensor)}
        self.underway -= full
        self.most_full = max(self.most_full, len(full | self.underway))

    def count(self, what: str) -> int:
        return sum(event.startswith(what) for event in self.events)


class NotedAllGather:
    """FSDP2's own all-gather, noted in a journal."""

    def __init__(self, journal: Journal, number: int) -> None:
        self.journal, self.number = journal, number

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op: bool = False):
        self.journal.note("g", self.number)
        self.journal.gathered_bytes += output_tensor.nbytes
        return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


# %%
# The settings
# ------------
# **Keep.** ``set_reshard_after_forward(False)`` keeps a unit's full weights from forward to
# backward: one gather less, one full unit more. For the last units that costs least, as their
# backward comes first; for all units it is the communication of plain data parallelism.


def keep(units: Sequence[FSDPModule]) -> None:
    for unit in units:
        unit.set_reshard_after_forward(False)


# %%
# **Prefetch.** By default, forward's gathers are queued by the host as it reaches each unit: early
# enough while the host is ahead of the GPU. With a list, a unit's forward queues the gathers of the
# next ones first. Backward prefetches one unit by default, in the reverse of the order in which the
# units ran *since the last backward*. Forwards of an evaluation count as well, so that the first
# unit then prefetches a unit that no one will use. A list of its own, if only of itself, prevents
# it.


def prefetch(units: Sequence[FSDPModule], ahead: int) -> None:
    for number, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(list(units[number + 1 : number + 1 + ahead]))
        before = list(units[max(0, number - ahead) : number][::-1])
        unit.set_modules_to_backward_prefetch(before or [unit])


# %%
# **A group for gradients.** Collectives of one group run one after the other, on streams of their
# own too. In backward, gathers and reduce-scatters alternate; in groups of their own they overlap.
# From PyTorch 2.13 on, ``model.set_separate_reduce_scatter_group()`` does this; before, it takes an
# object for ``set_custom_reduce_scatter``.


class ReduceScatterInGroup:
    """FSDP2's own reduce-scatter, in ``group``."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.calls = group, 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op: bool = False):
        self.calls += 1
        arguments = {"op": op, "group": self.group, "async_op": async_op}
        return reduce_scatter(output_tensor, input_tensor, **arguments)


def reduce_in_own_group(units: Sequence[FSDPModule]) -> ReduceScatterInGroup:
    """Give the gradients of ``units``, sharded over all ranks, a group of their own. Collective."""
    scatter = ReduceScatterInGroup(dist.new_group())
    for unit in units:
        unit.set_custom_reduce_scatter(scatter)
    return scatter


# %%
# All three together: what the tables below call ``fsdp2_tuned``.


def tune(units: Sequence[FSDPModule], kept: int = 2, ahead: int = 2) -> ReduceScatterInGroup:
    """Hide more of the communication of ``units``, in forward order, for a few full units more."""
    keep(units[len(units) - kept :])
    prefetch(units, ahead)
    return reduce_in_own_group(units)


# %%
# Run it, and prove it
# --------------------
# Two more things change a step's gathers. ``unshard(async_op=True)`` begins the first gather, which
# nothing else hides, before the batch is there. And an evaluation may run before the step.


class Case(NamedTuple):
    """A way to train, and what it must do a step if there is more than one rank."""

    gathers: int
    most_full: int
    begins: str = "batch g0 f0"
    setting: Callable[[Sequence[FSDPModule]], object] = lambda units: None
    policy: MixedPrecisionPolicy = FLOAT32
    reshard: bool | int = True
    early: bool = False
    evaluate: bool = False


def train(case: Case, device: torch.device) -> tuple[Journal, list[torch.Tensor]]:
    """Train for STEPS steps; the journal of the last one, and this rank's losses and weights."""
    model = build(device, case.policy, case.reshard)
    scatter = case.setting(list(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    journal, found = Journal(list(model)), []
    for number in range(STEPS):
        journal.clear()
        if case.early:
            model[0].unshard(async_op=True)
        torch.manual_seed(1000 * number + dist.get_rank())
        batch = torch.randn(BATCH, WIDTH, device=device)
        journal.events.append("batch")
        if case.evaluate:
            with torch.no_grad():
                model(batch)
        found.append((model(batch) - batch).square().mean())
        found[-1].backward()
        stored = [*model.parameters(), *(p.grad for p in model.parameters())]
        assert {tensor.dtype for tensor in stored} == {torch.float32}
        optimizer.step()
        optimizer.zero_grad()
    if scatter is not None and dist.get_world_size() > 1:
        assert scatter.calls == UNITS * STEPS, "gradients went through the shared group"
    return journal, found + [parameter.to_local() for parameter in model.parameters()]


# %%
# The proof: each setting has the numbers of gathers and of full units that ``cases`` states, and
# none changes a bit of a loss or a weight. The printed lines show each step's order: ``g2`` is the
# gather of unit 2, ``f2`` its forward, ``b2`` its backward. Mixed precision halves the bytes that
# are gathered and changes the losses a little.


def prove(device: torch.device) -> None:
    ranks, twice = dist.get_world_size(), 2 * UNITS
    cases = {
        "default": Case(twice, 2),
        "keep all": Case(UNITS, UNITS, setting=keep),
        "keep the last two": Case(twice - 2, 2, setting=lambda units: keep(units[-2:])),
        "prefetch one": Case(twice, 2, "batch g0 g1 f0", lambda units: prefetch(units, 1)),
        "prefetch two": Case(twice, 3, "batch g0 g1 g2 f0", lambda units: prefetch(units, 2)),
        "tuned": Case(twice - 2, 3, "batch g0 g1 g2 f0", tune),
        "first gather early": Case(twice, 2, "g0 batch f0", early=True),
        "after an evaluation": Case(UNITS + twice + 1, 2, evaluate=True),
        "the same, with lists": Case(
            UNITS + twice, 2, "batch g0 g1 f0", lambda units: prefetch(units, 1), evaluate=True
        ),
    }
    if ranks > 2 and ranks % 2 == 0:
        cases["reshard to pairs"] = Case(twice, 2, reshard=2)
    default, expected = train(cases["default"], device)
    for name, case in cases.items():
        journal, found = train(case, device)
        pairs = zip(found, expected, strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), f"{name}: another result"
        counted, order = (journal.count("g"), journal.most_full), " ".join(journal.events)
        if ranks > 1:
            assert counted == (case.gathers, case.most_full), f"{name}: {counted}"
            assert order.startswith(case.begins), f"{name}: {order}"
        print(f"{name}: {counted[0]} gathers, {counted[1]} full\n  {order}")

    half, found = train(Case(twice, 2, policy=BFLOAT16), device)
    assert 2 * half.gathered_bytes == default.gathered_bytes
    for loss, in_float32 in zip(found[:STEPS], expected, strict=False):
        torch.testing.assert_close(loss, in_float32, rtol=1e-2, atol=0)
    print(f"bfloat16: {half.gathered_bytes} bytes gathered instead of {default.gathered_bytes}")


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

# %%
# What it buys
# ------------
# ``fsdp2_tuned`` is ``tune`` as above: two units kept, two prefetched, gradients in a group of
# their own. ``fsdp2_reduce_group`` has that group alone. ``no_communication`` is the same work on
# weights that are never sharded (:doc:`/guide/measured`).
#
# .. result-table:: fsdp_overlap
#    :rows: no_communication fsdp2 fsdp2_reduce_group fsdp2_tuned
#    :where: model=llama-8b-blocks loop=reads compiled=no reduce_dtype=float32 activation_checkpointing=no
#
# **On a stock model the settings hardly pay.** ``fsdp2_tuned`` is less than a point from the
# default, and on two GPUs at 2,048 tokens well behind it, on another host. Measure yours before you
# keep them.
#
# On a synthetic stack of matrices the three together are ahead of the default at every size, most
# at few tokens a step. They take more memory throughout (:doc:`/guide/results` has it).
#
# .. result-table:: fsdp_overlap
#    :rows: no_communication fsdp2 fsdp2_tuned
#    :where: model=synthetic loop=–
#
# .. timeline:: fsdp_overlap fsdp2 fsdp2_tuned
#
# Each of the three alone, on the same stack. These rows are of an earlier run, which timed steps
# apart instead of windows in turn. The two methods differ by up to a few points, so compare the
# three with each other and not with the table above.
#
# .. result-table:: fsdp_overlap
#    :rows: fsdp2_kept_units fsdp2_prefetch_lists fsdp2_reduce_group
#    :where: model=synthetic
#
# Of the three, the units that are kept are ahead: their gathers do not happen. Lists or the group
# alone gain less. Where communication was hidden already, gathers and reduce-scatters that overlap
# take more compute cores at a time and share the link, and the step can become longer.
#
# What no setting changes: NCCL's kernels take compute cores from the matmuls beside them
# (:doc:`in_place_gather`), and each gather is copied into and out of a buffer
# (:doc:`stream_context` gathers each parameter where it is used).
#
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built. No result becomes wrong: what is lost is a
# claim about gathers, bytes or memory, and the count says so.
#
# .. recipe-controls::
#
# Memory
# ------
# Bytes of full weights at a time, with :math:`k` units kept, :math:`a` prefetched ahead and
# :math:`U` the bytes of a unit in the gathered dtype:
#
# .. math::
#
#    \max(k,\; a + 1) \; U \quad (+\, U \text{ while a unit is copied out of its gather's buffer})
#
# Main weights, gradients and the state of Adam take 16 bytes a parameter over the number of ranks
# in float32, with or without bfloat16 gathers.
#
# **Micro-batches.** With ``set_requires_gradient_sync(False)`` in all but the last, **each rank holds
# the whole model's gradients**, 4 bytes a parameter in float32; else its shards', with HSDP's
# ``set_requires_all_reduce(False)``, too. In place (:doc:`in_place_reduce`) it is the same.
#
# When it is not worth it
# -----------------------
# * A profile of the default shows no gaps between the matmuls: everything is hidden already.
# * The order of units changes from step to step. Lists are fixed: they then prefetch the wrong
#   units and hold their memory. See :doc:`stream_context`, which needs no order.
#
# Known limits
# ------------
# * **A weight with a gradient on one rank only (an expert without tokens) makes others wrong, without
#   an error**: stock FSDP2 adds gradients of different weights if sizes are equal; else it dies or
#   hangs. Call ``model.set_reduce_scatter_unused_params(True)`` (PyTorch 2.13).
# * A weight that is first used in the last micro-batch is then an error: bfloat16 beside float32.
# * A deeper prefetch helps only where the host is late or a gather is longer than the compute
#   beside it. Communication that is longer than all compute is hidden by no order.
# * ``reshard_after_forward=<int>`` makes backward's gathers cheap where groups of that many ranks
#   share a host, and keeps each unit's weights divided by that number instead of by all ranks.
# * ``to_empty`` leaves buffers that are not in the state dict (``persistent=False``, such as tables
#   of positions) uninitialised: fill them yourself.
# * A communication object replaces FSDP2's own, and so ``set_symm_mem_for_comm`` refuses to follow
#   ``set_custom_reduce_scatter``: use ``set_separate_reduce_scatter_group`` with it.
#
# Further reading
# ---------------
# * `fully_shard <https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html>`__: every
#   setting of ``FSDPModule``
# * `TorchTitan <https://github.com/pytorch/torchtitan>`__ sets prefetch lists and keeps the last
#   unit in production
