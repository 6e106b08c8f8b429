"""Stock FSDP2 and FSDP2 in place train the same bits, whatever a user's program does.

``tests/data/in_place_training.py`` holds the programs; one process a rank runs them all: shared
weights, adapters, groups of modules, accumulation, evaluation, weights loaded and swapped by any
road, several optimizers, checkpointing, compilation, HSDP.
"""

from pathlib import Path

import pytest

from harness.run import run

TRAINING = Path(__file__).parent / "data" / "in_place_training.py"


@pytest.mark.parametrize("half", [0, 1])
def test_every_program_trains_the_bits_of_stock_fsdp2(half: int) -> None:
    report = run(TRAINING, 2, launcher="warm", args=("half", str(half)), deadline_s=240)
    assert report.ok, report.describe()


@pytest.mark.parametrize("way", ["under stock", "in place"])
@pytest.mark.parametrize("program", ["branches", "evaluation_beside"])
def test_units_may_compute_on_several_streams(program: str, way: str) -> None:
    report = run(TRAINING, 2, launcher="warm", args=(f"{program} {way}",), order=True)
    assert report.ok, report.describe()


def test_sums_of_three_ranks_are_as_near_to_those_in_float64_as_stocks() -> None:
    report = run(TRAINING, 3, launcher="warm", args=("sums_of_more_ranks",))
    assert report.ok, report.describe()
