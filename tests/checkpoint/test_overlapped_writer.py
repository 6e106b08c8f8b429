"""Bytes written by a kept plan: what they hold, what is noticed, who hears of an error."""

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from troubles import survives

from overlap_recipes.checkpoint.saves import Saves


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_kind_of_tensor_and_object_is_read_back_bit_by_bit(ranks: int) -> None:
    survives("writer_troubles", "all_kinds", ranks=ranks)


def test_a_changed_layout_is_planned_anew_and_an_error_is_heard_of_by_all_ranks() -> None:
    """A rank without room harms nothing; metadata is written when all ranks have ended."""
    faced = ("changed_layouts", "failed_on_one_rank", "no_room", "little_at_a_time")
    survives("writer_troubles", *faced, "metadata_last", ranks=2)


def test_a_sparse_tensor_is_serialised_anew() -> None:
    survives("writer_troubles", "sparse")


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
