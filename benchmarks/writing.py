"""Ways of writing a staged state: bytes a second, and what each costs the training thread.

    torchrun --nproc-per-node=2 benchmarks/writing.py --gb 6 --dirs memory=/dev/shm disk=/tmp

No accelerator is used. Every rank holds ``--gb`` gigabytes of host tensors, the sizes those of a
Llama's parameters and Adam state; all ranks write at once, to new files, fsync included. Prints one
line of JSON a row, as it comes:

* ``raw``: plain writes of 64 MB by 1, 2, 4 and 8 threads with a file each: what the storage takes
* ``stock``, ``stock_without_sums``: ``dcp.save``, with zip's checksums and without
* ``overlapped_writer``: the recipe, by its number of threads
* ``process``: the same bytes written by another process that maps the same memory

``lost_s`` is what the write takes from a thread that calls small operators in a loop, as training
does: the time it lasts less the time in which the loop would have come as far alone. ``user_s`` is
the processor time of the writing thread outside the system: it cannot hold the interpreter's lock
for longer, and other work on the machine does not change it.
"""

import argparse
import json
import mmap
import os
import pickle
import resource
import shutil
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

sys.path.insert(0, str(Path(__file__).parent.parent / "recipes_source" / "checkpoint"))
import overlapped_writer  # noqa: E402
from overlapped_writer import OverlappedWriter, around, serialised  # noqa: E402

PIECE = 64 << 20
CHILD = """
import mmap, os, pickle, sys
from concurrent.futures import ThreadPoolExecutor
memory = memoryview(mmap.mmap(int(sys.argv[1]), 0, access=mmap.ACCESS_READ))
def write_file(job):
    path, pieces = job
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for offset, size, parts in pieces:
        parts = [memory[p[0] : p[1]] if isinstance(p, tuple) else p for p in parts]
        assert os.pwritev(file, parts, offset) == size
    os.fsync(file)
    os.close(file)
kept = {}
while True:
    key, new, directory, names, tail = pickle.load(sys.stdin.buffer)
    kept.setdefault(key, new)
    jobs = [(os.path.join(directory, n), kept[key][i]) for i, n in enumerate(names)]
    jobs[0] = jobs[0][0], jobs[0][1] + [tail]
    with ThreadPoolExecutor(len(jobs)) as threads:
        list(threads.map(write_file, jobs))
    print("written", flush=True)
"""


class Arena:
    """``nbytes`` of memory that another process can map."""

    def __init__(self, nbytes: int) -> None:
        self.file = os.memfd_create("arena")
        os.ftruncate(self.file, nbytes)
        self.memory = mmap.mmap(self.file, nbytes)
        self.all = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.all.fill_(1)

    def state(self, tensors: int, rank: int) -> dict:
        """Large tensors and as many steps as every fourth; the arena is full."""
        large = tensors - tensors // 4
        size = (self.all.nbytes - tensors * 64) // large // 64 * 64
        state, offset = {"step": 1}, 0
        for n in range(tensors):
            nbytes = size if n < large else 4
            tensor = torch.frombuffer(
                self.memory, dtype=torch.float32, count=nbytes // 4, offset=offset
            )
            state[f"rank{rank}.layers.{n}.weight"] = tensor
            offset += max(nbytes, 64)
        return state


class ProcessWriter(OverlappedWriter):
    """The recipe, but the bytes are written by a process that maps the arena."""

    def start(self, arena: Arena) -> None:
        self.base, self.sent = arena.all.data_ptr(), set()
        command = [sys.executable, "-S", "-c", CHILD, str(arena.file)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.child = subprocess.Popen(command, pass_fds=[arena.file], **pipes)

    def in_arena(self, planner, items: list) -> list:
        pieces, offset, size, parts = [], 0, 0, []
        for item in items:
            tensor = planner.resolve_data(item)
            head, tail = around(tensor.shape, tensor.dtype)
            start = tensor.data_ptr() - self.base
            end = start + tensor.nbytes
            cuts = [(at, min(at + PIECE, end)) for at in range(start, end, PIECE)]
            for part in (head, *cuts, tail):
                length = part[1] - part[0] if isinstance(part, tuple) else len(part)
                if size + length > PIECE or len(parts) == os.sysconf("SC_IOV_MAX"):
                    pieces.append((offset, size, parts))
                    offset, size, parts = offset + size, 0, []
                parts.append(part)
                size += length
        return pieces + [(offset, size, parts)]

    def write_files(self, planner, directory: Path) -> list:
        layout, new = self.layout, None
        if self.key not in layout.calls:
            layout.calls[self.key] = len(self.sent)
            new = [self.in_arena(planner, items) for items in layout.files]
            self.sent.add(len(self.sent))
        tail, places = bytearray(), []
        for item in layout.others:
            data = serialised(planner.resolve_data(item))
            place = overlapped_writer._StorageInfo(
                layout.names[0], layout.ends[0] + len(tail), len(data)
            )
            places.append(overlapped_writer.WriteResult(item.index, len(data), place))
            tail += data
        directory.mkdir(parents=True, exist_ok=True)
        last = layout.ends[0], len(tail), [bytes(tail)]
        job = layout.calls[self.key], new, str(directory), layout.names, last
        pickle.dump(job, self.child.stdin)
        self.child.stdin.flush()
        assert self.child.stdout.readline() == b"written\n"
        return places


def raw(arena: Arena, writers: int, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    share = arena.all.nbytes // writers

    def write(n: int) -> None:
        with open(directory / f"rank{dist.get_rank()}.{n}", "wb") as stream:
            file = stream.fileno()
            for at in range(0, share, PIECE):
                start = n * share + at
                part = memoryview(arena.memory)[start : start + min(PIECE, share - at)]
                os.pwrite(file, part, at)
            os.fsync(file)

    with ThreadPoolExecutor(writers) as threads:
        list(threads.map(write, range(writers)))


def steps_while(done: threading.Event, seconds: float = 1e9) -> tuple[int, float]:
    """How often a loop of small operators came round until ``done``, and the seconds it took."""
    x, steps, started = torch.ones(8), 0, time.perf_counter()
    while not done.is_set() and time.perf_counter() - started < seconds:
        for _ in range(20):
            x.mul_(1.0).add_(0.0)
        steps += 1
    return steps, time.perf_counter() - started


def user_seconds() -> float:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_utime


def measured(write, directory: Path) -> tuple[float, float, float]:
    """Seconds of ``write`` beside the loop, of its thread's own code, and what the loop lost."""
    steps, alone = steps_while(threading.Event(), 0.5)
    dist.barrier()
    done, took = threading.Event(), []

    def run() -> None:
        started, user = time.perf_counter(), user_seconds()
        write(directory)
        took.append((time.perf_counter() - started, user_seconds() - user))
        done.set()

    thread = threading.Thread(target=run)
    thread.start()
    made, lasted = steps_while(done)
    thread.join()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(directory)
    dist.barrier()
    return *took[0], lasted - made * alone / steps


def main(options: argparse.Namespace) -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    arena = Arena(int(options.gb * 1e9) // 4096 * 4096)
    device = torch.device("cpu")
    for name, _, path in (place.partition("=") for place in options.dirs):
        root = Path(path) / "overlap_recipes_writing"

        def row(
            way: str, tensors: int, writers: int, write, warm: int, root=root, name=name
        ) -> None:
            for number in range(warm):
                write(root / f"warm{number}")
            if warm:
                dist.barrier()
                shutil.rmtree(root, ignore_errors=True)
                dist.barrier()
            samples = [measured(write, root / str(n)) for n in range(options.samples)]
            seconds = [None] * dist.get_world_size()
            dist.all_gather_object(seconds, samples)
            slowest = [max(rank[n][0] for rank in seconds) for n in range(options.samples)]
            user = [rank[n][1] for rank in seconds for n in range(options.samples)]
            lost = [rank[n][2] for rank in seconds for n in range(options.samples)]
            if dist.get_rank() == 0:
                found = {"way": way, "storage": name, "tensors": tensors, "writers": writers}
                found["ranks"] = dist.get_world_size()
                rate = arena.all.nbytes / statistics.median(slowest)
                found["write_bytes_per_s"] = round(rate)
                found["write_s"] = round(statistics.median(slowest), 4)
                found["user_s"] = round(statistics.median(user), 4)
                found["lost_s"] = round(statistics.median(lost), 4)
                print(json.dumps(found), flush=True)

        for writers in options.writers:
            row("raw", 0, writers, lambda to, n=writers: raw(arena, n, to), 0)
        for tensors in options.tensors:
            state = arena.state(tensors, dist.get_rank())
            for writers in options.writers:
                overlapped_writer.WRITERS = writers
                write = partial(OverlappedWriter(device).write, state)
                row("overlapped_writer", tensors, writers, write, 1)
            saves = ProcessWriter(device)
            saves.start(arena)
            row("process", tensors, writers, partial(saves.write, state), 1)
            saves.child.kill()
            saves.child.wait()
            if options.stock:
                group = dist.new_group(backend="gloo")
                for way, sums in (("stock_without_sums", False), ("stock", True)):

                    def stock(to: Path, sums=sums, group=group, state=state) -> None:
                        torch.serialization.set_crc32_options(sums)
                        writer = dcp.FileSystemWriter(to, per_thread_copy_ahead=0)
                        dcp.save(state, storage_writer=writer, process_group=group)

                    row(way, tensors, 1, stock, 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--gb", type=float, default=1.0, help="of each rank")
    parser.add_argument("--dirs", nargs="+", default=["memory=/dev/shm"], help="name=directory")
    parser.add_argument("--tensors", type=int, nargs="+", default=[585, 10_000])
    parser.add_argument("--writers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--stock", action="store_true", help="also dcp.save")
    main(parser.parse_args())
