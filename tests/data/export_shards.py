"""Export tensors in every cut: rows, columns, both, uneven, empty on some ranks; 4 ranks."""

import sys
import tempfile
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "recipes_source" / "checkpoint"
sys.path.insert(0, str(RECIPES))

import _toys as basic  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from export import read_all  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Replicate, Shard, distribute_tensor  # noqa: E402

from overlap_recipes.checkpoint.export import Exports  # noqa: E402

CUTS = {
    "rows": [Replicate(), Shard(0)],
    "columns": [Replicate(), Shard(1)],
    "last": [Replicate(), Shard(2)],
    "both": [Shard(0), Shard(1)],
    "outer": [Shard(1), Shard(2)],
    "nothing": [Replicate(), Replicate()],
}
SHAPES = (4, 6, 2), (5, 3, 7), (1, 1, 1), (1, 5, 3), (3, 0, 2)

if __name__ == "__main__":
    device = basic.start_rank()
    try:
        mesh = init_device_mesh("cpu", (2, 2))
        expected, state = {}, {}
        for cut, placements in CUTS.items():
            for shape in SHAPES:
                name = f"{cut} of {shape}"
                expected[name] = torch.randn(shape, generator=torch.manual_seed(len(state)))
                state[name] = distribute_tensor(expected[name], mesh, placements)
        with tempfile.TemporaryDirectory() as temporary:
            root = basic.directory_of_rank_0(Path(temporary))
            with Exports(device, file_bytes=1000) as exports:
                exports.save(state, root / "hf")
            found = read_all(root / "hf")
            wrong = [name for name, x in expected.items() if not torch.equal(found[name], x)]
            assert not wrong and found.keys() == expected.keys(), wrong
            dist.barrier()
    finally:
        dist.destroy_process_group()
