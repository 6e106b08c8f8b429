"""``check_first_step`` finds what streaming computes otherwise, and leaves everything as it was."""

import random
from contextlib import contextmanager
from copy import deepcopy

import numpy
import pytest
import torch
import torch.distributed as dist
from host_training import CPU, RATE, same
from torch import nn

from overlap_recipes import ranks
from overlap_recipes.offload import (
    HostAdamW,
    check_first_step,
    first_step,
    resident_bytes,
    stream_layers,
)
from overlap_recipes.offload.streamed_model import StreamedModel

pytestmark = pytest.mark.usefixtures("one_thread")


class Counting(nn.Linear):
    """A layer with dropout, and a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.2)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Counting(8) for _ in range(4))
        self.head = nn.Linear(8, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        x = x + random.random() + numpy.random.rand()
        self.seen += 1
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(3, 8)).square().mean()


def check(streamed: StreamedModel) -> None:
    check_first_step(streamed, lambda: loss_of(streamed.model))


@contextmanager
def no_room(streamed: StreamedModel):
    raise torch.OutOfMemoryError("CUDA out of memory")
    yield


@pytest.fixture(params=["whole", "layer_after_layer"])
def way(request, monkeypatch) -> str:
    """The resident run has all layers on the device, or, where there is no room, one."""
    if request.param == "layer_after_layer":
        monkeypatch.setattr(first_step, "all_on_device", no_room)
    return request.param


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("budget_layers", [0, 2])
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_check_leaves_everything_as_it_was(in_backward, budget_layers):
    """Weights, gradients, buffers, random numbers: the training behind it has the same bits."""
    models = [Stack(), Stack()]
    for model, checks in zip(models, (True, False), strict=True):
        budget = budget_layers * resident_bytes(model.layers[0])
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)
        with (
            stream_layers(model, model.layers, CPU, budget=budget) as streamed,
            HostAdamW(model.parameters(), streamed, lr=RATE, in_backward=in_backward) as optimizer,
        ):
            if checks:
                state = deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
                check(streamed)
                assert all(p.grad is None for p in model.parameters())
                assert not streamed.summed and not optimizer.norms
                after = model.state_dict(), optimizer.state_dict()["state"]
                assert str(after) == str(state)
            for _ in range(2):
                loss_of(model).backward()
                optimizer.step()
    assert same(*models) and torch.equal(models[0].seen, models[1].seen)


def with_scaled_gradients(streamed: StreamedModel) -> None:
    """Let one gradient of layer 2 be a bit larger than it is."""
    write = streamed.write

    def writes(layer: int, gradients: dict, adds: bool) -> None:
        if layer == 2:
            gradients = gradients | {"bias": gradients["bias"] * 1.0001}
        write(layer, gradients, adds)

    streamed.write = writes


def test_a_gradient_that_differs_is_named():
    model = Stack()
    with stream_layers(model, model.layers, CPU) as streamed:
        with_scaled_gradients(streamed)
        expected = r"^the gradient of layers\.2\.bias is off by up to .*: streamed, this model"
        with pytest.raises(AssertionError, match=expected):
            check(streamed)
        assert all(p.grad is None for p in model.parameters())


def test_a_buffer_that_differs_is_named():
    model = Stack()
    with stream_layers(model, model.layers, CPU) as streamed:
        run = streamed.run

        def runs(index: int, args: tuple, kwargs: dict):
            model.layers[index].calls += 1
            return run(index, args, kwargs)

        streamed.run = runs
        with pytest.raises(AssertionError, match=r"^buffer layers\.0\.calls differs in 1 of 1 "):
            check(streamed)
        assert not any(layer.calls for layer in model.layers)


@pytest.mark.usefixtures("one_rank")
def test_what_differs_on_one_rank_is_raised_on_all(monkeypatch):
    """Or the others would wait for it in their first step."""

    def gather(found: list, mine: object, group: None) -> None:
        found[0] = mine
        found[1] = ranks._failed(AssertionError("buffer b"))

    model = Stack()
    with stream_layers(model, model.layers, CPU) as streamed:
        monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
        monkeypatch.setattr(dist, "all_gather_object", gather)
        with pytest.raises(AssertionError, match="rank 1: AssertionError: buffer b"):
            check(streamed)


class Shared(nn.Module):
    """Layers that all get one tensor beside the result of the one before, as a decoder's do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Bilinear(8, 8, 8) for _ in range(4))

    def forward(self, x):
        memory = self.before(x)
        y = memory
        for layer in self.layers:
            y = layer(y + memory, memory) + torch.tanh(memory)
        return y


def test_gradients_of_a_tensor_that_many_layers_get_may_be_added_in_another_order():
    """And no more: an error of a layer is found all the same."""
    model = Shared()
    layers = model.layers
    for layer in layers:
        plain = layer.forward
        layer.forward = lambda x, y, plain=plain: plain(x * y, y.sin()) * y
    with stream_layers(model, layers, CPU) as streamed:
        assert check_first_step(streamed, lambda: loss_of(model)) is False
        with_scaled_gradients(streamed)
        with pytest.raises(AssertionError, match=r"^the gradient of layers\.2\.bias is off by"):
            check(streamed)


def test_gradients_that_are_there_are_not_overwritten():
    model = Stack()
    with stream_layers(model, model.layers, CPU) as streamed:
        loss_of(model).backward()
        with pytest.raises(RuntimeError, match="there are gradients"):
            check(streamed)
        model.zero_grad()
        check(streamed)
