# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/saves.py
"""Saves during training: staged during the next forward and backward, written on a thread."""

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .preparation import Preparation
from .staging import Staging
from .state import PASS_PER_RANK, parts_of_contents, read, refuse_differing, shared_digests
from .stores.directory import Folder
from .talk import Talk
from .writer import FILES, FileWriter
from .writing import Job, Target, Writer, Writing, garbage_collection_paused, staged

LOG = logging.getLogger(__name__)
EXIT_S = 30.0  # how long the end of the block waits for a write after an exception


def is_end_of_job(kind: type[BaseException] | None) -> bool:
    """Whether a block that is left by ``kind`` has come to its end, as by ``sys.exit``."""
    return kind is None or issubclass(kind, SystemExit)


def _asked_each_time(
    tensors: Iterable[torch.Tensor] | Callable[[], Iterable[torch.Tensor]],
) -> Callable[[], Iterable[torch.Tensor]]:
    """A function that returns ``tensors``; each plan calls it, as ``model.to`` replaces buffers."""
    if callable(tensors):
        return tensors
    kept = list(tensors)
    return lambda: kept


class Saves:
    """Save checkpoints of all ranks during training; a context manager around the loop.

    One buffer of this rank's state is page-locked, and a save that comes before the one before it
    is written waits until it is. A second buffer would move that wait to the third save of a row
    and no further, and locking it would stop training, too: while the driver locks or unlocks
    pages it launches nothing, .2 s to .3 s for 10 GB.

    Args:
        device: where the state's tensors live; the current device.
        changed_by_forward: tensors that forward changes in place, or a function that returns them,
            such as ``model.buffers``.
        host_bytes: how much page-locked memory this rank may take; None: no bound. A save that
            needs more fails before any is locked, and says how much it needs.
        write_threads: how many threads of this rank write, 1 to 8. None: two, and twice as many
            each time that a save is called before the one before it is written. More end sooner
            and cost training more: they take cores and memory from the thread that launches.
        writer: what is written of a state, for trainers; files that ``dcp.load`` reads.
        shared: returns digests, by name, of what in a state must be equal on all ranks.
        advice: what the message says where that is not.

    Relative directories are those below the working directory of when this object was made. Ranks
    wait for each other as long as ``init_process_group(timeout=...)`` says, ten minutes at least:
    if one comes to a save later, that save fails, and the next call raises.

    Attributes:
        latest: the future of the latest save; those before it have ended when it has.

    Raises:
        ValueError: ``write_threads`` is not between 1 and 8.
    """

    def __init__(
        self,
        device: torch.device | str,
        changed_by_forward: Iterable[torch.Tensor] | Callable[[], Iterable[torch.Tensor]] = (),
        host_bytes: int | None = None,
        write_threads: int | None = None,
        *,
        writer: Writer | None = None,
        shared: Callable[[dict], dict[str, str]] = shared_digests,
        advice: str = PASS_PER_RANK,
    ) -> None:
        if write_threads is not None and not 1 <= write_threads <= FILES:
            raise ValueError(f"write_threads is {write_threads}: give 1 to {FILES}, or None")
        self.device = torch.empty(0, device=device).device  # with its index
        self.staging = Staging(self.device, _asked_each_time(changed_by_forward), host_bytes)
        self.working_directory = Path.cwd()
        self.writer = FileWriter() if writer is None else writer
        self.shared = shared
        self.advice = advice
        self.write_threads = write_threads
        self.calling = Talk()  # of the threads that train
        self.writing = Writing(self.device, Talk(), self.writer, shared, advice)
        if write_threads is not None:
            self.writing.threads = write_threads
        self.preparation: Preparation | None = None
        self.calls = 0
        self.none_before: Future = Future()
        self.none_before.set_result(None)
        self.latest = self.none_before
        self.compared = self.none_before  # of the latest save: raises if the ranks differed
        self.hook = None

    def __enter__(self) -> "Saves":
        self.hook = register_optimizer_step_pre_hook(self.before_step)
        self.writing.start()
        return self

    def prepare(self, state_dict: dict) -> Future:
        """Lock memory and plan during the first steps, so that the first save need not.

        A driver may launch nothing while it locks memory, which can cost training seconds, once.
        The state is asked for once, on this thread, before an optimizer's second step from here
        on, when all optimizers have stepped: one that has no state yet would have to be made to
        step. All ranks call it, in the block, with what they will pass to ``save``.

        Returns:
            A future, done when the next save need not wait. It raises where memory cannot be had;
            so will a save.

        Raises:
            RuntimeError: as ``save``; the second time, or after a save.
        """
        self.check_is_open()
        if self.preparation is not None or self.calls > 0:
            raise RuntimeError("prepare once, before the first save")
        self.preparation = Preparation(state_dict)
        return self.preparation.done

    @torch.inference_mode(False)
    def save(self, state_dict: dict, where: Path | str | Target) -> Future:
        """Save ``state_dict`` as it is now; all ranks call it.

        Args:
            where: the directory, in which an older checkpoint is replaced; or another target.

        Returns:
            A future. It is done when the whole checkpoint is there, and raises on every rank if the
            save failed on one.

        Raises:
            RuntimeError: outside the ``with`` block; in a second block, if the first ended by an
                exception or there is a process group; if ``init_process_group`` came after this
                object; at the first save, if a rank's state cannot be saved or differs from
                another's where they share it; of later ones, the next call raises that they differ,
                and makes its own save; the ranks have lost each other.
        """
        self.check_is_open()
        began = time.monotonic()
        self.calls += 1
        target = where
        if isinstance(where, Path | str):
            target = Folder(self.working_directory / where)
        job = Job(self.calls, target)
        before = self.latest
        compared_before = self.compared
        self.latest = job.done
        self.compared = job.compared
        try:
            self.wait_for_preparation()
            self.wait_for_buffer(before)
            job.state = read(state_dict, job.tensors)
            self.stage(job)
        except BaseException as failure:
            job.error = failure.with_traceback(None)  # whose frames hold a plan and its memory
            if not isinstance(failure, Exception):
                raise
        finally:  # even without a state: the other ranks are saving, and the thread tells them
            job.call_s = time.monotonic() - began
            self.writing.put(partial(self.writing.write, job))
        if self.calls == 1:
            self.raise_refusals(job)
        compared_before.result()  # of a save that has ended: this one has waited for it
        return job.done

    def raise_refusals(self, job: Job) -> None:
        """Raise on all ranks, at the first save, what no later save can mend."""
        look = partial(self.digests_of, job)
        look_closer = partial(parts_of_contents, job.state)
        refuse_differing(self.calling.together, look, look_closer, self.advice)

    def digests_of(self, job: Job) -> dict[str, str]:
        if job.state is None:
            raise job.error
        return self.shared(job.state)

    def raise_difference(self) -> None:
        """Raise, once and on all ranks, if they differed in the latest save.

        They compare before they write, so this waits for writes of saves before the latest alone.
        """
        latest = self.compared
        if latest.exception() is not None:
            self.compared = self.none_before
            latest.result()

    def check_is_open(self) -> None:
        """Raise unless a save can be made here and now."""
        has_group = self.calling.group is not None
        is_forked = self.hook is not None and not self.writing.thread.is_alive()
        has_ended = self.hook is None or self.writing.is_abandoned or is_forked
        if has_ended or dist.is_initialized() != has_group:
            raise RuntimeError(
                "save and resume inside its `with` block, in the process that has entered it once, "
                "when the process group is there; leave it before that is destroyed"
            )
        lost = self.calling.lost or self.writing.talk.lost
        if lost is not None:
            raise RuntimeError(
                f"the ranks have lost each other ({lost}): one has died, or came to a save more "
                f"than {self.calling.deadline} after the others. No later save can succeed: end "
                f"the job, and resume from its latest checkpoint; if a rank may come that late, "
                f"give init_process_group a longer timeout"
            ) from lost

    def wait_for_preparation(self) -> None:
        """Return when what ``prepare`` has begun has ended; what has not begun is dropped."""
        if self.preparation is not None:
            self.preparation.wait()
            self.preparation = None  # not before: an interrupted wait leaves it to the next

    def wait_for_buffer(self, before: Future) -> None:
        """Return when the save before this one is written."""
        if before.done():
            return
        if self.write_threads is None:
            self.writing.threads = min(2 * self.writing.threads, FILES)
        began = time.monotonic()
        wait([before])
        LOG.warning("a save waited %.1f s until the last was written", time.monotonic() - began)

    def stage(self, job: Job) -> None:
        """Queue the copies of ``job`` on the copying stream."""
        if not self.staging.fits(job.tensors):
            self.staging.finish_copies()
            self.make_buffer(job.tensors)
        job.hosts = self.staging.hosts
        job.copied = self.staging.queue()

    def make_buffer(self, tensors: list[torch.Tensor]) -> None:
        self.writer.forget()  # the memory of the buffer before
        self.writing.replicas = None
        self.staging.make_buffer(tensors)

    @torch.compiler.disable  # a compiled optimizer step would keep one save's event
    def before_step(self, optimizer: torch.optim.Optimizer, *arguments: object) -> None:
        """An optimizer is about to step: wait for copies; a preparation may begin."""
        self.staging.before_update()
        wanted = self.preparation
        if wanted is None or wanted.has_begun():
            return
        if not wanted.is_due(optimizer):
            wanted.note_step(optimizer)
            return
        try:
            wanted.ask()
        finally:  # it has begun, and a save waits for its end, even after an interrupt
            self.writing.put(partial(self.make_ready, wanted))

    def make_ready(self, wanted: Preparation) -> None:
        """On the thread that writes, what a first save would do: lock memory, plan the files."""
        failure = None
        try:
            with garbage_collection_paused():
                self.writing.talk.together(self.make_prepared_buffer, wanted)
                state = staged(wanted.leaves, wanted.tensors, self.staging.hosts)
                self.writer.prepare(state, self.writing.talk)
        except BaseException as error:  # CheckpointException is no Exception
            failure = error
        wanted.end(failure)

    def make_prepared_buffer(self, wanted: Preparation) -> None:
        if wanted.error is not None:
            raise wanted.error
        self.make_buffer(wanted.tensors)

    def before_update(self) -> None:
        """Make the current stream wait until the latest save has read the state."""
        self.staging.before_update()

    def wait(self) -> None:
        """Return when all saves so far have ended.

        Raises:
            RuntimeError: the first failure that no earlier ``wait`` has raised; rather than
                another one that the ranks differed in the latest save.
        """
        wait([self.latest])
        failures = self.writing.failures
        self.writing.failures = []
        self.raise_difference()
        if failures:
            raise failures[0]

    def __exit__(self, kind, error, trace) -> None:
        self.before_update()  # what comes after the block may write the state
        if self.hook is not None:
            self.hook.remove()
            self.hook = None
        is_abandoned = not is_end_of_job(kind)
        self.writing.is_abandoned = is_abandoned
        if self.preparation is not None:
            self.preparation.done.cancel()  # unless it has begun
        if not self.writing.end(EXIT_S if is_abandoned else None):
            LOG.error("left while a checkpoint was being written")
        if self.latest.done():
            self.calling.close()
            self.writing.talk.close()
        if not is_abandoned:
            self.wait()
