"""``Saves``: each of five saves in a row holds the bits of its own step."""

import argparse
import tempfile
from pathlib import Path

import torch.distributed as dist

from overlap_recipes.checkpoint.saves import Saves


def main(directory: Path) -> None:
    from recipes_source.checkpoint import _toys as basic

    device = basic.start_rank()
    root, app, expected = basic.directory_of_rank_0(directory), basic.build_app(device), {}
    with Saves(device, app.model.buffers) as saves:
        for step in range(1, 6):
            basic.train_step(app, device)
            expected[step] = basic.snapshot(app)
            saves.save({"app": app}, root / f"step{step}")
    for step, bits in expected.items():
        basic.assert_same_bits(basic.load_app(root / f"step{step}", device), bits)
    print(f"checkpoints of steps {list(expected)} loaded back, every bit equal")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, help="where checkpoints go (default: temporary)")
    with tempfile.TemporaryDirectory() as temporary:
        main(parser.parse_args().dir or Path(temporary))
