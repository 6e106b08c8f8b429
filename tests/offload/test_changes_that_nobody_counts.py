"""Weights that a program changes where PyTorch counts nothing; copies; errors that name a layer."""

import threading
from contextlib import closing, nullcontext

import pytest
import torch
from streamed_toys import CPU, WIDTH, Loop, one_after_the_other, same, train, with_each_budget
from torch import nn

from overlap_recipes.offload import HostAdamW, adam_in_pieces, stream_layers
from overlap_recipes.offload.streamed_model import StreamedModel

PATIENCE_S = 60  # only a failing test waits this long

pytestmark = pytest.mark.usefixtures("one_thread")


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def changing_between(change):
    """A loop over layers that changes the last one's weights before it runs."""

    def run(layers, x):
        for layer in layers:
            if layer is layers[-1]:
                change(layer.weight)
            x = layer(x)
        return x

    return run


def by_data(weight: nn.Parameter) -> None:
    weight.data.mul_(0.5)


@torch.no_grad()
def counted(weight: nn.Parameter) -> None:
    weight.mul_(0.5)


@pytest.mark.parametrize("change", [by_data, counted])
def test_weights_that_are_changed_before_their_layer_runs_are_those_that_it_runs_with(change):
    """They were on their way to the device, as they had been."""
    models = [Loop(linear, changing_between(change)) for _ in range(2)]
    expected = [train(models[0], seed) for seed in (1, 2)]
    model = models[1]
    with closing(StreamedModel(model, model.layers, CPU)):
        for seed, gradients in zip((1, 2), expected, strict=True):
            assert same(train(model, seed), gradients)


def test_weights_that_are_changed_behind_forward_are_refused_in_backward():
    model = Loop(linear, one_after_the_other)
    with closing(StreamedModel(model, model.layers, CPU)):
        loss = model(torch.ones(2, WIDTH)).sum()
        by_data(model.layers[1].weight)
        with pytest.raises(RuntimeError, match="changed between forward and backward") as refused:
            loss.backward()
        assert "layer 1 (Linear)" in refused.value.__notes__[0]


class Clamped(nn.Linear):
    """Changes its own weights in forward."""

    clamps = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.clamps:
            self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


def test_a_layer_that_changes_its_own_weights_unseen_is_refused():
    """The host's stayed as they were."""
    model = Loop(lambda: Clamped(WIDTH, WIDTH), one_after_the_other)
    with closing(StreamedModel(model, model.layers, CPU)):
        with pytest.raises(RuntimeError, match="changes its own weights in forward") as refused:
            train(model)
        assert "layer 0 (Clamped)" in refused.value.__notes__[0]
        Clamped.clamps = False
        train(model)
        Clamped.clamps = True


class Failing(nn.Linear):
    runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).runs += 1
        if self.runs in (2, 7):
            raise MemoryError("of this test")
        return super().forward(x)


def test_errors_of_layers_name_the_layer_in_forward_and_in_backward():
    model = Loop(lambda: Failing(WIDTH, WIDTH), one_after_the_other)
    with closing(StreamedModel(model, model.layers, CPU)):
        for layer in (1, 1):
            with pytest.raises(MemoryError) as failed:
                train(model)
            assert f"layer {layer} (Failing)" in failed.value.__notes__[0]


class Half(nn.Linear):
    """In bfloat16, of which the optimizer keeps masters in float32."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.bfloat16()).float()


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("change", [by_data, counted])
def test_weights_that_a_loop_changes_between_steps_stay_changed(change, in_backward):
    """The next step made them what their masters were."""
    model = Loop(Half, one_after_the_other)
    model.embedding.bfloat16()
    model.embedding.register_forward_pre_hook(lambda _, given: (given[0].bfloat16(),))
    changed = [model.embedding.weight, model.layers[1].weight]
    with (
        stream_layers(model, model.layers, CPU) as streamed,
        HostAdamW(model.parameters(), streamed, lr=1e-5, in_backward=in_backward) as optimizer,
    ):
        for _ in range(2):
            model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
            streamed.wait()
            before = [weight.detach().clone() for weight in changed]
            for weight in changed:
                change(weight)
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        streamed.wait()
        for weight, old in zip(changed, before, strict=True):
            torch.testing.assert_close(weight.detach(), old / 2, rtol=0, atol=1e-2)


def test_masters_of_weights_that_nobody_has_changed_keep_their_precision():
    master = torch.tensor([1.0001, 2.0001, 3.0])
    weight = master.bfloat16()
    weight[1] = 5
    adam_in_pieces.take_changes(master, weight)
    assert torch.equal(master, torch.tensor([1.0001, 5.0, 3.0]))


def test_weights_that_are_changed_between_backward_and_step_are_refused():
    model = Loop(Half, one_after_the_other)
    with (
        stream_layers(model, model.layers, CPU) as streamed,
        HostAdamW(model.parameters(), streamed) as optimizer,
    ):
        model(torch.ones(2, WIDTH)).sum().backward()
        counted(model.layers[1].weight)
        with pytest.raises(RuntimeError, match=r"changed between backward and step"):
            optimizer.step()


class Noisy(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.noise = nn.RReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.noise(super().forward(x))


def in_another_default_dtype(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    torch.set_default_dtype(torch.float16)
    try:
        return one_after_the_other(layers, x)
    finally:
        torch.set_default_dtype(torch.float32)


class Scaled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.full((1,), 0.1).to(x.dtype)


class Attends(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)[:, None]
        return nn.functional.scaled_dot_product_attention(y, y, y)[:, 0]


def with_plain_attention(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return one_after_the_other(layers, x)


@pytest.mark.parametrize(
    ("make", "run"),
    [
        (Noisy, one_after_the_other),
        (Scaled, in_another_default_dtype),
        (Attends, with_plain_attention),
    ],
)
def test_layers_run_again_under_the_settings_of_their_forward(make, run):
    """Noise was read before it was written, or settings of forward alone were not those of both."""
    model = Loop(make, run)
    expected = [train(model, seed) for seed in (1, 2)]
    for streamed in with_each_budget(model):
        assert [same(train(streamed, seed), expected[seed - 1]) for seed in (1, 2)] == [True, True]


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}])
def test_a_streamed_model_inside_of_ddp_is_refused(options, one_rank):
    """It sees no gradient of a streamed layer: the ranks' weights grew apart."""
    model = Loop(linear, one_after_the_other)
    with stream_layers(model, model.layers, CPU):
        parallel = nn.parallel.DistributedDataParallel(model, **options)
        with pytest.raises(RuntimeError, match="HostAdamW averages gradients"):
            parallel(torch.ones(2, WIDTH))
        with torch.no_grad():
            parallel(torch.ones(2, WIDTH))


@pytest.mark.parametrize("waits", [True, False])
def test_weights_that_are_changed_during_their_update_are_refused(monkeypatch, waits):
    """As by a clamp right after step: a part of them was updated after it, a part before."""
    model = Loop(linear, one_after_the_other)
    may_update = threading.Event()
    told = r"layer 1 \(Linear\): weights were changed during their update: call wait\(\)"
    with (
        nullcontext() if waits else pytest.raises(RuntimeError, match=told),
        stream_layers(model, model.layers, CPU) as streamed,
        HostAdamW(model.parameters(), streamed) as optimizer,
    ):
        update_block = optimizer.host.update_block

        def later(*args) -> None:
            assert may_update.wait(PATIENCE_S)
            update_block(*args)

        monkeypatch.setattr(optimizer.host, "update_block", later)
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        if waits:
            may_update.set()
            streamed.wait()
        counted(model.layers[1].weight)
        may_update.set()
        model(torch.ones(2, WIDTH))
