"""What several ranks hold is read once and broadcast; the bits are those that dcp.load gives."""

import math
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from overlap_recipes.checkpoint import (
    DamagedCheckpoint,
    Reader,
    TrainingState,
    load,
    reader,
    shared_reads,
)
from overlap_recipes.ranks import start_rank

sys.path.insert(0, str(Path(__file__).parents[1]))
from kept_saves import KeptSaves  # noqa: E402

WIDTH = 40  # features


class Job:
    """A small model in a layout, and its AdamW behind a step."""

    def __init__(self, layout: str, device: torch.device, seed: int) -> None:
        torch.manual_seed(seed)
        layers = [nn.Linear(WIDTH, 3 * WIDTH), nn.LayerNorm(3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)]
        self.model = nn.Sequential(*layers).to(device)
        ranks = dist.get_world_size()
        if layout == "hsdp":
            names = ("replicate", "shard")
            mesh = init_device_mesh(device.type, (ranks // 2, 2), mesh_dim_names=names)
            fully_shard(self.model, mesh=mesh)
        if layout == "mixed":  # the first layer is sharded, the others are on every rank
            fully_shard(self.model[0], mesh=init_device_mesh(device.type, (ranks,)))
        parameters = self.model.parameters()
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-2, foreach=False)
        torch.manual_seed(seed)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state = TrainingState(self.model, self.optimizer)

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, parameter in self.model.named_parameters():
            found[name] = shard(parameter.detach())
            for key, moment in self.optimizer.state[parameter].items():
                found[f"{name}.{key}"] = shard(moment)
        return found


def shard(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name in found if bits(found[name]) != bits(expected[name])]


def of_all_ranks(own: object) -> list:
    found = [own] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


class Counted:
    """Counts in a block what this rank reads of tensors, and what it asks the storage for."""

    def __init__(self) -> None:
        self.asked = 0
        count = self
        read_into = reader.OpenFile.read_into

        def counted(file: reader.OpenFile, memory: memoryview, begin: int, name: str) -> None:
            read_into(file, memory, begin, name)
            count.asked += len(memory)

        self.patch = mock.patch.object(reader.OpenFile, "read_into", counted)

    def __enter__(self) -> "Counted":
        self.patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.patch.stop()


def save(root: Path, name: str, state: dict, device: torch.device) -> list[Path]:
    """By the library, with digests, and by dcp.save, without."""
    ours, stock = root / name / "step1", root / name / "stock"
    with KeptSaves(ours.parent, device) as saves:
        saves.save(dict(state), 1)
    dcp.save(dict(state), checkpoint_id=stock)
    return [ours, stock]


def wanted_bytes(job: Job, ranks: int) -> int:
    """Bytes of tensors: each counts once, and for each rank where the group cannot broadcast it."""
    total = 0
    devices = shared_reads.devices_of(None)
    for parameter in job.model.parameters():
        for tensor in (parameter, *job.optimizer.state[parameter].values()):
            nbytes = math.prod(tensor.shape) * tensor.element_size()
            total += nbytes * (1 if tensor.device in devices else ranks)
    return total


def prove_layout(root: Path, device: torch.device, layout: str) -> None:
    saved = Job(layout, device, 0)
    ranks = dist.get_world_size()
    whole = wanted_bytes(saved, ranks)
    for directory in save(root, layout, {"app": saved.state}, device):
        stock = Job(layout, device, 1)
        dcp.load({"app": stock.state}, checkpoint_id=directory)
        assert not differing(stock.tensors(), saved.tensors())
        with Counted() as counted, mock.patch.object(shared_reads, "WORTH", 1 << 60):
            load({"app": Job(layout, device, 1).state}, directory)
        each = sum(of_all_ranks(counted.asked))
        for pack in (0, 1 << 10, 8 << 20):
            job = Job(layout, device, 2)
            versions = [parameter._version for parameter in job.model.parameters()]
            own = Reader(directory)
            with Counted() as counted, mock.patch.object(shared_reads, "PACK", pack):
                load({"app": job.state}, own)
            wrong = differing(job.tensors(), saved.tensors())
            assert not wrong, (directory.name, pack, wrong)
            later = [parameter._version for parameter in job.model.parameters()]
            assert all(map(int.__lt__, versions, later)), "autograd does not know of the change"
            read = sum(of_all_ranks(own.read_bytes))
            assert read == whole, f"{layout}: {read} bytes read of {whole}"
            if layout == "ddp" and directory.name == "stock" and pack == 8 << 20:
                spared = each - sum(of_all_ranks(counted.asked))
                assert spared >= (ranks - 1) * whole, f"{spared} bytes spared, {whole} there are"
            shares = of_all_ranks(own.read_bytes)
            if pack == 0:
                assert max(shares) - min(shares) < whole / 2, shares


def prove_resharded(root: Path, device: torch.device) -> None:
    """Shards of all ranks, loaded whole by every rank; whole tensors, loaded as shards."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(0)
    weights = torch.randn(37, 24, device=device)
    state = {"x": distribute_tensor(weights, mesh, [Shard(0)]), "y": weights + 1}
    for directory in save(root, "reshard", state, device):
        own = Reader(directory)
        found = {"x": torch.zeros_like(weights), "y": torch.zeros_like(weights)}
        load(found, own)
        assert not differing(found, {"x": weights, "y": weights + 1})
        assert sum(of_all_ranks(own.read_bytes)) == 2 * weights.nbytes
        for placement in (Replicate(), Shard(0)):
            found = {}
            for name in ("x", "y"):
                found[name] = distribute_tensor(torch.zeros_like(weights), mesh, [placement])
            load(found, directory)
            assert torch.equal(found["x"].full_tensor(), weights)
            assert torch.equal(found["y"].full_tensor(), weights + 1)


def stored(device: torch.device) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    weights = torch.randn(6, 8)
    numbers = torch.randn(5, 4, dtype=torch.complex64)
    found = {
        "plain": weights,
        "turned": weights + 1,
        "wide": weights + 2,
        "of one rank wide": weights + 3,
        "of one rank turned": weights + 4,
        "conjugate": numbers,
        "saved conjugate": numbers.conj(),
        "saved turned": (weights + 5).t(),
        "images": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(3.5),
        "bool": weights > 0,
        "empty": torch.empty(0, 3),
        "bfloat16": weights.bfloat16(),
        "odd": torch.arange(7, dtype=torch.uint8),
        "uint16": torch.tensor([1, 2, 65535]).to(torch.uint16),
        "float8": weights.to(torch.float8_e4m3fn),
        "float4": torch.arange(24, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "long": torch.randn(100_000),
    }
    return {name: tensor.to(device) for name, tensor in found.items()}


def targets(device: torch.device) -> dict[str, torch.Tensor]:
    """Of other layouts and types than what is stored, and not the same on all ranks."""
    is_first = dist.get_rank() == 0
    found = {}
    for name, tensor in stored(torch.device("cpu")).items():
        data = torch.zeros(tensor.nbytes, dtype=torch.uint8)  # torch.zeros lacks some types
        found[name] = data.view(tensor.dtype).view(tensor.shape)
    found["turned"] = torch.zeros(8, 6).t()
    found["wide"] = torch.zeros(6, 8, dtype=torch.float64)
    if is_first:
        found["of one rank wide"] = torch.zeros(6, 8, dtype=torch.float64)
        found["of one rank turned"] = torch.zeros(8, 6).t()
    found["conjugate"] = torch.zeros(5, 4, dtype=torch.complex64).conj()
    found["saved conjugate"] = torch.zeros(5, 4, dtype=torch.complex64).conj()
    return {name: tensor.to(device) for name, tensor in found.items()}


def prove_targets(root: Path, device: torch.device) -> None:
    for directory in save(root, "targets", stored(device), device):
        expected = targets(device)
        dcp.load(expected, checkpoint_id=directory)
        for name, tensor in stored(device).items():
            assert bits(expected[name]) == bits(tensor.to(expected[name].dtype)), name
        for pack in (0, 100, 8 << 20):
            found = targets(device)
            conjugate = found["conjugate"]
            with mock.patch.object(shared_reads, "PACK", pack):
                own = Reader(directory)
                load(found, own)
            wrong = differing(found, expected)
            assert not wrong, (directory.name, pack, wrong)
            assert found["conjugate"] is conjugate, "loaded into another tensor"


def prove_all_raise(root: Path, device: torch.device) -> None:
    """One file is cut, changed or removed: every rank names it, and none waits for a broadcast."""
    saved = Job("ddp", device, 0)
    (ours, stock) = save(root, "damage", {"app": saved.state}, device)
    for rank in range(dist.get_world_size()):
        file = f"__{rank}_0.distcp"
        for directory, kind in ((ours, "bit"), (ours, "cut"), (stock, "cut"), (ours, "missing")):
            copy = root / f"{directory.name} {rank} {kind}"
            if dist.get_rank() == 0:
                shutil.copytree(directory, copy)
                damage(copy / file, kind)
            dist.barrier()
            if not (directory / file).exists():
                continue
            for said in failures_of({"app": Job("ddp", device, 1).state}, Reader(copy)):
                assert file in said, f"{kind}: the message does not name {file}: {said}"


def damage(file: Path, kind: str) -> None:
    if not file.exists():  # dcp.save has put all into the files of other ranks
        return
    data = bytearray(file.read_bytes())
    if kind == "bit":
        data[len(data) // 2] ^= 1
    if kind == "cut":
        del data[len(data) // 2 :]
    if kind == "missing":
        file.unlink()
    else:
        file.write_bytes(data)


def failures_of(state: dict, own: Reader) -> list[str]:
    """What the load raises; the same on all ranks."""
    try:
        load(state, own)
    except CheckpointException as error:
        said = sorted(str(failure) for failure, _ in error.failures.values())
    except DamagedCheckpoint as error:
        said = [str(error)]
    else:
        raise AssertionError("the load has not failed")
    assert of_all_ranks(said) == [said] * dist.get_world_size()
    return said


class FailsOn(Reader):
    """Its reads fail on one rank."""

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(path)
        self.fails_on = rank

    def read_data(self, plan, planner):
        if dist.get_rank() == self.fails_on:
            raise OSError(f"no storage on rank {self.fails_on}")
        return super().read_data(plan, planner)


def prove_one_rank_stops_all(root: Path, device: torch.device) -> None:
    weights = {"x": torch.ones(50, device=device), "y": torch.ones(60, device=device)}
    directory, _ = save(root, "trouble", weights, device)
    for rank in range(dist.get_world_size()):
        found = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        (said,) = failures_of(found, FailsOn(directory, rank))
        assert f"no storage on rank {rank}" in said, said
        load(found, directory)  # the ranks still understand each other
        assert not differing(found, weights)
        room = shared_reads.SharedReads.make_room
        with mock.patch.object(shared_reads.SharedReads, "make_room", no_memory(rank, room)):
            (said,) = failures_of(found, Reader(directory))
        assert f"no memory on rank {rank}" in said, said


def no_memory(rank: int, make_room: Callable) -> Callable:
    def made(own: shared_reads.SharedReads, bundle: shared_reads.Bundle) -> None:
        if dist.get_rank() == rank:
            raise MemoryError(f"no memory on rank {rank}")
        make_room(own, bundle)

    return made


def prove_others_stay(root: Path, device: torch.device) -> None:
    """What lies where the group has no backend, and what a part of the job's ranks load."""
    weights = {"x": torch.ones(50, device=device)}
    directory, _ = save(root, "others", weights, device)
    own = Reader(directory)
    found = {"x": torch.zeros(50, device=device)}
    with mock.patch.object(dist, "get_backend_config", return_value="other:none"):
        load(found, own)
    assert own.read_bytes == 200 and not differing(found, weights)
    ranks = dist.get_world_size()
    pair = dist.new_group([ranks - 2, ranks - 1])
    if dist.get_rank() >= ranks - 2:
        own = Reader(directory)
        found = {"x": torch.zeros(50, device=device)}
        load(found, own, process_group=pair)
        assert own.read_bytes in (0, 200) and not differing(found, weights)
        read = [0, 0]
        dist.all_gather_object(read, own.read_bytes, group=pair)
        assert sum(read) == 200, read
    dist.barrier()


def prove_unlike_memory_stays(root: Path, device: torch.device) -> None:
    """What a rank's memory cannot hold is not sent to others, nor what has no bytes of its own."""
    weights = {"x": torch.arange(48.0, device=device).view(6, 8)}
    for directory in save(root, "overlapping", weights, device):
        for rank in range(dist.get_world_size()):
            found = {"x": torch.zeros(6, 8, device=device)}
            if dist.get_rank() == rank:
                found["x"] = torch.zeros(13, device=device).unfold(0, 8, 1)  # rows share memory
            load(found, directory)
            wrong = differing(found, weights)
            assert dist.get_rank() == rank or not wrong, f"rank {rank} has sent what it holds"
    saved = torch.quantize_per_tensor(torch.arange(16.0), 0.5, 0, torch.qint8)
    dcp.save({"q": saved, "x": torch.ones(3)}, checkpoint_id=root / "quantized")
    for pack in (0, 8 << 20):
        fresh = torch.quantize_per_tensor(torch.zeros(16), 0.5, 0, torch.qint8)
        found = {"q": fresh, "x": torch.zeros(3)}
        with mock.patch.object(shared_reads, "PACK", pack):
            load(found, root / "quantized")
        assert torch.equal(found["q"].int_repr(), saved.int_repr())


def prove_each(root: Path, device: torch.device, what: str) -> None:
    if what in ("ddp", "hsdp", "mixed"):
        prove_layout(root, device, what)
    if what == "ddp":
        prove_resharded(root, device)
    proofs = {
        "targets": prove_targets,
        "damage": prove_all_raise,
        "trouble": prove_one_rank_stops_all,
        "others": prove_others_stay,
        "unlike": prove_unlike_memory_stays,
    }
    if what in proofs:
        proofs[what](root, device)


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    device = start_rank()
    roots = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(roots)
    root = Path(roots[0])
    shared_reads.WORTH = 1
    try:
        for name in names:
            prove_each(root, device, name)
            if dist.get_rank() == 0:
                print(f"{name}: as dcp.load")
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(root)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
