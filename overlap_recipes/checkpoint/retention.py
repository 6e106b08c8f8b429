# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.1, overlap_recipes/checkpoint/retention.py
"""Which checkpoints stay: one job a directory, room for the next save, listing and pruning."""

import errno
import fcntl
import logging
import math
import os
import shutil
from pathlib import Path

import torch

from .durable import DurableSaves, committed_steps, faults, flush
from .names import check_kept, name_of, refuse_below, steps_left_out
from .saves import Job

LOG = logging.getLogger(__name__)
LEASE = "lease"  # in the root: locked by the job that writes here
HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)  # of a lock that another process has
NO_LOCKS = (
    "cannot lock %s: %s. If its file system has no locks, mount it with locks (Lustre: -o flock; "
    "NFS: version 4, or with lockd) or take another root"
)
LEFTOVERS = ("*.incomplete", "*.deleted")  # what a crash can leave behind


def to_delete(root: Path, keep_last: int, keep_every: int = 0) -> list[int]:
    """Steps below ``root`` that neither rule keeps. With ``keep_every`` 0, only the last ones stay.

    Raises:
        ValueError: nothing would be kept.
    """
    whole = [step for step in committed_steps(root) if not faults(root / name_of(step))]
    return steps_left_out(whole, keep_last, keep_every)


def delete(root: Path, step: int) -> None:
    doomed = root / f"{name_of(step)}.deleted"
    (root / name_of(step)).rename(doomed)
    flush(root)
    shutil.rmtree(doomed)


def take_lease(root: Path) -> int:
    """Lock ``root`` for this process; return the file descriptor that holds the lock until closed.

    Raises:
        RuntimeError: another process holds it; the file system has no locks.
    """
    root.mkdir(parents=True, exist_ok=True)
    lease = os.open(root / LEASE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lease)
        if error.errno in HELD:
            message = f"another job writes to {root}: end it or use another root"
            raise RuntimeError(message) from error
        raise RuntimeError(NO_LOCKS % (root, error)) from error
    return lease


def remove_leftovers(root: Path) -> None:
    for pattern in LEFTOVERS:
        for leftover in root.glob(pattern):
            shutil.rmtree(leftover)


class RetainedSaves(DurableSaves):
    """Durable saves below ``root``, of which the latest ``keep_last`` and every step that
    ``keep_every`` divides are kept.

    Raises:
        ValueError: nothing would be kept.
        RuntimeError: on entry, on every rank: another job writes to ``root``, or its file system
            has no locks. In a save's future: its directory is not in ``root``, or ``root`` holds a
            newer step, whose run has not been resumed.
    """

    def __init__(self, root: Path | str, *args, keep_last=3, keep_every=0, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        check_kept(keep_last, keep_every)  # now, and not at the first save
        self.root = Path(root).absolute()
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.lease: int | None = None

    def __enter__(self) -> "RetainedSaves":
        self.together(self.open_root)
        return super().__enter__()

    def open_root(self) -> None:
        if self.rank == 0:
            self.lease = take_lease(self.root)
            os.register_at_fork(after_in_child=self.give_back)
            remove_leftovers(self.root)

    def give_back(self) -> None:
        """Close this process's copy of the lease; each forked process closes its own copy."""
        if self.lease is not None:
            os.close(self.lease)
            self.lease = None

    def __exit__(self, *error: object) -> None:
        try:
            super().__exit__(*error)
        finally:
            self.give_back()

    def begin(self, job: Job, aside: Path) -> tuple:
        ours = super().begin(job, aside)
        if job.directory.parent != self.root:
            raise RuntimeError(f"{job.directory} is not in {self.root}")
        refuse_below(committed_steps(self.root), job.directory)
        return ours

    def write(self, state: dict, directory: Path) -> None:
        self.together(self.look_for_room, state)
        super().write(state, directory)

    def look_for_room(self, state: dict) -> None:
        needed = bytes_of_whole(state)
        free = shutil.disk_usage(self.root).free  # raises if the root is gone
        if free < needed:
            raise OSError(errno.ENOSPC, f"{needed} bytes to write, {free} free", str(self.root))

    def commit(self, aside: Path, directory: Path) -> None:
        super().commit(aside, directory)
        if self.rank == 0:
            for step in to_delete(self.root, self.keep_last, self.keep_every):
                try:
                    delete(self.root, step)
                except OSError as error:  # the new checkpoint is durable all the same
                    LOG.error("step%d cannot be deleted: %s", step, error)


def bytes_of_whole(state: object) -> int:
    """Bytes that a checkpoint has of the tensors in nested dicts and lists.

    A DTensor counts with the shards of all ranks, and any other tensor once, since one rank writes
    it. What only other ranks hold, as in a pipeline, does not count.
    """
    if isinstance(state, dict):
        return sum(bytes_of_whole(value) for value in state.values())
    if isinstance(state, list | tuple):
        return sum(bytes_of_whole(value) for value in state)
    if torch.is_tensor(state):
        return state.shape.numel() * state.dtype.itemsize  # a DTensor has the shape of the whole
    return 0


def seconds_between_saves(cost_s: float, mtbf_s: float, upload_s: float) -> float:
    """The interval that loses least: a save costs ``cost_s`` and is written in ``upload_s``."""
    return max(math.sqrt(2 * cost_s * mtbf_s), upload_s)


def show(root: Path, digests: bool) -> bool:
    """Print one line per checkpoint, the newest first; return whether all are complete.

    Without a checkpoint that is false: ``root`` may be another directory than was meant.
    """
    whole = []
    damaged = []
    for step in committed_steps(root):
        found = faults(root / name_of(step), digests)
        if found:
            damaged.append(step)
        else:
            whole.append(step)
        files = list((root / name_of(step)).iterdir())
        size = sum(file.stat().st_size for file in files) / 1e9
        print(f"step{step}  {size:.3f} GB  {len(files)} files  {'; '.join(found) or 'whole'}")
    unfinished = []
    for pattern in LEFTOVERS:
        unfinished.extend(path.name for path in root.glob(pattern))
    print(f"resume from: {max(whole, default=None)}; unfinished: {unfinished}")
    if not whole and not damaged:
        print(f"no checkpoint in {root}: give the directory that holds step<N>")
        return False
    return not damaged


def prune(root: Path, keep_last: int, keep_every: int, dry_run: bool) -> None:
    if not dry_run:
        take_lease(root)  # until this process ends
    outcome = "would be deleted" if dry_run else "deleted"
    for step in to_delete(root, keep_last, keep_every):
        print(f"step{step}: {outcome}")
        if not dry_run:
            delete(root, step)
