# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, offload/weight_streaming.py
"""
Weights on the host: load, compute and store at once
====================================================

Train a stack of layers whose weights live in host memory; the device holds two layers at a time.
While layer *l* runs its backward, the gradients of layer *l* + 1 go to the host and the weights of
layer *l* - 1 come, all three **at once on one device**. The gradients have every bit of a run that
keeps the whole model on the device.

**When not to bother:** weights and gradients fit the device; or your steps have few tokens, so that
the link to the host sets the pace. What whole steps cost is on :doc:`train_what_does_not_fit`.

**Scope.** Layers that run one after the other, each a function of one tensor and of its weights: no
dropout, no buffers, no frozen or shared weights, no hooks on them, one dtype, no autocast. One
forward, one backward, one optimizer on the host; each rank by itself. ``StreamedStack`` raises for
what is outside of that, when it is made or at the first call that shows it. The library streams
models that you did not write, with all of these: :doc:`train_what_does_not_fit`.

The loop is an ordinary one. ``stack`` is a ``StreamedStack(layers, device)``, and the optimizer, made
after it, has ``stack.parameters()``:

.. literalinclude:: weight_streaming.py
   :pyobject: train_step

The file needs only torch. Copy it down to ``StreamedStack``. An embedding and a head can stay on
the device, before and after the stack.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * the four events that make three streams correct, and what breaks without each
      * two slots on the device, allocated once, for a stack of any depth
      * a backward of your own, layer by layer, with recomputation
      * the fastest step that the link allows, as a formula

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks; CPU runs everything, a CUDA device overlaps it
      * page-locked host memory for weights and gradients

.. verification-badge::

The idea
--------

A GPU computes, reads host memory and writes host memory with three different engines. Each runs
what is queued on its stream, in order; between streams there is no order but the one that events
make (:doc:`three_streams`). So: compute stays on its stream, copies to the device get one
(``h2d``), copies to the host get another (``d2h``).

Layer *l* computes with the weights in slot *l* mod 2. As soon as it is done its slot is refilled:
in forward with layer *l* + 2, in backward with layer *l* - 2. Backward needs each layer's
intermediate results; they are computed again from the layer's input, which is all that forward
keeps.

.. lanes:: Schematic. Four layers, two slots: forward, then backward with recomputation.

   compute: 3-7 F0; 7-11 F1; 11-15 F2; 15-19 F3; 19-28 B3; 28-37 B2; 37-46 B1; 46-55 B0
   H2D:     0-3 0 ~; 3-6 1 ~; 7-10 2 ~; 11-14 3 ~; 28-31 1 ~; 37-40 0 ~
   D2H:     28-31 3 ~; 37-40 2 ~; 46-49 1 ~; 55-58 0 ~
   @19 both slots are kept

At the turn from forward to backward the slots hold exactly the two layers that backward needs
first. They are kept, and *L* layers cost :math:`2L-2` loads per step.
"""

# %%
# Imports and sizes
# -----------------

import os
from copy import deepcopy

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

SLOTS = 2  # layers on the device at a time: one computes, one comes in
ALIGNMENT = 256  # elements: where a weight may begin, as a CUDA allocator would let it begin

# %%
# A layer on the host
# -------------------
# Copied one by one, each weight pays for its own launch, and small ones never reach the speed of the
# link. So a layer's weights lie side by side in **one flat page-locked tensor**, and their gradients
# in another. ``parameter.data = view`` exchanges the memory of a parameter and keeps the object:
# the optimizer that updates it updates the tensor that is copied.
#
# Code that exchanges that memory again, such as ``model.to(...)`` or
# ``load_state_dict(assign=True)``, would leave the device with old weights, without an error. So
# each forward checks for it.


def problem_of(parameter: nn.Parameter) -> str:
    """Why a parameter cannot be streamed; empty if it can."""
    if type(parameter.detach()) is not torch.Tensor:
        return f"is a {type(parameter.detach()).__name__}"
    if not parameter.requires_grad:
        return "is frozen"
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return "has a hook, which would not run"
    return ""


class HostLayer:
    """A layer whose parameters are parts of ``weights``, and their gradients of ``gradients``."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, pin: bool) -> None:
        self.module = module
        self.places = {}  # name -> where it begins, its shape
        end = 0
        for name, parameter in module.named_parameters():
            self.places[name] = (end, parameter.shape)
            end += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        self.weights = torch.zeros(end, dtype=dtype, pin_memory=pin)
        self.gradients = torch.zeros(end, dtype=dtype, pin_memory=pin)
        views = self.parts_of(self.weights)
        for name, parameter in module.named_parameters():
            parameter.data = views[name].copy_(parameter.detach())

    def parts_of(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of a flat tensor, of any device, by the names of the parameters."""
        parts = {}
        for name, (begin, shape) in self.places.items():
            parts[name] = flat[begin : begin + shape.numel()].view(shape)
        return parts

    def check(self) -> None:
        """Raise RuntimeError unless the parameters are still what was taken."""
        views = self.parts_of(self.weights)
        parameters = dict(self.module.named_parameters())
        if parameters.keys() != views.keys():
            raise RuntimeError(f"other parameters than before: {parameters.keys() ^ views.keys()}")
        for name, parameter in parameters.items():
            problem = problem_of(parameter)
            if not problem and parameter.data_ptr() != views[name].data_ptr():
                problem = "has other memory: make the stack after .to() and other exchanges"
            if problem:
                raise RuntimeError(f"{name} {problem}")


# %%
# A slot and its four events
# --------------------------
# A slot is memory on the device for the weights and the gradients of one layer, whichever has its
# turn. Slots are allocated once and never freed, so no copy can outlive what it reads, and
# ``record_stream`` is not needed. A wait for an event that was never recorded ends at once.
#
# .. list-table::
#    :header-rows: 1
#    :widths: 18 24 24 34
#
#    * - event
#      - recorded after
#      - awaited by
#      - without it
#    * - ``ready``
#      - the load
#      - compute
#      - a layer runs with another layer's weights
#    * - ``free``
#      - the layer's compute
#      - the next load
#      - weights change under a running kernel
#    * - ``written``
#      - the writing of gradients
#      - the store
#      - the host gets another layer's gradients, or half of them
#    * - ``stored``
#      - the store
#      - the next writing of gradients
#      - gradients change while they are copied


class Slot:
    """Device memory for a layer's weights and its gradients."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, streams) -> None:
        self.weights = torch.empty(numel, dtype=dtype, device=device)
        self.gradients = torch.empty(numel, dtype=dtype, device=device)
        self.holds: int | None = None  # the layer that was loaded last
        self.ready = streams.Event()
        self.free = streams.Event()
        self.written = streams.Event()
        self.stored = streams.Event()


# %%
# The stack
# ---------
# Read ``forward_of`` and ``backward_of`` first: each queues one layer's turn, on three streams. A
# layer runs in the same way both times, with autograd on, so that the same kernels are chosen.
#
# The *host* waits twice: at the end of a forward for the last load, and at the end of a backward
# for the last store. By then all copies are done, so the optimizer may change the weights, and
# reads gradients that have arrived: you cannot forget a wait. Neither leaves the device idle: when
# forward returns, two layers are still to run, and an optimizer on the host has nothing to begin
# with before the gradients are there. (The library updates layer by layer, so its host waits
# nowhere.)


def refuse(_) -> None:
    raise RuntimeError("a loss was computed with what a layer had kept: return it, or detach it")


class StreamedStack(nn.Module):
    """Layers that run one after the other, on the device for their turn only.

    Args:
        layers: modules that take one floating-point tensor and return one.
        device: where they run; it must be the current device.

    Raises:
        ValueError: the layers, the device or an input are outside the scope of this file.
        TypeError: in forward, a layer does not return a tensor.
        RuntimeError: in forward or backward, where gradients would be wrong.
    """

    def __init__(self, layers: list[nn.Module], device: torch.device) -> None:
        super().__init__()
        self.device = torch.empty(0, device=device).device  # "cuda" is "cuda:0", say
        if self.device != torch.empty(0, device=device.type).device:
            raise ValueError(f"make {device} current first: torch.accelerator.set_device_index")
        dtype = self.dtype_of(layers)
        self.layers = nn.ModuleList(layers)
        self.on_host = [HostLayer(layer, dtype, pin=device.type == "cuda") for layer in layers]
        self.streams = torch.get_device_module(device)
        self.h2d = self.streams.Stream()
        self.d2h = self.streams.Stream()
        largest = max(host.weights.numel() for host in self.on_host)
        self.slots = [Slot(largest, dtype, self.device, self.streams) for _ in range(SLOTS)]
        self.loads = 0

    @staticmethod
    def dtype_of(layers: list[nn.Module]) -> torch.dtype:
        """The dtype of all parameters; ValueError where a layer cannot be streamed."""
        seen = set()
        dtypes = set()
        for number, layer in enumerate(layers):
            if next(layer.buffers(), None) is not None:
                raise ValueError(f"layer {number} has buffers")
            for name, parameter in layer.named_parameters():
                problem = "is of an earlier layer" if parameter in seen else problem_of(parameter)
                if problem:
                    raise ValueError(f"{name} of layer {number} {problem}")
                seen.add(parameter)
                dtypes.add(parameter.dtype)
        if len(dtypes) != 1:
            raise ValueError(f"one dtype is wanted, not {dtypes}")
        return dtypes.pop()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device != self.device or not x.is_floating_point():
            raise ValueError(f"{x.dtype} on {x.device}: numbers with a point on {self.device}")
        if torch.is_autocast_enabled(self.device.type):
            raise RuntimeError("backward would run the layers without autocast")
        for host in self.on_host:
            host.check()
        door = torch.empty(0, requires_grad=True)  # has autograd call backward whatever x is
        return Streamed.apply(x, door, self)

    # Weights to the device

    def begin(self) -> None:
        """The host may have changed the weights, and an error may have ended what went before."""
        for slot in self.slots:
            slot.holds = None
            slot.free.record(self.streams.current_stream())

    def load(self, index: int) -> None:
        """Queue the copy of a layer's weights to its slot, unless they are there."""
        if index < 0 or index >= len(self.on_host):
            return
        slot = self.slots[index % SLOTS]
        if slot.holds == index:
            return
        weights = self.on_host[index].weights
        with self.streams.stream(self.h2d):
            self.h2d.wait_event(slot.free)
            slot.weights[: weights.numel()].copy_(weights, non_blocking=True)
            slot.ready.record(self.h2d)
        slot.holds = index
        self.loads += 1

    # A layer's turn

    def run(self, index: int, x: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Queue a layer with the weights in its slot; returns them and the result."""
        slot = self.slots[index % SLOTS]
        self.streams.current_stream().wait_event(slot.ready)
        weights = {}
        for name, part in self.on_host[index].parts_of(slot.weights).items():
            weights[name] = part.detach().requires_grad_()
            weights[name].register_post_accumulate_grad_hook(refuse)
        before = self.random_state()
        version = slot.weights._version
        with torch.enable_grad():
            y = functional_call(self.layers[index], weights, (x,))
        if slot.weights._version != version:
            raise RuntimeError(f"layer {index} changes its own weights: the host's would stay")
        if not torch.equal(before, self.random_state()):
            raise RuntimeError(f"layer {index} draws random numbers: backward would draw others")
        if not isinstance(y, torch.Tensor):
            raise TypeError(f"layer {index} returns a {type(y).__name__}, not a tensor")
        return weights, y

    def random_state(self) -> torch.Tensor:
        if self.device.type == "cpu":
            return torch.get_rng_state()
        return self.streams.get_rng_state()

    def forward_of(self, index: int, x: torch.Tensor) -> torch.Tensor:
        self.load(index)
        _, y = self.run(index, x.detach().requires_grad_())
        self.slots[index % SLOTS].free.record(self.streams.current_stream())
        self.load(index + SLOTS)
        return y.detach()

    def backward_of(self, index: int, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Run a layer again, send its gradients to the host; return that of its input."""
        slot = self.slots[index % SLOTS]
        host = self.on_host[index]
        compute = self.streams.current_stream()
        self.load(index)
        x = x.detach().requires_grad_()
        weights, y = self.run(index, x)
        of_input, *of_weights = torch.autograd.grad(y, [x, *weights.values()], grad)
        slot.free.record(compute)
        self.load(index - SLOTS)

        compute.wait_event(slot.stored)
        parts = host.parts_of(slot.gradients)
        for name, gradient in zip(weights, of_weights, strict=True):
            parts[name].copy_(gradient)
        slot.written.record(compute)

        with self.streams.stream(self.d2h):
            self.d2h.wait_event(slot.written)
            numel = host.gradients.numel()
            host.gradients.copy_(slot.gradients[:numel], non_blocking=True)
            slot.stored.record(self.d2h)
        return of_input

    # The host's side

    def versions(self) -> list[int]:
        return [parameter._version for parameter in self.parameters()]

    def check_backward(self, versions: list[int]) -> None:
        if self.versions() != versions:
            raise RuntimeError("weights were changed between forward and backward")
        for name, parameter in self.named_parameters():
            if parameter.grad is not None:
                raise RuntimeError(f"{name}.grad would be overwritten: call zero_grad() before")

    def hand_out_gradients(self) -> None:
        for host in self.on_host:
            gradients = host.parts_of(host.gradients)
            for name, parameter in host.module.named_parameters():
                parameter.grad = gradients[name]


class Streamed(torch.autograd.Function):
    """The whole stack, as one node of the graph."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, door: torch.Tensor, stack: StreamedStack) -> torch.Tensor:
        inputs = []
        stack.begin()
        for index in range(SLOTS):
            stack.load(index)
        for index in range(len(stack.layers)):
            inputs.append(x)
            x = stack.forward_of(index, x)
        for slot in stack.slots:
            slot.ready.synchronize()
        ctx.stack = stack
        ctx.versions = stack.versions()
        ctx.save_for_backward(*inputs)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        stack = ctx.stack
        stack.check_backward(ctx.versions)
        inputs = list(ctx.saved_tensors)
        for index in reversed(range(len(stack.layers))):
            grad = stack.backward_of(index, inputs.pop(), grad)
        for slot in stack.slots:
            slot.stored.synchronize()
        stack.hand_out_gradients()
        return grad, None, None


# %%
# Run it, and prove it
# --------------------
# The yardstick is ordinary training with all weights on the device. Each step begins with an
# evaluation and a change of the weights right after it, which the next forward must find. Then
# loss and gradients are compared **bit by bit**, and an optimizer on the host updates the weights.

WIDTH, HIDDEN = 64, 256  # features
LAYERS, STEPS = 5, 3


class Block(nn.Module):
    """x + MLP(norm(x)); x is [..., WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def train_step(
    stack: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor
) -> torch.Tensor:
    optimizer.zero_grad()
    loss = stack(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def copy_weights(stack: StreamedStack, resident: nn.Module) -> None:
    with torch.no_grad():
        for mine, theirs in zip(stack.parameters(), resident.parameters(), strict=True):
            theirs.copy_(mine)


def assert_trains_alike(stack: StreamedStack, resident: nn.Module, batch: torch.Tensor) -> None:
    """An evaluation and a step of both, each from the same weights."""
    copy_weights(stack, resident)
    with torch.no_grad():
        assert torch.equal(stack(batch), resident(batch)), "another result"
        for parameter in stack.parameters():
            parameter.mul_(0.9)
    copy_weights(stack, resident)
    loss = resident(batch).square().mean()
    gradients = torch.autograd.grad(loss, list(resident.parameters()))
    optimizer = torch.optim.AdamW(stack.parameters(), lr=1e-2)
    ours = train_step(stack, optimizer, batch)
    assert torch.equal(ours, loss), "another loss"
    for (name, parameter), theirs in zip(stack.named_parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad.to(stack.device), theirs), f"other gradients: {name}"


def assert_refused(call, why: str) -> None:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        assert why in str(error), error
        print("refused:", error)
        return
    raise AssertionError(f"taken, although it {why}")


def main() -> None:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    torch.manual_seed(int(os.environ.get("RANK", "0")))
    layers = [Block() for _ in range(LAYERS)]
    resident = deepcopy(nn.Sequential(*layers)).to(device)
    stack = StreamedStack(layers, device)
    for _ in range(STEPS):
        batch = torch.randn(2, 8, WIDTH, device=device)
        assert_trains_alike(stack, resident, batch)
    assert stack.loads == STEPS * (3 * LAYERS - SLOTS), f"{stack.loads} loads"
    print(f"{STEPS} steps of {LAYERS} layers in {SLOTS} slots: same bits, {stack.loads} loads")

    loss = stack(batch).sum()
    assert_refused(loss.backward, "would be overwritten")
    dropout = StreamedStack([nn.Sequential(Block(), nn.Dropout())], device)
    assert_refused(lambda: dropout(batch), "draws random numbers")
    assert_refused(lambda: StreamedStack([layers[0], layers[0]], device), "of an earlier layer")


if __name__ == "__main__":
    main()

# %%
# What it buys
# ------------
# Whole steps, with an optimizer, are on :doc:`train_what_does_not_fit`. Forward and backward alone are bound by
#
# .. math::
#
#    t_\text{first load}
#    + \sum_{\text{phases}} \max(\text{compute},\; \text{load},\; \text{store})
#    + t_\text{last store}
#
# A phase is the forward or the backward of one layer, with the copies that can run during it. A
# device of :math:`F` operations per second and a link of :math:`B` bytes per second hide the loads
# of forward above about :math:`F / B` tokens per step in bf16, and those of backward above a third
# of that, whatever the model: more tokens do more arithmetic with the same weights.
#
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built. CPU streams do nothing, so a missing wait
# changes no bit there; a recorder of stream order finds what nothing orders.
#
# .. recipe-controls::
#
# Memory
# ------
# On the device, with :math:`W` the bytes of the largest layer's weights and :math:`x_l` those of a
# layer's input:
#
# .. math::
#
#    \text{slots} \cdot 2\,W + \sum_l x_l + W + \text{activations of one layer}
#
# On the host, page-locked: twice the bytes of the weights, each layer's rounded up to a power of two
# by PyTorch's allocator (the library locks what it needs); and the optimizer's state.
#
# Limits that are silent
# ----------------------
# * If weights change between forward and backward, or inside a layer's forward, through ``.data``
#   or a fused optimizer of torch, nothing notices: PyTorch does not count these changes. Nor is the
#   use of Python's ``random`` in a layer noticed.
#
# Known limits
# ------------
# * ``torch.autograd.grad`` of an input fills ``grad`` of the weights, too.
# * Gradients are not averaged over ranks: do it yourself, after backward. DDP and ``fully_shard``
#   do not see these gradients.
# * Several devices of one host share its memory and sometimes its link: sharding the model over them
#   may need no host at all.
#
# Further reading
# ---------------
# * `CUDA semantics: streams
#   <https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams>`__
# * `Pinned blocks are rounded up to a power of two
#   <https://github.com/pytorch/pytorch/issues/150517>`__
# * `FSDP2's CPUOffloadPolicy
#   <https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html>`__
