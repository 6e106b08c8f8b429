"""Weights on the host: any stack of modules, exact memory, and clear errors for bad input."""

import sys
from collections.abc import Callable
from contextlib import closing
from copy import deepcopy
from pathlib import Path
from textwrap import dedent

import pytest
import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes_source" / "offload"))

import host_layers
import weight_streaming
from host_layers import ALIGNMENT, HostBuffer, HostLayers
from weight_streaming import StreamedStack, resident_gradients

PAGES = Path(host_layers.__file__).parent
CPU = torch.device("cpu")
WIDTH = 16
BATCH = 8


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH)).to(dtype)


class Tied(nn.Module):
    """Two names for one parameter, inside one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


class Cast(nn.Module):
    """A layer of another dtype than its neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = mlp(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x.bfloat16()).float()


def tokens() -> torch.Tensor:
    return torch.randint(10, (2, BATCH))


def features() -> torch.Tensor:
    return torch.randn(2, BATCH, WIDTH)


STACKS: dict[str, tuple[Callable, Callable]] = {
    "equal": (features, lambda: [mlp() for _ in range(5)]),
    "one": (features, lambda: [mlp()]),
    "embedding": (tokens, lambda: [nn.Embedding(10, WIDTH), mlp(), nn.Linear(WIDTH, 4)]),
    "convolution": (features, lambda: [nn.Conv1d(BATCH, 6, 3), nn.BatchNorm1d(6), nn.PReLU()]),
    "dropout": (features, lambda: [mlp(), nn.Dropout(), mlp(), nn.Dropout(), mlp()]),
    "attention": (
        features,
        lambda: [
            mlp(),
            nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True),
            nn.LayerNorm(WIDTH),
        ],
    ),
    "dtypes": (features, lambda: [mlp(), Cast(), Cast(), mlp()]),
    "tied": (features, lambda: [Tied(), mlp(), Tied()]),
    "frozen": (features, lambda: [mlp().requires_grad_(False), mlp(), mlp().requires_grad_(False)]),
    "in part frozen": (features, lambda: [mlp(), partly_frozen(), mlp()]),
}


def partly_frozen() -> nn.Module:
    layer = mlp()
    layer[0].requires_grad_(False)
    return layer


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in module.parameters() if p.requires_grad]


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return (y * torch.linspace(-1, 1, y.shape[-1])).square().sum()


@pytest.mark.parametrize("slots", [1, 2, 3, 9])
@pytest.mark.parametrize("stack", STACKS)
def test_gradients_are_those_of_the_resident_run(stack, slots):
    make_input, make_layers = STACKS[stack]
    torch.manual_seed(0)
    ordinary, x = nn.ModuleList(make_layers()), make_input()
    with closing(StreamedStack(deepcopy(ordinary), CPU, slots=slots)) as streamed:
        for seed in range(2):  # the second step meets slots that are in use
            torch.manual_seed(seed)
            y = x
            for layer in ordinary:
                y = torch.utils.checkpoint.checkpoint(layer, y, use_reentrant=False)
            ordinary.zero_grad()
            expected = loss_of(y)
            expected.backward()
            torch.manual_seed(seed)
            loss = streamed.step(x, loss_of)
            streamed.wait_for_gradients()
            assert torch.equal(loss, expected)
            for ours, theirs in zip(gradients(streamed.layers), gradients(ordinary), strict=True):
                assert torch.equal(ours, theirs)
        count = len(ordinary)
        assert streamed.loads == 2 * (2 * count - min(slots, count))
        assert streamed.stores == 2 * count


def test_modules_around_the_stack_train_as_usual():
    torch.manual_seed(0)
    before, head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)
    layers, x = nn.Sequential(mlp(), mlp(), mlp()), torch.randn(BATCH, 4)
    loss_of(head(layers(before(x)))).backward()
    expected = [before.weight.grad.clone(), head.weight.grad.clone()]
    before.zero_grad()
    head.zero_grad()
    with closing(StreamedStack(layers, CPU)) as stack:
        entered = before(x)
        y = stack.forward(entered).requires_grad_()
        loss_of(head(y)).backward()
        entered.backward(stack.backward(y.grad))
    assert torch.equal(before.weight.grad, expected[0])
    assert torch.equal(head.weight.grad, expected[1])


def test_evaluation_keeps_nothing():
    layers = [mlp() for _ in range(3)]
    x = features()
    expected = nn.Sequential(*layers)(x)
    with closing(StreamedStack(layers, CPU)) as stack, torch.no_grad():
        assert torch.equal(stack.forward(x), expected)
        assert not any(stack.graphs)


def test_parameters_stay_what_optimizers_and_checkpoints_know():
    torch.manual_seed(0)
    layers = [mlp(), mlp()]
    known = [p for layer in layers for p in layer.parameters()]
    optimizer = torch.optim.SGD(known, lr=0.1)  # made before the move
    with closing(StreamedStack(layers, CPU)) as stack:
        assert all(a is b for a, b in zip(stack.layers.parameters(), known, strict=True))
        before = stack.weights[0].flat.clone()
        stack.step(features(), loss_of)
        stack.wait_for_gradients()
        optimizer.step()
        assert not torch.equal(stack.weights[0].flat, before)
        optimizer.zero_grad()  # sets .grad to None; the next step gives the same buffers out
        stack.step(features(), loss_of)
        stack.wait_for_gradients()
        first = next(iter(stack.gradients[0].views.values()))
        assert known[0].grad.data_ptr() == first.data_ptr()
        copy = nn.ModuleList([mlp(), mlp()])
        copy.load_state_dict(stack.layers.state_dict())
        for ours, theirs in zip(copy.parameters(), known, strict=True):
            assert torch.equal(ours, theirs)


def test_host_memory_is_the_sum_of_the_tensors_aligned():
    layer = nn.Linear(1000, 1000)
    with closing(HostLayers([layer], CPU)) as model:
        assert model.weights[0].flat.numel() == -(-1_000_000 // ALIGNMENT) * ALIGNMENT + 1024
        assert model.gradients[0].flat.numel() == model.weights[0].flat.numel()
        assert model.weights[0].flat.untyped_storage().nbytes() == model.weights[0].flat.nbytes
        for view in model.weights[0].views.values():
            assert view.data_ptr() % 512 == 0


def test_frozen_parameters_have_no_gradient_memory():
    with closing(HostLayers([partly_frozen()], CPU)) as model:
        names = list(model.gradients[0].views)
        assert names == ["2.weight", "2.bias"]
        assert list(model.weights[0].views)[: len(names)] == names
        assert model.gradients[0].offsets[: len(names)] == model.weights[0].offsets[: len(names)]


def test_device_slots_are_as_many_and_as_large_as_asked():
    with closing(StreamedStack([mlp(), nn.Linear(WIDTH, WIDTH), mlp()], CPU, slots=2)) as stack:
        storages = {flat.untyped_storage().data_ptr() for flat in stack.flats}
        assert len(storages) == 2
        largest = max(buffer.flat.nbytes for buffer in stack.weights)
        assert {flat.untyped_storage().nbytes() for flat in stack.flats} == {largest}


def test_a_generator_is_taken_layer_by_layer():
    def layers():
        first = mlp()
        yield first
        moved = first[0].weight.untyped_storage()
        assert moved.nbytes() > first[0].weight.nbytes, "the first layer has not been moved yet"
        yield mlp()

    with closing(HostLayers(layers(), CPU)) as model:
        assert len(model.layers) == 2


# Bad input


def test_a_parameter_that_layers_share_is_refused():
    first, second = mlp(), mlp()
    second[0].weight = first[0].weight
    with pytest.raises(ValueError, match=r"layer 1 shares \['0.weight'\].*keep a shared"):
        StreamedStack([first, second], CPU)


def test_a_layer_of_two_dtypes_is_refused():
    layer = mlp()
    layer[0].half()
    with pytest.raises(ValueError, match=r"layer 1 mixes .*float16.*\.to\(dtype\)"):
        StreamedStack([mlp(), layer], CPU)


def test_a_layer_that_does_not_fit_into_a_slot_is_refused():
    small, large = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 64 * WIDTH)
    with pytest.raises(ValueError, match="layer 1 takes .* a slot may take 4096: raise slot_bytes"):
        StreamedStack([small, large], CPU, slot_bytes=4096)


def test_more_memory_than_the_host_can_map_is_refused():
    like = {"weight": torch.empty(2**58, device="meta")}
    with pytest.raises(RuntimeError, match=f"cannot lock {2**60} more bytes.*free some"):
        HostBuffer(like, torch.float32, CPU)


def test_memory_that_cannot_be_locked_is_refused_and_the_rest_unlocked(monkeypatch):
    locked = []

    class Driver:
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
            locked.append(address)
            return 2 if len(locked) > 3 else 0

        def cudaHostUnregister(self, address: int) -> None:
            locked.remove(address)

    def check_error(code: int) -> None:
        if code:
            raise RuntimeError("out of memory")

    def launch(size: tuple, device: torch.device) -> None:
        launched.append(device)
        raise RuntimeError("the error before, reported by this kernel")

    launched = []
    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    monkeypatch.setattr(torch.cuda, "check_error", check_error)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch, "ones", launch)
    layers = [mlp(), mlp()]
    with pytest.raises(RuntimeError, match="cannot lock .* more bytes .*out of memory") as refused:
        HostLayers(layers, torch.device("cuda"))
    assert len(locked) == 1, "only the address that was refused may be left in the list"
    assert launched == [torch.device("cuda")], "the reader's next kernel will report the error"
    assert refused.tb, "the frames were meant to be alive"


@pytest.mark.parametrize("kind", [HostLayers, StreamedStack])
@pytest.mark.parametrize("current", [0, 2])
def test_a_device_that_is_not_the_current_one_is_refused(monkeypatch, kind, current):
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current)
    with pytest.raises(ValueError, match="make cuda:1 current: .*set_device_index"):
        kind([mlp()], torch.device("cuda:1"))


def test_the_current_device_is_not_refused(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    for device in ("cuda:1", "cuda", "cpu", "cpu:0"):
        with pytest.raises(ValueError, match="there is no layer"):
            HostLayers([], torch.device(device))


def test_an_output_that_is_no_tensor_is_refused():
    with (
        closing(StreamedStack([mlp(), nn.GRU(WIDTH, WIDTH)], CPU)) as stack,
        pytest.raises(TypeError, match="layer 1 returned a tuple: wrap it"),
    ):
        stack.step(features(), loss_of)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_is_named(value):
    with closing(StreamedStack([mlp(), mlp()], CPU)) as stack:
        stack.step(features(), loss_of)
        stack.wait_for_gradients()
        stack.check_finite()
        stack.layers[1][2].bias.grad[3] = value
        with pytest.raises(FloatingPointError, match="layer 1: the gradient of '2.bias'"):
            stack.check_finite()


def test_a_loss_that_overflows_is_found():
    with closing(StreamedStack([mlp(torch.float32), mlp()], CPU)) as stack:
        stack.step(features(), lambda y: y.sum() * 1e38 * 1e38)
        stack.wait_for_gradients()
        with pytest.raises(FloatingPointError, match="skip this step"):
            stack.check_finite()


def test_the_toys_of_the_recipe_are_compared_with_ordinary_training():
    """``resident_gradients`` is the recipe's own yardstick: it must be that of plain autograd."""
    torch.manual_seed(0)
    layers, x = nn.ModuleList([host_layers.Block(), host_layers.Block()]), torch.randn(2, 3, 32)
    ours = resident_gradients(layers, x, weight_streaming.loss_of)
    weight_streaming.loss_of(nn.Sequential(*layers)(x)).backward()
    for layer, named in zip(layers, ours, strict=True):
        for name, gradient in named.items():
            assert torch.equal(gradient, layer.get_parameter(name).grad)


# What a reader copies


def snippets(page: str) -> list[str]:
    """The code blocks of a page's prose."""
    lines = [line.removeprefix("# ").rstrip("#\n") for line in page.splitlines()]
    found = []
    for number, line in enumerate(lines):
        if line == ".. code-block:: python":
            block = []
            for following in lines[number + 1 :]:
                if following and not following.startswith(" "):
                    break
                block.append(following)
            found.append(dedent("\n".join(block)).strip())
    return found


@pytest.mark.parametrize(
    "name", ["three_streams", "weight_streaming", "activation_offload", "pipelined_optimizer"]
)
def test_what_a_reader_copies_runs(name):
    """With what is said to be the reader's own; it trains, and leaves no group."""
    device = torch.accelerator.current_accelerator(check_available=True) or CPU
    torch.manual_seed(0)
    layers = [mlp().to(device) for _ in range(3)]
    model = nn.Sequential(*layers)
    before = [parameter.detach().cpu().clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters())

    def train_step(batch: torch.Tensor) -> None:
        loss_of(model(batch)).backward()
        optimizer.step()

    def loss_of(y: torch.Tensor) -> torch.Tensor:
        return y.square().mean()

    yours = {
        "torch": torch,
        "device": device,
        "layers": layers,
        "model": model,
        "optimizer": optimizer,
        "settings": {"lr": 1e-3},
        "max_norm": 1.0,
        "batch": features().to(device),
        "batches": [features().to(device) for _ in range(3)],
        "loss_of": loss_of,
        "train_step": train_step,
        "budget": 1 << 20,
        "window": 1 << 16,
    }
    [snippet] = snippets((PAGES / f"{name}.py").read_text())
    exec(compile(snippet, name, "exec"), yours)
    assert not any(map(torch.equal, before, (p.cpu() for p in model.parameters())))
    assert not dist.is_initialized()
