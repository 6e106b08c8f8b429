# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.1, checkpoint/object_storage.py
"""
Checkpoints in an object store
==============================

Save straight to S3 and its like, and never load half a checkpoint from there. An object store has
no rename, no directory and no lock, so the steps of :doc:`keep_verify_prune` do not work on it. It has
two things that are better: an object is there completely or not at all, and a write can fail if the
name is taken. This recipe builds a commit on these two. It runs on whatever fsspec (Python's
interface to remote file systems) reaches. The tests run it against an S3 server.

**When not to bother:** your storage is a mounted file system. :doc:`keep_verify_prune` needs no client
there; copy its checkpoints to the store afterwards, and commit each copy with ``commit_once``.

.. code-block:: python

    from overlap_recipes.checkpoint import AppState
    from overlap_recipes.checkpoint.object_storage import ObjectSaves, committed, load

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

Your project needs the package ``overlap_recipes``: ``pip install .`` in this repository, or a copy
of its folder ``overlap_recipes``.

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
# The imports are the proof's. The rest is the module's.
#
# .. literalinclude:: /overlap_recipes/checkpoint/object_storage.py
#    :language: python
#    :start-at: try:
#    :end-at: PIECE = 32 << 20

import argparse
import tempfile
from pathlib import Path

import _toys as basic
import torch
import torch.distributed as dist

from overlap_recipes.checkpoint.object_storage import ObjectSaves, committed, load, open_root

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
#
# .. literalinclude:: /overlap_recipes/checkpoint/object_storage.py
#    :language: python
#    :pyobject: Sent
#
# .. literalinclude:: /overlap_recipes/checkpoint/object_storage.py
#    :language: python
#    :pyobject: Objects
#
# The commit
# ----------
# A client that gets no answer repeats its request. If the first request did arrive, the store
# refuses the second, and the job would take its own commit for that of another. So whenever a
# commit fails, the recipe reads it back. The attempt that it names says whose it is.
#
# Some servers that speak S3 do not know ``If-None-Match`` and accept both commits without an
# error. So the recipe first tests whether the store refuses.
#
# .. literalinclude:: /overlap_recipes/checkpoint/object_storage.py
#    :language: python
#    :pyobject: open_root
#
# .. literalinclude:: /overlap_recipes/checkpoint/object_storage.py
#    :language: python
#    :pyobject: commit_once
#
# .. literalinclude:: /overlap_recipes/checkpoint/object_storage.py
#    :language: python
#    :pyobject: check_store
#
# What is there
# -------------
#
# .. literalinclude:: /overlap_recipes/checkpoint/object_storage.py
#    :language: python
#    :pyobject: committed
#
# .. literalinclude:: /overlap_recipes/checkpoint/object_storage.py
#    :language: python
#    :pyobject: load
#
# The save
# --------
# ``Saves`` stages beside training. On its writing thread it calls ``write`` and
# ``commit``, each on all ranks when all have finished the step before. A save that fails on one
# rank fails on all. It has no commit, so there is nothing to undo.
#
# .. literalinclude:: /overlap_recipes/checkpoint/object_storage.py
#    :language: python
#    :pyobject: ObjectSaves
#
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
#
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
    assert committed(url) == [10, 6, 2]
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
# Requests: one per piece, and about ten per save. Storage: every checkpoint that is kept, and what failed
# attempts have left.
#
# Known limits
# ------------
# * This was tested on SeaweedFS and rclone. Nobody has run it on the stores of Amazon, Google or
#   Microsoft.
# * Each rank uses one connection, though a store answers many at once. Several ranks per host use
#   several.
# * Without ``keep_last=`` nothing is deleted. To delete a checkpoint, delete its commit first, then its
#   objects. What failed attempts have left stays: objects that no commit names may go when a commit of
#   their step or a later step exists.
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
# * :doc:`keep_verify_prune`: the same on a file system
