"""Retention: what neither rule keeps goes, a dry run deletes nothing, no room fails a save at once.

The directory begins with the leftovers of a crash. A second job is refused.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from overlap_recipes.checkpoint import AppState
from overlap_recipes.checkpoint.durable import committed_steps
from overlap_recipes.checkpoint.retention import (
    LEFTOVERS,
    RetainedSaves,
    prune,
    seconds_between_saves,
    show,
    take_lease,
)
from overlap_recipes.ranks import start_rank

WIDTH = 64
STEPS, SAVE_EVERY = 12, 2


def build(device: torch.device, seed: int = 0) -> AppState:
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    model = fully_shard(layers.to(device))
    return AppState(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def train_step(app: AppState, device: torch.device) -> None:
    torch.manual_seed(1000 * app.step + dist.get_rank())
    app.model(torch.randn(8, WIDTH, device=device)).square().mean().backward()
    app.optimizer.step()
    app.optimizer.zero_grad()
    app.step += 1


def bits(app: AppState) -> list[torch.Tensor]:
    """Copies of this rank's weights and moments."""
    tensors = []
    for parameter in app.model.parameters():
        moments = app.optimizer.state[parameter]
        tensors.append(parameter.detach())
        tensors.extend(moments[name] for name in sorted(moments))
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return [tensor.clone() for tensor in local]


def assert_loads(directory: Path, device: torch.device, saved: list[torch.Tensor]) -> None:
    app = build(device, seed=1)
    dcp.load({"app": app}, checkpoint_id=directory)
    found = bits(app)
    assert len(found) == len(saved)
    assert all(map(torch.equal, found, saved)), f"{directory.name} has other bits than were saved"


def train(app: AppState, root: Path, device: torch.device) -> dict[int, list[torch.Tensor]]:
    """Save every second step; return the bits of each save."""
    saved = {}
    with RetainedSaves(root, device, app.model.buffers, keep_last=2, keep_every=6) as saves:
        assert not [path for pattern in LEFTOVERS for path in root.glob(pattern)]
        refused("a second job", take_lease, root)
        refused("no room", saves.look_for_room, {"x": torch.zeros(1).expand(10**15)})
        for _ in range(STEPS):
            train_step(app, device)
            if app.step % SAVE_EVERY == 0:
                saved[app.step] = bits(app)
                saves.save({"app": app}, root / f"step{app.step}")
    return saved


def refused(what: str, action: Callable, *args: object) -> None:
    try:
        action(*args)
    except (RuntimeError, OSError) as error:
        print(f"{what}: {error}")
    else:
        raise AssertionError(f"{what} was not refused")


def prove(root: Path, device: torch.device, saved: dict[int, list[torch.Tensor]]) -> None:
    assert committed_steps(root) == [12, 10, 6], committed_steps(root)
    for step in committed_steps(root):
        assert_loads(root / f"step{step}", device, saved[step])
    assert show(root, digests=True)
    prune(root, keep_last=1, keep_every=0, dry_run=True)
    assert committed_steps(root) == [12, 10, 6], "a dry run has deleted"
    print(f"10 ms a save, a failure a day: every {seconds_between_saves(0.01, 86400, 8):.0f} s")


def main(directory: Path) -> None:
    device = start_rank()
    try:
        of_rank_0 = [directory]
        dist.broadcast_object_list(of_rank_0)
        root = of_rank_0[0]
        if dist.get_rank() == 0:
            (root / "step2.incomplete").mkdir(parents=True)
            (root / "step1.deleted").mkdir()
        saved = train(build(device), root, device)
        prove(root, device, saved)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path)
    with tempfile.TemporaryDirectory() as temporary:
        main(parser.parse_args().dir or Path(temporary))
