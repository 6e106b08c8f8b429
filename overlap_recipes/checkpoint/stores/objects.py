# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/stores/objects.py
"""Checkpoints in an object store, by any URL that fsspec knows.

``obstore`` carries ``s3://``, ``gs://`` and ``az://`` at the store's rate, several parts at a time.
Where it is not installed, and for any other URL, a package of fsspec does (``s3fs``, ``gcsfs``),
which sends one part after the other.

Below the root: ``step5.<attempt>/``, the objects of one attempt at a checkpoint; ``step5.json``,
the commit, which names the attempt, its objects and their sizes: an attempt that no commit names is
no checkpoint; ``step5.json.set-aside-<time>`` and ``step5.json.damaged-<time>``, commits that
nobody resumes; ``claim.<number>``, of the job that saves here: the highest one counts;
``probe.<name>``, for a moment.
"""

import json
import logging
import os
import re
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from urllib.parse import urlsplit

from ..checked_files import BLOCK, Digesting, Files, OpenFile, faults
from ..reader import Reader
from .store import name_of, steps_of

try:
    from fsspec.core import url_to_fs
except ImportError as error:
    raise ImportError("pip install fsspec, and for s3://, gs:// or az:// obstore") from error

try:
    from .in_parts import SCHEMES, InParts
except ImportError:  # there is no obstore
    SCHEMES = ()

LOG = logging.getLogger(__name__)
_COMMIT = ".json"  # after a step's name: the object that makes it a checkpoint
_CLAIM = re.compile(r"claim\.(\d+)")
PIECE = 8 << 20  # bytes that a store is given at a time
_PART = 32 << 20  # bytes of a part of an upload by fsspec; at most 10,000 parts make an object
_READERS = 16  # threads; one connection gives some 40 MB/s


def _file_system(url: str) -> tuple:
    """The file system of ``url``, and the path in it."""
    scheme, _, path = url.partition("://")
    if scheme in SCHEMES:
        return InParts(scheme), path
    return url_to_fs(url)


class ObjectSink:
    """An object that appears completely or not at all; see ``Sink``.

    It is sent at the end of the block, from where the buffers lie.
    """

    def __init__(self, fs, path: str) -> None:
        self.fs = fs
        self.path = path
        self.nbytes = 0
        self.buffers: list[memoryview] = []
        self.digesting = Digesting()

    def __enter__(self) -> "ObjectSink":
        return self

    def write(self, nbytes: int, buffers: Sequence) -> None:
        self.nbytes += nbytes
        for buffer in buffers:
            self.buffers.append(memoryview(buffer).cast("B"))

    def pieces(self) -> Iterator[memoryview]:
        for buffer in self.buffers:
            for start in range(0, len(buffer), PIECE):
                piece = buffer[start : start + PIECE]
                self.digesting.add(piece)
                yield piece

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            if self.fs.protocol in SCHEMES:
                self.fs.send(self.path, self.nbytes, self.pieces())
            else:
                self.send_in_turn()
        self.buffers.clear()

    def send_in_turn(self) -> None:
        stream = self.fs.open(self.path, "wb", block_size=_PART, autocommit=False)
        try:
            for piece in self.pieces():
                stream.write(piece)
            stream.close()
            stream.commit()
        except BaseException:
            with suppress(Exception):
                stream.close()
                stream.discard()
            raise

    def described(self) -> dict[str, object]:
        return self.digesting.described()


class OpenObject(OpenFile):
    """An object of a checkpoint that is read in parts."""

    def __init__(self, fs, path: str, nbytes: int) -> None:
        self.fs = fs
        self.path = path
        self.nbytes = nbytes
        self.last: tuple[int, bytes] = (0, b"")  # what was read last of small reads
        self.take_digests(None)

    def close(self) -> None:
        """There is no connection to end: each read is a request."""

    def read_some(self, memory: memoryview, begin: int) -> int:
        last_begin, last = self.last
        at = begin - last_begin
        if at >= 0 and at + len(memory) <= len(last):  # entries that lie together are read in turn
            memory[:] = last[at : at + len(memory)]
            return len(memory)
        data = self.fs.cat_file(self.path, start=begin, end=begin + len(memory))
        memory[: len(data)] = data
        if len(data) <= BLOCK:
            self.last = (begin, bytes(data))
        return len(data)

    def some_bytes(self, begin: int, nbytes: int) -> bytes:
        if nbytes == 0:  # which is no range
            return b""
        return bytes(self.fs.cat_file(self.path, start=begin, end=begin + nbytes))


class Objects:
    """An object store; see ``Store``."""

    def __init__(self, url: str) -> None:
        if urlsplit(url).username is not None:  # logs and process lists would show them
            raise ValueError("credentials belong into the environment, not into the URL")
        self.root = url.rstrip("/")
        self.fs, self.path = _file_system(self.root)
        self.claim: int | None = None
        self.commits: dict[int, bytes] = {}  # by step; a name is given once, so none changes

    def at_root(self) -> tuple:
        """The file system, and the path of the root in it."""
        self.fs.invalidate_cache()  # s3fs remembers listings, and would resume from an old one
        return self.fs, self.path

    def open(self) -> None:
        """Claim the root: the newcomer has it, and later commits of an older job raise.

        A claim outlives its job, which may have been killed; so no claim keeps a newcomer out.
        """
        fs, root = self.at_root()
        if "file" in fs.protocol:
            fs.makedirs(root, exist_ok=True)
        self.check_conditional_puts()
        who = {"host": socket.gethostname(), "process": os.getpid(), "time": time.time()}
        who["name"] = uuid.uuid4().hex  # no other claim is the same
        while self.claim is None:
            number = max(_claims_among(self.names()), default=0) + 1
            with suppress(FileExistsError):  # another job came at the same time
                _commit_once(fs, f"{root}/claim.{number}", who)
                self.claim = number
        for number in _claims_among(self.names()):
            if number < self.claim:
                with suppress(Exception):  # it counts no more
                    fs.rm_file(f"{root}/claim.{number}")

    def names(self) -> list[str]:
        """Of all that lies right below the root."""
        fs, root = self.at_root()
        try:
            paths = fs.ls(root, detail=False)
        except FileNotFoundError:
            return []
        return [path.rstrip("/").rpartition("/")[2] for path in paths]

    def check_conditional_puts(self) -> None:
        """Check that the store accepts a write and refuses a second one of the same name.

        Raises:
            RuntimeError: it does not refuse.
        """
        fs, root = self.at_root()
        probe = f"{root}/probe.{uuid.uuid4().hex}"
        _commit_once(fs, probe, {"writer": 1})
        try:
            with suppress(FileExistsError):
                _commit_once(fs, probe, {"writer": 2})
                raise RuntimeError("the store ignores If-None-Match: two jobs could commit a step")
        finally:
            fs.rm_file(probe)

    def close(self) -> None:
        """The claim stays: numbers only grow, or an older job's would count again."""
        self.claim = None

    def leave_probe(self) -> str:
        fs, root = self.at_root()
        name = f"probe.{uuid.uuid4().hex}"
        fs.pipe_file(f"{root}/{name}", b"probe")
        return name

    def sees(self, probe: str) -> bool:
        fs, root = self.at_root()
        return fs.exists(f"{root}/{probe}")

    def remove_probe(self, probe: str) -> None:
        fs, root = self.at_root()
        fs.rm_file(f"{root}/{probe}")

    def steps(self) -> list[int]:
        names = self.names()
        if self.claim is not None:
            self.refuse_if_taken(names)
        commits = [name for name in names if name.endswith(_COMMIT)]
        steps = steps_of(name.removesuffix(_COMMIT) for name in commits)
        for step in self.commits.keys() - set(steps):
            del self.commits[step]
        return [step for step in steps if self.is_commit(step)]

    def is_commit(self, step: int) -> bool:
        """Whether it is one of ours, whole or torn, and no JSON of the user's own."""
        try:
            found = json.loads(self.text_of_commit(step))
        except (FileNotFoundError, IsADirectoryError):  # gone since it was listed, or a folder
            return False
        except ValueError:
            return True
        return isinstance(found, dict) and found.keys() >= {"data", "objects"}

    def commit_of(self, step: int) -> str:
        """The path of the object that makes ``step`` a checkpoint."""
        _, root = self.at_root()
        return f"{root}/{name_of(step)}{_COMMIT}"

    def text_of_commit(self, step: int) -> bytes:
        if step not in self.commits:
            self.commits[step] = self.fs.cat_file(self.commit_of(step))
        return self.commits[step]

    def read_commit(self, step: int) -> dict:
        """What the commit of ``step`` says: ``data``, its attempt, and ``objects``, their sizes.

        Raises:
            ValueError: it is torn.
        """
        try:
            return json.loads(self.text_of_commit(step))
        except ValueError as error:
            raise ValueError(f"{self.commit_of(step)} is torn: {error}") from error

    def wrong(self, step: int, every_byte: bool = False) -> list[str]:
        try:
            commit = self.read_commit(step)
        except FileNotFoundError:
            return ["there is none"]
        except ValueError as error:
            return [str(error)]
        found = self.sizes_in(commit["data"])
        listed = commit["objects"]
        wrong = []
        for name in sorted(listed.keys() | found.keys()):
            if listed.get(name) != found.get(name):
                wrong.append(f"{name}: {found.get(name)} bytes, {listed.get(name)} committed")
        files = self.files(commit["data"], found)
        if not wrong and every_byte and files.are_listed:  # version 0.2.1 wrote no manifests
            wrong = faults(files, every_byte)
        return wrong

    def sizes(self, step: int) -> dict[str, int]:
        try:
            return self.sizes_in(self.read_commit(step)["data"])
        except ValueError:
            return {}

    def sizes_in(self, data: str) -> dict[str, int]:
        fs, root = self.at_root()
        found = {}
        for path, info in fs.find(f"{root}/{data}", detail=True).items():
            found[path.rpartition("/")[2]] = info["size"]
        return found

    def files(self, data: str, sizes: dict[str, int]) -> Files:
        """The objects of the attempt ``data``."""
        fs, root = self.at_root()

        def open_object(name: str) -> OpenObject:
            return OpenObject(fs, f"{root}/{data}/{name}", sizes[name])

        return Files(f"{self.root}/{data}", sizes, open_object, _READERS)

    def reader(self, step: int) -> Reader:
        commit = self.read_commit(step)
        files = self.files(commit["data"], commit["objects"])
        return Reader(files.place, files)

    def set_aside(self, step: int, why: str) -> None:
        fs, _ = self.at_root()
        commit = self.commit_of(step)
        fs.cp_file(commit, f"{commit}.{why}-{time.time_ns()}")
        fs.rm_file(commit)
        self.commits.pop(step, None)

    def remove(self, step: int) -> None:
        """Its commit goes first: what is left is no checkpoint."""
        fs, root = self.at_root()
        data = self.read_commit(step)["data"]
        fs.rm_file(self.commit_of(step))
        self.commits.pop(step, None)
        fs.rm(f"{root}/{data}", recursive=True)

    def unfinished(self) -> list[str]:
        """Attempts that no commit names, of steps that have none."""
        found = []
        committed = {name_of(step) for step in self.steps()}
        aside = {name.partition(_COMMIT)[0] for name in self.names() if f"{_COMMIT}." in name}
        for name in self.names():
            step, dot, attempt = name.partition(".")
            is_attempt = dot and re.fullmatch("[0-9a-f]{8}", attempt) and steps_of([step])
            if is_attempt and step not in committed | aside:
                found.append(name)
        return found

    def begin(self, step: int, nbytes: int) -> str:
        return f"{self.root}/{name_of(step)}.{uuid.uuid4().hex[:8]}"

    def join(self, place: str) -> None:
        """A store has no directories, and s3fs would make a bucket of a name that is mistyped."""
        if "file" in self.fs.protocol:
            self.fs.makedirs(self.path_of(place), exist_ok=True)

    def path_of(self, place: str) -> str:
        if not place.startswith(f"{self.root}/"):  # else a drop would delete other saves
            raise ValueError(f"{place!r} is no attempt below {self.root}")
        return self.path + place.removeprefix(self.root)

    def create(self, place: str, name: str) -> ObjectSink:
        return ObjectSink(self.fs, f"{self.path_of(place)}/{name}")

    def settle(self, place: str) -> None:
        """An object is on the storage when it has its name."""

    def commit(self, step: int, place: str, files: dict[str, int]) -> None:
        if self.claim is None:
            raise RuntimeError(f"{self.root} is closed: save inside the manager's block")
        fs, _ = self.at_root()
        content = {"data": place.rpartition("/")[2], "objects": files}
        _commit_once(fs, self.commit_of(step), content)
        self.commits[step] = json.dumps(content).encode()

    def refuse_if_taken(self, names: list[str]) -> None:
        """Raise if a later job has claimed the root, as ``names`` right below it say."""
        newest = max(_claims_among(names), default=0)
        if newest != self.claim:
            raise RuntimeError(
                f"another job has taken {self.root}, by claim.{newest}; this one's is claim."
                f"{self.claim}: end one of them, or let it use another root"
            )

    def drop(self, place: str) -> None:
        path = self.path_of(place)
        with suppress(Exception):
            self.fs.rm(path, recursive=True)


def _commit_once(fs, path: str, content: dict) -> None:
    """Write ``content`` to ``path`` unless an object of that name exists.

    Raises:
        FileExistsError: another writer was first.
    """
    data = json.dumps(content).encode()
    try:
        fs.pipe_file(path, data, mode="create")
    except Exception as error:
        fs.invalidate_cache()
        if not fs.exists(path):
            raise
        if fs.cat_file(path) != data:
            raise FileExistsError(f"{path}: another writer was first") from error


def _claims_among(names: list[str]) -> list[int]:
    found = []
    for name in names:
        claim = _CLAIM.fullmatch(name)
        if claim is not None:
            found.append(int(claim.group(1)))
    return found
