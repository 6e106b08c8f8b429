# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.1, overlap_recipes/checkpoint/saves.py
"""Saves beside training: staged during the next forward and backward, written on a thread."""

import gc
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .copies import Copies, CopyPlan, PinnedArena
from .state import (
    PASS_PER_RANK,
    REPLICAS_DIFFER,
    DifferingRanks,
    differing_names,
    digests_of_replicas,
    is_staged,
    read,
    refuse_differing,
    shared_digests,
    walk,
)
from .writer import FILES, FileWriter

LOG = logging.getLogger(__name__)
DEADLINE_S = 600.0  # how long a thread waits for the other ranks
WRITING, CALLING = 0, 1  # process groups: of the writing threads, and of the threads that train
EXIT_S = 30.0  # how long the end of the block waits for a write after an exception
FEWEST_THREADS = 2  # that write, unless a save comes before the one before it is written
LOST = (
    "the ranks have lost each other: one has died, or came to a save more than %d s behind the "
    "others. No later save can succeed: end the job, and resume from its latest checkpoint"
)


@dataclass
class Job:
    """One save, for the writing thread.

    Attributes:
        number: how many saves this rank has called.
        copied: the event behind its copies, or the error that came before it.
        tensors, hosts: of the state, and what is staged of them.
        compared: done when ranks have compared what they share; it raises if they differ.
        done: what ``save`` has returned.
        call_s: how long ``save`` kept the training thread.
    """

    number: int
    directory: Path
    copied: object
    tensors: list[torch.Tensor]
    hosts: list[torch.Tensor]
    state: object
    compared: Future
    done: Future
    call_s: float = 0.0


@dataclass
class Preparation:
    """What ``prepare`` has asked for."""

    state: object
    stepped: set[int]  # ids of the optimizers that have stepped since
    done: Future


def is_end_of_job(kind: type[BaseException] | None) -> bool:
    """Whether a block that is left by ``kind`` has come to its end, as by ``sys.exit``."""
    return kind is None or issubclass(kind, SystemExit)


class Saves:
    """Save checkpoints of all ranks beside training; a context manager around the loop.

    One buffer of this rank's state is page-locked, and a save that comes before the one before it
    is written waits until it is. A second buffer would move that wait to the third save of a row
    and no further, and locking it would stop training, too: while the driver locks or unlocks
    pages it launches nothing, .2 s to .3 s for 10 GB.

    Args:
        device: where the state's tensors live; the current device.
        changed_by_forward: tensors that forward changes in place, or a function that returns them,
            such as ``model.buffers``.
        if_busy: what ``save`` does before the save before it is written. ``"skip"``: leave this
            one out on all ranks and count it in ``skipped``; every save then waits until all ranks
            have called it. ``"wait"``, and any other value: wait, and log for how long.
        host_bytes: how much page-locked memory this rank may take; None: no bound. A save that
            needs more fails before any is locked, and says how much it needs.
        write_threads: how many threads of this rank write, 1 to 8. None: two, and twice as many
            each time that a save is called before the one before it is written. More end sooner
            and cost training more: they take cores and memory from the thread that launches.

    Relative directories are those below the working directory of when this object was made. Ranks
    wait for each other for ten minutes: if one comes to a save later, that save fails, and the next
    call raises.

    Attributes:
        skipped: saves that were left out.

    Raises:
        ValueError: ``write_threads`` is not between 1 and 8.
    """

    ADVICE = PASS_PER_RANK  # where ranks differ in what they share

    def __init__(
        self,
        device: torch.device | str,
        changed_by_forward: Iterable[torch.Tensor] | Callable[[], Iterable[torch.Tensor]] = (),
        if_busy: str = "wait",
        host_bytes: int | None = None,
        write_threads: int | None = None,
    ) -> None:
        if write_threads is not None and not 1 <= write_threads <= FILES:
            raise ValueError(f"write_threads is {write_threads}: give 1 to {FILES}, or None")
        self.device = torch.empty(0, device=device).device  # with its index
        # Asked for at every plan: ``model.to`` replaces buffers.
        changing = changed_by_forward
        self.changing = changing if callable(changing) else list(changing).copy
        self.working_directory = Path.cwd()
        self.if_busy = if_busy
        self.host_bytes = host_bytes
        self.write_threads = write_threads
        self.threads = write_threads or FEWEST_THREADS
        self.streams = torch.get_device_module(self.device)
        self.copy_stream = self.streams.Stream()
        self.plan: CopyPlan | None = None
        self.arena: PinnedArena | None = None
        self.copies: Copies | None = None
        self.hosts: list[torch.Tensor] = []
        self.has_been_read = None  # an event: the latest save has read the tensors in place
        self.preparation: Preparation | None = None
        self.jobs: SimpleQueue = SimpleQueue()
        self.calls = 0
        self.skipped = 0
        self.none_before = Future()
        self.none_before.set_result(None)
        self.latest = self.none_before  # those before the latest have ended when it has
        self.compared = self.none_before  # of the latest save
        self.failures: list[BaseException] = []
        self.lost: Exception | None = None  # what has ended the talk with the other ranks
        self.hook = None
        self.abandoned = False
        self.rank = 0
        self.groups = []
        if dist.is_initialized():
            self.rank = dist.get_rank()
            deadline = timedelta(seconds=DEADLINE_S)
            for _ in (WRITING, CALLING):
                self.groups.append(dist.new_group(backend="gloo", timeout=deadline))
        self.files = FileWriter(self.together, self.groups[WRITING] if self.groups else None)

    def __enter__(self) -> "Saves":
        self.hook = register_optimizer_step_pre_hook(self.before_update)
        self.writer = Thread(target=self.write_in_turn, name="write", daemon=True)
        self.writer.start()
        return self

    # -- on the training thread -------------------------------------------------------------------

    def prepare(self, state_dict: dict) -> Future:
        """Lock memory and plan beside the first steps, so that the first save need not.

        A driver may launch nothing while it locks memory, which can cost training seconds, once.
        The state is asked for once, on this thread, before an optimizer's second step from here
        on, when all optimizers have stepped: one that has no state yet would have to be made to
        step. All ranks call it, in the block, with what they will pass to ``save``.

        Returns:
            A future, done when the next save need not wait. It raises where memory cannot be had;
            so will a save.

        Raises:
            RuntimeError: as ``save``; the second time, or behind a save.
        """
        self.check_is_open()
        if self.preparation is not None or self.calls > 0:
            raise RuntimeError("prepare once, before the first save")
        self.preparation = Preparation(state_dict, set(), Future())
        return self.preparation.done

    def look_for_preparation(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin to prepare, if it is time."""
        wanted = self.preparation
        if wanted is None or wanted.done.running() or wanted.done.done():
            return
        own: set[int] = set()
        for part in wanted.state.values():
            own.update(id(each) for each in getattr(part, "optimizers", ()))
        if own and id(optimizer) not in own:
            return  # it may step on this rank alone
        if id(optimizer) not in wanted.stepped:
            wanted.stepped.add(id(optimizer))
            return
        if not own <= wanted.stepped:
            return
        wanted.done.set_running_or_notify_cancel()
        self.ask_to_prepare(wanted)

    @torch.inference_mode(False)
    def ask_to_prepare(self, wanted: Preparation) -> None:
        tensors: list[torch.Tensor] = []
        state: object = KeyboardInterrupt("in prepare")
        try:
            state = read(wanted.state, tensors)
        except Exception as failure:  # the save will fail of it, on all ranks
            state = failure
        finally:  # a save waits for the end of what has begun
            self.jobs.put((wanted.done, tensors, state))

    @torch.inference_mode(False)
    def save(self, state_dict: dict, directory: Path | str) -> Future | None:
        """Save ``state_dict`` as it is now to ``directory``; all ranks call it.

        Returns:
            A future. It is done when the whole checkpoint is in ``directory``, and raises on every
            rank if the save failed on one. None if the save was skipped.

        Raises:
            RuntimeError: outside the ``with`` block; in a second block, if the first ended by an
                exception or there is a process group; if ``init_process_group`` came after this
                object; at the first save, if a rank's state cannot be saved or differs from
                another's where they share it; of later ones, the next call raises that they differ,
                and makes its own save; the ranks have lost each other.
        """
        self.check_is_open()
        if self.if_busy == "skip" and self.is_busy():
            self.skipped += 1
            return None
        began = time.monotonic()
        self.calls += 1
        interrupted = KeyboardInterrupt("in save")
        path = self.working_directory / directory
        job = Job(self.calls, path, interrupted, [], [], None, Future(), Future())
        before = self.latest
        compared_before = self.compared
        self.latest = job.done
        self.compared = job.compared
        try:
            self.wait_for_preparation()
            self.wait_for_buffer(before)
            job.state = read(state_dict, job.tensors)
            self.stage(job)
        except Exception as failure:
            job.copied = failure.with_traceback(None)  # whose frames hold a plan and its memory
        finally:  # the other ranks are saving: they will be told
            job.call_s = time.monotonic() - began
            self.jobs.put(job)
        if self.calls == 1:
            self.raise_refusals(job)
        compared_before.result()  # of a save that has ended: this one has waited for it
        return job.done

    def raise_refusals(self, job: Job) -> None:
        """Raise on all ranks, at the first save, what no later save can mend."""
        refuse_differing(self.together(self.digests_of, job, group=CALLING), self.ADVICE)

    def raise_difference(self) -> None:
        """Raise, once and on all ranks, if they differed in the latest save.

        They compare before they write, so this waits for writes of saves before the latest alone.
        """
        latest = self.compared
        if latest.exception() is not None:
            self.compared = self.none_before
            latest.result()

    def digests_of(self, job: Job) -> dict[str, str]:
        if job.state is None:
            raise job.copied
        return self.shared(job.state)

    def shared(self, state: dict) -> dict[str, str]:
        """Digests, by name, of what must be equal on all ranks. For subclasses."""
        return shared_digests(state)

    def check_is_open(self) -> None:
        if self.hook is None or self.abandoned or dist.is_initialized() != bool(self.groups):
            raise RuntimeError("save in one `with Saves(...)`, behind init_process_group")
        if self.lost is not None:
            raise RuntimeError(LOST % DEADLINE_S) from self.lost

    def is_busy(self) -> bool:
        """Whether a rank has a save that is not written."""
        under_way = not self.latest.done()
        return any(self.together(lambda: under_way, group=CALLING))

    def wait_for_preparation(self) -> None:
        """Return when what ``prepare`` has begun has ended; drop it if it has not begun."""
        wanted = self.preparation
        if wanted is None:
            return
        if wanted.done.running():
            began = time.monotonic()
            wait([wanted.done])
            LOG.warning("a save waited %.1f s for its preparation", time.monotonic() - began)
        wanted.done.cancel()
        self.preparation = None  # not before: an interrupted wait leaves it to the next save

    def wait_for_buffer(self, before: Future) -> None:
        """Return when the save before this one is written."""
        if before.done():
            return
        if self.write_threads is None:
            self.threads = min(2 * self.threads, FILES)
        began = time.monotonic()
        wait([before])
        LOG.warning("a save waited %.1f s until the last was written", time.monotonic() - began)

    def stage(self, job: Job) -> None:
        """Queue the copies of ``job`` on the copying stream."""
        if self.plan is None or not self.plan.fits(job.tensors):
            self.streams.synchronize()  # copies of a save that failed may be under way
            self.make_buffer(job.tensors)
        job.hosts = self.hosts
        training = self.streams.current_stream()
        training.wait_stream(self.copy_stream)  # which may read older snapshots
        self.plan.take_snapshots()
        self.copy_stream.wait_stream(training)
        queued = self.copies.queue(self.streams, self.copy_stream)
        self.has_been_read, job.copied = queued

    def make_buffer(self, tensors: list[torch.Tensor]) -> None:
        """Plan the copies of ``tensors``, and lock memory for them unless there is enough."""
        began = time.monotonic()
        self.plan = None
        self.copies = None
        self.hosts = []
        self.files.forget()
        plan = CopyPlan(tensors, self.device, self.changing())
        if self.host_bytes is not None and plan.nbytes > self.host_bytes:
            raise RuntimeError(f"a save needs {plan.nbytes} bytes, host_bytes is {self.host_bytes}")
        if self.arena is None or self.arena.bytes.nbytes < plan.nbytes:
            self.arena = None  # before there is another
            self.arena = PinnedArena(plan.nbytes, self.device)
        self.copies = plan.copies(self.arena)
        self.hosts = plan.hosts(self.arena)
        self.plan = plan
        LOG.info("%d bytes planned in %.1f s", plan.nbytes, time.monotonic() - began)

    @torch.compiler.disable  # a compiled optimizer step would keep one save's event
    def before_update(self, *hooked: object) -> None:
        """Make the current stream wait until the latest save has read the state."""
        if self.has_been_read is not None:
            self.streams.current_stream().wait_event(self.has_been_read)
        if hooked:
            self.look_for_preparation(hooked[0])

    def wait(self) -> None:
        """Return when all saves so far have ended.

        Raises:
            RuntimeError: the first failure that no earlier ``wait`` has raised; rather than
                another one that the ranks differed in the latest save.
        """
        wait([self.latest])
        failures = self.failures
        self.failures = []
        self.raise_difference()
        if failures:
            raise failures[0]

    def __exit__(self, kind, error, trace) -> None:
        self.before_update()  # what comes after the block may write the state
        if self.hook is not None:
            self.hook.remove()
            self.hook = None
        self.abandoned = not is_end_of_job(kind)
        if self.preparation is not None:
            self.preparation.done.cancel()  # unless it has begun
        self.jobs.put(None)
        self.writer.join(EXIT_S if self.abandoned else None)
        if self.writer.is_alive():
            LOG.error("left while a checkpoint was being written")
        while dist.is_initialized() and self.groups and self.latest.done():
            dist.destroy_process_group(self.groups.pop())
        if not self.abandoned:
            self.wait()

    # -- on the writing thread --------------------------------------------------------------------

    def write_in_turn(self) -> None:
        """Write one checkpoint after the other."""
        self.streams.set_device(self.device)  # a new thread would open a context on the first
        for job in iter(self.jobs.get, None):
            if isinstance(job, Job):
                self.write_aside(job)
            else:
                self.make_ready(*job)
            del job  # which holds the host tensors of a plan

    def make_ready(self, done: Future, tensors: list[torch.Tensor], state: object) -> None:
        """What a first save would do: lock memory, and plan the files."""
        try:
            with garbage_collection_paused():
                self.together(self.make_buffer_for, tensors, state)
                self.prepare_files(staged(state, tensors, self.hosts))
            done.set_result(None)
        except BaseException as failure:  # CheckpointException is no Exception
            LOG.error("not prepared, the next save will try again: %s", failure)
            done.set_exception(failure)

    def prepare_files(self, state: dict) -> None:
        """Plan what ``write`` will write. For subclasses that have their own."""
        self.files.prepare(state)

    def make_buffer_for(self, tensors: list[torch.Tensor], state: object) -> None:
        if isinstance(state, BaseException):
            raise state
        self.make_buffer(tensors)

    def write_aside(self, job: Job) -> None:
        """Write one state under another name; give it its own when it is complete."""
        directory = job.directory
        aside = Path(f"{directory}.incomplete")
        has_begun = False
        began = time.monotonic()
        try:
            if len(set(self.together(self.begin, job, aside))) > 1:
                raise RuntimeError(f"the ranks have called save for others than {directory}")
            has_begun = True
            self.compare(job)
            copied = time.monotonic()
            self.together(self.write, job.state, aside)
            has_begun = False
            self.together(self.commit, aside, directory)
            written = time.monotonic()
            LOG.info(
                "%s: the call took %.3f s, staged in %.2f s, written in %.2f s",
                directory,
                job.call_s,
                copied - began,
                written - copied,
            )
            job.done.set_result(directory)
        except BaseException as failure:  # CheckpointException is no Exception
            if self.rank == 0 and has_begun:
                shutil.rmtree(aside, ignore_errors=True)  # a full disk needs the room
            LOG.error("no checkpoint in %s: %s", directory, failure)
            if not job.compared.done():
                job.compared.set_result(None)
            self.failures.append(failure)
            job.done.set_exception(failure)

    def compare(self, job: Job) -> None:
        """Raise on all ranks if they differ in what they share."""
        of_ranks = self.together(self.shared, job.state)
        try:
            refuse_differing(of_ranks, self.ADVICE)
        except DifferingRanks as error:
            job.compared.set_exception(error)
            raise
        job.compared.set_result(None)
        if job.number == 1:
            replicas = self.together(digests_of_replicas, job.state)
            differing = differing_names(replicas)
            if differing and self.rank == 0:
                LOG.warning(REPLICAS_DIFFER, ", ".join(differing))

    def together(self, work: Callable, *args: object, group: int = WRITING) -> list:
        """Call ``work`` on all ranks; return all results, or raise on all ranks if one failed."""
        error = None
        report = None, None
        try:
            report = work(*args), None
        except BaseException as failure:
            error = failure
            # DCP's error has those of all ranks in ``failures``
            cause = next((c for c, _ in getattr(failure, "failures", {}).values()), failure)
            text = str(cause)
            if not text.startswith("rank "):  # else an inner call has told of all ranks
                text = f"rank {self.rank}: {type(cause).__name__}: {text}"
            report = None, text
        reports = [report]
        if self.groups:
            reports = [report] * dist.get_world_size()
            try:
                dist.all_gather_object(reports, report, group=self.groups[group])
            except Exception as failure:
                self.lost = failure
                raise
        failures = [failure for _, failure in reports if failure]
        if failures:
            raise RuntimeError("; ".join(dict.fromkeys(failures))) from error
        return [result for result, _ in reports]

    def begin(self, job: Job, aside: Path) -> tuple:
        """Wait for the copies. Until then this thread leaves the interpreter to the training.

        Returns:
            What must be the same on all ranks.
        """
        if self.abandoned and self.groups:  # other ranks may not have called this save
            raise RuntimeError("training has ended by an exception")
        if isinstance(job.copied, BaseException):
            raise job.copied
        job.copied.synchronize()
        job.state = staged(job.state, job.tensors, job.hosts)
        if self.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)  # left by a job that died
        return job.number, aside

    def write(self, state: dict, directory: Path) -> None:
        """Write this rank's part of ``state``, which lies in host memory. For subclasses."""
        self.files.write(state, directory, self.threads)

    def commit(self, aside: Path, directory: Path) -> None:
        """Give the complete checkpoint its name, in place of an older one with the same files."""
        if self.rank == 0:
            old = {x.suffix if x.suffix == ".distcp" else x.name for x in directory.rglob("*")}
            new = {x.name for x in aside.rglob("*")}
            if {".metadata", ".distcp"} <= old <= {".distcp", *new}:
                shutil.rmtree(f"{directory}.replaced", ignore_errors=True)
                directory.rename(f"{directory}.replaced")
            aside.rename(directory)
            shutil.rmtree(f"{directory}.replaced", ignore_errors=True)


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Leave cycles uncollected in all threads.

    A plan is tens of thousands of objects, which set off two or three full collections: each stops
    the training thread, too, for .2 to .3 s.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class AskedLater:
    """State for ``prepare`` that is asked for by a function, when it is time.

    For trainers: they give saves new dicts, and make their optimizers late.

    Args:
        ask: returns what ``save`` will be given here.
        optimizers: returns those that must have stepped.
    """

    def __init__(
        self, ask: Callable[[], dict], optimizers: Callable[[], list[torch.optim.Optimizer]]
    ) -> None:
        self.state_dict = ask
        self.ask_for_optimizers = optimizers

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return self.ask_for_optimizers()


def staged(state: object, tensors: list[torch.Tensor], hosts: list[torch.Tensor]) -> object:
    """``state`` with ``hosts`` in the place of ``tensors``."""
    host_of = dict(zip(map(id, tensors), hosts, strict=True))

    def in_place_of(leaf: object) -> object:
        return host_of[id(leaf)] if is_staged(leaf) else leaf

    return walk(state, in_place_of)
