"""`OverlappedSaves` survives what training jobs do; one run on one rank, one on two."""

import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import troubles

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes_source" / "checkpoint"))

ONE_RANK = [
    "writes_take_turns",
    "one_set_of_buffers_is_not_filled_while_it_is_written",
    "a_save_in_inference_mode_is_a_save",
    "a_directory_that_is_no_checkpoint_is_not_replaced",
    "other_strides_over_the_same_memory_are_noticed",
    "a_device_without_an_index_is_the_current_one",
    "a_save_after_an_interrupted_wait_waits_for_its_buffers",
    "saves_outside_the_block_are_refused",
    "every_optimizer_is_ordered_and_none_afterwards",
    "weights_that_moved_are_saved_where_they_are",
    "leaves_of_every_kind_are_as_they_were",
    "snapshots_free_the_update_from_the_copies",
    "numbers_on_the_device_are_read_at_the_save",
    "threads_are_told_their_device",
]
TWO_RANKS = [
    "an_older_checkpoint_of_the_name_is_replaced_whole",
    "a_failed_save_is_told_on_every_rank_and_costs_no_other",
    "a_rank_whose_state_cannot_be_read_mixes_no_two_saves",
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


def test_a_directory_without_a_name_is_told_and_does_not_hang(tmp_path, monkeypatch) -> None:
    from overlapped_stager import OverlappedSaves

    monkeypatch.chdir(tmp_path)
    with OverlappedSaves(torch.device("cpu")) as saves:
        saves.save({"x": torch.ones(2)}, Path("."))
        with pytest.raises(RuntimeError, match="OSError"):
            saves.wait()
    assert list(tmp_path.iterdir()) == []


def test_no_more_than_a_piece_is_copied_between_two_gaps(monkeypatch) -> None:
    """A read waits for what lies between two gaps; GPU tests show that it waits for no more."""
    import staging_copies

    piece = 4 << 20
    monkeypatch.setattr(staging_copies, "PIECE", piece)
    sizes = [2 * piece + 5, 10 * piece // 16, 6 * piece // 16, 1, piece // 2]
    tensors = [torch.zeros(nbytes, dtype=torch.uint8) for nbytes in sizes]
    plan = staging_copies.CopyPlan(tensors, torch.device("cpu"), snapshot_bytes=piece // 2)
    rows, row = [], 0
    for targets, sources in plan.copies(staging_copies.PinnedArena(plan.nbytes, tensors[0].device)):
        for target, source in zip(targets, sources, strict=True):
            is_gap = target is plan.gap[0] and source is plan.gap[1]
            rows, row = ([*rows, row], 0) if is_gap else (rows, row + source.nbytes)
        rows, row = [*rows, row], 0
    assert max(rows) == piece and sum(rows) >= sum(sizes)
    assert len(rows) < 12, "copies that fit into one piece share it"
