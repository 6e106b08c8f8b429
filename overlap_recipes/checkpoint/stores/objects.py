# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/stores/objects.py
"""Checkpoints in an object store, by any URL that fsspec knows; ``s3://`` needs s3fs.

Below the root: ``step5.<attempt>/``, the objects of one attempt at a checkpoint; ``step5.json``,
the commit, which names the attempt, its objects and their sizes: an attempt that no commit names is
no checkpoint; ``step5.json.set-aside-<time>`` and ``step5.json.damaged-<time>``, commits that
nobody resumes; ``claim.<number>``, of the job that saves here: the highest one counts;
``probe.<name>``, for a moment.
"""

import io
import json
import logging
import os
import re
import socket
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from urllib.parse import urlsplit

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from ..checked_files import (
    METADATA,
    CheckedFiles,
    Digesting,
    Digests,
    Manifests,
    OpenFile,
    faults,
    manifests_among,
    metadata_of,
)
from .store import name_of, steps_of

try:
    from fsspec.core import url_to_fs

    try:  # public from torch 2.15 on
        from torch.distributed.checkpoint import fsspec_filesystem as dcp_fsspec
    except ImportError:
        from torch.distributed.checkpoint import _fsspec_filesystem as dcp_fsspec
except ImportError as error:
    raise ImportError("pip install fsspec, and for s3:// s3fs of the same date") from error

LOG = logging.getLogger(__name__)
_COMMIT = ".json"  # after a step's name: the object that makes it a checkpoint
_CLAIM = re.compile(r"claim\.(\d+)")
PIECE = 32 << 20  # bytes of a part of an upload; at most 10,000 parts make an object


class ObjectSink:
    """An object that appears completely or not at all; see ``Sink``."""

    def __init__(self, fs, path: str) -> None:
        self.stream = fs.open(path, "wb", block_size=PIECE, autocommit=False)
        self.digesting = Digesting()

    def __enter__(self) -> "ObjectSink":
        return self

    def write(self, nbytes: int, buffers: Sequence) -> None:
        for buffer in buffers:
            data = memoryview(buffer).cast("B")
            self.digesting.add(data)
            for start in range(0, len(data), PIECE):
                self.stream.write(data[start : start + PIECE])

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            self.discard()
            return
        try:
            self.stream.close()
            self.stream.commit()
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        with suppress(Exception):
            self.stream.close()
            self.stream.discard()

    def described(self) -> dict[str, object]:
        return self.digesting.described()


class Objects:
    """An object store; see ``Store``."""

    def __init__(self, url: str) -> None:
        if urlsplit(url).username is not None:  # logs and process lists would show them
            raise ValueError("credentials belong into the environment, not into the URL")
        self.root = url.rstrip("/")
        self.claim: int | None = None

    def at_root(self) -> tuple:
        """The file system, and the path of the root in it."""
        fs, path = url_to_fs(self.root)
        fs.invalidate_cache()  # s3fs remembers listings, and would resume from an old one
        return fs, path

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
            number = max(self.claims(), default=0) + 1
            with suppress(FileExistsError):  # another job came at the same time
                _commit_once(fs, f"{root}/claim.{number}", who)
                self.claim = number
        for number in self.claims():
            if number < self.claim:
                with suppress(Exception):  # it counts no more
                    fs.rm_file(f"{root}/claim.{number}")

    def claims(self) -> list[int]:
        found = []
        for name in self.names():
            claim = _CLAIM.fullmatch(name)
            if claim is not None:
                found.append(int(claim.group(1)))
        return found

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
        fs, root = self.at_root()
        commits = [name for name in self.names() if name.endswith(_COMMIT)]
        steps = steps_of(name.removesuffix(_COMMIT) for name in commits)
        return [step for step in steps if _is_ours(fs.cat_file(self.commit_of(step)))]

    def commit_of(self, step: int) -> str:
        """The path of the object that makes ``step`` a checkpoint."""
        _, root = self.at_root()
        return f"{root}/{name_of(step)}{_COMMIT}"

    def read_commit(self, step: int) -> dict:
        """What the commit of ``step`` says: ``data``, its attempt, and ``objects``, their sizes.

        Raises:
            ValueError: it is torn.
        """
        fs, _ = self.at_root()
        path = self.commit_of(step)
        try:
            content = json.loads(fs.cat_file(path))
        except ValueError as error:
            raise ValueError(f"{path} is torn: {error}") from error
        return content

    def wrong(self, step: int, every_byte: bool = False) -> list[str]:
        try:
            commit = self.read_commit(step)
        except ValueError as error:
            return [str(error)]
        found = self.sizes(step)
        listed = commit["objects"]
        wrong = []
        for name in sorted(listed.keys() | found.keys()):
            if listed.get(name) != found.get(name):
                wrong.append(f"{name}: {found.get(name)} bytes, {listed.get(name)} committed")
        if not wrong and every_byte and manifests_among(found):  # version 0.2.1 wrote none
            wrong = faults(found, self.opener(commit["data"]), every_byte)
        return wrong

    def sizes(self, step: int) -> dict[str, int]:
        fs, root = self.at_root()
        try:
            data = self.read_commit(step)["data"]
        except ValueError:
            return {}
        found = {}
        for path, info in fs.find(f"{root}/{data}", detail=True).items():
            found[path.rpartition("/")[2]] = info["size"]
        return found

    def opener(self, data: str):
        """What opens an object of the attempt ``data``, by its name."""
        fs, root = self.at_root()

        def open_object(name: str):
            return fs.open(f"{root}/{data}/{name}", "rb")

        return open_object

    def reader(self, step: int) -> "ObjectReader":
        data = self.read_commit(step)["data"]
        names = self.sizes(step)
        return ObjectReader(f"{self.root}/{data}", names, self.opener(data))

    def set_aside(self, step: int, why: str) -> None:
        fs, _ = self.at_root()
        commit = self.commit_of(step)
        fs.cp_file(commit, f"{commit}.{why}-{time.time_ns()}")
        fs.rm_file(commit)

    def remove(self, step: int) -> None:
        """Its commit goes first: what is left is no checkpoint."""
        fs, root = self.at_root()
        data = self.read_commit(step)["data"]
        fs.rm_file(self.commit_of(step))
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
        self.refuse_if_taken()
        return f"{self.root}/{name_of(step)}.{uuid.uuid4().hex[:8]}"

    def join(self, place: str) -> None:
        """A store has no directories, and s3fs would make a bucket of a name that is mistyped."""
        fs, path = url_to_fs(place)
        if "file" in fs.protocol:
            fs.makedirs(path, exist_ok=True)

    def create(self, place: str, name: str) -> ObjectSink:
        fs, path = url_to_fs(place)
        return ObjectSink(fs, f"{path}/{name}")

    def settle(self, place: str) -> None:
        """An object is on the storage when it has its name."""

    def commit(self, step: int, place: str, files: dict[str, int]) -> None:
        self.refuse_if_taken()
        fs, _ = self.at_root()
        content = {"data": place.rpartition("/")[2], "objects": files}
        _commit_once(fs, self.commit_of(step), content)

    def refuse_if_taken(self) -> None:
        """Raise if a later job has claimed the root."""
        newest = max(self.claims(), default=0)
        if newest != self.claim:
            raise RuntimeError(
                f"another job has taken {self.root}, by claim.{newest}; this one's is claim."
                f"{self.claim}: end one of them, or let it use another root"
            )

    def drop(self, place: str) -> None:
        fs, path = url_to_fs(place)
        with suppress(Exception):
            fs.rm(path, recursive=True)


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


def _is_ours(content: bytes) -> bool:
    """Whether it is a commit, whole or torn, and no JSON of the user's own."""
    try:
        found = json.loads(content)
    except ValueError:
        return True
    return isinstance(found, dict) and found.keys() >= {"data", "objects"}


class _OpenObject(OpenFile):
    """An object of a checkpoint that is read in parts."""

    def __init__(self, path: str, stream: io.IOBase, digests: Digests | None) -> None:
        self.path = path
        self.stream = stream
        self.nbytes = stream.seek(0, os.SEEK_END)
        self.take_digests(digests)

    def close(self) -> None:
        self.stream.close()

    def read_some(self, memory: memoryview, begin: int) -> int:
        self.stream.seek(begin)
        return self.stream.readinto(memory)


class ObjectReader(dcp_fsspec.FsspecReader):
    """Reads a checkpoint of an object store as DCP does; its bytes are checked where the save has
    written digests.

    Raises:
        DamagedCheckpoint: from a read: an object has changed since it was saved.
    """

    def __init__(self, url: str, names: Sequence[str], open_object) -> None:
        super().__init__(url)
        self.open_object = open_object
        self.manifests = Manifests(url, names, open_object)

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        with self.open_object(METADATA) as stream:
            data = stream.read()
        return metadata_of(f"{self.path}/{METADATA}", data, self.manifests)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        own = self.fs
        with ExitStack() as closing:
            self.fs = CheckedFiles(self.opened(plan, closing))
            try:
                return super().read_data(plan, planner)
            finally:
                self.fs = own

    def opened(self, plan: LoadPlan, closing: ExitStack) -> dict[str, _OpenObject]:
        found: dict[str, _OpenObject] = {}
        for item in plan.items:
            name = self.storage_data[item.storage_index].relative_path
            if name not in found:
                stream = closing.enter_context(self.open_object(name))
                path = f"{self.path}/{name}"
                found[name] = _OpenObject(path, stream, self.manifests.digests(name))
        return found
