# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, checkpoint/object_storage.py
"""
Checkpoints in an object store
==============================

An object store has no rename, no directory and no lock, so the steps that make files durable do not
carry over. It has two better things: an object is there whole or not at all, and a write can be told
to fail if the name is taken. This recipe builds a commit on these two. It runs on whatever fsspec
reaches; the tests run it against an S3 server.

.. code-block:: python

    from object_storage import ObjectSaves, committed, load

    with ObjectSaves("s3://bucket/run", device, model.buffers()) as saves:
        for step, batch in enumerate(data):
            train_step(batch)
            if step % 1000 == 0:
                saves.save({"app": app}, step)

    step = max(committed("s3://bucket/run"), default=None)  # on one rank; tell the others
    load({"app": app}, "s3://bucket/run", step)

.. code-block:: bash

    export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... AWS_ENDPOINT_URL=...
    torchrun ... train.py

If your storage is a mounted file system, take :doc:`durable_saves`: it is faster and needs no client.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * one commit by ``If-None-Match``, and a commit whose answer was lost
      * what a broken upload leaves, and who removes it
      * what ``FsspecWriter`` does that you do not want
      * credentials that stand nowhere but in the environment

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks
      * ``fsspec``, and for ``s3://`` a release of ``s3fs`` of the same date
      * ``overlapped_stager.py`` of this folder

.. verification-badge::

The idea
--------

.. lanes:: Schematic. Objects of a save are nothing until the commit names them.

   write rank 0:  0-9 upload step8.f3a1/__0_0; 12-14 step8.json
   write rank 1:  0-11 upload step8.f3a1/__1_0
   @11 all agree
   @14 committed

* Each try to save step 8 writes below a name of its own, ``step8.f3a1``. Two jobs that save the same
  step, or one that was started twice, cannot mix their shards.
* When every rank's objects are there, rank 0 writes ``step8.json``: which try it was, and every
  object with its size. **This object is the checkpoint.** It is written with
  ``If-None-Match: *``, so the store itself lets one commit of step 8 through and refuses the others.
* There is no pointer. A store that lists what was written (S3 does, at once) is asked for ``*.json``.
"""

# %%
# Imports and sizes
# -----------------

import argparse
import io
import json
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
    from fsspec.implementations.local import LocalFileSystem
    from torch.distributed.checkpoint import _fsspec_filesystem as dcp_fsspec
except ImportError as error:
    raise SystemExit("pip install fsspec, and for s3:// s3fs of the same date") from error

PIECE = 32 << 20  # bytes of a part of an upload; at most 10,000 parts make an object
STEPS, SAVE_EVERY = 10, 2  # of the run that proves it

# %%
# An upload that breaks must leave nothing
# ----------------------------------------
# ``FsspecWriter`` leaves its files by ``close()``, also when an exception is on its way, and for an
# object store to close is to publish: half a shard appears under the shard's name. Opened with
# ``autocommit=False``, an object appears by ``commit()`` alone, and ``discard()`` tells the store to
# forget the parts that it has.
#
# Pieces bound the memory: s3fs holds a whole tensor otherwise. ``sync_files`` is off: where there is no
# file to flush, DCP calls ``os.sync()``, which waits for all disks of the machine and sends nothing.


class Sent(io.RawIOBase):
    """Passes bytes on to ``stream`` in pieces, and counts them."""

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


class Objects(dcp_fsspec.FileSystem):
    """DCP's files as objects that appear whole or not at all."""

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
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)

    def mkdir(self, path: str) -> None:
        """A store has no directories, and s3fs would make a bucket of a name that is mistyped."""
        if isinstance(self.fs, LocalFileSystem):
            super().mkdir(path)


# %%
# The commit
# ----------
# A client that gets no answer asks again. If the first request had arrived after all, the second is
# refused, and the job would take its own commit for somebody else's. So a commit that failed, in
# whatever way, is read back: the try that it names says whose it is.
#
# Not every server that speaks S3 knows ``If-None-Match``; one that does not lets both writers through
# without a word. So the first thing to do with a store is to ask it to refuse.


def open_root(url: str) -> tuple:
    """The file system and the path of ``url``.

    Raises:
        ValueError: there are credentials in ``url``, where every log and process list has them.
    """
    if urlsplit(url).username is not None:
        raise ValueError("credentials belong into the environment, not into the URL")
    fs, path = url_to_fs(url)
    fs.invalidate_cache()  # s3fs remembers listings, and would resume from an old one
    return fs, path


def commit_once(fs, path: str, content: dict) -> None:
    """Write ``content`` to ``path`` unless there is something.

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
    """See that the store can be written to and refuses a second commit.

    Raises:
        RuntimeError: it does not refuse.
    """
    fs, root = open_root(url)
    if isinstance(fs, LocalFileSystem):
        fs.makedirs(root, exist_ok=True)
    probe = f"{root}/probe.{uuid.uuid4().hex}"
    commit_once(fs, probe, {"writer": 1})
    try:
        commit_once(fs, probe, {"writer": 2})
    except FileExistsError:
        return
    finally:
        fs.rm_file(probe)
    raise RuntimeError("the store ignores If-None-Match: two jobs could commit the same step")


# %%
# What is there
# -------------


def committed(url: str) -> dict[int, dict]:
    """The commits below ``url`` by their step, the newest first."""
    fs, root = open_root(url)
    names = [path.rpartition("/")[2] for path in fs.glob(f"{root}/step*.json")]
    steps = sorted((int(name[len("step") : -len(".json")]) for name in names), reverse=True)
    return {step: json.loads(fs.cat_file(f"{root}/step{step}.json")) for step in steps}


def load(state_dict: dict, url: str, step: int) -> None:
    """``dcp.load`` of ``step`` into ``state_dict``; every rank calls it.

    Raises:
        FileNotFoundError: objects that the commit names are gone, or others.
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
# ``OverlappedSaves`` stages beside training, and calls ``write`` and ``commit`` on its writing thread,
# each on all ranks when all have done the step before. A save that fails on one rank fails on all; it
# has no commit, so there is nothing to undo.


class ObjectSaves(OverlappedSaves):
    """Overlapped saves to ``url``, each committed once.

    Raises:
        RuntimeError: on entry, on every rank: the store cannot be reached, or not be trusted.
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
        torch.serialization.set_crc32_options(False)  # the digest does what the sums would
        own = f"{directory.stem}.{uuid.uuid4().hex[:8]}"
        self.data = self.together(lambda: own)[0]
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
# A large object is sent in parts. A job that is killed in between leaves parts that no listing shows
# and every bill does. Only the store can know that nobody will end that upload: give its bucket a
# rule, once (``aws s3api put-bucket-lifecycle-configuration``; it replaces all rules of the bucket, so
# put the old ones into it again):
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
# A loop that saves every second step. In step 4 the state of the last rank has something that cannot
# be pickled; step 6 is saved twice, as by a job that was started twice. Both saves fail on every rank
# and harm nothing. By default this runs on a directory; ``--url`` takes any other store.


def train(app: basic.AppState, url: str, device: torch.device) -> dict[int, dict]:
    saved, uploads = {}, []
    with ObjectSaves(url, device, app.model.buffers()) as saves:
        for _ in range(STEPS):
            basic.train_step(app, device)
            if app.step % SAVE_EVERY == 0:
                state = {"app": app}
                if app.step == 4 and dist.get_rank() == dist.get_world_size() - 1:
                    state["collate"] = lambda batch: batch
                saved[app.step] = basic.snapshot(app)
                uploads.append(saves.save(state, 6 if app.step == 8 else app.step))
        failed = [upload.exception() is not None for upload in uploads]
        saves.failures.clear()  # they were to fail
    assert failed == [False, True, False, True, False], failed
    print(f"refused: {uploads[3].exception()}")
    return saved


def prove(url: str, device: torch.device, saved: dict[int, dict]) -> None:
    fs, root = open_root(url)
    commits = committed(url)
    assert list(commits) == [10, 6, 2]
    for step in commits:
        app = basic.build_app(device, seed=1)
        load({"app": app}, url, step)
        basic.assert_same_bits(app, saved[step])
    failed = f"{root}/step4.*/__{dist.get_world_size() - 1}_0.distcp"
    assert not fs.glob(failed), "half a shard was published"
    print(f"steps {list(commits)} are whole, every bit equal")


def main(url: str) -> None:
    basic.HIDDEN = 512  # small: all of it goes through one connection
    device = basic.start_rank()
    try:
        url = str(basic.directory_of_rank_0(url))
        saved = train(basic.build_app(device), url, device)
        prove(url, device, saved)
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
# Against a server, the tests also cut uploads with a kill, answer the commit's request with silence,
# refuse requests with ``503 Slow Down``, start two jobs at once, and give a wrong secret.
#
# Retries
# -------
# There are none in this recipe, for two layers below have them: botocore repeats a request that met a
# server error, s3fs one that met a broken connection or ``SlowDown``. What outlasts them fails the
# save, on every rank; training goes on and the next save is taken.
#
# What stores promise
# -------------------
# * **S3** shows an object to all as soon as the write has been answered, in listings too, and knows
#   ``If-None-Match`` since 2024. SeaweedFS refuses as it should, the test that this page rests on.
# * **rclone's** ``serve s3`` ignores ``If-None-Match``: ``check_store`` says so, and nothing is saved.
# * **Google Cloud Storage and Azure** have conditions of other names, behind the same
#   ``mode="create"`` of fsspec where gcsfs and adlfs know it: ``check_store`` tells.
#
# When it is not worth it
# -----------------------
# * The job writes to a shared file system anyway. Save there, and let a copy of each checkpoint
#   go to the store in its own time: commit it there with ``commit_once`` all the same.
#
# What it costs
# -------------
# Host memory beside the staged state: the pieces in hand, about twice ``PIECE`` a rank. Requests: one
# a piece, and about ten a save. Storage: every checkpoint, and what failed tries have left.
#
# Known limits
# ------------
# * Tested on SeaweedFS and rclone; nobody has run this on the stores of Amazon, Google or Microsoft.
# * One connection a rank. A store answers many at once; several ranks a host use several.
# * Nothing is deleted here. Delete the commit first, then its objects; objects that no commit names may
#   go when a commit of their step or a later one is there.
# * A bucket with versions keeps what is deleted: add a rule that ends old versions.
# * ``torch.distributed.checkpoint._fsspec_filesystem`` is private by name. It is where torch keeps its
#   fsspec reader and writer from 2.1 on.
#
# Further reading
# ---------------
# * `pytorch#183878 <https://github.com/pytorch/pytorch/issues/183878>`__: what DCP does instead of a
#   flush; `#191391 <https://github.com/pytorch/pytorch/issues/191391>`__: errors of writing threads
# * `Conditional requests in S3
#   <https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-requests.html>`__
# * :doc:`durable_saves`, :doc:`retention`: the same on a file system
