# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/offload/layer_as_node.py
"""Any layer as one node of autograd: run again in backward, differentiated there."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import copy_context
from functools import partial
from typing import Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from .arguments import (
    exchanged,
    generators_in,
    handed_back,
    held_by,
    inputs_of,
    objects_in,
    tensors_in,
)
from .layer_state import LayerState, version_of

# Private by name: ``_will_engine_execute_node`` and ``_are_functorch_transforms_active`` of
# ``torch._C``; ``_version`` and ``_backward_hooks`` of tensors.

_MARK = "of_a_streamed_layer"  # an attribute of such a layer's forward
_FEW = 1024  # elements of a result that are compared between a layer's first two runs
_MOST = 2**-5  # by which these may differ, of the largest; the order of sums changes far less


def refuse(title: str, *_) -> None:
    raise RuntimeError(
        f"backward came into {title} past its result: what a loss is computed with, a layer must "
        "return (no hook may keep it). Detach what is only looked at; with transformers, pass "
        "output_router_logits=False and output_attentions=False, or keep such layers out"
    )


@contextmanager
def named(title: str) -> Iterator[None]:
    """Errors in the block say in which layer they were."""
    try:
        yield
    except Exception as error:
        note = f"in {title} of a streamed model"
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise


@contextmanager
def _naming_changed_inputs() -> Iterator[None]:
    """Where autograd refuses that a layer changes its input in place, say so."""
    try:
        yield
    except RuntimeError as error:
        if f"of {_Entrance.__name__} is a view" not in str(error):
            raise
        raise RuntimeError(
            "a layer changes an argument in place, and backward runs it again: have it change a "
            "copy, x = x.clone()"
        ) from error


def marked(forward: partial) -> partial:
    """A forward that any copy of this library knows for one of a streamed layer."""
    setattr(forward, _MARK, True)
    return forward


def is_streamed(layer: nn.Module) -> bool:
    """Whether this copy of the library, or another, streams a layer or a module of it."""
    return any(hasattr(vars(m).get("forward"), _MARK) for m in layer.modules())


def refuse_func() -> None:
    """Refuse a transform of ``torch.func``, which takes a node of autograd apart."""
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "torch.func does not go through a streamed layer: use backward(), or keep such layers "
            "out"
        )


def _leaves_of(ends: list, begins: list) -> list[torch.Tensor]:
    """Tensors at the end of a graph, but for what lies past its entrances."""
    nodes = [end.node for end in ends if end is not None]
    seen = {begin.node for begin in begins}
    leaves = []
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        for before, _ in node.next_functions:
            if before is not None:
                nodes.append(before)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
    return leaves


def _refuse_other_leaves(views: dict[str, torch.Tensor], ends: list, begins: list) -> None:
    """Refuse a layer whose graph has gradients for more than its inputs and ``views``, its weights.

    Raises:
        RuntimeError: those would be lost.
    """
    weights = {id(view) for view in views.values()}
    for leaf in _leaves_of(ends, begins):
        if id(leaf) not in weights:
            raise RuntimeError(
                "a layer reads a tensor that is trained, and is neither its parameter nor in "
                "its arguments: pass it as an argument; one that forward makes needs no "
                "requires_grad_()"
            )


def _put_into(left: tuple, call: dict) -> list[torch.Tensor]:
    """What a layer has put into lists and dicts among its arguments: it leaves it like a result."""
    given = {id(x) for x in tensors_in((call["args"], call["kwargs"]))}
    return [y for y in tensors_in(left) if id(y) not in given]


def _ends_of(outputs: list[torch.Tensor]) -> list[GradientEdge | None]:
    """Where a layer's graph ends, by output; None if no gradient can come to it."""
    ends = []
    for y in outputs:
        end = None
        if y.requires_grad:
            end = get_gradient_edge(y)
        ends.append(end)
    return ends


def _pairs_of(ends: list, grads: tuple) -> list[tuple]:
    """Where a graph ends, with the gradient that comes in there, where both are."""
    pairs = []
    for end, grad in zip(ends, grads, strict=True):
        if end is not None and grad is not None:
            pairs.append((end, grad))
    return pairs


def _few_of(result) -> list[torch.Tensor]:
    """Some elements of each tensor of real numbers in a result, as they are now."""
    found = []
    for y in tensors_in(result):
        if y.is_floating_point() and y.layout is torch.strided and y.numel():
            flat = y.detach().flatten()
            found.append(flat[:: -(-flat.numel() // _FEW)].clone())
    return found


def _are_alike(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Whether two runs gave the same, but for the order of sums; waits for the device."""
    if [x.shape for x in one] != [y.shape for y in other]:
        return False
    for x, y in zip(one, other, strict=True):
        x = x.float().nan_to_num()
        y = y.float().nan_to_num()
        if (x - y).abs().max() > _MOST * x.abs().max():
            return False
    return True


class _Owner(Protocol):
    """What ``as_node`` asks of whoever has the layers; ``index`` is the number of one."""

    plain: list["Plain"]
    """The layers as they are without us."""
    views: list[dict[str, torch.Tensor]]
    """By layer the weights that ``run`` uses."""
    alike: set[tuple[int, bool]]
    """Layers, by their mode, whose second run has been compared with the first."""

    def title(self, index: int) -> str:
        """What the layer is called in errors."""

    def trained(self, index: int) -> list[nn.Parameter]:
        """Its parameters that ``backward`` gives gradients to."""

    def sources(self, index: int) -> list[torch.Tensor]:
        """What its weights are made of: must not change between forward and backward."""

    def sample(self, index: int) -> torch.Tensor:
        """A few elements of the sources: changes that PyTorch does not count are seen by them."""

    def run(self, index: int, args: tuple, kwargs: dict) -> object:
        """Compute the layer."""

    def is_differentiated(self, index: int) -> bool:
        """Whether its backward runs now, and so the weights are there for a second run."""

    def backward(
        self, index: int, begins: list[GradientEdge], pairs: list[tuple], trains: bool
    ) -> list[torch.Tensor | None]:
        """Run the layer's own backward; return the gradients of its inputs.

        Args:
            begins: where the inputs that require gradients enter the layer's graph.
            pairs: where its outputs leave it, with their gradients.
            trains: whether its parameters get gradients, too.
        """


class Run:
    """A layer's run in forward, and the same again in backward."""

    def __init__(self, owner: _Owner, index: int) -> None:
        self.owner = owner
        self.index = index
        self.trial = trial_of(owner, index)
        self.versions = None  # of what the first run has read
        self.sample = None  # of the weights that it has read
        self.state = None  # what the layer was before it
        self.context = None  # Python's context variables in it
        self.few = None  # of its result, unless a run in this mode has been compared

    def __call__(self, args: tuple, kwargs: dict) -> tuple:
        """The result, and the arguments as the layer has left its copy of them."""
        with named(self.owner.title(self.index)):
            return self.run(args, kwargs)

    def run(self, args: tuple, kwargs: dict) -> tuple:
        read = tensors_in((args, kwargs))
        read += self.owner.sources(self.index)
        versions = [version_of(x) for x in read]
        sample = self.owner.sample(self.index)
        args, kwargs = exchanged((args, kwargs), {})  # its own lists and dicts, the same tensors
        is_first = self.state is None
        if is_first:
            self.versions = versions
            self.sample = sample
            with _naming_changed_inputs():
                result = self.first(args, kwargs)
            return result, (args, kwargs)
        is_changed = self.versions != versions or not torch.equal(self.sample, sample)
        if is_changed:
            raise RuntimeError(
                "a weight or an argument of a layer was changed between forward and backward: run "
                "forward again, or change it after backward"
            )
        result = self.again(args, kwargs)
        return result, (args, kwargs)

    def first(self, args: tuple, kwargs: dict):
        """The run in forward."""
        objects = objects_in((args, kwargs))
        generators = generators_in((args, kwargs))
        self.state = LayerState(self.owner.plain[self.index], generators, objects)
        self.context = copy_context()
        before = held_by(objects)
        result = self.owner.run(self.index, args, kwargs)
        if held_by(objects) != before:
            kinds = ", ".join(sorted({type(each).__name__ for each in objects}))
            raise TypeError(
                f"a layer changes an argument ({kinds}), and backward runs it again: pass "
                "use_cache=False if it is a cache, or decode under torch.no_grad"
            )
        self.state.forward_has_run()
        if self.trial not in self.owner.alike:
            self.few = _few_of(result)
        return result

    def again(self, args: tuple, kwargs: dict):
        """The same run, in backward."""
        # A hook that the layer gives its input is given to another tensor, not once more to that.
        others = {id(x): _Alias.apply(x) for x in inputs_of((args, kwargs))}
        args, kwargs = exchanged((args, kwargs), others)
        with self.state.put_back():
            result = self.context.run(self.owner.run, self.index, args, kwargs)
        if self.few is not None and self.owner.is_differentiated(self.index):
            self.compare(result)
        return result

    def compare(self, result) -> None:
        """Raise if the second run gave something else: what it gives to backward is wrong then."""
        if not _are_alike(self.few, _few_of(result)):
            raise RuntimeError(
                "a layer gave another result when backward ran it again: it reads what has "
                "changed since (a global, another object's attribute, a tensor that PyTorch does "
                "not watch), or random numbers of a generator that is neither PyTorch's own, nor "
                "in its arguments, nor an attribute of it. Pass it as an argument, or make it an "
                "attribute of the layer"
            )
        self.owner.alike.add(self.trial)


class _Entrance(torch.autograd.Function):
    """Where a layer's graph begins: a node that holds no memory, unlike a leaf."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, door: torch.Tensor, title: str) -> torch.Tensor:
        ctx.title = title
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> None:
        return refuse(ctx.title)


class _Alias(torch.autograd.Function):
    """Another tensor of the same numbers; it saves nothing, which ``checkpoint`` would count."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class _Through(torch.autograd.Function):
    """A layer as one node of the model's graph; ``call`` holds its arguments, then its result.

    Its trained parameters are inputs, though they are not read: so autograd knows whether a
    backward goes to them. They come first, then the inputs that require gradients.
    """

    @staticmethod
    def forward(ctx, owner: _Owner, index: int, call: dict, *tensors) -> tuple[torch.Tensor, ...]:
        ctx.owner = owner
        ctx.index = index
        ctx.parameters = len(tensors) - call["inputs"]
        inputs = tensors[ctx.parameters :]
        ctx.set_materialize_grads(False)
        door = torch.empty(0, device="cpu", requires_grad=True)  # lets each entrance have a node
        title = owner.title(index)
        with torch.enable_grad():
            entrances = [_Entrance.apply(x.detach(), door, title) for x in inputs]
            entered = {}  # by the input's ``id``
            originals = {}  # by the entrance's ``id``
            for x, entrance in zip(inputs, entrances, strict=True):
                entered[id(x)] = entrance
                originals[id(entrance)] = x
            args, kwargs = exchanged((call["args"], call["kwargs"]), entered)
            with early_stop(owner, index):
                returned = checkpoint(Run(owner, index), args, kwargs, use_reentrant=False)
        result, left = returned
        hand_out_hooks(zip(inputs, entrances, strict=True))
        left = exchanged(left, originals)
        outputs = tensors_in(result) + _put_into(left, call)
        call["result"] = result
        call["left"] = left
        call["outputs"] = outputs

        ctx.begins = [get_gradient_edge(entrance) for entrance in entrances]
        ctx.ends = _ends_of(outputs)
        _refuse_other_leaves(owner.views[index], ctx.ends, ctx.begins)
        detached = tuple(y.detach() for y in outputs)
        constant = [y for y, end in zip(detached, ctx.ends, strict=True) if end is None]
        ctx.mark_non_differentiable(*constant)
        return detached

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads) -> tuple:
        if not hasattr(ctx, "ends"):
            raise RuntimeError("a layer's graph is used once: run forward again")
        pairs = _pairs_of(ctx.ends, grads)
        begins = ctx.begins
        del ctx.ends, ctx.begins  # the graph inside is used once, and freed with its inputs
        of_parameters = [node for node, _ in ctx.next_functions[: ctx.parameters]]
        trains = _is_trained_now(ctx.owner.title(ctx.index), of_parameters)
        gradients = ctx.owner.backward(ctx.index, begins, pairs, trains)
        return None, None, None, *[None] * ctx.parameters, *gradients


def _is_trained_now(title: str, nodes: list) -> bool:
    """Whether the backward that runs adds to the gradients of a layer's parameters.

    Args:
        nodes: what adds to them, in autograd's graph.

    Raises:
        RuntimeError: to a part of them; or ``torch.autograd.grad`` would return them.
    """
    try:
        runs = [torch._C._will_engine_execute_node(node) for node in nodes]
    except RuntimeError as error:
        if "autograd.grad" not in str(error):
            raise
        raise RuntimeError(
            "torch.autograd.grad gives no gradients of streamed weights: call backward(), and take "
            "parameter.grad"
        ) from error
    if any(runs) and not all(runs):
        raise RuntimeError(
            f"backward(inputs=...) names some weights of {title}: name all of a layer, or none"
        )
    return any(runs)


def trial_of(owner: _Owner, index: int) -> tuple[int, bool]:
    """A layer in a mode: what is looked at once for each."""
    return index, owner.plain[index].layer.training


def early_stop(owner: _Owner, index: int) -> AbstractContextManager:
    """For ``checkpoint`` in the block: whether a layer's second run may leave off early.

    It may where backward has all that it needs before the layer's end, but for two cases. The first
    run of all is compared with its second, which needs a result for that. And RReLU would keep
    noise which its kernel has not written yet (pytorch#193671).
    """
    has_been_compared = trial_of(owner, index) in owner.alike
    has_noise = any(isinstance(module, nn.RReLU) for module in owner.plain[index].modules())
    return set_checkpoint_early_stop(has_been_compared and not has_noise)


def hand_out_hooks(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Let inputs of a layer have the hooks that it gave to those that stand for them inside.

    They get all of a tensor's gradient then, what comes from elsewhere as well.
    """
    for x, inside in pairs:
        hooks = inside._backward_hooks or {}
        for hook in list(hooks.values()):
            x.register_hook(hook)
        hooks.clear()


class Plain(nn.Module):
    """A layer as it was: runs the forward that it had before ``layer.forward`` was exchanged."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.original = layer.forward

    def forward(self, *args, **kwargs):
        return self.original(*args, **kwargs)

    def give_back(self) -> None:
        """Let the layer have that forward again, its class's or its own."""
        vars(self.layer).pop("forward", None)
        if self.layer.forward != self.original:
            self.layer.forward = self.original


def as_node(owner: _Owner, index: int, args: tuple, kwargs: dict):
    """Run a layer so that backward runs it again and is ``owner``'s.

    Raises:
        TypeError: tensors come or leave in other containers than tuples, lists and dicts.
        RuntimeError: here or in backward: gradients would be lost, or those of something else; the
            layer's second run gave another result than its first.
    """
    inputs = inputs_of((args, kwargs))
    call = {"args": args, "kwargs": kwargs, "inputs": len(inputs)}
    outputs = _Through.apply(owner, index, call, *owner.trained(index), *inputs)
    if not outputs:
        raise TypeError("a layer must return tensors, in tuples, lists or dicts if there are more")
    outer = {}  # by the ``id`` of what the layer has returned, the model's tensor
    for inner, output in zip(call["outputs"], outputs, strict=True):
        outer[id(inner)] = output
    handed_back((args, kwargs), exchanged(call["left"], outer))
    return exchanged(call["result"], outer)
