# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, offload/host_layers.py
"""
Weights that live in host memory: one flat buffer per layer
===========================================================

Free the device of a model's layers. This recipe moves their parameters into host memory that the
device can read by itself, in one piece per layer, so that a layer crosses the link to the device in
**one copy**. Modules, optimizer and checkpoints stay as they are. The lines to paste are on
:doc:`streamed_model`, which builds on it.

**When not to bother:** the model fits the device with its gradients.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * page-locked memory of exact size, where ``pin_memory`` rounds up to a power of two
      * to change the memory behind a parameter without changing the parameter
      * to run any module with weights from somewhere else: ``functional_call``
      * which layers cannot be streamed, and how to be told so at once

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks; each works on its own device
      * host memory for the weights and the gradients, page-locked for a CUDA device
      * the package ``overlap_recipes``: ``pip install .`` in this repository, or a copy of its
        folder ``overlap_recipes``

.. verification-badge::

The idea
--------

Copied one by one, each parameter of a block pays for its own launch, and the small ones never reach
the speed of the link. Side by side in one flat tensor they move together:

.. lanes:: Schematic. One layer of six parameters, copied one by one and as one flat buffer.

   one by one: 0-6 q ~; 7-13 k ~; 14-20 v ~; 21-22 a ~; 23-24 b ~; 25-31 o ~
   flat:       0-26 the whole layer ~

The parameters themselves become *views* of the flat tensor: the optimizer that updates
``layer.weight`` updates the buffer that is copied. The gradients get a buffer of the same layout.
Both are page-locked, because a copy from ordinary (pageable) memory holds the host until it is
done and reaches a fraction of the speed of the link.

Nothing is hidden behind compute yet: that is the next recipe, :doc:`weight_streaming`.
"""

# %%
# Imports and sizes
# -----------------
# The imports are the proof's. The size is the module's.
#
# .. literalinclude:: /overlap_recipes/offload/host_layers.py
#    :language: python
#    :start-at: ALIGNMENT = 256
#    :end-at: ALIGNMENT = 256

from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from overlap_recipes.offload.host_layers import ALIGNMENT, HostLayer, move_to_host
from overlap_recipes.ranks import start_rank

WIDTH = 32  # features
BATCH, TOKENS, LAYERS, STEPS = 2, 8, 3, 3  # sequences per step, tokens of each; layers, steps

# %%
# One flat buffer
# ---------------
# ``torch.empty(..., pin_memory=True)`` asks a caching allocator that rounds every block up to a
# power of two, nearly twice the size for a block that is just above one. An anonymous mapping that
# is registered with the driver has the size that is asked for, but is yours to unlock. ``close``
# does it, once; ``finalize`` does it for a buffer that nobody closed.
#
# A call of the driver that fails is remembered, and the next kernel of the thread reports it, far
# from its cause. So after a refusal to lock, one small kernel is launched: the error is reported
# there.
#
# A process that forks, as a ``DataLoader`` may do for its workers, shares its memory with the child
# until one of them writes, and the writer gets a copy; the device would go on with the original.
# ``MADV_DONTFORK`` spares the child these pages.
#
# A page that nobody has used yet is given out when it is first touched, and locking touches one
# after the other. So the pages are filled before, by all threads: several times faster. Large pages
# are fewer, which helps the driver, and later the host's Adam.
#
# Each part begins at a multiple of 256 elements, as a CUDA allocator would let it begin, so matmuls
# choose the kernels that they choose in a resident model. ``views_of`` lays the same parts over
# *any* flat tensor: the copy on the device, float32 master weights, a sum of gradients.
#
# .. literalinclude:: /overlap_recipes/page_locked.py
#    :language: python
#    :pyobject: private_memory
#
# .. literalinclude:: /overlap_recipes/page_locked.py
#    :language: python
#    :pyobject: PageLocked
#
# .. literalinclude:: /overlap_recipes/offload/host_layers.py
#    :language: python
#    :pyobject: HostBuffer
#
# A layer on the host
# -------------------
# ``parameter.data = view`` exchanges the memory behind a parameter and keeps the object. An
# optimizer that was made before still updates it, and ``state_dict()`` still finds it.
#
# What is trained comes first, so the layout of the gradients is the beginning of that of the
# weights. A frozen layer has no gradient buffer, and nothing of it will be copied back: fine-tuning
# with adapters copies back the adapters alone. A flat tensor has one dtype, so a layer with
# adapters in fp32 on weights in bf16 has two buffers.
#
# Layers that share a parameter are refused before any memory is locked for them: it would be copied
# twice and updated from half of its gradient. (Shared *inside* a layer it is one parameter with two
# names, which is fine.) Streams and events belong to the device that is **current** when they are
# made, whatever device the tensors are on, so a device that is not the current one is refused as
# well. If a layer does not fit, what has been locked for those before it is unlocked at once, so
# that whoever catches the error can try again with less.
#
# Buffers of modules (running statistics, masks, tables of positions) are small and may be changed
# by forward: they move to the device for good.
#
# .. literalinclude:: /overlap_recipes/offload/host_layers.py
#    :language: python
#    :pyobject: HostLayer
#
# .. literalinclude:: /overlap_recipes/offload/host_layers.py
#    :language: python
#    :pyobject: move_to_host
#
# Something to train
# ------------------
# A residual MLP.


class Block(nn.Module):
    """x + MLP(norm(x)); x is [..., WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def gradients_to_host(model: list[HostLayer], x: torch.Tensor) -> torch.Tensor:
    """Forward and backward with one copy per layer and direction; returns the loss."""
    flats = []
    for layer in model:
        views = {}
        for host in layer.weights:
            flat = torch.empty_like(host.flat, device=x.device).copy_(host.flat, non_blocking=True)
            flats.append(flat.requires_grad_(len(views) == 0 and bool(layer.gradients)))
            views |= host.views_of(flat)
        x = functional_call(layer.module, views, (x,))
    loss = loss_of(x)
    loss.backward()
    hosts = [host for layer in model for host in layer.gradients]
    for host, flat in zip(hosts, (flat for flat in flats if flat.requires_grad), strict=True):
        host.flat.copy_(flat.grad, non_blocking=True)
    return loss.detach()


def train(model: list[HostLayer], ordinary: nn.Module, device: torch.device) -> None:
    """Train with an optimizer on the host; compare each step with all of it on the device."""
    optimizer = torch.optim.AdamW(ordinary.parameters(), lr=1e-2, fused=True)
    for step in range(STEPS):
        x = torch.randn(BATCH, TOKENS, WIDTH, device=device)
        resident = deepcopy(ordinary).to(device)
        loss_of(resident(x)).backward()

        loss = gradients_to_host(model, x)
        torch.get_device_module(device).synchronize()
        for layer in model:
            layer.hand_out_gradients()
        for ours, theirs in zip(ordinary.parameters(), resident.parameters(), strict=True):
            assert theirs.grad is None or torch.equal(ours.grad, theirs.grad.cpu())
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}, gradients equal, bit by bit")


# %%
# The proof: the gradients in host memory have the bits of an ordinary backward on the device; the
# optimizer changes what the next step copies; the buffers have the size of their tensors, up to
# alignment; and a layer that cannot be streamed is refused with a reason.


def main() -> None:
    device = start_rank()
    try:
        torch.manual_seed(dist.get_rank())
        ordinary = nn.Sequential(*(Block() for _ in range(LAYERS)))
        ordinary[1].norm.weight.requires_grad_(False)
        values = deepcopy(ordinary)
        model = move_to_host(ordinary, device)
        assert all(map(torch.equal, ordinary.parameters(), values.parameters()))
        train(model, ordinary, device)
        buffers = [buffer for layer in model for buffer in layer.weights + layer.gradients]
        assert all(buffer.flat.is_pinned() == (device.type == "cuda") for buffer in buffers)
        nbytes = sum(buffer.flat.nbytes for buffer in buffers)
        tensors = [tensor for buffer in buffers for tensor in buffer.views.values()]
        assert nbytes - sum(t.nbytes for t in tensors) < 4 * ALIGNMENT * len(tensors)
        [layer.close() for layer in model]
        try:
            move_to_host([ordinary[0], ordinary[0]], device)
        except ValueError as reason:
            print(f"{len(buffers)} buffers, {nbytes} bytes; refused:", reason)
        else:
            raise AssertionError("a parameter that layers share was taken")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

# %%
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built. On the CPU a copy is done when it returns, so
# the bits come out right even without the wait; a recorder of stream order finds what no event
# orders. On a GPU the optimizer would read gradients of the step before, or half of each.
#
# .. recipe-controls::
#
# Memory
# ------
# Host memory, page-locked, for parameters of :math:`n_p` elements, rounded up to a multiple of 256,
# of :math:`b` bytes:
#
# .. math::
#
#    b \sum_{p} \left\lceil n_p \right\rceil_{256} \;+\;
#    b_\text{grad} \sum_{p\,\text{trained}} \left\lceil n_p \right\rceil_{256}
#
# Moving a model takes one layer more than that for a moment, if the layers come from a generator.
#
# Locking takes seconds for large models: do it once, before training.
#
# When it is not worth it
# -----------------------
# Only the optimizer's state does not fit: keep weights and gradients on the device and move the
# update alone to the host.
#
# Known limits
# ------------
# * Locked pages cannot be swapped out and belong to nobody else: leave the system some memory.
# * A parameter that is not contiguous, such as a convolution's in ``channels_last``, is stored
#   contiguously. Values are the same; another kernel may be chosen.
# * The memory behind a parameter must stay the buffer. ``load_state_dict`` copies into it;
#   ``load_state_dict(assign=True)``, ``layers.to(dtype)`` and ``parameter.data = ...`` do not, and
#   the device goes on with the old weights without an error.
# * Which parameters are trained is fixed when the layers are taken; ``requires_grad_`` has no
#   effect afterwards.
# * By default PyTorch refuses a ``grad`` of another dtype than its parameter. So with such a
#   ``gradient_dtype``, ``hand_out_gradients`` sets no ``grad``: read ``gradients[i].views``
#   instead.
# * Locked memory does not exist in a forked process: give it a clone, or start it with ``spawn``.
# * ``DTensor`` parameters (FSDP2, tensor parallelism) are not taken apart: stream plain modules.
# * Accelerators other than CUDA get pageable memory: the bits are right, the copies hold the host.
#
# Further reading
# ---------------
# * `torch.func.functional_call
#   <https://docs.pytorch.org/docs/stable/generated/torch.func.functional_call.html>`__
# * `CUDA semantics: use pinned memory buffers
#   <https://docs.pytorch.org/docs/stable/notes/cuda.html#use-pinned-memory-buffers>`__
# * `Pinned blocks are rounded up to a power of two
#   <https://github.com/pytorch/pytorch/issues/150517>`__
# * :doc:`three_streams`, on which copies are asynchronous and which are not
