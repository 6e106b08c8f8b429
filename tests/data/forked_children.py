"""Children forked under ``Preemption``: SIGTERM ends each at once, and the parent hears nothing."""

import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from overlap_recipes.checkpoint.preemption import Preemption

FORK = multiprocessing.get_context("fork")
GRACE_S = 8
ENDS_WITHIN_S = 4  # before the grace period of the parent would end a child


def wait_for(lock, begun) -> None:
    begun.set()
    lock.acquire()


def ends(child) -> None:
    """Assert that ``child`` ends by SIGTERM."""
    child.join(ENDS_WITHIN_S)
    code = child.exitcode
    child.kill()
    child.join()
    assert code == -signal.SIGTERM, f"exit code {code}, due is {-signal.SIGTERM}"


def waits_for_a_lock() -> None:
    """As the workers of a pool that is ended: its end takes the lock of their queue for good."""
    lock = FORK.Lock()
    begun = FORK.Event()
    child = FORK.Process(target=wait_for, args=(lock, begun))
    with lock:
        child.start()
        begun.wait()
        child.terminate()
        ends(child)


def forked_by_a_thread() -> None:
    """As a pool's workers that take the place of ended ones."""
    thread = threading.Thread(target=waits_for_a_lock)
    failures = []
    threading.excepthook = failures.append
    thread.start()
    thread.join()
    assert not failures, failures[0].exc_value


def forked_after_the_end() -> None:
    """Where the job has left its block, asked to, SIGTERM is ignored."""
    signal.raise_signal(signal.SIGTERM)
    leaving.__exit__(None, None, None)
    waits_for_a_lock()


class OwnNumber(IterableDataset):
    """The worker's number of a process, time and again."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield os.getpid()


def gives_the_loop_its_batches() -> None:
    """torchrun and Slurm signal all processes of a rank; the steps until the save need batches."""
    batches = iter(DataLoader(OwnNumber(), num_workers=1))
    number = int(next(batches))
    subprocess.run(["kill", "-TERM", str(number)], check=True)
    time.sleep(0.5)
    for _ in range(9):  # more than were there before
        assert int(next(batches)) == number
    (worker,) = batches._workers
    worker.terminate()
    worker.join(ENDS_WITHIN_S)
    assert worker.exitcode == 0, f"exit code {worker.exitcode}: the loader would raise"


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    leaving = Preemption(GRACE_S)
    leaving.__enter__()
    waits_for_a_lock()
    forked_by_a_thread()
    gives_the_loop_its_batches()
    assert not leaving.asked, "the parent took a child's signal for its own"
    forked_after_the_end()
    dist.destroy_process_group()
