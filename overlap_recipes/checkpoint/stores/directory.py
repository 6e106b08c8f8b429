# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/stores/directory.py
"""Checkpoints in a directory that all ranks see; and a plain folder, for trainers.

Below the root: ``step5``, a checkpoint; ``step5.<attempt>.incomplete``, one that is being written,
or whose job has died; ``step5.deleted``, the same of a deletion; ``step5.set-aside-<time>`` and
``step5.damaged-<time>``, what nobody resumes; ``latest``, the name of the newest one, for people
and other programs; ``lease``, locked by the job that saves here; ``probe.<name>``, for a moment.
"""

import errno
import fcntl
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from ..checked_files import described_file, faults, files_in
from ..reader import Reader
from .store import NAME, name_of, steps_of

LOG = logging.getLogger(__name__)
_LEASE = "lease"  # in the root: locked by the job that writes here
POINTER = "latest"  # in the root: the name of the newest checkpoint, for people and other programs
_ATTEMPT = r"\.[0-9a-f]{8}"  # in the name of a save that is not complete
# What a crash can leave over: of a save, or of a deletion.
_LEFT_OVER = re.compile(rf"{NAME.pattern}({_ATTEMPT})?\.(incomplete|deleted)")
_HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)  # of a lock that another process has


def flush(path: Path) -> None:
    """Return when ``path``, a file or a directory, is on the storage."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` in one step: readers see the old content or the new."""
    aside = path.with_name(f"{path.name}.new")
    aside.write_text(text)
    flush(aside)
    aside.replace(path)
    flush(path.parent)


def _delete(path: Path, ignore_errors: bool = False) -> None:
    """Delete a directory; of a link to one the link alone."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors)


def _place_of_attempt(directory: Path) -> str:
    """Its own: a rank of an earlier job, on a host that was lost, could still write to another."""
    return f"{directory}.{uuid.uuid4().hex[:8]}.incomplete"


def refuse_unseen(place: str) -> None:
    """Raise on a rank that does not see ``place``, which rank 0 has made before.

    To make it here would part the checkpoint in two, one in each file system.
    """
    if not Path(place).is_dir():
        told = "rank 0 has made this folder, and it is not seen here: all ranks must see the root"
        raise FileNotFoundError(errno.ENOENT, told, place)


class FileSink:
    """A file in a directory, on the storage when its block ends; see ``Sink``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.at = 0
        self.stream = path.open("wb")

    def __enter__(self) -> "FileSink":
        return self

    def write(self, nbytes: int, buffers: Sequence) -> None:
        file = self.stream.fileno()
        written = os.pwritev(file, buffers, self.at)
        while written < nbytes:  # some file systems take less at a time
            rest = memoryview(b"".join(buffers))[written:]
            written += os.pwrite(file, rest, self.at + written)
        self.at += nbytes

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                os.fsync(self.stream.fileno())
        finally:
            self.stream.close()

    def described(self) -> dict[str, object]:
        with self.path.open("rb") as stream:
            return described_file(stream)


class Directory:
    """A directory that all ranks see; see ``Store``."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).absolute()
        self.latest_place: str | None = None  # of a save
        self.lease: int | None = None  # a file descriptor, which holds the lock until it is closed

    def open(self) -> None:
        self.lock()
        os.register_at_fork(after_in_child=self.close)  # each process closes its own copy
        for leftover in self.unfinished():
            try:
                _delete(self.root / leftover)
            except OSError as error:  # a rank of the job before may still write there
                LOG.warning("%s cannot be deleted: %s", leftover, error)

    def lock(self) -> None:
        """Lock the root for this process.

        Raises:
            RuntimeError: another process holds it; the file system has no locks.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        lease = os.open(self.root / _LEASE, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lease)
            if error.errno in _HELD:
                raise RuntimeError(
                    f"another job writes to {self.root}: end it or use another root"
                ) from error
            raise RuntimeError(
                f"cannot lock {self.root}: {error}. If its file system has no locks, mount it "
                f"with locks (Lustre: -o flock; NFS: version 4, or with lockd) or take another root"
            ) from error
        self.lease = lease

    def close(self) -> None:
        if self.lease is not None:
            os.close(self.lease)
            self.lease = None

    def leave_probe(self) -> str:
        name = f"probe.{uuid.uuid4().hex}"
        (self.root / name).touch()
        return name

    def sees(self, probe: str) -> bool:
        return (self.root / probe).exists()

    def remove_probe(self, probe: str) -> None:
        (self.root / probe).unlink()

    def steps(self) -> list[int]:
        if self.lease is not None:
            self.refuse_if_taken()
        return steps_of(self.names())

    def names(self) -> list[str]:
        """Of all that lies right below the root; a root that cannot be listed is not empty."""
        try:
            return os.listdir(self.root)
        except FileNotFoundError:
            return []

    def refuse_if_taken(self) -> None:
        """Raise if the file that this job has locked is no longer the one in the root."""
        path = self.root / _LEASE
        if not path.exists() or not os.path.samestat(path.stat(), os.fstat(self.lease)):
            raise RuntimeError(
                f"{path} is not the file that this job has locked: somebody has deleted it, and "
                f"another job has taken the root, or another file system is mounted there"
            )

    def wrong(self, step: int, every_byte: bool = False) -> list[str]:
        directory = self.path_of(step)
        if not directory.is_dir():
            return ["there is none"]
        return faults(files_in(directory), every_byte)

    def sizes(self, step: int) -> dict[str, int]:
        return files_in(self.path_of(step)).sizes

    def reader(self, step: int) -> Reader:
        return Reader(self.path_of(step))

    def path_of(self, step: int) -> Path:
        return self.root / name_of(step)

    def set_aside(self, step: int, why: str) -> None:
        """The pointer then names the newest that is left."""
        directory = self.path_of(step)
        directory.rename(f"{directory}.{why}-{time.time_ns()}")
        pointer = self.root / POINTER
        if pointer.exists() and pointer.read_text() == name_of(step):
            for older in self.steps():
                if not self.wrong(older):
                    write_durably(pointer, name_of(older))
                    break

    def remove(self, step: int) -> None:
        doomed = self.root / f"{name_of(step)}.deleted"
        self.path_of(step).rename(doomed)
        flush(self.root)
        _delete(doomed)

    def unfinished(self) -> list[str]:
        return [name for name in self.names() if _LEFT_OVER.fullmatch(name)]

    def begin(self, step: int, nbytes: int) -> str:
        if self.latest_place is not None:
            self.drop(self.latest_place)  # left by a commit that failed
        free = shutil.disk_usage(self.root).free
        if free < nbytes:
            raise OSError(errno.ENOSPC, f"{nbytes} bytes to write, {free} free", str(self.root))
        self.latest_place = _place_of_attempt(self.path_of(step))
        Path(self.latest_place).mkdir()
        return self.latest_place

    def join(self, place: str) -> None:
        refuse_unseen(place)

    def create(self, place: str, name: str) -> FileSink:
        return FileSink(Path(place, name))

    def settle(self, place: str) -> None:
        flush(Path(place))

    def commit(self, step: int, place: str, files: dict[str, int]) -> None:
        if self.lease is None:  # another job may have the root
            raise RuntimeError(f"{self.root} is closed: save inside the manager's block")
        directory = self.path_of(step)
        Path(place).rename(directory)
        flush(self.root)
        write_durably(self.root / POINTER, directory.name)

    def drop(self, place: str) -> None:
        shutil.rmtree(place, ignore_errors=True)


class Folder:
    """A directory for one save, with a name of the caller's own; see ``Target``.

    A checkpoint that is there is replaced, if it has no other files than the new one. Until then
    this one is in ``<directory>.<attempt>.incomplete``.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.name = str(directory)
        self.place = ""  # until this rank has joined
        self.sinks: dict[str, FileSink] = {}

    def begin(self, nbytes: int) -> str:
        parent = self.directory.parent
        parent.mkdir(parents=True, exist_ok=True)
        left_over = re.compile(rf"{re.escape(self.directory.name)}{_ATTEMPT}\.incomplete")
        for path in list(parent.iterdir()):
            if left_over.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)  # of a job that died, or wrote till now
        self.place = _place_of_attempt(self.directory)
        Path(self.place).mkdir()
        return self.place

    def join(self, place: str) -> None:
        refuse_unseen(place)
        self.place = place

    def create(self, name: str) -> FileSink:
        path = Path(self.place, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.sinks[name] = FileSink(path)
        return self.sinks[name]

    def finish(self, rank: int, ranks: int) -> dict[str, int]:
        for folder in {sink.path.parent for sink in self.sinks.values()}:
            flush(folder)
        return {name: sink.at for name, sink in self.sinks.items()}

    def commit(self, files: dict[str, int]) -> None:
        older = Path(f"{self.directory}.replaced")
        if _is_checkpoint_of_same_files(self.directory, Path(self.place)):
            _delete(older, ignore_errors=True)
            self.directory.rename(older)
        Path(self.place).rename(self.directory)
        _delete(older, ignore_errors=True)

    def abort(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)  # a full disk needs the room


def _is_checkpoint_of_same_files(older: Path, newer: Path) -> bool:
    """Whether ``older`` is a checkpoint, and has no file that ``newer`` lacks but shards."""
    has_shards = False
    others = set()
    for path in older.rglob("*"):
        if path.suffix == ".distcp":
            has_shards = True
        else:
            others.add(path.name)
    return has_shards and ".metadata" in others and others <= {x.name for x in newer.rglob("*")}
