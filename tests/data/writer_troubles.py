"""What the writer must write, notice and survive; the arguments name it."""

import io
import os
import resource
import shutil
import sys
import time
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "recipes_source" / "checkpoint"
sys.path[:0] = [str(RECIPES), str(Path(__file__).parent)]

import _toys as basic  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from facing import face  # noqa: E402
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Replicate, Shard, distribute_tensor  # noqa: E402

from overlap_recipes.checkpoint import writer  # noqa: E402
from overlap_recipes.checkpoint.saves import Saves  # noqa: E402
from overlap_recipes.checkpoint.writer import FileWriter  # noqa: E402
from overlap_recipes.checkpoint.writing import Target  # noqa: E402

CPU = torch.device("cpu")
KINDS = [
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.bool,
    torch.complex64,
    torch.uint8,
    torch.int64,
]


def sharded(rows: int, seed: int) -> torch.Tensor:
    """``rows`` of three random numbers, over all ranks; some ranks may hold none."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(random(seed, rows), mesh, [Shard(0)])


def random(seed: int, *shape: int) -> torch.Tensor:
    """Equal on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(max(shape[0], 0) if shape else 1, 3, generator=generator)


def same(found: dict, expected: dict) -> None:
    """Every leaf, bit by bit."""
    found, expected = basic.leaves(found), basic.leaves(expected)
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for path, leaf in expected.items():
        if torch.is_tensor(leaf):
            shape, dtype = found[path].shape, found[path].dtype
            assert (shape, dtype) == (leaf.shape, leaf.dtype), f"{path}: {shape}, {dtype}"
        if torch.is_tensor(leaf) and leaf.layout != torch.strided:
            assert torch.equal(found[path].to_dense(), leaf.to_dense()), path
        else:
            assert basic.same_bits(found[path], leaf), path


def zeros_like(tree: object) -> object:
    """A place to load into."""
    if isinstance(tree, dict):
        return {key: zeros_like(value) for key, value in tree.items()}
    if isinstance(tree, list) and any(map(torch.is_tensor, tree)):
        return [zeros_like(value) for value in tree]
    return torch.zeros_like(tree) if torch.is_tensor(tree) else None


def hide(root: Path) -> None:
    """Gloo gathers no float8, DCP loads no sparse tensor and takes long for thousands."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(root)


def load(directory: Path, like: dict) -> dict:
    state = zeros_like(like)
    dcp.load(state, checkpoint_id=directory)
    return state


def copy_of(tree: object) -> object:
    if isinstance(tree, dict):
        return {key: copy_of(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [copy_of(value) for value in tree]
    return tree.clone() if torch.is_tensor(tree) else tree


def all_kinds(root: Path, device: torch.device) -> None:
    """Every dtype, uneven and empty shards, replicated and tied tensors, objects that grow."""
    writer.PIECE = 256  # several files, and tensors cut into pieces
    tied, tied_shards = random(5, 4), sharded(7, 6)
    state = {
        "kinds": {str(dtype): random(1, 5).mul(99).to(dtype) for dtype in KINDS},
        "shards": {str(rows): sharded(rows, rows) for rows in (1, 2, 7, 64)},
        "replicated": distribute_tensor(random(3, 9), tied_shards.device_mesh, [Replicate()]),
        "scalar": torch.tensor(3.0),
        "count": torch.tensor(1),
        "empty": torch.zeros(0, 4),
        "tied": {"embedding": tied, "head": tied, "a": tied_shards, "b": tied_shards},
        "list": [torch.ones(2), torch.zeros(3, dtype=torch.int32)],
        "plain": {"step": 1, "history": [], "betas": (0.9, 0.99), "name": None},
    }
    expected = {}
    with Saves(CPU) as saves:
        for step in range(4):
            state["plain"] = {**state["plain"], "step": 10**step, "history": list(range(50 * step))}
            saves.before_update()  # no optimizer's hook says that the state is about to change
            state["count"].add_(1)
            for tensor in [*state["shards"].values(), state["kinds"]["torch.bfloat16"], tied]:
                tensor.mul_(-1.5)
            expected[step] = copy_of(state)
            saves.save(state, root / str(step))
        saves.wait()
        assert saves.writer.plans == 1, saves.writer.plans
    for step, bits in expected.items():
        same(load(root / str(step), state), bits)
    gathered = {k: v.full_tensor() for k, v in expected[3]["shards"].items()}
    if dist.get_rank() == 0:
        dcp_to_torch_save(root / "3", root / "3.pt")
        alone = torch.load(root / "3.pt", weights_only=False)
        same(alone["shards"], gathered)
        same(alone["kinds"], expected[3]["kinds"])
        assert alone["plain"] == expected[3]["plain"]
    places = dcp.FileSystemReader(root / "3").read_metadata().storage_data
    names = {(i.fqn, i.offset): (p.relative_path, p.offset) for i, p in places.items()}
    if dist.get_world_size() == 1:  # whoever holds less takes the next replicated one
        assert names["tied.embedding", torch.Size([0, 0])] == names["tied.head", torch.Size([0, 0])]
    for (name, offset), place in names.items():
        if name == "tied.a":
            assert names["tied.b", offset] == place, "a tied weight was written twice"
    hide(root)


def changed_layouts(root: Path, device: torch.device) -> None:
    """Keys, shapes, shards, dtypes and ties that change are planned anew, by all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    last = dist.get_rank() == dist.get_world_size() - 1
    one, two = random(1, 8), random(2, 8)
    states = [
        {"a": one, "b": two, "n": 1},
        {"a": one, "b": two, "n": 1},
        {"a": one, "b": one, "n": 1},  # now tied
        {"a": one, "b": two, "n": 1},
        {"a": one, "b": two, "m": 1},  # another name
        {"a": one, "b": two, "m": 1, **({"of one rank": "x" * 99} if last else {})},
        {"a": one, "b": two.double(), "m": 1},
        {"a": one, "b": torch.cat([two, two]), "m": 1},
        {"a": one, "b": distribute_tensor(two, mesh, [Shard(0)]), "m": 1},
        {"a": one, "b": distribute_tensor(two, mesh, [Replicate()]), "m": 1},
        {"a": one, "b": 3, "m": torch.ones(1)},  # what was a tensor is none, and the other way
    ]
    plans = []
    with Saves(CPU) as saves:
        for number, state in enumerate(states):
            for again in "xy":
                state["a"].add_(1)
                bits = copy_of(state)
                saves.save(state, root / f"{number}{again}").result()
                same(load(root / f"{number}{again}", state), bits)
                plans.append(saves.writer.plans)
    expected = [1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10]
    assert plans == expected, plans


def alone(directory: Path) -> dict:
    """The checkpoint as a reader without a model finds it."""
    file = directory.with_suffix(f".{dist.get_rank()}.pt")
    dcp_to_torch_save(directory, file)
    state = torch.load(file, weights_only=False)
    file.unlink()
    return state


def failed_on_one_rank(root: Path, device: torch.device) -> None:
    """A layout that a failed save was to have is not that of the save after it."""
    last = dist.get_rank() == dist.get_world_size() - 1
    x = random(1, 8)

    class Refuses(FileWriter):
        def arranged(self, state: dict) -> writer.Arranged:
            if "refused" in state:
                raise ValueError("no plan for this")
            return super().arranged(state)

    more, other, refused = {} if last else {"more": "x"}, {"other": 1}, {"refused": 1}
    states = [{}, {}, more | (refused if last else {}), other if last else {}]
    states.append(more | (other if last else {}))
    with Saves(CPU, writer=Refuses()) as saves:
        for n, state in enumerate(states):
            error = saves.save({"x": x, **state}, root / str(n)).exception()
            assert (error is None) == (n != 2) and ("no plan" in str(error)) == (n == 2), error
        saves.writing.failures.clear()
    assert {"x", "more", "other"} <= set(alone(root / "4")), alone(root / "4").keys()


def no_room(root: Path, device: torch.device) -> None:
    """A rank that cannot write: all hear of it, the checkpoint before is whole, the next works."""
    state = {"a": sharded(4096, 1), "b": "x"}
    last = dist.get_rank() == dist.get_world_size() - 1
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Saves(CPU) as saves:
        for step in range(4):
            state["a"].mul_(2)
            if step in (1, 2) and last:
                resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
            bits = copy_of(state)
            saves.save(state, root / str(step))
            try:
                saves.wait()
                assert step in (0, 3), "nobody heard of a rank that could not write"
                kept = step, bits
            except RuntimeError as error:
                assert "File too large" in str(error), error
                assert not (root / str(step)).exists()
                assert not list(root.glob(f"{step}.*.incomplete/.metadata"))
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            same(load(root / str(kept[0]), state), kept[1])
        assert kept[0] == 3
        for step in (1, 2):  # they would be taken for checkpoints of this job's that do not load
            saves.save(state, root / str(step))
        saves.wait()


def metadata_last(root: Path, device: torch.device) -> None:
    """``.metadata`` is written when the slowest rank has ended, not before."""
    write_file, marks = writer.write_file, root / "marks"

    def slowly(target: Target, name: str, pieces: list) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(0.5)
        if name == ".metadata":
            ended = len(list(marks.iterdir()))
            assert ended == dist.get_world_size(), f"{ended} ranks had ended"
        write_file(target, name, pieces)
        if name != ".metadata":
            (marks / Path(name).stem).touch()

    writer.write_file = slowly
    marks.mkdir(exist_ok=True)
    with Saves(CPU) as saves:
        saves.save({"a": sharded(64, 1)}, root / "1")


def little_at_a_time(root: Path, device: torch.device) -> None:
    """A file system that takes less than it is given."""
    pwritev, pwrite = os.pwritev, os.pwrite
    os.pwritev = lambda file, buffers, at: pwrite(file, b"".join(buffers)[:700], at)
    os.pwrite = lambda file, data, at: pwrite(file, bytes(data[:700]), at)
    state = {"a": sharded(512, 1), "b": random(2, 50)}
    with Saves(CPU) as saves:
        saves.save(state, root / "1")
    os.pwritev, os.pwrite = pwritev, pwrite
    same(load(root / "1", state), state)


def sparse(root: Path, device: torch.device) -> None:
    """A tensor that is not dense has another size at every save."""
    with Saves(CPU) as saves:
        for n in (1, 3, 2):
            state = {"a": random(n, 8), "s": torch.eye(9).mul(torch.arange(9) < n).to_sparse()}
            saves.save(state, root / str(n))
            saves.wait()
    for n in (1, 3, 2):
        places = dcp.FileSystemReader(root / str(n)).read_metadata().storage_data
        place = next(place for index, place in places.items() if index.fqn == "s")
        data = (root / str(n) / place.relative_path).read_bytes()[place.offset :][: place.length]
        assert torch.load(io.BytesIO(data)).to_dense().sum() == n
    hide(root)


if __name__ == "__main__":
    face(globals())
