# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, sharding/sharded_parameter.py
"""
A parameter in rows: what sharded training keeps, gathers and reduces
=====================================================================

Build what fully sharded training (FSDP, ZeRO) stands on: **one parameter**, sharded by rows, in
plain PyTorch. Each rank keeps a slice of every weight, gradient and optimizer state, and a weight
is whole only while the model computes with it.

**When not to bother:** you want to train, not to look inside. ``fully_shard`` does this for you.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * a shard layout from which the gathered weight needs no copy
      * how autograd finds a weight again that was freed after forward
      * where gradients are averaged, summed and accumulated
      * ``DTensor`` shards: an optimizer and a checkpoint that need to know nothing

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks, CPU or GPU
      * a model that fits on one device before it is sharded
      * nothing about streams: all happens in one order here; :doc:`stream_context` overlaps it

.. verification-badge::

The idea
--------

Data-parallel ranks all hold the same weights, gradients and optimizer states. Sharded, each of
:math:`N` ranks holds its part, and one collective takes the place of each half of an all-reduce:
an **all-gather** makes weights whole before they are used, a **reduce-scatter** sums gradients and
leaves each rank the rows that it updates.

.. lanes:: Schematic of one step, in one order: nothing here is hidden behind anything else.

   compute:  4-10 forward; 14-26 backward; 30-35 update
   gather:   0-4 weights !; 10-14 again !
   reduce-scatter:  26-30 gradients !
   @10 full weights are freed
   @30 full gradients are freed

Rows are cut so that the collective does all the moving: gathered one behind the other, the ranks'
rows **are** the weight, in place.
"""

# %%
# Imports and sizes
# -----------------
# Only torch and the standard library. A layer of 509 rows divides by no number of ranks: the uneven
# case is the tested one. PyTorch 2.13 gives the two collectives new names; they do the same.

import argparse
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

WIDTH, HIDDEN = 64, 509  # features; 509 is a prime, so every shard of it is uneven
BLOCKS = 5
BATCH = 8  # samples per rank and micro-batch
STEPS = 2
MICRO_BATCHES = 2  # gradients accumulated over them before a step

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13 renames
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

Collective = Callable[[torch.Tensor, torch.Tensor], object]  # (output, input), queued


# %%
# One parameter, in two forms
# ---------------------------
# A rank keeps ``shard``: its rows, cut as ``torch.chunk`` would cut them and padded to the same
# number on every rank. ``parameter`` is that memory, without the padding, as a ``DTensor``: what
# the optimizer updates and a checkpoint saves. ``full`` is what the layer computes with.
#
# All shards have one size. So ``all_gather`` writes them one behind the other, and that is the full
# weight in row order, with the padding at its end. The collective fills ``buffer``, and ``full`` is
# a view of its first rows: **nothing is copied in or out.** Schemes that put a layer's parameters
# into one flat buffer need fewer collectives, and a copy out of the gathered buffer for every
# parameter of every layer.
#
# Between its uses ``full`` has no memory: the storage is resized to zero, and back before the next
# gather. The tensor object stays, and with it every view that autograd saved in forward: in
# backward they look into the same storage and find the weights that were gathered again, at another
# address.
#
# Two details make autograd accept that. First, ``.data`` gives ``full`` a version counter of its
# own: otherwise refilling the buffer would count as a forbidden change of a saved tensor. That the
# *values* are back in time is now this recipe's duty, not autograd's. Second, modules must see
# ``full`` in forward and ``parameter`` at all other times: ``expose`` sets the attribute.


class ShardedParameter:
    """A parameter of shape (rows, ...), of which each rank keeps ceil(rows / ranks) rows or fewer.

    Args:
        parameter: the full parameter, equal on every rank, at least one dimension.
        owners: every (module, name) that holds it.
        mesh: one-dimensional.
        dtype: of the gathered weight and of its gradient; None: the parameter's own. Inputs are
            not cast: pass them in it.
        empty: allocates the shard; called as ``empty(shape, dtype=, device=)``.

    Raises:
        ValueError: the parameter has no dimension to shard.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        owners: list[tuple[nn.Module, str]],
        mesh: DeviceMesh,
        dtype: torch.dtype | None = None,
        empty: Callable[..., torch.Tensor] = torch.empty,
    ) -> None:
        if parameter.ndim == 0:
            raise ValueError(f"{owners[0][1]} has no dimension to shard: make it a vector of one")
        self.mesh, self.owners = mesh, owners
        self.shape, self.stride = parameter.shape, parameter.stride()
        rows = -(-self.shape[0] // mesh.size())
        mine = parameter.detach()[mesh.get_local_rank() * rows :][:rows]
        rest = self.shape[1:]
        self.shard = empty((rows, *rest), dtype=parameter.dtype, device=parameter.device).zero_()
        self.local = self.shard[: len(mine)].copy_(mine)
        self.parameter = nn.Parameter(self.distributed(self.local), parameter.requires_grad)

        dtype = dtype or parameter.dtype
        self.buffer = torch.empty((mesh.size() * rows, *rest), dtype=dtype, device=parameter.device)
        self.full = nn.Parameter(self.buffer.data[: self.shape[0]], parameter.requires_grad)
        self.nbytes = self.buffer.nbytes
        self.release()
        self.expose(full=False)

    def distributed(self, local: torch.Tensor) -> DTensor:
        """``local``, known as this rank's rows of a tensor of the full shape."""
        full = {"shape": self.shape, "stride": self.stride}
        return DTensor.from_local(local, self.mesh, [Shard(0)], run_check=False, **full)

    def expose(self, full: bool) -> None:
        """Let the modules see the full parameter, or the sharded one."""
        for module, name in self.owners:
            setattr(module, name, self.full if full else self.parameter)

    def unshard(self, gather: Collective) -> None:
        """Queue on the current stream: give ``full`` memory and fill it."""
        self.buffer.untyped_storage().resize_(self.nbytes)
        gather(self.buffer, self.shard.to(self.buffer.dtype))

    def release(self) -> None:
        """Give the memory of ``full`` back to the current stream, from which it must be."""
        self.buffer.untyped_storage().resize_(0)

    def reduce(self, grad: torch.Tensor, reduced: torch.Tensor, scatter: Collective) -> None:
        """Add to ``.grad`` this rank's rows of the sum over ranks of ``grad``, (rows, ...).

        ``reduced`` receives them: shape of the shard, dtype of the gradient.
        """
        if missing := len(self.buffer) - len(grad):
            grad = torch.cat([grad, grad.new_zeros(missing, *grad.shape[1:])])
        scatter(reduced, grad.contiguous())
        local = reduced[: len(self.local)].to(self.local.dtype)
        if self.parameter.grad is None:
            self.parameter.grad = self.distributed(local)
        else:
            self.parameter.grad.to_local().add_(local)


# %%
# ``reduce`` is the way back. Each rank has a gradient of the whole weight, for its own samples; the
# reduce-scatter sums them over the ranks and leaves each its rows. They are added to ``.grad`` of
# the sharded parameter, so that micro-batches accumulate in the shard: full gradients never live
# longer than one backward. Rows that do not divide by the ranks cost one copy into a padded
# gradient.
#
# ``dtype`` gives mixed precision: the shard is cast before it is gathered, the reduced gradient
# when it is added, and weights and optimizer keep the model's own dtype.
#
# Every parameter of a model
# --------------------------
# A parameter may have several owners (tied weights): each must see the same tensor, so the model is
# searched for all of them. ``shard_all`` is the smallest schedule there is: everything is gathered
# before forward, freed behind it, gathered again for backward. It is right, and hides nothing.
#
# ``backward`` starts autograd with 1/N where ``loss.backward()`` starts with 1: the sum over ranks
# is then the mean, and no gradient is divided afterwards.


def owners_of_parameters(root: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Every parameter of ``root`` with the modules that hold it, more than one if it is tied."""
    owners = {}
    for module in root.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(parameter, []).append((module, name))
    return owners


def shard_all(model: nn.Module, mesh: DeviceMesh) -> Callable[[torch.Tensor], None]:
    """Shard every parameter; return what to call in place of ``loss.backward()``."""
    parameters = [ShardedParameter(p, o, mesh) for p, o in owners_of_parameters(model).items()]
    gather = partial(all_gather, group=mesh.get_group())
    scatter = partial(reduce_scatter, group=mesh.get_group())

    def before_forward(*_) -> None:
        for p in parameters:
            p.unshard(gather)
            p.expose(full=True)

    def after_forward(*_) -> None:
        for p in parameters:
            p.expose(full=False)
            p.release()

    def backward(loss: torch.Tensor) -> None:
        for p in parameters:
            p.unshard(gather)
        loss.backward(torch.full_like(loss, 1 / mesh.size()))
        for p in parameters:
            grad, p.full.grad = p.full.grad, None
            p.reduce(grad, torch.empty_like(p.shard), scatter)
            p.release()

    model.register_forward_pre_hook(before_forward)
    model.register_forward_hook(after_forward)
    return backward


# %%
# Something to train
# ------------------
# Residual MLPs and a norm. ``shuffled`` makes each pass run its blocks in another order, as a
# mixture of experts or a search over architectures would; the pages that follow need it.


class Block(nn.Module):
    """x + an MLP of x, over (batch, WIDTH) float32."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Stack(nn.Module):
    """Blocks and a norm; if ``shuffled``, each ``turn`` runs the blocks in an order of its own."""

    def __init__(self, device: torch.device, shuffled: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)  # equal on every rank
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.shuffled = nn.LayerNorm(WIDTH), shuffled
        self.to(device)

    def forward(self, x: torch.Tensor, turn: int) -> torch.Tensor:
        order = Random(turn).sample(range(BLOCKS), BLOCKS) if self.shuffled else range(BLOCKS)
        for index in order:
            x = self.blocks[index](x)
        return self.norm(x)


# %%
# ``init_process_group()`` without a backend takes gloo for CPU tensors and NCCL for CUDA tensors.


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


# %%
# Run it, and prove it
# --------------------
# Both runs see the same samples. In the sharded run each rank has its own part. In the unsharded
# run every rank has all parts, and the loss is the sum of theirs over the number of ranks.


def loss_of(model: Stack, turn: int, rank: int) -> torch.Tensor:
    """The loss on one rank's samples of one micro-batch: to turn each sample around."""
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    samples = torch.randn(BATCH, WIDTH, generator=generator).to(model.norm.weight.device)
    return nn.functional.mse_loss(model(samples, turn), samples.flip(1))


def train(model: Stack, backward: Callable[[torch.Tensor], None] | None = None) -> None:
    """STEPS steps of AdamW; without ``backward``, unsharded, on the samples of all ranks."""
    ranks = dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for turn in range(STEPS * MICRO_BATCHES):
        if backward:
            backward(loss_of(model, turn, dist.get_rank()))
        else:
            total = sum(loss_of(model, turn, rank) for rank in range(ranks))
            total.backward(torch.full_like(total, 1 / ranks))
        if turn % MICRO_BATCHES == MICRO_BATCHES - 1:
            optimizer.step()
            optimizer.zero_grad()


# %%
# The weights after training must be those of the unsharded run. A sum of two gradients has one
# order, so one and two ranks agree in **every bit**. From three ranks on the order of the sum is
# the collective's own, and float32 rounding is allowed for. (The optimizer is the plain one for the
# same reason: on a CPU, ``fused=True`` rounds the last few elements of a tensor differently, and a
# shard ends elsewhere than the whole.)


def prove_parity(model: Stack, reference: Stack) -> None:
    exact = dist.get_world_size() <= 2
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-5}
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(p, DTensor), f"{name} is not sharded"
        torch.testing.assert_close(p.full_tensor(), q.detach(), **tolerance)
    print(f"{STEPS} steps: weights equal the unsharded, {'every bit' if exact else tolerance}")


# %%
# A checkpoint knows nothing of ranks: DCP (``torch.distributed.checkpoint``) writes each rank's
# rows, and which rows they are. Here the shards of all ranks are read back as one process that
# shards nothing would read them. Plain tensors in place of DTensors would be taken for replicas,
# and all but one rank's rows dropped in silence.


def prove_checkpoint(model: Stack, directory: Path) -> None:
    """Save the shards, load them as one rank that shards nothing, compare."""
    dcp.save(model.state_dict(), checkpoint_id=directory)
    dcp_to_torch_save(directory, file := directory / f"for_rank{dist.get_rank()}.pt")
    loaded = torch.load(file, map_location=model.norm.weight.device)
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded[name], parameter.full_tensor()), f"{name} differs"
    print(f"saved by {dist.get_world_size()} ranks, loaded by one: every bit equal")


def main(directory: Path) -> None:
    device = start_rank()
    try:
        dist.broadcast_object_list(agreed := [directory])  # rank 0's is everybody's
        model, reference = Stack(device), Stack(device)
        train(model, shard_all(model, init_device_mesh(device.type, (dist.get_world_size(),))))
        train(reference)
        prove_parity(model, reference)
        prove_checkpoint(model, agreed[0] / "weights")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, help="where the checkpoint goes (default: temporary)")
    with tempfile.TemporaryDirectory() as temporary:
        main(parser.parse_args().dir or Path(temporary))

# %%
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built.
#
# .. recipe-controls::
#
# Memory
# ------
# For :math:`P` parameters on :math:`N` ranks, :math:`b` bytes each, AdamW keeps on each rank
#
# .. math::
#
#    4 \, b \, \frac{P}{N} \quad\text{(weights, gradients, two moments)}
#
# and, in this schedule, :math:`2 b P` more while it computes: all weights and all gradients at
# once. Gathering layer by layer brings that down to two or three layers: :doc:`stream_context`.
#
# What it costs
# -------------
# A step moves, to and from each rank, :math:`2 \frac{N-1}{N}` of the weights in gathers and
# :math:`\frac{N-1}{N}` of the gradients in reduce-scatters: one and a half times an all-reduce.
# That is the price of the memory, and whether it costs *time* is a matter of schedule, not of
# bytes.
#
# When it is not worth it
# -----------------------
# * Model, gradients and optimizer fit on each device: plain data parallelism moves less.
# * Many small parameters: each has its own collective here, and a collective of a few kilobytes
#   costs as much as one of a megabyte. A flat buffer for a layer's small parameters pays for its
#   copy.
# * Training that needs a library's breadth (activation checkpointing, hybrid sharding, compile):
#   ``fully_shard`` is built on the same rows and has years of corner cases behind it.
#
# Known limits
# ------------
# * The full model must exist once on each device, at the start. For a larger one, build it on the
#   meta device and fill the shards from a checkpoint.
# * Every parameter must be trained and get a gradient in every backward, on every rank:
#   ``shard_all`` raises ``TypeError`` for one that is frozen or was not used. :doc:`stream_context`
#   takes both.
# * Gradients are read after ``backward()`` only; hooks that want full gradients do not find them.
#
# Further reading
# ---------------
# * `torch.distributed.tensor <https://docs.pytorch.org/docs/stable/distributed.tensor.html>`__:
#   ``DTensor``, ``Shard`` and how uneven rows are laid out
# * `ZeRO: memory optimizations toward training trillion parameter models
#   <https://arxiv.org/abs/1910.02054>`__: the three stages; this is the third
# * `fully_shard <https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html>`__: the
#   library's own, which shards by rows as well
