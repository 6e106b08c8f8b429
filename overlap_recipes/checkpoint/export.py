# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, overlap_recipes/checkpoint/export.py
"""Export a sharded model to Hugging Face's format beside training, each rank its own rows."""

import ctypes
import dataclasses
import itertools
import json
import math
import os
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from .saves import Saves

NAMES = "F64 F32 F16 BF16 F8_E4M3 F8_E5M2 I64 I32 I16 I8 U8 BOOL"  # in a header, and in torch:
KINDS = "double float half bfloat16 float8_e4m3fn float8_e5m2 long int short int8 uint8 bool"
DTYPES = {getattr(torch, k): n for k, n in zip(KINDS.split(), NAMES.split(), strict=True)}


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, each tied one once; shards stay shards."""
    once, every = dict(model.named_parameters()), model.named_parameters(remove_duplicate=False)
    tied = {name.replace("_orig_mod.", "") for name, _ in every if name not in once}
    state = get_model_state_dict(model)  # its names are those of a model that is not compiled
    return {name: x for name, x in state.items() if torch.is_tensor(x) and name not in tied}


def lay_out(tensors: dict[str, tuple], file_bytes: int) -> dict[str, dict]:
    """The header of each file, by file name. ``tensors``: shape and dtype by tensor name."""
    headers, end = [{}], 0
    for name, (shape, dtype) in tensors.items():
        nbytes = math.prod(shape) * dtype.itemsize
        if end and end + nbytes > file_bytes:
            headers, end = [*headers, {}], 0
        place = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [end, end + nbytes]}
        headers[-1][name], end = place, end + nbytes
    names = [f"model-{n + 1:05}-of-{len(headers):05}.safetensors" for n in range(len(headers))]
    return dict(zip(names if len(names) > 1 else ["model.safetensors"], headers, strict=True))


def encoded(header: dict) -> bytes:
    """The bytes of the file before the tensors."""
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def runs(chunk, shape: torch.Size) -> tuple[int, list[int]]:
    """How many elements of ``chunk`` lie together in a tensor of ``shape``; where runs begin."""
    whole = len(shape)
    while whole and chunk.sizes[whole - 1] == shape[whole - 1]:
        whole -= 1
    outer = max(whole - 1, 0)  # the dimensions behind this one lie together
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    last = chunk.offsets[outer] * strides[outer] if shape else 0
    rows = zip(chunk.offsets[:outer], chunk.sizes[:outer], strides, strict=False)
    begins = itertools.product(*([i * s for i in range(o, o + n)] for o, n, s in rows))
    return math.prod(chunk.sizes[outer:]), [last + sum(begin) for begin in begins]


class SafetensorsWriter(dcp.HuggingFaceStorageWriter):
    """For ``dcp.save`` of ``weights``: files that ``from_pretrained`` loads, in ``directory``.

    Args:
        config: goes to ``config.json``.
        dtype: what floating-point tensors are written in, by default their own dtype.
        file_bytes: how many bytes of tensors a file may have, unless one tensor is larger.
    """

    def __init__(self, directory: Path, config=None, dtype=None, file_bytes=5_000_000_000) -> None:
        super().__init__(str(directory))
        self.config, self.dtype, self.file_bytes = config, dtype, file_bytes

    def stored(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype if self.dtype is not None and dtype.is_floating_point else dtype

    def prepare_global_plan(self, plans: list) -> list:
        """On rank 0: lay out the files and make them, each with its header and its full size."""
        items = {item.index.fqn: item.tensor_data for plan in plans for item in plan.items}
        others = [n for n, x in items.items() if x is None or x.properties.dtype not in DTYPES]
        if others or not items or any(self.path.glob("*.safetensors")):
            raise ValueError(f"no tensors, another export in {self.path}, or no dtype for {others}")
        tensors = {n: (x.size, self.stored(x.properties.dtype)) for n, x in sorted(items.items())}
        self.files = lay_out(tensors, self.file_bytes)
        for name, header in self.files.items():
            with (self.path / name).open("wb") as file:
                file.write(encoded(header))
                nbytes = max(place["data_offsets"][1] for place in header.values())
                os.posix_fallocate(file.fileno(), 0, file.tell() + nbytes)
        return [dataclasses.replace(plan, storage_data=self.files) for plan in plans]

    def write_data(self, plan, planner) -> torch.futures.Future:
        for name, header in plan.storage_data.items():
            begin = len(encoded(header))
            with (self.path / name).open("r+b") as file:
                for item in plan.items:
                    if place := header.get(item.index.fqn):
                        offset = begin + place["data_offsets"][0]
                        self.write_item(file.fileno(), offset, item, planner.resolve_data(item))
                os.fsync(file.fileno())
        return super().write_data(dataclasses.replace(plan, items=[]), planner)  # already written

    def write_item(self, file: int, offset: int, item, tensor: torch.Tensor) -> None:
        tensor = tensor.detach().to("cpu", self.stored(tensor.dtype)).contiguous()
        memory = memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
        length, begins = runs(item.tensor_data.chunk, item.tensor_data.size)
        for n, begin in enumerate(begins):
            run = memory[n * length * tensor.itemsize : (n + 1) * length * tensor.itemsize]
            at = offset + begin * tensor.itemsize
            while run:  # a call takes two gigabytes at most
                written = os.pwrite(file, run[: 1 << 30], at)
                run, at = run[written:], at + written

    def finish(self, metadata, results) -> None:
        """On rank 0, when all have written: the small files."""
        index = {name: file for file, header in self.files.items() for name in header}
        small = {"model.safetensors.index.json": {"metadata": {}, "weight_map": index}}
        small |= {"config.json": self.config} if self.config else {}
        for name, content in small.items():
            (self.path / name).write_text(json.dumps(content, indent=2))


class Exports(Saves):
    """``Saves`` whose saves are exports, with the options of ``SafetensorsWriter``."""

    def __init__(self, device: torch.device, changed_by_forward=(), **options) -> None:
        super().__init__(device, changed_by_forward)
        self.options = options

    def write(self, state: dict, directory: Path) -> None:
        writer = SafetensorsWriter(directory, **self.options)
        group = self.groups[0] if self.groups else None
        dcp.save(state, storage_writer=writer, process_group=group, no_dist=group is None)

    def commit(self, aside: Path, directory: Path) -> None:
        if self.rank == 0 and any(directory.glob("*.safetensors")):  # as after a restart
            shutil.rmtree(directory.rename(tempfile.mkdtemp(dir=directory.parent)))
        super().commit(aside, directory)


def convert(checkpoint: Path, directory: Path, prefix: str = "app.model.", **options) -> None:
    """Export the tensors of a DCP checkpoint whose names begin with ``prefix``, in this process."""
    saved = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    asked = {n: x for n, x in saved.items() if n.startswith(prefix) and hasattr(x, "size")}
    state = {name: torch.empty(x.size, dtype=x.properties.dtype) for name, x in asked.items()}
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    dcp.save(state, storage_writer=SafetensorsWriter(directory, **options), no_dist=True)
