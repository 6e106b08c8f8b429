"""Backward runs a layer again: what forward read is read again, or the difference is an error."""

import random
from collections.abc import Callable
from contextlib import closing, contextmanager
from contextvars import ContextVar

import numpy
import pytest
import torch
from streamed_toys import (
    CPU,
    WIDTH,
    Loop,
    close,
    gradients_of,
    one_after_the_other,
    same,
    train,
    with_each_budget,
)
from torch import nn

from overlap_recipes.offload import HostAdamW
from overlap_recipes.offload.streamed_model import StreamedModel

pytestmark = pytest.mark.usefixtures("one_thread")

REFUSED = "gave another result when backward ran it again"


class Toy(nn.Linear):
    """``factor()`` stands inside of what is differentiated: saved numbers depend on it."""

    def __init__(self, factor: Callable = lambda: 1.0) -> None:
        super().__init__(WIDTH, WIDTH)
        object.__setattr__(self, "factor", factor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward((x * self.factor()).sin())


def gradients(model: Loop, change: Callable = lambda: None) -> list[torch.Tensor]:
    """Of a step, with something changed between forward and backward."""
    model.zero_grad()
    loss = model(torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)).square().sum()
    change()
    loss.backward()
    return gradients_of(model)


def streamed_as_resident(model: Loop, step: Callable, alike: Callable) -> None:
    """What ``step`` gives with each budget is what it gives without us."""
    found = [step(each) for each in with_each_budget(model)]
    resident = step(model)
    for ours in found:
        assert alike(ours, resident)


class Returning(nn.Linear):
    """Returns its weight as well, or a part of it."""

    def __init__(self, part: Callable) -> None:
        super().__init__(WIDTH, WIDTH)
        self.part = part

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x).tanh(), self.part(self.weight)


def with_all_weights(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    weights = []
    for layer in layers:
        x, weight = layer(x)
        weights.append(weight)
    return x + sum(weight.mean() for weight in weights)


PARTS = {
    "all": lambda weight: weight,
    "view": lambda weight: weight.t()[:2],
    "detached": lambda weight: weight.detach(),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("grads", [False, True])
def test_a_weight_that_a_layer_returns_is_its_own(part, grads):
    """The next layer's weights were there when it was used."""
    model = Loop(lambda: Returning(PARTS[part]), with_all_weights)

    def step(model: Loop) -> list[torch.Tensor]:
        with torch.set_grad_enabled(grads):
            found = [model(torch.ones(2, WIDTH)).detach()]
        return found + (gradients(model) if grads else [])

    streamed_as_resident(model, step, close)


def test_a_weight_that_a_layer_puts_into_a_list_is_its_own():
    """As one that is returned: without gradients it was the next layer's in silence."""

    class Listing(Toy):
        def forward(self, x: torch.Tensor, weights: list) -> torch.Tensor:
            weights.append(self.weight.detach())
            return super().forward(x)

    def run(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        weights = []
        for layer in layers:
            x = layer(x, weights)
        return x + sum(weight.mean() for weight in weights)

    def step(model: Loop) -> list[torch.Tensor]:
        with torch.no_grad():
            evaluated = model(torch.ones(2, WIDTH))
        return [evaluated, *gradients(model)]

    streamed_as_resident(Loop(Listing, run), step, close)


class Scaling(nn.Linear):
    """Has autograd double the gradient of its input."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: (2 * gradient).clamp(-1, 1))
        return super().forward(x).tanh()


@pytest.mark.parametrize("beside", [False, True])
def test_a_hook_that_a_layer_gives_its_input_gets_all_of_the_gradient_once(beside):
    """It ran twice, and on the layer's own part of the gradient."""

    def run(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x) + (x.sin() if beside else 0)
        return x

    streamed_as_resident(Loop(Scaling, run), gradients, close)


def test_what_is_kept_on_a_parameter_is_there():
    """The layer computed with another tensor, without what the loop keeps on its parameter."""

    class Reading(Toy):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * getattr(self.weight, "scale", 1.0)

    model = Loop(Reading, one_after_the_other)

    def step(model: Loop) -> list[torch.Tensor]:
        for layer in model.layers:
            layer.weight.scale = 2.0
        return gradients(model)

    streamed_as_resident(model, step, same)


def doubled(module, args, kwargs, result) -> torch.Tensor:
    return 2 * result


def halved(module, args) -> tuple[torch.Tensor]:
    return (0.5 * args[0],)


@pytest.mark.parametrize("removed", [False, True])
def test_hooks_in_a_layer_are_those_of_forward(removed):
    """A steering vector that was taken away before backward was not there in the second run."""
    model = Loop(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), one_after_the_other)

    def hook(model: Loop) -> list:
        linears = [layer[0] for layer in model.layers]
        handles = [m.register_forward_hook(doubled, with_kwargs=True) for m in linears]
        return handles + [m.register_forward_pre_hook(halved) for m in linears]

    def step(model: Loop) -> list[torch.Tensor]:
        handles = hook(model) if removed else []

        def change() -> None:
            handles.extend([] if removed else hook(model))
            for handle in handles if removed else ():
                handle.remove()

        found = gradients(model, change)
        found += gradients(model)  # with the hooks that are there behind it
        for handle in handles:
            handle.remove()
        return found

    streamed_as_resident(model, step, same)


class Noisy(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, generators: list) -> torch.Tensor:
        noise = torch.rand(WIDTH, generator=generators[0])
        return super().forward((x * noise * numpy.random.rand()).sin())


@pytest.mark.parametrize("by_keyword", [False, True])
def test_random_numbers_of_numpy_and_of_a_generator_that_is_given_are_drawn_again(by_keyword):
    """The second run drew other ones."""

    def run(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(5)
        for layer in layers:
            if by_keyword:
                x = layer(x, generators=[generator])
            else:
                x = layer(x, [generator])
        return x + torch.rand(WIDTH, generator=generator)

    def step(model: Loop) -> list[torch.Tensor]:
        numpy.random.seed(3)
        return [*gradients(model), torch.tensor(numpy.random.rand())]

    streamed_as_resident(Loop(Noisy, run), step, same)


def test_context_variables_are_those_of_forward():
    """On a GPU autograd has a thread of its own, in which none was set."""
    scale = ContextVar("scale", default=1.0)
    model = Loop(lambda: Toy(scale.get), one_after_the_other)

    def step(model: Loop) -> list[torch.Tensor]:
        scale.set(2.0)
        return gradients(model, change=lambda: scale.set(3.0))

    streamed_as_resident(model, step, same)


class Place:
    """Where a model is in its layers; it tells them."""

    def __init__(self) -> None:
        self.layer = 0
        self.scale = torch.ones(WIDTH)


def test_attributes_of_an_object_that_is_given_are_those_of_forward():
    """In the second runs they were those of the last layer."""

    class Placed(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, place: Place) -> torch.Tensor:
            place.layer += 1
            return super().forward((x * place.scale * place.layer).sin())

    def run(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        place = Place()
        for layer in layers:
            place.scale = place.scale + 1
            x = layer(x, place)
        assert place.layer == len(layers)
        return x

    streamed_as_resident(Loop(Placed, run), gradients, same)


def test_a_layer_that_calls_backward_in_its_forward_is_refused():
    """On the device it added its gradients twice."""

    class OfItsOwn(Toy):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled():
                super().forward(x.detach()).square().sum().backward()
            return super().forward(x.detach())

    model = Loop(OfItsOwn, one_after_the_other)
    for each in with_each_budget(model):
        with pytest.raises(RuntimeError, match="backward in its forward|came into layer"):
            gradients(each)


STATE = {"number": 1.0, "generator": torch.Generator(), "random": random.Random(1)}


def number() -> float:
    return STATE["number"]


def counted() -> float:
    STATE["number"] += 1
    return STATE["number"]


def drawn() -> torch.Tensor:
    return torch.rand(WIDTH, generator=STATE["generator"])


def drawn_by_python() -> float:
    return STATE["random"].random()


def set_number() -> None:
    STATE["number"] += 1


READ = {
    "changed": (number, set_number),
    "counted": (counted, lambda: None),
    "generator": (drawn, lambda: None),
    "of_python": (drawn_by_python, lambda: None),
}


@pytest.mark.parametrize("what", READ)
def test_a_second_run_that_gives_something_else_is_refused_in_the_first_step(what):
    """Gradients were those of another forward, in silence."""
    factor, change = READ[what]
    model = Loop(lambda: Toy(factor), one_after_the_other)
    for each in with_each_budget(model):
        with pytest.raises(RuntimeError, match=REFUSED) as caught:
            gradients(each, change)
        assert "(Toy) of a streamed model" in caught.value.__notes__[0]


class Adding(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += super().forward(x.clone())
        return x


def test_a_layer_that_changes_its_input_in_place_is_told_so():
    """The error spoke of a view, and of a class of ours."""
    model = Loop(Adding, one_after_the_other)
    refused = pytest.raises(RuntimeError, match="changes an argument in place")
    with closing(StreamedModel(model, model.layers, CPU)), refused:
        train(model)


def test_weights_that_are_frozen_between_forward_and_backward_are_refused():
    """They got gradients all the same, which other programs do not give them."""
    model = Loop(Toy, one_after_the_other)
    refused = pytest.raises(RuntimeError, match="weight was frozen between forward and backward")
    with closing(StreamedModel(model, model.layers, CPU)), refused:
        gradients(model, change=lambda: model.layers[1].requires_grad_(False))


@contextmanager
def updating_in_backward():
    model = Loop(Toy, one_after_the_other)
    streamed = StreamedModel(model, model.layers, CPU)
    with closing(HostAdamW(model.parameters(), streamed, in_backward=True)) as optimizer:
        yield model, optimizer


@pytest.mark.parametrize("grads", [False, True])
def test_a_forward_between_an_update_in_backward_and_its_step_is_refused(grads):
    """Layers had the weights of the next step, and the rest of the model those of this one."""
    with updating_in_backward() as (model, optimizer):
        gradients(model)
        with torch.set_grad_enabled(grads), pytest.raises(RuntimeError, match="step.. comes"):
            model(torch.ones(2, WIDTH))
        optimizer.step()
        model(torch.ones(2, WIDTH))


def test_a_scaler_of_gradients_is_refused_where_backward_updates():
    """Layers were updated by gradients as they were scaled."""
    with updating_in_backward() as (model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(model(torch.ones(2, WIDTH)).square().sum()).backward()
        with pytest.raises(RuntimeError, match="no GradScaler"):
            scaler.step(optimizer)
