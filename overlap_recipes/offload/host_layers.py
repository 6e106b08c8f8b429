# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/offload/host_layers.py
"""Layers whose parameters lie in one flat, page-locked buffer each, in host memory.

A layer crosses the link in one copy: by itself, each parameter would pay for its own launch. The
parameters are views of the buffer, so an optimizer that was made before still updates them, and
``state_dict()`` still finds them. Buffers of modules are small: they move to the device for good.

The memory of a parameter must stay the buffer. ``load_state_dict`` copies into it;
``load_state_dict(assign=True)``, ``layers.to(dtype)`` and ``parameter.data = ...`` do not, and the
device goes on with the old weights. Which parameters are trained is fixed when layers are taken.
Locked memory does not exist in a forked process: give it a clone, or start it with ``spawn``.
"""

import mmap
from collections.abc import Callable, Iterable

import torch
from torch import nn

from ..page_locked import PageLocked, private_memory

_SAMPLE = 64  # elements of each tensor, to see changes that PyTorch does not count
ALIGNMENT = 256  # elements: where a parameter may begin, 512 bytes of bf16 as on a CUDA device


class HostBuffer:
    """Named tensors side by side in one 1-D host tensor of exact size, page-locked for CUDA.

    ``flat`` is that tensor, of zeros, ``views`` its parts by name.

    Args:
        like: names and shapes of the parts; their values are not taken.
        dtype: of the elements.
        device: the device whose copies will read or write the buffer.
        allocate: where its memory comes from, bytes -> mmap; ``one_copy_a_host`` shares it.

    Raises:
        RuntimeError: the host has not that much memory, or will not lock it.
    """

    def __init__(
        self,
        like: dict,
        dtype: torch.dtype,
        device: torch.device,
        allocate: Callable[[int], mmap.mmap] = private_memory,
    ) -> None:
        self.shapes = {name: tensor.shape for name, tensor in like.items()}
        self.offsets = []  # elements: where each part begins
        numel = 0
        for shape in self.shapes.values():
            self.offsets.append(numel)
            numel += -(-shape.numel() // ALIGNMENT) * ALIGNMENT
        try:
            self.locked = PageLocked(numel * dtype.itemsize, device, allocate)
        except RuntimeError as error:
            raise RuntimeError(f"{error}, or keep fewer layers on the host") from error
        self.flat = self.locked.bytes.view(dtype)
        self.views = self.views_of(self.flat)
        self.addresses = {name: view.data_ptr() for name, view in self.views.items()}

    def views_of(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parts of another 1-D tensor, at least as long, on any device, of any dtype."""
        views = {}
        for (name, shape), begin in zip(self.shapes.items(), self.offsets, strict=True):
            views[name] = flat[begin : begin + shape.numel()].view(shape)
        return views

    def few_of_each(self) -> list[torch.Tensor]:
        """Of each part some elements, 1-D views: they are what it is now."""
        few = []
        for view in self.views.values():
            every = max(1, -(-view.numel() // _SAMPLE))
            few.append(view.view(-1)[::every])
        return few

    def close(self) -> None:
        """Unlock the pages. The memory itself lives as long as a tensor that uses it."""
        self.locked.close()


class Sample:
    """Some elements of all tensors in host buffers: what changes most of them is seen by these."""

    def __init__(self, buffers: list[HostBuffer]) -> None:
        self.few_of_each = [buffer.few_of_each() for buffer in buffers]

    def now(self) -> torch.Tensor:
        """The elements as they are now, in bytes: one that is no number equals itself."""
        found = [torch.cat(few).view(torch.uint8) for few in self.few_of_each]
        if not found:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.cat(found)


class HostLayer:
    """A layer whose parameters and gradients are in page-locked host memory.

    ``weights`` are its buffers, one for each dtype of what is trained, then of what is not;
    ``gradients`` are laid out as the first of them. ``trained`` are parameters by name.

    Raises:
        RuntimeError: the host cannot lock as much memory as weights and gradients take.
    """

    def __init__(self, layer: nn.Module, device: torch.device, gradient_dtype=None) -> None:
        self.module = layer
        groups = {}
        for name, parameter in layer.named_parameters():
            kind = (not parameter.requires_grad, str(parameter.dtype))
            groups.setdefault(kind, {})[name] = parameter
        in_order = [groups[kind] for kind in sorted(groups)]  # what is trained comes first
        self.trained = {}
        for named in in_order:
            for name, parameter in named.items():
                if parameter.requires_grad:
                    self.trained[name] = parameter
        self.weights = []
        self.gradients = []
        try:
            for named in in_order:
                some = next(iter(named.values()))
                self.weights.append(HostBuffer(named, some.dtype, device))
                if some.requires_grad:
                    self.gradients.append(HostBuffer(named, gradient_dtype or some.dtype, device))
        except BaseException:
            self.close()
            raise
        for named, buffer in zip(in_order, self.weights, strict=True):
            for name, parameter in named.items():
                parameter.data = buffer.views[name].copy_(parameter.data)
        for module in layer.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))

    def hand_out_gradients(self) -> None:
        """Make the gradient buffers what the parameters call ``grad``, if their dtype allows it."""
        for buffer in self.gradients:
            for name, view in buffer.views.items():
                if view.dtype == self.trained[name].dtype:
                    self.trained[name].grad = view

    def give_gradients_away(self) -> None:
        """Give the memory of the gradients back to the system: until it is taken again, zeros."""
        for buffer in self.gradients:
            buffer.locked.give_away()

    def take_gradients_back(self) -> None:
        """Take that memory again, page-locked, if it was given away."""
        for buffer in self.gradients:
            buffer.locked.take_back()

    def sums_in_other_dtype(self) -> torch.dtype | None:
        """That of gradients which are no ``parameter.grad``, since their dtype is another."""
        for buffer in self.gradients:
            for name, view in buffer.views.items():
                if view.dtype != self.trained[name].dtype:
                    return view.dtype
        return None

    def close(self) -> None:
        """Unlock the memory; that of gradients is free where no ``parameter.grad`` lies in it."""
        for buffer in self.weights + self.gradients:
            buffer.close()
        self.gradients = []


def move_to_host(layers: Iterable, device: torch.device, gradient_dtype=None) -> list[HostLayer]:
    """A ``HostLayer`` of each; from a generator, the host never holds them twice.

    Args:
        device: where they will run; if it has an index, it must be the current device.
        gradient_dtype: of the gradients; that of their parameters if None.

    Raises:
        ValueError: a layer shares a parameter with one before it, or another device is current.
        RuntimeError: the host cannot lock as much memory.
    """
    has_index = device.type != "cpu" and device.index is not None
    if has_index and device.index != torch.accelerator.current_device_index():
        raise ValueError(f"make {device} current: torch.accelerator.set_device_index")
    moved = []
    known = set()  # parameters of layers before
    try:
        for layer in layers:
            shared = [name for name, p in layer.named_parameters() if p in known]
            if shared:
                raise ValueError(
                    f"layer {len(moved)} shares {shared} with a layer before it: keep a shared "
                    "parameter on the device, in a module that is no layer"
                )
            known.update(layer.parameters())
            moved.append(HostLayer(layer, device, gradient_dtype))
    except BaseException:
        for layer in moved:
            layer.close()
        raise
    return moved
