"""States by chance: what our reader loads is, bit for bit, what DCP's own loads.

    torchrun --nproc-per-node=3 tests/data/fuzz_loads.py STATES SEED

Types, strides, views, placements; saved by DCP, by its writer with several files, or by ours with
digests; loaded into other placements, types and strides.
"""

import random
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from overlap_recipes.checkpoint import Reader

sys.path.insert(0, str(Path(__file__).parents[1]))
from kept_saves import KeptSaves  # noqa: E402

DTYPES = [
    torch.float32,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]
LAYOUTS = ["plain", "plain", "plain", "transposed", "slice", "expanded", "permuted", "conj", "step"]
WRITERS = ["stock", "stock", "ours", "ours", "two files"]
SIZES = [0, 1, 1, 2, 3, 5, 8, 17, 64]


def content(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    data = torch.randint(-100, 100, shape)
    if dtype.is_complex:
        return torch.complex(data.float(), data.float() + 1)
    return data.to(dtype)


def laid_out(dice: random.Random, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of ``shape`` in one of the ways in which it can lie in memory."""
    layout = dice.choice(LAYOUTS)
    if layout == "transposed" and len(shape) >= 2:
        return content([*shape[:-2], shape[-1], shape[-2]], dtype).transpose(-1, -2)
    if layout == "permuted" and len(shape) == 3:
        return content([shape[2], shape[0], shape[1]], dtype).permute(1, 2, 0)
    if layout == "slice" and shape:
        return content([shape[0] + 3, *shape[1:]], dtype)[2 : 2 + shape[0]]
    if layout == "step" and shape:
        return content([*shape[:-1], 2 * shape[-1]], dtype)[..., ::2]
    if layout == "expanded" and len(shape) >= 2:
        return content([1, *shape[1:]], dtype).expand(shape)
    if layout == "conj" and dtype.is_complex:
        return content(shape, dtype).conj()
    return content(shape, dtype)


def placement(dice: random.Random, shape: list[int]):
    choices = [Replicate()]
    for dim in range(min(2, len(shape))):
        choices.append(Shard(dim))
    return dice.choice(choices)


def made_state(dice: random.Random, mesh) -> tuple[dict, dict]:
    """A state to save, and what its tensors are: shapes and types."""
    state: dict = {"object": {"step": dice.randrange(99), "words": ["a", None]}}
    shapes = {}
    for number in range(dice.randrange(1, 7)):
        shape = [dice.choice(SIZES) for _ in range(dice.randrange(4))]
        if dice.random() < 0.1:
            shape = [dice.randrange(200, 900), dice.randrange(200, 900)]
        dtype = dice.choice(DTYPES)
        name = f"t{number}" + "x" * dice.choice([0, 0, 0, 300])
        tensor = laid_out(dice, shape, dtype)
        is_sent = dtype != torch.float8_e4m3fn and not tensor.is_conj()  # gloo cannot send these
        if dice.random() < 0.5 and is_sent and shape:
            tensor = distribute_tensor(tensor, mesh, [placement(dice, shape)])
        state[name] = tensor
        shapes[name] = (shape, dtype)
        if dice.random() < 0.15:
            state[f"{name}.tied"] = tensor
            shapes[f"{name}.tied"] = (shape, dtype)
    return state, shapes


def target(dice: random.Random, shape: list[int], dtype: torch.dtype, mesh) -> torch.Tensor:
    other = torch.float64 if dtype.is_floating_point else dtype
    wanted = dice.choice([dtype, dtype, dtype, other])
    if dice.random() < 0.5 and shape and wanted != torch.float8_e4m3fn:
        room = content(shape, torch.uint8).to(wanted)
        return distribute_tensor(room, mesh, [placement(dice, shape)])
    room = laid_out(dice, shape, torch.uint8).clone(memory_format=torch.preserve_format)
    return room.to(wanted, memory_format=torch.preserve_format)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bits(tensor: torch.Tensor) -> bytes:
    plain = local(tensor).detach().resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().tobytes()


def loaded(targets: dict, reader: dcp.StorageReader) -> str:
    """What went wrong, if anything did."""
    try:
        dcp.load(targets, storage_reader=reader)
    except CheckpointException as error:
        failures = {repr(failure) for failure, _ in error.failures.values()}
        return f"raised {sorted(failures)}"
    return ""


def try_state(seed: int, root: Path, mesh, saves: KeptSaves) -> tuple[int, int]:
    """Save and load; bytes that were read by threads, and as DCP does."""
    dice = random.Random(seed)
    torch.manual_seed(seed)
    state, shapes = made_state(dice, mesh)
    directory = root / f"step{seed}"
    writer = dice.choice(WRITERS)
    if writer == "ours":
        saves.save(state, seed).result()
    else:
        threads = 2 if writer == "two files" else 1
        stock = dcp.FileSystemWriter(directory, thread_count=threads)
        dcp.save(state, storage_writer=stock)
    rooms: list[dict] = []
    recipe = dice.randrange(1 << 30)
    for _ in range(2):
        torch.manual_seed(recipe)
        same_dice = random.Random(recipe)
        targets: dict = {"object": {"step": 0, "words": [0, 0]}}
        for name, (shape, dtype) in shapes.items():
            targets[name] = target(same_dice, shape, dtype, mesh)
        rooms.append(targets)
    expected, found = rooms
    wrong_there = loaded(expected, dcp.FileSystemReader(directory))
    reader = Reader(directory)
    wrong_here = loaded(found, reader)
    assert bool(wrong_there) == bool(wrong_here), (seed, wrong_there, wrong_here)
    if not wrong_there:
        assert found["object"] == expected["object"], (seed, found["object"])
        for name in shapes:
            there, here = local(expected[name]), local(found[name])
            assert bits(there) == bits(here), (seed, writer, name[:9], shapes[name], here.stride())
            assert there.stride() == here.stride(), (seed, name[:9])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(directory)
    return reader.read_bytes, reader.other_bytes


def main(states: int, seed: int) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    try:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        roots = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(roots)
        by_threads, as_dcp = 0, 0
        with KeptSaves(roots[0]) as saves:
            for number in range(states):
                fast, slow = try_state(seed + number, Path(roots[0]), mesh, saves)
                by_threads += fast
                as_dcp += slow
        assert by_threads and as_dcp
        print(f"{states} states; {by_threads} bytes read by threads, {as_dcp} as DCP does")
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(roots[0])
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
