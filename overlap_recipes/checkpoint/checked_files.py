# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/checked_files.py
"""Files of a checkpoint, and digests of their blocks: who reads a part can check what came.

A block's digest is its CRC-32. Where ``zlib-ng`` is installed, it makes the same bits at 20 GB/s of
an AMD EPYC's core, where the standard library makes 4.
"""

import hashlib
import io
import json
import os
import pickle
import re
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from ..crew import share

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:
    from zlib import crc32

BLOCK = 1 << 20  # bytes of a file that have one digest
MANIFEST = "manifest.{}.json"  # of each rank, in each checkpoint: its files, sizes, digests
_NO_MANIFEST = (
    "no manifest, so no CheckpointManager has written it; what dcp.save has written is loaded by "
    "load({'app': state}, directory), with another root for the manager"
)
_IS_MANIFEST = re.compile(r"manifest\.\d+\.json")
_OF_RANK = re.compile(r"__(\d+)_\d+\.distcp")
METADATA = ".metadata"
PIECE = 8 << 20  # bytes that are read at a time; a multiple of a digest's block
THREADS = 8  # sixteen with half the piece were slower on two H100s of one host
_FIELDS = 5  # of a tensor's properties up to torch 2.14; 2.15 has added the strides


class DamagedCheckpoint(RuntimeError):
    """A file of a checkpoint is not as it was saved."""


class OtherBytes(DamagedCheckpoint):
    """Bytes that say where a tensor lies are not as they were thought to be."""


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
            if crc32(content) != self.sums[(begin + at) // self.block]:
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
            self.crc = crc32(part, self.crc)
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


def faults(files: "Files", every_byte: bool = False) -> list[str]:
    """What is wrong with a checkpoint, one line per file; [] if it is complete.

    Args:
        every_byte: compare digests, too.
    """
    manifests = manifests_among(files.sizes)
    listed: dict[str, dict] = {}
    ranks = set()
    for name in manifests:
        try:
            part = read_manifest(name, files.open_file)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return [f"{name} cannot be read: {error!r}"]
        listed.update(part["files"])
        ranks.add(part["ranks"])
    if not manifests:
        return [_NO_MANIFEST]
    if ranks != {len(manifests)}:
        return [f"{len(manifests)} manifests, of a job of {ranks or 'no'} ranks"]
    found = []
    of_right_size = {}
    for name, expected in listed.items():
        if name not in files.sizes:
            found.append(f"{name}: missing")
        elif files.sizes[name] != expected.get("bytes"):
            found.append(f"{name}: {files.sizes[name]} bytes, not {expected.get('bytes')}")
        else:
            of_right_size[name] = expected
    if every_byte:
        for name in _changed(files, of_right_size):
            found.append(f"{name}: its content has changed")
    return found


def manifests_among(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if _IS_MANIFEST.fullmatch(name))


def _changed(files: "Files", listed: dict[str, dict]) -> list[str]:
    """The files whose content differs from what manifests say; threads read them all."""
    changed = set()
    digests: dict[str, Digests] = {}
    pieces: list[tuple[str, int]] = []
    for name, what in listed.items():
        if "crc32" in what:
            digests[name] = _digests_of(what)
            pieces.extend((name, begin) for begin in range(0, what["bytes"], PIECE))
        elif _sha256_of(name, files) != what["sha256"]:
            changed.add(name)

    def worker():
        memory = memoryview(bytearray(PIECE))

        def check(piece: tuple[str, int]) -> None:
            name, begin = piece
            with closing(files.open_file(name)) as file:  # a checkpoint may have too many for all
                try:
                    file.take_digests(digests[name])
                    file.read_into(memory[: file.nbytes - begin], begin, name)
                except DamagedCheckpoint:
                    changed.add(name)

        return check

    share(pieces, files.threads, worker, lambda piece: f"{files.place}/{piece[0]}")
    return sorted(changed)


def _sha256_of(name: str, files: "Files") -> str:
    """Of a file that an earlier version has written."""
    found = hashlib.sha256()
    with closing(files.open_file(name)) as file:
        for begin in range(0, file.nbytes, PIECE):
            found.update(file.bytes_at(name, begin, min(PIECE, file.nbytes - begin)))
    return found.hexdigest()


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


def read_manifest(name: str, open_file: Callable[[str], "OpenFile"]) -> dict:
    """The manifest ``name``: ``ranks``, and ``files`` by their names.

    Raises:
        OSError: it cannot be read.
        ValueError: it has changed since it was written.
    """
    with closing(open_file(name)) as file:
        content = json.loads(file.content())
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


class Files:
    """The files of a checkpoint; each manifest is read when one of its files is.

    Args:
        place: of the checkpoint, for messages.
        sizes: in bytes, by name.
        open_file: opens one of them.
        threads: that read at a time.

    Attributes:
        are_listed: whether the checkpoint has manifests at all.
    """

    def __init__(
        self,
        place: str,
        sizes: dict[str, int],
        open_file: Callable[[str], "OpenFile"],
        threads: int = THREADS,
    ) -> None:
        self.place = place
        self.sizes = sizes
        self.open_file = open_file
        self.threads = threads
        self.are_listed = bool(manifests_among(sizes))
        self.manifests: dict[str, dict[str, dict]] = {}  # by manifest, by file

    def open(self, name: str) -> "OpenFile":
        """Open a file, whose bytes are checked if the save has written digests.

        Raises:
            DamagedCheckpoint: it has another size; a manifest is missing or has changed.
        """
        digests = self.digests(name)
        file = self.open_file(name)
        try:
            file.take_digests(digests)
        except DamagedCheckpoint:
            file.close()
            raise
        return file

    def content(self, name: str) -> bytes:
        """All of a file, not checked."""
        with closing(self.open_file(name)) as file:
            return file.content()

    def digests(self, name: str) -> Digests | None:
        """Those of the file ``name``; None if the save has written none.

        Raises:
            DamagedCheckpoint: a manifest is missing or has changed.
        """
        if not self.are_listed:
            return None
        of_rank = _OF_RANK.fullmatch(name)
        manifest = MANIFEST.format(of_rank.group(1) if of_rank else 0)
        try:
            if manifest not in self.manifests:
                self.manifests[manifest] = read_manifest(manifest, self.open_file)["files"]
            what = self.manifests[manifest][name]
            return _digests_of(what)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedCheckpoint(f"{self.place}/{manifest}, for {name}: {error!r}") from error


# -- files that are read in parts


class OpenFile:
    """A file of a checkpoint that is read in parts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY)
        self.nbytes = os.fstat(self.descriptor).st_size
        self.take_digests(None)

    def take_digests(self, digests: Digests | None) -> None:
        self.digests = digests
        self.block = digests.block if digests else 1
        if digests is not None and self.nbytes != digests.nbytes:
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
        data = self.some_bytes(begin, nbytes)
        if len(data) < nbytes:
            end = begin + len(data)
            raise DamagedCheckpoint(f"{self.path} ends at byte {end}, within {name}")
        return data

    def some_bytes(self, begin: int, nbytes: int) -> bytes:
        return os.pread(self.descriptor, nbytes, begin)

    def content(self) -> bytes:
        return self.bytes_at("a file", 0, self.nbytes)

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


def files_in(directory: Path) -> Files:
    sizes = {}
    with suppress(FileNotFoundError):  # and no other error: what cannot be listed may be whole
        for path in directory.iterdir():
            if path.is_file():
                sizes[path.name] = path.stat().st_size
    return Files(str(directory), sizes, lambda name: OpenFile(directory / name))


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


def metadata_of(files: Files) -> Metadata:
    """The list of contents of a checkpoint.

    Raises:
        DamagedCheckpoint: it has changed since it was saved.
        RuntimeError: it is none, or of a torch that is not known here.
    """
    path = f"{files.place}/{METADATA}"
    digests = files.digests(METADATA)
    data = files.content(METADATA)
    if digests is not None:
        if len(data) != digests.nbytes:
            raise DamagedCheckpoint(f"{path}: {len(data)} bytes, {digests.nbytes} were saved")
        digests.check(path, 0, memoryview(data))
    try:
        return unpickled_metadata(data)
    except Exception as error:
        raise RuntimeError(f"{path} cannot be read: {error!r}") from error
