"""``move_to_host``: weights in one flat host buffer a layer train as they do on the device.

Each step copies a layer to the device in one piece and its gradients back, and compares them with
those of an ordinary backward, bit by bit. An optimizer on the host changes what the next step
copies. Buffers have the size of their tensors, up to alignment. A parameter that layers share is
refused.
"""

from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from overlap_recipes.offload.host_layers import ALIGNMENT, HostLayer, move_to_host
from overlap_recipes.ranks import start_rank

WIDTH = 32  # features
BATCH, TOKENS, LAYERS, STEPS = 2, 8, 3, 3  # sequences per step, tokens of each; layers, steps


class Block(nn.Module):
    """x + MLP(norm(x)); x is [..., WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def gradients_to_host(model: list[HostLayer], x: torch.Tensor) -> torch.Tensor:
    """Forward and backward with one copy per layer and direction; returns the loss."""
    flats = []
    for layer in model:
        views = {}
        for host in layer.weights:
            flat = torch.empty_like(host.flat, device=x.device).copy_(host.flat, non_blocking=True)
            flats.append(flat.requires_grad_(len(views) == 0 and bool(layer.gradients)))
            views |= host.views_of(flat)
        x = functional_call(layer.module, views, (x,))
    loss = loss_of(x)
    loss.backward()
    hosts = [host for layer in model for host in layer.gradients]
    for host, flat in zip(hosts, (flat for flat in flats if flat.requires_grad), strict=True):
        host.flat.copy_(flat.grad, non_blocking=True)
    return loss.detach()


def train(model: list[HostLayer], ordinary: nn.Module, device: torch.device) -> None:
    """Train with an optimizer on the host; compare each step with all of it on the device."""
    optimizer = torch.optim.AdamW(ordinary.parameters(), lr=1e-2, fused=True)
    for step in range(STEPS):
        x = torch.randn(BATCH, TOKENS, WIDTH, device=device)
        resident = deepcopy(ordinary).to(device)
        loss_of(resident(x)).backward()

        loss = gradients_to_host(model, x)
        torch.get_device_module(device).synchronize()
        for layer in model:
            layer.hand_out_gradients()
        for ours, theirs in zip(ordinary.parameters(), resident.parameters(), strict=True):
            assert theirs.grad is None or torch.equal(ours.grad, theirs.grad.cpu())
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}, gradients equal, bit by bit")


def main() -> None:
    device = start_rank()
    try:
        torch.manual_seed(dist.get_rank())
        ordinary = nn.Sequential(*(Block() for _ in range(LAYERS)))
        ordinary[1].norm.weight.requires_grad_(False)
        values = deepcopy(ordinary)
        model = move_to_host(ordinary, device)
        assert all(map(torch.equal, ordinary.parameters(), values.parameters()))
        train(model, ordinary, device)
        buffers = [buffer for layer in model for buffer in layer.weights + layer.gradients]
        assert all(buffer.flat.is_pinned() == (device.type == "cuda") for buffer in buffers)
        nbytes = sum(buffer.flat.nbytes for buffer in buffers)
        tensors = [tensor for buffer in buffers for tensor in buffer.views.values()]
        assert nbytes - sum(t.nbytes for t in tensors) < 4 * ALIGNMENT * len(tensors)
        [layer.close() for layer in model]
        try:
            move_to_host([ordinary[0], ordinary[0]], device)
        except ValueError as reason:
            print(f"{len(buffers)} buffers, {nbytes} bytes; refused:", reason)
        else:
            raise AssertionError("a parameter that layers share was taken")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
