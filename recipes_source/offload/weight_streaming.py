"""
Train with the weights on the host
==================================
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from copy import deepcopy

import torch
import torch.distributed as dist
from host_layers import BATCH, TOKENS, WIDTH, Block, HostBuffer, HostLayers, loss_of, start_rank
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

SLOTS = 2  # layers whose weights are on the device at a time
GRADIENT_SLOTS = 2  # one that compute writes, one that the copy to the host reads
LAYERS, HEADS = 6, 4
STEPS = 2


class Entrance(torch.autograd.Function):
    """Where a layer's graph begins: a node that holds no memory, unlike a leaf.

    ``door`` is any tensor that requires gradients.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, door: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class StreamedStack(HostLayers):
    """Layers that run one after the other, each with its weights on the device for its turn only.

    Every layer takes one tensor and returns one.

    Args:
        slots: layers whose weights are on the device at a time, 1 or more.
        slot_bytes: the most that a slot may take; 0 for as much as the largest layer needs.
        layers, device, options: as for ``HostLayers``.

    Raises:
        ValueError: a layer does not fit into a slot; or as ``HostLayers``.
        RuntimeError: as ``HostLayers``.
    """

    def __init__(
        self, layers: Iterable, device: torch.device, slots: int = SLOTS, slot_bytes=0, **options
    ) -> None:
        super().__init__(layers, device, **options)
        sizes = [buffer.flat.nbytes for buffer in self.weights]
        if slot_bytes and slot_bytes < max(sizes):
            self.close()
            raise ValueError(
                f"layer {sizes.index(max(sizes))} takes {max(sizes)} bytes, a slot may take "
                f"{slot_bytes}: raise slot_bytes, or split the layer"
            )
        self.slots, self.loads, self.stores = slots, 0, 0
        self.streams = torch.get_device_module(device)
        self.h2d, self.d2h = self.streams.Stream(), self.streams.Stream()
        self.ready, self.free, self.grad_ready, self.grad_free, self.host_done = (
            defaultdict(self.streams.Event) for _ in range(5)
        )
        self.flats, self.views = self.in_slots(self.weights, slots)
        self.gradient_flats, self.gradient_views = self.in_slots(self.gradients, GRADIENT_SLOTS)
        for views, trained in zip(self.views, self.gradient_views, strict=True):
            for name in trained:
                views[name].requires_grad_()
        self.graphs: list[deque] = [deque() for _ in sizes]  # begin and end of each, oldest first
        self.door = torch.empty(0, requires_grad=True)

    def in_slots(self, buffers: list[HostBuffer], count: int) -> tuple[list, list]:
        """Flat device tensors like the buffers, and their parts, in slots that take turns."""
        hosts = [buffer.flat for buffer in buffers]
        nbytes = max(host.nbytes for host in hosts)
        slots = [torch.empty(nbytes, dtype=torch.uint8, device=self.device) for _ in range(count)]
        flats = [slots[i % count][: host.nbytes].view(host.dtype) for i, host in enumerate(hosts)]
        return flats, [b.views_of(flat) for b, flat in zip(buffers, flats, strict=True)]

    # Weights to the device

    def load(self, layer: int) -> None:
        """Queue the copy of a layer's weights into its slot."""
        self.h2d.wait_event(self.free[layer % self.slots])
        with self.streams.stream(self.h2d):
            self.flats[layer].copy_(self.weights[layer].flat, non_blocking=True)
        self.ready[layer % self.slots].record(self.h2d)
        self.loads += 1

    def await_weights(self, layer: int) -> None:
        self.streams.current_stream().wait_event(self.ready[layer % self.slots])

    def release(self, layer: int) -> None:
        """Let the next load into this layer's slot begin when all queued so far has run."""
        self.free[layer % self.slots].record(self.streams.current_stream())

    # Forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all layers; keep the input of each, and its graph without the tensors in it."""
        self.load(0)
        for layer in range(len(self.layers)):
            self.await_weights(layer)
            x = self.compute_forward(layer, x)
            self.release(layer)
            first = layer + self.slots if layer else 1
            for later in range(first, min(layer + self.slots + 1, len(self.layers))):
                self.load(later)
        return x

    def compute_forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """Run one layer on x; remember where its graph begins and ends. Returns y, detached."""
        x = Entrance.apply(x.detach(), self.door) if layer or x.requires_grad else x
        y = checkpoint(self.run, layer, x, use_reentrant=False)
        if torch.is_grad_enabled():
            edges = [get_gradient_edge(t) if t.requires_grad else None for t in (x, y)]
            self.graphs[layer].append(edges)
        return y.detach()

    def run(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        y = functional_call(self.layers[layer], self.views[layer], (x,))
        if not isinstance(y, torch.Tensor):
            raise TypeError(
                f"layer {layer} returned a {type(y).__name__}: wrap it in a module that takes "
                "one tensor and returns one"
            )
        return y

    # Backward, and gradients to the host

    def backward(self, grad_y: torch.Tensor) -> torch.Tensor | None:
        """Run all layers again, last first, and send their gradients to the host.

        Returns:
            The gradient of the stack's input, or None if that does not require one.
        """
        for layer in reversed(range(len(self.layers))):
            self.await_weights(layer)
            self.await_gradient_slot(layer)
            grad_y = self.compute_backward(layer, grad_y)
            self.release(layer)
            if layer >= self.slots:
                self.load(layer - self.slots)
            self.store(layer)
        return grad_y

    def await_gradient_slot(self, layer: int) -> None:
        self.streams.current_stream().wait_event(self.grad_free[layer % GRADIENT_SLOTS])

    def compute_backward(self, layer: int, grad_y: torch.Tensor) -> torch.Tensor | None:
        """Write the layer's gradients to its slot; return its input's."""
        grad_x, gradients = self.differentiate(layer, grad_y)
        for name, gradient in gradients.items():
            self.gradient_views[layer][name].copy_(gradient)
        return grad_x

    def differentiate(self, layer: int, grad_y: torch.Tensor) -> tuple[torch.Tensor | None, dict]:
        """Gradients of the oldest forward of this layer: its input's, its parameters'."""
        begin, end = self.graphs[layer].popleft()
        names = list(self.gradient_views[layer])
        if end is None:
            return None, dict.fromkeys(names, torch.zeros(()))
        wanted = [self.views[layer][name] for name in names] + ([begin] if begin else [])
        found = torch.autograd.grad([end], wanted, [grad_y], materialize_grads=True)
        return found[-1] if begin else None, dict(zip(names, found, strict=False))

    def store(self, layer: int) -> None:
        """Queue the copy of a layer's gradients to the host."""
        slot = layer % GRADIENT_SLOTS
        self.grad_ready[slot].record(self.streams.current_stream())
        self.d2h.wait_event(self.grad_ready[slot])
        with self.streams.stream(self.d2h):
            self.gradients[layer].flat.copy_(self.gradient_flats[layer], non_blocking=True)
        self.grad_free[slot].record(self.d2h)
        self.host_done[layer].record(self.d2h)
        self.stores += 1

    # A step, and the host's side of it

    def step(self, x: torch.Tensor, loss_function: Callable) -> torch.Tensor:
        """Queue forward and backward; return the loss (0-d, on the device).

        Modules that ``loss_function`` uses stay on the device and get their gradients as usual.
        """
        y = self.forward(x).requires_grad_()
        loss = loss_function(y)
        loss.backward()
        self.backward(y.grad)
        return loss.detach()

    def wait_for_gradients(self) -> None:
        """Wait until all gradients are in host memory, and set each parameter's ``grad``."""
        for layer in range(len(self.layers)):
            self.host_done[layer].synchronize()
        self.hand_out_gradients()


def resident_gradients(layers: nn.ModuleList, x: torch.Tensor, loss_function: Callable) -> list:
    """What ordinary training gives: all weights on the device, and ``checkpoint`` as well."""
    resident = deepcopy(layers).to(x.device)
    for layer in resident:
        x = checkpoint(layer, x, use_reentrant=False)
    loss_function(x).backward()
    return [{name: p.grad.cpu() for name, p in layer.named_parameters()} for layer in resident]


def build_layers() -> Iterator[nn.Module]:
    """``LAYERS`` modules of three kinds; [BATCH, TOKENS, WIDTH] in and out."""
    yield nn.Linear(WIDTH, WIDTH)
    yield from (Block() for _ in range(LAYERS - 2))
    yield nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True)


def train(stack: StreamedStack) -> None:
    optimizer = torch.optim.AdamW(stack.layers.parameters(), lr=1e-2, fused=True)
    for step in range(STEPS):
        torch.manual_seed(STEPS * dist.get_rank() + step)
        x = torch.randn(BATCH, TOKENS, WIDTH, device=stack.device)
        torch.manual_seed(step)  # of dropout
        expected = resident_gradients(stack.layers, x, loss_of)
        torch.manual_seed(step)
        loss = stack.step(x, loss_of)
        stack.wait_for_gradients()
        stack.check_finite()
        for layer, gradients in zip(stack.layers, expected, strict=True):
            for name, gradient in gradients.items():
                assert torch.equal(layer.get_parameter(name).grad, gradient)
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}, gradients of {LAYERS} layers bit-identical")
    assert stack.loads == STEPS * (2 * LAYERS - SLOTS) and stack.stores == STEPS * LAYERS
    print(f"{stack.loads // STEPS} loads and {stack.stores // STEPS} stores a step")


def main() -> None:
    device = start_rank()
    try:
        torch.manual_seed(dist.get_rank())
        with closing(StreamedStack(build_layers(), device)) as stack:
            train(stack)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
