"""Durable saves: whole under their name or not there; failed ones leave nothing; damage is found.

Two of five saves must fail, on every rank, and harm nothing. At step 4, the state of the last rank
has something that cannot be pickled. At step 8, the save asks for the name of step 6. Then a byte
changes in a copy of the newest checkpoint: it loads without an error, and only the digests differ.
"""

import argparse
import os
import shutil
import tempfile
from pathlib import Path

import _toys as basic
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from overlap_recipes.checkpoint.durable import (
    POINTER,
    DurableSaves,
    committed_steps,
    faults,
    newest_step,
)

STEPS, SAVE_EVERY = 10, 2


def train(app: basic.AppState, root: Path, device: torch.device) -> dict[int, dict]:
    """Save every second step; return the bits of those whose save did not fail."""
    saved, uploads = {}, {}
    with DurableSaves(device, app.model.buffers) as saves:
        for _ in range(STEPS):
            basic.train_step(app, device)
            if app.step % SAVE_EVERY == 0:
                state = {"app": app}
                if app.step == 4 and dist.get_rank() == dist.get_world_size() - 1:
                    state["collate"] = lambda batch: batch
                saved[app.step] = basic.snapshot(app)
                name = "step6" if app.step == 8 else f"step{app.step}"
                uploads[app.step] = saves.save(state, root / name)
        failed = {step for step, upload in uploads.items() if upload.exception()}
        assert failed == {4, 8}, f"failed: {failed}"
    return {step: bits for step, bits in saved.items() if step not in failed}


def prove(root: Path, device: torch.device, saved: dict[int, dict]) -> None:
    for step, expected in saved.items():
        basic.assert_same_bits(basic.load_app(root / f"step{step}", device), expected)
        assert not faults(root / f"step{step}", digests=True)
    assert committed_steps(root) == [10, 6, 2] and not list(root.glob("*.incomplete"))
    assert (root / POINTER).read_text() == "step10" and newest_step(root) == 10
    print(f"steps {sorted(saved)} are whole, every bit equal; {POINTER} names step10")


def damage(root: Path) -> None:
    """Change a byte in a copy of the newest checkpoint and load it, then cut the copy short."""
    shard = root / "step11" / "__0_0.distcp"
    shutil.copytree(root / "step10", shard.parent)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert newest_step(root) == 11 and newest_step(root, digests=True) == 10
    dcp_to_torch_save(shard.parent, root / "damaged.pt")  # reads everything
    (root / "damaged.pt").unlink()
    print(f"loaded without an error: {faults(shard.parent, digests=True)}")
    os.truncate(shard, 1000)
    assert newest_step(root) == 10, "a file that was cut short counts as whole"
    shutil.rmtree(shard.parent)


def main(directory: Path) -> None:
    basic.HIDDEN = 512  # small: all of it is flushed, many times
    device = basic.start_rank()
    try:
        root = basic.directory_of_rank_0(directory)
        saved = train(basic.build_app(device), root, device)
        prove(root, device, saved)
        dist.barrier()
        if dist.get_rank() == 0:
            damage(root)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path)
    with tempfile.TemporaryDirectory() as temporary:
        main(parser.parse_args().dir or Path(temporary))
