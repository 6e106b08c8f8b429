"""Bytes written by a kept plan: what they hold, what is noticed, who hears of an error."""

from functools import partial

import pytest
import torch
import troubles
from torch.distributed.checkpoint import FileSystemReader

from overlap_recipes.checkpoint.saves import Saves
from overlap_recipes.checkpoint.state import TrainingState

survives = partial(troubles.survives, "writer_troubles")


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_kind_of_tensor_and_object_is_read_back_bit_by_bit(ranks: int) -> None:
    survives("all_kinds", ranks)


def test_a_state_with_a_schedule_is_planned_once(tmp_path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    app = TrainingState(model, optimizer, schedule=schedule)
    with Saves(torch.device("cpu")) as saves:
        for step in range(3):
            model(torch.ones(4)).sum().backward()
            optimizer.step()
            schedule.step()
            saves.save({"app": app}, tmp_path / f"step{step}").result()
            assert saves.writer.plans == 1


def test_a_changed_layout_is_planned_anew_by_all_ranks() -> None:
    survives("changed_layouts", ranks=2)


def test_a_number_and_a_tensor_that_exchange_their_names_are_planned_anew() -> None:
    survives("exchanged", ranks=2)


def test_a_layout_that_failed_on_one_rank_is_not_taken_for_the_next_one() -> None:
    survives("failed_on_one_rank", ranks=2)


def test_a_rank_without_room_is_heard_of_on_every_rank_and_harms_nothing() -> None:
    survives("no_room", ranks=2)


def test_metadata_is_written_when_all_ranks_have_ended() -> None:
    survives("metadata_last", ranks=2)


def test_a_file_system_that_takes_less_than_it_is_given_gets_the_rest() -> None:
    survives("little_at_a_time", ranks=2)


def test_ten_thousand_tensors_cost_a_few_calls() -> None:
    survives("many_tensors")


def test_a_tensor_that_is_not_dense_is_serialised_at_every_save() -> None:
    survives("sparse")


class Mine(torch.Tensor): ...


@pytest.mark.parametrize("changed", [torch.arange(5), torch.arange(3.0)], ids=["size", "dtype"])
def test_a_tensor_of_another_class_that_changes_is_planned_anew(tmp_path, changed) -> None:
    x = torch.ones(3)
    with Saves(torch.device("cpu")) as saves:
        tensors = torch.arange(3), torch.arange(3), changed
        for step, mine in enumerate(tensors):  # the third save has the buffers of the first
            state = {"mine": mine.as_subclass(Mine), "x": x}
            saves.save(state, tmp_path / f"{step}").result()
    metadata = FileSystemReader(tmp_path / "2").read_metadata().state_dict_metadata
    assert metadata["mine"].size == changed.shape
    assert metadata["mine"].properties.dtype == changed.dtype
