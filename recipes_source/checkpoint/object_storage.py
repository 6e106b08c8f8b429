# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, checkpoint/object_storage.py
"""
Checkpoints in an object store
==============================

Save straight to S3 and its like, and never load half a checkpoint from there. An object store has
no rename, no directory and no lock, so the steps of :doc:`durable_saves` do not work on it. It has
two things that are better: an object is there completely or not at all, and a write can fail if the
name is taken. This recipe builds a commit on these two. It runs on whatever fsspec (Python's
interface to remote file systems) reaches. The tests run it against an S3 server.

**When not to bother:** your storage is a mounted file system. :doc:`durable_saves` needs no client
there; copy its checkpoints to the store afterwards, and commit each copy with ``commit_once``.

.. code-block:: python

    from object_storage import ObjectSaves, committed, load
    from app_state import AppState

    app = AppState(model, optimizer)
    with ObjectSaves("s3://bucket/run", device, model.buffers) as saves:
        for step, batch in enumerate(batches, 1):
            train_step(batch)
            if step % 1000 == 0:
                saves.save({"app": app}, step)

    step = max(committed("s3://bucket/run"), default=None)  # on one rank; tell the others
    if step is not None:
        load({"app": app}, "s3://bucket/run", step)

.. code-block:: bash

    export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... AWS_ENDPOINT_URL=...
    torchrun ... train.py

Your project needs this file, ``overlapped_stager.py``, ``staging_copies.py``,
``app_state.py`` and ``state_to_save.py``.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * one commit with ``If-None-Match``, and a commit whose answer got lost
      * what a broken upload leaves, and who removes it
      * what ``FsspecWriter`` does that you do not want
      * how to keep credentials in the environment alone

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later on Linux, any number of ranks
      * ``fsspec``; for ``s3://`` also ``s3fs``, in the same version (their versions are dates)

.. verification-badge::

The idea
--------

.. lanes:: Schematic. Objects of a save are nothing until the commit names them.

   write rank 0:  0-9 upload step8.f3a1/__0_0; 12-14 step8.json
   write rank 1:  0-11 upload step8.f3a1/__1_0
   @11 all agree
   @14 committed

* Each attempt to save step 8 writes below a name of its own, ``step8.f3a1``. Two jobs that save
  the same step cannot mix their shards.
* When the objects of every rank are there, rank 0 writes ``step8.json``. It names the attempt, and
  every object with its size. **This object is the checkpoint.** Rank 0 writes it with
  ``If-None-Match: *``, so the store itself accepts one commit of step 8 and refuses the others.
* There is no pointer. To find checkpoints, list ``*.json``. S3 lists an object as soon as its
  write has been answered.
"""

# %%
# Imports and sizes
# -----------------

import argparse
import io
import json
import re
import tempfile
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import state_to_save as basic
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from overlapped_stager import OverlappedSaves

try:
    from fsspec.core import url_to_fs

    try:  # public from torch 2.15 on
        from torch.distributed.checkpoint import fsspec_filesystem as dcp_fsspec
    except ImportError:
        from torch.distributed.checkpoint import _fsspec_filesystem as dcp_fsspec
except ImportError as error:
    raise SystemExit("pip install fsspec, and for s3:// s3fs of the same date") from error

PIECE = 32 << 20  # bytes of a part of an upload; at most 10,000 parts make an object
STEPS, SAVE_EVERY = 10, 2  # of the run that proves it

# %%
# An upload that breaks must leave nothing
# ----------------------------------------
# ``FsspecWriter`` closes its files even when an exception is on its way. For an object store,
# closing means publishing: half a shard appears under the shard's name. A file that is opened with
# ``autocommit=False`` appears only when ``commit()`` is called. ``discard()`` tells the store to
# forget the parts that it has.
#
# Writing in pieces limits the memory. s3fs would otherwise hold a whole tensor. ``sync_files`` is
# off. It has no file to flush here, so DCP would call ``os.sync()``, which waits for all disks of
# the machine and sends nothing to the store.


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


# %%
# The commit
# ----------
# A client that gets no answer repeats its request. If the first request did arrive, the store
# refuses the second, and the job would take its own commit for that of another. So whenever a
# commit fails, the recipe reads it back. The attempt that it names says whose it is.
#
# Some servers that speak S3 do not know ``If-None-Match`` and accept both commits without an
# error. So the recipe first tests whether the store refuses.


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


# %%
# What is there
# -------------


def committed(url: str) -> dict[int, dict]:
    """The commits below ``url`` by their step, the newest first."""
    fs, root = open_root(url)
    names = []
    with suppress(FileNotFoundError):
        names = fs.ls(root, detail=False)
    steps = sorted(map(int, re.findall(r"/step(\d+)\.json$", "\n".join(names), re.MULTILINE)))
    return {step: json.loads(fs.cat_file(f"{root}/step{step}.json")) for step in reversed(steps)}


def load(state_dict: dict, url: str, step: int) -> None:
    """``dcp.load`` of ``step`` into ``state_dict``; every rank calls it.

    Raises:
        FileNotFoundError: objects differ from those that the commit names.
    """
    fs, root = open_root(url)
    commit = committed(url)[step]
    found = {path.rpartition("/")[2]: fs.size(path) for path in fs.find(f"{root}/{commit['data']}")}
    if wrong := commit["objects"].items() ^ found.items():
        raise FileNotFoundError(f"step {step} is not what was committed: {sorted(wrong)}")
    dcp.load(state_dict, storage_reader=dcp_fsspec.FsspecReader(f"{url}/{commit['data']}"))


# %%
# The save
# --------
# ``OverlappedSaves`` stages beside training. On its writing thread it calls ``write`` and
# ``commit``, each on all ranks when all have finished the step before. A save that fails on one
# rank fails on all. It has no commit, so there is nothing to undo.


class ObjectSaves(OverlappedSaves):
    """Overlapped saves to ``url``, each committed once.

    Raises:
        RuntimeError: on entry, on every rank, if the store cannot be reached or takes two commits.
    """

    def __init__(self, url: str, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.url = url.rstrip("/")

    def __enter__(self) -> "ObjectSaves":
        self.together(check_store, self.url)
        return super().__enter__()

    def save(self, state_dict: dict, step: int):
        """As ``OverlappedSaves.save``; the checkpoint is ``step`` below ``url``."""
        return super().save(state_dict, Path("/dev/null", f"step{step}"))  # no local directory

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
            commit_once(fs, f"{root}/{directory.name}.json", content)


# %%
# Uploads that never end
# ----------------------
# A large object is sent in parts. A job that is killed in between leaves parts that no listing
# shows, and that you pay for. Only the store can remove them, so give your bucket a rule, once
# (``aws s3api put-bucket-lifecycle-configuration``). The command replaces all rules of the bucket:
# include the old ones.
#
# .. code-block:: json
#
#     {"Rules": [{
#         "ID": "uploads that never end",
#         "Status": "Enabled",
#         "Filter": {"Prefix": "run/"},
#         "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 2}
#     }]}

# %%
# Run it, and prove it
# --------------------
# The proof saves every second step. In step 4, the state of the last rank has something that
# cannot be pickled. Step 6 is saved twice, as by a job that was started twice. Both saves must
# fail on every rank and harm nothing. By default this runs on a directory; ``--url`` takes any
# other store.


def train(app: basic.AppState, url: str, device: torch.device) -> dict[int, dict]:
    saved, uploads = {}, []
    with ObjectSaves(url, device, app.model.buffers) as saves:
        for _ in range(STEPS):
            basic.train_step(app, device)
            if app.step % SAVE_EVERY == 0:
                state = {"app": app}
                if app.step == 4 and dist.get_rank() == dist.get_world_size() - 1:
                    state["collate"] = lambda batch: batch
                saved[app.step] = basic.snapshot(app)
                uploads.append(saves.save(state, 6 if app.step == 8 else app.step))
        assert [bool(u.exception()) for u in uploads] == [False, True, False, True, False]
        saves.failures.clear()  # expected
    print(f"refused: {uploads[3].exception()}")
    return saved


def prove(url: str, device: torch.device, saved: dict[int, dict]) -> None:
    fs, root = open_root(url)
    assert list(committed(url)) == [10, 6, 2]
    for step in (10, 6, 2):
        app = basic.build_app(device, seed=1)
        load({"app": app}, url, step)
        basic.assert_same_bits(app, saved[step])
    assert not fs.glob(f"{root}/step4.*/__{dist.get_world_size() - 1}_0.distcp"), "half a shard"
    print("steps 10, 6 and 2 are whole, every bit equal")


def main(url: str) -> None:
    basic.HIDDEN = 512  # small: all of it goes through one connection
    device = basic.start_rank()
    try:
        url = str(basic.directory_of_rank_0(url))
        prove(url, device, train(basic.build_app(device), url, device))
        dist.barrier()
        if dist.get_rank() == 0:  # what the failed try has left; nobody will commit it
            fs, root = open_root(url)
            fs.rm(fs.glob(f"{root}/step4.*"), recursive=True)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", help="where checkpoints go (default: a directory)")
    parser.add_argument("--dir", type=Path, help="that directory (default: temporary)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        main(options.url or f"file://{options.dir or temporary}/store")

# %%
# What breaks if you remove a line
# --------------------------------
#
# .. recipe-controls::
#
# Against a server, the tests also kill a job during an upload, leave the commit's request
# unanswered, start two jobs at once, and give a wrong secret. A proxy before the server makes each
# request that writes fail (``SlowDown``, ``InternalError``, ``ServiceUnavailable``,
# ``RequestTimeout``), once or for good.
#
# Retries
# -------
# This recipe has none, because two layers below have them. botocore repeats a request after a
# server error. s3fs repeats one after a broken connection or ``SlowDown``. If an error outlasts
# both, the save fails on every rank. Training goes on, and the next save can succeed.
#
# What stores promise
# -------------------
# * **S3** shows an object to everyone, in listings too, as soon as the write has been answered. It
#   has known ``If-None-Match`` since 2024. SeaweedFS, the server of these tests, refuses as it
#   should.
# * **rclone's** ``serve s3`` ignores ``If-None-Match``. ``check_store`` raises, and nothing is
#   saved.
# * **Google Cloud Storage and Azure** have such conditions under other names. gcsfs and adlfs may
#   offer them behind the same ``mode="create"`` of fsspec: ``check_store`` tells you.
#
# What it costs
# -------------
# Host memory beside the staged state: the pieces in flight, about twice ``PIECE`` per rank.
# Requests: one per piece, and about ten per save. Storage: every checkpoint, and what failed
# attempts have left.
#
# Known limits
# ------------
# * This was tested on SeaweedFS and rclone. Nobody has run it on the stores of Amazon, Google or
#   Microsoft.
# * Each rank uses one connection, though a store answers many at once. Several ranks per host use
#   several.
# * Nothing is deleted here. To delete a checkpoint, delete its commit first, then its objects.
#   Objects that no commit names may go when a commit of their step or a later step exists.
# * A bucket with versioning keeps what you delete. Add a rule that ends old versions.
# * Before torch 2.15 the module of the fsspec reader and writer is private by name:
#   ``torch.distributed.checkpoint._fsspec_filesystem``. From then on its ``_FileSystem`` is.
#
# Further reading
# ---------------
# * `pytorch#183878 <https://github.com/pytorch/pytorch/issues/183878>`__: what DCP does instead of
#   a flush; `#191391 <https://github.com/pytorch/pytorch/issues/191391>`__: errors of writing
#   threads
# * `Conditional requests in S3
#   <https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-requests.html>`__
# * :doc:`durable_saves`, :doc:`retention`: the same on a file system
