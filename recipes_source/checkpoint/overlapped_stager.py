import argparse
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from threading import Thread

import async_save as basic
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from staging_copies import CopyPlan, PinnedArena, is_staged, read, walk
from torch.optim.optimizer import register_optimizer_step_pre_hook

SAVES = 5  # more than the two buffer sets, so that both are used again
BUFFER_SETS = 2  # one is filled while the other is written
DEADLINE_S = 600.0  # for the other ranks, wherever a thread waits for them
EXIT_S = 30.0  # for a write under way when training ends by an exception


class OverlappedSaves:
    """Save checkpoints of all ranks beside training; a context manager around the loop.

    Args:
        device: where the state's tensors live; the current device.
        changed_by_forward: tensors that forward changes in place, such as ``model.buffers()``.
        if_busy: what ``save`` does while all buffers wait to be written: ``"wait"``, or ``"skip"``
            this save, on all ranks alike, and count it in ``skipped``.
        snapshot_bytes: of device memory. So much of the state is copied on the device first: the
            next update need not wait until it has arrived on the host.
    """

    def __init__(
        self,
        device: torch.device,
        changed_by_forward: Iterable[torch.Tensor] = (),
        if_busy: str = "wait",
        snapshot_bytes: int = 0,
    ) -> None:
        self.device, self.if_busy, self.snapshot_bytes = device, if_busy, snapshot_bytes
        self.changed_by_forward = list(changed_by_forward)
        self.streams = torch.get_device_module(device)
        self.copy_streams = self.streams.Stream(), self.streams.Stream()
        self.plan: CopyPlan | None = None
        self.sets: list[tuple[PinnedArena, list[torch.Tensor]]] = []
        self.queued: Future | None = None  # of the latest copies: the events behind them
        self.uploads: list[Future] = []
        self.failures: list[BaseException] = []
        self.saves = self.skipped = 0
        self.running = self.abandoned = False
        self.rank, self.groups = 0, []
        if dist.is_initialized():
            deadline = timedelta(seconds=DEADLINE_S)
            self.rank = dist.get_rank()
            self.groups = [dist.new_group(backend="gloo", timeout=deadline) for _ in range(2)]

    def __enter__(self) -> "OverlappedSaves":
        self.hook = register_optimizer_step_pre_hook(self.before_update)
        self.copier = ThreadPoolExecutor(1, "copy", self.streams.set_device, (self.device,))
        self.running = True
        return self

    def save(self, state_dict: dict, directory: Path) -> Future | None:
        """Save ``state_dict`` as it is now to ``directory``; all ranks call it.

        Returns:
            A future that ends when the whole checkpoint is in ``directory``, and raises on every
            rank what failed on one. None if the save was skipped.

        Raises:
            RuntimeError: outside the ``with`` block.
        """
        if not self.running:
            raise RuntimeError("save within `with OverlappedSaves(...) as saves:`")
        if self.if_busy == "skip" and self.busy_on_any_rank():
            self.skipped += 1
            return None
        wait(self.uploads[: 1 - BUFFER_SETS])
        tensors: list[torch.Tensor] = []
        state = read(state_dict, tensors)
        staged, hosts, done = Future(), [], Future()
        try:
            arena, hosts = self.prepare(tensors)
            self.before_update()
            self.plan.take_snapshots()
            ready = self.streams.current_stream().record_event()
            staged = self.copier.submit(self.copy, self.plan, arena, ready)
            self.queued = staged
        except Exception as failure:  # the other ranks are saving: they will be told
            staged.set_exception(failure)
        job = staged, hosts, state, Path(directory), self.uploads[-1:], done
        self.uploads = [*self.uploads[-BUFFER_SETS:], done]
        Thread(target=self.write_in_turn, args=job, name="write", daemon=True).start()
        return done

    def busy_on_any_rank(self) -> bool:
        busy = torch.tensor(sum(not upload.done() for upload in self.uploads) >= BUFFER_SETS)
        if self.groups:
            dist.all_reduce(busy, dist.ReduceOp.MAX, group=self.groups[1])
        return bool(busy)

    def prepare(self, tensors: list[torch.Tensor]) -> tuple[PinnedArena, list[torch.Tensor]]:
        """The buffers in turn and the tensors in them, planned anew if a tensor is another one."""
        if self.plan is None or not self.plan.fits(tensors):
            wait(self.uploads)
            self.plan, self.sets = None, []
            plan = CopyPlan(tensors, self.device, self.changed_by_forward, self.snapshot_bytes)
            arenas = [PinnedArena(plan.nbytes, self.device) for _ in range(BUFFER_SETS)]
            self.plan, self.sets = plan, [(arena, plan.hosts(arena)) for arena in arenas]
        self.saves += 1
        return self.sets[self.saves % BUFFER_SETS]

    def copy(self, plan: CopyPlan, arena: PinnedArena, ready) -> tuple:
        """Queue the copies behind ``ready``, on the copying thread."""
        first, second = self.copy_streams
        first.wait_event(ready)
        return plan.copy_in_turns(arena, self.streams, first, second)

    def before_update(self, *_) -> None:
        """Make the current stream wait until the latest save has read the state."""
        if self.queued is not None and self.queued.exception(DEADLINE_S) is None:
            has_been_read, _ = self.queued.result()
            self.streams.current_stream().wait_event(has_been_read)

    def write_in_turn(self, staged, hosts, state, directory: Path, previous, done: Future) -> None:
        """Write one state after the ``previous`` one, aside; name it when it is complete."""
        aside = directory.with_name(directory.name + ".incomplete")
        try:
            self.streams.set_device(self.device)
            wait(previous)
            self.together(self.begin, staged, aside)
            remaining = iter(hosts)
            state = walk(state, lambda leaf: next(remaining) if is_staged(leaf) else leaf)
            self.together(self.write, state, aside)
            self.together(self.commit, aside, directory)
            done.set_result(directory)
        except BaseException as failure:  # CheckpointException is no Exception
            failure.add_note(f"there is no checkpoint in {directory}")
            logging.getLogger(__name__).error("no checkpoint in %s: %s", directory, failure)
            self.failures.append(failure)
            done.set_exception(failure)

    def together(self, work: Callable[..., None], *args) -> None:
        """Do ``work`` on all ranks; raise on all if it fails on one."""
        error = None
        try:
            work(*args)
        except BaseException as failure:
            error = failure
        reports = [f"rank {self.rank}: {error!r}" if error else None]
        if self.groups:
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, reports[0], group=self.groups[0])
            reports = everyone
        if any(reports):
            raise RuntimeError("; ".join(report for report in reports if report)) from error

    def begin(self, staged: Future, aside: Path) -> None:
        if self.abandoned:
            raise RuntimeError("training has ended by an exception")
        _, copied = staged.result()
        copied.synchronize()
        if self.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)  # what a job that died has left

    def write(self, state: dict, directory: Path) -> None:
        """Write this rank's part of ``state``, which lies in host memory."""
        torch.serialization.set_crc32_options(False)  # of this thread; takes half of the time
        writer = dcp.FileSystemWriter(directory, per_thread_copy_ahead=0)
        group = self.groups[0] if self.groups else None
        dcp.save(state, storage_writer=writer, process_group=group, no_dist=group is None)

    def commit(self, aside: Path, directory: Path) -> None:
        """Give the complete checkpoint its name, in place of an older one of that name."""
        if self.rank == 0:
            replaced = directory.with_name(directory.name + ".replaced")
            if directory.exists():
                directory.rename(replaced)
            aside.rename(directory)
            shutil.rmtree(replaced, ignore_errors=True)

    def wait(self) -> None:
        """Return when all saves so far have ended.

        Raises:
            RuntimeError: what the first of those failed of which no ``wait`` has told yet.
        """
        wait(self.uploads)
        failures, self.failures = self.failures, []
        if failures:
            raise failures[0]

    def __exit__(self, kind, error, trace) -> None:
        self.hook.remove()
        self.running, self.abandoned = False, kind is not None
        try:
            wait(self.uploads, EXIT_S if self.abandoned else None)
            if not self.abandoned:
                self.wait()
        finally:
            self.copier.shutdown()
            if all(upload.done() for upload in self.uploads):
                for group in self.groups:
                    dist.destroy_process_group(group)


def main(directory: Path) -> None:
    device = basic.start_rank()
    try:
        root = basic.directory_of_rank_0(directory)
        app, expected = basic.build_app(device), {}
        with OverlappedSaves(device, app.model.buffers()) as saves:
            for _ in range(SAVES):
                for _ in range(basic.SAVE_EVERY):
                    basic.train_step(app, device)
                expected[app.step] = basic.snapshot(app)
                saves.save({"app": app}, root / f"step{app.step}")
            basic.train_step(app, device)
        for step, bits in expected.items():
            basic.assert_same_bits(basic.load_app(root / f"step{step}", device), bits)
        print(f"checkpoints of steps {list(expected)} loaded back, every bit equal")
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, help="where checkpoints go (default: temporary)")
    with tempfile.TemporaryDirectory() as temporary:
        main(parser.parse_args().dir or Path(temporary))
