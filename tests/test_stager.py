"""`OverlappedSaves` survives what training jobs do; one run on one rank, one on two."""

from functools import cache

import pytest
import troubles

ONE_RANK = [
    "writes_take_turns",
    "a_save_after_an_interrupted_wait_waits_for_its_buffers",
    "saves_outside_the_block_are_refused",
    "every_optimizer_is_ordered_and_none_afterwards",
    "weights_that_moved_are_saved_where_they_are",
    "leaves_of_every_kind_are_as_they_were",
    "snapshots_free_the_update_from_the_copies",
    "threads_are_told_their_device",
]
TWO_RANKS = [
    "an_older_checkpoint_of_the_name_is_replaced_whole",
    "a_failed_save_is_told_on_every_rank_and_costs_no_other",
    "a_rank_that_cannot_stage_is_told_to_all",
    "a_busy_rank_makes_all_ranks_skip",
    "a_block_left_by_one_rank_does_not_hang_and_leaves_nothing_wrong",
    "an_upload_that_outlives_its_group_has_no_name",
    "a_tensor_that_grew_is_planned_anew",
]


@cache
def output(ranks: int) -> str:
    """What the first rank prints of all troubles for so many ranks."""
    return troubles.survives("stager_troubles", "all", ranks).outputs[0]


@pytest.mark.parametrize("trouble", ONE_RANK)
def test_on_one_rank(trouble: str) -> None:
    assert f"survived {trouble}\n" in output(1)


@pytest.mark.parametrize("trouble", TWO_RANKS)
def test_on_two_ranks(trouble: str) -> None:
    assert f"survived {trouble}\n" in output(2)
