"""``Reader``: threads read the bytes of any plain tensor, checked, and change no bit of any other.

A state lies in many ways: sharded, whole, transposed, ``channels_last``, a part of a storage.
PyTorch's ``dcp.save`` and the library's save write it, and the reader loads both into other shards.
Then ``load`` gives every rank all of it, and each byte has been read once. A bit flips in a file
of the library's. The device's streams are played by ``Streams``, so that every rank proves on a CPU
for what the copies to a GPU wait.
"""

import argparse
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from overlap_recipes.checkpoint import DamagedCheckpoint, Reader, Saves, load, shared_reads
from overlap_recipes.checkpoint.kept import Checkpoint
from overlap_recipes.checkpoint.stores.directory import Directory

ROWS, COLUMNS = 37, 24


def start_rank() -> torch.device:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group()
    else:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    return device


def build(device: torch.device, mesh, *placements: Placement) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    weights = torch.randn(ROWS, COLUMNS).to(device)
    images = torch.randn(2, 3, 4, 5).to(device)
    return {
        "first": distribute_tensor(weights, mesh, placements[:1]),
        "second": distribute_tensor(weights + 2, mesh, placements[1:]),
        "transposed": weights.t() + 1,
        "channels_last": images.to(memory_format=torch.channels_last),
        "part": weights[5:9],
        "bits": weights[0] > 0,
        "bfloat16": weights.to(torch.bfloat16),
    }


def shard(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def empty_like(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Targets that hold zeros, row-major."""
    targets = {}
    for name, tensor in state.items():
        targets[name] = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
    return targets


def differing(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in state if not torch.equal(shard(state[name]), shard(expected[name]))]


def prove_every_bit(root: Path, device: torch.device, mesh) -> Path:
    state = build(device, mesh, Shard(0), Replicate())
    stock, ours = root / "stock", root / "kept" / "step1"
    dcp.save(dict(state), checkpoint_id=stock)
    store = Directory(ours.parent)
    if dist.get_rank() == 0:
        store.open()
    with Saves(device) as saves:
        saves.save(dict(state), Checkpoint(store, step=1, keep_last=1, keep_every=0))
    store.close()
    for directory in (stock, ours):
        for placement in (Shard(0), Shard(1), Replicate()):
            expected = build(device, mesh, placement, placement)
            targets = empty_like(expected)
            reader = Reader(directory)
            dcp.load(targets, storage_reader=reader)
            wrong = differing(targets, expected)
            assert not wrong, f"{directory.name} came back with other bits: {wrong}"
            assert reader.read_bytes >= expected["bfloat16"].nbytes, "threads have read nothing"
        print(f"{directory.name}: every bit, {reader.read_bytes} bytes read by threads")
    return ours


def prove_read_once(ours: Path, device: torch.device, mesh) -> None:
    """Every rank holds all of it, as under DDP: one rank reads a tensor, the others receive it."""
    shared_reads.WORTH = 1  # byte: these are small
    expected = build(device, mesh, Replicate(), Replicate())
    targets = empty_like(expected)
    reader = Reader(ours)
    load(targets, reader)
    wrong = differing(targets, expected)
    assert not wrong, f"broadcast with other bits: {wrong}"
    read = torch.tensor(reader.read_bytes, device=device)
    dist.all_reduce(read)
    alone = Reader(ours)
    dcp.load(empty_like(expected), storage_reader=alone)
    assert read == alone.read_bytes, f"{read} bytes read, {alone.read_bytes} there are"
    print(f"{read} bytes read by all ranks together, each once")


def prove_checked(ours: Path, device: torch.device, mesh) -> None:
    """In a copy, of which a bit flips."""
    directory = ours.with_name("damaged")
    if dist.get_rank() == 0:
        shutil.copytree(ours, directory)
    dist.barrier()
    name = "bfloat16"
    for index, place in Reader(directory).read_metadata().storage_data.items():
        if index.fqn == name:
            info = place
    file = directory / info.relative_path
    if dist.get_rank() == 0:
        data = bytearray(file.read_bytes())
        data[info.offset + info.length // 2] ^= 1
        file.write_bytes(data)
    dist.barrier()
    targets = {name: build(device, mesh, Shard(0), Shard(0))[name]}
    try:
        dcp.load(targets, storage_reader=Reader(directory))
    except CheckpointException as error:
        failures = [failure for failure, _ in error.failures.values()]
    else:
        raise AssertionError("a flipped bit was loaded")
    is_damage = [isinstance(failure, DamagedCheckpoint) for failure in failures]
    assert is_damage and all(is_damage), failures
    assert file.name in str(failures[0]), failures[0]
    print(f"a flipped bit: {failures[0]}")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(directory)


class Streams:
    """Plays the streams of a device, and notes in order what waits for what."""

    class Stream:
        def __init__(self, notes: list[str], name: str) -> None:
            self.notes = notes
            self.name = name

        def wait_stream(self, other: "Streams.Stream") -> None:
            self.notes.append(f"{self.name} waits for {other.name}")

    class Event:
        def record(self, stream: object) -> None: ...

        def synchronize(self) -> None: ...

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.current = self.Stream(self.notes, "training")

    def current_stream(self, device: object = None) -> Stream:
        return self.current

    def make(self, device: object = None) -> Stream:
        return Streams.Stream(self.notes, "copies")

    @contextmanager
    def stream(self, stream: Stream):
        self.notes.append(f"on {stream.name}")
        yield


def prove_order(root: Path) -> None:
    directory = root / f"of rank {dist.get_rank()}"
    dcp.save({"x": torch.ones(9)}, checkpoint_id=directory, no_dist=True)
    streams = Streams()
    notes = streams.notes

    class Module:
        Stream = streams.make
        Event = Streams.Event
        current_stream = streams.current_stream
        stream = streams.stream

    module_of = torch.get_device_module
    torch.get_device_module = lambda device=None: Module
    try:
        target = {"x": torch.zeros(9)}
        dcp.load(target, storage_reader=Reader(directory), no_dist=True)
    finally:
        torch.get_device_module = module_of
    before = notes[: notes.index("on copies")]
    assert before == ["copies waits for training"], "the copies do not wait for the targets"
    assert notes[-1] == "training waits for copies", "the loop does not wait for the copies"
    print("the copies wait for the targets, the loop for the copies")


def main(directory: Path) -> None:
    device = start_rank()
    of_rank_0 = [directory]
    dist.broadcast_object_list(of_rank_0)
    root = of_rank_0[0]
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    ours = prove_every_bit(root, device, mesh)
    prove_read_once(ours, device, mesh)
    prove_checked(ours, device, mesh)
    prove_order(root)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path)
    with tempfile.TemporaryDirectory() as temporary:
        main(parser.parse_args().dir or Path(temporary))
