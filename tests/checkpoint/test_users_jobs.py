"""Jobs as users have them: what a resume would get wrong comes back right, or is told in words."""

import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.optim import lr_scheduler
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset

from overlap_recipes.checkpoint import CheckpointManager, TrainingState

DATA = torch.arange(22.0)[:, None].expand(22, 4)  # six batches of four, the last of two


def step(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 8)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def save_and_resume(root: Path, saved: TrainingState, resumed: TrainingState, **how) -> int:
    with CheckpointManager(root, saved, grace_s=None) as own:
        own.save(1).result()
    with CheckpointManager(root, resumed, grace_s=None) as own:
        return own.resume(**how)


# -- trainable_only ---------------------------------------------------------------------------


def base_and_head(frozen: bool) -> nn.Sequential:
    torch.manual_seed(0)  # the base, the same in each job
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    model[0].requires_grad_(not frozen)
    return model


def stage(root: Path, frozen: bool, steps: int, frozen_before_save: bool = False) -> nn.Module:
    model = base_and_head(frozen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # without state
    state = TrainingState(model, optimizer, trainable_only=True)
    with CheckpointManager(root, state, keep_last=1, grace_s=None) as own:
        done = own.resume()
        for number in range(done + 1, done + steps + 1):
            step(model, optimizer)
            if frozen_before_save and number == done + steps:
                model[0].requires_grad_(False)
            own.save(number).result()
    return model


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"frozen": False}, {"frozen": True}),
        ({"frozen": False, "frozen_before_save": True}, {"frozen": False}),
    ],
    ids=["in a resumed job", "in mid-run, and trained again"],
)
def test_what_a_checkpoint_has_had_is_in_all_that_follow(tmp_path: Path, first, second) -> None:
    stage(tmp_path, steps=3, **first)
    before = stage(tmp_path, steps=2, **second)
    after = stage(tmp_path, frozen=second["frozen"], steps=0)
    assert torch.equal(after[0].weight, before[0].weight)
    assert not torch.equal(after[0].weight, base_and_head(False)[0].weight)


def test_an_average_in_the_model_is_refused_at_the_first_save(tmp_path: Path) -> None:
    model = base_and_head(True)
    optimizer = torch.optim.AdamW(model[1].parameters())
    state = TrainingState(model, optimizer, trainable_only=True)
    with CheckpointManager(tmp_path, state, grace_s=None) as own:
        for _ in range(3):  # at the second step, memory is prepared and digests are made
            step(model, optimizer)
            with torch.no_grad():
                model[0].weight.lerp_(torch.ones(8, 8), 0.1)
        with pytest.raises(RuntimeError, match="0.weight: frozen.* an average goes outside"):
            own.save(3).result()
        model[0].weight.requires_grad_()
        own.save(4)


@pytest.mark.parametrize("trainable_only", [True, False])
@pytest.mark.parametrize("then", [True, False])
def test_parameters_that_train_here_and_did_not_are_named_and_the_other_way_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, then: bool, trainable_only: bool
) -> None:
    states = []
    for frozen in (not then, then):
        model = base_and_head(frozen)
        optimizer = torch.optim.SGD(model.parameters())
        states.append(TrainingState(model, optimizer, trainable_only=trainable_only))
    save_and_resume(tmp_path, *states)
    where = "frozen here, and trained" if then else "trained here, and frozen"
    assert f"{where} at the save: 0.bias, 0.weight" in caplog.text


# -- loaders ----------------------------------------------------------------------------------

stateful = pytest.importorskip("torchdata.stateful_dataloader")


def loader(data: object = DATA, **settings: object):
    return stateful.StatefulDataLoader(data, 4, **settings)


def prepared(**settings: object):
    accelerate = pytest.importorskip("accelerate")
    utils = pytest.importorskip("accelerate.utils")
    how = {"use_stateful_dataloader": True, "use_seedable_sampler": True, "data_seed": 3}
    config = utils.DataLoaderConfiguration(**how)
    plain = torch.utils.data.DataLoader(DATA, 4, shuffle=True, **settings)
    return accelerate.Accelerator(cpu=True, dataloader_config=config).prepare(plain)


class Order:
    """Draws its order when its first number is asked for."""

    def __init__(self, draw: Callable[[], list[int]]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return len(DATA)

    def __iter__(self) -> Iterator[int]:
        yield from self.draw()


def of_python() -> list[int]:
    return random.sample(range(len(DATA)), len(DATA))


def in_batches(**settings: object):
    order = BatchSampler(Order(of_python), 4, False)
    return stateful.StatefulDataLoader(DATA, batch_sampler=order, **settings)


PERSISTENT = {"num_workers": 1, "persistent_workers": True}
IN_LATER_PASSES = {
    "order of Python, workers persist": lambda: loader(sampler=Order(of_python), **PERSISTENT),
    "batches, workers persist": lambda: in_batches(**PERSISTENT),
    "accelerate's": prepared,
    "accelerate's, with workers": lambda: prepared(num_workers=1),
}


def batches(
    root: Path, make: Callable, steps: int, save_at: int, seed: int, unused: bool = False
) -> list:
    torch.manual_seed(seed)
    random.seed(seed)
    data = make()
    seen = []
    state = TrainingState(nn.Linear(1, 1), per_rank={"data": data})
    with CheckpointManager(root, state, grace_s=None) as own:
        done = own.resume()
        if unused:  # as Lightning makes one of which it takes no batch
            iter(data)
        while done < steps:
            for batch in data:
                seen.append(batch[:, 0].tolist())
                done += 1
                if done == save_at:
                    own.save(done)
                if done == steps:
                    break
    getattr(data, "base_dataloader", data)._iterator = None  # its workers end
    return seen


@pytest.mark.parametrize("kind", IN_LATER_PASSES)
@pytest.mark.parametrize("save_at", [8, 12])  # in the second pass, at its end
def test_a_job_that_resumes_in_a_later_pass_has_its_order(
    tmp_path: Path, kind: str, save_at: int
) -> None:
    make = IN_LATER_PASSES[kind]
    whole = batches(tmp_path / "whole", make, 20, save_at, seed=0)
    batches(tmp_path / "parted", make, save_at, save_at, seed=0)
    assert batches(tmp_path / "parted", make, 20, 0, seed=1) == whole[save_at:]


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1}, PERSISTENT])
@pytest.mark.parametrize("save_at", [8, 12])
def test_an_iterator_of_which_no_batch_is_taken_changes_nothing(
    tmp_path: Path, save_at: int, workers: dict
) -> None:
    def make() -> object:
        return loader(shuffle=True, **workers)

    whole = batches(tmp_path / "whole", make, 20, save_at, seed=0)
    batches(tmp_path / "parted", make, save_at, save_at, seed=0)
    assert batches(tmp_path / "parted", make, 20, 0, seed=1, unused=True) == whole[save_at:]


@pytest.mark.parametrize("save_at", [8, 12])
@pytest.mark.parametrize("ahead", [-1, 0, 1])
def test_an_epoch_that_the_loop_sets_for_accelerate_is_that_of_the_save(
    tmp_path: Path, save_at: int, ahead: int
) -> None:
    """As transformers' ``Trainer`` does, which counts from 0 where another resumes for it."""
    per_pass = 6
    batches(tmp_path, prepared, save_at, save_at, seed=0)
    data = prepared()
    state = TrainingState(nn.Linear(1, 1), per_rank={"data": data})
    with CheckpointManager(tmp_path, state, grace_s=None) as own:
        data.set_epoch(own.resume() // per_pass + ahead)
        if ahead == 0 or (ahead > 0 and save_at % per_pass == 0):  # a pass may be left out
            assert len(list(data)) == per_pass - save_at % per_pass
        else:
            with pytest.raises(ValueError, match="the loop has set epoch"):
                next(iter(data))


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_an_epoch_that_is_set_back_when_the_pass_has_begun_is_refused(
    tmp_path: Path, epoch: int
) -> None:
    """Lightning makes the iterator, then sets the epoch, and counts from 0 after a load."""
    for resumes in (False, True):
        sampler = DistributedSampler(DATA, 1, 0)
        data = loader(sampler=sampler)
        state = TrainingState(nn.Linear(1, 1), per_rank={"data": data})
        with CheckpointManager(tmp_path, state, grace_s=None) as own:
            if own.resume() == 0:
                sampler.set_epoch(1)
            batches_of_pass = iter(data)
            if not resumes:
                next(batches_of_pass)
                own.save(1)
                continue
            sampler.set_epoch(epoch)
            if epoch > 0:
                next(batches_of_pass)
                continue
            with pytest.raises(ValueError, match="epoch of DistributedSampler is 0, and was 1"):
                next(batches_of_pass)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from random.sample(list(DATA), len(DATA))


def test_a_stream_whose_workers_persist_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    for settings in ({}, {"num_workers": 1}, PERSISTENT):
        caplog.clear()
        TrainingState(nn.Linear(1, 1), per_rank={"data": loader(Stream(), **settings)})
        assert ("set persistent_workers=False" in caplog.text) == (settings is PERSISTENT)


@pytest.mark.parametrize("gives", ["another", "its own", "its own, begun before"])
def test_a_loader_of_which_the_loop_takes_no_batch_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, gives: str
) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    data = loader()
    taken = iter(data) if gives == "its own, begun before" else None
    state = TrainingState(model, optimizer, per_rank={"data": data})
    if taken is None:
        taken = iter(loader() if gives == "another" else data)
    with CheckpointManager(tmp_path, state, grace_s=None) as own:
        own.save(0)  # before the first step nothing is amiss
        assert "taken no batch" not in caplog.text
        model(next(taken)).sum().backward()
        optimizer.step()
        own.save(1)
        own.save(2)
    assert caplog.text.count("taken no batch") == (gives == "another")


# -- who steps --------------------------------------------------------------------------------


class Mine(torch.optim.AdamW):
    """A user's own of an optimizer of torch."""


@pytest.mark.parametrize(
    ("saved", "here", "told"),
    [
        ("Adam", "RAdam", "saved with Adam, here is RAdam"),
        ("AdamW", "Adam", "saved with AdamW, here is Adam"),
        ("Adam", "Adamax", "saved with Adam, here is Adamax"),
        ("ASGD", "Rprop", "another kind of optimizer"),
        ("Mine", "Adam", "saved with AdamW, here is Adam"),
        ("Mine", "AdamW", None),
        ("AdamW", "Mine", None),
    ],
)
def test_moments_of_another_kind_of_optimizer_are_refused(
    tmp_path: Path, saved: str, here: str, told: str | None
) -> None:
    states = []
    for kind in (saved, here):
        model = nn.Sequential(nn.Linear(8, 4))
        optimizer = Mine if kind == "Mine" else getattr(torch.optim, kind)
        made = optimizer(model.parameters(), lr=0.1)
        step(model, made)
        states.append(TrainingState(model, made))
    if told is None:
        assert save_and_resume(tmp_path, *states) == 1
        return
    before = states[1].model[0].weight.clone()
    with pytest.raises(ValueError, match=told):
        save_and_resume(tmp_path, *states)
    assert torch.equal(states[1].model[0].weight, before)


def in_sequence(*kinds: type) -> Callable:
    def make(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        inner = [kind(optimizer, 3) for kind in kinds]
        return lr_scheduler.SequentialLR(optimizer, inner, list(range(5, 4 + len(inner))))

    return make


def exponential(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.ExponentialLR(optimizer, 0.9)


def steps_of(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.StepLR(optimizer, 3)


def cosine(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.CosineAnnealingLR(optimizer, 7)


@pytest.mark.parametrize(
    ("saved", "here"),
    [
        (lambda o: [exponential(o)] * 2, lambda o: [exponential(o)] * 3),
        (cosine, steps_of),
        (
            in_sequence(lr_scheduler.StepLR, lr_scheduler.CosineAnnealingLR),
            in_sequence(lr_scheduler.StepLR, lr_scheduler.StepLR),
        ),
        (lambda o: [cosine(o), steps_of(o)], lambda o: [steps_of(o), cosine(o)]),
    ],
    ids=["2 for 3", "cosine", "in a sequence", "in another order"],
)
def test_schedules_of_another_kind_are_refused_before_anything_changes(
    tmp_path: Path, saved: Callable, here: Callable
) -> None:
    states = []
    for make in (saved, here):
        model = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        states.append(TrainingState(model, optimizer, scheduler=make(optimizer)))
    before = states[1].model.weight.clone()
    with pytest.raises(ValueError, match="scheduler: here is .*, saved "):
        save_and_resume(tmp_path, *states)
    assert torch.equal(states[1].model.weight, before)


@pytest.mark.parametrize(
    "what", ["never given", "replaced", "of another model", "inside", "of this rank"]
)
def test_an_optimizer_that_steps_the_model_and_was_not_given_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.Adam(model[1].parameters())
    if what == "of another model":
        other = torch.optim.Adam(nn.Linear(8, 4).parameters())
    if what == "inside":
        other.state = given.state
    stepping = [other] if what == "replaced" else [given, other]
    of_rank = {"own": other} if what == "of this rank" else {}
    state = TrainingState(model, given, per_rank=of_rank)
    with CheckpointManager(tmp_path, state, grace_s=None) as own:
        for number in range(1, 4):
            step(model, *stepping)
            own.save(number)
    told = caplog.text.count("Adam steps parameters of the model and is in no checkpoint")
    assert told == (what in ("never given", "replaced"))


# -- weights ----------------------------------------------------------------------------------


def by_places(value: float) -> torch.Tensor:
    return torch.sparse_coo_tensor([[0, 1], [1, 2]], [value, value], (4, 4))


def of_other_length(value: float) -> torch.Tensor:
    count = int(value)
    places = [list(range(count)), list(range(count))]
    return torch.sparse_coo_tensor(places, [value] * count, (9, 9))


SPARSE = {
    "COO": by_places,
    "COO of another length": of_other_length,
    "CSR": lambda value: by_places(value).to_sparse_csr(),
}


@pytest.mark.filterwarnings("ignore:Sparse CS")
@pytest.mark.parametrize("kind", SPARSE)
def test_a_sparse_buffer_comes_back(tmp_path: Path, kind: str) -> None:
    states = []
    for value in (2.0, 9.0):
        model = nn.Sequential(nn.Linear(8, 4))
        model.register_buffer("graph", SPARSE[kind](value))
        optimizer = torch.optim.AdamW(model.parameters())
        step(model, optimizer)
        states.append(TrainingState(model, optimizer, scheduler=cosine(optimizer)))
    assert save_and_resume(tmp_path, *states) == 1
    assert torch.equal(states[1].model.graph.to_dense(), SPARSE[kind](2.0).to_dense())
    assert torch.equal(states[1].model[0].weight, states[0].model[0].weight)


class Tied(nn.Module):
    def __init__(self, is_tied: bool, trains: bool) -> None:
        super().__init__()
        self.embedding = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 8, bias=False)
        self.inner = nn.Linear(8, 8)
        if is_tied:
            self.head.weight = self.embedding.weight
        if not trains:
            self.embedding.requires_grad_(False)
            self.head.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embedding(x)))


@pytest.mark.parametrize("trainable_only", [True, False])
@pytest.mark.parametrize("trains", [True, False])
def test_two_weights_are_not_loaded_into_one(
    tmp_path: Path, trains: bool, trainable_only: bool
) -> None:
    states = []
    for is_tied in (False, True):
        model = Tied(is_tied, trains)
        optimizer = torch.optim.SGD(p for p in model.parameters() if p.requires_grad)
        states.append(TrainingState(model, optimizer, trainable_only=trainable_only))
    with pytest.raises(ValueError, match="head.weight"):
        save_and_resume(tmp_path, *states)


def test_what_no_load_could_fill_is_not_saved(tmp_path: Path, one_rank: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    whole = torch.ones(4, 3)
    for bad, told in (
        (whole[:, :1].expand(4, 3), r"b has elements that share memory.*clone\(\)"),
        (whole[:1].expand(4, 3), r"b has elements that share memory.*clone\(\)"),
        (DTensor.from_local(whole, mesh, [Partial()]), "b is a DTensor with Partial"),
    ):
        state = TrainingState(nn.Linear(2, 2))
        state.model.register_buffer("b", bad)
        with (
            CheckpointManager(tmp_path, state, grace_s=None) as own,
            pytest.raises(RuntimeError, match=told),
        ):
            own.save(0)
    for number, good in enumerate((whole[:1, :1].expand(1, -1), whole.t(), whole[:0].expand(0, 3))):
        state.model.b = good
        assert save_and_resume(tmp_path / str(number), state, state) == 1


def adapted(root: Path, steps: int, save_at: int, given: bool) -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    how = {"init_r": 6, "target_r": 2, "tinit": 2, "tfinal": 2, "deltaT": 2, "total_step": 14}
    config = peft.AdaLoraConfig(target_modules=["0", "1"], **how)
    model = peft.get_peft_model(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    ranks = model.base_model.rankallocator
    names = ("ipt", "exp_avg_ipt", "exp_avg_unc") if given else ()
    shared = {name: getattr(ranks, name) for name in names}
    state = TrainingState(model, optimizer, trainable_only=True, **shared)
    with CheckpointManager(root, state, grace_s=None) as own:
        for number in range(own.resume() + 1, steps + 1):
            x = torch.randn(8, 8, generator=torch.Generator().manual_seed(number))
            model(x).square().mean().backward()
            optimizer.step()
            model.base_model.update_and_allocate(number)
            optimizer.zero_grad()
            if number == save_at:
                own.save(number)
    return model


@pytest.mark.parametrize("given", [True, False])
def test_what_adalora_ranks_its_adapters_by_is_resumed_or_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, given: bool
) -> None:
    adapted(tmp_path / "parted", 3, 3, given)
    assert ("what AdaLoRA ranks its adapters by" in caplog.text) != given
    if given:
        resumed = adapted(tmp_path / "parted", 12, 0, given).parameters()
        whole = adapted(tmp_path / "whole", 12, 0, given).parameters()
        assert all(map(torch.equal, resumed, whole))


class Grows(nn.Linear):
    """With an extra state that is empty when the model is made."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.seen = {}

    def get_extra_state(self) -> dict:
        return self.seen

    def set_extra_state(self, state: dict) -> None:
        self.seen = state


def test_an_extra_state_that_was_empty_at_first_is_resumed(tmp_path: Path) -> None:
    saved, resumed = Grows(), Grows()
    saved.seen = {"count": 3, "of": torch.ones(2)}
    assert save_and_resume(tmp_path, TrainingState(saved), TrainingState(resumed)) == 1
    assert resumed.seen["count"] == 3 and torch.equal(resumed.seen["of"], torch.ones(2))


@pytest.mark.parametrize("on_meta", ["all", "a layer", "a buffer"])
def test_a_model_without_memory_is_not_resumed(tmp_path: Path, on_meta: str) -> None:
    saved = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    here = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    if on_meta == "all":
        here.to("meta")
    elif on_meta == "a layer":
        here[0].to("meta")
    else:
        here[1].running_mean = here[1].running_mean.to("meta")
    with pytest.raises(ValueError, match="lies on meta: give it memory first"):
        save_and_resume(tmp_path, TrainingState(saved), TrainingState(here))


class WithLoss(nn.Module):
    """A network of a perceptual loss, which its state leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)
        self.judge = nn.Linear(8, 4).requires_grad_(False)

    def state_dict(self, *args: object, **how: object) -> dict:
        found = super().state_dict(*args, **how)
        for name in [name for name in found if "judge." in name]:
            del found[name]
        return found


@pytest.mark.parametrize("wrap", [lambda model: model, nn.Sequential, torch.compile])
def test_what_the_models_own_state_leaves_out_stays_as_it_is(
    tmp_path: Path, wrap: Callable
) -> None:
    models = [wrap(WithLoss()), wrap(WithLoss())]
    inner = [next(m for m in each.modules() if isinstance(m, WithLoss)) for each in models]
    judge = inner[1].judge.weight.clone()
    states = [TrainingState(each) for each in models]
    assert save_and_resume(tmp_path, *states) == 1
    assert torch.equal(inner[1].inner.weight, inner[0].inner.weight)
    assert torch.equal(inner[1].judge.weight, judge)


@pytest.fixture(autouse=True)
def warnings_of_the_library(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="overlap_recipes")
