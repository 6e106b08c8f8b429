# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, sharding/fsdp2_settings.py
"""
What FSDP2's own settings do, gather by gather
==============================================

**On a stock model these settings hardly pay**: a Llama's steps were as long with them as without. They
pay on small units and few tokens a step, for more memory. Do not bother if a profile of the default
shows no gaps between the matmuls; else try three of them at once by ``tune``, and measure.

.. result-gain:: fsdp_overlap
   :rows: fsdp2_tuned fsdp2 fsdp2_in_place
   :field: efficiency
   :where: model=llama-8b-blocks loop=reads compiled=no reduce_dtype=float32 activation_checkpointing=no

   ``tune`` is this page's, ``use_peer_copies`` that of :doc:`peer_copies`; 100 % is a run that sends
   nothing.

This page shows, for each setting of ``fully_shard``, the order of all gathers and compute in a
step, and how many units have their full weights at a time.

**Scope.** Models whose units run in the same order each step, on every rank. All settings here but
one change time and memory, and no result. The one:

.. warning::

   **Does each rank use every parameter in every step?** Where an expert gets no tokens on one rank,
   FSDP2 adds gradients of *different* parameters, **without an error**, if they are of equal size.
   ``model.set_reduce_scatter_unused_params(True)`` (PyTorch 2.13) corrects this: `An expert without
   tokens`_.

To try three settings at once, take this function, and those that it calls, and give it your units
in forward's order. The file needs torch and NumPy.

.. literalinclude:: fsdp2_settings.py
   :pyobject: tune

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * what each setting moves, and how many full units it keeps
      * why an evaluation between steps costs a gather in the next backward, and what prevents it
      * what gradient accumulation gathers and reduces, and how to have less of it
      * which setting a mixture of experts needs

   .. grid-item-card:: What you need

      * PyTorch 2.11 or later, any number of ranks, CPU or GPU

.. verification-badge::

The idea
--------

A gather can be hidden if it is queued before the compute that runs meanwhile. An early gather keeps
one more full unit in memory. Every setting trades memory for time. By default, forward queues the
gather of a unit when the host comes to that unit, and backward one unit ahead; the last unit is
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
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

UNITS = 5  # blocks, each an FSDP unit
WIDTH = 16  # features
HIDDEN = 40
BATCH = 4  # samples per rank and micro-batch
STEPS = 3
FLOAT32 = MixedPrecisionPolicy()
BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# %%
# A model that no device holds in full
# ------------------------------------
# On the meta device a model has shapes and no memory. ``fully_shard`` cuts it, ``to_empty``
# allocates the shards alone, and ``set_model_state_dict`` fills them from rank 0, which alone has
# the model in full, in host memory. Under mixed precision the main weights, gradients and the
# optimizer's state stay in float32: only what is gathered and computed with is bfloat16.


def blocks() -> nn.Sequential:
    """Blocks over (batch, WIDTH)."""
    units = []
    for _ in range(UNITS):
        units.append(nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)))
    return nn.Sequential(*units)


def build(
    device: torch.device, policy: MixedPrecisionPolicy, reshard: bool | int = True
) -> FSDPModule:
    """Each block a unit; the same weights each time, float32 shards of rank 0's."""
    torch.manual_seed(0)
    full = {}
    if dist.get_rank() == 0:
        full = blocks().state_dict()
    with torch.device("meta"):
        model = blocks()
    for unit in model:
        fully_shard(unit, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device=device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full, options=options)
    return model


# %%
# Written down
# ------------
# An all-gather of our own, set by ``set_custom_all_gather``, sees every gather. Hooks on the
# activation between a unit's two layers mark its forward and its backward. A unit's weights count as full from its
# gather until its parameters are shards again.


class Journal:
    """The order of gathers (g), forwards (f) and backwards (b) by unit, and how many are full."""

    def __init__(self, units: Sequence[FSDPModule]) -> None:
        self.units = units
        self.underway: set[int] = set()
        self.clear()
        for number, unit in enumerate(units):
            unit.set_custom_all_gather(NotedAllGather(self, number))
            unit[1].register_forward_pre_hook(lambda *_, n=number: self.note("f", n))
            unit[1].register_full_backward_pre_hook(lambda *_, n=number: self.note("b", n))

    def clear(self) -> None:
        self.events: list[str] = []
        self.most_full = 0
        self.gathered_bytes = 0

    def note(self, what: str, number: int) -> None:
        self.events.append(f"{what}{number}")
        if what == "g":
            self.underway.add(number)
        full = set()
        for n, unit in enumerate(self.units):
            if not isinstance(unit[0].weight, DTensor):
                full.add(n)
        self.underway -= full
        self.most_full = max(self.most_full, len(full | self.underway))

    def count(self, what: str) -> int:
        return len([event for event in self.events if event.startswith(what)])


class NotedAllGather:
    """FSDP2's own all-gather, noted in a journal."""

    def __init__(self, journal: Journal, number: int) -> None:
        self.journal = journal
        self.number = number

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
# **Prefetch.** With a list, a unit's forward queues the gathers of the next ones first. Backward
# prefetches one unit by default, in the reverse of the order in which the units ran *since the last
# backward*. Forwards of an evaluation count as well, so that the first unit then prefetches a unit
# that no one will use. An explicit list for each unit prevents this, even if the unit itself is all
# that it has.


def prefetch(units: Sequence[FSDPModule], ahead: int) -> None:
    for number, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(list(units[number + 1 : number + 1 + ahead]))
        before = list(units[max(0, number - ahead) : number])
        before.reverse()
        unit.set_modules_to_backward_prefetch(before or [unit])


# %%
# **A group for gradients.** Collectives of one group run one after the other, on streams of their
# own too. In backward, gathers and reduce-scatters alternate; in groups of their own they overlap.
# From PyTorch 2.13 on, ``model.set_separate_reduce_scatter_group()`` does this; before, it takes an
# object for ``set_custom_reduce_scatter``.


class ReduceScatterInGroup:
    """FSDP2's own reduce-scatter, in ``group``, counted."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.calls = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op: bool = False):
        self.calls += 1
        return reduce_scatter(
            output_tensor, input_tensor, op=op, group=self.group, async_op=async_op
        )


def reduce_in_own_group(units: Sequence[FSDPModule]) -> ReduceScatterInGroup:
    """Give the gradients of ``units``, sharded over all ranks, a group of their own. Collective."""
    scatter = ReduceScatterInGroup(dist.new_group())
    for unit in units:
        unit.set_custom_reduce_scatter(scatter)
    return scatter


def tune(units: Sequence[FSDPModule], kept: int = 2, ahead: int = 2) -> ReduceScatterInGroup:
    """Hide more of the communication of ``units``, in forward order, for a few full units more."""
    keep(units[len(units) - kept :])
    prefetch(units, ahead)
    return reduce_in_own_group(units)


# %%
# Accumulate over micro-batches
# -----------------------------
# By default each micro-batch gathers and reduces as a step does. Two settings of the whole model
# save that, if they are switched back before the last micro-batch:
#
# * ``set_requires_gradient_sync(False)`` reduces nothing. Full gradients stay on every rank and are
#   summed there.
# * ``set_reshard_after_backward(False)`` keeps full weights for the next forward. Where units are
#   also kept over forward (``keep``), a step gathers once, however many micro-batches it has.


def before_micro_batch(model: FSDPModule, is_last: bool) -> None:
    """Reduce gradients and let weights go after the last backward of a step alone."""
    model.set_requires_gradient_sync(is_last)
    model.set_reshard_after_backward(is_last)


# %%
# An expert without tokens
# ------------------------
# FSDP2 reduces those gradients of a unit that this rank *has*. If ranks have gradients of different
# parameters, one reduce-scatter gets different parameters from different ranks. If sizes differ,
# ranks die or hang. **If sizes are equal, as experts' are, the sums are of different parameters,
# and nothing says so.** With ``set_reduce_scatter_unused_params(True)`` a parameter without a
# gradient counts as zeros.


class Experts(nn.Module):
    """x + that of two layers of one size that ``used`` names."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: torch.Tensor, used: int) -> torch.Tensor:
        return x + self.experts[used](x)


def loss_of_experts(model: nn.Module, rank: int, device: torch.device) -> torch.Tensor:
    """The tokens of one rank all go to one expert: that of its number, odd or even."""
    torch.manual_seed(rank)
    return model(torch.randn(BATCH, WIDTH, device=device), rank % 2).square().mean()


def gradients_of_experts(device: torch.device, with_unused: bool) -> list[torch.Tensor]:
    """Sharded; whole gradients."""
    torch.manual_seed(0)
    model = fully_shard(Experts().to(device))
    if with_unused:
        model.set_reduce_scatter_unused_params(True)
    loss_of_experts(model, dist.get_rank(), device).backward()
    found = []
    for parameter in model.parameters():
        gradient = torch.zeros_like(parameter)  # for a rank that has none
        if parameter.grad is not None:
            gradient = parameter.grad
        found.append(gradient.detach().full_tensor())
    return found


def true_gradients_of_experts(device: torch.device) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Experts().to(device)
    ranks = dist.get_world_size()
    for rank in range(ranks):
        (loss_of_experts(model, rank, device) / ranks).backward()
    found = []
    for parameter in model.parameters():
        gradient = torch.zeros_like(parameter)  # one rank alone uses one expert
        if parameter.grad is not None:
            gradient = parameter.grad
        found.append(gradient)
    return found


def prove_experts(device: torch.device) -> None:
    expected = true_gradients_of_experts(device)
    wrong = 0
    for mine, whole in zip(gradients_of_experts(device, False), expected, strict=True):
        if not torch.allclose(mine, whole):
            wrong += 1
    print(f"experts without tokens: {wrong} of {len(expected)} gradients are wrong by default")
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        print("this version of PyTorch has no setting for it")
        return
    for mine, whole in zip(gradients_of_experts(device, True), expected, strict=True):
        torch.testing.assert_close(mine, whole)  # rounded: means of ranks come in another order
    print("with set_reduce_scatter_unused_params(True): none")


# %%
# Run it, and prove it
# --------------------
# Two more things change a step's gathers. ``unshard(async_op=True)`` begins the first gather, which
# nothing else hides, before the batch is there. And an evaluation may run before the step.


@dataclass(frozen=True)
class Case:
    """A way to train, and what it must do a step if there is more than one rank."""

    gathers: int
    most_full: int
    begins: str = "batch g0 f0"
    setting: Callable[[Sequence[FSDPModule]], object] = lambda units: None
    policy: MixedPrecisionPolicy = FLOAT32
    reshard: bool | int = True
    early: bool = False
    evaluate: bool = False
    micro_batches: int = 1
    reduce_each: bool = True  # micro-batch; if not, as ``before_micro_batch`` has it


def train(case: Case, device: torch.device) -> tuple[Journal, list[torch.Tensor]]:
    """Train for STEPS steps; the journal of the last one, and this rank's losses and weights."""
    model = build(device, case.policy, case.reshard)
    scatter = case.setting(list(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    journal = Journal(list(model))
    found = []
    for number in range(STEPS):
        journal.clear()
        if case.early:
            model[0].unshard(async_op=True)
        for micro_batch in range(case.micro_batches):
            torch.manual_seed(1000 * number + 100 * micro_batch + dist.get_rank())
            batch = torch.randn(BATCH, WIDTH, device=device)
            journal.events.append("batch")
            if case.evaluate:
                with torch.no_grad():
                    model(batch)
            if not case.reduce_each:
                before_micro_batch(model, is_last=micro_batch == case.micro_batches - 1)
            loss = (model(batch) - batch).square().mean()
            loss.backward()
            found.append(loss)
        for parameter in model.parameters():
            assert parameter.dtype == parameter.grad.dtype == torch.float32
        optimizer.step()
        optimizer.zero_grad()
    if scatter is not None and dist.get_world_size() > 1:
        wanted = UNITS * STEPS
        if case.reduce_each:
            wanted *= case.micro_batches
        assert scatter.calls == wanted, f"{scatter.calls} reductions in the group"
    found += [parameter.to_local() for parameter in model.parameters()]
    return journal, found


# %%
# The proof: each setting has the numbers of gathers and of full units that ``cases`` states, and
# none changes a bit of a loss or a weight. Sums over micro-batches are rounded in another order, and
# so compared with a tolerance. The printed lines show each step's order: ``g2`` is the gather of unit
# 2, ``f2`` its forward, ``b2`` its backward.


def keep_all_and_count(units: Sequence[FSDPModule]) -> ReduceScatterInGroup:
    keep(units)
    return reduce_in_own_group(units)


def cases_of(ranks: int) -> dict[str, Case]:
    twice = 2 * UNITS
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
    return cases


def prove_case(name: str, case: Case, device: torch.device) -> tuple[Journal, list[torch.Tensor]]:
    journal, found = train(case, device)
    counted = (journal.count("g"), journal.most_full)
    order = " ".join(journal.events)
    if dist.get_world_size() > 1:
        assert counted == (case.gathers, case.most_full), f"{name}: {counted}"
        assert order.startswith(case.begins), f"{name}: {order}"
    print(f"{name}: {counted[0]} gathers, {counted[1]} full\n  {order}")
    return journal, found


def prove(device: torch.device) -> None:
    cases = cases_of(dist.get_world_size())
    default, expected = train(cases["default"], device)
    for name, case in cases.items():
        _, found = prove_case(name, case, device)
        for mine, other in zip(found, expected, strict=True):
            assert torch.equal(mine, other), f"{name}: another result"

    half, found = train(Case(2 * UNITS, 2, policy=BFLOAT16), device)
    assert 2 * half.gathered_bytes == default.gathered_bytes
    for loss, in_float32 in zip(found[:STEPS], expected[:STEPS], strict=True):
        torch.testing.assert_close(loss, in_float32, rtol=1e-2, atol=0)
    print(f"bfloat16: {half.gathered_bytes} bytes gathered instead of {default.gathered_bytes}")


def prove_accumulation(device: torch.device) -> None:
    each = Case(4 * UNITS, 2, setting=reduce_in_own_group, micro_batches=2)
    once = Case(UNITS, UNITS, setting=keep_all_and_count, micro_batches=2, reduce_each=False)
    _, expected = prove_case("two micro-batches", each, device)
    _, found = prove_case("gathered and reduced once", once, device)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5)


def main() -> None:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device.index)
    if "RANK" in os.environ:
        dist.init_process_group()
    else:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        prove(device)
        prove_accumulation(device)
        prove_experts(device)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

# %%
# What it buys
# ------------
# ``fsdp2_reduce_group`` has the group alone. ``no_communication`` is
# the same work on weights that are never sharded (:doc:`/guide/measured`).
#
# .. result-table:: fsdp_overlap
#    :rows: no_communication fsdp2 fsdp2_reduce_group fsdp2_tuned
#    :where: model=llama-8b-blocks loop=reads compiled=no reduce_dtype=float32 activation_checkpointing=no
#
# Measure yours before you keep them. On a synthetic stack of matrices they gain at every size, most at few tokens a step, for more memory:
#
# .. result-table:: fsdp_overlap
#    :rows: no_communication fsdp2 fsdp2_tuned
#    :where: model=synthetic loop=–
#
# What none of these settings changes: NCCL's kernels take compute cores from the matmuls during
# them (:doc:`peer_copies`), and each gather is copied into and out of a buffer
# (:doc:`stream_context` gathers each parameter where it is used).
#
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built. Except for the experts, no result becomes
# wrong: an edit breaks a claim about gathers, bytes or memory, and the counts show it.
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
# **Micro-batches.** With ``set_requires_gradient_sync(False)`` in all but the last, **each rank
# holds the whole model's gradients**, 4 bytes a parameter in float32; otherwise only those of its
# shards, also with HSDP's ``set_requires_all_reduce(False)``. By peer copies (:doc:`peer_copies`)
# it is the same.
#
# When it is not worth it
# -----------------------
# * A profile of the default shows no gaps between the matmuls: everything is hidden already.
# * No order can hide communication that takes longer than all compute.
#
# Known limits
# ------------
# * **Before PyTorch 2.13 nothing helps an expert without tokens** but a gradient for each
#   parameter: in its unit's forward, add zero times its sum to the result. Outside of the unit the
#   parameter is a shard, and this does not help.
# * Without synchronisation between micro-batches, before PyTorch 2.15, a weight first used in the
#   last one is an error in bfloat16: its gradient meets float32 sums. The zeros of
#   ``set_reduce_scatter_unused_params(True)`` raise the same error.
# * Lists are fixed. If the order of units changes from step to step, they prefetch the wrong units
#   and hold their memory.
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
# * `pytorch#158719 <https://github.com/pytorch/pytorch/issues/158719>`__: parameters that only some
#   ranks use
