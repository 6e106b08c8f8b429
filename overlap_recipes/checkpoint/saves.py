# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, overlap_recipes/checkpoint/saves.py
"""Saves beside training: staged during the next forward and backward, written on a thread."""

import logging
import shutil
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .copies import CopyPlan, PinnedArena
from .state import is_staged, read, walk

BUFFER_SETS = 2  # arenas of host memory: one is filled while the other is written
DEADLINE_S = 600.0  # how long a thread waits for the other ranks
EXIT_S = 30.0  # how long the end of the block waits for a write after an exception


class OverlappedSaves:
    """Save checkpoints of all ranks beside training; a context manager around the loop.

    Args:
        device: where the state's tensors live; the current device.
        changed_by_forward: tensors that forward changes in place, or a function that returns them,
            such as ``model.buffers``.
        if_busy: what ``save`` does while all arenas hold saves that are not written yet.
            ``"skip"``: leave this save out on all ranks and count it in ``skipped``; every save
            then waits until all ranks have called it. ``"wait"``, and any other value: wait.
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
