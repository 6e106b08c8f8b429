# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/offload/layer_state.py
"""What a layer has besides its parameters, so that it runs again as it ran before."""

import random
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy

import torch
from torch import nn

from .kept_things import (
    Draws,
    attributes_of_object,
    draws_of,
    fresh,
    is_array,
    is_object,
    is_source,
    set_attributes,
    things_in,
)

_SMALL = 2**20  # bytes: a tensor up to here is kept though it seems not to have changed

# Names that every module has; of them, those that can be another in the second run.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_HOOKS = frozenset(
    {
        "_forward_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
    }
)
_CHANGEABLE = frozenset({"_buffers", "training"}) | _HOOKS


def attributes_of(module: nn.Module) -> dict:
    """A module's buffers, its mode, its forward's hooks, and what its own class keeps on it."""
    found = {}
    for name, value in vars(module).items():
        if name not in _OF_EVERY_MODULE or name in _CHANGEABLE:
            found[name] = value
    return found


def own_values(attributes: dict) -> list:
    """Of a module's attributes those that its own class keeps on it."""
    return [value for name, value in attributes.items() if name not in _CHANGEABLE]


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; a tensor of inference mode does not count it."""
    return 0 if tensor.is_inference() else tensor._version


class _Kept:
    """A copy of a tensor from before a forward."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.version = version_of(tensor)
        self.before = tensor.detach().clone()

    def value(self) -> torch.Tensor:
        """The copy; after a forward that left a large tensor alone, that tensor."""
        if self.tensor.nbytes > _SMALL and version_of(self.tensor) == self.version:
            return self.tensor
        return self.before


def kept(value, copies: dict[int, _Kept]):
    """A value that later changes do not reach; ``copies`` are of tensors, by ``id``."""
    if isinstance(value, nn.Parameter):
        return value
    if isinstance(value, torch.Tensor) and not value.requires_grad:
        if id(value) not in copies:
            copies[id(value)] = _Kept(value)
        return copies[id(value)]
    if is_array(value):
        if id(value) not in copies:
            copies[id(value)] = value.copy()
        return copies[id(value)]
    if type(value) in (list, tuple):
        return type(value)(kept(item, copies) for item in value)
    if type(value) is dict:
        return {key: kept(item, copies) for key, item in value.items()}
    if isinstance(value, (list, dict, set, deque)):
        return copy(value)
    return fresh(value)


def _values_of(value):
    """A kept value with tensors in place of ``_Kept``."""
    if isinstance(value, _Kept):
        return value.value()
    if type(value) in (list, tuple):
        return type(value)(_values_of(item) for item in value)
    if type(value) is dict:
        return {key: _values_of(item) for key, item in value.items()}
    return value


_KERNELS = "flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp"  # of attention


def _settings_now() -> tuple:
    """PyTorch's own that a layer computes by: the default dtype, and kernels of attention."""
    allowed = [getattr(torch.backends.cuda, f"{name}_enabled")() for name in _KERNELS]
    return torch.get_default_dtype(), allowed


def _set_settings(settings: tuple) -> None:
    dtype, allowed = settings
    torch.set_default_dtype(dtype)
    for name, enabled in zip(_KERNELS, allowed, strict=True):
        getattr(torch.backends.cuda, f"enable_{name}")(enabled)


def _draws_now(sources: list) -> list[Draws]:
    """Those of Python, of NumPy if somebody has imported it, and of other sources."""
    found = [Draws(random.getstate, random.setstate)]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found.append(Draws(numpy.random.get_state, numpy.random.set_state))
    for source in sources:
        found.append(draws_of(source))
    return found


class LayerState:
    """A layer's buffers, attributes, modes and hooks as they are now, settings, random numbers.

    So are objects and arrays that it keeps. What a second run changes of them is gone after it:
    forward has changed it already. ``generators`` are others that the layer may draw from,
    ``objects`` what it is given besides tensors and numbers.
    """

    def __init__(self, layer: nn.Module, generators: list[torch.Generator], objects: list) -> None:
        of_modules = {m: attributes_of(m) for m in layer.modules()}
        values = []
        for attributes in of_modules.values():
            values += own_values(attributes)
        things = things_in(values)
        copies = {}
        sources = generators + [thing for thing in things if is_source(thing)]
        self.settings = _settings_now()
        self.draws = _draws_now(sources)
        self.attributes = {m: kept(found, copies) for m, found in of_modules.items()}
        with_attributes = [each for each in objects if type(vars(each)) is dict]
        with_attributes += [thing for thing in things if is_object(thing)]
        self.of_objects = []
        for each in with_attributes:
            self.of_objects.append((each, kept(attributes_of_object(each), copies)))

    def forward_has_run(self) -> None:
        """Drop copies of large tensors that it has not changed, and what it has not drawn from."""
        for source in self.draws:
            source.forward_has_run()
        self.draws = [source for source in self.draws if source.was_used]
        self.attributes = {m: _values_of(found) for m, found in self.attributes.items()}
        self.of_objects = [(each, _values_of(found)) for each, found in self.of_objects]

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """For this block, the layer is as it was."""
        draws = [source.get() for source in self.draws]
        settings = _settings_now()
        now = {module: attributes_of(module) for module in self.attributes}
        of_objects = [(each, attributes_of_object(each)) for each, _ in self.of_objects]
        for source in self.draws:
            source.put(source.before)
        _set_settings(self.settings)
        exchange(self.attributes)
        for each, attributes in self.of_objects:
            set_attributes(each, attributes)
        try:
            yield
        finally:
            for each, attributes in of_objects:
                set_attributes(each, attributes)
            exchange(now)
            _set_settings(settings)
            for source, state in zip(self.draws, draws, strict=True):
                source.put(state)


def exchange(attributes: dict[nn.Module, dict]) -> None:
    """Give modules these attributes in place of those that they have."""
    for module, wanted in attributes.items():
        for name in attributes_of(module):
            del vars(module)[name]
        vars(module).update(wanted)
