"""`OverlappedSaves` survives what training jobs do; one run on one rank, one on two."""

import sys
import threading
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
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
    assert [path.name for path in tmp_path.iterdir()] == ["..incomplete"]


# -- programs that a stranger wrote ---------------------------------------------------------------

CPU = torch.device("cpu")


def loaded(directory: Path, like: dict) -> dict:
    dcp.load(like, checkpoint_id=directory, no_dist=True)
    return like


def test_an_interrupted_save_harms_no_earlier_checkpoint(tmp_path, monkeypatch) -> None:
    import overlapped_stager

    go, write = threading.Event(), overlapped_stager.OverlappedSaves.write

    def write_late(self, *args) -> None:
        assert go.wait(30)
        write(self, *args)

    def interrupted(plan) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(overlapped_stager.OverlappedSaves, "write", write_late)
    x = torch.zeros(1000)
    with overlapped_stager.OverlappedSaves(CPU) as saves:
        saves.save({"x": x}, tmp_path / "step0")
        saves.before_update()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(overlapped_stager.CopyPlan, "take_snapshots", interrupted)
            saves.save({"x": x.fill_(1)}, tmp_path / "step1")
        threading.Timer(0.3, go.set).start()  # a save that does not wait has damaged step0 by then
        saves.save({"x": x.fill_(2)}, tmp_path / "step2")
        with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
            saves.wait()
    for step in (0, 2):
        assert loaded(tmp_path / f"step{step}", {"x": torch.ones(1000)})["x"].unique() == step
    assert not (tmp_path / "step1").exists()


def test_memory_that_is_read_as_another_dtype_is_noticed(tmp_path) -> None:
    from overlapped_stager import OverlappedSaves

    x = torch.arange(16.0)
    with OverlappedSaves(CPU) as saves:
        saves.save({"x": x}, tmp_path / "floats")
        x.data = x.data.view(torch.int32)
        saves.save({"x": x}, tmp_path / "integers")
    found = loaded(tmp_path / "integers", {"x": torch.zeros(16, dtype=torch.int32)})["x"]
    assert torch.equal(found, x)


def test_a_conjugated_view_is_saved_as_it_reads(tmp_path) -> None:
    from overlapped_stager import OverlappedSaves

    x = torch.randn(200_000, dtype=torch.complex64)
    state = {"x": x, "conj": x.conj(), "neg": torch._neg_view(x.real.contiguous())}
    expected = {name: tensor.clone() for name, tensor in state.items()}
    with OverlappedSaves(CPU) as saves:
        saves.save(state, tmp_path / "x")
    found = loaded(tmp_path / "x", {n: torch.zeros_like(t) for n, t in expected.items()})
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_default_device_is_of_no_matter(tmp_path) -> None:
    from overlapped_writer import OverlappedWriter

    x = torch.ones(5)
    torch.set_default_device("meta")
    try:
        with OverlappedWriter(CPU, if_busy="skip") as saves:
            for step in range(3):
                saves.save({"x": x, "none": x[:0]}, tmp_path / f"step{step}").result()
    finally:
        torch.set_default_device(None)
    assert torch.equal(loaded(tmp_path / "step2", {"x": torch.zeros(5)})["x"], x)


def test_a_leaf_that_has_tensors_of_its_own_is_a_leaf(tmp_path) -> None:
    from overlapped_stager import OverlappedSaves

    data = torch.utils.data.TensorDataset(torch.zeros(2))
    with OverlappedSaves(CPU) as saves:
        saves.save({"data": data, "w": torch.ones(2)}, tmp_path / "x")
    assert torch.equal(loaded(tmp_path / "x", {"w": torch.zeros(2)})["w"], torch.ones(2))


def test_a_subclass_of_parameter_is_saved_as_its_tensor(tmp_path) -> None:
    from overlapped_stager import OverlappedSaves

    class Mine(torch.nn.Parameter): ...

    state = {"a": Mine(torch.full((2,), 3.0)), "b": torch.ones(2)}
    with OverlappedSaves(CPU) as saves:
        saves.save(state, tmp_path / "x")
    found = loaded(tmp_path / "x", {"a": torch.zeros(2), "b": torch.zeros(2)})
    assert torch.equal(found["a"], state["a"].data) and torch.equal(found["b"], state["b"])


def test_saves_that_were_made_before_the_process_group_are_refused() -> None:
    from overlapped_stager import OverlappedSaves

    saves = OverlappedSaves(CPU)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with saves, pytest.raises(RuntimeError, match="init_process_group"):
            saves.save({}, Path("x"))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("before", [True, False], ids=["no checkpoint", "a checkpoint"])
def test_files_beside_a_checkpoint_are_kept_and_so_is_the_new_one(tmp_path, before) -> None:
    from overlapped_stager import OverlappedSaves

    place = tmp_path / "latest"
    with OverlappedSaves(CPU) as saves:
        if not before:
            saves.save({"x": torch.zeros(2)}, place).result()
        place.mkdir(exist_ok=True)
        (place / "tokenizer.json").write_text("mine")
        saves.save({"x": torch.ones(2)}, place)
        with pytest.raises(RuntimeError, match="not empty"):
            saves.wait()
    assert (place / "tokenizer.json").read_text() == "mine"
    kept = loaded(tmp_path / "latest.incomplete", {"x": torch.zeros(2)})["x"]
    assert torch.equal(kept, torch.ones(2))


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
