"""`Saves` survives what training jobs do; one run on one rank, one on two."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import troubles

from overlap_recipes.checkpoint import copies as copies_module
from overlap_recipes.checkpoint import saves as saves_module
from overlap_recipes.checkpoint.copies import Copies
from overlap_recipes.checkpoint.saves import Saves
from overlap_recipes.checkpoint.state import TrainingState, is_staged, read
from overlap_recipes.checkpoint.stores.directory import Folder

TWO_RANKS = (
    "an_older_checkpoint_of_the_name_is_replaced_whole",
    "a_rank_whose_state_cannot_be_read_mixes_no_two_saves",
    "a_rank_that_cannot_stage_is_told_to_all",
    "a_block_left_by_one_rank_does_not_hang_and_leaves_nothing_wrong",
    "an_upload_that_outlives_its_group_has_no_name",
    "a_tensor_of_other_ranks_is_left_to_them",
    "ranks_that_answer_to_other_calls_are_told",
)
ONE_RANK = (
    "a_buffer_is_not_filled_while_it_is_written",
    "a_save_in_inference_mode_is_a_save",
    "a_directory_that_is_no_checkpoint_is_not_replaced",
    "other_strides_over_the_same_memory_are_noticed",
    "every_optimizer_is_ordered_and_none_afterwards",
    "weights_that_moved_are_saved_where_they_are",
    "numbers_on_the_device_are_read_at_the_save",
)


@pytest.mark.parametrize(("ranks", "faced"), [(1, ONE_RANK), (2, TWO_RANKS)])
def test_saves_survive_what_jobs_do(ranks: int, faced: tuple[str, ...]) -> None:
    troubles.survives("stager_troubles", *faced, ranks=ranks)


# -- programs that a stranger wrote ---------------------------------------------------------------

CPU = torch.device("cpu")


def loaded(directory: Path, like: dict) -> dict:
    dcp.load(like, checkpoint_id=directory, no_dist=True)
    return like


def test_an_interrupted_save_harms_no_earlier_checkpoint(tmp_path, monkeypatch) -> None:
    def interrupted(*_) -> None:
        raise KeyboardInterrupt

    x = torch.zeros(1000)
    with Saves(CPU) as saves:
        saves.save({"x": x}, tmp_path / "step0")
        saves.before_update()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Copies, "queue_rows", interrupted)
            saves.save({"x": x.fill_(1)}, tmp_path / "step1")
        saves.save({"x": x.fill_(2)}, tmp_path / "step2")
        with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
            saves.wait()
    for step in (0, 2):
        assert loaded(tmp_path / f"step{step}", {"x": torch.ones(1000)})["x"].unique() == step
    assert not (tmp_path / "step1").exists()


@pytest.mark.parametrize(
    "otherwise",
    [lambda x: x.view(torch.int64), torch.conj, torch._neg_view],
    ids=["as integers", "conjugated", "negated"],
)
def test_memory_that_is_read_in_another_way_is_noticed(tmp_path, otherwise) -> None:
    x = torch.randn(16, dtype=torch.complex64)
    with Saves(CPU) as saves:
        saves.save({"x": x}, tmp_path / "before")
        saves.wait()
        x.data = otherwise(x.data)
        saves.save({"x": x}, tmp_path / "after")
    found = loaded(tmp_path / "after", {"x": torch.zeros_like(x.resolve_conj().resolve_neg())})["x"]
    assert torch.equal(found, x)


class Mine(torch.nn.Parameter): ...


def test_a_tensor_is_saved_as_it_reads(tmp_path) -> None:
    x = torch.randn(200_000, dtype=torch.complex64)
    state = {
        "conjugated": x.conj(),
        "negated": torch._neg_view(x.real.contiguous()),
        "one element with a stride": torch.arange(10.0)[5::5],
        "of a class": Mine(torch.full((2,), 3.0)),
        "quantized": torch.quantize_per_tensor(torch.randn(5), 0.1, 3, torch.qint8),
    }
    assert not is_staged(state["quantized"])  # staged, it would end the process
    expected = {name: tensor.detach().clone() for name, tensor in state.items()}
    with Saves(CPU) as saves:
        saves.save(state | {"data": torch.utils.data.TensorDataset(x)}, tmp_path / "x")
    like = {"quantized": torch.quantize_per_tensor(torch.zeros(5), 0.1, 3, torch.qint8)}
    for name in expected.keys() - like.keys():
        like[name] = torch.zeros_like(expected[name])
    found = loaded(tmp_path / "x", like)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_saves_that_were_made_before_the_process_group_are_refused() -> None:
    saves = Saves(CPU)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with saves, pytest.raises(RuntimeError, match="when the process group is there"):
            saves.save({}, Path("x"))
    finally:
        dist.destroy_process_group()


def test_large_buffers_that_model_to_has_replaced_are_read_at_the_save(tmp_path, monkeypatch):
    model = torch.nn.BatchNorm1d(4)
    monkeypatch.setattr(copies_module, "_SMALL", 1)
    with Saves(CPU, model.buffers) as saves:
        saves.save({"model": model}, tmp_path / "step1").result()
        model.to(torch.float64)
        expected = model.running_mean.clone()
        saves.save({"model": model}, tmp_path / "step2")
        read_at_the_save = {shard.data_ptr() for _, shard in saves.staging.plan.snapshots}
        assert model.running_mean.data_ptr() in read_at_the_save
        model(torch.randn(8, 4, dtype=torch.float64))
    like = {"model": {"running_mean": torch.zeros_like(expected)}}
    found = loaded(tmp_path / "step2", like)["model"]["running_mean"]
    assert torch.equal(found, expected) and not torch.equal(found, model.running_mean)


def test_a_state_that_the_caller_changes_is_saved_as_it_is(tmp_path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    app = TrainingState(model, torch.optim.SGD(model.parameters()))
    with Saves(CPU) as saves:
        state = dict(app.state_dict()["model"])
        del state["0.weight"]
        saves.save({"model": state}, tmp_path / "part")
        saves.save({"app": app}, tmp_path / "whole")
    part = {"model": {"1.weight": torch.zeros(3, 3)}}
    assert torch.equal(loaded(tmp_path / "part", part)["model"]["1.weight"], model[1].weight)
    whole = {"app": {"model": {"0.weight": torch.zeros(3, 3)}}}
    found = loaded(tmp_path / "whole", whole)["app"]["model"]
    assert torch.equal(found["0.weight"], model[0].weight)


def test_a_write_that_is_left_behind_is_told(tmp_path, monkeypatch, caplog) -> None:
    go = threading.Event()
    monkeypatch.setattr(saves_module, "EXIT_S", 0.1)
    monkeypatch.setattr(Folder, "commit", lambda *_: go.wait(30))
    with pytest.raises(ValueError, match="mine"), Saves(CPU) as saves:
        saves.save({"x": torch.ones(2)}, tmp_path / "step1")
        while not list(tmp_path.glob("step1.*.incomplete/.metadata")):
            threading.Event().wait(0.01)
        raise ValueError("mine")
    assert "left while a checkpoint was being written" in caplog.text
    go.set()


def test_copies_that_cannot_be_queued_cost_that_save_alone(tmp_path, monkeypatch) -> None:
    def refused(*_) -> None:
        monkeypatch.undo()
        raise MemoryError("no room to launch")

    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    with Saves(CPU) as saves:
        monkeypatch.setattr(Copies, "queue_rows", refused)
        lost = saves.save({"x": weight}, tmp_path / "step1")
        optimizer.step()
        with pytest.raises(RuntimeError, match="no room to launch"):
            lost.result()
        saves.save({"x": weight}, tmp_path / "step2")
        optimizer.step()
        with pytest.raises(RuntimeError, match="no room to launch"):
            saves.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step2"]


def test_a_process_group_that_ends_before_the_block_hides_no_save(tmp_path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with Saves(CPU) as saves:
        saves.save({"x": torch.ones(2)}, tmp_path / "step1").result()
        dist.destroy_process_group()
    assert (tmp_path / "step1" / ".metadata").exists()


class Quantized(torch.Tensor):
    """Integers behind a tensor, whose ``to`` ignores ``copy`` as some optimizers' states do."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> "Quantized":
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None) -> object:
        if function is torch.ops.aten._to_copy.default:
            return cls(args[0].codes)
        return cls(function(args[0].codes, *args[1:], **(kwargs or {})))


def test_a_tensor_whose_copy_is_none_is_saved_as_it_was(tmp_path) -> None:
    tensor = Quantized(torch.ones(3, dtype=torch.uint8))
    copy = read({"x": tensor}, [])["x"]
    tensor.codes.zero_()
    assert copy.codes.eq(1).all()


def test_a_second_block_of_one_saver_is_refused_by_name(tmp_path) -> None:
    saves = Saves(CPU)
    with pytest.raises(ZeroDivisionError), saves:
        saves.save({"x": torch.ones(2)}, tmp_path / "step1").result()
        raise ZeroDivisionError
    with saves, pytest.raises(RuntimeError, match="`with` block, in the process"):
        saves.save({"x": torch.ones(2)}, tmp_path / "step2")
    assert [path.name for path in tmp_path.iterdir()] == ["step1"]


def test_a_compiled_update_waits_for_each_save_anew(tmp_path) -> None:
    """In a compiled graph the wait would be for the event of the save at which it was compiled."""

    class Stream:
        def wait_event(self, event: list[bool]) -> None:
            event.append(torch.compiler.is_compiling())

    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(3)).sum().backward()
    with Saves(CPU) as saves:
        saves.staging.streams = SimpleNamespace(current_stream=Stream)
        step = torch.compile(optimizer.step, backend="eager")
        step()
        for _ in range(3):
            event = []
            saves.staging.has_been_read = event
            step()
            step()
            assert event == [False, False]
