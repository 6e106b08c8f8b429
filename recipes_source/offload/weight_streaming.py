# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, offload/weight_streaming.py
"""
Train with the weights on the host: load, compute and store at once
===================================================================

Train a model whose weights live in host memory; the device holds two layers at a time. While layer
*l* runs its backward, the gradients of layer *l* + 1 go to the host and the weights of layer
*l* - 1 come, all three **at once on one device**. The gradients have every bit of a run that keeps
the whole model on the device.

**When not to bother:** weights and gradients fit the device; or your steps have few tokens, so that
the link to the host sets the pace. What whole steps cost is on :doc:`whole_step`.

This page is how it is done. The lines to paste, for a model that you did not write, are on
:doc:`streamed_model`.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * the five events that make three lanes correct, and what breaks without each
      * two slots on the device, allocated once, for a stack of any depth
      * backward layer by layer, with a recomputation that repeats no matmul in vain
      * the fastest step that the link allows, as a formula

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks; CPU runs everything, a CUDA device overlaps it
      * page-locked host memory for weights and gradients
      * ``layer_as_node.py`` and ``host_layers.py``, the recipes before this one

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
first. They are kept, and *L* layers cost :math:`2L-2` loads per step.

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

You bring layers that run one after the other, a device, batches and a loss. Put this file and what
it imports beside your script. Masks, caches, tied weights and ``state_dict`` are in
:doc:`streamed_model`:

.. code-block:: python

   from weight_streaming import StreamedLayers

   stack = StreamedLayers(layers, device)
   optimizer = torch.optim.AdamW(model.parameters())
   for batch in batches:
       optimizer.zero_grad()
       loss_of(model(batch.to(device))).backward()
       stack.wait()
       optimizer.step()
   stack.close()
"""

# %%
# Imports and sizes
# -----------------
# ``layer_as_node.py`` hands us the backward of a layer.

from collections import defaultdict
from collections.abc import Iterable
from contextlib import closing
from functools import partial

import layer_as_node as node
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

SLOTS = 2  # layers whose weights are on the device at a time
GRADIENT_SLOTS = 2  # one that compute writes, one that the copy to the host reads
LAYERS, STEPS = 5, 2

# %%
# The streamed layers
# -------------------
# ``in_slots`` allocates device memory: ``slots`` flat buffers for weights, two for gradients, each
# of the size of the largest layer. They are never freed, so no copy can outlive what it reads, and
# neither ``record_stream`` nor the allocator has a say. Which slot a layer uses is fixed: its index
# modulo the number of slots. So its views of the slot are made once, and are the leaves of its
# graph.
#
# Read ``call`` and ``backward`` first. ``load`` waits for ``free``, copies, records ``ready``. It
# is called as soon as the slot's previous user has been *queued*; the stream, not the host, waits
# until that layer is *done*. ``held`` says which layer each slot was loaded with last. A forward
# that begins anew forgets it, since the host may have changed the weights. Backward finds the
# topmost layers there; if an evaluation came in between, it loads them.
#
# Each layer's ``forward`` is exchanged for ``call``. The modules stay where they are: names,
# ``train()``, ``eval()`` and hooks are the model's own. A layer without trained weights whose input
# needs no gradient is no node: there is no backward below the lowest trained layer.


class StreamedLayers:
    """Layers whose weights are on the device for their turn only.

    Args:
        layers, device, gradient_dtype: as for ``move_to_host``.
        slots: layers whose weights are on the device at a time.

    ``layers[i]`` is a ``HostLayer``; ``views[i]`` are the weights of layer i in its slot on the
    device, ``totals[i]`` its gradients.
    """

    def __init__(self, layers: Iterable, device: torch.device, slots=SLOTS, gradient_dtype=None):
        if slots < 1:
            raise ValueError(f"slots must be 1 or more, not {slots}")
        self.layers = node.move_to_host(layers, device, gradient_dtype)
        self.device, self.slots, self.loads, self.stores = device, slots, 0, 0
        # By slot, the layer that was loaded last; the one that ran last; those that wait for backward.
        self.held, self.last, self.recorded = {}, -1, set()
        self.streams = torch.get_device_module(device)
        self.h2d, self.d2h = self.streams.Stream(), self.streams.Stream()
        events = (defaultdict(self.streams.Event) for _ in range(5))
        self.ready, self.free, self.grad_ready, self.grad_free, self.sum_ready = events
        blocking = {} if device.type == "cpu" else {"blocking": True}  # a wait takes no core
        self.host_done = defaultdict(partial(self.streams.Event, **blocking))
        self.flats, self.views = self.in_slots([x.weights for x in self.layers], slots)
        buffers = [x.gradients for x in self.layers]
        self.gradient_flats, self.totals = self.in_slots(buffers, GRADIENT_SLOTS)
        self.h2d.wait_stream(self.streams.current_stream())
        self.plain = [node.Plain(layer.module) for layer in self.layers]
        for index, layer in enumerate(self.layers):
            for name in self.totals[index]:
                view = self.views[index][name].requires_grad_()
                view.register_post_accumulate_grad_hook(node.refuse)
            # ``self`` is among the arguments, so that a copy of the layer meets ``__deepcopy__``.
            layer.module.forward = partial(torch.compiler.disable(type(self).call), self, index)

    def __deepcopy__(self, memo: dict):
        raise TypeError("a copy of a streamed model would run this one: copy its state_dict()")

    def in_slots(self, layers: list[list[node.HostBuffer]], count: int) -> tuple[list, list]:
        """Device tensors like each layer's buffers, and their parts by name; slots take turns."""
        size = max((sum(host.flat.nbytes for host in buffers) for buffers in layers), default=0)
        slots = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(count)]
        flats, views = [], []
        for layer, buffers in enumerate(layers):
            at, mine, named = 0, [], {}
            for host in buffers:
                part = slots[layer % count][at : at + host.flat.nbytes].view(host.flat.dtype)
                at += part.nbytes
                mine.append(part)
                named |= host.views_of(part)
            flats.append(mine)
            views.append(named)
        return flats, views

    # Weights to the device

    def load(self, layer: int) -> None:
        """Queue the copy of a layer's weights into its slot, unless it holds them."""
        slot = layer % self.slots
        if self.held.get(slot) == layer:
            return
        self.before_load(layer)
        self.h2d.wait_event(self.free[slot])
        with self.streams.stream(self.h2d):
            for flat, host in zip(self.flats[layer], self.layers[layer].weights, strict=True):
                flat.copy_(host.flat, non_blocking=True)
        self.ready[slot].record(self.h2d)
        self.held[slot] = layer
        self.loads += 1

    def await_weights(self, layer: int) -> None:
        """Make what is queued from here on wait for a layer's weights."""
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
        inputs = node.tensors_in((args, kwargs))
        wanted = self.layers[index].trained or any(x.requires_grad for x in inputs)
        if torch.is_grad_enabled() and wanted:
            result = node.as_node(self, index, args, kwargs)
            self.recorded.add(index)
        else:
            with torch.no_grad():
                result = self.run(index, args, kwargs)
        self.release(index)
        ahead = range(index + 1, min(index + self.slots + 1, len(self.layers)))
        for later in filter(self.may_load, ahead):  # the others are loaded when they are called
            self.load(later)
        return result

    def sources(self, index: int) -> list[torch.Tensor]:
        """What a layer's weights are loaded from, and what changes that."""
        flats = (host.flat for host in self.layers[index].weights)
        return [*flats, *self.plain[index].parameters()]

    def run(self, index: int, args: tuple, kwargs: dict):
        views = {f"layer.{name}": view for name, view in self.views[index].items()}
        return functional_call(self.plain[index], views, args, kwargs)

    # Backward

    def backward(self, index: int, begins: list, pairs: list, trains: bool) -> list:
        """Run a layer again, send its gradients to the host; return those of its inputs.

        Args:
            begins: where its inputs enter its graph.
            pairs: where its outputs leave it, with their gradients.
            trains: whether the weights get gradients, too.
        """
        if not pairs:
            return [None] * len(begins)
        self.await_weights(index)
        ends, grads = zip(*pairs, strict=True)
        names = list(self.totals[index]) if trains else []
        adds = bool(names) and self.load_sum(index)
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
            self.layers[index].hand_out_gradients()
            self.after_store(index)
        return list(found[len(names) :])

    # Gradients to the host

    def load_sum(self, layer: int) -> bool:
        """Whether the slot will hold a sum of earlier microbatches: in a later recipe."""
        return False

    def write(self, layer: int, gradients: dict[str, torch.Tensor | None], adds: bool) -> None:
        """Write gradients to the layer's slot, or add them to the sum that is there."""
        slot = layer % GRADIENT_SLOTS
        here = self.sum_ready[slot] if adds else self.grad_free[slot]
        self.streams.current_stream().wait_event(here)
        for name, total in self.totals[layer].items():
            gradient = gradients[name] if gradients[name] is not None else torch.zeros_like(total)
            total.add_(gradient) if adds else total.copy_(gradient)

    def store(self, layer: int) -> None:
        """Queue the copy of a layer's gradients to the host."""
        slot, mine = layer % GRADIENT_SLOTS, self.layers[layer]
        self.grad_ready[slot].record(self.streams.current_stream())
        self.d2h.wait_event(self.grad_ready[slot])
        with self.streams.stream(self.d2h):
            for flat, host in zip(self.gradient_flats[layer], mine.gradients, strict=True):
                host.flat.copy_(flat, non_blocking=True)
        self.grad_free[slot].record(self.d2h)
        self.host_done[layer].record(self.d2h)
        self.stores += 1

    # The host's side

    def after_gradients(self, layer: int) -> None:
        """Called when a layer's gradients are in its slot; a later recipe needs it."""

    def after_store(self, layer: int) -> None:
        """Called when their copy to the host is queued; a later recipe needs it."""

    def may_load(self, layer: int) -> bool:
        """Whether to load a layer ahead of its call; a later recipe updates some of them first."""
        return True

    def before_load(self, layer: int) -> None:
        """Called before the host's weights of a layer are read; a later recipe updates them."""

    def wait(self) -> None:
        """Wait until all gradients are in host memory and no copy reads it: then it may change."""
        for event in (*self.ready.values(), *self.host_done.values(), *self.sum_ready.values()):
            event.synchronize()

    def close(self) -> None:
        """Give the layers their forward back, wait for the device, unlock the host's memory."""
        while self.plain:
            self.plain.pop().give_back()
        self.streams.synchronize()
        [layer.close() for layer in self.layers]


# %%
# Run it, and prove it
# --------------------
# The yardstick is ordinary training with all weights on the device. Each step compares all
# gradients **bit by bit**, then an optimizer on the host updates the weights, and the next step
# must find them updated.


def train(stack: StreamedLayers, model: nn.Sequential, resident: nn.Sequential) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for _ in range(STEPS):
        resident.load_state_dict(model.state_dict())
        resident.zero_grad()
        x = torch.randn(node.BATCH, node.TOKENS, node.WIDTH, device=stack.device)
        for each in (resident, model):
            node.loss_of(each(x)).backward()
        stack.wait()
        for ours, theirs in zip(model.parameters(), resident.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad.cpu())
        optimizer.step()
    assert stack.loads == STEPS * (2 * LAYERS - SLOTS) and stack.stores == STEPS * LAYERS
    print(f"{STEPS} steps: gradients bit-identical, {stack.loads} loads, {stack.stores} stores")


def main() -> None:
    device = node.start_rank()
    try:
        torch.manual_seed(dist.get_rank())
        model, resident = (nn.Sequential(*(node.Block() for _ in range(LAYERS))) for _ in range(2))
        with closing(StreamedLayers(model, device)) as stack:
            train(stack, model, resident.to(device))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

# %%
# What it buys
# ------------
# Whole steps, with an optimizer, are on :doc:`whole_step`. Forward and backward alone are bound by
#
# .. math::
#
#    t_\text{first load}
#    + \sum_{\text{phases}} \max(\text{compute},\; \text{load},\; \text{store})
#    + t_\text{last store}
#
# A phase is the forward or the backward of one layer, with the copies that can run beside it. A
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
# On the device, with :math:`W_l` and :math:`G_l` the bytes of a layer's weights and gradients and
# :math:`x_l` those of its input:
#
# .. math::
#
#    \text{slots} \cdot \max_l W_l + 2 \max_l G_l + \sum_l x_l
#    + \max_l (G_l + \text{activations of layer } l)
#
# On the host, page-locked: :math:`\sum_l (W_l + G_l)`, and the optimizer's state in ordinary
# memory.
#
# When it is not worth it
# -----------------------
# Several devices of one host share its memory and sometimes its link: sharding the model over them
# (FSDP2) may need no host at all.
#
# Known limits
# ------------
# * The weights must not change before ``wait()``, nor between a forward and its backward. The
#   latter is an error in backward; but a change by ``parameter.data`` or by a fused optimizer of
#   torch is not noticed.
# * A backward overwrites the gradients of the one before; :doc:`streamed_model` adds them up.
# * Hooks on parameters do not run: gradients are asked for by ``torch.autograd.grad``.
# * Under ``torch.autocast`` a layer's weights are cast at each use. Autocast's cache keeps no
#   views, and the weights here are views.
# * Layers run in the order given. One that is called out of order is loaded when it is called.
#
# Further reading
# ---------------
# * `CUDA semantics: streams
#   <https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams>`__
# * `record_stream frees late
#   <https://github.com/pytorch/pytorch/issues/147168>`__, one reason for slots that are never freed
# * `FSDP2's CPUOffloadPolicy
#   <https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html>`__
