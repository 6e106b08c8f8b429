"""Backward runs a layer again as it was in forward: buffers, attributes, modes, random numbers."""

import random
from itertools import chain

import pytest
import torch
from streamed_toys import WIDTH, Loop, one_after_the_other, same, train, with_each_budget
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 3


class Toy(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


def batch_norm() -> nn.Module:
    return nn.Sequential(Toy(), nn.BatchNorm1d(5), nn.GELU())


def spectral_norm() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(Toy())


class Steering(Toy):
    """A bias that forward moves, in place or by another tensor, in a buffer or an attribute."""

    def __init__(self, registered: bool, replaced: bool, behind_autograd: bool = False) -> None:
        super().__init__()
        self.replaced = replaced
        self.behind_autograd = behind_autograd
        if registered:
            self.register_buffer("steer", torch.zeros(WIDTH))
        else:
            self.steer = torch.zeros(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x) * (1 + self.steer)
        moved = y.detach().mean((0, 1)).tanh()
        if self.replaced:
            self.steer = self.steer + moved
        elif self.behind_autograd:
            self.steer.data.add_(moved)
        else:
            self.steer += moved
        return y


class Counting(Toy):
    """Numbers, lists and dicts that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.means = []
        self.last = {"mean": torch.zeros(())}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = super().forward(x) * (1 + self.calls) + sum(self.means) + self.last["mean"]
        self.means.append(y.mean().item())
        self.last["mean"] = y.detach().mean()
        return y


class Drawing(Toy):
    """Draws from Python's generator and from one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(WIDTH, generator=self.generator)
        return super().forward(x) * noise * random.random()


class Large(Toy):
    """A buffer of more than is kept in any case; forward changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(2**19))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table += x.detach().mean().tanh()
        return super().forward(x * self.table[0].item())


LAYERS = {
    "batch_norm": batch_norm,
    "spectral_norm": spectral_norm,
    "buffer": lambda: Steering(True, False),
    "replaced_buffer": lambda: Steering(True, True),
    "attribute": lambda: Steering(False, False),
    "replaced_attribute": lambda: Steering(False, True),
    "behind_autograd": lambda: Steering(True, False, True),
    "counts": Counting,
    "draws": Drawing,
    "large": Large,
}


def states_of(model: nn.Module) -> list:
    """What the layers keep besides parameters."""
    found = []
    for module in model.modules():
        found += [buffer.clone() for buffer in module.buffers(recurse=False)]
        for name in ("steer", "calls", "means", "last"):
            if name in vars(module):
                found.append(torch.as_tensor(plain(vars(module)[name])))
        if hasattr(module, "generator"):
            found.append(module.generator.get_state())
    return found


def plain(value):
    return value["mean"] if isinstance(value, dict) else value


def trained(model: Loop) -> list[torch.Tensor]:
    """Gradients of each step, and what the layers keep behind it."""
    found = []
    for step in range(STEPS):
        random.seed(step)
        found += train(model, seed=step)
        found += states_of(model)
        found.append(torch.tensor(random.random()))
    return found


@pytest.mark.parametrize("name", LAYERS)
def test_what_forward_changes_is_changed_once_and_seen_as_it_was(name):
    """It changed twice, and the second run computed with what the first had left."""
    model = Loop(LAYERS[name], one_after_the_other)
    copies = with_each_budget(model)
    found = [trained(copy) for copy in copies]
    expected = trained(model)
    for ours in found:
        assert same(ours, expected)


def test_a_mode_that_is_set_between_forward_and_backward_changes_no_gradient():
    """The second run dropped nothing where the first had."""
    model = Loop(lambda: nn.Sequential(Toy(), nn.Dropout(0.5)), one_after_the_other)
    found = []
    for each in chain(with_each_budget(model), [model]):
        torch.manual_seed(0)
        each.train()
        each.zero_grad()
        loss = each(torch.ones(2, WIDTH)).sum()
        each.eval()
        loss.backward()
        assert not any(module.training for module in each.modules())
        found.append([p.grad.clone() for p in each.parameters()])
    for ours in found:
        assert same(ours, found[-1])
