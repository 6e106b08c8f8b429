# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/entries.py
"""Where the bytes of a tensor lie in what ``torch.save`` has made of it.

That is a zip file: ``data.pkl`` describes the tensor, ``data/0`` has its bytes. Of ``data.pkl``
nothing but numbers and known names is taken; no object is made of it.
"""

import io
import os
import pickle
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache

import torch

HEAD = 4096  # bytes that hold all before the tensor's
_TAIL = 2048  # bytes that hold all after it
_END = struct.Struct("<4s4H2IH")  # at the end of a zip file
_END_64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR_64 = struct.Struct("<4s1I1Q1I")
_LISTED = struct.Struct("<4s6H3I5H2I")  # one for each record, in the list at the end
_LOCAL = struct.Struct("<4s5H3I2H")  # in front of each record
_IS_IN_64 = 0xFFFFFFFF
_STORAGES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
}


class _Unfamiliar(Exception):
    """What is there is not one plain tensor; ``torch.load`` may know it."""


@dataclass(frozen=True)
class _Description:
    """What ``data.pkl`` says of a tensor.

    Attributes:
        first: its first element in the storage.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    first: int

    def is_row_major(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Place:
    """Where a row-major tensor lies in an entry.

    Attributes:
        begin: of its bytes, in bytes from the begin of the entry.
        head: the bytes of the entry that say so: those before ``begin``.
        tail: and those after the tensor.
        tail_begin: where ``tail`` begins in the entry.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    head: bytes
    tail: bytes
    tail_begin: int


@dataclass(frozen=True)
class Record:
    """A record of a zip file; ``header`` is where its own header begins."""

    header: int
    nbytes: int


def _tensor_v2(storage, first, size, stride, requires_grad, hooks, flags=None) -> _Description:
    kind, storage_type, key, _, _ = storage
    if kind != "storage" or key != "0" or storage_type not in _STORAGES:
        raise _Unfamiliar(f"storage {storage}")
    return plain(_STORAGES[storage_type], first, size, stride, hooks, flags)


def _tensor_v3(
    storage, first, size, stride, requires_grad, hooks, dtype, flags=None
) -> _Description:
    kind, storage_type, key, _, _ = storage
    if kind != "storage" or key != "0" or storage_type != "UntypedStorage":
        raise _Unfamiliar(f"storage {storage}")
    return plain(dtype, first, size, stride, hooks, flags)


def plain(dtype, first, size, stride, hooks, flags) -> _Description:
    if hooks or flags:  # flags: a conjugate or a negative view
        raise _Unfamiliar(f"hooks {hooks}, flags {flags}")
    numbers = (first, *size, *stride)
    are_numbers = all(type(number) is int and number >= 0 for number in numbers)
    if not isinstance(dtype, torch.dtype) or not are_numbers or len(size) != len(stride):
        raise _Unfamiliar(f"{dtype}, {numbers}")
    return _Description(dtype, tuple(size), tuple(stride), first)


class _Names(pickle.Unpickler):
    """Knows the few names that describe a plain tensor, and makes no other object."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor_v2
        if (module, name) == ("torch._utils", "_rebuild_tensor_v3"):
            return _tensor_v3
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch.storage" or (module == "torch" and name in _STORAGES):
            return name
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise _Unfamiliar(f"{module}.{name}")

    def persistent_load(self, storage: tuple) -> tuple:
        return storage


@lru_cache(maxsize=4096)
def described_tensor(data: bytes) -> _Description | None:
    """What ``data``, a ``data.pkl``, says; None if that is not one strided tensor."""
    try:
        found = _Names(io.BytesIO(data)).load()
    except Exception:  # a pickle can fail in any way
        return None
    return found if isinstance(found, _Description) else None


class ZipFile:
    """The records of a zip file.

    Args:
        read: bytes from an offset on, so many.
        length: of the file, in bytes.

    Raises:
        Unfamiliar: it is no zip file, or records are compressed or encrypted.
    """

    def __init__(self, read: Callable[[int, int], bytes], length: int) -> None:
        self.read = read
        self.tail_begin = max(0, length - _TAIL)
        self.tail = read(self.tail_begin, length - self.tail_begin)
        self.head = read(0, min(HEAD, length))
        try:
            self.records = self.listed()
        except (struct.error, UnicodeDecodeError) as error:
            raise _Unfamiliar(str(error)) from error

    def part(self, begin: int, nbytes: int) -> bytes:
        if begin + nbytes <= len(self.head):
            return self.head[begin : begin + nbytes]
        if begin >= self.tail_begin:
            begin -= self.tail_begin
            return self.tail[begin : begin + nbytes]
        return self.read(begin, nbytes)

    def listed(self) -> dict[str, Record]:
        at = self.tail.rfind(b"PK\5\6")
        if at < 0:
            raise _Unfamiliar("no end of a zip file")
        _, _, _, _, count, nbytes, begin, _ = _END.unpack_from(self.tail, at)
        if count == 0xFFFF or nbytes == _IS_IN_64 or begin == _IS_IN_64:
            _, _, end_64, _ = _LOCATOR_64.unpack_from(self.tail, at - _LOCATOR_64.size)
            fields = _END_64.unpack(self.part(end_64, _END_64.size))
            count, nbytes, begin = fields[-3:]
        self.list_begin = begin
        data = self.part(begin, nbytes)
        found: dict[str, Record] = {}
        at = 0
        for _ in range(count):
            fields = _LISTED.unpack_from(data, at)
            if fields[0] != b"PK\1\2" or fields[4] != 0 or fields[3] & 1:
                raise _Unfamiliar("compressed or encrypted")
            name_length, extra_length, comment_length = fields[10:13]
            name_begin = at + _LISTED.size
            extra_begin = name_begin + name_length
            name = data[name_begin:extra_begin].decode()
            extra = data[extra_begin : extra_begin + extra_length]
            numbers = _in_64(extra, [fields[9], fields[8], fields[16]])
            if numbers[0] != numbers[1]:
                raise _Unfamiliar("compressed")
            found[name.partition("/")[2]] = Record(header=numbers[2], nbytes=numbers[0])
            at = extra_begin + extra_length + comment_length
        return found

    def begin_of(self, record: Record) -> int:
        header = self.part(record.header, _LOCAL.size)
        fields = _LOCAL.unpack(header)
        if fields[0] != b"PK\3\4":
            raise _Unfamiliar("no header of a record")
        return record.header + _LOCAL.size + fields[9] + fields[10]

    def content(self, name: str) -> bytes:
        record = self.records[name]
        return self.part(self.begin_of(record), record.nbytes)


def _in_64(extra: bytes, numbers: list[int]) -> list[int]:
    """``numbers`` of a listed record, of which those that need it stand in ``extra``."""
    at = 0
    wide = b""
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            wide = extra[at + 4 : at + 4 + nbytes]
        at += 4 + nbytes
    found = []
    for number in numbers:
        if number == _IS_IN_64:
            number = struct.unpack_from("<Q", wide)[0]
            wide = wide[8:]
        found.append(number)
    return found


class _WithoutTensor(io.BytesIO):
    """A file that keeps what ``torch.save`` writes, but for the tensor's bytes."""

    hole = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.hole = self.tell()
        return self.hole


@cache
def around(shape: torch.Size, dtype: torch.dtype) -> tuple[bytes, bytes]:
    """What ``torch.save`` writes before and after the bytes of a contiguous tensor."""
    file = _WithoutTensor()
    with torch.serialization.skip_data():
        torch.save(torch.empty(shape, dtype=dtype, device="cpu"), file)
    return file.getvalue()[: file.hole], file.getvalue()[file.hole :]


def expected_place(shape: tuple[int, ...], dtype: torch.dtype, length: int) -> Place | None:
    """Where the tensor lies in an entry that this torch has written.

    None if that would have another length.
    """
    head, tail = around(torch.Size(shape), dtype)
    begin = len(head)
    end = begin + torch.Size(shape).numel() * dtype.itemsize
    if end + len(tail) != length:
        return None
    return Place(dtype, shape, begin, head, tail, tail_begin=end)


def place_of(read: Callable[[int, int], bytes], length: int) -> Place | None:
    """Where the tensor of an entry lies; None if that is not one plain row-major tensor.

    Args:
        read: bytes of the entry from an offset on, so many.
        length: of the entry, in bytes.
    """
    try:
        return _plain_place(read, length)
    except (_Unfamiliar, KeyError, struct.error):
        return None


def _plain_place(read: Callable[[int, int], bytes], length: int) -> Place:
    file = ZipFile(read, length)
    others = [name for name in file.records if name.startswith("data/") and name != "data/0"]
    if others:
        raise _Unfamiliar("several storages")
    if "byteorder" in file.records and file.content("byteorder").decode() != sys.byteorder:
        raise _Unfamiliar("another byte order")
    description = described_tensor(file.content("data.pkl"))
    if description is None or not description.is_row_major():
        raise _Unfamiliar("not row-major, or a class of its own")
    storage = file.records["data/0"]
    itemsize = description.dtype.itemsize
    first = description.first * itemsize
    nbytes = description.numel() * itemsize
    if nbytes and first + nbytes > storage.nbytes:
        raise _Unfamiliar("a tensor that is larger than its storage")
    begin = file.begin_of(storage)
    if begin > len(file.head) or begin + storage.nbytes > length:
        raise _Unfamiliar("bytes in another place")
    end = begin + storage.nbytes
    tail_begin = max(end, file.tail_begin)
    tail = file.tail[tail_begin - file.tail_begin :]
    return Place(
        dtype=description.dtype,
        shape=description.shape,
        begin=begin + first,
        head=file.head[:begin],
        tail=tail,
        tail_begin=tail_begin,
    )
