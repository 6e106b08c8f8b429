"""A job's state is what modules and optimizers hold now, under the names that DCP gives it."""

import random
import threading
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import RandomSampler

from overlap_recipes.checkpoint import CheckpointManager
from overlap_recipes.checkpoint.loading import load
from overlap_recipes.checkpoint.saves import Saves
from overlap_recipes.checkpoint.state import TrainingState, walk
from overlap_recipes.checkpoint.state.trees import memory_of

pytestmark = pytest.mark.usefixtures("one_rank")


class Gated(Saves):
    """Its writing thread looks at no state until ``go`` is set."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.go = threading.Event()
        self.begin = self.writing.begin
        self.writing.begin = self.begin_behind_gate

    def begin_behind_gate(self, *args) -> object:
        assert self.go.wait(30)
        return self.begin(*args)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainingState:
    """After a step and a first state."""
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    app = TrainingState(model, optimizer)
    app.state_dict()
    return app


def right(app: TrainingState) -> bool:
    model, _ = get_state_dict(app.model, app.optimizers)
    found = app.state_dict()["model"]
    same_names = set(found) == set(model)
    return same_names and all(torch.equal(found[key], model[key]) for key in found)


def plain(model: nn.Module) -> nn.Module:
    return model


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def compiled_inside(model: nn.Module) -> nn.Module:
    model[0] = torch.compile(model[0], backend="eager")
    return model


def parametrized(model: nn.Module) -> nn.Module:
    nn.utils.parametrizations.weight_norm(model[0])
    return model


def recomputed(model: nn.Module) -> nn.Module:
    model[0] = checkpoint_wrapper(model[0])
    return model


def sharded(model: nn.Module) -> nn.Module:
    fully_shard(model[0])
    return fully_shard(model)


def tied(model: nn.Module) -> nn.Module:
    model[0].weight = model[2].weight
    return model


WAYS = [plain, compiled, compiled_inside, parametrized, recomputed, sharded, tied]


@pytest.mark.parametrize("way", [*WAYS, nn.parallel.DistributedDataParallel])
def test_a_state_that_is_read_without_dcp_is_what_dcp_gives(way: Callable) -> None:
    model = way(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)))
    app = trained(model, torch.optim.AdamW(model.parameters()))
    assert app.trained.reads_as_dcp
    own = app.trained.read_states()
    of_dcp = app.trained.ask_dcp([])
    assert walk(own.model, memory_of) == walk(of_dcp.model, memory_of)
    assert walk(own.optim, memory_of) == walk(of_dcp.optim, memory_of)


class Doubles(nn.Linear):
    """Takes no ``keep_vars``."""

    def state_dict(self) -> dict:
        return {key: 2 * value for key, value in super().state_dict().items()}


def test_a_model_whose_own_code_makes_its_state_is_asked_through_dcp() -> None:
    model = Doubles(4, 4)
    app = trained(model, torch.optim.AdamW(model.parameters()))
    assert app.trained.reads_as_dcp is False and right(app)
    assert torch.equal(app.state_dict()["model"]["weight"], 2 * model.weight)


def test_an_added_group_is_in_the_state() -> None:
    model, more = nn.Linear(4, 4), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    app = trained(model, optimizer)
    model.more = more
    optimizer.add_param_group({"params": [more], "lr": 0.5})
    groups = app.state_dict()["optim"]["param_groups"]
    assert [group["params"] for group in groups] == [["weight", "bias"], ["more"]] and right(app)


def test_extra_state_is_read_at_every_save() -> None:
    class Counts(nn.Linear):
        count = 0

        def get_extra_state(self) -> dict:
            return {"count": self.count}

        def set_extra_state(self, state: dict) -> None: ...

    model = Counts(4, 4)
    app = trained(model, torch.optim.AdamW(model.parameters()))
    model.count = 7
    assert app.state_dict()["model"]["_extra_state"] == {"count": 7}


@pytest.mark.parametrize("name", ["optim", "step", "has_state"])
def test_a_name_that_the_checkpoint_uses_is_refused(name: str) -> None:
    counts = {"seen": 1}
    with pytest.raises(ValueError, match=f"'{name}'.* is taken"):
        TrainingState(nn.Linear(4, 4), **{name: counts})
    TrainingState(nn.Linear(4, 4), per_rank={name: counts})  # names of its own
    with pytest.raises(ValueError, match="'random'.* is taken"):
        TrainingState(nn.Linear(4, 4), per_rank={"random": counts})


def test_what_is_no_optimizer_and_what_has_no_state_are_refused_at_once() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(TypeError, match="StepLR is no optimizer: pass it by a name"):
        TrainingState(model, optimizer, schedule)
    with pytest.raises(TypeError, match="epoch has no state_dict"):
        TrainingState(model, optimizer, epoch=5)


class Inner(torch.optim.SGD):
    """Keeps a dict of tensors in its state, and new tensors in that at each step."""

    def step(self, closure=None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                inner = self.state[parameter].get("inner", {"sum": torch.zeros(())})
                self.state[parameter]["inner"] = inner
                inner["sum"] = inner["sum"] + 1


class Mine(nn.Parameter): ...


def computed(model: nn.Module) -> None:
    model.register_state_dict_post_hook(
        lambda module, state, *_: state.update({key: x.clone() for key, x in state.items()})
    )


def of_another_class(model: nn.Module) -> None:
    model.weight = Mine(model.weight.data)


def with_a_sparse_buffer(model: nn.Module) -> None:
    model.register_buffer("sparse", torch.eye(2).to_sparse())


@pytest.mark.parametrize("change", [computed, of_another_class, with_a_sparse_buffer])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, Inner])
def test_what_is_no_tensor_of_the_model_is_asked_for_at_every_save(
    tmp_path: Path, change, optimizer
) -> None:
    model = nn.Linear(4, 4)
    change(model)
    optimizer = optimizer(model.parameters(), lr=0.1, momentum=0.9)
    app = TrainingState(model, optimizer)
    with Saves(torch.device("cpu"), model.buffers()) as saves:
        for step in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            saves.save({"app": app}, tmp_path / f"step{step}").result()
            found = {"model": {key: torch.zeros(4, 4) for key in ("weight",)}}
            found["optim"] = {"state": {"weight.momentum_buffer": torch.zeros(4, 4)}}
            dcp.load({"app": found}, checkpoint_id=tmp_path / f"step{step}")
            assert torch.equal(found["model"]["weight"], model.weight), step
            if isinstance(optimizer, Inner):
                inner = app.state_dict()["optim"]["state"]["weight"]["inner"]
                assert inner["sum"] == step + 1


def without_a_moment(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        del state["exp_avg_sq"]


def with_new_moments(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"] * 0.9


@pytest.mark.parametrize("change", [without_a_moment, with_new_moments])
def test_an_optimizer_state_that_changes_behind_a_save_is_saved_as_it_was(tmp_path, change) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    app = trained(model, optimizer)
    moments = deepcopy(optimizer.state[model.weight])
    with Gated(torch.device("cpu")) as saves:
        done = saves.save({"app": app}, tmp_path / "step1")
        saves.before_update()
        change(optimizer)
        saves.go.set()
        done.result()
    like = {"optim": {"state": {"weight": {key: x + 7 for key, x in moments.items()}}}}
    dcp.load({"app": like}, checkpoint_id=tmp_path / "step1")
    found = like["optim"]["state"]["weight"]
    assert found.keys() == moments.keys() and all(
        torch.equal(found[key], moments[key]) for key in found
    )


class Versioned(nn.Linear):
    """Upgrades what it loads, unless that says that it is of today's version."""

    _version = 2

    def _load_from_state_dict(self, state: dict, prefix: str, metadata: dict, *args) -> None:
        if metadata.get("version", 1) < 2:
            state[prefix + "weight"] = state[prefix + "weight"] * 2
        super()._load_from_state_dict(state, prefix, metadata, *args)


def test_a_module_that_upgrades_old_checkpoints_loads_todays_as_it_is(tmp_path: Path) -> None:
    model, other, third = (nn.Sequential(Versioned(4, 4)) for _ in range(3))
    app = trained(model, torch.optim.AdamW(model.parameters()))
    dcp.save({"app": app}, checkpoint_id=tmp_path)
    loaded = TrainingState(other, torch.optim.AdamW(other.parameters()))
    dcp.load({"app": loaded}, checkpoint_id=tmp_path)
    assert torch.equal(other[0].weight, model[0].weight)
    for state in (app.state_dict()["model"], deepcopy(app.state_dict()["model"])):
        third.load_state_dict(state)
        assert torch.equal(third[0].weight, model[0].weight)


def test_a_dict_of_values_is_saved_and_changed_in_place(tmp_path: Path) -> None:
    """What a plain loop keeps in variables, such as its epoch and the batch that it has fetched."""
    model = nn.Linear(2, 2)
    progress = {"epoch": 3, "best": 0.5, "history": [], "batch": torch.arange(4)}
    own = {"place": 7}
    state = TrainingState(model, per_rank={"own": own}, progress=progress)
    dcp.save({"app": state}, checkpoint_id=tmp_path)
    wanted = {**progress}
    progress.update(epoch=0, best=0.0, history=[1], batch=torch.zeros(4, dtype=torch.int64))
    own["place"] = 0
    load({"app": state}, tmp_path)
    assert own == {"place": 7}
    assert torch.equal(progress.pop("batch"), wanted.pop("batch"))
    assert progress == wanted


def test_a_loader_without_a_position_is_named() -> None:
    model = nn.Linear(2, 2)
    loader = torch.utils.data.DataLoader([1, 2])
    with pytest.raises(TypeError, match="data is a DataLoader that does not know where it is"):
        TrainingState(model, per_rank={"data": loader})


def shuffled_by(kind: str) -> object:
    """A loader with a position, of 20 samples in another order each time."""
    data = list(range(20))
    if kind.startswith("torchdata"):
        stateful = pytest.importorskip("torchdata.stateful_dataloader")
        sampler = RandomSampler(data) if kind == "torchdata, torch's sampler" else None
        return stateful.StatefulDataLoader(data, 2, shuffle=sampler is None, sampler=sampler)
    accelerate = pytest.importorskip("accelerate")
    settings = accelerate.utils.DataLoaderConfiguration(
        use_stateful_dataloader=True, use_seedable_sampler=kind == "accelerate, with a seed"
    )
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=settings)
    return accelerator.prepare(torch.utils.data.DataLoader(data, 2, shuffle=True))


@pytest.mark.parametrize("kind", ["torchdata, torch's sampler", "accelerate"])
def test_a_shuffled_loader_that_would_draw_another_order_is_refused(kind: str) -> None:
    with pytest.raises(TypeError, match="data is a loader whose RandomSampler draws another"):
        TrainingState(nn.Linear(2, 2), per_rank={"data": shuffled_by(kind)})


def test_accelerates_parts_are_what_they_wrap(tmp_path: Path) -> None:
    """Its optimizer may leave out steps, and its loader has the methods of a state without one."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader([1, 2])
    model, wrapped, prepared = accelerator.prepare(model, optimizer, loader)
    assert TrainingState(model, wrapped).optimizers == [optimizer]
    with pytest.raises(TypeError, match="data is a DataLoader that does not know where it is"):
        TrainingState(model, per_rank={"data": prepared})


def sources() -> dict[str, object]:
    return {
        "torch": torch.Generator().manual_seed(1),
        "python": random.Random(1),
        "numpy": numpy.random.default_rng(1),
        "old": numpy.random.RandomState(1),
    }


def drawn(own: dict) -> list:
    first = torch.rand(2, generator=own["torch"]).tolist()
    return [*first, own["python"].random(), own["numpy"].random(), own["old"].rand()]


def test_a_generator_of_the_jobs_own_goes_on_where_it_was(tmp_path: Path) -> None:
    own = sources()
    drawn(own)
    dcp.save({"app": TrainingState(nn.Linear(2, 2), per_rank=own)}, checkpoint_id=tmp_path)
    wanted = drawn(own)
    other = sources()
    load({"app": TrainingState(nn.Linear(2, 2), per_rank=other)}, tmp_path)
    assert drawn(other) == wanted


def test_an_object_in_a_dict_of_values_is_refused_since_a_load_would_replace_it() -> None:
    """What draws from it, or steps it, would hold the one that is not loaded."""
    model = nn.Linear(2, 2)
    for name, item in sources().items():
        with pytest.raises(TypeError, match=rf"own\['{name}'\]\[0\] is a .*by a name of its own"):
            TrainingState(model, per_rank={"own": {name: [item]}})
    progress: dict = {"epoch": 0}
    state = TrainingState(model, progress=progress)
    progress["model"] = nn.Linear(1, 1)
    with pytest.raises(TypeError, match=r"progress\['model'\] is a Linear"):
        state.state_dict()


class Averaging(torch.optim.SGD):
    """As ``PostLocalSGDOptimizer``, whose averager counts beside PyTorch's state."""

    def state_dict(self) -> dict:
        return {**super().state_dict(), "count": 7}


class Counting(torch.optim.SGD):
    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.state["all"] = {"count": torch.zeros(())}


class Naming(torch.optim.SGD):
    def step(self, closure: Callable | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["phase"] = "warm"
        super().step(closure)


def test_an_optimizer_with_state_that_no_checkpoint_would_have_is_refused() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(TypeError, match="Averaging has count besides state and param_groups"):
        TrainingState(model, Averaging(model.parameters(), 0.1))
    hooked = torch.optim.SGD(model.parameters(), 0.1)
    hooked.register_state_dict_post_hook(lambda own, state: {**state, "count": 7})
    with pytest.raises(TypeError, match="SGD has count besides state and param_groups"):
        TrainingState(model, hooked)
    state = TrainingState(model, Counting(model.parameters(), 0.1))
    with pytest.raises(ValueError, match="Counting keeps state under 'all'"):
        state.state_dict()


def test_a_parameter_that_is_trained_and_not_of_the_model_is_named() -> None:
    model, criterion = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], momentum=0.9)
    criterion(model(torch.ones(2, 4))).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"shape \[1, 4\].*nn.ModuleList\(\[model, criterion\]\)"):
        TrainingState(model, optimizer).state_dict()


def test_a_word_in_the_state_of_an_optimizer_is_loaded_as_it_was(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    app = trained(model, Naming(model.parameters(), 0.1))
    dcp.save({"app": app}, checkpoint_id=tmp_path)
    other = nn.Linear(4, 4)
    fresh = trained(other, Naming(other.parameters(), 0.1))
    load({"app": fresh}, tmp_path)
    assert fresh.optimizers[0].state[other.weight]["phase"] == "warm"


def test_a_model_whose_parts_are_in_ddp_resumes(tmp_path: Path) -> None:
    """As of a GAN: each of its two networks is wrapped by itself. Names are as without DDP."""

    def job() -> TrainingState:
        parts = {"made": nn.Linear(4, 4), "judged": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))}
        ddp = nn.parallel.DistributedDataParallel
        model = nn.ModuleDict({name: ddp(part) for name, part in parts.items()})
        optimizer = torch.optim.AdamW(model.parameters())
        model["judged"](model["made"](torch.ones(2, 4))).sum().backward()
        optimizer.step()
        return TrainingState(model, optimizer)

    saved, other = job(), job()
    dcp.save({"app": saved}, checkpoint_id=tmp_path)
    assert "judged.0.weight" in saved.state_dict()["model"]
    load({"app": other}, tmp_path)
    assert right(other) and right(saved)
    for own, wanted in zip(other.model.parameters(), saved.model.parameters(), strict=True):
        assert torch.equal(own, wanted)


def test_what_a_communication_hook_keeps_back_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    kept = powerSGD_hook.PowerSGDState(None)
    model.register_comm_hook(kept, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with CheckpointManager(tmp_path, TrainingState(model, optimizer)) as checkpoints:
        checkpoints.save(1)
    assert "PowerSGDState of DDP's communication hook is in no checkpoint" in caplog.text
