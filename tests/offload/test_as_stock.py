"""Programs that are right streamed as they are resident: the same bits, the same counts."""

import itertools
import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from overlap_recipes.offload import HostAdamW, stream_layers

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, STEPS = 8, 4
SETTINGS = {"lr": 1e-2, "eps": 1e-4}


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    linears = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    return nn.Sequential(linears[0], nn.Tanh(), linears[1], nn.Tanh(), linears[2])


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    return model(batch(step)).square().mean()


def same(ours: nn.Module, theirs: nn.Module) -> bool:
    return all(map(torch.equal, ours.parameters(), theirs.parameters()))


def trained_alike(train: Callable, make: Callable = mlp, **options) -> None:
    """``train(model, optimizer)`` gives a streamed model the weights of the resident one."""
    resident, model = make(), make()
    train(resident, torch.optim.AdamW(resident.parameters(), fused=True, **SETTINGS))
    with (
        stream_layers(model, [model[0], model[2]], "cpu") as streamed,
        HostAdamW(model.parameters(), streamed, **SETTINGS, **options) as optimizer,
    ):
        train(model, optimizer)
    assert same(model, resident)


def backward_of_all(model: nn.Module, loss: torch.Tensor) -> None:
    loss.backward(inputs=list(model.parameters()))


def backward_of_one_layer(model: nn.Module, loss: torch.Tensor) -> None:
    loss.backward(inputs=list(model[0].parameters()))


BACKWARDS = [backward_of_all, backward_of_one_layer]


@pytest.mark.parametrize("in_backward", [False, True])
def test_an_odd_number_of_elements_is_rounded_as_torch_does_it(in_backward):
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(2 * STEPS):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 13), nn.Linear(13, 3))

    trained_alike(train, make, in_backward=in_backward)


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("backward", BACKWARDS)
def test_backward_may_be_told_its_inputs(backward, in_backward):
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(STEPS):
            backward(model, loss_of(model, step))
            optimizer.step()
            optimizer.zero_grad()

    trained_alike(train, in_backward=in_backward)


def test_the_gradient_of_an_input_alone_trains_no_layer():
    model = mlp()
    with stream_layers(model, [model[0], model[2]], "cpu") as streamed:
        x = batch(0).requires_grad_()
        torch.autograd.grad(model(x).sum(), x)
        assert streamed.stores == 0 and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("max_norm", "micro_batches", "bad_step"),
    [(1e-2, 1, None), (1e-2, 2, 2), (100.0, 1, 2), (None, 2, 2)],
)
def test_a_scaler_that_steps_clips_by_the_norm_of_what_it_unscales(
    max_norm, micro_batches, bad_step
):
    scalers = []

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for step in range(STEPS):
            for micro_batch in range(micro_batches):
                loss = loss_of(model, step + 10 * micro_batch)
                if step == bad_step:
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
            if not isinstance(optimizer, HostAdamW) and max_norm:
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), max_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        scalers.append(scaler.get_scale())

    trained_alike(train, max_norm=max_norm)
    assert scalers[0] == scalers[1]


def test_a_loop_may_unscale_by_itself_where_nothing_is_clipped():
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(STEPS):
            scaler.scale(loss_of(model, step)).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1e-2)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    trained_alike(train)


def exchanged_data(model: nn.Module, step: int) -> None:
    model[4].weight.data = model[4].weight.data.clone()


def zeroed_in_other_memory(model: nn.Module, step: int) -> None:
    if step == 1:
        model[4].bias.data = torch.zeros(WIDTH)


def averaged_and_back(model: nn.Module, step: int) -> None:
    """As an evaluation of averaged weights does."""
    own = [p.data for p in model[4].parameters()]
    for p in model[4].parameters():
        p.data = p.data * 0.5
    with torch.no_grad():
        loss_of(model, step)
    for p, data in zip(model[4].parameters(), own, strict=True):
        p.data = data


@pytest.mark.parametrize("max_norm", [None, 1e-2])
@pytest.mark.parametrize("change", [exchanged_data, zeroed_in_other_memory, averaged_and_back])
def test_a_weight_on_the_device_may_get_other_memory(change, max_norm):
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(STEPS):
            loss_of(model, step).backward()
            if max_norm and not isinstance(optimizer, HostAdamW):
                clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
            change(model, step)

    trained_alike(train, max_norm=max_norm)


def test_a_weight_on_the_device_may_get_another_dtype():
    model = mlp().bfloat16()
    with (
        stream_layers(model, [model[0], model[2]], "cpu") as streamed,
        HostAdamW(model.parameters(), streamed, **SETTINGS) as optimizer,
    ):
        for step in range(STEPS):
            model[4](model[:4](batch(step).bfloat16()).to(model[4].weight.dtype)).sum().backward()
            before = model[4].weight.detach().clone()
            optimizer.step()
            assert not torch.equal(model[4].weight, before)
            master = optimizer.state[model[4].weight]["master"]
            assert torch.equal(master.to(before.dtype), model[4].weight)
            if step == 1:
                model[4].float()


class Meter:
    def __init__(self) -> None:
        self.calls = 0

    def next(self) -> float:
        self.calls += 1
        return 1 - 0.05 * self.calls


@dataclass(slots=True)
class Slots:
    calls: int = 0

    def next(self) -> float:
        self.calls += 1
        return 1 - 0.05 * self.calls


class Layer(nn.Module):
    """A layer whose result depends on how often it has run, as ``keeps`` counts it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.f = nn.Linear(WIDTH, WIDTH)
        self.g = nn.Linear(WIDTH, WIDTH)
        self.kind = kind
        self.keeps = KEPT[kind]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.g((self.f(x) * self.scale()).tanh())

    def scale(self) -> float:
        if self.kind in ("python", "numpy"):
            return self.keeps.random()
        if self.kind == "torch":
            return torch.rand((), generator=self.keeps).item()
        if self.kind == "list":
            self.keeps.append(0.9 ** len(self.keeps))
            return self.keeps[-1]
        if self.kind == "count":
            return 1 / next(self.keeps)
        if self.kind == "number":
            self.keeps *= 0.95
            return self.keeps
        return self.keeps.next()


KEPT = {
    "object": Meter,
    "slots": Slots,
    "python": lambda: random.Random(0),
    "numpy": lambda: numpy.random.default_rng(0),
    "torch": lambda: torch.Generator().manual_seed(0),
    "list": list,
    "number": lambda: 1.0,
    "count": lambda: itertools.count(1),
}


def layers_that_keep(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Layer(kind) for _ in range(3)])


@pytest.mark.parametrize("kind", KEPT)
def test_what_a_layer_keeps_changes_once_a_forward(kind):
    model = layers_that_keep(kind)
    resident = deepcopy(model)
    with stream_layers(model, list(model), "cpu"):
        for step in range(3):
            for each in (resident, model):
                each.zero_grad()
                loss_of(each, step).backward()
            for ours, theirs in zip(model.parameters(), resident.parameters(), strict=True):
                assert torch.equal(ours.grad, theirs.grad)
    assert [layer.scale() for layer in model] == [layer.scale() for layer in resident]


def test_what_layers_share_changes_once_a_forward():
    model = layers_that_keep("object")
    for layer in model:
        layer.keeps = model[0].keeps
    resident = deepcopy(model)
    with stream_layers(model, list(model), "cpu"):
        for each in (resident, model):
            loss_of(each, 0).backward()
    for ours, theirs in zip(model.parameters(), resident.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert model[0].keeps.calls == 3


class FailsOnce(nn.Linear):
    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.fails and torch.is_grad_enabled() and y.requires_grad:
            y.register_hook(lambda _: 1 / 0)
        return y


def test_after_a_layer_that_failed_in_backward_the_loop_goes_on():
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(STEPS):
            model[2].fails = step == 1
            try:
                loss_of(model, step).backward()
            except ZeroDivisionError:
                optimizer.zero_grad()
                continue
            optimizer.step()
            optimizer.zero_grad()

    def make() -> nn.Sequential:
        model = mlp()
        model[2] = FailsOnce(WIDTH, WIDTH)
        torch.manual_seed(1)
        nn.init.normal_(model[2].weight)
        nn.init.normal_(model[2].bias)
        return model

    trained_alike(train, make)
