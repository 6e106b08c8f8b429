"""Copies between ranks train what the unsharded run trains, and what they leave can be saved.

``tests/data/training_by_copies.py`` is what the ranks run: FSDP2 and a schedule of our own, with
gathers and reductions by copies; uneven shards and shards of no row, tied and frozen parameters,
gradient accumulation, float32 weights with bfloat16 compute.
"""

from pathlib import Path

import pytest

from harness.run import run

TRAINING = Path(__file__).parent / "data" / "training_by_copies.py"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_losses_and_weights_are_those_of_the_unsharded_run(ranks: int) -> None:
    report = run(TRAINING, ranks, launcher="warm", args=("train",))
    assert report.ok, report.describe()


def test_weights_in_peer_memory_are_saved_as_they_were() -> None:
    """The harness loads each checkpoint in fresh processes and compares every leaf."""
    report = run(TRAINING, 3, launcher="warm", args=("save",))
    assert report.ok, report.describe()
    assert len(report.checkpoints) == 4
