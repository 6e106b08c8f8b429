"""HSDP, tensor-parallel and both, on four ranks: saved under one layout, loaded under all."""

import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from overlap_recipes.checkpoint import Reader

sys.path.insert(0, str(Path(__file__).parents[1]))
from kept_saves import KeptSaves  # noqa: E402

WIDTH, HIDDEN = 9, 14  # no multiples of the ranks


def build(layout: str, mesh: DeviceMesh, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    if layout == "hsdp":
        return fully_shard(model, mesh=mesh)
    model = parallelize_module(model, mesh["inner"], plan)
    if layout == "fsdp and tp":
        fully_shard(model, mesh=mesh["outer"])
    return model


def differing(model: nn.Module, expected: dict[str, torch.Tensor]) -> list[str]:
    found = []
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if not torch.equal(whole, expected[name]):
            found.append(name)
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    roots = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(roots)
    root = Path(roots[0])
    layouts = ("hsdp", "tp", "fsdp and tp")
    try:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
        expected = dict(plain.named_parameters())
        with KeptSaves(root) as saves:
            for number, saved in enumerate(layouts):
                state = build(saved, mesh, 0).state_dict()
                saves.save(state, number).result()
                dcp.save(state, checkpoint_id=root / f"stock{number}")
                for directory in (root / f"step{number}", root / f"stock{number}"):
                    for loaded in layouts:
                        model = build(loaded, mesh, 1)
                        reader = Reader(directory)
                        dcp.load(model.state_dict(), storage_reader=reader)
                        wrong = differing(model, expected)
                        assert not wrong, (directory.name, saved, loaded, wrong)
                        assert reader.read_bytes, "threads have read nothing"
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(root)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
