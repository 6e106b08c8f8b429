"""A load says all that differs before it changes anything, and gives back what was saved."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.testing._internal.two_tensor import TwoTensor

from overlap_recipes.checkpoint.loading import load
from overlap_recipes.checkpoint.state import TrainingState, frozen

pytestmark = pytest.mark.usefixtures("one_rank")


class Kept:
    """An object with a state."""

    def __init__(self, state: dict) -> None:
        self.state = state

    def state_dict(self) -> dict:
        return self.state

    def load_state_dict(self, state: dict) -> None:
        self.state = state


def layers(seed: int = 0, width: int = 4) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(3, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def saved(directory: Path, model: nn.Module, **how: object) -> TrainingState:
    """A job behind a step and a save."""
    optimizer = adam(model)
    step(model, optimizer)
    job = TrainingState(model, optimizer, **how)
    dcp.save({"app": job}, checkpoint_id=directory)
    return job


def fresh(model: nn.Module, **how: object) -> TrainingState:
    return TrainingState(model, adam(model), **how)


def refusal(job: TrainingState, directory: Path, **how: object) -> list[str]:
    """The lines of the error; nothing of the job has changed."""
    before = [p.detach().clone() for p in job.model.parameters()]
    with pytest.raises(ValueError, match="does not fit this job") as raised:
        load({"app": job}, directory, **how)
    assert all(map(torch.equal, before, job.model.parameters()))
    assert not any(optimizer.state for optimizer in job.optimizers)
    return [line.strip() for line in str(raised.value).splitlines()[1:]]


def same_job(one: TrainingState, other: TrainingState) -> bool:
    if not all(map(torch.equal, one.model.parameters(), other.model.parameters())):
        return False
    for mine, others in zip(one.optimizers, other.optimizers, strict=True):
        left = [x for state in mine.state.values() for x in state.values()]
        right = [x for state in others.state.values() for x in state.values()]
        if len(left) != len(right) or not all(map(torch.equal, left, right)):
            return False
    return True


def test_all_that_differs_is_said_at_once(tmp_path: Path) -> None:
    model = layers()
    model.register_buffer("old", torch.zeros(1))
    saved(tmp_path, model, scheduler=Kept({"n": 1}))
    other = layers(width=5)
    other.register_buffer("new", torch.zeros(1))
    assert refusal(fresh(other, ema=Kept({"n": 1})), tmp_path) == [
        "0.bias: float32 [5], saved float32 [4]",
        "0.weight: float32 [5, 4], saved float32 [4, 4]",
        "2.weight: float32 [2, 5], saved float32 [2, 4]",
        "new: only in the model",
        "old: only in the checkpoint",
        "ema: only in the job",
        "scheduler: only in the checkpoint",
    ]


def test_parameters_of_other_optimizers_are_a_difference(tmp_path: Path) -> None:
    saved(tmp_path, layers())
    model = layers()
    job = TrainingState(model, torch.optim.AdamW(model[0].parameters()))
    assert "2.weight: only in the checkpoint's optimizers" in refusal(job, tmp_path)


def test_other_groups_are_a_difference(tmp_path: Path) -> None:
    saved(tmp_path, layers())
    model = layers()
    grouped = [{"params": [*model[0].parameters()]}, {"params": [*model[2].parameters()]}]
    lines = refusal(TrainingState(model, torch.optim.AdamW(grouped)), tmp_path)
    assert lines[0].startswith("the group of 0.bias: load into the groups of the save")


def test_a_part_stays_as_it_is_if_it_is_named(tmp_path: Path) -> None:
    job = saved(tmp_path, layers())
    model = layers(1, width=4)
    model[2] = nn.Linear(4, 7)
    head = model[2].weight.detach().clone()
    other = fresh(model)
    load({"app": other}, tmp_path, skip=["2"])
    assert torch.equal(model[0].weight, job.model[0].weight)
    assert torch.equal(model[2].weight, head)
    assert len(other.optimizers[0].state) == 2


def test_a_name_that_is_nowhere_is_told(tmp_path: Path) -> None:
    saved(tmp_path, layers())
    lines = refusal(fresh(layers()), tmp_path, skip=["haed"])
    assert lines == ["haed: to be skipped, but neither the job nor the checkpoint has it"]


def test_a_load_lets_no_optimizer_step(tmp_path: Path) -> None:
    job = saved(tmp_path, layers())
    other = fresh(layers(1))
    other.optimizers[0].register_step_pre_hook(lambda *_: pytest.fail("it has stepped"))
    load({"app": other}, tmp_path)
    assert same_job(job, other)


def test_types_of_moments_are_those_of_the_save(tmp_path: Path) -> None:
    """Torch casts them to the type of their parameter."""
    model = layers().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["master"] = torch.full(parameter.shape, 1 / 3)
        optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
    dcp.save({"app": TrainingState(model, optimizer)}, checkpoint_id=tmp_path)
    other = layers(1).bfloat16()
    its = TrainingState(other, torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9))
    load({"app": its}, tmp_path)
    found = its.optimizers[0].state[other[0].weight]
    assert found["master"].dtype == torch.float32
    assert torch.equal(found["master"], torch.full((4, 4), 1 / 3))


def made_of_two(seed: int) -> tuple[nn.Linear, torch.optim.SGD]:
    """Its weight is two tensors, and so is the momentum behind a step."""
    torch.manual_seed(seed)
    model = nn.Linear(4, 2, bias=False)
    model.weight = nn.Parameter(TwoTensor(torch.randn(2, 4), torch.randn(2, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(2):
        model(torch.full((3, 4), 1.0 + seed + number)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_weights_and_moments_that_are_made_of_tensors_come_back_as_one(tmp_path: Path) -> None:
    model, optimizer = made_of_two(0)
    dcp.save({"app": TrainingState(model, optimizer)}, checkpoint_id=tmp_path)
    other, others = made_of_two(1)
    load({"app": TrainingState(other, others)}, tmp_path)
    momentum = optimizer.state[model.weight]["momentum_buffer"]
    found = others.state[other.weight]["momentum_buffer"]
    for expected, here in ((model.weight, other.weight), (momentum, found)):
        assert isinstance(here, TwoTensor)
        assert torch.equal(expected.a, here.a) and torch.equal(expected.b, here.b)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("wrapped", ["a layer", "the model"])
def test_flat_parameters_are_refused_before_a_save_that_no_job_could_load(wrapped: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    flat_ones = FullyShardedDataParallel(model[0], device_id=torch.device("cpu"))
    if wrapped == "a layer":
        model[0] = flat_ones
    else:
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    with pytest.raises(TypeError, match="FullyShardedDataParallel.*use_orig_params=True"):
        TrainingState(model, adam(model))


def test_lists_and_dicts_come_back_though_they_are_empty_here(tmp_path: Path) -> None:
    state = {"history": [torch.ones(2), torch.zeros(3)], "seen": {}}
    state["by"] = {7: {"a": torch.ones(1)}}
    saved(tmp_path, layers(), ema=Kept(state))
    its = Kept({"history": [], "seen": {"not": 1}, "by": {}})
    load({"app": fresh(layers(), ema=its)}, tmp_path)
    assert its.state.keys() == state.keys()
    assert all(map(torch.equal, its.state["history"], state["history"]))
    assert its.state["seen"] == {}
    assert torch.equal(its.state["by"][7]["a"], torch.ones(1))


def test_keys_that_a_checkpoint_cannot_keep_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"not \(1, 2\) \(in ema\)"):
        saved(tmp_path, layers(), ema=Kept({(1, 2): 3}))


def test_random_numbers_go_on(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")

    def drawn() -> tuple:
        return random.random(), numpy.random.rand(), torch.rand(1).item()

    saved(tmp_path, layers())
    expected = drawn()
    drawn()
    load({"app": fresh(layers())}, tmp_path)
    # ``layers`` seeds torch before the load
    assert drawn() == expected


class Resharding(Kept):
    def load_state_dicts(self, states: list[dict]) -> None:
        self.state = {"of": states}


def saved_on_two_ranks(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of two ranks of one replicated model."""
    from overlap_recipes.checkpoint.state import state, trees

    monkeypatch.setattr(state, "world_size", lambda: 2)
    model = layers()
    job = TrainingState(model, adam(model), per_rank={"data": Kept({"at": 0})})
    tree = job.state_dict()
    of_first = tree["per_rank"]["0"]
    tree["per_rank"]["1"] = {"random": of_first["random"], "data": trees.packed({"at": 1})}
    dcp.save({"app": tree}, checkpoint_id=directory)
    monkeypatch.undo()


def test_another_number_of_ranks_is_refused_unless_a_loader_reshards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_on_two_ranks(tmp_path, monkeypatch)
    job = fresh(layers(), per_rank={"data": Kept({})})
    lines = refusal(job, tmp_path)
    assert lines[0].startswith("data: saved on 2 ranks, here are 1: it needs a method")
    its = Resharding({})
    load({"app": fresh(layers(), per_rank={"data": its})}, tmp_path)
    assert its.state == {"of": [{"at": 0}, {"at": 1}]}
    skipping = fresh(layers(), per_rank={"data": Kept({"own": 1})})
    load({"app": skipping}, tmp_path, skip=["data"])
    assert skipping.per_rank["data"].state == {"own": 1}


class Counting(torch.optim.SGD):
    """Counts its steps in its group, and has an empty state before the first, as schedule-free."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.1)
        self.param_groups[0]["k"] = 0
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {}

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        group = self.param_groups[0]
        group["k"] += 1
        for parameter in group["params"]:
            if parameter.grad is not None:
                z = self.state[parameter].setdefault("z", parameter.clone())
                z.sub_(parameter.grad, alpha=group["lr"])
                parameter.lerp_(z, 1 / group["k"])


def test_a_state_of_empty_dicts_is_that_of_a_new_optimizer(tmp_path: Path) -> None:
    model = layers()
    job = TrainingState(model, Counting(model.parameters()))
    dcp.save({"app": job}, checkpoint_id=tmp_path / "step0")
    assert job.optimizers[0].param_groups[0]["k"] == 0
    step(model, job.optimizers[0])
    dcp.save({"app": job}, checkpoint_id=tmp_path / "step1")
    for how in (load, lambda state, where: dcp.load(state, checkpoint_id=where)):
        other = layers(1)
        its = TrainingState(other, Counting(other.parameters()))
        how({"app": its}, tmp_path / "step1")
        assert same_job(job, its)
        assert its.optimizers[0].param_groups[0]["k"] == 1
        how({"app": its}, tmp_path / "step0")
        assert its.optimizers[0].param_groups[0]["k"] == 0
        assert not any(its.optimizers[0].state.values())


def adapted(seed: int, device: str = "cpu") -> nn.Sequential:
    """A frozen layer with a frozen buffer, and a trained one."""
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Tanh())
        model.register_buffer("scale", torch.full((1,), float(seed)))
    torch.manual_seed(seed)
    model.append(nn.Linear(4, 2))
    return model


def test_a_frozen_base_is_left_out_and_compared(tmp_path: Path) -> None:
    job = saved(tmp_path, adapted(1), trainable_only=True)
    names = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert {name for name in names if name.startswith("app.model")} == {
        "app.model.scale",
        "app.model.2.weight",
        "app.model.2.bias",
    }
    for how in (load, lambda state, where: dcp.load(state, checkpoint_id=where)):
        other = fresh(adapted(2), trainable_only=True)
        how({"app": other}, tmp_path)
        assert same_job(job, other)
        assert torch.equal(other.model.scale, job.model.scale)
    whole = fresh(adapted(3))
    load({"app": whole}, tmp_path)
    assert same_job(job, whole)


def test_another_base_is_told(tmp_path: Path) -> None:
    saved(tmp_path, adapted(1), trainable_only=True)
    told = "0.weight: frozen, left out of the checkpoint, and of other values than at the save"
    model = adapted(2)
    model[0].weight[[0, 1]] = model[0].weight[[1, 0]]
    assert refusal(fresh(model, trainable_only=True), tmp_path) == [told]
    with pytest.raises(ValueError, match="of other values"):
        dcp.load({"app": fresh(model, trainable_only=True)}, checkpoint_id=tmp_path)
    renamed = nn.Sequential(nn.Identity(), nn.Tanh(), adapted(2)[2])
    renamed.base = adapted(2)[0]
    renamed.register_buffer("scale", torch.zeros(1))
    assert refusal(fresh(renamed, trainable_only=True), tmp_path) == [
        "0.bias: only in the checkpoint",
        "0.weight: only in the checkpoint",
        "base.bias: only in the model",
        "base.weight: only in the model",
    ]


def test_a_base_that_lies_on_meta_is_told(tmp_path: Path) -> None:
    saved(tmp_path, adapted(1), trainable_only=True)
    model = adapted(2)
    model[0] = nn.Linear(4, 4, device="meta").requires_grad_(False)
    job = fresh(model, trainable_only=True)
    with pytest.raises(ValueError, match="0.weight is frozen and still lies on meta"):
        load({"app": job}, tmp_path)
    with pytest.raises(ValueError, match="0.weight is frozen and still lies on meta"):
        job.state_dict()


def test_an_optimizer_of_parameters_that_were_replaced_is_told_in_words(tmp_path: Path) -> None:
    job = saved(tmp_path, adapted(1))
    job.model[2].bias = nn.Parameter(torch.zeros(2))
    for call in (job.state_dict, lambda: load({"app": job}, tmp_path)):
        with pytest.raises(ValueError, match=r"a parameter of shape \[2\] that the model does not"):
            call()


def test_a_frozen_parameter_that_changes_is_told_without_the_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have changed on one rank alone: a collective would wait for those that do not come."""
    job = saved(tmp_path, adapted(1), trainable_only=True)
    first = job.left_out.digests
    with monkeypatch.context() as patch:
        patch.setattr(frozen, "digests_of_ranks", None)
        job.state_dict()
        job.model[0].weight.mul_(1)
        job.model[0].bias.data = job.model[0].bias.data.clone()
        job.state_dict()
        assert job.left_out.digests == first
        job.model[0].weight.add_(1)
        with pytest.raises(ValueError, match="^0.weight: frozen, left out of checkpoints, and ch"):
            job.state_dict()
    job.model[0].weight.requires_grad_()
    job.state_dict()
    assert job.left_out.digests == {"0.bias": first["0.bias"]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex64])
def test_a_digest_does_not_depend_on_how_ranks_share_a_tensor(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen, "_BLOCK", 8)
    whole = (100 * torch.randn(7, 5, 3)).to(dtype)
    total = frozen.sum_at(whole, (0, 0, 0))
    rows = frozen.sum_at(whole[:3], (0, 0, 0)) + frozen.sum_at(whole[3:], (3, 0, 0))
    columns = frozen.sum_at(whole[:, :1], (0, 0, 0)) + frozen.sum_at(whole[:, 1:], (0, 1, 0))
    assert rows % frozen._MODULUS == columns % frozen._MODULUS == total
    swapped = whole.clone()
    swapped[[0, 1]] = whole[[1, 0]]
    assert frozen.sum_at(swapped, (0, 0, 0)) != total
