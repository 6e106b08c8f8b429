# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/state/trees.py
"""What a state is made of: nested dicts and lists with tensors as leaves.

Tensors that are made of others, as float8 weights and sparse matrices are, are taken apart and
joined, and so are tuples of tensors, which DCP would save as one rank has them: a checkpoint has
the plain tensors inside, by names below that of the whole, and how to join them. Private by name:
``_indices`` and ``_values``, which give a sparse tensor's own memory.
"""

import base64
import importlib
import io
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

_TENSORS = (torch.Tensor, nn.Parameter)
_VALUES = {int, float, bool, str, bytes, type(None)}
_TUPLE = "tuple"
_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)
_ROOM = 4096  # bytes, a multiple of which each rank's own things take
_FIRST_OF_ZIP = b"PK"
_LAST_OF_ZIP = b"PK\5\6"  # the begin of the last record, which has as many bytes:
_BYTES_OF_LAST = 22
Path = tuple[str | int, ...]  # from the state on


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of ``tensor``."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_staged(leaf: object) -> bool:
    """Whether ``leaf`` is a dense tensor or a DTensor of one."""
    x = shard_of(leaf)
    is_dense = type(x) in (torch.Tensor, nn.Parameter) and x.layout == torch.strided
    return is_dense and not (x.is_quantized or x.is_meta)


def memory_of(leaf: object) -> object:
    """What is equal of two leaves if they are one: that of a state that was asked for twice.

    Of a dense tensor, where it lies and how it is read. Of others, which may be made at each call,
    class and shape; of what is no tensor, the type.
    """
    if not torch.is_tensor(leaf):
        return type(leaf)
    x = shard_of(leaf)
    if not is_staged(leaf):
        return type(x), x.shape
    return x.data_ptr(), leaf.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg()


def walk(tree: object, function: Callable[[object], object]) -> object:
    """A copy of nested dicts, lists and tuples, with ``function`` applied to all else but names."""
    if isinstance(tree, dict):
        return {key: walk(value, function) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        values = [walk(value, function) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return tree if isinstance(tree, str) else function(tree)


def packed(state: object) -> bytes:
    """One leaf of a checkpoint, whatever the state has inside; its size seldom changes.

    If a size does, rank 0 makes a new list of contents, which takes its interpreter for 3 s at 64
    ranks. Random numbers differ in size from save to save, and ``torch.save`` writes bytes above
    127 as two: so the file is filled up, and what is saved is base64.
    """
    file = io.BytesIO()
    torch.save(state, file)
    room = -(-file.tell() // _ROOM) * _ROOM
    return base64.b64encode(file.getvalue().ljust(room, b"\0"))


def unpacked(data: bytes) -> object:
    file = data
    if not data.startswith(_FIRST_OF_ZIP):  # which earlier versions have saved as it is
        file = base64.b64decode(data)
    end = file.rindex(_LAST_OF_ZIP) + _BYTES_OF_LAST
    return torch.load(io.BytesIO(file[:end]), map_location="cpu", weights_only=False)


# -- tensors that are made of others


@dataclass(frozen=True)
class Flattened:
    """How a tensor that is made of others is joined again, or a tuple."""

    module: str
    name: str  # of its class
    context: object
    shape: tuple[int, ...]  # of this rank's part
    stride: tuple[int, ...]
    is_dtensor: bool

    @property
    def is_sparse(self) -> bool:
        """Whether its parts are as large as its content has it."""
        return self.module == "torch" and self.name == "sparse"

    @property
    def is_tuple(self) -> bool:
        """Whether it stands for a tuple, whose length is ``shape``."""
        return isinstance(self.context, str) and self.context == _TUPLE


def pack_flattened(flattened: dict[Path, Flattened]) -> bytes:
    """As one leaf of a checkpoint."""
    return packed({path: tuple(vars(each).values()) for path, each in flattened.items()})


def unpack_flattened(data: bytes | None) -> dict[Path, Flattened]:
    """What ``pack_flattened`` was given; {} of None."""
    if data is None:
        return {}
    return {path: Flattened(*values) for path, values in unpacked(data).items()}


def is_made_of_tensors(leaf: object) -> bool:
    """Whether it is sparse, or of a class that wraps others, as 8-bit moments are."""
    if not torch.is_tensor(leaf):
        return False
    local = shard_of(leaf)
    if is_sparse(local):
        return True
    if type(local) in _TENSORS:
        return False
    return hasattr(type(local), "__tensor_flatten__") and not local.is_nested


def is_sparse(tensor: torch.Tensor) -> bool:
    layout = tensor.layout
    if layout is torch.strided:  # nearly always
        return False
    return layout == torch.sparse_coo or layout in _ROWS or layout in _COLUMNS


def has_parts(tree: object) -> bool:
    """Whether it has a tensor that is made of others, which is rare."""
    values = tree
    if isinstance(tree, dict):
        values = tree.values()
    for value in values:
        if isinstance(value, (dict, list)):
            if has_parts(value):
                return True
        elif type(value) in _TENSORS:
            if value.layout is not torch.strided:
                return True
        elif type(value) not in _VALUES:
            if is_made_of_tensors(value) or holds_tensors(value):
                return True
    return False


def holds_tensors(value: object) -> bool:
    """Whether it is a tuple with a tensor in it."""
    return isinstance(value, tuple) and any(_is_or_holds_tensor(inner) for inner in value)


def _is_or_holds_tensor(value: object) -> bool:
    if isinstance(value, dict):
        return any(_is_or_holds_tensor(inner) for inner in value.values())
    if isinstance(value, (list, tuple)):
        return any(_is_or_holds_tensor(inner) for inner in value)
    return torch.is_tensor(value)


def by_number(value: tuple) -> dict[str, object]:
    """The tuple as a checkpoint has it."""
    return {str(number): inner for number, inner in enumerate(value)}


def in_parts(tree: object, path: Path, flattened: dict[Path, Flattened]) -> object:
    """``tree`` with the parts of tensors that are made of others; adds to ``flattened``.

    What has no such tensor is returned as it is, not copied.
    """
    if isinstance(tree, dict):
        parted = {}
        for key, value in tree.items():
            parted[key] = in_parts(value, (*path, str(key)), flattened)
        has_changed = any(parted[key] is not tree[key] for key in tree)
        return parted if has_changed else tree
    if isinstance(tree, list):
        values = [in_parts(value, (*path, n), flattened) for n, value in enumerate(tree)]
        has_changed = any(new is not old for new, old in zip(values, tree, strict=True))
        return values if has_changed else tree
    if holds_tensors(tree):
        cls = type(tree)
        length = (len(tree),)
        flattened[path] = Flattened(cls.__module__, cls.__qualname__, _TUPLE, length, (), False)
        return in_parts(by_number(tree), path, flattened)
    if not is_made_of_tensors(tree):
        return tree
    local = shard_of(tree)
    if is_sparse(local):
        return _sparse_in_parts(local.detach(), path, flattened)
    with torch.no_grad():
        names, context = local.__tensor_flatten__()
    flattened[path] = Flattened(
        module=type(local).__module__,
        name=type(local).__qualname__,
        context=context,
        shape=tuple(local.shape),
        stride=tuple(local.stride()),
        is_dtensor=isinstance(tree, DTensor),
    )
    parts = {}
    for name in names:
        part = _part_of(tree, getattr(local, name), path)
        parts[name] = in_parts(part, (*path, name), flattened)
    return parts


def _sparse_in_parts(
    tensor: torch.Tensor, path: Path, flattened: dict[Path, Flattened]
) -> dict[str, torch.Tensor]:
    context: object = tensor.layout
    if tensor.layout == torch.sparse_coo:
        context = tensor.is_coalesced()
        parts = {"indices": tensor._indices(), "values": tensor._values()}
    elif tensor.layout in _ROWS:
        parts = {
            "compressed": tensor.crow_indices(),
            "plain": tensor.col_indices(),
            "values": tensor.values(),
        }
    else:
        parts = {
            "compressed": tensor.ccol_indices(),
            "plain": tensor.row_indices(),
            "values": tensor.values(),
        }
    flattened[path] = Flattened("torch", "sparse", context, tuple(tensor.shape), (), False)
    return parts


@torch.no_grad()
def _part_of(whole: torch.Tensor, part: torch.Tensor, path: Path) -> torch.Tensor:
    """``part`` of this rank's ``whole``, sharded as that is; equal on all ranks if it is a number.

    Raises:
        TypeError: no checkpoint can say whose it is.
    """
    if not is_made_of_tensors(part):
        part = part.detach()
    if not isinstance(whole, DTensor) or part.dim() == 0:
        return part
    mesh = whole.device_mesh
    if part.shape == whole._local_tensor.shape:
        layout = {"shape": whole.shape, "stride": whole.stride()}
        return DTensor.from_local(part, mesh, whole.placements, run_check=False, **layout)
    ranks = _ranks_along_rows(whole)
    if ranks is None or whole.shape[0] != ranks * whole._local_tensor.shape[0]:
        name = ".".join(map(str, path))
        raise TypeError(
            f"{name} is a {type(whole._local_tensor).__name__} whose parts are of other sizes than "
            "its shards: shard it evenly along its first dimension"
        )
    return DTensor.from_local(part, mesh, whole.placements, run_check=False)


def _ranks_along_rows(tensor: DTensor) -> int | None:
    """How many ranks share its rows; None if ranks share it in another way."""
    ranks = 1
    for dim, placement in enumerate(tensor.placements):
        if placement == Shard(0):
            ranks *= tensor.device_mesh.size(dim)
        elif not isinstance(placement, Replicate):
            return None
    return ranks


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that it is made of; itself, if of none."""
    parts: list[torch.Tensor] = []
    walk(in_parts(tensor, (), {}), parts.append)
    return parts


def joined(tree: object, path: Path, flattened: dict[Path, Flattened]) -> object:
    """``tree`` with the tensors that were taken apart; the inverse of ``in_parts``."""
    if isinstance(tree, list):
        return [joined(value, (*path, n), flattened) for n, value in enumerate(tree)]
    if not isinstance(tree, dict):
        return tree
    found = {key: joined(value, (*path, str(key)), flattened) for key, value in tree.items()}
    if path in flattened:
        return _made_of(found, flattened[path])
    has_changed = any(found[key] is not tree[key] for key in tree)
    return found if has_changed else tree


def _made_of(parts: dict[str, torch.Tensor], how: Flattened) -> torch.Tensor:
    if how.is_sparse and isinstance(how.context, torch.layout):
        inner = parts["compressed"], parts["plain"], parts["values"]
        return torch.sparse_compressed_tensor(*inner, how.shape, layout=how.context)
    if how.is_sparse:
        inner = parts["indices"], parts["values"]
        return torch.sparse_coo_tensor(*inner, how.shape, is_coalesced=how.context)
    cls = importlib.import_module(how.module)
    for name in how.name.split("."):
        cls = getattr(cls, name)
    if how.is_tuple:
        values = [parts.get(str(number), {}) for number in range(*how.shape)]  # DCP drops {}
        return cls(*values) if hasattr(cls, "_fields") else cls(values)
    locals_ = {name: shard_of(part) for name, part in parts.items()}
    local = cls.__tensor_unflatten__(locals_, how.context, how.shape, how.stride)
    if not how.is_dtensor:
        return local
    like = _first_of_shape(parts, how.shape)
    layout = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, **layout)


def _first_of_shape(parts: dict[str, torch.Tensor], shape: tuple[int, ...]) -> DTensor:
    for part in parts.values():
        if isinstance(part, DTensor) and tuple(part._local_tensor.shape) == shape:
            return part
    raise ValueError(f"of {sorted(parts)} none is sharded as the whole is, {shape}")
