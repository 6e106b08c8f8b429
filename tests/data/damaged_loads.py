"""Damaged checkpoints of ours: none loads wrong, each error names the file, on every rank.

torchrun --nproc-per-node=2 tests/data/damaged_loads.py CHECKPOINTS SEED
"""

import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from overlap_recipes.checkpoint import Reader

sys.path.insert(0, str(Path(__file__).parents[1]))
from kept_saves import KeptSaves  # noqa: E402

KINDS = ["bit", "bit", "bit", "cut", "longer", "swapped", "older", "missing", "zeros"]


def state(mesh, fill: int) -> dict:
    torch.manual_seed(fill)
    weights = torch.randn(1200, 900)
    return {
        "sharded": distribute_tensor(weights, mesh, [Shard(0)]),
        "own": torch.randn(70, 30).t(),
        "count": torch.tensor(fill),
        "words": {"step": fill},
    }


def bits(found: dict) -> list[bytes]:
    tensors = [found["sharded"].to_local(), found["own"], found["count"]]
    return [tensor.contiguous().numpy().tobytes() for tensor in tensors]


def damage(dice: random.Random, directory: Path, older: Path) -> tuple[list[str], str]:
    """Damage a file or swap two; their names and how."""
    kind = dice.choice(KINDS)
    files = sorted(path for path in directory.iterdir())
    file = dice.choice(files)
    data = bytearray(file.read_bytes())
    if kind == "bit":
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    elif kind == "cut":
        del data[dice.randrange(len(data)) :]
    elif kind == "longer":
        data += bytes(dice.randrange(1, 9))
    elif kind == "zeros":
        begin = dice.randrange(len(data))
        data[begin : begin + 4096] = bytes(len(data[begin : begin + 4096]))
    elif kind == "swapped":
        shards = [path for path in files if path.suffix == ".distcp"]
        file, other = shards[0], shards[-1]
        data = bytearray(other.read_bytes())
        other.write_bytes(file.read_bytes())
        file.write_bytes(data)
        return [file.name, other.name], kind
    elif kind == "older":
        shards = [path for path in files if path.suffix == ".distcp"]
        file = dice.choice(shards)
        data = bytearray((older / file.name).read_bytes())
    if kind == "missing":
        file.unlink()
    else:
        file.write_bytes(data)
    return [file.name], kind


def outcome(directory: Path, mesh, right: list[bytes]) -> tuple[str, str]:
    """What a load of the damaged checkpoint came to, and its message."""
    found = state(mesh, 3)
    try:
        dcp.load(found, storage_reader=Reader(directory))
    except CheckpointException as error:
        return "refused", str(error)
    if bits(found) == right and found["words"] == {"step": 2}:
        return "right", ""
    return "WRONG", ""


def main(checkpoints: int, seed: int) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    roots = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(roots)
    root = Path(roots[0])
    came: Counter = Counter()
    try:
        with KeptSaves(root) as saves:
            for step in (1, 2):
                saves.save(state(mesh, step), step)
        right = bits(state(mesh, 2))
        assert outcome(root / "step2", mesh, right) == ("right", "")
        dice = random.Random(seed)
        for number in range(checkpoints):
            directory = root / f"damaged{number}"
            said: list = [([], "")]
            if rank == 0:
                shutil.copytree(root / "step2", directory)
                said = [damage(dice, directory, root / "step1")]
            dist.broadcast_object_list(said)
            names, kind = said[0]
            how, message = outcome(directory, mesh, right)
            of_all = [""] * dist.get_world_size()
            dist.all_gather_object(of_all, how)
            assert "WRONG" not in of_all, (number, names, kind, of_all)
            assert len(set(of_all)) == 1, (number, names, kind, of_all)
            is_named = any(name in message for name in names)
            assert how == "right" or is_named, (number, names, kind, message)
            came[f"{kind}: {how}"] += 1
            dist.barrier()
            if rank == 0:
                shutil.rmtree(directory)
        if rank == 0:
            print(f"{checkpoints} damaged checkpoints: {dict(sorted(came.items()))}")
            assert any("refused" in key for key in came)
        dist.barrier()
    finally:
        if rank == 0:
            shutil.rmtree(root)
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
