# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.1, overlap_recipes/checkpoint/object_storage.py
"""Saves to an object store, by any URL that fsspec knows; needs fsspec, and s3fs for ``s3://``."""

import io
import json
import logging
import time
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import torch
import torch.distributed.checkpoint as dcp

from .names import check_kept, name_of, refuse_below, steps_left_out, steps_of
from .saves import Job, Saves

try:
    from fsspec.core import url_to_fs

    try:  # public from torch 2.15 on
        from torch.distributed.checkpoint import fsspec_filesystem as dcp_fsspec
    except ImportError:
        from torch.distributed.checkpoint import _fsspec_filesystem as dcp_fsspec
except ImportError as error:
    raise ImportError("pip install fsspec, and for s3:// s3fs of the same date") from error

LOG = logging.getLogger(__name__)
COMMIT = ".json"  # behind a step's name: the object that makes it a checkpoint
PIECE = 32 << 20  # bytes of a part of an upload; at most 10,000 parts make an object


class Sent(io.RawIOBase):
    """Pass bytes on to ``stream`` in pieces, and count them."""

    def __init__(self, stream) -> None:
        self.stream, self.size = stream, 0

    def write(self, data) -> int:
        data = memoryview(data).cast("B")
        for start in range(0, len(data), PIECE):
            self.stream.write(data[start : start + PIECE])
        self.size += len(data)
        return len(data)

    def tell(self) -> int:
        return self.size


class Objects(getattr(dcp_fsspec, "_FileSystem", None) or dcp_fsspec.FileSystem):
    """DCP's files as objects that appear completely or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[str, int] = {}  # bytes by name

    @contextmanager
    def create_stream(self, path: str, mode: str):
        stream = self.fs.open(path, mode, block_size=PIECE, autocommit=False)
        try:
            sent = Sent(stream)
            yield sent
            stream.close()
            stream.commit()
        except BaseException:
            with suppress(Exception):
                stream.close()
                stream.discard()
            raise
        self.written[Path(path).name] = sent.size

    def rename(self, path: str, new_path: str) -> None:
        self.fs.cp_file(path, new_path)  # fs.rename takes brackets in a name for a pattern
        self.fs.rm_file(path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)

    def mkdir(self, path: str) -> None:
        """A store has no directories, and s3fs would make a bucket of a name that is mistyped."""
        if "file" in self.fs.protocol:
            super().mkdir(path)


def open_root(url: str) -> tuple:
    """The file system and the path of ``url``.

    Raises:
        ValueError: ``url`` contains credentials, which logs and process lists would show.
    """
    if urlsplit(url).username is not None:
        raise ValueError("credentials belong into the environment, not into the URL")
    fs, path = url_to_fs(url)
    fs.invalidate_cache()  # s3fs remembers listings, and would resume from an old one
    return fs, path


def commit_once(fs, path: str, content: dict) -> None:
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


def leave_probe(url: str) -> str:
    """Write an object for other ranks to look for; return its name."""
    fs, root = open_root(url)
    name = f"probe.{uuid.uuid4().hex}"
    fs.pipe_file(f"{root}/{name}", b"probe")
    return name


def sees(url: str, name: str) -> bool:
    fs, root = open_root(url)
    return fs.exists(f"{root}/{name}")


def remove(url: str, name: str) -> None:
    fs, root = open_root(url)
    fs.rm_file(f"{root}/{name}")


def check_store(url: str) -> None:
    """Check that the store accepts a write and refuses a second commit.

    Raises:
        RuntimeError: it does not refuse.
    """
    fs, root = open_root(url)
    if "file" in fs.protocol:
        fs.makedirs(root, exist_ok=True)
    probe = f"{root}/probe.{uuid.uuid4().hex}"
    commit_once(fs, probe, {"writer": 1})
    try:
        with suppress(FileExistsError):
            commit_once(fs, probe, {"writer": 2})
            raise RuntimeError("the store ignores If-None-Match: two jobs could commit one step")
    finally:
        fs.rm_file(probe)


def committed(url: str) -> list[int]:
    """The steps that have a commit below ``url``, the newest first; a torn one is a commit, too."""
    fs, root = open_root(url)
    names = []
    with suppress(FileNotFoundError):
        names = fs.ls(root, detail=False)
    commits = [name.rpartition("/")[2] for name in names if name.endswith(COMMIT)]
    steps = steps_of(name.removesuffix(COMMIT) for name in commits)
    return [step for step in steps if is_ours(fs.cat_file(commit_of(root, step)))]


def is_ours(content: bytes) -> bool:
    """Whether it is a commit, whole or torn, and no JSON of the user's own."""
    try:
        found = json.loads(content)
    except ValueError:
        return True
    return isinstance(found, dict) and found.keys() >= {"data", "objects"}


def read_commit(fs, root: str, step: int) -> dict:
    """What the commit of ``step`` says.

    Raises:
        RuntimeError: it is torn.
    """
    path = commit_of(root, step)
    try:
        return json.loads(fs.cat_file(path))
    except ValueError as error:
        raise RuntimeError(f"{path} is torn: {error}") from error


def commit_of(root: str, step: int) -> str:
    """The path of the object that makes ``step`` a checkpoint."""
    return f"{root}/{name_of(step)}{COMMIT}"


def set_aside(url: str, step: int) -> None:
    """Give the commit of ``step`` another name, under which it is no checkpoint."""
    fs, root = open_root(url)
    commit = commit_of(root, step)
    fs.cp_file(commit, f"{commit}.set-aside-{time.time_ns()}")
    fs.rm_file(commit)


def delete(url: str, step: int) -> None:
    """Delete the checkpoint of ``step``, its commit first: what is left is no checkpoint."""
    fs, root = open_root(url)
    data = read_commit(fs, root, step)["data"]
    fs.rm_file(commit_of(root, step))
    fs.rm(f"{root}/{data}", recursive=True)


def wrong_objects(url: str, step: int) -> list[str]:
    """What differs between the objects of ``step`` and those that its commit names; [] if none."""
    fs, root = open_root(url)
    try:
        commit = read_commit(fs, root, step)
    except RuntimeError as error:
        return [str(error)]
    found = {}
    for path in fs.find(f"{root}/{commit['data']}"):
        found[path.rpartition("/")[2]] = fs.size(path)
    return sorted({name for name, _ in commit["objects"].items() ^ found.items()})


def reader(url: str, step: int) -> dcp.StorageReader:
    """What ``dcp.load`` reads ``step`` with."""
    fs, root = open_root(url)
    data = read_commit(fs, root, step)["data"]
    return dcp_fsspec.FsspecReader(f"{url.rstrip('/')}/{data}")


def load(state_dict: dict, url: str, step: int) -> None:
    """``dcp.load`` of ``step`` into ``state_dict``; every rank calls it.

    Raises:
        FileNotFoundError: objects differ from those that the commit names.
    """
    wrong = wrong_objects(url, step)
    if wrong:
        raise FileNotFoundError(f"step {step} is not what was committed: {wrong}")
    dcp.load(state_dict, storage_reader=reader(url, step))


class ObjectSaves(Saves):
    """Overlapped saves to ``url``, each committed once.

    Args:
        keep_last: how many of the newest checkpoints stay; None: all.
        keep_every: steps that it divides stay, too.

    Raises:
        ValueError: nothing would be kept.
        RuntimeError: on entry, on every rank, if the store cannot be reached or takes two commits.
            In a save's future: with ``keep_last``, there is a newer step, whose run has not been
            resumed.
    """

    def __init__(
        self, url: str, *args, keep_last: int | None = None, keep_every: int = 0, **kwargs
    ) -> None:
        super().__init__(*args, **kwargs)
        if keep_last is not None:
            check_kept(keep_last, keep_every)  # now, and not at the first save
        self.url = url.rstrip("/")
        self.keep_last = keep_last
        self.keep_every = keep_every

    def __enter__(self) -> "ObjectSaves":
        self.together(check_store, self.url)
        return super().__enter__()

    def save(self, state_dict: dict, step: int):
        """As ``Saves.save``; the checkpoint is ``step`` below ``url``."""
        return super().save(state_dict, Path("/dev/null", name_of(step)))  # no local directory

    def prepare_files(self, state: dict) -> None:
        """There are none: DCP plans and writes each save."""

    def begin(self, job: Job, aside: Path) -> tuple:
        ours = super().begin(job, aside)
        if self.rank == 0 and self.keep_last is not None:
            refuse_below(committed(self.url), job.directory)
        return ours

    def write(self, state: dict, directory: Path) -> None:
        torch.serialization.set_crc32_options(False)  # nothing reads the sums
        self.data = self.together(lambda: f"{directory.stem}.{uuid.uuid4().hex[:8]}")[0]
        url, objects = f"{self.url}/{self.data}", Objects()
        writer = dcp_fsspec.FsspecWriter(url, sync_files=False, per_thread_copy_ahead=0)
        writer.fs, _ = objects, objects.init_path(url)
        group = self.groups[0] if self.groups else None
        dcp.save(state, storage_writer=writer, process_group=group, no_dist=group is None)
        self.written = self.together(lambda: objects.written)

    def commit(self, aside: Path, directory: Path) -> None:
        if self.rank == 0:
            fs, root = open_root(self.url)
            objects = {name: size for part in self.written for name, size in part.items()}
            content = {"data": self.data, "objects": objects}
            commit_once(fs, f"{root}/{directory.name}{COMMIT}", content)
            self.prune()

    def prune(self) -> None:
        """Delete what neither rule keeps; on rank 0.

        What fails is logged, whatever a store raises: the new checkpoint is there all the same.
        """
        if self.keep_last is None:
            return
        try:
            there = committed(self.url)
        except Exception as error:
            LOG.error("older steps cannot be deleted now: %s", error)
            return
        for step in steps_left_out(there, self.keep_last, self.keep_every):
            try:
                delete(self.url, step)
            except Exception as error:
                LOG.error("step %d cannot be deleted: %s", step, error)
