"""What a streamed model cannot do as the resident one is refused: a program and its message."""

import threading
from collections.abc import Callable
from contextlib import contextmanager
from copy import deepcopy
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor
from torch.func import functional_call
from wrapped_tensors import Wrapper

from overlap_recipes.offload import HostAdamW, resident_bytes, stream_layers

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


@refuses(ValueError, r"\w+ is on the meta device: load or initialise the model first")
def layer_on_meta(model: Net) -> None:
    model.blocks[2].to("meta")
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
    "layer 1 is a .*, which has no forward: give the modules that it holds",
    list=lambda block: nn.ModuleList([block]),
    dict=lambda block: nn.ModuleDict({"a": block}),
)
def layer_without_a_forward(model: Net, around: Callable) -> None:
    model.blocks[1] = around(model.blocks[1])
    streams(model)


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


@refuses(RuntimeError, "gradients in .*float32 are for HostAdamW: build it before backward")
def gradient_dtype_without_our_optimizer(model: Net) -> None:
    model.bfloat16()
    with stream_layers(model, model.blocks, "cpu", gradient_dtype=torch.float32):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of(model).backward()
        optimizer.step()


def scaled(gradient: torch.Tensor) -> None:
    gradient.data.mul_(0.5)


def scaled_by_numpy(gradient: torch.Tensor) -> None:
    array = gradient.numpy()
    array *= 0.5


CHANGES = {"scaled": scaled, "numpy": scaled_by_numpy}
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


def step(model: Net, optimizer: HostAdamW) -> None:
    optimizer.step()


def another_backward(model: Net, optimizer: HostAdamW) -> None:
    loss_of(model).backward()


@refuses(
    RuntimeError,
    "exchanged: change it in place",
    gone_at_step=(None, step),
    another_at_backward=(torch.ones, another_backward),
)
def gradient_exchanged(model: Net, how: tuple) -> None:
    make, then = how
    with trained(model) as (_, optimizer):
        loss_of(model).backward()
        weight = model.blocks[2].weight
        weight.grad = make(weight.shape) if make else None
        then(model, optimizer)


@refuses(
    RuntimeError,
    r"layer \d \(Linear\) got gradients outside of its forward.*change it in place",
    at_step=step,
    at_backward=another_backward,
)
def gradients_set_by_hand(model: Net, then: Callable) -> None:
    with trained(model) as (_, optimizer):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        then(model, optimizer)


class Called(nn.Module):
    """A layer of which a model calls the parts alone."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x)


@refuses(RuntimeError, r"layer 1 \(Called\) got gradients outside of its forward \(its parts")
def parts_of_a_layer_called(model: Net) -> None:
    model.blocks[1] = Called()
    model.head = nn.Sequential(model.head)
    with trained(model) as (_, optimizer):
        model.blocks[1].part(model.embedding(WORDS)).sum().backward()
        optimizer.step()


@refuses(RuntimeError, "run it outside")
def step_after_no_sync_alone(model: Net) -> None:
    with trained(model) as (_, optimizer):
        loss_of(model).backward()
        with optimizer.no_sync():
            loss_of(model).backward()
        optimizer.step()


@refuses(RuntimeError, "run forward again")
def second_backward_of_a_graph(model: Net) -> None:
    with stream_layers(model, model.blocks, "cpu"):
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        loss.backward()


@refuses(RuntimeError, "once_differentiable")
def gradients_of_gradients(model: Net) -> None:
    """They were taken for constants: a penalty had no effect."""
    with stream_layers(model, model.blocks, "cpu"):
        x = model.embedding(WORDS).detach().requires_grad_()
        y = x
        for block in model.blocks:
            y = block(y).tanh()
        gradient = torch.autograd.grad(y.sum(), x, create_graph=True)[0]
        (loss_of(model) + gradient.square().sum()).backward()


@refuses(RuntimeError, "a layer must return", trained=True, frozen=False)
def loss_with_what_a_hook_took_out(model: Net, is_trained: bool) -> None:
    """Its gradients went nowhere."""
    kept = []
    model.embedding.requires_grad_(is_trained)
    model.blocks[1] = nn.Sequential(model.blocks[1], nn.Tanh())
    with stream_layers(model, model.blocks, "cpu"):
        model.blocks[1][0].register_forward_hook(lambda module, args, y: kept.append(y))
        loss_of(model)
        kept[0].square().mean().backward()


MOVED = "its memory, or what is trained, has changed"


@refuses(
    RuntimeError,
    MOVED,
    cast=lambda block: block.bfloat16(),
    assigned=lambda block: block.load_state_dict(deepcopy(block.state_dict()), assign=True),
    added=lambda block: block.register_parameter("scale", nn.Parameter(torch.ones(()))),
    frozen=lambda block: block.weight.requires_grad_(False),
)
def weights_in_other_memory(model: Net, change: Callable) -> None:
    """Trained on, they would be the old ones."""
    with trained(model):
        change(model.blocks[2])
        loss_of(model)


@refuses(RuntimeError, MOVED)
def weight_released_after_the_optimizer_was_made(model: Net) -> None:
    model.blocks[1].weight.requires_grad_(False)
    with trained(model):
        model.blocks[1].weight.requires_grad_(True)
        loss_of(model)


def a_load(model: Net, optimizer: HostAdamW) -> None:
    model.blocks[1].load_state_dict(model.blocks[1].state_dict())


def a_step(model: Net, optimizer: HostAdamW) -> None:
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()


@refuses(RuntimeError, "changed between forward and backward", load=a_load, step=a_step)
def weights_changed_before_backward(model: Net, change: Callable) -> None:
    """A graph that was kept got gradients of two sets of weights."""
    model.bfloat16()
    model.embedding.requires_grad_(False)
    model.head.requires_grad_(False)
    with trained(model) as (_, optimizer):
        kept = loss_of(model)
        change(model, optimizer)
        kept.backward()


@refuses(RuntimeError, "hooks do not run here", before=True, after=False)
def hooks_of_parameters(model: Net, before: bool) -> None:
    weight = model.blocks[1].weight
    with stream_layers(model, model.blocks, "cpu"):
        add = weight.register_hook if before else weight.register_post_accumulate_grad_hook
        add(lambda tensor: None)
        loss_of(model)


@refuses(ValueError, r"blocks\.1\.weight and .*copied are two parameters in", layer=0, head=None)
def parameters_that_share_memory(model: Net, number: int | None) -> None:
    """They were apart, and trained apart, in silence."""
    other = model.head if number is None else model.blocks[number]
    other.copied = nn.Parameter(model.blocks[1].weight.data[3:])
    if number == 0:
        model.blocks[0], model.blocks[2] = model.blocks[2], model.blocks[0]
    streams(model)


@refuses(ValueError, "share a parameter", with_the_head=False, with_a_resident_layer=True)
def parameter_shared_with_what_is_not_streamed(model: Net, is_layer: bool) -> None:
    """It lost the other module's gradient."""
    other = model.blocks[0] if is_layer else model.head
    other.weight = model.blocks[1].weight
    budget = resident_bytes(model.blocks[0]) if is_layer else 0
    with stream_layers(model, model.blocks, "cpu", budget=budget):
        pass


@refuses(ValueError, r"layer 2 shares \['weight'\] with a layer before it: keep")
def parameter_shared_by_layers(model: Net) -> None:
    model.blocks[2].weight = model.blocks[0].weight
    streams(model)


@refuses(ValueError, "layer 0 is streamed already", streamed=0, resident=10**6)
def layers_that_are_streamed_already(model: Net, budget: int) -> None:
    """They were streamed twice: updates went to memory that nobody read."""
    with stream_layers(model, model.blocks, "cpu", budget=budget):
        streams(model)


@refuses(TypeError, r"state_dict\(\)")
def copy_of_a_streamed_model(model: Net) -> None:
    """It ran the layers that it was copied from: an average of weights was never evaluated."""
    with stream_layers(model, model.blocks, "cpu"):
        torch.optim.swa_utils.AveragedModel(model)


@refuses(ValueError, "drop max_norm")
def norm_of_what_is_updated_in_backward(model: Net) -> None:
    with trained(model, max_norm=1.0, in_backward=True):
        pass


@refuses(ValueError, "all parameters that are trained")
def optimizer_of_the_head(model: Net) -> None:
    with stream_layers(model, model.blocks, "cpu") as streamed:
        HostAdamW(model.head.parameters(), streamed)


@refuses(ValueError, "make another optimizer")
def group_that_comes_later(model: Net) -> None:
    model.head.requires_grad_(False)
    with stream_layers(model, model.blocks, "cpu") as streamed:
        there = [*model.embedding.parameters(), *model.blocks.parameters()]
        with HostAdamW(there, streamed) as optimizer:
            optimizer.add_param_group({"params": list(model.head.parameters())})


@refuses(ValueError, "has an optimizer: close it")
def two_optimizers(model: Net) -> None:
    """The second made masters of weights that the first was about to change."""
    with trained(model) as (streamed, _):
        HostAdamW(model.parameters(), streamed)


@refuses(ValueError, r"computes in float32.* torch\.float64")
def parameters_that_float32_does_not_hold(model: Net) -> None:
    with trained(model.double()):
        pass


@refuses(
    ValueError,
    "no setting .*amsgrad|no setting .*learning_rate",
    amsgrad={"amsgrad": True},
    unknown={"learning_rate": 1.0},
)
def setting_that_this_adamw_has_not(model: Net, setting: dict) -> None:
    with trained(model, **setting):
        pass


@refuses(RuntimeError, r"save after step\(\)")
def state_between_backward_and_step(model: Net) -> None:
    """It held layers of this step beside an embedding of the last one."""
    with trained(model, in_backward=True) as (_, optimizer):
        loss_of(model).backward()
        optimizer.state_dict()


@refuses(TypeError, "a parameter is Wrapper: this AdamW updates plain, dense weights")
def head_of_another_class(model: Net) -> None:
    model.head = nn.Linear(WIDTH, WIDTH, bias=False)
    model.head.weight = nn.Parameter(Wrapper(model.head.weight.detach()))
    with trained(model):
        pass


class Named(NamedTuple):
    x: torch.Tensor


class Attributes:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Returning(nn.Linear):
    def __init__(self, kind: Callable) -> None:
        super().__init__(WIDTH, WIDTH)
        self.kind = kind

    def forward(self, x: torch.Tensor):
        return self.kind(super().forward(x))


def output_of_transformers(x: torch.Tensor):
    return pytest.importorskip("transformers").utils.ModelOutput(x=x)


@refuses(TypeError, "layer", tuple=Named, output=output_of_transformers, object=Attributes)
def result_that_is_no_plain_nest(model: Net, kind: Callable) -> None:
    """Nothing of them was trained: gradients stayed on the device."""
    model.blocks[0] = Returning(kind)
    with stream_layers(model, model.blocks, "cpu"):
        model.blocks[0](torch.ones(2, WIDTH))


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * scale


@refuses(RuntimeError, "changed between forward and backward")
def argument_changed_before_backward(model: Net) -> None:
    """Layers ran again with what it was then."""
    model.blocks[0] = Scaled(WIDTH, WIDTH)
    scale = torch.ones(WIDTH)
    with stream_layers(model, model.blocks, "cpu"):
        loss = model.blocks[0](torch.ones(2, WIDTH), scale).sum()
        scale.mul_(2)
        loss.backward()


class Reading(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.by[0]


@refuses(RuntimeError, "pass it as an argument")
def trained_tensor_that_is_no_argument(model: Net) -> None:
    """It got no gradient."""
    model.blocks[1] = Reading(WIDTH, WIDTH)
    model.blocks[1].by = [2 * model.head.weight[0]]
    with stream_layers(model, model.blocks, "cpu"):
        loss_of(model)


class Remembering:
    """A cache of another kind than transformers'."""

    def __init__(self) -> None:
        self.keys = {}


class Remembered(nn.Linear):
    def forward(self, x: torch.Tensor, *, memory: Remembering) -> torch.Tensor:
        y = super().forward(x)
        memory.keys[id(self)] = y.detach()
        return y


@refuses(TypeError, r"\(Remembering\).*use_cache=False.*no_grad", streamed=0, resident=10**6)
def object_that_a_layer_changes(model: Net, budget: int) -> None:
    """Both runs changed it."""
    model.blocks[0] = Remembered(WIDTH, WIDTH)
    memory = Remembering()
    with stream_layers(model, model.blocks, "cpu", budget=budget):
        with torch.no_grad():
            model.blocks[0](torch.ones(2, WIDTH), memory=memory)
        assert list(memory.keys) == [id(model.blocks[0])]
        model.blocks[0](torch.ones(2, WIDTH), memory=memory)


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


def last_shares_a_parameter(model: Net, monkeypatch) -> None:
    model.blocks[2].weight = model.blocks[0].weight


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


@pytest.mark.parametrize("change", [last_shares_a_parameter, no_memory_is_left])
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
    assert torch.equal(loss_of(deepcopy(model)), before)
    with stream_layers(model, model.blocks[1:2], "cpu"):
        assert torch.equal(loss_of(model), before)
        loss_of(model).backward()
