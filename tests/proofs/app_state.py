"""``TrainingState``: a save changes no optimizer, a load neither makes state up nor leaves any out.

A job saves before its first step. After its second it freezes a layer and saves again. It loads
that checkpoint itself, and so does another job. The first thaws the layer, and both train on: they
must end with the same bits. A third job loads step 0, and must have no optimizer state.
"""

import argparse
import copy
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from overlap_recipes.checkpoint import TrainingState

WIDTH = 64


def start_rank() -> torch.device:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group()
    else:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    return device


def build(device: torch.device, seed: int = 0) -> TrainingState:
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    model = fully_shard(layers.to(device))
    return TrainingState(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def train(app: TrainingState, last_step: int, device: torch.device) -> TrainingState:
    while app.step < last_step:
        torch.manual_seed(1000 * app.step + dist.get_rank())
        app.model(torch.randn(8, WIDTH, device=device)).square().mean().backward()
        app.optimizers[0].step()
        app.optimizers[0].zero_grad()
        app.step += 1
    return app


def leaves(tree: object, path: str = "") -> dict[str, object]:
    """The leaves of nested dicts and lists by path; of a DTensor, this rank's shard."""
    if isinstance(tree, DTensor):
        return {path: tree.to_local()}
    if isinstance(tree, dict):
        children = tree.items()
    elif isinstance(tree, list):
        children = enumerate(tree)
    else:
        return {path: tree}
    found = {}
    for key, child in children:
        found |= leaves(child, f"{path}/{key}")
    return found


def own_leaves(app: TrainingState) -> dict[str, object]:
    """All but random numbers, which the loop seeds at every step."""
    state = app.state_dict()
    del state["per_rank"]
    return leaves(state)


def snapshot(app: TrainingState) -> dict[str, object]:
    return copy.deepcopy(own_leaves(app))


def assert_same_bits(app: TrainingState, expected: dict[str, object]) -> None:
    found = own_leaves(app)
    assert found.keys() == expected.keys(), f"other keys: {found.keys() ^ expected.keys()}"
    differing = []
    for path, leaf in expected.items():
        same = torch.equal(found[path], leaf) if torch.is_tensor(leaf) else found[path] == leaf
        if not same:
            differing.append(path)
    assert not differing, f"step {expected['/step']}: {differing[:3]} of {len(differing)} differ"


def load(directory: Path, device: torch.device) -> TrainingState:
    app = build(device, seed=1)
    dcp.load({"app": app}, checkpoint_id=directory)
    return app


def main(directory: Path) -> None:
    device = start_rank()
    of_rank_0 = [directory]
    dist.broadcast_object_list(of_rank_0)
    root = of_rank_0[0]
    app = build(device)
    dcp.save({"app": app}, checkpoint_id=root / "step0")
    assert not app.optimizers[0].state, "the save made a state for the optimizer"
    train(app, 2, device)
    saved = snapshot(app)
    app.model[0].requires_grad_(False)
    dcp.save({"app": app}, checkpoint_id=root / "step2")

    dcp.load({"app": app}, checkpoint_id=root / "step2")
    later = load(root / "step2", device)
    app.model[0].requires_grad_()
    for job in (app, later):
        assert_same_bits(job, saved)
    ended = snapshot(train(app, 4, device))
    assert_same_bits(train(later, 4, device), ended)
    print("a layer that was frozen at the save goes on with its moments, in both jobs")

    first = load(root / "step0", device)
    assert not first.optimizers[0].state, "the load made a state for the optimizer"
    print("a job that loads step 0 has no optimizer state")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path)
    with tempfile.TemporaryDirectory() as temporary:
        main(parser.parse_args().dir or Path(temporary))
