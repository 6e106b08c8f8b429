"""What a streamed model cannot do as the resident one does is refused: a program, and its message.

Each program ends in the refusal. It gets a small model that is not streamed yet.
"""

import threading
from collections.abc import Callable
from contextlib import contextmanager
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor
from torch.func import functional_call
from wrapped_tensors import Wrapper

from overlap_recipes.offload import HostAdamW, stream_layers

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 8


class Net(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x)


WORDS = torch.arange(12).view(3, 4)


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(WORDS).square().mean()


@contextmanager
def trained(model: Net, **options):
    """A streamed model and its optimizer."""
    settings = {"lr": 1e-2} | options
    gradient_dtype = settings.pop("gradient_dtype", None)
    with (
        stream_layers(model, model.blocks, "cpu", gradient_dtype=gradient_dtype) as streamed,
        HostAdamW(model.parameters(), streamed, **settings) as optimizer,
    ):
        yield streamed, optimizer


def streams(model: Net, layers=None) -> None:
    with stream_layers(model, model.blocks if layers is None else layers, "cpu"):
        raise AssertionError("it is streamed")


REFUSALS = []


def refuses(error: type[Exception], words: str, **kinds) -> Callable:
    """Put a program into the table; ``kinds`` are its other arguments, by the row's name."""

    def put(program: Callable) -> Callable:
        for name, kind in (kinds or {"": ()}).items():
            row = pytest.param(program, kind, error, words, id=f"{program.__name__} {name}".strip())
            REFUSALS.append(row)
        return program

    return put


# What is taken as a layer


class PartsOfIt(nn.ModuleDict):
    pass


@refuses(
    TypeError,
    "layer 1 is a .*, which has no forward: give the modules that it holds",
    list=lambda block: nn.ModuleList([block]),
    dict=lambda block: nn.ModuleDict({"a": block}),
    parameters=lambda block: nn.ParameterList(block.parameters()),
    own_class=lambda block: PartsOfIt({"a": block}),
)
def layer_without_a_forward(model: Net, around: Callable) -> None:
    model.blocks[1] = around(model.blocks[1])
    streams(model)


def on_meta(model: Net) -> None:
    model.blocks[2].to("meta")


def head_on_meta(model: Net) -> None:
    model.head.to("meta")


def buffer_on_meta(model: Net) -> None:
    model.blocks[0].register_buffer("mask", torch.ones(2, device="meta"))


@refuses(
    ValueError,
    r"\w+ is on the meta device: load or initialise the model first",
    layer=on_meta,
    head=head_on_meta,
    buffer=buffer_on_meta,
)
def model_on_meta(model: Net, change: Callable) -> None:
    change(model)
    streams(model)


def lazy_layer(model: Net) -> None:
    model.blocks[1] = nn.LazyLinear(WIDTH)


def lazy_head(model: Net) -> None:
    model.head = nn.LazyLinear(WIDTH)


def lazy_buffer(model: Net) -> None:
    model.blocks[1] = nn.LazyBatchNorm1d()


@refuses(
    ValueError,
    r"\w+ has no shape yet: run a forward before",
    layer=lazy_layer,
    head=lazy_head,
    buffer=lazy_buffer,
)
def lazy_model(model: Net, change: Callable) -> None:
    change(model)
    streams(model)


def distributed(weight: nn.Parameter) -> nn.Parameter:
    mesh = DeviceMesh("cpu", [0])
    return nn.Parameter(distribute_tensor(weight.detach(), mesh, [Replicate()]))


def wrapped(weight: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(Wrapper(weight.detach()), requires_grad=False)


def sparse(weight: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(weight.detach().to_sparse(), requires_grad=False)


def by_torchao(weight: nn.Parameter) -> nn.Parameter:
    quantization = pytest.importorskip("torchao.quantization")
    linear = nn.Linear(64, 64)
    quantization.quantize_(linear, quantization.Int8WeightOnlyConfig())
    return linear.weight


@refuses(
    TypeError,
    r"blocks\.1\.weight is .*: stream layers of plain, dense weights",
    dtensor=distributed,
    wrapped=wrapped,
    sparse=sparse,
    torchao=by_torchao,
)
def weight_of_another_class(model: Net, change: Callable) -> None:
    if change is distributed:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model.blocks[1].weight = change(model.blocks[1].weight)
        streams(model)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@refuses(TypeError, r"layer 1 is a ScriptModule.*: stream it as it was before torch\.jit")
def scripted_layer(model: Net) -> None:
    model.blocks[1] = torch.jit.script(model.blocks[1])
    streams(model)


# What an optimizer is given


@refuses(
    ValueError,
    "Invalid",
    lr={"lr": -1e-2},
    no_number={"lr": float("nan")},
    beta_1={"betas": (1.1, 0.9)},
    beta_2={"betas": (0.9, 1.0)},
    eps={"eps": -1e-8},
    decay={"weight_decay": -0.1},
)
def settings_that_no_adamw_takes(model: Net, settings: dict) -> None:
    with trained(model, **settings):
        pass


@refuses(ValueError, "Invalid", lr={"lr": -1e-2}, beta={"betas": (0.9, 2.0)})
def settings_of_a_group_that_no_adamw_takes(model: Net, settings: dict) -> None:
    groups = [{"params": list(model.blocks.parameters())}]
    groups.append({"params": list(model.head.parameters()), **settings})
    model.embedding.requires_grad_(False)
    with stream_layers(model, model.blocks, "cpu") as streamed:
        HostAdamW(groups, streamed)


@refuses(RuntimeError, "gradients in .*float32 are for HostAdamW: build it before backward")
def gradient_dtype_without_our_optimizer(model: Net) -> None:
    model.bfloat16()
    with stream_layers(model, model.blocks, "cpu", gradient_dtype=torch.float32):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of(model).backward()
        optimizer.step()


@refuses(RuntimeError, "gradients in .*bfloat16 are for HostAdamW")
def gradient_dtype_in_a_loop_by_hand(model: Net) -> None:
    with stream_layers(model, model.blocks, "cpu", gradient_dtype=torch.bfloat16):
        loss_of(model).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.data -= 0.1 * parameter.grad


@refuses(RuntimeError, "gradients in .*float32 are for HostAdamW")
def gradient_dtype_behind_an_optimizer_that_has_ended(model: Net) -> None:
    model.bfloat16()
    with stream_layers(model, model.blocks, "cpu", gradient_dtype=torch.float32) as streamed:
        with HostAdamW(model.parameters(), streamed) as optimizer:
            loss_of(model).backward()
            optimizer.step()
        loss_of(model).backward()


# Gradients


def scaled(gradient: torch.Tensor) -> None:
    gradient.data.mul_(0.5)


def clamped(gradient: torch.Tensor) -> None:
    gradient.data.clamp_(-1e-7, 1e-7)


def scaled_by_numpy(gradient: torch.Tensor) -> None:
    array = gradient.numpy()
    array *= 0.5


def scaled_together(gradient: torch.Tensor) -> None:
    torch._foreach_mul_([gradient.data], 0.5)


CHANGES = {
    "scaled": scaled,
    "clamped": clamped,
    "numpy": scaled_by_numpy,
    "foreach": scaled_together,
}
CHANGED = "gradients, or settings, were changed after backward: see max_norm"


@refuses(RuntimeError, CHANGED, **CHANGES)
def gradients_changed_where_they_are_clipped(model: Net, change: Callable) -> None:
    with trained(model, max_norm=1e-3) as (_, optimizer):
        loss_of(model).backward()
        for parameter in model.parameters():
            change(parameter.grad)
        optimizer.step()


@refuses(RuntimeError, CHANGED, **CHANGES)
def gradients_changed_where_they_are_used(model: Net, change: Callable) -> None:
    with trained(model, in_backward=True) as (_, optimizer):
        loss_of(model).backward()
        for parameter in model.parameters():
            change(parameter.grad)
        optimizer.step()


@refuses(RuntimeError, CHANGED)
def gradients_unscaled_where_they_are_clipped(model: Net) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with trained(model, max_norm=1.0) as (_, optimizer):
        scaler.scale(loss_of(model)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)


@refuses(RuntimeError, r"parameter\.grad was exchanged", own=None, clipped=1.0)
def memory_of_gradients_exchanged(model: Net, max_norm: float | None) -> None:
    with trained(model, max_norm=max_norm) as (_, optimizer):
        loss_of(model).backward()
        for parameter in model.parameters():
            parameter.grad.data = parameter.grad.data * 0.5
        optimizer.step()


@refuses(
    RuntimeError,
    r"torch\.autograd\.grad gives no gradients of streamed weights: call backward\(\)",
    all=lambda model: list(model.parameters()),
    a_layer=lambda model: list(model.blocks[1].parameters()),
    with_the_head=lambda model: [model.head.weight, model.blocks[2].bias],
)
def autograd_grad_of_weights(model: Net, wanted: Callable) -> None:
    with stream_layers(model, model.blocks, "cpu"):
        torch.autograd.grad(loss_of(model), wanted(model), allow_unused=True)


@refuses(
    RuntimeError,
    r"backward\(inputs=\.\.\.\) names some weights of layer 1 \(Linear\): name all .*, or none",
    weight=lambda layer: layer.weight,
    bias=lambda layer: layer.bias,
)
def backward_to_a_part_of_a_layer(model: Net, part: Callable) -> None:
    with trained(model):
        loss_of(model).backward(inputs=[part(model.blocks[1])])


class Words(nn.Module):
    """A layer with an embedding of its own."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(16, WIDTH, sparse=sparse)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.words(WORDS)


@refuses(RuntimeError, r"words\.weight has a sparse gradient: .*sparse=False", ours=True, own=False)
def sparse_gradient_in_a_layer(model: Net, ours: bool) -> None:
    model.blocks[1] = Words()
    if ours:
        with trained(model):
            loss_of(model).backward()
    else:
        with stream_layers(model, model.blocks, "cpu"):
            loss_of(model).backward()


@refuses(RuntimeError, r"a parameter has a sparse gradient: .*sparse=False")
def sparse_gradient_outside_of_layers(model: Net) -> None:
    model.embedding = nn.Embedding(16, WIDTH, sparse=True)
    with trained(model) as (_, optimizer):
        loss_of(model).backward()
        optimizer.step()


# Who runs it


def gradient_by_func(model: Net) -> None:
    weights = dict(model.named_parameters())
    torch.func.grad(lambda w: functional_call(model, w, WORDS).sum())(weights)


def over_a_batch(model: Net) -> None:
    torch.func.vmap(model)(WORDS)


def by_jacobian(model: Net) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        for block in model.blocks:
            x = block(x)
        return x

    torch.func.jacrev(run)(torch.ones(2, WIDTH))


@refuses(
    RuntimeError,
    r"torch\.func does not go through a streamed layer",
    grad=gradient_by_func,
    vmap=over_a_batch,
    jacrev=by_jacobian,
)
def transform_of_func(model: Net, transform: Callable) -> None:
    with stream_layers(model, model.blocks, "cpu"):
        transform(model)


BUSY = "another thread runs this model: one thread at a time"


@refuses(RuntimeError, BUSY, evaluates=False, trains=True)
def two_threads(model: Net, with_gradients: bool) -> None:
    """The second comes while the first is in a layer."""
    inside = threading.Event()
    leave = threading.Event()

    class Slow(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            leave.wait(60)
            return super().forward(x)

    model.blocks[1] = Slow(WIDTH, WIDTH)

    def first() -> None:
        with torch.set_grad_enabled(with_gradients):
            model(WORDS)

    with stream_layers(model, model.blocks, "cpu"):
        thread = threading.Thread(target=first)
        thread.start()
        inside.wait(60)
        try:
            loss_of(model)
        finally:
            leave.set()
            thread.join()


@pytest.mark.parametrize(("program", "kind", "error", "words"), REFUSALS)
def test_a_program_is_refused(program, kind, error, words):
    model = Net()
    args = (model,) if kind == () else (model, kind)
    with pytest.raises(error, match=words):
        program(*args)


# A refusal leaves the model as it was


def last_shares_a_parameter(model: Net, monkeypatch) -> None:
    model.blocks[2].weight = model.blocks[0].weight


def last_is_scripted(model: Net, monkeypatch) -> None:
    model.blocks[2] = torch.jit.script(model.blocks[2])


def no_memory_is_left(model: Net, monkeypatch) -> None:
    from overlap_recipes.offload import host_layers

    class Locked(host_layers.PageLocked):
        made = 0

        def __init__(self, *args) -> None:
            Locked.made += 1
            if Locked.made > 4:
                raise RuntimeError("cannot lock")
            super().__init__(*args)

    monkeypatch.setattr(host_layers, "PageLocked", Locked)


def a_hook_is_refused(model: Net, monkeypatch) -> None:
    """The last thing but one that streaming does."""
    monkeypatch.setattr(model.blocks[2].weight, "register_hook", lambda *_: 1 / 0)


@pytest.mark.parametrize(
    "change", [last_shares_a_parameter, last_is_scripted, no_memory_is_left, a_hook_is_refused]
)
@pytest.mark.parametrize("budget", [0, 1000])
def test_a_refused_model_is_as_it_was(change, budget, monkeypatch):
    model = Net()
    with monkeypatch.context() as patch:
        change(model, patch)
        before = loss_of(model)
        refused = pytest.raises((ValueError, TypeError, RuntimeError, ZeroDivisionError))
        with refused, stream_layers(model, model.blocks, "cpu", budget=budget):
            pass
    assert torch.equal(loss_of(model), before)
    if change is not last_is_scripted:
        assert torch.equal(loss_of(deepcopy(model)), before)
    with stream_layers(model, model.blocks[1:2], "cpu"):
        assert torch.equal(loss_of(model), before)
        loss_of(model).backward()
