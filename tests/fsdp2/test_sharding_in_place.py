"""Stock FSDP2 and FSDP2 in place train the same bits, whatever a user's program does."""

from pathlib import Path

import pytest

from rankproof.run import run

DATA = Path(__file__).parents[1] / "data"


def passes(program: str, ranks: int, *args: str, **options) -> None:
    report = run(DATA / f"in_place_{program}.py", ranks, launcher="warm", args=args, **options)
    assert report.ok, report.describe()


@pytest.mark.parametrize("half", ["0", "1"])
def test_every_program_trains_the_bits_of_stock_fsdp2(half: str, pytestconfig) -> None:
    """Each in float32 sums, four in every policy; with ``--all-models``, all in every policy."""
    few = [] if pytestconfig.getoption("--all-models") else ["few_policies"]
    passes("training", 2, "half", half, *few, deadline_s=400)


def test_stock_models_train_the_bits_of_stock_fsdp2(pytestconfig) -> None:
    """One of each kind, or all with ``--all-models``."""
    every = ["all"] if pytestconfig.getoption("--all-models") else []
    passes("stock", 2, *every, deadline_s=2000 if every else 200)


def test_troubles_are_refused_or_leave_training_as_it_was() -> None:
    passes("troubles", 2, deadline_s=300)
    passes("troubles", 4, "all_ranks_of_the_mesh_choose")


def test_gradients_of_some_ranks_or_by_unseen_tensors_are_right_or_refused() -> None:
    """A parameter without a gradient on a rank, and outputs on which FSDP2 has no hook."""
    passes("gradients", 2)


def test_stock_fsdp2_mixes_gradients_of_some_ranks_in_silence() -> None:
    report = run(DATA / "in_place_gradients.py", 2, launcher="warm", args=("stock",))
    assert "AssertionError: one_each: blocks." in report.describe(), report.describe()


def test_two_hosts_of_two_ranks_accumulate_the_bits_of_stock_hsdp() -> None:
    """Reductions over the hosts come with each micro-batch, or with the last one alone."""
    passes("training", 4, "accumulation_hsdp")
