# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/offload/first_step.py
"""Whether a streamed model computes what the resident one does: asked before the first step."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.func import functional_call

from ..ranks import own_result
from .follower import Follower
from .kept_things import Contents, fresh
from .layer_as_node import Plain, exchanged, tensors_in
from .layer_state import attributes_of, exchange, own_values
from .streamed_model import StreamedModel

# Private by name: ``_buffers`` of modules.


@dataclass
class Results:
    """What one run leaves, on the host; a parameter without a gradient is not in ``gradients``."""

    outputs: list[torch.Tensor]
    buffers: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]


@dataclass
class _Difference:
    """Where runs differ first, and how, in words."""

    place: str
    words: str


def check_first_step(streamed: StreamedModel, run: Callable[[], object]) -> bool:
    """Run a small batch streamed, and as the model is without us; all bits must be the same.

    Of a tensor that several layers get, such as an encoder's result, a streamed layer adds up its
    own gradients before they are added to the others': other last bits. So, where gradients differ,
    it runs the resident model again with sums in that order, and compares with that.

    Compares outputs, buffers and gradients. Weights, gradients, buffers and random numbers are then
    what they were. Nothing is updated, and nothing averaged over ranks. All ranks call it, before
    the first backward or after ``zero_grad()``.

    The resident run has all layers on the device. Where they do not fit, one layer's weights are
    there at a time; of the others it keeps what autograd saves, which a small batch bounds. The
    host needs room for the gradients twice more.

    Returns:
        Whether all bits are those of the model as it is; False where sums had to be in that order.

    Args:
        streamed: the model, from ``stream_layers``.
        run: runs the model's forward. It returns the loss, or a tuple, list or dict of tensors
            whose first is the loss: ``lambda: model(**batch)`` of a stock model with labels.

    Raises:
        AssertionError: something differs: what, and where first. Where two resident runs differ
            there as well, it says so.
        RuntimeError: there are gradients already.
        ValueError: ``run`` returns no loss.
        Exception: what ``run`` raised.

    All ranks raise the error of one, whose text says which rank that is.
    """

    def look() -> bool:
        _refuse_gradients(streamed)
        return _compare_runs(streamed, run)

    return own_result(look)


def _refuse_gradients(streamed: StreamedModel) -> None:
    for layer in range(len(streamed.layers)):
        streamed.forget_dropped_sum(layer)  # what ``zero_grad()`` has dropped does not count
    has_gradients = len(streamed.summed) > 0
    for parameter in streamed.model.parameters():
        if parameter.grad is not None:
            has_gradients = True
    if has_gradients:
        raise RuntimeError(
            "there are gradients already: check before the first backward, or drop them"
        )


def _compare_runs(streamed: StreamedModel, run: Callable[[], object]) -> bool:
    """Whether a streamed run has all bits of a resident one.

    Raises:
        AssertionError: it has not, whatever the order of sums.
    """
    with _unchanged(streamed), _without_optimizer(streamed):
        ours = _results_of(streamed, run)
    resident = _resident_results(streamed, run)
    if _first_difference(ours, resident) is None:
        return True
    in_our_order = _resident_results(streamed, run, layers_add_first=True)
    difference = _first_difference(ours, in_our_order)
    if difference is None:
        return False
    once_more = _resident_results(streamed, run, layers_add_first=True)
    by_chance = _first_difference(once_more, in_our_order)
    if by_chance is not None and by_chance.place == difference.place:
        raise AssertionError(
            f"{difference.words}; but two resident runs differ there as well: "
            "see torch.use_deterministic_algorithms"
        )
    raise AssertionError(
        f"{difference.words}: streamed, this model does not train as it does resident"
    )


# Runs


def _resident_results(
    streamed: StreamedModel, run: Callable[[], object], layers_add_first: bool = False
) -> Results:
    """Of a run with all layers on the device, or, if that has not the memory, of one at a time.

    ``layers_add_first``: with sums in the order in which a streamed model has them.
    """
    try:
        with _unchanged(streamed), all_on_device(streamed):
            return _results_with_sums(streamed, run, layers_add_first)
    except torch.OutOfMemoryError:
        pass  # not here: the error holds what the run had on the device
    with _unchanged(streamed), _one_on_device(streamed):
        return _results_with_sums(streamed, run, layers_add_first)


def _results_with_sums(
    streamed: StreamedModel, run: Callable[[], object], layers_add_first: bool
) -> Results:
    if not layers_add_first:
        return _results_of(streamed, run)
    with _layers_add_first(streamed):  # around the forwards that layers have now
        return _results_of(streamed, run)


def _results_of(streamed: StreamedModel, run: Callable[[], object]) -> Results:
    """Run forward and backward; the gradients are taken from the parameters."""
    with torch.enable_grad():
        outputs = tensors_in(run())
        if not outputs or outputs[0].numel() != 1 or not outputs[0].requires_grad:
            raise ValueError("let run return the loss, or the loss before other tensors")
        outputs[0].backward()
    streamed.wait()
    return Results(
        [output.detach().to("cpu", copy=True) for output in outputs],
        {name: buffer.to("cpu", copy=True) for name, buffer in streamed.model.named_buffers()},
        gradients_of(streamed),
    )


def gradients_of(streamed: StreamedModel) -> dict[str, torch.Tensor]:
    """By name, on the host; those of layers in the dtype of their sums."""
    sums = {}  # by parameter of a streamed layer: where the host adds up its gradients
    summed = set()  # parameters of whose gradients there is a sum
    for number, layer in enumerate(streamed.layers):
        for gradients in layer.gradients:
            for name, view in gradients.views.items():
                parameter = layer.trained[name]
                sums[parameter] = view
                if number in streamed.summed:
                    summed.add(parameter)
    found = {}
    for name, parameter in streamed.model.named_parameters():
        gradient = parameter.grad
        if parameter in summed:
            gradient = sums[parameter]
        if gradient is None:
            continue
        dtype = gradient.dtype
        if parameter in sums:  # of a resident run, too: so that both can be compared
            dtype = sums[parameter].dtype
        found[name] = gradient.detach().to("cpu", dtype, copy=True)
    return found


class _Comparison(Follower):
    """Compares gradients, whatever their dtype, and does nothing with them."""

    takes_sums = True


@contextmanager
def _without_optimizer(streamed: StreamedModel) -> Iterator[None]:
    """In the block, gradients are neither averaged nor used."""
    optimizer = streamed.follower
    streamed.follower = _Comparison()  # no update is due: ``unchanged`` has waited
    try:
        yield
    finally:
        streamed.follower = optimizer


def _plain_layers(streamed: StreamedModel) -> list[Plain]:
    """Of all layers: those that stay on the device, and those that are streamed."""
    return [*streamed.resident.plain, *streamed.plain]


@contextmanager
def _layers_add_first(streamed: StreamedModel) -> Iterator[None]:
    """In the block, each layer adds up what it has of a gradient: its tensors are its own views."""
    layers = [each.layer for each in _plain_layers(streamed)]
    forwards = [layer.forward for layer in layers]
    for layer, forward in zip(layers, forwards, strict=True):
        layer.forward = partial(_run_with_views, forward)
    try:
        yield
    finally:
        for layer, forward in zip(layers, forwards, strict=True):
            layer.forward = forward


def _run_with_views(forward: Callable, /, *args, **kwargs):
    """Run a layer on views of its tensors, each a tensor of its own in autograd's graph.

    Autograd adds up all gradients that reach one tensor before it goes on. So what a layer has of a
    gradient is added up at its view, and then added to the other layers' at the tensor.
    """
    views = {id(x): x.view_as(x) for x in tensors_in((args, kwargs)) if x.requires_grad}
    args, kwargs = exchanged((args, kwargs), views)
    return forward(*args, **kwargs)


@contextmanager
def _original_forwards(streamed: StreamedModel) -> Iterator[None]:
    """In the block, layers run the forward that they had before they were streamed."""
    plain = _plain_layers(streamed)
    ours = [each.layer.forward for each in plain]
    for each in plain:
        each.give_back()
    try:
        yield
    finally:
        for each, forward in zip(plain, ours, strict=True):
            each.layer.forward = forward


@contextmanager
def all_on_device(streamed: StreamedModel) -> Iterator[None]:
    """In the block, the model is as it was before it was streamed, all of it on the device."""
    parameters: list[torch.nn.Parameter] = []
    for layer in streamed.layers:
        parameters.extend(layer.module.parameters())
    on_host = [parameter.data for parameter in parameters]
    with _original_forwards(streamed):
        try:
            for parameter in parameters:
                parameter.data = parameter.data.to(streamed.device, copy=True)
            yield
        finally:
            for parameter, data in zip(parameters, on_host, strict=True):
                parameter.grad = None
                parameter.data = data


@contextmanager
def _one_on_device(streamed: StreamedModel) -> Iterator[None]:
    """In the block, each layer's weights are copied to the device where they are used."""
    with _original_forwards(streamed):
        for each in streamed.plain:
            runs = Plain(each.layer)
            each.layer.forward = partial(_run_with_copies, runs, streamed.device)
        yield


def _run_with_copies(plain: Plain, device: torch.device, /, *args, **kwargs):
    """Run a layer; of its weights' copies autograd keeps nothing, and copies them again.

    Autograd saves tensors for backward, copies of weights and views of these among them. In place
    of such a one, ``pack`` keeps the parameter and where in it the tensor lies; ``unpack`` copies
    the parameter to the device again, and takes the same place in that.
    """
    copies = {}
    copied_from = {}  # by the address of a copy's memory: the parameter
    for name, parameter in plain.layer.named_parameters():
        copy = parameter.to(device, copy=True)
        copies[f"layer.{name}"] = copy
        copied_from[copy.untyped_storage().data_ptr()] = parameter

    def pack(saved: torch.Tensor):
        parameter = copied_from.get(saved.untyped_storage().data_ptr())
        if parameter is None:
            return saved
        return parameter, saved.size(), saved.stride(), saved.storage_offset()

    def unpack(packed) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        parameter, *place = packed
        return parameter.detach().to(device, copy=True).as_strided(*place)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return functional_call(plain, copies, args, kwargs)


# What must stay as it was


@contextmanager
def _unchanged(streamed: StreamedModel) -> Iterator[None]:
    """After the block, what modules keep and random numbers are as before, without gradients."""
    streamed.wait()
    restore_modules = _kept_by_modules(streamed.model)
    restore_numbers = _random_numbers(streamed.device)
    try:
        yield
    finally:
        restore_modules()
        restore_numbers()
        _forget_run(streamed)


def _kept_by_modules(model: nn.Module) -> Callable[[], None]:
    """What lets modules keep what they keep now: buffers, attributes, and what these hold."""
    attributes_by_module = {}
    contents = []
    for module in model.modules():
        attributes = {name: fresh(value) for name, value in attributes_of(module).items()}
        attributes_by_module[module] = attributes
        values = own_values(attributes)
        values.append(attributes["_buffers"])
        contents.append(Contents(values))

    def restore() -> None:
        exchange(attributes_by_module)
        for each in contents:
            each.put_back()

    return restore


def _forget_run(streamed: StreamedModel) -> None:
    """Forget what a run has left in a streamed model: gradients, and what it was to compare."""
    streamed.wait()
    streamed.summed.clear()
    streamed.recorded.clear()
    # The loop may change what ``run`` leaves alone: its first runs are compared, too.
    streamed.alike.clear()
    streamed.resident.alike.clear()
    streamed.model.zero_grad()


def _random_numbers(device: torch.device) -> Callable[[], None]:
    """What sets generators to what they are now: torch's, Python's, and NumPy's if it is there."""
    setters = [partial(torch.set_rng_state, torch.get_rng_state())]
    setters.append(partial(random.setstate, random.getstate()))
    if device.type != "cpu":
        streams = torch.get_device_module(device)
        setters.append(partial(streams.set_rng_state, streams.get_rng_state()))
    if "numpy" in sys.modules:
        generator = sys.modules["numpy"].random
        setters.append(partial(generator.set_state, generator.get_state()))

    def restore() -> None:
        for setter in setters:
            setter()

    return restore


# Differences


def _first_difference(ours: Results, theirs: Results) -> _Difference | None:
    """Outputs, then buffers, then gradients, in the order of the model."""
    if len(ours.outputs) != len(theirs.outputs):
        counts = f"{len(ours.outputs)} outputs, resident {len(theirs.outputs)}"
        return _Difference("outputs", counts)
    for number, pair in enumerate(zip(ours.outputs, theirs.outputs, strict=True)):
        if not same_bits(*pair):
            return _Difference(f"output {number}", f"output {number} {_apart(*pair)}")
    for name in ours.buffers | theirs.buffers:
        pair = ours.buffers.get(name), theirs.buffers.get(name)
        if not same_bits(*pair):
            return _Difference(name, f"buffer {name} {_apart(*pair)}")
    for name in ours.gradients | theirs.gradients:
        pair = ours.gradients.get(name), theirs.gradients.get(name)
        if not same_gradients(*pair):
            return _Difference(name, f"the gradient of {name} {_apart(*pair)}")
    return None


def same_bits(x: torch.Tensor | None, y: torch.Tensor | None) -> bool:
    if x is None or y is None:
        return x is y
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    return torch.equal(_as_bytes(x), _as_bytes(y))


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def same_gradients(x: torch.Tensor | None, y: torch.Tensor | None) -> bool:
    """A parameter of a layer that a batch does not use has zeros streamed, and none resident."""
    if x is not None and y is not None:
        return same_bits(x, y)
    one = x if x is not None else y
    return one is None or not one.any()


def _apart(x: torch.Tensor | None, y: torch.Tensor | None) -> str:
    """How far ``x`` is from ``y``, in words."""
    if x is None or y is None:
        return "is there streamed alone" if y is None else "is there resident alone"
    if x.dtype != y.dtype or x.shape != y.shape:
        return f"is {x.dtype} of {tuple(x.shape)}, resident {y.dtype} of {tuple(y.shape)}"
    if not (x.is_floating_point() or x.is_complex()):
        return f"differs in {(x != y).sum().item()} of {x.numel()} elements"
    largest = (x - y).abs().max().item()
    return f"is off by up to {largest:.3g}"
