# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, checkpoint/overlapped_stager.py
"""
Save beside training: one call
==============================

Save checkpoints while training goes on, with one call. ``OverlappedSaves`` copies the state to
page-locked memory during the next forward and backward, even if your loop calls ``loss.item()``.
A thread writes the copy. A directory gets its final name only when the checkpoint in it is complete.

.. result-gain:: checkpoint_stall
   :rows: overlapped_writer torch_checkpointing none
   :field: staging_cost_s
   :where: model=llama-1b step=long loop=reads compiled=no storage=memory

The row ``overlapped_writer`` is of :doc:`overlapped_writer`, which stages with this recipe and
writes faster. ``torch_checkpointing`` is a package that stages in the background. ``none`` is the
same measurement without a save: the noise.

**When not to bother:** your state is a few megabytes, you save once an hour (:doc:`async_save`
costs next to nothing then), or the host cannot spare two copies of each rank's shards.

.. code-block:: python

   from pathlib import Path

   from kept_state import TrainingState
   from overlapped_stager import OverlappedSaves

   app = TrainingState(model, optimizer, schedule=scheduler)
   root = Path("checkpoints")
   with OverlappedSaves(device, model.buffers) as saves:
       for step, batch in enumerate(batches, scheduler.last_epoch + 1):
           train_step(batch)  # ends with optimizer.step(), scheduler.step(); loss.item() after save
           if step % 100 == 0:
               saves.save({"app": app}, root / f"step{step}")

Your project needs this file, ``staging_copies.py``, :doc:`kept_state.py <kept_state>`, and
``app_state.py``; the others are for the proof.
``device`` is the rank's, such as ``torch.device("cuda", local_rank)``. To resume, call
``dcp.load({"app": app}, checkpoint_id=root / "step100")`` before the block; :doc:`retention` finds
the newest.

**Does anything but an optimizer's** ``step`` **write what you save**, such as an average of weights
(its update or its swap), a load, a CUDA graph, or another method of the optimizer (SAM's first step,
ScheduleFree's ``eval``)? Call ``saves.before_update()`` before it. Otherwise the checkpoint can hold
some tensors from before the change and some from after it, and nothing reports that.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * which four orderings a correct overlapped save needs, and what breaks without each
      * how all ranks agree that a checkpoint is complete, and why ``.metadata`` does not say so
      * how to end by an exception without a hang and without a wrong checkpoint

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later on Linux, any number of ranks, CPU or GPU
      * page-locked host memory for two copies of each rank's shards
      * one file system that all ranks see

.. verification-badge::

The idea
--------

:doc:`staging_copies` moves the bytes. Four orderings make that a *correct* save:

.. lanes:: Schematic. The copy after step 1 runs beside the next forward and backward; the write beside all that follows.

   compute:  0-6 step 1; 6-14 forward, backward; 14-16 update 2; 16-24 forward, backward; 24-26 update 3
   copy:     6-12 to arena A ~; 26-32 to arena B ~
   write:    12-28 write state 1 ~; 32-40 write state 3 ~
   @6 1: the copy waits for the step
   @14 2: the next update waits for the copy

1. **Copy after step**: the copies wait for an event that is recorded after ``optimizer.step()``.
2. **Update after copy**: within the ``with`` block, a hook before every optimizer's step waits until
   the copies are launched, then makes the GPU wait until the state has been read.
3. **Forward after snapshot**: buffers that forward changes are copied on the device first.
4. **Refill after write**: host memory is filled again only when its write has ended.

In the loop, the training thread waits for storage in two cases: writing a checkpoint takes longer
than the time between two saves (``if_busy="skip"`` then leaves a save out), or a tensor of
the state has moved. At its end, the ``with`` block waits for all writes.

A checkpoint is first written to ``step100.incomplete``. When all ranks have written their part,
rank 0 renames the directory. **Trust the name, not** ``.metadata``. If the process group is
destroyed while a stock ``async_save`` is being written, each rank takes itself for the only one
and writes over the files of the others. The result has a ``.metadata``, loads without an error,
and is wrong.
"""

# %%
# Imports
# -------

import argparse
import logging
import shutil
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from app_state import is_staged, read, walk
from staging_copies import CopyPlan, PinnedArena
from torch.optim.optimizer import register_optimizer_step_pre_hook

BUFFER_SETS = 2  # arenas of host memory: one is filled while the other is written
DEADLINE_S = 600.0  # how long a thread waits for the other ranks
EXIT_S = 30.0  # how long the end of the block waits for a write after an exception


# %%
# The save
# --------
# ``save`` runs on the training thread. It reads whatever is not on the device, checks that the plan
# still fits, and launches the snapshots. A thread launches the copies; each launch releases the
# interpreter's lock. Another waits until they have arrived, and writes. Both are told their device:
# a new thread would open a context on the first.
#
# ``together`` runs a function on all ranks, and raises on all of them if it failed on one. A full
# disk, memory that the driver refuses to lock, or a state that one rank cannot stage costs that
# checkpoint and nothing else. The error is logged when it happens, and stored in that save's
# future. ``saves.wait()`` and the end of the block raise the first. Training and later saves
# continue.
#
# If an exception leaves the ``with`` block, no further write starts, and the current one gets
# ``EXIT_S`` seconds. The training thread calls no collective then: the other ranks may never join it.
# The writing thread is a daemon and ends with the program.
#
# ``write`` is stock DCP with two settings. ``per_thread_copy_ahead=0``: otherwise the writer waits
# for the compute stream once per tensor. ``set_crc32_options(False)``: checksums take time, and DCP
# reads none. On torch 2.11 this sets it for the whole process.


class OverlappedSaves:
    """Save checkpoints of all ranks beside training; a context manager around the loop.

    Args:
        device: where the state's tensors live; the current device.
        changed_by_forward: tensors that forward changes in place, or a function that returns them,
            such as ``model.buffers``.
        if_busy: what ``save`` does while all arenas hold saves that are not written yet. ``"skip"``:
            leave this save out on all ranks and count it in ``skipped``; every save then waits until
            all ranks have called it. ``"wait"``, and any other value: wait.
        snapshot_bytes: device memory for snapshots of other large tensors. The next update need
            not wait until these bytes have arrived on the host.
    """

    def __init__(self, device, changed_by_forward=(), if_busy="wait", snapshot_bytes=0) -> None:
        self.device = torch.empty(0, device=device).device  # add the index
        self.if_busy, self.snapshot_bytes, self.rank, self.groups = if_busy, snapshot_bytes, 0, []
        changing = changed_by_forward  # asked for at every plan: ``model.to`` replaces buffers
        self.changing = changing if callable(changing) else list(changing).copy
        self.streams = torch.get_device_module(self.device)
        self.copy_stream, self.jobs, self.queued = self.streams.Stream(), SimpleQueue(), []
        # queued: at most one Future, of the latest save's launches; its result is two events: after
        # the tensors in place, and after all
        self.plan, self.sets, self.calls, self.skipped = None, [], 0, 0  # sets: arenas and copies
        self.uploads, self.failures, self.hook, self.abandoned = [Future()], [], None, False
        self.uploads[-1].set_result(None)  # the last one is the newest save's: none is under way
        if dist.is_initialized():
            self.rank, deadline = dist.get_rank(), timedelta(seconds=DEADLINE_S)
            self.groups = [dist.new_group(backend="gloo", timeout=deadline) for _ in range(2)]

    def __enter__(self) -> "OverlappedSaves":
        self.hook = register_optimizer_step_pre_hook(self.before_update)
        self.writer = Thread(target=self.write_in_turn, name="write", daemon=True)
        self.copier = ThreadPoolExecutor(1, "copy", self.streams.set_device, [self.device])
        self.writer.start()
        return self

    @torch.inference_mode(False)
    def save(self, state_dict: dict, directory: Path) -> Future | None:
        """Save ``state_dict`` as it is now to ``directory``; all ranks call it.

        Returns:
            A future. It is done when the whole checkpoint is in ``directory``, and raises on every
            rank if the save failed on one. None if the save was skipped.

        Raises:
            RuntimeError: outside the ``with`` block; in a second block, if the first ended by an
                exception or there is a process group; if ``init_process_group`` came after this
                object.
        """
        if self.hook is None or self.abandoned or dist.is_initialized() != bool(self.groups):
            raise RuntimeError("save in one `with OverlappedSaves(...)`, behind init_process_group")
        busy = (not done.done() for done in self.uploads)  # asked for in ``together``
        if self.if_busy == "skip" and max(self.together(sum, busy, group=1)) >= BUFFER_SETS:
            self.skipped += 1
            return None
        directory, tensors, hosts, state = Path(directory).absolute(), [], [], None
        staged, done = KeyboardInterrupt("in save"), Future()
        self.calls, self.uploads = self.calls + 1, [*self.uploads[-BUFFER_SETS:], done]
        try:
            wait([*self.uploads[:-BUFFER_SETS], *self.queued])
            state = read(state_dict, tensors)
            _, copies, hosts = self.prepare(tensors)
            main, beside = self.streams.current_stream(), self.copy_stream
            main.wait_stream(beside)  # which may read older snapshots
            self.plan.take_snapshots()
            beside.wait_stream(main)
            # at once, what lies on other devices; on the copying thread, the rest
            self.plan.queue(copies[:1], self.streams, beside)
            self.queued[:] = [self.copier.submit(self.plan.queue, copies[1:], self.streams, beside)]
            staged = self.queued[0]
        except Exception as failure:
            staged = failure.with_traceback(None)  # whose frames hold a plan and its memory
        finally:  # the other ranks are saving: they will be told
            self.jobs.put((self.calls, staged, tensors, hosts, state, directory, done))
        return done

    def prepare(self, tensors: list[torch.Tensor]) -> tuple[PinnedArena, list, list]:
        """Return the next arena, its copies and tensors; plan anew if a tensor has moved."""
        if self.plan is None or not self.plan.fits(tensors):
            wait(self.uploads[:-1])
            self.streams.synchronize()  # copies of a save that failed may be under way
            self.plan, self.sets, self.state = None, [], None
            plan = CopyPlan(tensors, self.device, self.changing(), self.snapshot_bytes)
            arenas = [PinnedArena(plan.nbytes, self.device) for _ in range(BUFFER_SETS)]
            self.plan, self.sets = plan, [(a, plan.copies(a), plan.hosts(a)) for a in arenas]
        return self.sets[self.calls % BUFFER_SETS]

    @torch.compiler.disable  # a compiled optimizer step would keep one save's event
    def before_update(self, *_) -> None:
        """Make the current stream wait until the latest save has read the state.

        Returns when that save's copies are launched; a save that could not launch them is lost.
        """
        if self.queued and not self.queued[0].exception():
            self.streams.current_stream().wait_event(self.queued[0].result()[0])

    def write_in_turn(self) -> None:
        """Write one checkpoint after the other, on the writing thread."""
        self.streams.set_device(self.device)
        for job in iter(self.jobs.get, None):
            self.write_aside(*job)

    def write_aside(self, number, staged, tensors, hosts, state, directory, done: Future) -> None:
        """Write one state under another name; give it its own when it is complete."""
        aside, unfinished = Path(f"{directory}.incomplete"), None
        try:
            if len(set(self.together(self.begin, number, staged, aside))) > 1:
                raise RuntimeError(f"the ranks have called save for others than {directory}")
            hosts, unfinished = dict(zip(map(id, tensors), hosts, strict=True)), aside
            self.arranged = self.together(self.arrange_hosts, state, hosts)
            self.together(self.write, self.state, aside)
            unfinished = None
            self.together(self.commit, aside, directory)
            done.set_result(directory)
        except BaseException as failure:  # CheckpointException is no Exception
            if self.rank == 0 and unfinished:
                shutil.rmtree(unfinished, ignore_errors=True)  # a full disk needs the room
            logging.getLogger(__name__).error("no checkpoint in %s: %s", directory, failure)
            self.failures.append(failure)
            done.set_exception(failure)

    def together(self, work, *args, group=0) -> list:
        """Call ``work`` on all ranks; return all results, or raise on all ranks if one failed."""
        try:
            error, report = None, (work(*args), None)
        except BaseException as failure:
            # DCP's error has those of all ranks in ``failures``
            cause = next((c for c, _ in getattr(failure, "failures", {}).values()), failure)
            error, report = failure, (None, f"rank {self.rank}: {type(cause).__name__}: {cause}")
        reports = [report] * (dist.get_world_size() if self.groups else 1)
        if self.groups:
            dist.all_gather_object(reports, report, group=self.groups[group])
        if failures := "; ".join(failure for _, failure in reports if failure):
            raise RuntimeError(failures) from error
        return [result for result, _ in reports]

    def begin(self, number: int, staged: Future, aside: Path) -> tuple:
        """Wait for the copies. Until then this thread leaves the interpreter to the training.

        Args:
            staged: the Future of the launches, or the error that came before it.

        Returns:
            What must be the same on all ranks.
        """
        if self.abandoned or not isinstance(staged, Future):
            raise RuntimeError("training has ended by an exception") if self.abandoned else staged
        staged.result()[-1].synchronize()
        if self.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)  # left by a job that died
        return number, aside

    def arrange_hosts(self, state: dict, hosts: dict) -> object:
        """Put the staged tensors in the place of the device's, for ``arrange`` and ``write``."""
        self.state = walk(state, lambda leaf: hosts[id(leaf)] if is_staged(leaf) else leaf)
        return self.arrange(self.state)

    def arrange(self, state: dict) -> object:
        """For subclasses: prepare the write of ``state``; return what all ranks must know of it."""

    def write(self, state: dict, directory: Path) -> None:
        """Write this rank's part of ``state``, which lies in host memory."""
        torch.serialization.set_crc32_options(False)  # DCP reads none
        writer = dcp.FileSystemWriter(directory, per_thread_copy_ahead=0)
        group = self.groups[0] if self.groups else None
        dcp.save(state, storage_writer=writer, process_group=group, no_dist=group is None)

    def commit(self, aside: Path, directory: Path) -> None:
        """Give the complete checkpoint its name, in place of an older one with the same files."""
        if self.rank == 0:
            old = {x.suffix if x.suffix == ".distcp" else x.name for x in directory.rglob("*")}
            if {".metadata", ".distcp"} <= old <= {".distcp", *(x.name for x in aside.rglob("*"))}:
                shutil.rmtree(f"{directory}.replaced", ignore_errors=True)
                directory.rename(f"{directory}.replaced")
            aside.rename(directory)
            shutil.rmtree(f"{directory}.replaced", ignore_errors=True)

    def wait(self) -> None:
        """Return when all saves so far have ended.

        Raises:
            RuntimeError: the first failure that no earlier ``wait`` has raised.
        """
        wait(self.uploads)
        failures, self.failures = self.failures, []
        if failures:
            raise failures[0]

    def __exit__(self, kind, error, trace) -> None:
        self.before_update()  # what comes after the block may write the state
        self.hook, self.abandoned = self.hook and self.hook.remove(), kind is not None
        self.jobs.put(None)
        self.copier.shutdown(wait=False)
        self.writer.join(EXIT_S if self.abandoned else None)
        if self.writer.is_alive():
            logging.getLogger(__name__).error("left while a checkpoint was being written")
        while dist.is_initialized() and self.groups and all(x.done() for x in self.uploads):
            dist.destroy_process_group(self.groups.pop())
        if not self.abandoned:
            self.wait()


# %%
# Run it, and prove it
# --------------------
# The proof trains a model with a buffer that forward changes, and saves after each of five steps.
# Each must hold its own step's bits.


def main(directory: Path) -> None:
    import async_save as basic

    device = basic.start_rank()
    root, app, expected = basic.directory_of_rank_0(directory), basic.build_app(device), {}
    with OverlappedSaves(device, app.model.buffers) as saves:
        for step in range(1, 6):
            basic.train_step(app, device)
            expected[step] = basic.snapshot(app)
            saves.save({"app": app}, root / f"step{step}")
    for step, bits in expected.items():
        basic.assert_same_bits(basic.load_app(root / f"step{step}", device), bits)
    print(f"checkpoints of steps {list(expected)} loaded back, every bit equal")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, help="where checkpoints go (default: temporary)")
    with tempfile.TemporaryDirectory() as temporary:
        main(parser.parse_args().dir or Path(temporary))

# %%
# What it buys
# ------------
# The tables are of a stock Llama. The loop calls ``loss.item()`` every step; transformers' mask check
# reads one scalar more (:doc:`/guide/measured`). This recipe itself, with DCP's writer, was not
# measured on it: ``overlapped_writer`` stages alike and writes faster.
#
# .. result-table:: checkpoint_stall
#    :rows: none dcp_save overlapped_writer
#    :where: step=long storage=memory
#
# If the loop calls ``loss.item()`` and then saves, as in the tables, the device idles during the call:
# save first. The writing thread shares Python's interpreter lock with training. You notice that if the host limits
# your steps; :doc:`overlapped_writer` holds the lock for less time.
#
# What breaks if you remove a line
# --------------------------------
# Streams do nothing on a CPU. A recorder of stream order finds accesses that no event orders.
#
# .. recipe-controls::
#
# Memory
# ------
# Page-locked host memory, from the first save until ``saves`` is deleted: twice the bytes of this
# rank's shards. ``BUFFER_SETS = 1`` needs them once, and each save then waits for the previous
# one. The first save, and one whose tensors have moved, is a far longer call: it locks this memory,
# waits for the device, and captures CUDA graphs.
#
# Under DDP every rank stages the whole state, though only one copy is written. Shard the optimizer's
# state there.
#
# Known limits
# ------------
# * If a CUDA graph holds an optimizer's step, capture it before the first save. Never save during
#   a capture.
# * Ranks decide to save by step, not by a clock, and give each save its own name: one call more on
#   one rank can mix two steps under one name.
# * ``model.to`` can give a model new buffers. Pass ``model.buffers`` without parentheses, so that
#   each plan asks for those of now. With a list, new buffers are copied while forward changes them.
# * Save after ``optimizer.step()``: gradients of a half-done accumulation are not in the state.
# * ``nn.Embedding(max_norm=...)`` changes its weight in forward: pass it with the buffers.
# * A save to ``step100`` deletes ``step100.incomplete`` and ``step100.replaced``.
# * Ctrl-C and ``sys.exit`` count as exceptions: saves that wait are dropped, and logged. Either,
#   caught inside the block, can make later saves fail or, rarely, wait for ever. Very rarely, the
#   program's end waits for a second Ctrl-C.
# * A child that is forked during a copy hangs in an optimizer's ``step``.
# * A tensor that is new at every save, such as ``torch.get_rng_state()``, makes every save plan
#   anew and wait for the one before. Save it as a list: ``.tolist()``.
# * A directory of that name that holds anything but a checkpoint is left alone: the save fails, and
#   its complete checkpoint stays in ``step100.incomplete``. Write a tokenizer elsewhere, or when
#   the future is done.
# * A state that calls ``get_state_dict`` at every save (:doc:`app_state`) works too; the call is longer.
# * A program that ends without leaving the block loses what is not yet written, without a word.
# * A directory is taken for a local path, even ``s3://...``: :doc:`object_storage` saves to a
#   store.
# * Call ``save`` on one thread. Two jobs that save to one path at once write over each other:
#   :doc:`retention` locks the root. Give no path that is a symlink; a link above it is fine.
# * The directory is not flushed, and an older checkpoint of the same name is replaced:
#   :doc:`durable_saves`.
#
# Further reading
# ---------------
# * `torch.distributed.checkpoint
#   <https://docs.pytorch.org/docs/stable/distributed.checkpoint.html>`__
# * `register_optimizer_step_pre_hook
#   <https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.register_step_pre_hook.html>`__
