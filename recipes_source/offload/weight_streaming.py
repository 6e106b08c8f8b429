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
      * the package ``overlap_recipes``; :doc:`layer_as_node` and :doc:`host_layers` explain its
        parts

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

You bring layers that run one after the other, a device, batches and a loss. Your project needs the
package ``overlap_recipes``: ``pip install .`` in this repository, or a copy of its folder
``overlap_recipes``. Masks, caches, tied weights and ``state_dict`` are in :doc:`streamed_model`:

.. code-block:: python

   from overlap_recipes.offload.weight_streaming import StreamedLayers

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
# :doc:`layer_as_node` hands us the backward of a layer. The imports are the proof's. The sizes are
# the module's.
#
# .. literalinclude:: /overlap_recipes/offload/weight_streaming.py
#    :language: python
#    :start-at: SLOTS = 2
#    :end-at: GRADIENT_SLOTS = 2

from contextlib import closing

import host_layers as toys
import torch
import torch.distributed as dist
from torch import nn

from overlap_recipes.offload.weight_streaming import SLOTS, StreamedLayers
from overlap_recipes.ranks import start_rank

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
#
# .. literalinclude:: /overlap_recipes/offload/weight_streaming.py
#    :language: python
#    :pyobject: StreamedLayers
#
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
        x = torch.randn(toys.BATCH, toys.TOKENS, toys.WIDTH, device=stack.device)
        for each in (resident, model):
            toys.loss_of(each(x)).backward()
        stack.wait()
        for ours, theirs in zip(model.parameters(), resident.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad.cpu())
        optimizer.step()
    assert stack.loads == STEPS * (2 * LAYERS - SLOTS) and stack.stores == STEPS * LAYERS
    print(f"{STEPS} steps: gradients bit-identical, {stack.loads} loads, {stack.stores} stores")


def main() -> None:
    device = start_rank()
    try:
        torch.manual_seed(dist.get_rank())
        model, resident = (nn.Sequential(*(toys.Block() for _ in range(LAYERS))) for _ in range(2))
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
# Limits that are silent
# ----------------------
# * What PyTorch does not count (``parameter.data``, a fused optimizer of torch) is looked for in 64
#   elements of each weight. A change of other elements alone is not noticed, nor one that a layer
#   makes to its own weights by ``.data`` in a later forward than its first.
#
# Known limits
# ------------
# * The weights must not change before ``wait()``. Before its layer runs, a change is taken in; between
#   a forward and its backward it is an error there; a layer that changes its own in its first forward
#   is one, too.
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
