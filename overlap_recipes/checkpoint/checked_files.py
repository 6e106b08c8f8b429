# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/checked_files.py
"""Files of a checkpoint, and digests of their blocks: who reads a part can check what came.

A block's digest is its CRC-32: 1.9 GB/s on one core of an AMD EPYC. Of the standard library's
digests only Adler-32 is faster there (2.25), and it takes more kinds of damage for the original.
SHA-1 and SHA-256 make 1.5 GB/s with the processor's instructions for them, BLAKE2 and MD5 .5.
"""

import hashlib
import io
import json
import os
import pickle
import re
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

BLOCK = 1 << 20  # bytes of a file that have one digest
MANIFEST = "manifest.{}.json"  # of each rank, in each checkpoint: its files, sizes, digests
_NO_MANIFEST = (
    "no manifest, so no CheckpointManager has written it; what dcp.save has written is loaded by "
    "load({'app': state}, directory), with another root for the manager"
)
_IS_MANIFEST = re.compile(r"manifest\.\d+\.json")
_OF_RANK = re.compile(r"__(\d+)_\d+\.distcp")
_Open = Callable[[str], BinaryIO]  # a file of a checkpoint, by its name
METADATA = ".metadata"
PIECE = 8 << 20  # bytes that are read at a time; a multiple of a digest's block
_FIELDS = 5  # of a tensor's properties up to torch 2.14; 2.15 has added the strides


class DamagedCheckpoint(RuntimeError):
    """A file of a checkpoint is not as it was saved."""


@dataclass(frozen=True)
class Digests:
    """The digests of a file.

    Attributes:
        nbytes: of the file.
        block: bytes that have one digest; the last block is shorter.
        sums: one for each block.
    """

    nbytes: int
    block: int
    sums: array

    def check(self, name: str, begin: int, data: memoryview) -> None:
        """Compare ``data``, whole blocks of the file ``name`` from ``begin`` on.

        Raises:
            DamagedCheckpoint: they are others.
        """
        for at in range(0, len(data), self.block):
            content = data[at : at + self.block]
            if zlib.crc32(content) != self.sums[(begin + at) // self.block]:
                first = begin + at
                last = first + len(content)
                raise DamagedCheckpoint(f"{name}: bytes {first} to {last} are not as saved")


class Digesting:
    """Makes digests of a file's bytes as they pass."""

    def __init__(self) -> None:
        self.sums = array("I")  # of the blocks that are complete
        self.nbytes = 0
        self.crc = 0  # of the block that is not

    def add(self, data: memoryview) -> None:
        at = 0
        while at < len(data):
            part = data[at : at + BLOCK - self.nbytes % BLOCK]
            self.crc = zlib.crc32(part, self.crc)
            self.nbytes += len(part)
            at += len(part)
            if self.nbytes % BLOCK == 0:
                self.sums.append(self.crc)
                self.crc = 0

    def described(self) -> dict[str, object]:
        """What a manifest says of the file."""
        sums = [*self.sums]
        if self.nbytes % BLOCK:
            sums.append(self.crc)
        text = " ".join(f"{number:x}" for number in sums)
        return {"bytes": self.nbytes, "block": BLOCK, "crc32": text}


def described_file(stream: BinaryIO) -> dict[str, object]:
    """What a manifest says of the file that ``stream`` reads."""
    found = Digesting()
    while data := stream.read(BLOCK):
        found.add(memoryview(data))
    return found.described()


def faults(sizes: dict[str, int], open_file: _Open, every_byte: bool = False) -> list[str]:
    """What is wrong with a checkpoint, one line per file; [] if it is complete.

    Args:
        sizes: of the files that are there.
        every_byte: compare digests, too.
    """
    try:
        manifests = [read_manifest(name, open_file) for name in manifests_among(sizes)]
        files = {name: what for part in manifests for name, what in part["files"].items()}
        ranks = {part["ranks"] for part in manifests}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"a manifest cannot be read: {error!r}"]
    if not manifests:
        return [_NO_MANIFEST]
    if ranks != {len(manifests)}:
        return [f"{len(manifests)} manifests, of a job of {ranks or 'no'} ranks"]
    found = []
    for name, expected in files.items():
        if name not in sizes:
            found.append(f"{name}: missing")
        elif sizes[name] != expected.get("bytes"):
            found.append(f"{name}: {sizes[name]} bytes, not {expected.get('bytes')}")
        elif every_byte and _has_changed(name, open_file, expected):
            found.append(f"{name}: its content has changed")
    return found


def manifests_among(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if _IS_MANIFEST.fullmatch(name))


def _has_changed(name: str, open_file: _Open, what: dict) -> bool:
    """Whether the content of the file differs from what a manifest says."""
    with open_file(name) as stream:
        if "crc32" in what:
            return described_file(stream) != what
        return hashlib.file_digest(stream, "sha256").hexdigest() != what["sha256"]


def _digests_of(what: dict) -> Digests | None:
    """The digests in what a manifest says of a file; None in a manifest of earlier versions."""
    if "crc32" not in what:
        return None
    sums = array("I", [int(number, 16) for number in what["crc32"].split()])
    nbytes, block = int(what["bytes"]), int(what["block"])
    if len(sums) != -(-nbytes // block):
        raise ValueError(f"{len(sums)} digests for {nbytes} bytes")
    return Digests(nbytes, block, sums)


def manifest_text(ranks: int, files: dict[str, dict]) -> str:
    """A manifest, with a digest of itself."""
    content = {"ranks": ranks, "files": files}
    return json.dumps({**content, "sha256": _digest_of(content)}, indent=1)


def _digest_of(content: dict) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def read_manifest(name: str, open_file: _Open) -> dict:
    """The manifest ``name``: ``ranks``, and ``files`` by their names.

    Raises:
        OSError: it cannot be read.
        ValueError: it has changed since it was written.
    """
    with open_file(name) as stream:
        content = json.loads(stream.read())
    if not isinstance(content, dict):
        raise ValueError(f"{name} is no manifest")
    digest = content.pop("sha256", None)
    if set(content) != {"ranks", "files"} or not isinstance(content["files"], dict):
        raise ValueError(f"{name} is no manifest")
    if digest is None and any("crc32" in what for what in content["files"].values()):
        raise ValueError(f"{name} has lost its digest")
    if digest is not None and digest != _digest_of(content):
        raise ValueError(f"{name} is not as saved")
    return content


class Manifests:
    """The manifests of a checkpoint, each read when one of its files is.

    Args:
        place: of the checkpoint, for messages.
        names: of its files.
        open_file: opens one of them.

    Attributes:
        are_there: whether the checkpoint has manifests at all.
    """

    def __init__(self, place: str, names: Iterable[str], open_file: _Open) -> None:
        self.place = place
        self.open_file = open_file
        self.are_there = bool(manifests_among(names))
        self.files: dict[str, dict[str, dict]] = {}  # by manifest, by file

    def digests(self, name: str) -> Digests | None:
        """Those of the file ``name``; None if the save has written none.

        Raises:
            DamagedCheckpoint: a manifest is missing or has changed.
        """
        if not self.are_there:
            return None
        of_rank = _OF_RANK.fullmatch(name)
        manifest = MANIFEST.format(of_rank.group(1) if of_rank else 0)
        try:
            if manifest not in self.files:
                self.files[manifest] = read_manifest(manifest, self.open_file)["files"]
            what = self.files[manifest][name]
            return _digests_of(what)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedCheckpoint(f"{self.place}/{manifest}, for {name}: {error!r}") from error


# -- files that are read in parts


class OpenFile:
    """A file of a checkpoint that is read in parts."""

    def __init__(self, path: Path, digests: Digests | None) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY)
        self.nbytes = os.fstat(self.descriptor).st_size
        self.take_digests(digests)

    def take_digests(self, digests: Digests | None) -> None:
        self.digests = digests
        self.block = digests.block if digests else 1
        if digests is not None and self.nbytes != digests.nbytes:
            self.close()
            raise DamagedCheckpoint(
                f"{self.path}: {self.nbytes} bytes, {digests.nbytes} were saved"
            )

    def close(self) -> None:
        os.close(self.descriptor)

    def read_some(self, memory: memoryview, begin: int) -> int:
        """Fill the beginning of ``memory`` with bytes from ``begin`` on; return how many."""
        return os.preadv(self.descriptor, [memory], begin)

    def read_into(self, memory: memoryview, begin: int, name: str) -> None:
        """Fill ``memory`` with the bytes from ``begin`` on: whole blocks.

        Raises:
            DamagedCheckpoint: the file ends before; it has changed since it was saved.
        """
        got = 0
        while got < len(memory):
            count = self.read_some(memory[got:], begin + got)
            if count == 0:
                end = begin + got
                raise DamagedCheckpoint(f"{self.path} ends at byte {end}, within {name}")
            got += count
        if self.digests is not None:
            self.digests.check(str(self.path), begin, memory)

    def bytes_at(self, name: str, begin: int, nbytes: int) -> bytes:
        """So many bytes from ``begin`` on, not checked."""
        data = os.pread(self.descriptor, nbytes, begin)
        if len(data) < nbytes:
            end = begin + len(data)
            raise DamagedCheckpoint(f"{self.path} ends at byte {end}, within {name}")
        return data

    def whole_blocks(self, begin: int, end: int) -> tuple[int, int]:
        """The blocks that have digests and hold the bytes from ``begin`` to ``end``.

        The file's last block may be a shorter one. Bytes wanted after the file's end are not left
        out: to read them raises.
        """
        first = begin // self.block * self.block
        last = -(-end // self.block) * self.block
        return first, min(last, max(self.nbytes, end))


class _CheckedFile(io.RawIOBase):
    """A file whose bytes are checked as they are read, for readers of a stream."""

    def __init__(self, file: OpenFile, name: str) -> None:
        self.file = file
        self.name = name
        self.at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.file.nbytes}[whence]
        self.at = start + offset
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, memory) -> int:
        memory = memoryview(memory).cast("B")
        size = min(len(memory), max(0, self.file.nbytes - self.at), PIECE)
        if size == 0:
            return 0
        begin, end = self.file.whole_blocks(self.at, self.at + size)
        if (begin, end) == (self.at, self.at + size):
            self.file.read_into(memory[:size], begin, self.name)
        else:
            data = bytearray(end - begin)
            self.file.read_into(memoryview(data), begin, self.name)
            first = self.at - begin
            memory[:size] = data[first : first + size]
        self.at += size
        return size


class CheckedFiles(FileSystem):
    """What DCP's own reader opens files with: it gets checked bytes."""

    def __init__(self, opened: dict[str, OpenFile]) -> None:
        self.opened = opened

    @contextmanager
    def create_stream(self, path, mode: str) -> Iterator[io.IOBase]:
        file = self.opened[Path(path).name]
        yield io.BufferedReader(_CheckedFile(file, "an entry"), buffer_size=file.block)


def manifests_in(directory: Path) -> Manifests:
    names = [path.name for path in directory.glob("*")]
    return Manifests(str(directory), names, lambda name: (directory / name).open("rb"))


# -- the list of contents


class _AnyProperties(TensorProperties):
    """Takes the properties of a tensor from a later torch than this one, too."""

    def __setstate__(self, state: tuple) -> None:
        try:
            super().__setstate__(state)
        except ValueError:  # this torch knows fewer
            super().__setstate__(state[:_FIELDS])
        self.__class__ = TensorProperties


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) == (TensorProperties.__module__, TensorProperties.__qualname__):
            return _AnyProperties
        return super().find_class(module, name)


def unpickled_metadata(data: bytes) -> Metadata:
    """The list of contents that ``data``, a file ``.metadata``, holds."""
    return _MetadataUnpickler(io.BytesIO(data)).load()


def metadata_of(path: str, data: bytes, manifests: Manifests) -> Metadata:
    """The list of contents that ``data``, which was read from ``path``, holds.

    Raises:
        DamagedCheckpoint: it has changed since it was saved.
        RuntimeError: it is none, or of a torch that is not known here.
    """
    digests = manifests.digests(METADATA)
    if digests is not None:
        if len(data) != digests.nbytes:
            raise DamagedCheckpoint(f"{path}: {len(data)} bytes, {digests.nbytes} were saved")
        digests.check(path, 0, memoryview(data))
    try:
        return unpickled_metadata(data)
    except Exception as error:
        raise RuntimeError(f"{path} cannot be read: {error!r}") from error
