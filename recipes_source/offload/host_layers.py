"""
Weights that live in host memory: one flat buffer a layer
=========================================================
"""

import mmap
import os
from collections.abc import Iterable
from contextlib import closing
from copy import deepcopy
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

ALIGNMENT = 256  # elements: where a parameter may begin, 512 bytes of bf16 as on a CUDA device
WIDTH = 32  # features
BATCH, TOKENS = 2, 8  # sequences per step, tokens per sequence
LAYERS = 3
STEPS = 3


class HostBuffer:
    """Named tensors side by side in one 1-D host tensor of exact size, page-locked for CUDA.

    ``flat`` is that tensor, ``views`` its parts by name.

    Args:
        like: names and shapes of the parts; their values are not taken.
        dtype: of the elements.
        device: the device whose copies will read or write the buffer.

    Raises:
        RuntimeError: the host has not that much memory, or will not lock it.
    """

    def __init__(self, like: dict, dtype: torch.dtype, device: torch.device) -> None:
        self.shapes = {name: tensor.shape for name, tensor in like.items()}
        sizes = [-(-tensor.numel() // ALIGNMENT) * ALIGNMENT for tensor in like.values()]
        *self.offsets, numel = accumulate(sizes, initial=0)
        nbytes = numel * dtype.itemsize
        try:
            memory = mmap.mmap(-1, nbytes or 1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(getattr(mmap, "MADV_HUGEPAGE", mmap.MADV_NORMAL))  # fewer to lock
            self.flat = torch.frombuffer(memory, dtype=torch.uint8)[:nbytes].view(dtype)
            self.pinned = device.type == "cuda" and nbytes > 0
            if self.pinned:
                cuda, address = torch.cuda.cudart(), self.flat.data_ptr()
                torch.cuda.check_error(int(cuda.cudaHostRegister(address, nbytes, 0)))
        except (OSError, RuntimeError) as error:
            raise RuntimeError(
                f"cannot lock {nbytes} more bytes of host memory ({error}): free some, raise "
                "`ulimit -l`, or keep fewer layers on the host"
            ) from error
        self.views = self.views_of(self.flat)

    def views_of(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parts of another 1-D tensor, at least as long, on any device, of any dtype."""
        parts = zip(self.shapes.items(), self.offsets, strict=True)
        return {name: flat[at : at + shape.numel()].view(shape) for (name, shape), at in parts}

    def close(self) -> None:
        """Unlock the pages. The memory itself lives as long as a tensor that uses it."""
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self.flat.data_ptr())
            self.pinned = False


class HostLayers:
    """Layers whose parameters and gradients are in page-locked host memory, a buffer each.

    ``layers.parameters()`` are what an optimizer on the host updates, ``layers.state_dict()`` what
    is saved: the modules keep their ``nn.Parameter`` objects, and only the memory behind them is
    another. Buffers of modules move to the device and stay there.

    Args:
        layers: the modules, taken one by one: from a generator, the host never holds them twice.
        device: where they will run.
        gradient_dtype: of the gradients; each layer's own if None.

    ``weights[i]`` and ``gradients[i]`` are the buffers of layer i. Parameters that require
    gradients come first, so that the gradients' layout is the beginning of the weights'.

    Raises:
        ValueError: a layer has several dtypes, or shares a parameter with one before it.
        RuntimeError: the host cannot lock as much memory as weights and gradients take.
    """

    def __init__(self, layers: Iterable, device: torch.device, gradient_dtype=None) -> None:
        self.device, self.gradient_dtype = device, gradient_dtype
        self.layers = nn.ModuleList()
        self.weights: list[HostBuffer] = []
        self.gradients: list[HostBuffer] = []
        try:
            for layer in layers:
                self.take(layer)
        except BaseException:
            self.close()
            raise

    def take(self, layer: nn.Module) -> None:
        """Move the parameters of ``layer`` into a buffer of their own."""
        index = len(self.layers)
        named = sorted(layer.named_parameters(), key=lambda item: not item[1].requires_grad)
        known = {id(parameter) for parameter in self.layers.parameters()}
        if shared := [name for name, parameter in named if id(parameter) in known]:
            raise ValueError(
                f"layer {index} shares {shared} with a layer before it: keep a shared parameter "
                "on the device, in a module before the first layer or in the loss function"
            )
        dtypes = {parameter.dtype for _, parameter in named} or {torch.float32}
        if len(dtypes) > 1:
            raise ValueError(
                f"layer {index} mixes {sorted(map(str, dtypes))}: give it one dtype with "
                "layer.to(dtype), or split it"
            )
        dtype = dtypes.pop()
        trained = {name: parameter for name, parameter in named if parameter.requires_grad}
        self.weights.append(HostBuffer(dict(named), dtype, self.device))
        self.gradients.append(HostBuffer(trained, self.gradient_dtype or dtype, self.device))
        for name, parameter in named:
            parameter.data = self.weights[index].views[name].copy_(parameter.data)
        for module in layer.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self.device))
        self.layers.append(layer)

    def hand_out_gradients(self) -> None:
        """Make the gradient buffers what the parameters call ``grad``."""
        for layer, gradients in zip(self.layers, self.gradients, strict=True):
            for name, view in gradients.views.items():
                layer.get_parameter(name).grad = view

    def check_finite(self) -> None:
        """Look at all gradients in host memory.

        Raises:
            FloatingPointError: one is infinite or not a number.
        """
        for layer, gradients in enumerate(self.gradients):
            for name, view in gradients.views.items():
                if view.numel() and not torch.stack(torch.aminmax(view)).isfinite().all():
                    raise FloatingPointError(
                        f"layer {layer}: the gradient of {name!r} is not finite; skip this step, "
                        "and lower the learning rate or scale the loss"
                    )

    def close(self) -> None:
        """Wait for the device, and unlock all memory."""
        torch.get_device_module(self.device).synchronize()
        for buffer in self.weights + self.gradients:
            buffer.close()


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


def gradients_to_host(model: HostLayers, x: torch.Tensor) -> torch.Tensor:
    """Forward and backward with one copy a layer and direction; returns the loss."""
    weights = []
    for layer, host in zip(model.layers, model.weights, strict=True):
        flat = torch.empty_like(host.flat, device=model.device).copy_(host.flat, non_blocking=True)
        weights.append(flat.requires_grad_())
        x = functional_call(layer, host.views_of(flat), (x,))
    loss = loss_of(x)
    loss.backward()
    for host, flat in zip(model.gradients, weights, strict=True):
        host.flat.copy_(flat.grad[: host.flat.numel()], non_blocking=True)
    return loss.detach()


def train(model: HostLayers) -> None:
    """Train with an optimizer on the host; compare each step with all of it on the device."""
    streams = torch.get_device_module(model.device)
    optimizer = torch.optim.AdamW(model.layers.parameters(), lr=1e-2, fused=True)
    for step in range(STEPS):
        x = torch.randn(BATCH, TOKENS, WIDTH, device=model.device)
        resident = deepcopy(model.layers).to(model.device)
        loss_of(nn.Sequential(*resident)(x)).backward()

        loss = gradients_to_host(model, x)
        done = streams.Event()
        done.record(streams.current_stream())
        done.synchronize()
        model.hand_out_gradients()
        model.check_finite()
        for ours, theirs in zip(model.layers.parameters(), resident.parameters(), strict=True):
            assert theirs.grad is None or torch.equal(ours.grad, theirs.grad.cpu())
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}, gradients equal, bit by bit")


def refused(layers: list[nn.Module], device: torch.device) -> str:
    """Why ``HostLayers`` does not take these layers."""
    try:
        HostLayers(layers, device)
    except ValueError as reason:
        return str(reason)
    raise AssertionError("these layers were taken")


def main() -> None:
    device = start_rank()
    try:
        torch.manual_seed(dist.get_rank())
        ordinary = nn.ModuleList(Block() for _ in range(LAYERS))
        for block in ordinary:
            block.norm.weight.requires_grad_(False)
        with closing(HostLayers(deepcopy(ordinary), device)) as model:
            for name, tensor in model.layers.state_dict().items():
                assert torch.equal(tensor.cpu(), ordinary.state_dict()[name])
            train(model)
            buffers = model.weights + model.gradients
            assert all(buffer.flat.is_pinned() == (device.type == "cuda") for buffer in buffers)
            nbytes = sum(buffer.flat.nbytes for buffer in buffers)
            tensors = [tensor for buffer in buffers for tensor in buffer.views.values()]
            assert nbytes - sum(t.nbytes for t in tensors) < 4 * ALIGNMENT * len(tensors)
        print(f"{len(buffers)} buffers, {nbytes} bytes")
        print("shared:", refused([ordinary[0], ordinary[0]], device))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
