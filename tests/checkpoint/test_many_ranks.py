"""What grows with the number of ranks, and what does not."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from overlap_recipes.checkpoint import CheckpointManager, TrainingState

REPO = Path(__file__).resolve().parents[2]
TOOL = REPO / "tools" / "many_ranks.py"


def test_a_save_on_eight_ranks_takes_the_collectives_of_two() -> None:
    """Counted at the process group; and a plan sends no list of contents to all."""
    command = [sys.executable, str(TOOL), "--ranks", "2", "8", "--parameters", "96"]
    ran = subprocess.run(
        [*command, "--stores", "directory"], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    two, eight = [json.loads(line) for line in ran.stdout.splitlines()]
    for what in ("collectives", "first_collectives", "plan_collectives"):
        assert two[what] == eight[what] > 0, (what, two, eight)
    assert eight["sent_bytes"] < 1.2 * two["sent_bytes"]
    more = eight["plan_received_by_others_bytes"] / two["plan_received_by_others_bytes"]
    assert more < 1.2, "every rank was sent the list of what all have"


def test_a_resume_reads_a_few_manifests_a_rank() -> None:
    """Rank 0 reads all, others those of files that they read; of each rank's state one does."""
    command = [sys.executable, str(TOOL), "--reshard", "8", "8", "6", "--parameters", "8"]
    ran = subprocess.run(
        [*command, "--stores", "directory"], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    manifests = re.findall(r"read (\d+) manifests", ran.stdout)
    assert manifests[0] == "0" and 8 <= int(manifests[1]) < 8 * 8, ran.stdout
    assert 8 <= int(manifests[2]) < 8 + 6 * 8, ran.stdout


def test_random_numbers_that_are_drawn_make_no_new_list_of_contents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's differ in size from save to save, and at 64 ranks a list takes 3 s to make."""
    made = []
    finish = dcp.FileSystemWriter.finish

    def count(*arguments: object) -> None:
        made.append(arguments)
        finish(*arguments)

    monkeypatch.setattr(dcp.FileSystemWriter, "finish", count)
    state = TrainingState(torch.nn.Linear(2, 2))
    sizes = set()
    with CheckpointManager(tmp_path, state, grace_s=None) as checkpoints:
        random.seed(0)
        for step in range(1, 21):
            for _ in range(1000):
                random.random()
            checkpoints.save(step).result()
            kept = random.getstate()
            sizes.add(len(json.dumps(kept)))
        assert len(sizes) > 10 and len(made) == 1, (sizes, made)
        random.seed(0)
    with CheckpointManager(tmp_path, state, grace_s=None) as checkpoints:
        assert checkpoints.resume() == 20
    assert random.getstate() == kept
