"""
Save from another process
=========================

A thread that writes a checkpoint shares Python's interpreter lock with the training thread, and
each of its pickles and plans can hold up a kernel launch. With ``AsyncCheckpointerType.PROCESS``,
``async_save`` hands the staged copy to a **daemon process** instead. This recipe uses it and adds
what it lacks: buffers that both processes share and that are made once, a meeting point that no
other program can take, a dead daemon noticed on every rank and survived, no process left behind.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * what runs where, and how to find the daemon that torch hides
      * one set of buffers, page-locked and shared, for all saves
      * why the script needs a ``__main__`` guard, and the daemons a store to meet in
      * how one rank's dead daemon can hang the others, and how to prevent it
      * how to end the daemon with public means

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later on Linux, any number of ranks, CPU or GPU
      * room in ``/dev/shm`` for one copy of each rank's shards
      * ``async_save.py``, the first recipe of this folder: model, state and comparison come from it

.. verification-badge::

The idea
--------

The first save starts one daemon a rank; together they form a gloo group of their own. From then
on, a save is one copy into buffers that the daemon sees too, on the training thread; a helper
thread sends their handles through a pipe, and the daemon plans, serialises and writes.

.. lanes:: Schematic. The training process only stages; planning and writing happen in the daemon.

   training: 0-4 step 1; 4-5 stage !; 5-9 step 2; 9-13 step 3; 13-17 step 4
   write in daemon: 5.3-15 plan, serialise, write checkpoint 1 ~
   @5 async_save returns
   @15 daemon answers
"""

# %%
# Imports
# -------
# Only torch, the standard library and the first recipe of this folder.

import argparse
import logging
import multiprocessing
import os
import resource
import shutil
import signal
import tempfile
from concurrent.futures import Future, wait
from contextlib import closing
from multiprocessing import resource_sharer
from pathlib import Path
from unittest import mock

import async_save as basic
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

STEPS = 4
POLL_S = 0.1  # seconds between two looks at the other ranks while a save is awaited

# %%
# Buffers that both processes see
# -------------------------------
# Left to itself, ``async_save`` makes a new copy of the state for every save, in memory that the
# system has yet to provide, and copies it once more to share it with the daemon. Making memory
# takes many times longer than filling it. So make it once, page-locked for the device and shared
# with the daemon; from then on a save is one copy at the rate of the link, and a few handles.
#
# ``DefaultStager`` can make such buffers (and is used for that only: in torch 2.11 and 2.12 it
# cannot stage twice). ``BlockingAsyncStager`` copies into whatever its ``state_dict_cache`` holds,
# on the current stream: in order behind the optimizer step, and complete when ``async_save``
# returns.


def shared_buffers(state: dict) -> dict:
    """A copy of ``state`` in shared host memory, page-locked where there is a CUDA device."""
    pin = torch.cuda.is_available()
    options = StagingOptions(pin, use_async_staging=False, use_non_blocking_copy=False)
    with closing(DefaultStager(options)) as stager:
        return stager.stage(state)


# %%
# Each tensor in shared memory is an open file, and passing it on opens another. A thousand tensors
# are more than the usual limit of a process, which it may raise by itself; the daemon inherits it.


def allow_open_files() -> None:
    """Raise this process's limit of open files as far as it may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


# %%
# Start and find the daemon
# -------------------------
# ``async_save`` starts the daemon at the first save, and shows neither it nor its pid. But it is a
# child of this process, started by ``multiprocessing``, which lists its children: the new one
# after the first save is the daemon. So the class below begins with a save of nothing, into a
# directory that it throws away. That also puts the cost of starting (a Python that imports torch,
# on every rank) where nobody minds.
#
# The child imports this file again, under another name than ``__main__``. Without the guard in the
# last block it would begin to train, and never serve a save.
#
# **Where the daemons meet.** Left to itself, rank 0 looks for a free port, closes it, and its
# daemon opens it again some seconds later; on a busy machine another program has it by then, and
# the save fails with ``DistNetworkError``. With ``DCP_USE_PREFIX_STORE=1`` (torch 2.10 and later;
# 2.9 ignores it) the daemons meet in the store at ``MASTER_ADDR`` and ``MASTER_PORT`` instead.
# torchrun's own store would do once, but it outlives a restart of the workers, and the next daemons
# would read the addresses of the last ones. So rank 0 opens a store for this purpose, on a port
# that it keeps.
#
# Agree on how it ended
# ---------------------
# When the daemon of one rank dies, that rank's future fails at once. The other daemons are in the
# middle of a collective: one whose peer is gone fails, but one that waits for a *living* daemon
# which has given up waits for gloo's timeout, 30 minutes. So no rank trusts its own future: all
# look at theirs and tell each other, and when one has failed, all end their daemons. Then every
# future ends.
#
# The writer is told not to copy ahead (``per_thread_copy_ahead=0``): it would look for the compute
# stream, and every daemon would take half a gigabyte of the first GPU for a context of its own.
#
# After that, a thread writes. A dead daemon is not replaced: in torch 2.13 every later save of its
# rank fails with ``BrokenPipeError``, and only clearing the private
# ``_async_process_executor._CHECKPOINT_PROCESS`` would bring a new one.


class ProcessCheckpoints:
    """Saves of one application state by a daemon, each to ``root/step<N>``, one at a time.

    Building it starts the daemons and makes the buffers; the states saved later must have the same
    tensors as ``app``. If a save fails, because a daemon died or for any other reason, it is
    reported on every rank and the later ones are written by a thread. All methods are collective:
    every rank calls them in the same order.

    Raises:
        RuntimeError: a daemon did not start; none is left.
    """

    def __init__(self, root: Path, app: basic.AppState) -> None:
        allow_open_files()
        self.root = root
        self.group = dist.new_group(backend="gloo")
        self.stager = BlockingAsyncStager(cache_staged_state_dict=True)
        self.checkpointer = AsyncCheckpointerType.PROCESS
        self.upload: Future | None = None
        self.daemon: multiprocessing.Process | None = None
        self.other_children = set(multiprocessing.active_children())
        self.meeting_point = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._start_daemon()
        try:
            self.stager.state_dict_cache = shared_buffers({"app": app.state_dict()})
        except BaseException:
            self.end_daemon()
            raise

    def _start_daemon(self) -> None:
        """Save nothing, so that DCP starts a daemon on each rank; return when all have answered."""
        where = {"MASTER_ADDR": os.environ.get("MASTER_ADDR", "localhost")}
        where |= {"MASTER_PORT": str(self.meeting_point.port), "DCP_USE_PREFIX_STORE": "1"}
        with tempfile.TemporaryDirectory() as unused, mock.patch.dict(os.environ, where):
            self._hand_over({}, basic.directory_of_rank_0(Path(unused, "start_of_daemons")))
            self.wait()
        [self.daemon] = set(multiprocessing.active_children()) - self.other_children

    def _hand_over(self, state: dict, directory: Path) -> None:
        self.directory = directory
        self.upload = dcp.async_save(
            state,
            storage_writer=FileSystemWriter(directory, overwrite=False, per_thread_copy_ahead=0),
            async_stager=self.stager,
            process_group=self.group,
            async_checkpointer_type=self.checkpointer,
        )

    def save(self, app: basic.AppState) -> None:
        """Stage ``app`` on the calling thread and leave the rest to the daemon.

        Raises:
            RuntimeError: the save before this one failed; this one has not begun.
        """
        self.wait()
        self._hand_over({"app": app}, self.root / f"step{app.step}")

    def wait(self) -> None:
        """Return when the save in flight is on disk, on all ranks.

        Raises:
            RuntimeError: the save failed on some rank. What it wrote is removed; a checkpoint that
                was there before it is whole.
        """
        if self.upload is None:
            return
        if self.checkpointer == AsyncCheckpointerType.PROCESS:
            self._wait_for_all_daemons(self.upload)
        error = self.upload.exception()  # not result(): CheckpointException is no Exception
        self.upload = None  # not before: an interrupted wait leaves the save in flight
        errors: list[str | None] = [None] * dist.get_world_size()
        reason = f"{type(error).__name__}: {error}".splitlines()[-1].partition(". ")[0]
        dist.all_gather_object(errors, reason if error else None, group=self.group)
        causes = {rank: text for rank, text in enumerate(errors) if text}
        if causes:
            if dist.get_rank() == 0 and not (self.directory / ".metadata").exists():
                shutil.rmtree(self.directory, ignore_errors=True)
            dist.barrier(group=self.group)
            raise RuntimeError(f"{self.directory.name} not written: {causes}")

    def _wait_for_all_daemons(self, upload: Future) -> None:
        """Return when the save has ended on all ranks; once it failed on one, make it end."""
        pending = True
        while pending:
            wait([upload], timeout=POLL_S)
            done = upload.done()
            state = torch.tensor([not done, done and upload.exception() is not None]).int()
            dist.all_reduce(state, op=dist.ReduceOp.MAX, group=self.group)
            pending, failed = state.tolist()
            if failed:
                self.end_daemon()
                self.checkpointer = AsyncCheckpointerType.THREAD

    def end_daemon(self) -> None:
        """End this rank's daemon, also one that is starting, and wait until it has ended."""
        starting = set(multiprocessing.active_children()) - self.other_children
        for daemon in {self.daemon} if self.daemon else starting:
            daemon.kill()
            daemon.join()

    def close(self) -> None:
        """Wait for the last save, then end the daemon and the thread that passed handles to it.

        Raises:
            RuntimeError: the last save failed.
        """
        try:
            self.wait()
        finally:
            self.end_daemon()
            self.stager.state_dict_cache = None
            resource_sharer.stop()
            dist.destroy_process_group(self.group)


# %%
# ``save`` waits for the save before it, as the first recipe does, and now for more than memory:
# there is one set of buffers, and the daemon reads from it until it answers.
#
# ``wait`` uses the group that DCP got for itself. It may: the daemons talk over a group of their
# own, and the thread that replaces them is finished when ``exception()`` returns.
#
# Stop a daemon, on purpose
# -------------------------
# ``SIGSTOP`` freezes a process. A save that is called then cannot be written until the daemon goes
# on, however fast the machine is. This proves more than a stopwatch: who writes, that training
# does not wait for it, and that nothing but the shared buffers keeps the step until it is written.


def freeze(daemon: multiprocessing.Process) -> None:
    """Stop the process and return when the kernel says that it has stopped."""
    os.kill(daemon.pid, signal.SIGSTOP)
    os.waitpid(daemon.pid, os.WUNTRACED)


def assert_in_shared_buffers(bits: dict[str, object], checkpoints: ProcessCheckpoints) -> None:
    for path, held in basic.leaves(checkpoints.stager.state_dict_cache["app"]).items():
        if isinstance(held, torch.Tensor):
            leaf = bits[path]
            assert basic.same_bits(held, leaf.cpu()), f"{path} was staged somewhere else"
            assert held.is_shared(), f"{path} is not where the daemon can see it"
            assert held.is_pinned() or leaf.is_cpu or leaf.dim() == 0, f"{path} is not page-locked"


def train_beside_frozen_daemon(
    app: basic.AppState, checkpoints: ProcessCheckpoints, device: torch.device
) -> dict[str, object]:
    """Call a save that cannot be written yet, train on, let it be written; return its bits."""
    freeze(checkpoints.daemon)
    bits = basic.snapshot(app)
    checkpoints.save(app)
    for _ in range(STEPS):
        basic.train_step(app, device)
    assert not checkpoints.upload.done(), "a frozen daemon wrote: it is not the daemon that writes"
    os.kill(checkpoints.daemon.pid, signal.SIGCONT)
    checkpoints.wait()
    assert_in_shared_buffers(bits, checkpoints)
    print(f"trained {STEPS} steps while the daemon stood still; then it wrote")
    return bits


# %%
# Kill a daemon, on purpose
# -------------------------
# The last rank's daemon is killed in the middle of a save. Every rank must hear of it, the
# checkpoints from before must be whole, and the same step must save when it is tried again. Saved
# a second time it must fail, and leave what is there: ``wait`` removes what has no ``.metadata``,
# which is written last, and nothing else.


def expect_failure(checkpoints: ProcessCheckpoints) -> None:
    try:
        checkpoints.wait()
    except RuntimeError as error:
        print(error)
    else:
        raise AssertionError(f"{checkpoints.directory.name}: the failed save was not reported")


def lose_a_daemon(app: basic.AppState, checkpoints: ProcessCheckpoints) -> dict[str, object]:
    """Kill one daemon during a save, then save the same step again, twice; return its bits."""
    bits = basic.snapshot(app)
    unlucky = dist.get_rank() == dist.get_world_size() - 1
    if unlucky:
        freeze(checkpoints.daemon)
    checkpoints.save(app)
    if unlucky:
        checkpoints.daemon.kill()
    expect_failure(checkpoints)
    assert not checkpoints.directory.exists(), "an unfinished checkpoint was left"
    checkpoints.save(app)
    checkpoints.wait()
    print(f"step {app.step} saved by a {checkpoints.checkpointer.value} instead")
    checkpoints.save(app)
    expect_failure(checkpoints)
    return bits


# %%
# Memory
# ------
# Beside the training process, each rank keeps
#
# .. math::
#
#    \text{bytes in /dev/shm per rank} = \sum_{t\,\in\,\text{state}} \text{numel}(\text{local
#    shard of } t) \times \text{bytes per element}
#
# for the buffers that both processes see, and the daemon's own Python and torch. The buffers are
# there until ``close()``, page-locked if there is a CUDA device. Containers often give ``/dev/shm``
# 64 MB; a larger state then ends the process with a bus error. The daemon itself does not grow with
# the state. Both processes hold a file open for each tensor, and a second one while a save is
# handed over.
#
# Run it, and prove it
# --------------------
# Asserted are every bit of every checkpoint, who wrote it, what was reported, and that nothing is
# left.


def main(directory: Path) -> None:
    device = basic.start_rank()
    try:
        root = basic.directory_of_rank_0(directory)
        app = basic.build_app(device)
        basic.train_step(app, device)  # the optimizer has its state from here on
        with closing(ProcessCheckpoints(root, app)) as checkpoints:
            basic.train_step(app, device)
            saved = [
                train_beside_frozen_daemon(app, checkpoints, device),
                lose_a_daemon(app, checkpoints),
            ]
        assert not multiprocessing.active_children(), "a daemon was left behind"
        for bits in saved:
            basic.assert_same_bits(basic.load_app(root / f"step{bits['/step']}", device), bits)
        print(f"steps {[bits['/step'] for bits in saved]} loaded back, every bit equal")
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, help="where checkpoints go (default: temporary)")
    with tempfile.TemporaryDirectory() as temporary:
        main(parser.parse_args().dir or Path(temporary))
elif __name__ == "__mp_main__":  # imported by the daemon, which logs what it also answers
    logging.disable(logging.ERROR)

# %%
# What it buys
# ------------
# ``pinned`` and ``process`` both copy into memory that was made once, and differ in who writes;
# ``async_save`` makes new memory for every save, and does so with a daemon too if it is left to its
# defaults. With these few large tensors, what the daemon spares the training thread is too little
# to be read from ``Step time during upload`` (the columns: :doc:`async_save`). Why a stall can come
# out below ``Bound``: :doc:`pinned_staging`.
#
# Two packages divide the work in the same way. ``nvidia-resiliency-ext`` stages on the training
# thread into pinned memory, and a persistent process writes one file a rank, which cannot be
# resharded; its first save starts the process and makes the memory, and takes long.
# ``torch_checkpointing`` stages on a thread, partly beside the next step, into shared memory, and a
# process writes.
#
# .. result-figure:: checkpoint_stall
#    :rows: async_save pinned process torch_checkpointing nvidia-resiliency-ext
#    :where: step=long
#
# .. result-table:: checkpoint_stall
#    :rows: none async_save pinned process torch_checkpointing nvidia-resiliency-ext
#    :where: step=long
#
# .. timeline:: checkpoint_stall pinned process torch_checkpointing nvidia-resiliency-ext
#
# What breaks if you remove a line
# --------------------------------
#
# .. recipe-controls::
#
# When it is not worth it
# -----------------------
# * The copy stays on the training thread and holds it, at the rate of the link.
#   :doc:`overlapped_stager` puts it beside training.
# * A training thread that queues work well ahead of the GPU hardly notices a busy interpreter, and
#   a few large tensors keep it busy for a short time only. Thousands of small ones, or a training
#   loop with much Python in each step, make the difference.
# * The state changes its layout: the buffers fit the first state, and torch raises
#   ``CompanionMismatch`` for another.
# * Whatever the writer, the planner and the state dict hold must be picklable, and classes defined
#   in the script are found again only through the guard.
#
# Known limits
# ------------
# * While ``ProcessCheckpoints`` is built, no other thread may start a process: it would be taken for
#   the daemon.
# * On several nodes ``MASTER_ADDR`` must be the node of rank 0, which is what torchrun sets.
# * A daemon that dies *between* two saves is noticed by the second one.
# * A daemon that dies just after ``.metadata`` was written is reported, though the checkpoint is
#   whole; saving that step again is then refused.
# * Killed daemons leave a half-written directory. ``wait`` removes it; if the whole job dies, the
#   next one must look for ``.metadata``, which is written last.
#
# Further reading
# ---------------
# * `Asynchronous saving with DCP
#   <https://docs.pytorch.org/docs/stable/distributed.checkpoint.html>`_: ``async_save`` and
#   ``AsyncCheckpointerType``
# * `PyTorch pull request 166560 <https://github.com/pytorch/pytorch/pull/166560>`_, which added
#   ``DCP_USE_PREFIX_STORE``
# * `multiprocessing, spawn and the main module
#   <https://docs.python.org/3/library/multiprocessing.html#the-spawn-and-forkserver-start-methods>`_
