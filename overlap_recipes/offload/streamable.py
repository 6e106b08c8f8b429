# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/offload/streamable.py
"""What can be streamed: asked before anything of a model is changed."""

from collections.abc import Iterable, Iterator
from itertools import pairwise

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .layer_as_node import is_streamed

# Private by name: ``_parameters`` of modules.

_LAYER_DROP = "layerdrop", "layer_drop", "encoder_layerdrop", "decoder_layerdrop"


def refuse_unfit(model: nn.Module, layers: list) -> None:
    """Raise where a model, or what is given as its layers, cannot be streamed.

    Raises:
        TypeError: a layer is no module, has no forward, is a ScriptModule, or has weights that are
            not plain, dense tensors.
        ValueError: a layer is no part of the model, or is streamed already; parameters share
            memory; something is on the meta device, or lazy.
    """
    _refuse_other_than_layers(model, layers)
    _refuse_without_memory(model)
    _refuse_other_classes(model, layers)
    _refuse_shared_memory(model)


def _refuse_other_than_layers(model: nn.Module, layers: list) -> None:
    inside = set(model.modules())
    for number, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise TypeError(f"{layer!r} is no module: give the layers, such as model.model.layers")
        kind = type(layer).__name__
        if layer.forward == nn.Module.forward.__get__(layer):
            raise TypeError(
                f"layer {number} is a {kind}, which has no forward: give the modules that it holds"
            )
        for module in layer.modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise TypeError(
                    f"layer {number} is a ScriptModule, or holds one: stream it as it was before "
                    "torch.jit"
                )
        if layer not in inside:
            raise ValueError(f"layer {number} is no part of the model")
        if is_streamed(layer):
            raise ValueError(f"layer {number} is streamed already: leave that block first")


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _refuse_without_memory(model: nn.Module) -> None:
    for name, tensor in _tensors_of(model):
        if is_lazy(tensor):
            raise ValueError(f"{name} has no shape yet: run a forward before")
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device: load or initialise the model first")


def refuse_shared_parameters(model: nn.Module, layers: list[nn.Module]) -> None:
    """Raise where a layer that is streamed shares a parameter with something that is not.

    Raises:
        ValueError: says what to do.
    """
    inside = set()  # modules of layers
    for layer in layers:
        inside.update(layer.modules())
    taken = set(nn.ModuleList(layers).parameters())
    for module in set(model.modules()) - inside:
        if not taken.isdisjoint(module._parameters.values()):
            raise ValueError("a layer and another module share a parameter: keep it out of layers")


def is_plain(parameter: nn.Parameter) -> bool:
    """Whether it is a dense tensor of torch itself, no DTensor, no quantized weight."""
    return type(parameter.data) is torch.Tensor and parameter.layout is torch.strided


def _refuse_other_classes(model: nn.Module, layers: list[nn.Module]) -> None:
    of_layers = set(nn.ModuleList(layers).parameters())
    for name, parameter in model.named_parameters():
        if parameter in of_layers and not is_plain(parameter):
            kind = type(parameter.data).__name__
            if parameter.layout is not torch.strided:
                kind = str(parameter.layout)
            raise TypeError(
                f"{name} is {kind}: stream layers of plain, dense weights, and keep others out"
            )


def _refuse_shared_memory(model: nn.Module) -> None:
    """Two parameters in the same memory would not be there any more."""
    places = []
    for name, parameter in model.named_parameters():
        is_one = type(parameter) is nn.Parameter and is_plain(parameter)
        if is_one and parameter.numel() > 0 and parameter.is_contiguous():
            begin = parameter.data_ptr()
            places.append((str(parameter.device), begin, begin + parameter.nbytes, name))
    for (device, _, end, one), (of_next, begin, _, other) in pairwise(sorted(places)):
        if device == of_next and begin < end:
            raise ValueError(
                f"{one} and {other} are two parameters in the same memory, and would be apart: "
                "make them one parameter, or give one a clone"
            )


def refuse_layer_drop(model: torch.nn.Module) -> None:
    """Raise if layers are left out by chance: ranks would average different ones.

    Raises:
        ValueError: names the setting.
    """
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            for name in _LAYER_DROP:
                share = getattr(holder, name, 0.0)
                if isinstance(share, float) and share > 0:
                    raise ValueError(
                        f"{type(module).__name__} leaves layers out by chance ({name} is {share}), "
                        f"other ones on each rank: set it to 0.0 before the first step"
                    )


def refuse_unlike_plain(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Raise where a parameter is no dense tensor of torch itself.

    Raises:
        TypeError: names its class.
    """
    for parameter in parameters:
        if parameter.requires_grad and not is_plain(parameter):
            kind = type(parameter.data).__name__
            raise TypeError(f"a parameter is {kind}: this AdamW updates plain, dense weights")
