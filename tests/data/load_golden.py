"""Load the checkpoints of folders of ``golden``, and compare every bit with what was saved.

They were written on two ranks, with torch 2.13. Of November 26: ``step2`` by ``Saves`` with a
``TrainingState``, ``step3`` by ``DurableSaves`` with a ``Run``. Of 0.2.1: ``root`` by
``CheckpointManager``, in a directory and in a store, and by ``RetainedSaves`` with a ``Run``.
``expected.json`` has the SHA-256 of each whole tensor.
"""

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from overlap_recipes.checkpoint import CheckpointManager, TrainingState, load

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


def main(folders: list[Path]) -> None:
    dist.init_process_group("gloo")
    try:
        for golden in folders:
            expected = json.loads((golden / "expected.json").read_text())
            OF_FOLDER[golden.name](golden, expected)
    finally:
        dist.destroy_process_group()


def of_november_26(golden: Path, expected: dict) -> None:
    model, optimizer, schedule = build()
    state = TrainingState(model, optimizer, schedule=schedule)
    load({"app": state}, golden / "step2", skip=OLD["step2"])
    compare(state.state_dict(), expected["step2"])
    of_run(golden / "step3", expected["step3"], OLD["step3"])


def in_directory(golden: Path, expected: dict) -> None:
    with copied(golden / "root") as root:
        resumed(root, expected)


def in_store(golden: Path, expected: dict) -> None:
    with copied(golden / "root") as root:
        resumed(f"file://{root}", expected)


@contextmanager
def copied(root: Path) -> Iterator[Path]:
    """A copy for all ranks, since whoever resumes writes there."""
    with tempfile.TemporaryDirectory() as temporary:
        places = [temporary]
        dist.broadcast_object_list(places)
        copy = Path(places[0], "root")
        if dist.get_rank() == 0:
            shutil.copytree(root, copy)
        dist.barrier()
        yield copy
        dist.barrier()


def resumed(root: Path | str, expected: dict) -> None:
    """By the manager, which takes the newest of two."""
    model, optimizer, schedule = build()
    state = TrainingState(model, optimizer, schedule=schedule)
    with CheckpointManager(root, state) as checkpoints:
        assert checkpoints.resume() == 4
        compare(state.state_dict(), expected["step4"])


def in_run(golden: Path, expected: dict) -> None:
    of_run(golden / "root" / "step2", expected["step2"], [])


def of_run(checkpoint: Path, expected: dict, old: list[str]) -> None:
    """What ``Run`` has saved: the same under the key ``run``, and a count of samples."""
    model, optimizer, schedule = build()
    state = TrainingState(model, optimizer, schedule=schedule)
    load({"run": state}, checkpoint, skip=["samples", *old])
    expected.pop("/samples")
    compare(state.state_dict(), expected)


OF_FOLDER = {
    "2026-11-26": of_november_26,
    "0.2.1-directory": in_directory,
    "0.2.1-store": in_store,
    "0.2.1-run": in_run,
}


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
