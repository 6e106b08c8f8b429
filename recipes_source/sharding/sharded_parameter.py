"""
A parameter in rows: what sharded training keeps, gathers and reduces
=====================================================================

PROSE
"""

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
BLOCKS = 6
BATCH = 8  # samples per rank and micro-batch
STEPS = 4
MICRO_BATCHES = 2  # gradients accumulated over them before a step

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13 renames
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

Collective = Callable[[torch.Tensor, torch.Tensor], object]  # (output, input), queued


class ShardedParameter:
    """A parameter of shape (rows, ...), of which each rank keeps ceil(rows / ranks) rows or fewer.

    Args:
        parameter: the full parameter, equal on every rank, at least one dimension.
        owners: every (module, name) that holds it.
        mesh: one-dimensional.
        dtype: of the gathered weight and of its gradient; None: the parameter's own.
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
        """Give the memory of ``full`` back to the current stream, which must be where it is from."""
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


class Block(nn.Module):
    """x + an MLP of x, over (batch, WIDTH) float32."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

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


def prove_parity(model: Stack, reference: Stack) -> None:
    exact = dist.get_world_size() <= 2
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-5}
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(p, DTensor), f"{name} is not sharded"
        torch.testing.assert_close(p.full_tensor(), q.detach(), **tolerance)
    print(f"{STEPS} steps: weights equal the unsharded, {'every bit' if exact else tolerance}")


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
