"""Measure how long a checkpoint takes to load: by the library, PyTorch, others, and a plain read.

    torchrun --nproc-per-node=2 --max-restarts=2 benchmarks/restart.py --until 540
    python benchmarks/restart.py --small --out /tmp/rehearsal             # a minute on a CPU

A stock model with Adam's state is filled with numbers that follow from the names alone, so that any
number of ranks knows every bit. The library saves it once, and each way loads it into the same
tensors, which hold another value before. Tasks, in order (``--list`` prints them); what does not
fit before ``--until`` is left out, and rows are written as they come.

* ``plain_read``: eight threads of a rank read its files in pieces of 32 MB into page-locked memory,
  and nothing else. ``plain_read_bytes_per_s`` in the other rows is this, of the same storage and
  run. ``plain_read_to_device`` also copies each piece to the device.
* ``load_s``: the call, until the device has everything, on the slowest rank. ``read_s``: the
  reader's part of it; ``load_bytes_per_s`` is the rank's bytes over that. ``planning_s`` is the
  rest of ``dcp.load``.
* ``host_cores``: CPU seconds of the process over the seconds of the call.
* ``host_peak_bytes``: the most resident memory of the process in the call, over that before;
  files that are mapped count, page-locked memory does not on every system (``pinned_bytes``).
* ``reader`` checks no bytes, ``reader_digests`` all; ``reader_16_threads`` does so with twice
  as many threads and pieces of half the size. ``reader`` of ``stock`` reads what
  ``dcp.save`` has written.
* ``resume``: the library's call with its parts.
* Storage ``memory`` is ``/dev/shm``. ``disk`` is read cold: ``posix_fadvise(DONTNEED)`` on each
  file before each load; that it is cold shows in its plain read.
* ``loaded_back_bitwise``: every tensor has every bit, on all ranks.

``--replicated``: every rank has the whole model, as under DDP, and loads that checkpoint, or its
own if there is none. ``each`` reads all of it. ``once_and_broadcast`` is what the library's
``load`` does with a GiB or more, here whatever the size: each rank reads a share (``share_s``) and
sends it to the others (``broadcast_s``). ``resume`` is the whole call.

``--keep`` leaves the library's checkpoint. With another number of ranks, the same command then
loads it (``saved_ranks``): two ranks to one, and back.
"""

import argparse
import json
import os
import queue
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from threading import Thread
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Replicate

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import measuring  # noqa: E402
from benchmarks.measuring import Task  # noqa: E402
from benchmarks.workloads import HOST_BOUND, LLAMAS, rising_rate, shard, stock  # noqa: E402
from overlap_recipes.checkpoint import (  # noqa: E402
    Reader,
    Saves,
    TrainingState,
    kept,
    loading,
    reader,
    shared_reads,
)
from overlap_recipes.checkpoint.stores.directory import Directory  # noqa: E402
from overlap_recipes.checkpoint.stores.store import name_of  # noqa: E402
from overlap_recipes.page_locked import PageLocked  # noqa: E402

THREADS, PIECE = 8, 32 << 20  # of the plain read; bytes
STEP = 1  # the name of the checkpoint
WRONG = 7.0  # what all tensors hold before a load
VARIED = ("model", "storage", "checkpoint", "saved_ranks")


# -- the job ----------------------------------------------------------------------------------


def numbers(name: str, shape: torch.Size, device: torch.device) -> torch.Tensor:
    """What the tensor ``name`` holds, whole: float32, the same on every rank of any job."""
    draw = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=draw, device=device)


def own_part(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What this rank has of ``whole`` if it is sharded as ``like``."""
    if not isinstance(like, DTensor):
        return whole
    replicated = [Replicate()] * like.device_mesh.ndim
    everywhere = DTensor.from_local(whole, like.device_mesh, replicated, run_check=False)
    return everywhere.redistribute(placements=like.placements).to_local()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


class Job:
    """A stock model with Adam's state, and what every tensor of it should hold."""

    def __init__(self, name: str, device: torch.device, replicated: bool) -> None:
        self.device = device
        self.model = stock(name, device) if replicated else shard(stock(name, device))
        parameters = list(self.model.parameters())
        is_fused = device.type == "cuda"
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=is_fused)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # makes the state
        optimizer.zero_grad()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rising_rate)
        self.run = TrainingState(self.model, optimizer, schedule=schedule)
        self.optimizer = optimizer
        self.nbytes = sum(local(tensor).nbytes for tensor in self.tensors().values())

    def tree(self) -> dict:
        """The tensors under the names that the library's checkpoints have, too."""
        weights: dict[str, torch.Tensor] = {}
        moments: dict[str, dict[str, torch.Tensor]] = {}
        for name, parameter in self.model.named_parameters():
            weights[name] = parameter.detach()
            moments[name] = self.optimizer.state[parameter]
        return {"model": weights, "optim": {"state": moments}}

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of them, by name, as the job stands: a load may put others in the optimizer."""
        tree = self.tree()
        found = tree["model"]
        for name, moments in tree["optim"]["state"].items():
            for key, moment in moments.items():
                found[f"{name}.{key}"] = moment
        return found

    @torch.no_grad()
    def fill(self) -> None:
        for name, tensor in self.tensors().items():
            whole = numbers(name, tensor.shape, self.device)
            local(tensor).copy_(own_part(whole, tensor))

    @torch.no_grad()
    def spoil(self) -> None:
        for tensor in self.tensors().values():
            local(tensor).fill_(WRONG)

    def differing(self) -> list[str]:
        """Names of the tensors of this rank that have a bit that they should not have."""
        found = []
        for name, tensor in self.tensors().items():
            own = local(tensor)
            expected = own_part(numbers(name, tensor.shape, self.device), tensor).to(own.device)
            if not torch.equal(bits(own), bits(expected)):
                found.append(name)
        return found


# -- ways to load -----------------------------------------------------------------------------


def stock_reader(directory: Path) -> dcp.StorageReader:
    return dcp.FileSystemReader(directory)


class ReaderWithoutDigests(Reader):
    """The library's, as it reads what other programs have saved: it checks no bytes."""

    def __init__(self, path: Path | str) -> None:
        super().__init__(path)
        self.files.are_listed = False


def load_by(reader_of: Callable[[Path], dcp.StorageReader], job: Job, directory: Path) -> dict:
    """``dcp.load`` into the job's tensors; seconds of the reader's part and of the rest."""
    own = reader_of(directory)
    with timed_calls(job.device, {"read_s": (own, "read_data")}) as seconds:
        begun = time.perf_counter()
        dcp.load({"run": job.tree()}, storage_reader=own)
        took = time.perf_counter() - begun
    if isinstance(own, ReaderWithoutDigests) and own.files.manifests:
        raise RuntimeError("digests were compared")
    return {"read_s": seconds["read_s"], "planning_s": took - seconds["read_s"]}


def load_by_16_threads(job: Job, directory: Path) -> dict:
    def with_16_threads(path: Path) -> Reader:
        own = Reader(path)
        own.files.threads = 16
        return own

    with mock.patch.object(reader, "PIECE", 4 << 20):
        return load_by(with_16_threads, job, directory)


def load_once_and_broadcast(job: Job, directory: Path) -> dict:
    """Each rank reads a share of the tensors, and sends it to the others, as ``load`` does it."""
    own = Reader(directory)
    planner = shared_reads.SharedReads(None)
    timed = {"share_s": (own, "read_data"), "broadcast_s": (planner, "send")}
    with mock.patch.object(shared_reads, "WORTH", 1), timed_calls(job.device, timed) as seconds:
        begun = time.perf_counter()
        dcp.load({"run": job.tree()}, storage_reader=own, planner=planner)
        planner.send()
        took = time.perf_counter() - begun
    if measuring.all_ranks() > 1 and not planner.shares.bundles:
        raise RuntimeError("nothing was broadcast")
    return {**seconds, "planning_s": took - sum(seconds.values())}


def torch_load(job: Job, directory: Path) -> dict:
    file = directory / f"{measuring.own_rank()}.pt"
    loaded = torch.load(file, mmap=True, weights_only=True)
    for name, tensor in job.tensors().items():
        local(tensor).copy_(loaded[name])
    return {}


def torch_checkpointing_load(job: Job, directory: Path) -> dict:
    manager = torch_checkpointing_manager()
    manager.load(str(directory), into=job.tree())
    manager.close()
    return {}


def torch_checkpointing_manager() -> object:
    """It loads by mmap; without direct I/O, as the other ways."""
    package = import_module("torch_checkpointing")
    storage = import_module("torch_checkpointing.storage.filesystem")
    config = package.CheckpointManager.Config.with_sync_save()
    config.storage_config = storage.LocalFileSystemStorageConfig(use_direct_io=False)
    return package.CheckpointManager(config)


PARTS = {
    "choose_s": (loading, "choose"),
    "state_dict_s": (loading.Fit, "__init__"),
    "dcp_load_s": (dcp, "load"),
    "broadcast_s": (shared_reads.SharedReads, "send"),
    "set_state_dict_s": (loading.Fit, "finish"),
}


def resume(job: Job, directory: Path) -> dict:
    store = Directory(directory.parent)
    return resumed_in_parts(job, loading.load_newest, {"run": job.run}, store, None, ())


def resumed_in_parts(job: Job, call: Callable, *arguments: object) -> dict:
    readers = {"reader_s": (Reader, "read_data"), "stock_s": (dcp.FileSystemReader, "read_data")}
    with timed_calls(job.device, PARTS | readers) as seconds:
        call(*arguments)
    ours, stocks = seconds.pop("reader_s"), seconds.pop("stock_s")
    seconds["read_s"] = max(ours, stocks)  # ours calls PyTorch's for what it leaves to it
    seconds["planning_s"] = seconds.pop("dcp_load_s") - seconds["read_s"]
    return seconds


@contextmanager
def timed_calls(
    device: torch.device, functions: dict[str, tuple[object, str]]
) -> Iterator[dict[str, float]]:
    """Seconds of all calls of each of ``functions`` (owner, name) in the block, by its key.

    The device has done what a call queued before its time ends.
    """
    seconds = dict.fromkeys(functions, 0.0)

    def timed(key: str, function: Callable) -> Callable:
        def call(*arguments: object, **options: object) -> object:
            begun = time.perf_counter()
            result = function(*arguments, **options)
            measuring.synchronize(device)
            seconds[key] += time.perf_counter() - begun
            return result

        return call

    patches = []
    for key, (owner, name) in functions.items():
        patches.append(mock.patch.object(owner, name, timed(key, getattr(owner, name))))
    for patch in patches:
        patch.start()
    try:
        yield seconds
    finally:
        for patch in patches:
            patch.stop()


# -- a plain read -----------------------------------------------------------------------------


class PlainRead:
    """Eight threads that read a rank's files in pieces into page-locked memory, each its own.

    With ``to_device`` each copies its pieces on to the device, beside the next read.
    """

    def __init__(self, device: torch.device, to_device: bool = False) -> None:
        self.device = device
        self.to_device = to_device
        self.halves = 2 if to_device else 1
        self.memory = PageLocked(THREADS * self.halves * PIECE, device)

    def read(self, files: list[Path]) -> int:
        """Read them all; how many bytes."""
        pieces: queue.SimpleQueue = queue.SimpleQueue()
        opened = []
        nbytes = 0
        for path in files:
            file = os.open(path, os.O_RDONLY)
            opened.append(file)
            size = os.fstat(file).st_size
            nbytes += size
            for offset in range(0, size, PIECE):
                pieces.put((file, offset, min(PIECE, size - offset)))
        threads = []
        for buffers in self.memory.bytes.view(THREADS, self.halves, PIECE):
            threads.append(Thread(target=self.read_pieces, args=(pieces, buffers)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for file in opened:
            os.close(file)
        if not pieces.empty():
            raise RuntimeError("a thread of the plain read has failed")
        return nbytes

    def read_pieces(self, pieces: queue.SimpleQueue, buffers: torch.Tensor) -> None:
        views = [memoryview(buffer.numpy()) for buffer in buffers]
        if self.to_device:
            torch.cuda.set_device(self.device)
            stream = torch.cuda.Stream()
            targets = torch.empty_like(buffers, device=self.device)
            copied = [torch.cuda.Event() for _ in views]
        for turn in range(sys.maxsize):
            try:
                file, offset, size = pieces.get_nowait()
            except queue.Empty:
                break
            half = turn % self.halves
            if self.to_device:
                copied[half].synchronize()
            done = 0
            while done < size:
                count = os.preadv(file, [views[half][done:size]], offset + done)
                if count == 0:
                    raise EOFError("a file has become shorter")
                done += count
            if self.to_device:
                with torch.cuda.stream(stream):
                    targets[half, :size].copy_(buffers[half, :size], non_blocking=True)
                    copied[half].record()
        if self.to_device:
            stream.synchronize()


def drop_from_cache(directory: Path) -> None:
    """Let the system forget what it has cached of the files, which are in storage."""
    for path in directory.iterdir():
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


# -- tasks ------------------------------------------------------------------------------------

READERS = ("reader", "reader_digests", "reader_16_threads")
OURS = (*READERS, "each", "once_and_broadcast", "resume")
WAYS: dict[str, Callable[[Job, Path], dict]] = {
    "reader": partial(load_by, ReaderWithoutDigests),
    "reader_digests": partial(load_by, Reader),
    "reader_16_threads": load_by_16_threads,
    "each": partial(load_by, Reader),
    "once_and_broadcast": load_once_and_broadcast,
    "dcp_load": partial(load_by, stock_reader),
    "torch_load_mmap": torch_load,
    "torch_checkpointing": torch_checkpointing_load,
    "resume": resume,
}


class Measurement:
    """The job, its checkpoints below two folders, and the result file."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        self.device = device
        self.ranks = measuring.all_ranks()
        self.agreement = measuring.Agreement()
        self.model = arguments.model or ("llama-tiny" if arguments.small else "qwen3-1.7b")
        self.repeats = arguments.repeats
        self.folders = {
            "memory": arguments.memory / "restart_benchmark",
            "disk": arguments.disk / "restart_benchmark",
        }
        self.replicated = arguments.replicated
        self.job = Job(self.model, device, self.replicated)
        self.job.fill()
        workload = {
            "model": f"stock {self.model}",
            "precision": "float32 weights and Adam state",
            "sharding": "fully_shard, one group a layer; none in rows of --replicated",
            "tensors": len(self.job.tensors()),
            "state_bytes_per_rank": self.job.nbytes,
        }
        link = {} if arguments.list else measuring.link_rates(device, 2**30)
        head = measuring.header("restart", device, workload, link)
        self.results = measuring.Results(arguments.out, head, OURS, VARIED)
        self.plain: dict[str, float] = {}  # byte/s by storage

    def root(self, storage: str, checkpoint: str, ranks: int | None = None) -> Path:
        return self.folders[storage] / f"{checkpoint}.x{ranks or self.ranks}"

    def place(self, storage: str, checkpoint: str, ranks: int | None = None) -> Path:
        return self.root(storage, checkpoint, ranks) / name_of(STEP)

    def has(self, name: str, storage: str, checkpoint: str, ranks: int | None = None) -> bool:
        key = {"model": self.model, "storage": storage, "checkpoint": checkpoint}
        return self.results.has(name, **key, saved_ranks=ranks or self.ranks)

    # -- writing

    def is_written(self, storage: str, checkpoint: str, ranks: int | None = None) -> bool:
        place = self.place(storage, checkpoint, ranks)
        whole = place.with_suffix(".whole")
        return self.agreement.from_rank_0(whole.exists())

    def write(self, checkpoint: str, by: Callable[[Path], None]) -> None:
        """Write one in memory, in place of all but the library's."""
        self.agreement.barrier()
        if measuring.own_rank() == 0:
            kept = {self.root("memory", "ours", ranks) for ranks in (1, 2, 4, 8)}
            for other in self.folders["memory"].glob("*"):
                if other not in kept:
                    shutil.rmtree(other)
        self.agreement.barrier()
        self.job.fill()
        place = self.place("memory", checkpoint)
        place.parent.mkdir(parents=True, exist_ok=True)
        begun = time.perf_counter()
        by(place)
        self.agreement.barrier()
        if measuring.own_rank() == 0:
            place.with_suffix(".whole").touch()
            size = measuring.size_on_disk(place) / 1e9
            measuring.tell(f"{checkpoint}: {size:.2f} GB in {time.perf_counter() - begun:.1f} s")
        self.agreement.barrier()

    def write_ours(self, place: Path) -> None:
        room = self.job.nbytes + self.job.nbytes // 8 + 2**20  # for one buffer
        buffers = self.job.model.buffers
        store = Directory(place.parent)
        with Saves(self.device, buffers, host_bytes=room, write_threads=8) as saves:
            target = kept.Checkpoint(store, STEP, keep_last=1, keep_every=0)
            saves.save({"run": self.job.run}, target).result()
        if found := store.wrong(STEP):
            raise RuntimeError(f"the checkpoint is not whole: {found}")

    def write_stock(self, place: Path) -> None:
        dcp.save({"run": self.job.tree()}, checkpoint_id=place)

    def write_by_torch(self, place: Path) -> None:
        place.mkdir(exist_ok=True)
        shards = {name: local(tensor) for name, tensor in self.job.tensors().items()}
        torch.save(shards, place / f"{measuring.own_rank()}.pt")

    def write_torch_checkpointing(self, place: Path) -> None:
        manager = torch_checkpointing_manager()
        manager.save(str(place), self.job.tree())
        manager.close()

    def copy_to_disk(self) -> None:
        source, target = self.place("memory", "ours"), self.place("disk", "ours")
        if measuring.own_rank() == 0:
            shutil.rmtree(self.folders["disk"], ignore_errors=True)
            shutil.copytree(source, target)
            drop_from_cache(target)
            target.with_suffix(".whole").touch()
        self.agreement.barrier()

    # -- reading

    def one(self, work: Callable[[], dict], place: Path, is_cold: bool) -> dict:
        """Times of one load by all ranks at once, and what it took of the host."""
        if is_cold and measuring.own_rank() == 0:
            drop_from_cache(place)
        measuring.forget_memory(self.device)
        measuring.synchronize(self.device)
        memory = measuring.HostMemory()
        self.agreement.barrier()
        begun, cpu = time.perf_counter(), time.process_time()
        found = work()
        measuring.synchronize(self.device)
        took, busy = time.perf_counter() - begun, time.process_time() - cpu
        sample = {"load_s": took, **found}
        for name, value in sample.items():
            sample[name] = self.agreement.largest(value)
        sample |= {"host_cores": busy / took, **memory.peaks()}
        memory.close()
        return sample

    def add(
        self,
        name: str,
        storage: str,
        checkpoint: str,
        samples: list[dict],
        more: dict,
        saved_ranks: int | None = None,
    ) -> None:
        key = {"name": name, "model": self.model, "storage": storage, "checkpoint": checkpoint}
        key |= {"saved_ranks": saved_ranks or self.ranks}
        self.results.add(key | measuring.medians(samples) | more)

    def read_plainly(self, storage: str, to_device: bool) -> None:
        place = self.place(storage, "ours")
        files = sorted(place.glob(f"__{measuring.own_rank()}_*"))
        plain = PlainRead(self.device, to_device)
        nbytes = sum(file.stat().st_size for file in files)

        def read() -> dict:
            plain.read(files)
            return {}

        samples = []
        for _ in range(self.repeats_of(storage)):
            samples.append(self.one(read, place, storage == "disk"))
        rate = nbytes / measuring.medians(samples)["load_s"]
        name = "plain_read_to_device" if to_device else "plain_read"
        self.add(name, storage, "ours", samples, {"plain_read_bytes_per_s": rate})
        if not to_device:
            self.plain[storage] = rate
        plain.memory.close()

    def repeats_of(self, storage: str) -> int:
        return 1 if storage == "disk" else self.repeats

    def load(
        self, name: str, storage: str, checkpoint: str, repeats: int, saved_ranks: int | None = None
    ) -> None:
        place = self.place(storage, checkpoint, saved_ranks)
        samples = []
        wrong: list[str] = []
        for _ in range(repeats):
            self.job.spoil()
            work = partial(WAYS[name], self.job, place)
            samples.append(self.one(work, place, storage == "disk"))
            wrong = wrong or self.job.differing()
        if wrong:
            measuring.tell(f"{name}: {len(wrong)} tensors differ, such as {wrong[:3]}")
        more: dict[str, object] = {"loaded_back_bitwise": not self.agreement.any(bool(wrong))}
        medians = measuring.medians(samples)
        rate = self.job.nbytes / medians.get("read_s", medians["load_s"])
        more |= {"load_bytes_per_s": rate}
        if plain := self.plain.get(storage):
            more |= {"plain_read_bytes_per_s": plain, "of_bound": rate / plain}
        if name in OURS and "set_state_dict_s" in medians:
            parts = ("state_dict_s", "planning_s", "set_state_dict_s")
            more |= {"around_read_s": sum(medians[part] for part in parts)}
        if name == "torch_checkpointing":
            more |= {"note": f"torch_checkpointing {version('torch_checkpointing')}"}
        self.add(name, storage, checkpoint, samples, more, saved_ranks)

    def remove(self) -> None:
        self.agreement.barrier()
        if measuring.own_rank() == 0:
            for folder in self.folders.values():
                shutil.rmtree(folder, ignore_errors=True)


def tasks_of(measurement: Measurement) -> Iterator[Task]:
    """What is measured, the most important first, with the seconds that it takes on H100s."""
    gb = measurement.job.nbytes / 1e9
    ranks = measurement.ranks
    repeats = measurement.repeats

    def write(checkpoint: str, by: Callable[[Path], None], seconds: float) -> Task:
        work = partial(measurement.write, checkpoint, by)
        done = partial(measurement.is_written, "memory", checkpoint)
        return Task(f"{checkpoint} written", seconds, work, done)

    def plain(storage: str, to_device: bool = False) -> Task:
        work = partial(measurement.read_plainly, storage, to_device)
        title = f"plain read {storage}" + " to device" * to_device
        return Task(title, 5 + (gb if storage == "disk" else 0), work)

    def load(
        name: str, storage: str, checkpoint: str, repeats: int, seconds: float, saved: int = ranks
    ) -> Task:
        work = partial(measurement.load, name, storage, checkpoint, repeats, saved)
        done = partial(measurement.has, name, storage, checkpoint, saved)
        title = f"{name} {storage} {checkpoint}" + f" of {saved} ranks" * (saved != ranks)
        return Task(title, 2 + repeats * seconds, work, done)

    if measurement.replicated:
        yield write("ours", measurement.write_ours, 10 + 3 * gb)
        for storage in ("memory", "disk"):
            for name in ("each", "once_and_broadcast", "resume"):
                if storage == "memory" or measurement.is_written(storage, "ours"):
                    yield load(name, storage, "ours", 2, 2 + gb / 5)
        return
    yield write("ours", measurement.write_ours, 10 + 3 * gb)
    yield plain("memory")
    if measurement.device.type == "cuda":
        yield plain("memory", to_device=True)
    for name in READERS:
        yield load(name, "memory", "ours", repeats, 2 + gb / 5)
    yield load("resume", "memory", "ours", repeats, 4 + gb / 5)
    for saved in (1, 2, 4, 8):
        if saved != ranks and measurement.is_written("memory", "ours", saved):
            yield load("resume", "memory", "ours", repeats, 4 + gb / 5, saved)
    yield load("dcp_load", "memory", "ours", 2, 2 + gb)
    yield Task(
        "ours on disk",
        10 + 2 * gb * ranks,
        measurement.copy_to_disk,
        partial(measurement.is_written, "disk", "ours"),
    )
    yield plain("disk")
    for name in (*READERS, "resume", "dcp_load"):
        yield load(name, "disk", "ours", 1, 2 + 2 * gb)
    yield write("stock", measurement.write_stock, 10 + 2 * gb)
    yield load("reader", "memory", "stock", repeats, 2 + gb / 5)
    yield load("dcp_load", "memory", "stock", 2, 2 + gb)
    yield write("torch.save", measurement.write_by_torch, 10 + 2 * gb)
    yield load("torch_load_mmap", "memory", "torch.save", 2, 2 + gb)
    yield write("torch_checkpointing", measurement.write_torch_checkpointing, 10 + 3 * gb)
    yield load("torch_checkpointing", "memory", "torch_checkpointing", 2, 2 + gb)


def run(arguments: argparse.Namespace, device: torch.device) -> None:
    measurement = Measurement(arguments, device)
    tasks = measuring.chosen(tasks_of(measurement), arguments.only)
    if arguments.list:
        for task in tasks:
            print(f"{task.seconds:6.0f} s  {task.name}{' (done)' if task.done() else ''}")
        return
    if not arguments.again:
        measurement.results.data["not_run"].clear()
    size = measurement.job.nbytes / 1e9
    measuring.tell(f"{size:.2f} GB of state a rank in {len(measurement.job.tensors())} tensors")
    measuring.run_tasks(tasks, measurement.results, arguments.until, measurement.agreement)
    if not arguments.keep:
        measurement.remove()
    measuring.tell(json.dumps(measurement.results.data["not_run"]))


def main() -> None:
    parser = measuring.command_line(__doc__)
    models = sorted([*HOST_BOUND, *LLAMAS])
    parser.add_argument("--model", choices=models, help="qwen3-1.7b; llama-tiny if --small")
    parser.add_argument("--replicated", action="store_true", help="every rank has the whole model")
    parser.add_argument("--list", action="store_true", help="print the tasks and end")
    parser.add_argument("--keep", action="store_true", help="the checkpoints, for other ranks")
    parser.add_argument("--repeats", type=int, default=3, help="of a load that is fast")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="storage in memory")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="local disk")
    arguments = parser.parse_args()
    # Behind a hang torchrun starts the ranks again: what was cut off is not tried again.
    arguments.again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    with measuring.started_rank() as device:
        run(arguments, device)


if __name__ == "__main__":
    main()
