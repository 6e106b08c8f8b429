"""Saves of the checkpoint recipes survive full disks, interrupts and states that change."""

from functools import partial

import pytest
import troubles

survives = partial(troubles.survives, "checkpoint_troubles")


def test_a_save_after_an_interrupted_wait_does_not_run_beside_the_one_awaited() -> None:
    survives("interrupted")


def test_buffers_of_another_dtype_are_not_filled_in_silence() -> None:
    survives("other_dtype")


def test_a_state_with_another_plain_value_is_refused_by_its_name() -> None:
    survives("other_settings")


def test_the_default_stager_clones_the_buffers_that_the_state_dict_names_otherwise() -> None:
    survives("buffers_by_any_name")


def test_the_default_stager_trains_and_saves_after_a_failed_staging() -> None:
    survives("staging_fails")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_before_the_first_step_leaves_the_training_as_it_is(ranks: int) -> None:
    survives("saved_before_the_first_step", ranks=ranks)


def test_an_optimizer_that_counts_no_steps_can_be_saved_before_the_first() -> None:
    survives("saved_before_the_first_step_by_sgd")
