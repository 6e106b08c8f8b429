# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/checked_files.py
"""Files of a checkpoint whose bytes are compared with the digests of the save as they are read."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata

from .digests import DamagedCheckpoint, Digests, Manifests
from .metadata import unpickled_metadata

METADATA = ".metadata"
PIECE = 8 << 20  # bytes that are read at a time; a multiple of a digest's block


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

        The file's last block may be a shorter one. Bytes wanted behind the file's end are not left
        out: to read them raises.
        """
        first = begin // self.block * self.block
        last = -(-end // self.block) * self.block
        return first, min(last, max(self.nbytes, end))


class CheckedFile(io.RawIOBase):
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
        yield io.BufferedReader(CheckedFile(file, "an entry"), buffer_size=file.block)


def manifests_in(directory: Path) -> Manifests:
    names = [path.name for path in directory.glob("*")]
    return Manifests(str(directory), names, lambda name: (directory / name).open("rb"))


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
