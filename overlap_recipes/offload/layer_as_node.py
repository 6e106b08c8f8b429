# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, overlap_recipes/offload/layer_as_node.py
"""Any layer as one node of autograd: run again in backward, differentiated there."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from .arguments import exchanged, handed_back, held_by, inputs_of, objects_in, tensors_in
from .layer_state import LayerState, version_of

# Private by name: ``torch._C._will_engine_execute_node``; ``_version`` of tensors.

MARK = "of_a_streamed_layer"  # an attribute of such a layer's forward


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


def marked(forward: partial) -> partial:
    """A forward that any copy of this library knows for one of a streamed layer."""
    setattr(forward, MARK, True)
    return forward


def is_streamed(layer: nn.Module) -> bool:
    """Whether this copy of the library, or another, streams a layer or a module of it."""
    return any(hasattr(vars(m).get("forward"), MARK) for m in layer.modules())


def leaves_of(ends: list, begins: list) -> list[torch.Tensor]:
    """Tensors at the end of a graph, but for what is behind its entrances."""
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


def pairs_of(ends: list, grads: tuple) -> list[tuple]:
    """Where a graph ends, beside the gradient that comes in there, where both are."""
    pairs = []
    for end, grad in zip(ends, grads, strict=True):
        if end is not None and grad is not None:
            pairs.append((end, grad))
    return pairs


class Run:
    """A layer's run in forward, and the same again in backward."""

    def __init__(self, owner, index: int) -> None:
        self.owner = owner
        self.index = index
        self.versions = None  # of what the first run has read
        self.sample = None  # of the weights that it has read
        self.state = None  # what the layer was before it

    def __call__(self, args: tuple, kwargs: dict) -> tuple:
        """The result, and the arguments as the layer has left its copy of them."""
        with named(self.owner.title(self.index)):
            return self.run(args, kwargs)

    def run(self, args: tuple, kwargs: dict) -> tuple:
        read = tensors_in((args, kwargs))
        read += self.owner.sources(self.index)
        versions = [version_of(x) for x in read]
        sample = self.owner.sample(self.index)
        args, kwargs = exchanged((args, kwargs), {})
        if self.state is None:
            self.versions = versions
            self.sample = sample
            result = self.first(args, kwargs)
        elif self.versions == versions and torch.equal(self.sample, sample):
            result = self.again(args, kwargs)
        else:
            raise RuntimeError(
                "a weight or an argument of a layer was changed between forward and backward: run "
                "forward again, or change it behind backward"
            )
        return result, (args, kwargs)

    def first(self, args: tuple, kwargs: dict):
        """The run in forward."""
        self.state = LayerState(self.owner.plain[self.index])
        objects = objects_in((args, kwargs))
        before = held_by(objects)
        result = self.owner.run(self.index, args, kwargs)
        if held_by(objects) != before:
            kinds = ", ".join(sorted({type(each).__name__ for each in objects}))
            raise TypeError(
                f"a layer changes an argument ({kinds}), and backward runs it again: pass "
                "use_cache=False if it is a cache, or decode under torch.no_grad"
            )
        self.state.forward_has_run()
        return result

    def again(self, args: tuple, kwargs: dict):
        """The same run, in backward."""
        with self.state.put_back():
            return self.owner.run(self.index, args, kwargs)


class Entrance(torch.autograd.Function):
    """Where a layer's graph begins: a node that holds no memory, unlike a leaf."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, door: torch.Tensor, title: str) -> torch.Tensor:
        ctx.title = title
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> None:
        return refuse(ctx.title)


class Through(torch.autograd.Function):
    """A layer as one node of the model's graph; ``call`` holds its arguments, then its result."""

    @staticmethod
    def forward(ctx, owner, index: int, call: dict, door, *inputs) -> tuple[torch.Tensor, ...]:
        ctx.owner = owner
        ctx.index = index
        ctx.door = get_gradient_edge(door).node  # runs if the weights are to get gradients
        ctx.set_materialize_grads(False)
        title = owner.title(index)
        with torch.enable_grad():
            entrances = [Entrance.apply(x.detach(), door, title) for x in inputs]
            entered = {id(x): entrance for x, entrance in zip(inputs, entrances, strict=True)}
            args, kwargs = exchanged((call["args"], call["kwargs"]), entered)
            with runs_to_its_end(owner.plain[index]):
                returned = checkpoint(Run(owner, index), args, kwargs, use_reentrant=False)
        result, left = returned
        # What the layer has put into lists and dicts leaves it as its result does.
        originals = {id(entrance): x for x, entrance in zip(inputs, entrances, strict=True)}
        left = exchanged(left, originals)
        given = {id(x) for x in tensors_in((call["args"], call["kwargs"]))}
        put = [y for y in tensors_in(left) if id(y) not in given]
        outputs = tensors_in(result) + put
        call["result"] = result
        call["left"] = left
        call["outputs"] = outputs

        ctx.begins = [get_gradient_edge(entrance) for entrance in entrances]
        ctx.ends = []  # of each output; None if no gradient can come to it
        for y in outputs:
            ctx.ends.append(get_gradient_edge(y) if y.requires_grad else None)
        weights = {id(view) for view in owner.views[index].values()}
        for leaf in leaves_of(ctx.ends, ctx.begins):
            if id(leaf) not in weights:
                raise RuntimeError(
                    "a layer reads a tensor that is trained, and is neither its parameter nor in "
                    "its arguments: pass it as an argument"
                )
        detached = tuple(y.detach() for y in outputs)
        constant = [y for y, end in zip(detached, ctx.ends, strict=True) if end is None]
        ctx.mark_non_differentiable(*constant)
        return detached

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads) -> tuple:
        if not hasattr(ctx, "ends"):
            raise RuntimeError("a layer's graph is used once: run forward again")
        pairs = pairs_of(ctx.ends, grads)
        begins = ctx.begins
        del ctx.ends, ctx.begins  # the graph inside is used once, and freed with its inputs
        trains = torch._C._will_engine_execute_node(ctx.door)  # not by torch.autograd.grad
        gradients = ctx.owner.backward(ctx.index, begins, pairs, trains)
        return None, None, None, None, *gradients


def runs_to_its_end(plain: "Plain"):
    """In the block, a layer is checkpointed so that backward may leave off early, but for RReLU.

    That would keep noise which its kernel has not written yet (pytorch#193671).
    """
    has_noise = any(isinstance(module, nn.RReLU) for module in plain.modules())
    return set_checkpoint_early_stop(not has_noise)


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


def as_node(owner, index: int, args: tuple, kwargs: dict):
    """Run a layer so that backward runs it again and is ``owner``'s.

    Args:
        owner: its ``run(index, args, kwargs)`` computes the layer; its ``backward(index, begins,
            pairs, trains)`` gets where the inputs that require gradients enter the layer's graph,
            where its outputs leave it with their gradients, and whether the weights get theirs; it
            returns the gradients of the inputs. ``plain[index]`` is the layer, ``views[index]``
            are the weights that ``run`` uses, ``sources(index)`` what they are made of, of which
            ``sample(index)`` has a few elements: it must not change before backward.
            ``title(index)`` is the layer's in errors.

    Raises:
        TypeError: tensors come or leave in other containers than tuples, lists and dicts.
        RuntimeError: here or in backward: gradients would be lost, or those of something else.
    """
    call = {"args": args, "kwargs": kwargs}
    inputs = inputs_of((args, kwargs))
    outputs = Through.apply(owner, index, call, torch.empty(0, requires_grad=True), *inputs)
    if not outputs:
        raise TypeError("a layer must return tensors, in tuples, lists or dicts if there are more")
    outer = {}  # by the ``id`` of what the layer has returned, the model's tensor
    for inner, output in zip(call["outputs"], outputs, strict=True):
        outer[id(inner)] = output
    handed_back((args, kwargs), exchanged(call["left"], outer))
    return exchanged(call["result"], outer)
