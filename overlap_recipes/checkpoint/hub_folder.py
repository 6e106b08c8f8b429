# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/hub_folder.py
"""Load a folder of safetensors into a sharded model on meta, each rank its rows.

A file is a length, a header in JSON and the tensors' bytes. The threads of ``reader`` read what a
rank holds; safetensors itself is not needed. What transformers calls a tensor in its files, and
which blocks of it they hold, is asked as ``export`` does.
"""

import json
import logging
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor

from ..ranks import own_result
from .export import DTYPES, header_of, runs
from .export_names import Part, parts_of_model, weights
from .reader import OpenFile, Wanted, fill, reads_of
from .state import shard_of

LOG = logging.getLogger(__name__)
_TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
_STAGED = 256 << 20  # bytes on the device that wait for their cast, plus at most one tensor
_Initialize = Callable[[nn.Module], object]


@dataclass
class _Stored:
    """A tensor of a file; ``begin``: the first byte."""

    file: Path
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class _Staged:
    """A block in the file's dtype or order, and the part of a tensor that takes it."""

    block: torch.Tensor
    target: torch.Tensor


@dataclass
class _Pieces:
    """What a rank reads: bytes by file, and blocks that are cast after it."""

    wanted: dict[Path, list[Wanted]] = field(default_factory=dict)
    staged: list[_Staged] = field(default_factory=list)

    def want(self, stored: _Stored, name: str, begin: int, target: torch.Tensor) -> None:
        """Read ``target``, 1-D of bytes, from byte ``begin`` of the tensor on."""
        at = stored.begin + begin
        wanted = Wanted(name, at, at + target.nbytes, target)
        self.wanted.setdefault(stored.file, []).append(wanted)


@torch.no_grad()
def load_folder(
    model: nn.Module,
    folder: Path | str,
    device: torch.device | str | None = None,
    initialize: _Initialize | None = None,
) -> None:
    """Fill ``model`` from the safetensors in ``folder``; all ranks call it.

    Give it the model on meta, after ``fully_shard``; tensor-parallel, replicated and plain tensors
    are filled as well. Weights keep the dtype that they have in the model. Host memory above the
    model's is that of ``reader.Reader``, and on the device 256 MiB and a tensor more where a dtype
    differs.

    Args:
        model: on meta, or with memory already. Its tied weights stay tied.
        folder: as ``save_pretrained`` and the Hub have it.
        device: where a model on meta goes; the accelerator's current device, or the CPU.
        initialize: fills the buffers that a module has and no checkpoint does. By default the
            model's own way, as transformers has it (``_init_weights``), or the module's
            ``reset_parameters``.

    Raises:
        ValueError: on all ranks, before anything has changed: folder and model differ in names,
            shapes or kinds of dtypes, a file is cut, or transformers makes a tensor of the model
            again from those of the folder. After that: a buffer that no checkpoint has is not
            filled, and is on meta again, while the weights have memory and no values; two copies of
            a tied weight differ.
        OSError, TimeoutError: on all ranks: one cannot read a file.
    """
    begun = time.perf_counter()
    stored, parts = own_result(lambda: _compare(model, Path(folder)))
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    own_result(lambda: give_memory(model, torch.device(device), initialize))
    nbytes = own_result(lambda: _read_weights(model, stored, parts, Path(folder)))
    took = time.perf_counter() - begun
    LOG.info("%s: %d bytes for this rank in %.2f s", folder, nbytes, took)


# -- what there is ----------------------------------------------------------------------------


def _tensors_of(folder: Path) -> dict[str, _Stored]:
    """What is in the files, by name."""
    found: dict[str, _Stored] = {}
    for file in _files_of(folder):
        header, tensors_begin = header_of(file)
        header.pop("__metadata__", None)
        for name, place in header.items():
            if name in found:
                raise ValueError(f"{name} is in {found[name].file} and in {file}")
            found[name] = _stored_at(file, tensors_begin, name, place)
    return found


def _files_of(folder: Path) -> list[Path]:
    """The files that have the tensors: files of other exports may lie next to them.

    Raises:
        ValueError: there are none; it is not clear which; the index is cut.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"there are no safetensors in {folder}")
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return files
    named = _named_in(index)
    whole = folder / "model.safetensors"
    if whole in files and whole not in named:
        raise ValueError(
            f"from_pretrained would load {whole}, and {index} names other files: "
            "remove one of the two"
        )
    return named


def _named_in(index: Path) -> list[Path]:
    """The files that an index names."""
    try:
        content = json.loads(index.read_text())
    except ValueError:
        content = None
    places = None
    if isinstance(content, dict):
        places = content.get("weight_map")
    if not isinstance(places, dict):
        raise ValueError(f"{index} is cut, or no index of safetensors")
    return [index.parent / name for name in sorted(set(places.values()))]


def _stored_at(file: Path, tensors_begin: int, name: str, place: dict) -> _Stored:
    """The tensor ``name``, of which the header of ``file`` says ``place``.

    Raises:
        ValueError: its dtype is not read here; the header or the file is cut or wrong.
    """
    for key in ("dtype", "shape", "data_offsets"):
        if key not in place:
            raise ValueError(f"{file} does not say the {key} of {name}")
    if place["dtype"] not in _TORCH_DTYPES:
        raise ValueError(f"{file}: {name} is of {place['dtype']}, which is not read here")
    dtype = _TORCH_DTYPES[place["dtype"]]
    begin, end = place["data_offsets"]
    shape = tuple(place["shape"])
    if begin < 0 or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{file}: {name} has bytes {begin} to {end} for {shape}")
    nbytes = file.stat().st_size
    if tensors_begin + end > nbytes:
        raise ValueError(f"{file} ends at byte {nbytes}, within {name}")
    return _Stored(file, tensors_begin + begin, shape, dtype)


def _whole_part(name: str, tensor: torch.Tensor) -> Part:
    shape = tuple(tensor.shape)
    return Part(name, shape, (0,) * len(shape), shape)


def _compare(model: nn.Module, folder: Path) -> tuple[dict[str, _Stored], dict[str, list[Part]]]:
    """What is in the folder, and the parts that each tensor of the model has there.

    Raises:
        ValueError: folder and model differ.
    """
    stored = _tensors_of(folder)
    aliases = _aliases_of(model)
    parts = dict(parts_of_model(model))
    wrong: list[str] = []
    expected: set[str] = set()
    for name, tensor in weights(model).items():
        if name not in parts:
            parts[name] = [_whole_part(_stored_name(name, aliases, stored), tensor)]
        for part in parts[name]:
            expected.add(part.name)
            wrong.extend(_wrong_part(part, tensor, stored))
        for alias in _second_copies(aliases.get(name, []), parts[name], stored):
            expected.add(alias)
            if stored[alias].shape != tuple(tensor.shape):
                wrong.append(_other_copy(alias, name))
    for name in stored:
        if name not in expected:
            wrong.append(f"  {name}: only in the folder")
    if wrong:
        raise ValueError(_does_not_fit(folder, wrong))
    return stored, parts


def _stored_name(name: str, aliases: dict[str, list[str]], stored: dict[str, _Stored]) -> str:
    """The name that the folder has of a tensor: of a tied one it may be another."""
    if name in stored:
        return name
    for alias in aliases.get(name, []):
        if alias in stored:
            return alias
    return name


def _second_copies(aliases: list[str], parts: list[Part], stored: dict[str, _Stored]) -> list[str]:
    """Those of a tied tensor's other names under which the folder has it once more."""
    read = {part.name for part in parts}
    return [alias for alias in aliases if alias in stored and alias not in read]


def _wrong_part(part: Part, tensor: torch.Tensor, stored: dict[str, _Stored]) -> list[str]:
    """Lines for what the folder has otherwise of a part of ``tensor``."""
    if part.name not in stored:
        return [f"  {part.name}: only in the model"]
    wrong = []
    there = stored[part.name]
    if there.shape != part.shape:
        wrong.append(f"  {part.name}: {part.shape}, in the folder {there.shape}")
    is_cast = there.dtype.is_floating_point and tensor.dtype.is_floating_point
    is_small = min(there.dtype.itemsize, tensor.dtype.itemsize) == 1  # fp8 has scales
    if there.dtype != tensor.dtype and (not is_cast or is_small):
        wrong.append(f"  {part.name}: {tensor.dtype}, in the folder {there.dtype}")
    return wrong


def _other_copy(alias: str, name: str) -> str:
    return f"  {alias}: the model ties it to {name}, and the folder has other values for it"


def _does_not_fit(folder: Path, wrong: list[str]) -> str:
    lines = "\n".join(sorted(wrong))
    return f"{folder} does not fit this model:\n{lines}"


def _aliases_of(model: nn.Module) -> dict[str, list[str]]:
    """The other names of tied parameters, by the first."""
    first: dict[int, str] = {}
    found: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        own = first.setdefault(id(parameter), name)
        if own != name:
            found.setdefault(own, []).append(name)
    return found


# -- memory -----------------------------------------------------------------------------------


def give_memory(
    model: nn.Module, device: torch.device, initialize: _Initialize | None = None
) -> None:
    """Move a model from meta to ``device``; fill what is in no checkpoint, and nothing else.

    Tied weights stay tied. ``initialize``: as for ``load_folder``.
    """
    on_meta = [name for name, tensor in _named_tensors(model) if tensor.is_meta]
    if not on_meta:
        return
    aliases = _aliases_of(model)
    kept = {name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta}
    model.to_empty(device=device)
    for name, others in aliases.items():
        for other in others:
            owner, _, own = other.rpartition(".")
            module = model.get_submodule(owner)
            if getattr(module, own) is not model.get_parameter(name):  # ``to_empty`` unties it
                setattr(module, own, model.get_parameter(name))
    for name, buffer in kept.items():
        model.get_buffer(name).copy_(buffer)
    _fill_buffers(model, kept.keys(), initialize or _own_way(model))


def _named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _own_way(model: nn.Module) -> _Initialize:
    """What the model itself does to fill a module's buffers."""

    def initialize(module: nn.Module) -> None:
        if hasattr(model, "_init_weights"):
            model._init_weights(module)
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()

    return initialize


def _fill_buffers(model: nn.Module, kept: object, initialize: _Initialize) -> None:
    """Fill the buffers that are in no checkpoint; those of ``kept`` are.

    What could not be filled is on meta again, so that nothing computes with it.

    Raises:
        ValueError: some are not filled as a whole, or not the same way twice.
    """
    to_fill: dict[str, list[str]] = {}  # names of buffers, by their module's
    for path, module in model.named_modules():
        names: list[str] = []
        for name in sorted(module._non_persistent_buffers_set):
            if module._buffers.get(name) is not None and _full_name(path, name) not in kept:
                names.append(name)
        if names:
            to_fill[path] = names
    unfilled = {**to_fill}  # all, until a module has been called: ``initialize`` may raise
    try:
        for path, names in to_fill.items():
            unfilled[path] = _unfilled_by(initialize, model.get_submodule(path), names)
    finally:
        for path, names in unfilled.items():
            _back_to_meta(model.get_submodule(path), names)
    missing: list[str] = []
    for path, names in unfilled.items():
        missing.extend(_full_name(path, name) for name in names)
    if missing:
        raise ValueError(
            "no checkpoint has these buffers, and on meta nothing has filled them: "
            f"{', '.join(missing)}. Pass initialize=function, which is called with each module "
            "that owns one and fills it"
        )


def _back_to_meta(module: nn.Module, names: list[str]) -> None:
    for name in names:
        module._buffers[name] = module._buffers[name].to("meta")


def _full_name(path: str, name: str) -> str:
    return f"{path}.{name}".removeprefix(".")


def _unfilled_by(initialize: _Initialize, module: nn.Module, names: list[str]) -> list[str]:
    """Those of a module's buffers ``names`` that ``initialize`` does not fill as a whole.

    It is called twice, on buffers of zeros and on buffers of ones: an element that differs then is
    one that it has left alone.
    """
    buffers = {name: module._buffers[name] for name in names}
    zeros = _filled(module, buffers, 0, initialize)
    ones = _filled(module, buffers, 1, initialize)
    return [name for name in names if not _same_bits(zeros[name], ones[name])]


def _filled(
    module: nn.Module, buffers: dict[str, torch.Tensor], before: int, initialize: _Initialize
) -> dict[str, torch.Tensor]:
    """Copies of what ``initialize`` makes of buffers that hold ``before``."""
    for buffer in buffers.values():
        buffer.fill_(before)
    initialize(module)
    return {name: module._buffers[name].clone() for name in buffers}


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = shard_of(one), shard_of(other)
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


# -- bytes ------------------------------------------------------------------------------------


def _read_weights(
    model: nn.Module, stored: dict[str, _Stored], parts: dict[str, list[Part]], folder: Path
) -> int:
    """Read this rank's rows of all tensors; return how many bytes they have in the model."""
    nbytes = 0
    aliases = _aliases_of(model)
    second_copies: list[tuple[str, str, torch.Tensor]] = []  # compared when the first are there
    with ExitStack() as closing:
        opened: dict[Path, OpenFile] = {}
        for file in sorted({each.file for each in stored.values()}):
            opened[file] = OpenFile(file)
            closing.callback(opened[file].close)
        pieces = _Pieces()
        waiting = 0  # bytes of blocks that are cast after the read
        for name, tensor in weights(model).items():
            nbytes += shard_of(tensor).nbytes
            for part in parts[name]:
                waiting += _add_pieces(pieces, stored[part.name], part, tensor)
            if waiting >= _STAGED:
                _carry_out(pieces, opened, tensor.device)
                pieces = _Pieces()
                waiting = 0
            for alias in _second_copies(aliases.get(name, []), parts[name], stored):
                second_copies.append((alias, name, tensor))
        _carry_out(pieces, opened, _device_of(model))
        for alias, name, tensor in second_copies:
            _compare_copy(alias, name, tensor, stored[alias], opened, folder)
    return nbytes


def _device_of(model: nn.Module) -> torch.device:
    for _, tensor in _named_tensors(model):
        return tensor.device
    return torch.device("cpu")


def _compare_copy(
    alias: str,
    name: str,
    tensor: torch.Tensor,
    stored: _Stored,
    opened: dict[Path, OpenFile],
    folder: Path,
) -> None:
    """Look whether the folder's second copy of a tied weight has the values of the first."""
    own = shard_of(tensor)
    found = torch.empty_like(own)
    other = found
    if isinstance(tensor, DTensor):
        form = {"shape": tensor.shape, "stride": tensor.stride()}
        mesh, placements = tensor.device_mesh, tensor.placements
        other = DTensor.from_local(found, mesh, placements, run_check=False, **form)
    pieces = _Pieces()
    _add_pieces(pieces, stored, _whole_part(alias, tensor), other)
    _carry_out(pieces, opened, own.device)
    if not _same_bits(own, found):
        raise ValueError(_does_not_fit(folder, [_other_copy(alias, name)]))


def _chunks_of(tensor: torch.Tensor) -> list[ChunkStorageMetadata]:
    """What this rank holds of ``tensor``."""
    if isinstance(tensor, DTensor):
        return tensor.__create_chunk_list__()
    return [ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.shape)]


def _add_pieces(pieces: _Pieces, stored: _Stored, part: Part, tensor: torch.Tensor) -> int:
    """Add to ``pieces`` what this rank holds of ``part``; return the bytes that are staged."""
    waiting = 0
    for chunk in _chunks_of(tensor):
        found = part.of(chunk)
        if 0 in found.sizes:
            continue
        target = shard_of(tensor).detach()
        in_part = []
        for n, size in enumerate(found.sizes):
            target = target.narrow(n, found.offsets[n] - chunk.offsets[n], size)
            in_part.append(found.offsets[n] - part.offsets[n])
        block = target
        if target.dtype != stored.dtype or not target.is_contiguous():
            block = torch.empty(target.shape, dtype=stored.dtype, device=target.device)
            pieces.staged.append(_Staged(block, target))
            waiting += block.nbytes
        flat = block.reshape(-1).view(torch.uint8)
        rows = ChunkStorageMetadata(torch.Size(in_part), found.sizes)
        length, begins = runs(rows, torch.Size(part.sizes))
        nbytes = length * stored.dtype.itemsize
        for n, begin in enumerate(begins):
            run = flat[n * nbytes : (n + 1) * nbytes]
            pieces.want(stored, part.name, begin * stored.dtype.itemsize, run)
    return waiting


def _carry_out(pieces: _Pieces, opened: dict[Path, OpenFile], device: torch.device) -> None:
    """Read ``pieces`` and cast what is staged."""
    reads = []
    for file, wanted in pieces.wanted.items():
        reads.extend(reads_of(opened[file], wanted))
    reads.sort(key=lambda read: read.begin - read.end)  # the longest first
    if reads:
        fill(reads, device)
    for staged in pieces.staged:
        staged.target.copy_(staged.block)
