"""`Saves` survives what training jobs do; one run on one rank, one on two."""

import ctypes
import threading
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import troubles
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from overlap_recipes.checkpoint import copies as copies_module
from overlap_recipes.checkpoint import saves as saves_module
from overlap_recipes.checkpoint.copies import Copies, CopyPlan, PinnedArena
from overlap_recipes.checkpoint.saves import Saves
from overlap_recipes.checkpoint.state import TrainingState, is_staged, read
from overlap_recipes.checkpoint.stores.directory import Folder
from overlap_recipes.checkpoint.talk import Talk
from overlap_recipes.checkpoint.writer import FileWriter, place_of_memory
from overlap_recipes.checkpoint.writing import Target

ONE_RANK = [
    "a_buffer_is_not_filled_while_it_is_written",
    "a_save_in_inference_mode_is_a_save",
    "a_directory_that_is_no_checkpoint_is_not_replaced",
    "other_strides_over_the_same_memory_are_noticed",
    "a_device_without_an_index_is_the_current_one",
    "a_save_after_an_interrupted_wait_waits_for_its_buffers",
    "saves_outside_the_block_are_refused",
    "every_optimizer_is_ordered_and_none_afterwards",
    "weights_that_moved_are_saved_where_they_are",
    "leaves_of_every_kind_are_as_they_were",
    "numbers_on_the_device_are_read_at_the_save",
    "threads_are_told_their_device",
]
TWO_RANKS = [
    "an_older_checkpoint_of_the_name_is_replaced_whole",
    "a_failed_save_is_told_on_every_rank_and_costs_no_other",
    "a_rank_whose_state_cannot_be_read_mixes_no_two_saves",
    "a_rank_that_cannot_stage_is_told_to_all",
    "a_rank_that_does_not_know_its_tensors_is_told_to_all",
    "ranks_that_name_other_directories_are_told",
    "a_block_left_by_one_rank_does_not_hang_and_leaves_nothing_wrong",
    "a_save_that_has_not_begun_when_one_rank_ends_is_told_to_all",
    "an_upload_that_outlives_its_group_has_no_name",
    "a_tensor_that_grew_is_planned_anew",
    "a_tensor_of_other_ranks_is_left_to_them",
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
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "mine").touch()
    monkeypatch.chdir(tmp_path / "here")
    with Saves(torch.device("cpu")) as saves:
        saves.save({"x": torch.ones(2)}, Path("."))
        with pytest.raises(RuntimeError, match="OSError"):
            saves.wait()
    assert (tmp_path / "here" / "mine").exists()


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


def transposed(x: torch.Tensor) -> None:
    x.data = x.data.t()


def of_another_dtype(x: torch.Tensor) -> None:
    x.data = x.data.view(torch.int32)


def negated(x: torch.Tensor) -> None:
    x.data = torch._neg_view(x.data)


def in_other_memory(x: torch.Tensor) -> None:
    x.data = x.data.clone()


CHANGES = [transposed, of_another_dtype, negated, in_other_memory]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_plan_fits_until_a_tensor_is_another(change: Callable) -> None:
    tensors = [torch.zeros(2, 2, requires_grad=False), torch.ones(3)]
    tensors.append(tensors[0])  # tied
    plan = CopyPlan(tensors, CPU)

    def now() -> list[torch.Tensor]:
        return [x.detach() for x in tensors]

    assert plan.fits(now())
    tensors[1].requires_grad_()
    assert plan.fits(now()), "who trains what is of no matter"
    with torch.autocast("cpu"), torch.inference_mode():
        assert plan.fits(now())
    assert not plan.fits(now()[:2]) and not plan.fits([*now(), tensors[1]])
    assert not plan.fits([tensors[1], tensors[0], tensors[1]])
    change(tensors[0])
    assert not plan.fits(now())


def test_memory_that_was_freed_under_a_plan_is_noticed_though_its_address_returns() -> None:
    """The plan would copy from the storage that was freed: a crash."""
    x = torch.ones(1000)
    plan = CopyPlan([x], CPU)
    address, storage = x.data_ptr(), x.untyped_storage()
    x.data = torch.frombuffer((ctypes.c_char * 4000).from_address(address), dtype=torch.float32)
    assert x.data_ptr() == address and storage.data_ptr() == address
    assert not plan.fits([x]) and not plan.fits([x.detach()])


def test_a_storage_that_was_freed_and_filled_again_elsewhere_is_noticed() -> None:
    """As engines do that free a model's memory between steps; a CUDA graph has the old address."""
    x = torch.ones(1000)
    plan, address = CopyPlan([x], CPU), x.data_ptr()
    x.untyped_storage().resize_(0)
    in_its_place = [torch.ones(1000) for _ in range(100)]
    x.untyped_storage().resize_(4000)
    assert x.data_ptr() != address and in_its_place
    assert not plan.fits([x]) and not plan.fits([x.detach()])


def test_a_save_that_cannot_be_planned_keeps_no_plan(tmp_path, monkeypatch) -> None:
    """Its snapshots are memory of the device; the error would hold them, frame by frame."""
    plans = []

    def refused(plan, _) -> None:
        plans.append(weakref.ref(plan))
        raise RuntimeError("no memory")

    with Saves(CPU) as saves:
        with monkeypatch.context() as patch:
            patch.setattr(CopyPlan, "copies", refused)
            failed = saves.save({"x": torch.ones(3).t()}, tmp_path / "step1")
            with pytest.raises(RuntimeError, match="no memory"):
                failed.result()
        assert plans[0]() is None
        saves.save({"x": torch.ones(3)}, tmp_path / "step2").result()
        saves.writing.failures.clear()


def test_another_placement_over_the_same_memory_is_noticed() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        x, y = (DTensor.from_local(torch.ones(4), mesh, [p]) for p in (Shard(0), Replicate()))
        plan = CopyPlan([x], CPU)
        assert plan.fits([x]) and plan.fits([x.detach()])
        x._spec = y._spec
        assert not plan.fits([x])
    finally:
        dist.destroy_process_group()


def test_a_plan_of_inference_mode_is_a_plan() -> None:
    x = torch.arange(4.0)
    with torch.inference_mode():
        plan = CopyPlan([x, x.t()], CPU)
        arena = PinnedArena(plan.nbytes, CPU)
        copies, hosts = plan.copies(arena), plan.hosts(arena)
    plan.take_snapshots()
    copies.queue(torch.cpu, torch.cpu.current_stream())
    assert torch.equal(hosts[0], x)


def test_what_lies_on_another_device_is_copied_at_the_save() -> None:
    """Behind a gap it would wait for the device: an optimizer's steps on the CPU, say."""
    device = torch.device("meta")
    sizes = 3, copies_module.SMALL, 5
    on_host = [torch.full((size,), float(size)) for size in sizes]
    on_host.append(torch.arange(6.0).view(2, 3).t())
    tensors = [torch.empty(size, device=device) for size in sizes]
    tensors.append(torch.empty(4, 4, device=device).t())
    plan = CopyPlan(tensors + on_host, device)
    arena = PinnedArena(plan.nbytes, CPU)
    copies, hosts = plan.copies(arena), plan.hosts(arena)
    for host, shard in copies.elsewhere:
        host.copy_(shard)
    assert all(map(torch.equal, hosts[len(tensors) :], on_host))
    beside = [source for row in copies.in_place + copies.from_copies for _, source in row]
    taken = [shard for _, shard in plan.snapshots] + plan.small + [plan.pack]
    assert {x.device for x in beside + taken} == {device}


def test_one_element_with_a_stride_is_saved(tmp_path) -> None:
    x = torch.arange(10.0)[5::5]
    assert x.is_contiguous() and x.stride() == (5,)
    with Saves(CPU) as saves:
        saves.save({"x": x}, tmp_path / "step1")
    assert loaded(tmp_path / "step1", {"x": torch.zeros(1)})["x"] == 5


def test_a_conjugated_view_is_saved_as_it_reads(tmp_path) -> None:
    x = torch.randn(200_000, dtype=torch.complex64)
    state = {"x": x, "conj": x.conj(), "neg": torch._neg_view(x.real.contiguous())}
    expected = {name: tensor.clone() for name, tensor in state.items()}
    with Saves(CPU) as saves:
        saves.save(state, tmp_path / "x")
    found = loaded(tmp_path / "x", {n: torch.zeros_like(t) for n, t in expected.items()})
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_default_device_is_of_no_matter(tmp_path) -> None:
    x = torch.ones(5)
    torch.set_default_device("meta")
    try:
        with Saves(CPU) as saves:
            for step in range(3):
                saves.save({"x": x, "none": x[:0]}, tmp_path / f"step{step}").result()
    finally:
        torch.set_default_device(None)
    assert torch.equal(loaded(tmp_path / "step2", {"x": torch.zeros(5)})["x"], x)


def test_a_leaf_that_has_tensors_of_its_own_is_a_leaf(tmp_path) -> None:
    data = torch.utils.data.TensorDataset(torch.zeros(2))
    with Saves(CPU) as saves:
        saves.save({"data": data, "w": torch.ones(2)}, tmp_path / "x")
    assert torch.equal(loaded(tmp_path / "x", {"w": torch.zeros(2)})["w"], torch.ones(2))


def test_a_subclass_of_parameter_is_saved_as_its_tensor(tmp_path) -> None:
    class Mine(torch.nn.Parameter): ...

    state = {"a": Mine(torch.full((2,), 3.0)), "b": torch.ones(2)}
    with Saves(CPU) as saves:
        saves.save(state, tmp_path / "x")
    found = loaded(tmp_path / "x", {"a": torch.zeros(2), "b": torch.zeros(2)})
    assert torch.equal(found["a"], state["a"].data) and torch.equal(found["b"], state["b"])


def test_saves_that_were_made_before_the_process_group_are_refused() -> None:
    saves = Saves(CPU)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with saves, pytest.raises(RuntimeError, match="init_process_group"):
            saves.save({}, Path("x"))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("mine", [".metadata", "meta.pt"])
def test_a_folder_that_is_no_checkpoint_is_left_alone_whatever_its_files_are_called(
    tmp_path, mine
) -> None:
    class WithMeta(FileWriter):
        def write(self, state: dict, target: Target, talk: Talk, threads: int) -> None:
            super().write(state, target, talk, threads)
            with target.create("meta.pt") as sink:
                sink.write(4, [b"ours"])

    place = tmp_path / "latest"
    place.mkdir()
    (place / mine).write_text("mine")
    with Saves(CPU, writer=WithMeta()) as saves:
        saves.save({"x": torch.ones(2)}, place)
        with pytest.raises(RuntimeError, match="not empty"):
            saves.wait()
    assert (place / mine).read_text() == "mine"


@pytest.mark.parametrize("mine", ["tokenizer.json", "model/tokenizer.json"])
@pytest.mark.parametrize("part", ["", "model"], ids=["at the top", "in a folder"])
@pytest.mark.parametrize("before", [True, False], ids=["no checkpoint", "a checkpoint"])
def test_files_beside_a_checkpoint_are_kept_and_so_is_the_new_one(
    tmp_path, before, part, mine
) -> None:
    place = tmp_path / "latest"
    with Saves(CPU, writer=FileWriter(part)) as saves:
        if not before:
            saves.save({"x": torch.zeros(2)}, place).result()
        (place / mine).parent.mkdir(parents=True, exist_ok=True)
        (place / mine).write_text("mine")
        saves.save({"x": torch.ones(2)}, place)
        with pytest.raises(RuntimeError, match="not empty"):
            saves.wait()
    assert (place / mine).read_text() == "mine"
    kept = loaded(tmp_path / "latest.incomplete" / part, {"x": torch.zeros(2)})["x"]
    assert torch.equal(kept, torch.ones(2))


def test_a_save_that_fails_behind_its_first_folder_leaves_nothing(tmp_path) -> None:
    class InFolders(FileWriter):
        def write(self, state: dict, target: Target, talk: Talk, threads: int) -> None:
            super().write(state, target, talk, threads)
            raise OSError(28, "No space left on device")

    with Saves(CPU, writer=InFolders("model")) as saves:
        saves.save({"x": torch.ones(2)}, tmp_path / "step1")
        with pytest.raises(RuntimeError, match="No space"):
            saves.wait()
    assert not list(tmp_path.iterdir()), "a full disk needs the room"


def test_an_error_of_the_file_system_names_its_path(tmp_path) -> None:
    (tmp_path / "file").touch()
    with Saves(CPU) as saves:
        saves.save({"x": torch.ones(2)}, tmp_path / "file" / "step1")
        with pytest.raises(RuntimeError, match="NotADirectoryError.*file/step1.incomplete"):
            saves.wait()


def test_a_relative_directory_is_that_of_the_call(tmp_path, monkeypatch) -> None:
    go, other = threading.Event(), tmp_path / "other"
    other.mkdir()

    class Late(FileWriter):
        def write(self, *args) -> None:
            assert go.wait(30)
            super().write(*args)

    monkeypatch.chdir(tmp_path)
    with Saves(CPU, writer=Late()) as saves:
        saves.save({"x": torch.ones(2)}, Path("step1"))
        monkeypatch.chdir(other)
        go.set()
    assert (tmp_path / "step1" / ".metadata").exists() and not list(other.iterdir())


def test_large_buffers_that_model_to_has_replaced_are_read_at_the_save(tmp_path, monkeypatch):
    model = torch.nn.BatchNorm1d(4)
    monkeypatch.setattr(copies_module, "SMALL", 1)
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


def test_a_small_tensor_is_read_at_the_save_whoever_changes_it(tmp_path) -> None:
    x, like = torch.ones(1000), {"x": torch.zeros(1000)}
    with Saves(CPU) as saves:
        saves.save({"x": x}, tmp_path / "step1")
        assert not saves.staging.plan.in_place, "beside training it would be read later"
        x.zero_()
    assert loaded(tmp_path / "step1", like)["x"].eq(1).all()


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
        while not (tmp_path / "step1.incomplete" / ".metadata").exists():
            threading.Event().wait(0.01)
        raise ValueError("mine")
    assert "left while a checkpoint was being written" in caplog.text
    go.set()


def test_no_more_than_a_piece_is_copied_between_two_gaps(monkeypatch) -> None:
    """A read waits for what lies between two gaps; GPU tests show that it waits for no more."""
    piece = 4 << 20
    monkeypatch.setattr(copies_module, "PIECE", piece)
    sizes = [2 * piece + 5, 10 * piece // 16, 6 * piece // 16, 1, piece // 2]
    tensors = [torch.zeros(nbytes, dtype=torch.uint8) for nbytes in sizes]
    plan = CopyPlan(tensors, CPU, tensors[-1:])
    arena = PinnedArena(plan.nbytes, CPU)
    copies = plan.copies(arena)
    rows = copies.in_place + copies.from_copies
    in_a_row = [sum(source.nbytes for _, source in row) for row in rows]
    assert max(in_a_row) == piece and sum(in_a_row) == sum(sizes)
    assert len(rows) < 8, "copies that fit into one piece share it"


def test_a_block_ends_twice_as_it_ends_once(tmp_path) -> None:
    """Trainers end it again after its end has raised."""
    saves = Saves(CPU).__enter__()
    saves.save({"x": torch.ones(2)}, tmp_path / "step1")
    for _ in range(2):
        saves.__exit__(None, None, None)
    with pytest.raises(RuntimeError, match="save in one"):
        saves.save({"x": torch.ones(2)}, tmp_path / "step2")


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


def test_an_interrupted_wait_for_buffers_costs_that_save_and_is_told(tmp_path, monkeypatch) -> None:
    """Uncounted, this rank's later saves would join those that the other ranks began before."""

    go, write = threading.Event(), FileWriter.write

    def held(self, *args) -> None:
        assert go.wait(30)
        write(self, *args)

    def interrupted(uploads) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(FileWriter, "write", held)
    with Saves(CPU) as saves:
        saves.save({"x": torch.ones(2)}, tmp_path / "step1")
        monkeypatch.setattr(saves_module, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            saves.save({"x": torch.ones(2)}, tmp_path / "step2")
        assert saves.calls == 2
        go.set()
        with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
            saves.wait()
        saves.save({"x": torch.ones(2)}, tmp_path / "step3")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step1", "step3"]


def test_a_process_group_that_ends_before_the_block_hides_no_save(tmp_path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with Saves(CPU) as saves:
        saves.save({"x": torch.ones(2)}, tmp_path / "step1").result()
        dist.destroy_process_group()
    assert (tmp_path / "step1" / ".metadata").exists()


def test_empty_shards_are_one_memory_whichever_objects_hold_them() -> None:
    """DCP makes a new object of a shard at each look; ids of dead ones return in another order."""
    one, other = torch.empty(0), torch.empty(0)
    assert place_of_memory(one) == place_of_memory(other) != place_of_memory(torch.empty(0, 7))


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


def test_a_quantized_tensor_is_saved(tmp_path) -> None:
    x = torch.quantize_per_tensor(torch.randn(5), 0.1, 3, torch.qint8)
    assert not is_staged(x)  # staged, it would end the process
    like = {"x": torch.quantize_per_tensor(torch.zeros(5), 0.1, 3, torch.qint8)}
    with Saves(CPU) as saves:
        saves.save({"x": x}, tmp_path / "step1")
    assert torch.equal(loaded(tmp_path / "step1", like)["x"].int_repr(), x.int_repr())


def test_a_second_block_of_one_saver_is_refused_by_name(tmp_path) -> None:
    saves = Saves(CPU)
    with pytest.raises(ZeroDivisionError), saves:
        saves.save({"x": torch.ones(2)}, tmp_path / "step1").result()
        raise ZeroDivisionError
    with saves, pytest.raises(RuntimeError, match="one `with Saves"):
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
