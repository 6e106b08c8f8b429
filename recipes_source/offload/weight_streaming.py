"""
Train with the weights on the host
==================================
"""

import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from copy import deepcopy
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

SLOTS = 2  # layers whose weights are on the device at a time
GRADIENT_SLOTS = 2  # one that compute writes, one that the copy to the host reads
ALIGNMENT = 256  # elements; where a parameter may begin (512 bytes of bf16, as on the device)

WIDTH, HEADS = 32, 4  # features, attention heads
LAYERS = 6
BATCH, TOKENS = 2, 8  # sequences per step, tokens per sequence
STEPS = 2


def padded(tensor: torch.Tensor) -> int:
    """Elements from the begin of a tensor to that of the next one in a flat buffer."""
    return -(-tensor.numel() // ALIGNMENT) * ALIGNMENT


class HostBuffer:
    """Named tensors side by side in one 1-D host tensor of exact size, page-locked for CUDA.

    ``flat`` is that tensor, ``views`` its parts by name.

    Args:
        like: names and shapes of the parts; their values are not taken.
        dtype: of the elements.
        device: the device whose copies will read or write the buffer.

    Raises:
        RuntimeError: the host has not that much memory, or will not lock it.
    """

    def __init__(
        self, like: dict[str, torch.Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shapes = {name: tensor.shape for name, tensor in like.items()}
        *self.offsets, numel = accumulate(map(padded, like.values()), initial=0)
        nbytes = numel * dtype.itemsize
        self.pinned = device.type == "cuda" and nbytes > 0
        advice = f"cannot lock {nbytes} more bytes of host memory: free some, raise ulimit -l, "
        advice += "or train fewer layers"
        try:
            memory = mmap.mmap(-1, nbytes or 1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise RuntimeError(advice) from error
        memory.madvise(getattr(mmap, "MADV_HUGEPAGE", mmap.MADV_NORMAL))  # fewer pages to lock
        self.flat = torch.frombuffer(memory, dtype=torch.uint8)[:nbytes].view(dtype)
        self.views = self.views_of(self.flat)
        cuda = torch.cuda.cudart() if self.pinned else None
        if cuda and int(cuda.cudaHostRegister(self.flat.data_ptr(), nbytes, 0)):
            self.pinned = False
            raise RuntimeError(advice)

    def views_of(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parts of another 1-D tensor that is at least as long, host or device, any dtype."""
        parts = zip(self.shapes.items(), self.offsets, strict=True)
        return {
            name: flat[begin : begin + shape.numel()].view(shape) for (name, shape), begin in parts
        }

    def close(self) -> None:
        """Unlock the pages. The memory itself lives as long as a tensor that uses it."""
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self.flat.data_ptr())
            self.pinned = False


def part(slot: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
    """The beginning of a slot (1-D, uint8) as a tensor of the size and dtype of ``host``."""
    return slot[: host.nbytes].view(host.dtype)


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


class StreamedStack:
    """Layers that run one after the other, each with its weights on the device only for its turn.

    Every layer takes one tensor and returns one. Its parameters stay where the modules have them,
    as views of page-locked host memory: ``layers.parameters()`` are what an optimizer on the host
    updates, and ``layers.state_dict()`` is what is saved. Buffers move to the device and stay.

    Args:
        layers: the modules, in order; taken one by one, so a generator saves host memory.
        device: where they run.
        slots: layers whose weights are on the device at a time, 1 or more.
        slot_bytes: size of a slot; the largest layer's if None.
        gradient_dtype: of gradients in slots and on the host; the weights' if None.

    Raises:
        ValueError: layers share a parameter, one has several dtypes or does not fit into a slot.
        RuntimeError: the host cannot lock as much memory as weights and gradients take.
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        device: torch.device,
        *,
        slots: int = SLOTS,
        slot_bytes: int | None = None,
        gradient_dtype: torch.dtype | None = None,
    ) -> None:
        self.device, self.slots, self.slot_bytes = device, slots, slot_bytes
        self.gradient_dtype = gradient_dtype
        self.layers = nn.ModuleList()
        self.weights: list[HostBuffer] = []
        self.gradients: list[HostBuffer] = []
        try:
            for layer in layers:
                self.move_to_host(layer)
        except BaseException:
            self.unlock()
            raise

        size = slot_bytes or max(buffer.flat.nbytes for buffer in self.weights)
        gradient_size = max(buffer.flat.nbytes for buffer in self.gradients)
        count = len(self.layers)
        self.weight_slots = [self.new_slot(size) for _ in range(slots)]
        self.gradient_slots = [self.new_slot(gradient_size) for _ in range(GRADIENT_SLOTS)]

        self.streams = torch.get_device_module(device)
        self.h2d, self.d2h = self.streams.Stream(), self.streams.Stream()
        self.ready = [self.streams.Event() for _ in range(slots)]
        self.free = [self.streams.Event() for _ in range(slots)]
        self.grad_ready = [self.streams.Event() for _ in range(GRADIENT_SLOTS)]
        self.grad_free = [self.streams.Event() for _ in range(GRADIENT_SLOTS)]
        self.host_done = [self.streams.Event() for _ in range(count)]

        self.graphs: list[deque] = [deque() for _ in range(count)]  # forwards without backward yet
        self.door = torch.empty(0, requires_grad=True)
        self.views, self.gradient_views = [], []
        for index, (host, gradients) in enumerate(zip(self.weights, self.gradients, strict=True)):
            weight_slot = self.weight_slots[index % slots]
            self.views.append(host.views_of(part(weight_slot, host.flat)))
            for name in gradients.views:
                self.views[index][name].requires_grad_()
            gradient_slot = self.gradient_slots[index % GRADIENT_SLOTS]
            self.gradient_views.append(gradients.views_of(part(gradient_slot, gradients.flat)))
        self.loads = self.stores = 0

    def new_slot(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def move_to_host(self, layer: nn.Module) -> None:
        """Check ``layer``; give its parameters and gradients their places in host memory."""
        index = len(self.layers)
        named = sorted(layer.named_parameters(), key=lambda item: not item[1].requires_grad)
        parameters = dict(named)  # those that are trained first: the gradients' layout is a prefix
        for other, known in enumerate(self.layers):
            ids = {id(parameter) for parameter in known.parameters()}
            if names := [name for name, parameter in named if id(parameter) in ids]:
                raise ValueError(
                    f"layers {other} and {index} share {names}: keep a shared parameter on the "
                    "device, in a module before the stack or in the loss function"
                )
        dtypes = {parameter.dtype for parameter in parameters.values()} or {torch.float32}
        if len(dtypes) > 1:
            raise ValueError(
                f"layer {index} mixes {sorted(map(str, dtypes))}: call .to(dtype), or split it"
            )
        dtype = dtypes.pop()
        nbytes = sum(map(padded, parameters.values())) * dtype.itemsize
        if self.slot_bytes is not None and nbytes > self.slot_bytes:
            raise ValueError(
                f"layer {index} takes {nbytes} bytes, a slot has {self.slot_bytes}: set "
                f"slot_bytes={nbytes}, or split the layer"
            )
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        self.weights.append(HostBuffer(parameters, dtype, self.device))
        self.gradients.append(HostBuffer(trained, self.gradient_dtype or dtype, self.device))
        for name, parameter in parameters.items():
            parameter.data = self.weights[index].views[name].copy_(parameter.data)
        for module in layer.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self.device))
        self.layers.append(layer)

    # Weights to the device

    def load(self, layer: int) -> None:
        """Queue the copy of a layer's weights into its slot."""
        slot, host = layer % self.slots, self.weights[layer].flat
        self.h2d.wait_event(self.free[slot])
        with self.streams.stream(self.h2d):
            part(self.weight_slots[slot], host).copy_(host, non_blocking=True)
        self.ready[slot].record(self.h2d)
        self.loads += 1

    def await_weights(self, layer: int) -> None:
        self.streams.current_stream().wait_event(self.ready[layer % self.slots])

    def release(self, layer: int) -> None:
        """Let the next load into this layer's slot begin when all queued so far has run."""
        self.free[layer % self.slots].record(self.streams.current_stream())

    # Forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all layers; keep the input of each, and its graph without the tensors in it."""
        last = len(self.layers) - 1
        self.load(0)
        for layer in range(last + 1):
            self.await_weights(layer)
            x = self.compute_forward(layer, x)
            self.release(layer)
            for later in range(layer + self.slots if layer else 1, layer + self.slots + 1):
                if later <= last:
                    self.load(later)
        return x

    def compute_forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """Run one layer on x; remember where its graph begins and ends. Returns y, detached."""
        x = Entrance.apply(x.detach(), self.door) if layer or x.requires_grad else x
        y = checkpoint(self.run, layer, x, use_reentrant=False)
        if torch.is_grad_enabled():
            begin = get_gradient_edge(x) if x.requires_grad else None
            self.graphs[layer].append((begin, get_gradient_edge(y)))
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
        """Make compute wait until the gradients that were in the slot before have been copied."""
        self.streams.current_stream().wait_event(self.grad_free[layer % GRADIENT_SLOTS])

    def compute_backward(self, layer: int, grad_y: torch.Tensor) -> torch.Tensor | None:
        """Write the layer's gradients to its slot; return its input's."""
        grad_x, gradients = self.differentiate(layer, grad_y)
        for name, gradient in gradients.items():
            self.gradient_views[layer][name].copy_(gradient)
        return grad_x

    def differentiate(
        self, layer: int, grad_y: torch.Tensor
    ) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        """Gradients of the oldest forward of this layer: its input's, its parameters'."""
        begin, end = self.graphs[layer].popleft()
        names = list(self.gradient_views[layer])
        wanted = [self.views[layer][name] for name in names] + ([begin] if begin else [])
        found = torch.autograd.grad([end], wanted, [grad_y], materialize_grads=True)
        return found[-1] if begin else None, dict(zip(names, found, strict=False))

    def store(self, layer: int) -> None:
        """Queue the copy of a layer's gradients to the host."""
        slot, host = layer % GRADIENT_SLOTS, self.gradients[layer].flat
        self.grad_ready[slot].record(self.streams.current_stream())
        self.d2h.wait_event(self.grad_ready[slot])
        with self.streams.stream(self.d2h):
            host.copy_(part(self.gradient_slots[slot], host), non_blocking=True)
        self.grad_free[slot].record(self.d2h)
        self.host_done[layer].record(self.d2h)
        self.stores += 1

    # A step, and the host's side of it

    def step(
        self, x: torch.Tensor, loss_function: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Queue forward and backward; return the loss (0-d, on the device).

        Modules that ``loss_function`` uses stay on the device and get their gradients as usual.
        """
        y = self.forward(x).detach().requires_grad_()
        loss = loss_function(y)
        loss.backward()
        self.backward(y.grad)
        return loss.detach()

    def wait_for_gradients(self) -> None:
        """Wait until all gradients are in host memory, and set each parameter's ``grad``."""
        for layer, module in enumerate(self.layers):
            self.host_done[layer].synchronize()
            parameters = dict(module.named_parameters())
            for name, view in self.gradients[layer].views.items():
                parameters[name].grad = view

    def check_finite(self) -> None:
        """Look at the host's gradients, after ``wait_for_gradients``.

        Raises:
            FloatingPointError: one is infinite or not a number.
        """
        for layer, host in enumerate(self.gradients):
            for name, view in host.views.items():
                if view.numel() and not torch.stack(torch.aminmax(view)).isfinite().all():
                    raise FloatingPointError(
                        f"layer {layer}: the gradient of {name!r} is not finite; skip this step, "
                        "and lower the learning rate or scale the loss"
                    )

    def close(self) -> None:
        """Wait for the device and unlock the host memory."""
        self.streams.synchronize()
        self.unlock()

    def unlock(self) -> None:
        for buffer in self.weights + self.gradients:
            buffer.close()


class Block(nn.Module):
    """Attention, then a residual MLP, both of ``WIDTH`` features; x is [batch, tokens, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def build_layers() -> Iterator[nn.Module]:
    """``LAYERS`` modules of three kinds; [BATCH, TOKENS, WIDTH] in and out."""
    yield nn.Linear(WIDTH, WIDTH)
    for _ in range(LAYERS - 2):
        yield Block()
    yield nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True)


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def resident_gradients(
    layers: nn.ModuleList, x: torch.Tensor, loss_function: Callable[[torch.Tensor], torch.Tensor]
) -> list[dict[str, torch.Tensor]]:
    """What ordinary training gives: all weights on the device, torch's own recomputation."""
    resident = deepcopy(layers).to(x.device)
    for layer in resident:
        x = checkpoint(layer, x, use_reentrant=False)
    loss_function(x).backward()
    return [{name: p.grad.cpu() for name, p in layer.named_parameters()} for layer in resident]


def start_rank() -> torch.device:
    """Join the group that torchrun describes, or a group of one; return this rank's device."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device.index)
    if "RANK" in os.environ:
        dist.init_process_group()
    else:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    return device


def train(stack: StreamedStack) -> None:
    optimizer = torch.optim.AdamW(stack.layers.parameters(), lr=1e-2, fused=True)
    for step in range(STEPS):
        torch.manual_seed(100 * step + dist.get_rank())
        x = torch.randn(BATCH, TOKENS, WIDTH, device=stack.device)
        torch.manual_seed(step)
        expected = resident_gradients(stack.layers, x, loss_of)
        torch.manual_seed(step)
        before = stack.loads
        loss = stack.step(x, loss_of)
        stack.wait_for_gradients()
        stack.check_finite()
        for layer, gradients in enumerate(expected):
            for name, gradient in gradients.items():
                assert torch.equal(stack.layers[layer].get_parameter(name).grad, gradient), name
        assert stack.loads - before == 2 * LAYERS - SLOTS
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}, gradients bit-identical to the resident run's")


def main() -> None:
    device = start_rank()
    try:
        torch.manual_seed(dist.get_rank())
        with closing(StreamedStack(build_layers(), device)) as stack:
            train(stack)
            host = [buffer for buffer in stack.weights + stack.gradients]
            assert all(b.flat.is_pinned() for b in host) or device.type != "cuda"
            print(f"{sum(b.flat.nbytes for b in host)} bytes pinned")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
