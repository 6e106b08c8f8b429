"""The writer: DCP plans once, and DCP's own tools read what is written from then on.

The first two steps run beside ``prepare``, so no save plans. A list grows with every step, so no
two checkpoints have the same length. Each checkpoint is read twice: with ``dcp.load`` on these
ranks, and on rank 0 alone with the tool that makes a file for ``torch.load``.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from overlap_recipes.checkpoint.saves import Saves


def whole(tree: object) -> object:
    """A nested state dict on the CPU, with the shards of all ranks put together."""
    if isinstance(tree, dict):
        return {key: whole(value) for key, value in tree.items()}
    tree = tree.full_tensor() if hasattr(tree, "full_tensor") else tree
    return tree.cpu() if torch.is_tensor(tree) else tree


def history(step: int) -> list[float]:
    return [0.5] * 10 ** (step - 2)


def main(directory: Path) -> None:
    from recipes_source.checkpoint import _toys as basic

    device = basic.start_rank()
    root, app, expected = basic.directory_of_rank_0(directory), basic.build_app(device), {}
    with Saves(device, app.model.buffers) as saves:
        prepared = saves.prepare({"app": app, "history": []})
        basic.train(app, 2, device)
        prepared.result()
        assert saves.writer.plans == 1, "the first save would have to plan"
        for step in range(3, 6):
            basic.train_step(app, device)
            expected[step] = basic.snapshot(app)
            saves.save({"app": app, "history": history(step)}, root / f"step{step}")
    assert saves.writer.plans == 1, "planned more than once"
    for step, bits in expected.items():
        loaded = basic.load_app(root / f"step{step}", device)
        basic.assert_same_bits(loaded, bits)
        state = {"app": whole(loaded.state_dict()), "history": history(step)}
        if dist.get_rank() == 0:
            dcp_to_torch_save(root / f"step{step}", root / "whole.pt")
            found = basic.leaves(torch.load(root / "whole.pt", "cpu", weights_only=False))
            assert all(basic.same_bits(found[p], x) for p, x in basic.leaves(state).items()), step
    print(f"planned once; steps {list(expected)} loaded on all ranks and on one, every bit equal")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, help="where checkpoints go (default: temporary)")
    with tempfile.TemporaryDirectory() as temporary:
        main(parser.parse_args().dir or Path(temporary))
