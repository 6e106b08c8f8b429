# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/export_names.py
"""Which tensors an export has, and what transformers calls them in its files."""

import copy
import dataclasses
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FSDPModule

from .state import WRAPPERS, prefixes_of_ddp


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, each tied one once; shards stay shards."""
    first_names = dict(model.named_parameters())
    in_ddp = prefixes_of_ddp(model)
    tied = set()
    for name, _ in model.named_parameters(remove_duplicate=False):
        if name not in first_names:
            tied.add(_name_in_state(name, in_ddp))
    found = {}
    for name, value in get_model_state_dict(model).items():
        if torch.is_tensor(value) and name not in tied:
            found[name] = value
    return found


def _name_in_state(name: str, in_ddp: list[str]) -> str:
    """What a parameter is called in the state of its model, which does not tell of wrappers.

    Args:
        in_ddp: as of ``prefixes_of_ddp``.
    """
    for outer in in_ddp:
        if name.startswith(f"{outer}module."):
            name = outer + name.removeprefix(f"{outer}module.")
    wrappers = (*WRAPPERS, "_fsdp_wrapped_module")
    return ".".join(word for word in name.split(".") if word not in wrappers)


@dataclasses.dataclass(frozen=True)
class Part:
    """A block of a tensor that is a tensor of its own in the files.

    Attributes:
        name: in the files.
        shape: in the files; it may lack a dimension in which the block has size 1.
        offsets: where the block begins in the tensor.
        sizes: of the block.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, chunk: ChunkStorageMetadata) -> ChunkStorageMetadata:
        """What this part has of ``chunk``, in the tensor; a size is 0 if it has nothing."""
        offsets = []
        sizes = []
        for n in range(len(self.sizes)):
            begin = max(self.offsets[n], chunk.offsets[n])
            end = min(self.offsets[n] + self.sizes[n], chunk.offsets[n] + chunk.sizes[n])
            offsets.append(begin)
            sizes.append(max(end - begin, 0))
        return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def for_transformers(model: nn.Module, dtype: torch.dtype | None = None) -> dict:
    """Options of ``SafetensorsWriter``: what ``model.save_pretrained`` would write.

    Args:
        model: of transformers; it may be sharded, compiled or in DDP, or lie on meta.
        dtype: as there.

    Returns:
        ``config`` with architecture and dtype, ``generation_config`` if the model generates,
        ``dtype``, and ``parts``: transformers 5 fuses the experts of a mixture when it loads them,
        and saves them apart.

    Raises:
        ValueError: transformers saves a tensor that is no block of one of the model's; the model
            has an adapter of peft.
    """
    inner = _inside_wrappers(model)
    if getattr(inner, "peft_config", None):
        raise ValueError("the model has an adapter: export what merge_and_unload() of it returns")
    config = copy.deepcopy(inner.config)
    config.architectures = [own_class(type(inner)).__name__]
    config.dtype = str(dtype or inner.dtype).removeprefix("torch.")
    options = {"config": json.loads(config.to_json_string()), "dtype": dtype}
    if inner.can_generate():
        options["generation_config"] = json.loads(inner.generation_config.to_json_string())
    return {**options, "parts": parts_of_model(model)}


def _inside_wrappers(model: nn.Module) -> nn.Module:
    """The model in what ``torch.compile``, DDP and FSDP1 have put around it, in any order."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None:
            inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


class NeverCopied(torch.Tensor):
    """A tensor on meta, which stays a view where one asks for memory in order."""

    def contiguous(self, *options: object) -> "NeverCopied":
        return self


def parts_of_model(model: nn.Module) -> dict[str, list[Part]]:
    """What transformers stores of each tensor of ``model``, unless it stores it as it is."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before version 5 names are the model's
        return {}
    whole = {}
    names = {}
    for name, tensor in weights(model).items():
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        whole[name] = empty.as_subclass(NeverCopied)  # a view, of which others are made
        names[id(empty)] = name
    parts: dict[str, list[Part]] = {}
    inner = _inside_wrappers(model)
    with own_classes(inner):
        stored_views = revert_weight_conversion(inner, dict(whole))
    for stored, view in stored_views.items():
        name = names.get(id(view._base))
        if name is None:
            raise ValueError(f"{stored} is made of other tensors: export it by save_pretrained")
        parts.setdefault(name, []).append(part(stored, view, view._base))
    for name, tensor in whole.items():
        elements = sum(math.prod(each.sizes) for each in parts.get(name, []))
        if elements != tensor.numel():
            raise ValueError(
                f"transformers stores {elements} of {tensor.numel()} elements of {name}"
            )
    return {name: found for name, found in parts.items() if found[0].name != name}


@contextmanager
def own_classes(model: nn.Module) -> Iterator[None]:
    """Give modules the classes back that ``fully_shard`` has put others around, for a while.

    By their names, and where they are defined, transformers knows what it stores under other names.
    """
    sharded = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            sharded[module] = type(module)
    try:
        for module, around in sharded.items():
            module.__class__ = own_class(around)
        yield
    finally:
        for module, around in sharded.items():
            module.__class__ = around


def own_class(around: type) -> type:
    """The class that ``fully_shard`` has put ``around`` around; ``around`` itself of others."""
    return next(parent for parent in around.__mro__ if not issubclass(parent, FSDPModule))


def part(stored: str, view: torch.Tensor, base: torch.Tensor) -> Part:
    """Where ``view`` lies in ``base``."""
    offsets = []
    rest = view.storage_offset()
    for stride in base.stride():
        offsets.append(rest // max(stride, 1))
        rest %= max(stride, 1)
    if view.stride() == base.stride():
        return Part(stored, tuple(view.shape), tuple(offsets), tuple(view.shape))
    for n in range(base.dim()):  # one index in this dimension
        others = base.stride()[:n] + base.stride()[n + 1 :]
        if view.stride() == others:
            sizes = (*view.shape[:n], 1, *view.shape[n:])
            return Part(stored, tuple(view.shape), tuple(offsets), sizes)
    raise ValueError(f"{stored} is stored in another order: export it by save_pretrained")
