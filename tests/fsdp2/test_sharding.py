"""Sharded training trains what unsharded training trains, and its checkpoints fit any world size.

``tests/data/sharded_training.py`` is what the ranks run: every schedule, uneven shards and shards
of no row, nested units, tied and frozen parameters, gradient accumulation, units in another order
each time, float32 weights with bfloat16 compute; and what may come between two steps.
"""

from pathlib import Path

import pytest

from harness.run import Report, run

TRAINING = Path(__file__).parents[1] / "data" / "sharded_training.py"


def run_ranks(ranks: int, *args: str, order: bool = False, keep: Path | None = None) -> Report:
    report = run(TRAINING, ranks, launcher="warm", args=args, order=order, keep=keep)
    assert report.ok, report.describe()
    return report


@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.all_models)])
def test_every_schedule_gives_the_weights_and_losses_of_the_unsharded_run(ranks: int) -> None:
    run_ranks(ranks, "train")


@pytest.mark.parametrize(("saving", "loading"), [(1, 2), (3, 2), (2, 4)])
def test_a_checkpoint_of_async_save_goes_on_at_another_world_size(
    saving: int, loading: int, tmp_path: Path
) -> None:
    run_ranks(saving, "save", keep=tmp_path / "saved")
    run_ranks(loading, "load", "--saved", str(tmp_path / "saved" / "dir"))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("parameters", ["frozen", "shared"])
def test_units_with_frozen_beside_trained_or_with_shared_parameters_train_as_unsharded(
    parameters: str, ranks: int
) -> None:
    run_ranks(ranks, parameters, order=True)


@pytest.mark.parametrize("before_the_step", ["raised", "called_alone", "no_backward"])
def test_no_forward_computes_with_weights_from_before_a_step(before_the_step: str) -> None:
    run_ranks(2, before_the_step)


def test_activations_of_a_unit_may_be_computed_again_in_backward() -> None:
    run_ranks(2, "recomputed", order=True)


def test_a_unit_that_returns_two_tensors_is_refused_with_a_way_out() -> None:
    run_ranks(1, "refused")


def test_activations_computed_again_to_their_end_cost_no_late_gather() -> None:
    run_ranks(2, "recomputed_to_their_end")


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_context_cannot_follow_is_an_error_that_says_so(ranks: int) -> None:
    run_ranks(ranks, "misused")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_context_goes_with_its_model(ranks: int) -> None:
    run_ranks(ranks, "let_go")
