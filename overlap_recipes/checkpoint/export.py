# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/export.py
"""Export a sharded model to Hugging Face's format during training, each rank its own rows."""

import ctypes
import dataclasses
import json
import math
import os
import re
import shutil
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from ..ranks import keep_quiet_alone
from .export_names import Part, for_transformers, weights
from .saves import Saves
from .state import is_made_of_tensors
from .stores.directory import Folder
from .talk import Talk
from .writing import Target

__all__ = ["Exports", "Part", "SafetensorsWriter", "convert", "for_transformers", "weights"]

DTYPES = {  # and their names in a header
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# Of the files: what ``from_pretrained`` asks for, and that they are exports.
_METADATA = {"__metadata__": {"format": "pt", "written_by": "overlap_recipes"}}
_INDEX = "model.safetensors.index.json"
_OF_MODEL = re.compile(r"model(-\d+-of-\d+)?\.safetensors")  # as ``lay_out`` names files
_SETTINGS = {"config.json", "generation_config.json"}


def lay_out(tensors: dict[str, tuple], file_bytes: int) -> dict[str, dict]:
    """The header of each file, by file name. ``tensors``: shape and dtype by tensor name."""
    headers: list[dict] = [{}]
    end = 0  # of the last file's tensors
    for name, (shape, dtype) in tensors.items():
        nbytes = math.prod(shape) * dtype.itemsize
        if end and end + nbytes > file_bytes:
            headers.append({})
            end = 0
        place = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [end, end + nbytes]}
        headers[-1][name] = place
        end += nbytes
    if len(headers) == 1:
        return {"model.safetensors": headers[0]}
    found = {}
    for number, header in enumerate(headers, 1):
        found[f"model-{number:05}-of-{len(headers):05}.safetensors"] = header
    return found


def encoded(header: dict) -> bytes:
    """The bytes of the file before the tensors."""
    text = json.dumps(_METADATA | header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def header_of(file: Path) -> tuple[dict, int]:
    """The header of a file of safetensors, and the byte at which its tensors begin.

    Raises:
        ValueError: the file is cut, or not of safetensors.
    """
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        begin = 8 + length
        if begin > file.stat().st_size:
            raise ValueError(f"{file} is cut, or not of safetensors")
        text = stream.read(length)
    try:
        header = json.loads(text)
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise ValueError(f"{file} is cut, or not of safetensors")
    return header, begin


def _files_in(directory: Path) -> list[Path]:
    """The files of ``directory`` that have the tensors of an export, and no others."""
    files = sorted(directory.glob("*.safetensors"))
    return [file for file in files if _OF_MODEL.fullmatch(file.name)]


def _shapes_in(directory: Path) -> dict[str, list[int]]:
    """The shape of each tensor of the export in ``directory``."""
    found = {}
    for file in _files_in(directory):
        header, _ = header_of(file)
        for name, place in header.items():
            if name != "__metadata__":
                found[name] = place["shape"]
    return found


def runs(chunk, shape: torch.Size) -> tuple[int, list[int]]:
    """How many elements of ``chunk`` lie together in a tensor of ``shape``; where runs begin."""
    whole = len(shape)
    while whole and chunk.sizes[whole - 1] == shape[whole - 1]:
        whole -= 1
    outer = max(whole - 1, 0)  # what the chunk has of this dimension and the later ones is one run
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    last = chunk.offsets[outer] * strides[outer] if shape else 0
    begins = [last]
    for d in range(outer):  # one run for each index in the dimensions before
        of_indices = []
        for begin in begins:
            for index in range(chunk.offsets[d], chunk.offsets[d] + chunk.sizes[d]):
                of_indices.append(begin + index * strides[d])
        begins = of_indices
    return math.prod(chunk.sizes[outer:]), begins


class SafetensorsWriter(dcp.HuggingFaceStorageWriter):
    """For ``dcp.save`` of ``weights``: files that ``from_pretrained`` loads, in ``directory``.

    Until all ranks have written, the files of tensors have other names, under which none loads
    them.

    Args:
        config: goes to ``config.json``. A model of transformers needs more: pass what
            ``for_transformers`` returns.
        dtype: what floating-point tensors are written in, by default their own dtype.
        file_bytes: how many bytes of tensors a file may have, unless one tensor is larger.
        parts: of tensors that are stored in parts, or under another name.
        generation_config: goes to ``generation_config.json``.

    Raises:
        ValueError: ``config`` is of transformers, and there are no ``parts``; ``dtype`` is none of
            floating-point numbers that safetensors has.
    """

    def __init__(
        self,
        directory: Path,
        config: dict | None = None,
        dtype: torch.dtype | None = None,
        file_bytes: int = 5_000_000_000,
        parts: dict[str, list[Part]] | None = None,
        generation_config: dict | None = None,
    ) -> None:
        super().__init__(str(directory))
        if parts is None and "transformers_version" in (config or {}):
            raise ValueError(
                "this config alone does not say what transformers calls the tensors: "
                "pass **for_transformers(model) in place of config"
            )
        floating = [each for each in DTYPES if each.is_floating_point]
        if dtype is not None and dtype not in floating:
            raise ValueError(f"dtype is {dtype!r}: give one of {floating}")
        self.settings = {}
        if config:
            self.settings["config.json"] = config
        if generation_config:
            self.settings["generation_config.json"] = generation_config
        self.dtype = dtype
        self.file_bytes = file_bytes
        self.parts = parts or {}

    def stored(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype if self.dtype is not None and dtype.is_floating_point else dtype

    def prepare_global_plan(self, plans: list) -> list:
        """On rank 0: lay out the files and make them, each with its header and its full size."""
        tensors = {}
        for plan in plans:
            for item in plan.items:
                self.add(item, tensors)
        if not tensors:
            raise ValueError("there are no tensors to export")
        if any(self.path.glob("*.safetensors")):
            raise ValueError(f"there is another export in {self.path}")
        for name in (_INDEX, *self.settings):
            if (self.path / name).exists():
                raise ValueError(f"{self.path / name} is there: export to another directory")
        tensors = dict(sorted(tensors.items()))
        self.files = lay_out(tensors, self.file_bytes)
        for name, header in self.files.items():
            with self.unfinished(name).open("wb") as file:
                file.write(encoded(header))
                nbytes = max(place["data_offsets"][1] for place in header.values())
                os.posix_fallocate(file.fileno(), 0, file.tell() + nbytes)
        return [dataclasses.replace(plan, storage_data=self.files) for plan in plans]

    def unfinished(self, name: str) -> Path:
        """Where the file ``name`` lies until all ranks have written."""
        return self.path / f"{name}.unfinished"

    def add(self, item, tensors: dict[str, tuple]) -> None:
        """Note shape and dtype of what is stored of ``item``."""
        name = item.index.fqn
        described = item.tensor_data
        if described is None or described.properties.dtype not in DTYPES:
            raise ValueError(f"safetensors has no dtype for [{name!r}]")
        dtype = self.stored(described.properties.dtype)
        for each in self.parts_in(item):
            tensors[each.name] = each.shape, dtype

    def parts_in(self, item) -> list[Part]:
        name = item.index.fqn
        size = tuple(item.tensor_data.size)
        return self.parts.get(name, [Part(name, size, (0,) * len(size), size)])

    def write_data(self, plan, planner) -> torch.futures.Future:
        for name, header in plan.storage_data.items():
            begin = len(encoded(header))
            with self.unfinished(name).open("r+b") as file:
                for item in plan.items:
                    for each in self.parts_in(item):
                        if each.name not in header:
                            continue
                        place = header[each.name]
                        offset = begin + place["data_offsets"][0]
                        tensor = planner.resolve_data(item)
                        self.write_part(file.fileno(), offset, each, item, tensor)
                os.fsync(file.fileno())
        return super().write_data(dataclasses.replace(plan, items=[]), planner)  # already written

    def write_part(self, file: int, offset: int, part: Part, item, tensor: torch.Tensor) -> None:
        """Write what ``part`` has of ``tensor``, which is this rank's chunk of a larger one."""
        if is_made_of_tensors(tensor):
            kind = type(tensor).__name__
            raise TypeError(f"{part.name} is a {kind}: export plain tensors, such as dequantized")
        chunk = item.tensor_data.chunk
        found = part.of(chunk)
        if 0 in found.sizes:
            return
        in_part = []
        for n, size in enumerate(found.sizes):
            tensor = tensor.narrow(n, found.offsets[n] - chunk.offsets[n], size)
            in_part.append(found.offsets[n] - part.offsets[n])
        tensor = tensor.resolve_neg()
        tensor = tensor.detach().to("cpu", self.stored(tensor.dtype)).contiguous()
        memory = memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
        rows = ChunkStorageMetadata(torch.Size(in_part), found.sizes)
        length, begins = runs(rows, torch.Size(part.sizes))
        for n, begin in enumerate(begins):
            run = memory[n * length * tensor.itemsize : (n + 1) * length * tensor.itemsize]
            at = offset + begin * tensor.itemsize
            while run:  # a call takes two gigabytes at most
                written = os.pwrite(file, run[: 1 << 30], at)
                run = run[written:]
                at += written

    def finish(self, metadata, results) -> None:
        """On rank 0, when all have written: the names of the files, and the small files."""
        file_of = {}
        for file, header in self.files.items():
            self.unfinished(file).rename(self.path / file)
            for name in header:
                file_of[name] = file
        small = {_INDEX: {"metadata": {}, "weight_map": file_of}}
        for name, content in (small | self.settings).items():
            (self.path / name).write_text(json.dumps(content, indent=2))


class ExportWriter:
    """Writes states as files of safetensors; see ``Writer`` of ``writing``."""

    def __init__(self, options: dict) -> None:
        SafetensorsWriter(Path(), **options)  # raises now, and not at the first save
        self.options = options

    def prepare(self, state: dict, talk: Talk) -> None:
        """DCP plans each export."""

    def write(self, state: dict, target: Target, talk: Talk, threads: int) -> None:
        writer = SafetensorsWriter(Path(target.place), **self.options)
        group = {"process_group": talk.group, "no_dist": talk.group is None}
        dcp.save(state, storage_writer=writer, **group)

    def forget(self) -> None:
        """It keeps nothing."""


class _ExportFolder(Folder):
    """Where an export takes the place of an older one, and leaves other files there."""

    def begin(self, nbytes: int) -> str:
        end_replacement(self.directory)
        _refuse_unless_export(self.directory)
        return super().begin(nbytes)

    def commit(self, files: dict[str, int]) -> None:
        _refuse_unless_export(self.directory)  # once more: others may have written meanwhile
        if self.directory.exists():
            self.directory.rename(_older_of(self.directory))
        super().commit(files)
        end_replacement(self.directory)


class Exports(Saves):
    """``Saves`` whose saves are exports, with the options of ``SafetensorsWriter``.

    An export takes the place of an older one in its directory, which is a new one then, and leaves
    other files there; of another model's export ``config.json`` and ``generation_config.json`` go,
    too. A save fails if there are other files and no export, or safetensors that are none, such as
    a model of the Hub, or if the directory is a symbolic link or the working directory.
    """

    def __init__(self, device: torch.device, changed_by_forward=(), **options) -> None:
        super().__init__(device, changed_by_forward, writer=ExportWriter(options))

    def save(self, state_dict: dict, where: Path | str) -> Future:
        return super().save(state_dict, _ExportFolder(self.working_directory / where))


def _refuse_unless_export(directory: Path) -> None:
    """Raise if no export may take the place of ``directory``.

    It is a link or the working directory, or has files and no export, or foreign safetensors.
    """
    if directory.is_symlink():
        raise FileExistsError(f"{directory} is a symbolic link: export to where it leads")
    if Path.cwd().is_relative_to(directory.resolve()):
        raise ValueError(f"{directory} is the working directory, or has it: export to another")
    _refuse_foreign_weights(directory)
    has_weights = any(directory.glob("*.safetensors"))
    if not has_weights and directory.exists() and any(directory.iterdir()):
        raise FileExistsError(f"{directory} has files and no export: export to another directory")


def _refuse_foreign_weights(directory: Path) -> None:
    """Raise if ``directory`` has safetensors that no export has written."""
    for file in sorted(directory.glob("*.safetensors")):
        header, _ = header_of(file)
        if header.get("__metadata__") != _METADATA["__metadata__"]:
            raise FileExistsError(f"{file} is no export: move it, or export to another directory")


def _older_of(directory: Path) -> Path:
    """Where the older export lies while a new one takes its place."""
    return directory.with_name(f"{directory.name}.replaced-by-export")


def end_replacement(directory: Path) -> None:
    """Move what lay next to an older export to the new one, and delete the rest of the older.

    Of another model the older settings go, too. A job that died between the two renames has left
    the older export alone: it comes back, to what may have been put in its place meanwhile.
    """
    older = _older_of(directory)
    if not older.exists():
        return
    if not directory.exists():
        older.rename(directory)
        return
    _refuse_foreign_weights(directory)
    replaced = set()
    if _files_in(directory):
        replaced = {file.name for file in _files_in(older)}
        if _shapes_in(older) != _shapes_in(directory):
            replaced |= _SETTINGS
    for path in older.iterdir():
        if path.name not in replaced and not (directory / path.name).exists():
            path.rename(directory / path.name)
    shutil.rmtree(older)


def convert(checkpoint: Path, directory: Path, prefix: str = "app.model.", **options) -> None:
    """Export the tensors of a DCP checkpoint below ``prefix``, in this process.

    Its last dot may be left out. ``options`` are those of ``SafetensorsWriter``.

    Raises:
        ValueError: no tensor is below ``prefix``; the message has those that there are.
        CheckpointException: there is another export in ``directory``, or a file of settings that
            would be written; a dtype has no name there.
    """
    if prefix:
        prefix = f"{prefix.removesuffix('.')}."
    saved = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    tensors = {name: x for name, x in saved.items() if hasattr(x, "size")}
    state = {}
    for name, x in tensors.items():
        if name.startswith(prefix):
            state[name] = torch.empty(x.size, dtype=x.properties.dtype)
    if not state:
        there = sorted({_prefix_of(name) for name in tensors})
        raise ValueError(
            f"no tensor below {prefix!r} in {checkpoint}: pass as prefix one of {there}"
        )
    keep_quiet_alone()
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    dcp.save(state, storage_writer=SafetensorsWriter(directory, **options), no_dist=True)


def _prefix_of(name: str) -> str:
    """What may be the prefix of a model's tensors: up to ``model.``, or else the first part."""
    before, found, _ = f".{name}".partition(".model.")
    if found:
        return f"{before}.model.".removeprefix(".")
    return name.partition(".")[0] + "."
