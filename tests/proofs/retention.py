"""Retention: what neither rule keeps goes, a dry run deletes nothing, no room fails a save at once.

The directory begins with the leftovers of a crash. A second job is refused.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import _toys as basic
import torch
import torch.distributed as dist

from overlap_recipes.checkpoint.durable import committed_steps
from overlap_recipes.checkpoint.retention import (
    LEFTOVERS,
    RetainedSaves,
    prune,
    seconds_between_saves,
    show,
    take_lease,
)

STEPS, SAVE_EVERY = 12, 2


def train(app: basic.AppState, root: Path, device: torch.device) -> dict[int, dict]:
    """Save every second step; return the bits of each save."""
    saved = {}
    with RetainedSaves(root, device, app.model.buffers, keep_last=2, keep_every=6) as saves:
        assert not [path for pattern in LEFTOVERS for path in root.glob(pattern)]
        refused("a second job", take_lease, root)
        refused("no room", saves.look_for_room, {"x": torch.zeros(1).expand(10**15)})
        for _ in range(STEPS):
            basic.train_step(app, device)
            if app.step % SAVE_EVERY == 0:
                saved[app.step] = basic.snapshot(app)
                saves.save({"app": app}, root / f"step{app.step}")
    return saved


def refused(what: str, action: Callable, *args: object) -> None:
    try:
        action(*args)
    except (RuntimeError, OSError) as error:
        print(f"{what}: {error}")
    else:
        raise AssertionError(f"{what} was not refused")


def prove(root: Path, device: torch.device, saved: dict[int, dict]) -> None:
    assert committed_steps(root) == [12, 10, 6], committed_steps(root)
    for step in committed_steps(root):
        basic.assert_same_bits(basic.load_app(root / f"step{step}", device), saved[step])
    assert show(root, digests=True)
    prune(root, keep_last=1, keep_every=0, dry_run=True)
    assert committed_steps(root) == [12, 10, 6], "a dry run has deleted"
    print(f"10 ms a save, a failure a day: every {seconds_between_saves(0.01, 86400, 8):.0f} s")


def main(directory: Path) -> None:
    basic.HIDDEN = 512  # small: all of it is flushed, many times
    device = basic.start_rank()
    try:
        root = basic.directory_of_rank_0(directory)
        if dist.get_rank() == 0:
            (root / "step2.incomplete").mkdir(parents=True)
            (root / "step1.deleted").mkdir()
        saved = train(basic.build_app(device), root, device)
        prove(root, device, saved)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path)
    with tempfile.TemporaryDirectory() as temporary:
        main(parser.parse_args().dir or Path(temporary))
