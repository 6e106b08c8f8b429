"""Activation offload: changes in place that are an error or none, and arguments it refuses."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from activations import NBYTES, ROWS, WIDTH, activation, chain, offloading

STAYS = {
    "nothing": lambda x: {},  # its copy is on its way
    "small": lambda x: {"smallest": NBYTES + 1},
    "beyond the budget": lambda x: {"budget": 0},
    "asked for": lambda x: {"stay": [x]},
}


def test_a_budget_that_the_host_has_not_is_refused(recipe):
    """It said to keep fewer layers on the host."""
    told = f"cannot lock {2**60} more bytes.*or pass a smaller budget$"
    with pytest.raises(RuntimeError, match=told) as refused:
        recipe.ActivationOffload("cpu", 2**60, 1 << 20)
    assert "layers" not in str(refused.value)


@pytest.mark.parametrize("why", STAYS)
def test_a_change_in_place_of_what_the_device_holds_is_an_error(recipe, why):
    x = activation()
    middle = x * 1
    with offloading(recipe, **STAYS[why](middle)) as offload:
        with offload.saving():
            y = middle.square().sum()
        with torch.no_grad():
            middle.mul_(2)
        with pytest.raises(RuntimeError, match="changed in place after autograd saved it"):
            y.backward()


def test_a_change_in_place_during_a_copy_is_an_error_when_backward_reads_it(recipe):
    middle = activation() * 1
    with offloading(recipe) as offload:
        with offload.saving():
            y = middle.square().sum()
        with torch.no_grad():
            middle.mul_(2)
        offload.release(0)  # where the copy ends; nobody may ever read it
        with pytest.raises(RuntimeError, match="changed in place after autograd saved it"):
            y.backward()


@pytest.mark.parametrize("window", [1 << 20, 1])  # what is saved fits it, or nothing does
def test_what_backward_is_done_with_may_be_changed_in_place(recipe, window):
    """A batch that is refilled, and a weight that is no ``nn.Parameter``."""

    def trained(saving) -> torch.Tensor:
        torch.manual_seed(0)
        batch, weight = torch.empty(ROWS, WIDTH), torch.randn(WIDTH, WIDTH, requires_grad=True)
        for _ in range(3):
            batch.normal_()
            with saving():
                loss = (batch @ weight).tanh().square().mean()
            loss.backward()
            with torch.no_grad():
                weight.sub_(0.1 * weight.grad)
            weight.grad = None
        return weight

    with offloading(recipe, window=window) as offload:
        assert torch.equal(trained(offload.saving), trained(nullcontext))
        assert offload.used > 0


def test_operations_in_place_that_autograd_allows_are_no_error(recipe):
    x = activation()

    def gradient(saving):
        with saving:
            loss = (x * 1).add_(1).exp_().relu().square().sum()
        return torch.autograd.grad(loss, x)[0]

    right = gradient(nullcontext())
    for smallest in (1, NBYTES + 1):
        with offloading(recipe, smallest=smallest) as offload:
            assert torch.equal(gradient(offload.saving()), right)


def test_a_change_in_place_after_the_copy_is_harmless(recipe):
    x = activation()
    with offloading(recipe, window=1) as offload, offload.saving():
        middle = (x * 0.1).exp()
        y = (middle * 0.1).exp().sum()  # its copy makes that of `middle` complete
        with torch.no_grad():
            middle.zero_()
        y.backward()
    ours, x.grad = x.grad, None
    chain(x, 2).sum().backward()
    assert torch.equal(ours, x.grad)


@pytest.mark.parametrize(
    ("named", "refused"), [("cuda:1", True), ("cuda:0", False), ("cuda", False)]
)
def test_a_device_that_is_not_the_current_one_is_refused(recipe, monkeypatch, named, refused):
    """Copies to it would be queued on streams of the current one."""
    empty = torch.empty

    def on_two_devices(*size, device, **options):
        if torch.device(device).type != "cuda":
            return empty(*size, device=device, **options)
        index = torch.device(device).index or 0  # the current device is the first
        return SimpleNamespace(device=torch.device("cuda", index))

    monkeypatch.setattr(torch, "empty", on_two_devices)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    told = r"cuda:1 is not the current device: call torch\.accelerator\.set_device_index\(i\) first"
    with pytest.raises(ValueError, match=told) if refused else nullcontext():
        offload = recipe.ActivationOffload(torch.device(named), 0, 1, unified_memory=True)
        assert offload.device == torch.device("cuda:0")


@pytest.mark.parametrize(("budget", "window"), [(-1, 1), (1, 0)])
def test_bytes_that_make_no_sense_are_refused(recipe, budget, window):
    with pytest.raises(ValueError, match="pass bytes"):
        recipe.ActivationOffload(torch.device("cpu"), budget, window)
