"""
Train with the weights on the host: load, compute and store at once
===================================================================

This recipe trains a model whose weights live in host memory; the device holds two layers at a time.
While layer *l* runs its backward, the gradients of layer *l* + 1 go to the host and the weights of
layer *l* - 1 come, all three **at once on one device**, and the gradients have every bit of a run
that keeps the whole model resident.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * the five events that make three lanes correct, and what breaks without each
      * two slots on the device, allocated once, for a stack of any depth
      * backward layer by layer, with a recomputation that repeats no product in vain
      * the fastest step that the link allows, as a formula

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks; CPU runs everything, a CUDA device overlaps it
      * page-locked host memory for weights and gradients
      * ``host_layers.py``, the recipe before this one: the host's side comes from it

.. verification-badge::

The idea
--------

A GPU computes, reads host memory and writes host memory with three different engines. Each runs
what is queued on its stream, in order; between the streams there is no order but the one that
events make. So: compute stays on the default stream, copies to the device get a stream (``h2d``),
copies to the host get another (``d2h``).

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
first. They are kept, and *L* layers cost :math:`2L-2` loads a step.

.. list-table:: The five events
   :header-rows: 1
   :widths: 22 20 22 36

   * - event
     - recorded behind
     - awaited by
     - without it
   * - ``ready[slot]``
     - the load
     - compute
     - a layer runs with another layer's weights
   * - ``free[slot]``
     - the layer's compute
     - the next load into the slot
     - weights change under a running kernel
   * - ``grad_ready[slot]``
     - the writing of gradients
     - the store
     - the host gets gradients of another layer, or half of them
   * - ``grad_free[slot]``
     - the store
     - the next writing of gradients
     - gradients change while they are copied
   * - ``host_done[layer]``
     - the store
     - the host
     - the optimizer reads gradients that have not arrived

The first four are awaited by streams, so the training thread never stops: it queues a step and
goes on. Only the fifth is awaited by the host, after the step.

In your training
----------------

Layers, device, batches and loss are yours; put this file and ``host_layers.py`` beside them:

.. code-block:: python

   from weight_streaming import StreamedStack

   stack = StreamedStack(layers, device)
   optimizer = torch.optim.AdamW(stack.layers.parameters(), fused=True)
   for batch in batches:
       loss = stack.step(batch, loss_of)
       stack.wait_for_gradients()
       optimizer.step()
   stack.close()
"""

# %%
# Imports and sizes
# -----------------
# ``host_layers.py`` holds each layer's parameters and gradients in flat page-locked buffers.

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
LAYERS, HEADS, STEPS = 6, 4, 2

# %%
# A graph without tensors
# -----------------------
# Recomputation is ``torch.utils.checkpoint``: it runs a layer with autograd, throws away what the
# layer would save for backward, and runs it again when backward asks for it. It restores the
# random state, so dropout repeats itself, and it **stops early**: when the last tensor that
# backward needs is there, the rest of the layer is not run. In a block that ends in a matrix
# product that product is not repeated.
#
# Each layer's graph is its own, so that one layer can be differentiated at a time. To do this later
# it is enough to know where the graph begins and ends (``get_gradient_edge``); no tensor is kept
# but the layer's input, by ``checkpoint``. A leaf at the beginning would keep the input a second
# time, out of reach of hooks that send it elsewhere (:doc:`activation_offload`). A node of our own
# keeps nothing.


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


# %%
# The streamed stack
# ------------------
# ``in_slots`` allocates device memory: ``slots`` flat buffers for weights, two for gradients, each
# of the size of the largest layer. They are never freed, so no copy can outlive what it reads, and
# neither ``record_stream`` nor the allocator has a say. Their memory may have been another
# tensor's, whose kernels are still queued: ``h2d`` waits for these once, before it loads anything.
# Which slot a layer uses is fixed (its index modulo the number of slots): its views of the slot are
# made once, and are the leaves of its graph.
#
# The methods are the steps of the picture. Read ``forward`` and ``backward`` first:
#
# * ``load`` waits for ``free``, copies, records ``ready``. It is called as early as the slot's
#   previous user has been *queued*; the stream, not the host, waits for it to be *done*.
#   ``held`` says which layer each slot was loaded with last. Backward finds the topmost layers
#   there, unless another forward or backward came in between; then it loads them.
# * ``compute_forward`` and ``compute_backward`` run between ``await_weights`` and ``release``.
#   What writes gradients into a slot has waited for ``grad_free``.
# * ``store`` records ``grad_ready`` behind the gradients, copies on ``d2h``, and records
#   ``grad_free`` and ``host_done``.
#
# None of them asks anything of the device: no ``.item()``, no ``synchronize``. What autograd
# allocates in each layer comes from PyTorch's caching allocator, which needs nothing new from the
# driver for steps of one size after the first.
#
# ``functional_call`` runs a module with the tensors that it is given in place of its parameters,
# so any module will do that takes one tensor and returns one.
#
# What is not a layer stays on the device. A head or a loss with weights of its own goes into
# ``loss_function``, whose backward fills their gradients as usual. An embedding goes before the
# stack: ``step`` hands the gradient of its input on to what made it.
#
# ``step`` begins without graphs. One that an evaluation or a step that raised has left behind would
# otherwise be taken for this step's, and give its gradients.


class StreamedStack(HostLayers):
    """Layers that run one after the other, each with its weights on the device for its turn only.

    Every layer takes one tensor and returns one.

    Args:
        slots: layers whose weights are on the device at a time.
        slot_bytes: the most that a slot may take; 0 for as much as the largest layer needs.
        layers, device, kwargs: as for ``HostLayers``.

    Raises:
        ValueError: less than 1 slot, a layer that does not fit into one; or as ``HostLayers``.
        RuntimeError: as ``HostLayers``.
    """

    def __init__(self, layers: Iterable, device: torch.device, slots=SLOTS, slot_bytes=0, **kwargs):
        if slots < 1:
            raise ValueError(f"slots must be 1 or more, not {slots}")
        super().__init__(layers, device, **kwargs)
        sizes = [buffer.flat.nbytes for buffer in self.weights]
        if slot_bytes and slot_bytes < max(sizes):
            raise ValueError(
                f"layer {sizes.index(max(sizes))} takes {max(sizes)} bytes, a slot may take "
                f"{slot_bytes}: raise slot_bytes, or split the layer"
            )
        self.slots, self.loads, self.stores, self.held = slots, 0, 0, {}  # held[slot]: its layer
        self.streams = torch.get_device_module(device)
        self.h2d, self.d2h = self.streams.Stream(), self.streams.Stream()
        events = (defaultdict(self.streams.Event) for _ in range(5))
        self.ready, self.free, self.grad_ready, self.grad_free, self.host_done = events
        self.flats, self.views = self.in_slots(self.weights, slots)
        self.gradient_flats, self.gradient_views = self.in_slots(self.gradients, GRADIENT_SLOTS)
        for views, trained in zip(self.views, self.gradient_views, strict=True):
            for name in trained:
                views[name].requires_grad_()
        self.h2d.wait_stream(self.streams.current_stream())
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
        self.held[layer % self.slots] = layer
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
                f"layer {layer} returned a {type(y).__name__}: wrap it so that it returns one"
            )
        return y

    # Backward, and gradients to the host

    def backward(self, grad_y: torch.Tensor) -> torch.Tensor | None:
        """Run all layers again, last first, and send their gradients to the host.

        Returns:
            The gradient of the stack's input, or None if that does not require one.
        """
        for layer in reversed(range(len(self.layers))):
            if self.held.get(layer % self.slots) != layer:
                self.load(layer)
            self.await_weights(layer)
            self.streams.current_stream().wait_event(self.grad_free[layer % GRADIENT_SLOTS])
            grad_y = self.compute_backward(layer, grad_y)
            self.release(layer)
            if layer >= self.slots:
                self.load(layer - self.slots)
            self.store(layer)
        return grad_y

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

        Modules that made ``x`` or that ``loss_function`` uses stay on the device and get their
        gradients as usual.
        """
        self.graphs = [deque() for _ in self.layers]
        y = self.forward(x).requires_grad_()
        loss = loss_function(y)
        loss.backward()
        if (grad_x := self.backward(y.grad)) is not None:
            x.backward(grad_x)
        return loss.detach()

    def wait_for_gradients(self) -> None:
        """Wait until all gradients are in host memory, and set each parameter's ``grad``."""
        for layer in range(len(self.layers)):
            self.host_done[layer].synchronize()
        self.hand_out_gradients()


# %%
# Run it, and prove it
# --------------------
# The yardstick is ordinary training: all weights on the device, each layer under ``checkpoint``.
# The stack has three kinds of layers, one of them with attention and dropout. Each step compares
# all gradients **bit by bit**, then an optimizer on the host updates the weights, and the next step
# must find them updated.


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

# %%
# What it buys
# ------------
# Blocks of two large matrices, forward and backward with recomputation, no optimizer. ``resident``
# keeps all weights on the device and computes with the same kernels. ``streamed`` is this recipe
# and ``streamed_4_slots`` the same with four slots; ``one_stream`` has all copies on the stream of
# the kernels, and ``pageable`` unlocked buffers besides. ``fsdp2_cpu_offload`` is FSDP2's
# ``CPUOffloadPolicy``.
#
# .. result-figure:: offload_step
#    :rows: resident streamed one_stream fsdp2_cpu_offload
#    :field: step_s
#
# To the left of the ridge (dotted) the link is the wall, to its right the arithmetic. The dashed
# line is the bound, with all of its rates measured in the same run:
#
# .. math::
#
#    t_\text{first load}
#    + \sum_{\text{phases}} \max(\text{compute},\; \text{load},\; \text{store})
#    + t_\text{last store}
#
# A phase is the forward or the backward of one layer, with the copies that can run beside it: in
# forward the load of the next layer; in backward the load of the layer below, unless it is still in
# its slot, and the store of the layer above. The first load and the last store have no compute
# beside them.
#
# A device of :math:`F` operations a second and a link of :math:`B` bytes a second hide the loads of
# forward above about :math:`F / B` tokens a step in bf16, and those of backward above a third of
# that, whatever the model: more tokens do more arithmetic with the same weights.
#
# ``Bound over step time`` is 100 % for a step that nothing could make faster; the column beside it
# takes the kernels' times from a step without copies. Three columns are read from the trace, at the
# size that is drawn below: in how many layers of backward, of those judged, a kernel, a load and a
# store are under way at the same instant, and how many calls of a step only wait or take memory. A
# copy of unlocked memory holds its thread as well, but is not among these calls.
#
# .. result-table:: offload_step
#    :rows: resident streamed streamed_4_slots one_stream pageable fsdp2_cpu_offload
#
# Where the bound seems to be passed by a little, its rates are too low: to the left those of the
# link, which were read once in the run; to the right those of the kernels, for a GPU at its limit
# of power computes faster in the pauses that copies leave it. ``fsdp2_cpu_offload`` takes less
# device memory than the slots here, and more time at every size.
#
# .. timeline:: offload_step fsdp2_cpu_offload one_stream streamed
#
# Device memory does not grow with the number of layers, except by one saved input each, and with
# these on the host as well (``streamed_activation_offload``) not at all:
#
# .. result-figure:: offload_memory
#
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built. CPU streams do nothing, so the bits come out
# right even without the events; a recorder of stream order finds what no event orders. On a CUDA
# device, with the stream that should be waited for held back, each of these edits gives wrong
# gradients.
#
# .. recipe-controls::
#
# Memory
# ------
# On the device, with :math:`W_l` and :math:`G_l` the bytes of a layer's weights and gradients and
# :math:`x_l` those of its input:
#
# .. math::
#
#    \text{slots} \cdot \max_l W_l + 2 \max_l G_l + \sum_l x_l
#    + \max_l (G_l + \text{activations of layer } l)
#
# The stack's output and its gradient come on top until the step has been queued, each of the size
# of one more input. The sum of the inputs is what is left of the depth; :doc:`activation_offload`
# sends it to the host as well.
#
# On the host, page-locked: :math:`\sum_l (W_l + G_l)`, and the optimizer's state in ordinary
# memory.
#
# More slots help where layers differ in size, and save one load each (:math:`2L-\text{slots}`).
#
# When it is not worth it
# -----------------------
# * Few tokens a step: below the ridge the link decides, and the device waits. Use each loaded layer
#   for several microbatches (:doc:`accumulate_and_average`).
# * Weights and gradients fit the device, and only the optimizer's state does not: keep them there.
# * The optimizer on the host takes longer than the step: see :doc:`pipelined_optimizer`.
# * Several devices of one host share its memory and sometimes its link: sharding the model over
#   them (FSDP2) may need no host at all.
#
# Known limits
# ------------
# * Layers run in the order given, once each; every layer takes one tensor and returns one. Wrap
#   what needs a mask or a position, or keep it in a buffer of the layer.
# * The weights must not change between ``step`` and ``wait_for_gradients``. A step overwrites the
#   gradients of the step before; to add them up, see :doc:`accumulate_and_average`.
# * Gradients are first written by autograd, then copied into the slot: one pass over a layer's
#   gradients in device memory, on the compute stream.
# * A layer whose output does not depend on its input, or is made under ``no_grad``, ends the
#   backward with an error of autograd's, unless it is the first: leave it out of the stack.
# * As with any recomputation, a buffer that forward changes (BatchNorm's statistics) changes twice,
#   and a layer must not change its input in place.
# * Hooks on parameters do not run: gradients are asked for by ``torch.autograd.grad``.
# * Under ``torch.autocast`` pass ``cache_enabled=False``. Its cache would keep a cast copy of every
#   layer's weights on the device.
# * Evaluate under ``torch.no_grad()``, or all layers' inputs are kept until the next ``step``.
#   If you call ``forward`` and ``backward`` yourself, each backward takes the oldest forward that
#   has recorded gradients, so none may be left out, and ``step`` forgets them all.
# * ``step`` runs the backward of what made its input at its end, so ``loss_function`` must not have
#   gone through that graph before.
# * The ranks know nothing of each other here. If one of them raises, end the others as ``torchrun``
#   does.
#
# Further reading
# ---------------
# * `torch.utils.checkpoint <https://docs.pytorch.org/docs/stable/checkpoint.html>`__
# * `CUDA semantics: streams
#   <https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams>`__
# * `record_stream frees late
#   <https://github.com/pytorch/pytorch/issues/147168>`__, one reason for slots that are never freed
# * `FSDP2's CPUOffloadPolicy
#   <https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html>`__
# * `Transformer Engine's CPU offloading
#   <https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/pytorch.html>`__
