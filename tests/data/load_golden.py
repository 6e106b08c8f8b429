"""Load the checkpoints of a folder of ``golden``, and compare every bit with what was saved.

They were written on two ranks, with torch 2.13: ``step2`` by ``Saves`` with a
``TrainingState``, ``step3`` by ``DurableSaves`` with a ``Run``. ``expected.json`` has the SHA-256
of each whole tensor.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from overlap_recipes.checkpoint import Run, TrainingState, load, resume

WIDTH, HIDDEN = 8, 12
# counters and random numbers, which these have by other names or not at all
OLD = {"step2": ["random", "step"], "step3": ["random", "random_of_rank_0", "random_of_rank_1"]}


class SampleCounter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("samples", torch.zeros(2, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def build() -> tuple:
    """The job that was saved, with other weights: a model, its optimizer and its schedule."""
    torch.manual_seed(1)
    layers = SampleCounter(), nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)
    model = fully_shard(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def leaves(tree: object, path: str = "") -> dict[str, object]:
    """The leaves of a nested state by their path."""
    if isinstance(tree, dict):
        items = list(tree.items())
    elif isinstance(tree, list):
        items = list(enumerate(tree))
    else:
        return {path: tree}
    found = {}
    for key, value in items:
        found |= leaves(value, f"{path}/{key}")
    return found


def digest(leaf: object) -> str:
    if isinstance(leaf, DTensor):
        leaf = leaf.full_tensor()
    if not torch.is_tensor(leaf):
        return repr(leaf)
    data = leaf.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()


def compare(state: dict, expected: dict[str, str]) -> None:
    """Random numbers are of each rank; ``has_state`` and some counters are of today's version."""
    new = "/random", "/per_rank", "/has_state", "/step"
    found = {path: digest(leaf) for path, leaf in leaves(state).items()}
    found = {path: value for path, value in found.items() if not path.startswith(new)}
    expected = {path: value for path, value in expected.items() if not path.startswith(new)}
    differing = [path for path in expected | found if expected.get(path) != found.get(path)]
    assert not differing, f"not as saved: {differing}"
    print(f"{len(found)} leaves as they were saved")


def main(golden: Path) -> None:
    expected = json.loads((golden / "expected.json").read_text())
    dist.init_process_group("gloo")
    try:
        model, optimizer, schedule = build()
        state = TrainingState(model, optimizer, schedule=schedule)
        load({"app": state}, golden / "step2", skip=OLD["step2"])
        compare(state.state_dict(), expected["step2"])
        run = Run(*build())
        assert resume(run, golden, skip=OLD["step3"]) == 3
        compare(run.state_dict(), expected["step3"])
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
