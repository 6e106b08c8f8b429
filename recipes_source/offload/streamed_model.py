"""
Stream a stock model: weights on the host, the model's own forward
==================================================================

One call moves the layers of a model that you did not write into host memory. Its own forward runs
on, with keyword arguments, masks, positions and a cache; so do ``loss.backward()``, ``generate()``,
``state_dict()``, ``eval()``. The device holds two layers at a time, and the gradients have every
bit of a run that keeps the whole model resident.
"""

# %%
# Imports and sizes
# -----------------
# ``host_layers.py`` has the flat page-locked buffer.

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import closing
from copy import deepcopy
from functools import partial

import torch
import torch.distributed as dist
from host_layers import HostBuffer, start_rank
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.func import functional_call
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

SLOTS = 2  # layers whose weights are on the device at a time
GRADIENT_SLOTS = 2  # one that compute writes, one that the copy to the host reads
MOMENTS = 12  # bytes a trained parameter: fp32 master and two moments of Adam
CACHES = ("past_key_values", "past_key_value", "layer_past")  # what layers call their cache

# %%
# Any arguments
# -------------


def tensors_in(tree) -> list[torch.Tensor]:
    """All tensors in nested tuples, lists and dicts."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else tree
    nested = isinstance(tree, (tuple, list, dict))
    return [tensor for value in values for tensor in tensors_in(value)] if nested else []


def exchanged(tree, others: dict[int, torch.Tensor]):
    """The same nest with tensors exchanged: ``others`` maps ``id(tensor)`` to what takes its place."""
    if type(tree) in (tuple, list):
        return type(tree)(exchanged(value, others) for value in tree)
    if type(tree) is dict:
        return {key: exchanged(value, others) for key, value in tree.items()}
    return others.get(id(tree), tree)


class Entrance(torch.autograd.Function):
    """Where a layer's graph begins: a node that holds no memory, unlike a leaf."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, door: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class Through(torch.autograd.Function):
    """A layer in the model's graph; its own graph is inside, and differentiated by ``backward``."""

    @staticmethod
    def forward(ctx, streamed, index: int, call: dict, door, *inputs) -> tuple[torch.Tensor, ...]:
        ctx.streamed, ctx.index = streamed, index
        ctx.set_materialize_grads(False)
        with torch.enable_grad():
            entered = {id(x): Entrance.apply(x.detach(), door) for x in inputs}
            args, kwargs = exchanged((call["args"], call["kwargs"]), entered)
            call["result"] = checkpoint(streamed.run, index, args, kwargs, use_reentrant=False)
        outputs = tensors_in(call["result"])
        ctx.begins = [get_gradient_edge(entered[id(x)]) for x in inputs]
        ctx.ends = [get_gradient_edge(y) if y.requires_grad else None for y in outputs]
        detached = tuple(y.detach() for y in outputs)
        ctx.mark_non_differentiable(*(d for d, e in zip(detached, ctx.ends, strict=True) if not e))
        return detached

    @staticmethod
    def backward(ctx, *grads) -> tuple:
        pairs = [(e, g) for e, g in zip(ctx.ends, grads, strict=True) if e and g is not None]
        begins = ctx.begins
        del ctx.ends, ctx.begins
        return None, None, None, None, *ctx.streamed.backward(ctx.index, begins, pairs)


class Plain(nn.Module):
    """A layer as it was: runs the forward that it had before ``layer.forward`` was exchanged."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.original = layer, layer.forward

    def forward(self, *args, **kwargs):
        return self.original(*args, **kwargs)


# %%
# A layer's memory
# ----------------


class HostLayer:
    """A layer's parameters and gradients in flat page-locked buffers, one for each dtype.

    ``weights`` begins with the buffers of what is trained, laid out as those of ``gradients``.
    """

    def __init__(self, layer: nn.Module, device: torch.device, gradient_dtype) -> None:
        self.plain, groups = Plain(layer), {}
        for name, parameter in self.plain.named_parameters():
            key = (not parameter.requires_grad, str(parameter.dtype))
            groups.setdefault(key, {})[name] = parameter
        self.parameters = {n: p for key in sorted(groups) for n, p in groups[key].items()}
        self.trained = {n: p for n, p in self.parameters.items() if p.requires_grad}
        self.weights, self.gradients = [], []
        for frozen, dtype in sorted(groups):
            like = groups[frozen, dtype]
            dtype = next(iter(like.values())).dtype
            self.weights.append(HostBuffer(like, dtype, device))
            if not frozen:
                self.gradients.append(HostBuffer(like, gradient_dtype or dtype, device))
        for buffer in self.weights:
            for name, view in buffer.views.items():
                self.parameters[name].data = view.copy_(self.parameters[name].data)

    def hand_out_gradients(self) -> None:
        """Make the gradient buffers what the parameters call ``grad``, where dtypes agree."""
        for buffer in self.gradients:
            for name, view in buffer.views.items():
                if view.dtype == self.trained[name].dtype:
                    self.trained[name].grad = view


def nbytes(buffers: list[HostBuffer]) -> int:
    return sum(buffer.flat.nbytes for buffer in buffers)


def resident_bytes(layer: nn.Module) -> int:
    """What a layer takes on the device, with its gradients and the state of an Adam in fp32."""
    trained = [p for p in layer.parameters() if p.requires_grad]
    return sum(p.nbytes for p in layer.parameters()) + sum(p.nbytes + MOMENTS * p.numel() for p in trained)


# %%
# The streamed model
# ------------------


class StreamedModel:
    """A model whose layers live in host memory; everything else of it moves to the device.

    Args:
        model: any module; its forward is not changed.
        layers: those of its submodules that run one after the other, in order.
        device: where it runs; if it has an index, it must be the current device.
        budget: bytes of device memory for layers that stay there, the lowest ones, each with its
            gradients and the state of Adam.
        slots: layers whose weights are on the device at a time.
        gradient_dtype: of the sums of gradients; that of the parameters if None.
    """

    def __init__(self, model, layers: Iterable, device, *, budget=0, slots=SLOTS, gradient_dtype=None):
        named = device.type != "cpu" and device.index is not None
        if named and device.index != torch.accelerator.current_device_index():
            raise ValueError(f"make {device} current: torch.accelerator.set_device_index")
        self.model, self.device, self.slots = model, device, slots
        self.streams = torch.get_device_module(device)
        self.h2d, self.d2h = self.streams.Stream(), self.streams.Stream()
        events = (defaultdict(self.streams.Event) for _ in range(5))
        self.ready, self.free, self.grad_ready, self.grad_free, self.sum_ready = events
        blocking = {} if device.type == "cpu" else {"blocking": True}  # a wait takes no core
        self.host_done = defaultdict(partial(self.streams.Event, **blocking))
        self.held, self.last, self.recorded, self.summed = {}, -1, set(), set()
        self.loads = self.stores = 0
        self.door = torch.empty(0, requires_grad=True)
        self.before_load: Callable[[int], None] = lambda layer: None
        self.after_gradients: Callable[[int], None] = lambda layer: None
        self.after_store: Callable[[int], None] = lambda layer: None
        self.before_host: Callable[[], None] = lambda: None
        self.resident, self.layers, self.hooks, self.optimizer = [], [], [], None
        streamed = list(layers)
        while streamed and resident_bytes(streamed[0]) <= budget:
            budget -= resident_bytes(streamed[0])
            self.resident.append(streamed.pop(0))
        self.take(streamed, gradient_dtype)
        for layer in self.resident:
            layer.forward = partial(self.recomputed, layer.forward)

    def take(self, streamed: list[nn.Module], gradient_dtype) -> None:
        known = {}
        for index, layer in enumerate(streamed):
            for name, parameter in layer.named_parameters():
                if known.setdefault(parameter, index) != index:
                    raise ValueError(f"layers {known[parameter]} and {index} share {name}")
        host = set(known)
        for module in self.model.modules():
            for parameter in module.parameters(recurse=False):
                if parameter not in host:
                    parameter.data = parameter.data.to(self.device)
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self.device))
        self.layers = [HostLayer(layer, self.device, gradient_dtype) for layer in streamed]
        self.weight_flats, self.views = self.in_slots([x.weights for x in self.layers], self.slots)
        self.gradient_flats, self.totals = self.in_slots(
            [x.gradients for x in self.layers], GRADIENT_SLOTS
        )
        for views, totals in zip(self.views, self.totals, strict=True):
            for name in totals:
                views[name].requires_grad_()
        self.h2d.wait_stream(self.streams.current_stream())
        for index, layer in enumerate(streamed):
            layer.forward = partial(self.call, index)
            self.hooks.append(layer.register_state_dict_pre_hook(lambda *_: self.wait()))
            self.hooks.append(layer.register_load_state_dict_pre_hook(lambda *_: self.wait()))
        self.hooks.append(register_optimizer_step_pre_hook(self.before_step))

    def in_slots(self, layers: list[list[HostBuffer]], count: int) -> tuple[list, list]:
        """For each layer flat device tensors like its buffers, and their parts; slots take turns."""
        size = max(nbytes(buffers) for buffers in layers)
        slots = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(count)]
        flats, views = [], []
        for index, buffers in enumerate(layers):
            at, mine = 0, []
            for buffer in buffers:
                part = slots[index % count][at : at + buffer.flat.nbytes]
                mine.append(part.view(buffer.flat.dtype))
                at += buffer.flat.nbytes
            flats.append(mine)
            parts = [b.views_of(flat) for b, flat in zip(buffers, mine, strict=True)]
            views.append({name: view for part in parts for name, view in part.items()})
        return flats, views

    # Weights to the device

    def load(self, layer: int) -> None:
        """Queue the copy of a layer's weights into its slot, unless it is there."""
        slot = layer % self.slots
        if self.held.get(slot) == layer:
            return
        self.before_load(layer)
        self.h2d.wait_event(self.free[slot])
        with self.streams.stream(self.h2d):
            for flat, host in zip(self.weight_flats[layer], self.layers[layer].weights, strict=True):
                flat.copy_(host.flat, non_blocking=True)
        self.ready[slot].record(self.h2d)
        self.held[slot] = layer
        self.loads += 1

    def await_weights(self, layer: int) -> None:
        self.load(layer)
        self.streams.current_stream().wait_event(self.ready[layer % self.slots])

    def release(self, layer: int) -> None:
        """Let the next load into this layer's slot begin when all queued so far has run."""
        self.free[layer % self.slots].record(self.streams.current_stream())

    # Forward

    def call(self, index: int, *args, **kwargs):
        """What ``layer.forward`` is now."""
        if index <= self.last:  # a new forward: the host may have changed the weights
            self.held.clear()
        self.last = index
        self.await_weights(index)
        inputs = [x for x in tensors_in((args, kwargs)) if x.requires_grad]
        if torch.is_grad_enabled() and (inputs or self.layers[index].trained):
            result = self.differentiable(index, args, self.without_cache(kwargs), inputs)
        else:
            with torch.no_grad():
                result = self.run(index, args, kwargs)
        self.release(index)
        for later in range(index + 1, min(index + self.slots + 1, len(self.layers))):
            self.load(later)
        return result

    def differentiable(self, index: int, args: tuple, kwargs: dict, inputs: list):
        call = {"args": args, "kwargs": kwargs}
        outputs = Through.apply(self, index, call, self.door, *inputs)
        self.recorded.add(index)
        inner = tensors_in(call["result"])
        return exchanged(call["result"], {id(x): y for x, y in zip(inner, outputs, strict=True)})

    def recomputed(self, forward: Callable, *args, **kwargs):
        """What the forward of a layer is that stays on the device."""
        if torch.is_grad_enabled():
            return checkpoint(forward, *args, use_reentrant=False, **self.without_cache(kwargs))
        return forward(*args, **kwargs)

    @staticmethod
    def without_cache(kwargs: dict) -> dict:
        """Backward runs the layer again, which would append to a cache a second time."""
        for cache in (kwargs[name] for name in CACHES if kwargs.get(name) is not None):
            if cache.get_seq_length():
                raise ValueError("a layer that is trained cannot continue a cache: use no_grad")
        uncached = {name: None for name in CACHES if name in kwargs}
        return kwargs | uncached | ({"use_cache": False} if "use_cache" in kwargs else {})

    def run(self, index: int, args: tuple, kwargs: dict):
        return functional_call(self.layers[index].plain, self.views[index], args, kwargs)

    # Backward, and gradients to the host

    def backward(self, index: int, begins: list, pairs: list) -> list[torch.Tensor | None]:
        """Run a layer again, send its gradients to the host; return those of its inputs."""
        if not pairs:
            return [None] * len(begins)
        self.await_weights(index)
        adds = self.load_sum(index)
        ends, grads = zip(*pairs, strict=True)
        names = list(self.totals[index])
        wanted = [self.views[index][name] for name in names] + begins
        found = torch.autograd.grad(ends, wanted, grads, allow_unused=True)
        self.recorded.discard(index)
        self.release(index)
        for earlier in range(index - 1, max(index - self.slots, 0) - 1, -1):
            if earlier in self.recorded:
                self.load(earlier)
        if names:
            self.write(index, dict(zip(names, found, strict=False)), adds)
            self.after_gradients(index)
            self.store(index)
            self.after_store(index)
        return found[len(names) :]

    def load_sum(self, index: int) -> bool:
        """Queue the copy of what earlier microbatches have summed; whether there is any."""
        layer, slot = self.layers[index], index % GRADIENT_SLOTS
        grads = [layer.trained[name].grad for b in layer.gradients for name in b.views]
        if index not in self.summed or all(g is None for g in grads) and self.hands_out(layer):
            return False
        self.h2d.wait_event(self.grad_free[slot])
        self.h2d.wait_event(self.host_done[index])
        with self.streams.stream(self.h2d):
            for flat, host in zip(self.gradient_flats[index], layer.gradients, strict=True):
                flat.copy_(host.flat, non_blocking=True)
        self.sum_ready[slot].record(self.h2d)
        return True

    @staticmethod
    def hands_out(layer: HostLayer) -> bool:
        return all(b.views[n].dtype == layer.trained[n].dtype for b in layer.gradients for n in b.views)

    def write(self, index: int, gradients: dict, adds: bool) -> None:
        """Write or add gradients to the layer's gradient slot."""
        slot = index % GRADIENT_SLOTS
        compute = self.streams.current_stream()
        compute.wait_event(self.sum_ready[slot] if adds else self.grad_free[slot])
        for name, total in self.totals[index].items():
            gradient = gradients[name]
            if gradient is None:
                gradient = torch.zeros_like(total)
            total.add_(gradient) if adds else total.copy_(gradient)

    def store(self, index: int) -> None:
        """Queue the copy of a layer's gradients to the host."""
        slot, layer = index % GRADIENT_SLOTS, self.layers[index]
        self.grad_ready[slot].record(self.streams.current_stream())
        self.d2h.wait_event(self.grad_ready[slot])
        with self.streams.stream(self.d2h):
            for flat, host in zip(self.gradient_flats[index], layer.gradients, strict=True):
                host.flat.copy_(flat, non_blocking=True)
        self.grad_free[slot].record(self.d2h)
        self.host_done[index].record(self.d2h)
        layer.hand_out_gradients()
        self.summed.add(index)
        self.stores += 1

    # The host's side

    def wait(self) -> None:
        """Wait until host memory holds all gradients, and no copy reads it any more."""
        self.before_host()
        for event in (*self.ready.values(), *self.host_done.values(), *self.sum_ready.values()):
            event.synchronize()

    def before_step(self, optimizer: torch.optim.Optimizer, *_) -> None:
        """Any optimizer's step waits for the gradients, unless it does so by itself, a layer at a time."""
        if optimizer is not self.optimizer:
            self.wait()

    def close(self) -> None:
        """Give the layers their forward back, wait for the device, unlock the host's memory."""
        for hook in self.hooks:
            hook.remove()
        for layer in self.resident:
            del layer.forward
        for layer in self.layers:
            del layer.plain.layer.forward
        self.streams.synchronize()
        for layer in self.layers:
            for buffer in layer.weights + layer.gradients:
                buffer.close()
