# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/offload/weight_streaming.py
"""Layers in host memory, loaded, computed and their gradients stored on three streams."""

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch.func import functional_call

from . import arguments
from . import layer_as_node as node
from .follower import Follower
from .host_layers import HostBuffer, Sample, move_to_host
from .layer_state import version_of

SLOTS = 2  # layers whose weights are on the device at a time
GRADIENT_SLOTS = 2  # one that compute writes, one that the copy to the host reads


class StreamedLayers:
    """Layers whose weights are on the device for their turn only.

    Args:
        layers, device, gradient_dtype: as for ``move_to_host``.
        slots: layers whose weights are on the device at a time.

    ``layers[i]`` is a ``HostLayer``; ``views[i]`` are the weights of layer i in its slot on the
    device, ``totals[i]`` its gradients.
    """

    resident_below = 0  # layers below the first of these, which stay on the device

    def __init__(self, layers: Iterable, device: torch.device, slots=SLOTS, gradient_dtype=None):
        self.plain = []  # layers as they are without us
        self.layers = []
        self.used = threading.RLock()
        if slots < 1:
            raise ValueError(f"slots must be 1 or more, not {slots}")
        self.layers = move_to_host(layers, device, gradient_dtype)
        self.device = device
        self.slots = slots
        self.follower = Follower()  # an optimizer on the host, if there is one
        self.loads = 0
        self.stores = 0

        self.last = -1  # the layer that ran last
        self.differentiated = -1  # the layer whose backward runs
        self.held = {}  # by slot: the layer that it was loaded with last
        self.recorded = set()  # layers that wait for their backward
        self.samples = {}  # by layer: of its weights
        self.loaded_from = {}  # by layer: what its weights on the host were then
        self.tried = set()  # layers, by their mode, whose first run left their weights alone
        self.alike = set()  # layers, by their mode, whose second run has given what the first had

        self.streams = torch.get_device_module(device)
        self.h2d = self.streams.Stream()
        self.d2h = self.streams.Stream()
        # Events by slot:
        self.ready = defaultdict(self.streams.Event)  # weights are loaded
        self.free = defaultdict(self.streams.Event)  # weights have been used
        self.grad_ready = defaultdict(self.streams.Event)  # gradients are written
        self.grad_free = defaultdict(self.streams.Event)  # gradients are stored
        self.sum_ready = defaultdict(self.streams.Event)  # a sum of gradients is loaded
        # Events by layer: its gradients are on the host.
        if device.type == "cpu":
            self.host_done = defaultdict(self.streams.Event)
        else:  # a wait takes no core
            self.host_done = defaultdict(partial(self.streams.Event, blocking=True))

        weights = [layer.weights for layer in self.layers]
        self.flats, self.views = self.in_slots(weights, slots)
        gradients = [layer.gradients for layer in self.layers]
        self.gradient_flats, self.totals = self.in_slots(gradients, GRADIENT_SLOTS)
        self.h2d.wait_stream(self.streams.current_stream())
        self.plain = [node.Plain(layer.module) for layer in self.layers]
        # By layer, as a layer itself has its views in their place while it runs.
        self.parameters = [list(plain.parameters()) for plain in self.plain]
        for index, layer in enumerate(self.layers):
            refuse = partial(node.refuse, self.title(index))
            for name in self.totals[index]:
                view = self.views[index][name].requires_grad_()
                view.register_post_accumulate_grad_hook(refuse)
            # ``self`` is among the arguments, so that a copy of the layer meets ``__deepcopy__``.
            call = partial(torch.compiler.disable(type(self).call), self, index)
            layer.module.forward = node.marked(call)

    def __deepcopy__(self, memo: dict):
        raise TypeError("a copy of a streamed model would run this one: copy its state_dict()")

    def __reduce_ex__(self, protocol: int):
        raise TypeError("a streamed model is not pickled or copied: save its state_dict()")

    def title(self, index: int) -> str:
        """What a layer is called in errors: its number, those on the device counted, and class."""
        kind = type(self.layers[index].module).__name__
        return f"layer {self.resident_below + index} ({kind})"

    def in_slots(self, layers: list[list[HostBuffer]], count: int) -> tuple[list, list]:
        """Device tensors like each layer's buffers, and their parts by name; slots take turns."""
        size = 0
        for buffers in layers:
            size = max(size, sum(host.flat.nbytes for host in buffers))
        slots = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(count)]
        flats = []
        views = []
        for layer, buffers in enumerate(layers):
            slot = slots[layer % count]
            of_layer = []
            by_name = {}
            begin = 0
            for host in buffers:
                end = begin + host.flat.nbytes
                part = slot[begin:end].view(host.flat.dtype)
                begin = end
                of_layer.append(part)
                by_name |= host.views_of(part)
            flats.append(of_layer)
            views.append(by_name)
        return flats, views

    # Weights to the device

    def load(self, layer: int) -> None:
        """Queue the copy of a layer's weights into its slot, unless it holds them."""
        slot = layer % self.slots
        if self.held.get(slot) == layer and self.is_as_loaded(layer):
            return
        self.follower.before_load(layer)
        versions = self.versions(layer)
        sample = self.sample(layer)
        self.loaded_from[layer] = (versions, sample)
        self.h2d.wait_event(self.free[slot])
        with self.streams.stream(self.h2d):
            for flat, host in zip(self.flats[layer], self.layers[layer].weights, strict=True):
                flat.copy_(host.flat, non_blocking=True)
        self.ready[slot].record(self.h2d)
        self.held[slot] = layer
        self.loads += 1

    def sample(self, layer: int) -> torch.Tensor:
        """A few elements of a layer's weights on the host, in bytes."""
        if layer not in self.samples:
            self.samples[layer] = Sample(self.layers[layer].weights)
        return self.samples[layer].now()

    def versions(self, layer: int) -> list[int]:
        """How often a layer's weights on the host were changed, as far as PyTorch counts it."""
        return [version_of(source) for source in self.sources(layer)]

    def is_as_loaded(self, layer: int) -> bool:
        """Whether the host's weights are those that the slot was loaded with."""
        versions, sample = self.loaded_from[layer]
        return versions == self.versions(layer) and torch.equal(sample, self.sample(layer))

    def await_weights(self, layer: int) -> None:
        """Make what is queued from here on wait for a layer's weights."""
        self.load(layer)
        self.streams.current_stream().wait_event(self.ready[layer % self.slots])

    def release(self, layer: int) -> None:
        """Let the next load into this layer's slot begin when all queued so far has run."""
        self.free[layer % self.slots].record(self.streams.current_stream())

    # Forward

    def call(self, index: int, /, *args, **kwargs):
        """What ``layer.forward`` is now."""
        with node.named(self.title(index)), self.one_thread_at_a_time():
            return self.forward(index, args, kwargs)

    @contextmanager
    def one_thread_at_a_time(self) -> Iterator[None]:
        """Refuse a second thread in the block: slots and streams are of one.

        The thread that is in such a block may begin another, as backward does that runs a layer.

        Raises:
            RuntimeError: another thread is in such a block.
        """
        if not self.used.acquire(blocking=False):
            raise RuntimeError(
                "another thread runs this model: one thread at a time may run a streamed model; "
                "take a lock around forward and backward"
            )
        try:
            yield
        finally:
            self.used.release()

    def forward(self, index: int, args: tuple, kwargs: dict):
        if index <= self.last:  # a new forward: the host may have changed the weights
            self.held.clear()
        self.last = index
        self.await_weights(index)
        inputs = arguments.tensors_in((args, kwargs))
        trains = len(self.layers[index].trained) > 0
        if torch.is_grad_enabled() and (trains or any(x.requires_grad for x in inputs)):
            result = node.as_node(self, index, args, kwargs)
            self.recorded.add(index)
        else:
            with torch.no_grad():
                result = self.run(index, args, kwargs)
        self.release(index)
        for later in range(index + 1, min(index + self.slots + 1, len(self.layers))):
            if self.follower.may_load(later):  # the others are loaded when they are called
                self.load(later)
        return result

    def trained(self, index: int) -> list[torch.nn.Parameter]:
        """A layer's parameters that get gradients."""
        return list(self.layers[index].trained.values())

    def sources(self, index: int) -> list[torch.Tensor]:
        """What a layer's weights are loaded from, and what changes that."""
        flats = [host.flat for host in self.layers[index].weights]
        return flats + self.parameters[index]

    def run(self, index: int, args: tuple, kwargs: dict):
        views = {f"layer.{name}": view for name, view in self.views[index].items()}
        for name, parameter in self.plain[index].named_parameters():
            vars(views[name]).update(vars(parameter))  # what the model keeps on it
        flats = self.flats[index]
        before = [flat._version for flat in flats]
        trial = node.trial_of(self, index)
        sums = None
        if trial not in self.tried:
            sums = _sums_of_bytes(flats)
        result = functional_call(self.plain[index], views, args, kwargs)
        changed = [flat._version for flat in flats] != before
        if sums is not None:  # the first run: a change that is not counted, too
            changed = changed or _sums_of_bytes(flats) != sums
            self.tried.add(trial)
        if changed:
            raise RuntimeError(
                "a layer changes its own weights in forward: the host's would not change; let the "
                "training loop do it after step(), or leave the layer out"
            )
        return self.without_slots(index, args, kwargs, result)

    def without_slots(self, index: int, args: tuple, kwargs: dict, result):
        """A layer's result with copies of its weights, where it returns them or a part of them.

        So have the lists and dicts among its arguments, if it puts weights into them.
        """
        slots = {flat.untyped_storage().data_ptr() for flat in self.flats[index]}
        copies = {}
        for y in arguments.tensors_in((result, args, kwargs)):
            if y.layout is torch.strided and y.untyped_storage().data_ptr() in slots:
                copies[id(y)] = y.clone()
        if not copies:
            return result
        arguments.handed_back((args, kwargs), arguments.exchanged((args, kwargs), copies))
        return arguments.exchanged(result, copies)

    # Backward

    def is_differentiated(self, index: int) -> bool:
        """Whether a layer's backward runs: then its slot has its weights."""
        return self.differentiated == index

    def backward(self, index: int, begins: list, pairs: list, trains: bool) -> list:
        """Run a layer again, send its gradients to the host; return those of its inputs.

        Args:
            begins: where its inputs enter its graph.
            pairs: where its outputs leave it, with their gradients.
            trains: whether the weights get gradients, too.

        Raises:
            RuntimeError: it is closed.
        """
        if not self.plain:
            raise RuntimeError("this model is closed: call backward in its block")
        if not pairs:
            return [None] * len(begins)
        with node.named(self.title(index)), self.one_thread_at_a_time():
            return self.backward_of(index, begins, pairs, trains)

    def backward_of(self, index: int, begins: list, pairs: list, trains: bool) -> list:
        if trains and self.totals[index]:
            self.follower.before_gradients(index)
        self.await_weights(index)
        ends = [end for end, _ in pairs]
        grads = [grad for _, grad in pairs]
        names = []  # of weights that get gradients
        adds = False
        if trains and self.totals[index]:
            names = list(self.totals[index])
            adds = self.load_sum(index)
        wanted = [self.views[index][name] for name in names] + begins
        self.differentiated = index
        try:
            found = torch.autograd.grad(ends, wanted, grads, allow_unused=True)
        finally:
            self.differentiated = -1
        self.recorded.discard(index)
        self.release(index)
        for earlier in range(index - 1, max(index - self.slots, 0) - 1, -1):
            if earlier in self.recorded:
                self.load(earlier)
        if names:
            of_weights = dict(zip(names, found[: len(names)], strict=True))
            self.write(index, of_weights, adds)
            self.follower.after_gradients(index)
            if not self.follower.takes_gradients(index):
                self.store(index)
                self.layers[index].hand_out_gradients()
                self.follower.after_store(index)
        return list(found[len(names) :])

    # Gradients to the host

    def load_sum(self, layer: int) -> bool:
        """Whether the slot will hold a sum of earlier microbatches: in ``StreamedModel``."""
        return False

    def write(self, layer: int, gradients: dict[str, torch.Tensor | None], adds: bool) -> None:
        """Write gradients to the layer's slot, or add them to the sum that is there."""
        slot = layer % GRADIENT_SLOTS
        here = self.sum_ready[slot] if adds else self.grad_free[slot]
        self.streams.current_stream().wait_event(here)
        for name, total in self.totals[layer].items():
            gradient = gradients[name]
            if gradient is not None and gradient.layout is not torch.strided:
                raise RuntimeError(
                    f"{name} has a sparse gradient: make its module with sparse=False"
                )
            if gradient is None:
                gradient = torch.zeros_like(total)
            if adds:
                total.add_(gradient)
            else:
                total.copy_(gradient)

    def store(self, layer: int) -> None:
        """Queue the copy of a layer's gradients to the host."""
        slot = layer % GRADIENT_SLOTS
        here = self.gradient_flats[layer]
        on_host = self.layers[layer].gradients
        self.layers[layer].take_gradients_back()
        self.grad_ready[slot].record(self.streams.current_stream())
        self.d2h.wait_event(self.grad_ready[slot])
        with self.streams.stream(self.d2h):
            for flat, host in zip(here, on_host, strict=True):
                host.flat.copy_(flat, non_blocking=True)
        self.grad_free[slot].record(self.d2h)
        self.host_done[layer].record(self.d2h)
        self.stores += 1

    # The host's side

    def wait(self) -> None:
        """Wait until all gradients are in host memory and no copy reads it: then it may change."""
        events = list(self.ready.values())
        events += self.host_done.values()
        events += self.sum_ready.values()
        for event in events:
            event.synchronize()

    def give_back(self) -> None:
        """Let the layers run as they did before; unlock the host's memory, and leave the slots."""
        while self.plain:
            self.plain.pop().give_back()
        for layer in self.layers:
            layer.close()
        self.flats = []
        self.views = []
        self.gradient_flats = []
        self.totals = []

    def close(self) -> None:
        """Wait for the device, and give everything back."""
        self.streams.synchronize()
        self.give_back()


def _sums_of_bytes(tensors: list[torch.Tensor]) -> list[int]:
    """What tells that one has changed, whatever counts it; it waits for the device."""
    return [int(tensor.view(torch.uint8).sum(dtype=torch.int64)) for tensor in tensors]
