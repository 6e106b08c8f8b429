# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, offload/streamed_model.py
"""
Stream a stock model: weights on the host, the model's own forward
==================================================================

One call moves the layers of a model that you did not write into host memory. Its own forward runs
on, with masks, positions and a cache; so do ``loss.backward()``, ``generate()``, ``state_dict()``
with the original keys, ``eval()``, and any optimizer. The device holds two layers at a time, or
more if you give it a budget. The gradients have every bit of a **resident** run, which keeps the
model on the device.

**When not to bother:** weights, gradients and optimizer fit the device. Streaming alone makes no
step faster. :doc:`whole_step` moves the optimizer to the host, too, and says what a step costs.

.. code-block:: python

   from overlap_recipes.offload import check_first_step, stream_layers

   with stream_layers(model, layers, device) as streamed:  # layers: model.model.layers, say
       optimizer = torch.optim.AdamW(model.parameters())
       for step, batch in enumerate(batches):
           inputs = {name: tensor.to(device) for name, tensor in batch.items()}
           if step == 0:
               check_first_step(streamed, lambda: model(**inputs))
           model(**inputs).loss.backward()
           torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
           optimizer.step()
           optimizer.zero_grad()

``check_first_step`` is not needed: it runs a batch streamed and resident, and raises where outputs,
buffers or gradients differ. Leave it out when you trust your model.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * to exchange a layer's forward, and nothing else of the model
      * who must wait for whom when a checkpoint is loaded or weights are swapped
      * sums of microbatches, without a thread
      * a budget: some layers stay on the device

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks; CPU runs everything, a CUDA device overlaps it
      * host memory for weights and gradients, page-locked
      * the package ``overlap_recipes``: ``pip install .`` in this repository, or a copy of its
        folder ``overlap_recipes``

.. verification-badge::

The idea
--------

The model's loop over its layers stays as it is, and each layer stays where the model keeps it. Only
``layer.forward`` is another: it waits for the layer's weights, runs the layer's old forward with
them as one node of the graph, and has the next layers loaded.

.. lanes:: Schematic. The model's own forward, then backward; two of three layers are on the device. F0 is the forward of layer 0, B2 the backward of layer 2.

   compute: 0-2 embed; 3-7 F0; 7-11 F1; 11-15 F2; 15-17 head; 17-26 B2; 26-35 B1; 35-44 B0
   H2D:     0-3 0 ~; 3-6 1 ~; 7-10 2 ~; 26-29 0 ~
   D2H:     26-29 2 ~; 35-38 1 ~; 44-47 0 ~
"""

# %%
# Imports and sizes
# -----------------
# :doc:`weight_streaming` builds the slots, the streams and their events from scratch. The imports are
# the proof's.
# The size is the module's.
#
# .. literalinclude:: /overlap_recipes/offload/streamed_model.py
#    :language: python
#    :start-at: OPTIMIZER_BYTES = 12
#    :end-at: OPTIMIZER_BYTES = 12

import torch
import torch.distributed as dist
from torch import nn

from overlap_recipes.offload.streamed_model import StreamedModel, resident_bytes
from overlap_recipes.offload.streaming import stream_layers
from overlap_recipes.offload.weight_streaming import SLOTS
from overlap_recipes.ranks import start_rank

WIDTH = 32  # features
LAYERS, WORDS, STEPS, MICROBATCHES = 4, 50, 3, 2

# %%
# The streamed model
# ------------------
# **A cache.** ``generate()`` runs under ``no_grad`` and each layer gets its cache: the tokens are
# those of a resident run. In training, backward runs a layer again, and a cache would grow twice;
# kept until then, it would hold the keys and values of all layers. So each run of a layer gets a copy
# of the empty cache, and computes as with the cache. The cache stays empty: a decode loop that goes
# on with it is refused, and says what to do.
#
# **Sums.** Gradients add up until ``zero_grad()``, as they do anywhere. The sum lives on the host:
# it is loaded into the gradient slot beside the layer's backward, added to there, and stored. That
# is one more load of a layer's gradients. Adding on the host would move more bytes of its memory,
# and need a thread. ``gradient_dtype=torch.float32`` keeps sums of bf16 gradients in fp32 (the next
# recipes' optimizer reads them; ``parameter.grad`` cannot hold them).
#
# **Who waits.** ``backward()`` returns when all gradients are on the host: a trainer may clip them
# at once. ``wait()`` waits for all copies from and to the host. ``state_dict()``,
# ``load_state_dict()`` and every optimizer's ``step()`` call it by hooks. Call it yourself before
# you change a weight in any other way: an EMA swap after an evaluation would otherwise race with
# its loads.
#
# **A budget.** Layers that stay on the device are neither loaded nor stored, and an optimizer
# updates them at once. So it is spent on the lowest layers: the next forward needs these first,
# while the host still updates the others. They run again in backward like the others.
#
# .. literalinclude:: /overlap_recipes/offload/streamed_model.py
#    :language: python
#    :pyobject: resident_bytes
#
# .. literalinclude:: /overlap_recipes/offload/streamed_model.py
#    :language: python
#    :pyobject: StreamedModel
#
# .. literalinclude:: /overlap_recipes/offload/caches.py
#    :language: python
#    :pyobject: empty_copies
#
# Run it, and prove it
# --------------------
# The model is one of torch's own, between an embedding and a head that share their weight; layers
# have dropout and take a mask. Every step, an ordinary copy loads the streamed model's state, and
# all gradients of two microbatches are compared bit by bit. ``tests/offload/test_streamed_model.py``
# does this with transformers' Llama, adapters of peft, and ``generate()``.


class Model(nn.Module):
    """An encoder of torch between an embedding and a head that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        options = {"batch_first": True, "norm_first": True}
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, **options)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        return self.head(self.encoder(self.embedding(ids), mask=causal, is_causal=True))


def loss_of(model: Model, seed: int, device: torch.device) -> torch.Tensor:
    torch.manual_seed(seed)  # of dropout, too
    ids = torch.randint(WORDS, (3, 8)).to(device)
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def train(streamed: StreamedModel, resident: Model) -> None:
    model, device = streamed.model, streamed.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        resident.load_state_dict(model.state_dict())  # the same keys
        for seed in range(MICROBATCHES * step, MICROBATCHES * (step + 1)):
            expected, loss = loss_of(resident, seed, device), loss_of(model, seed, device)
            assert torch.equal(loss, expected)
            expected.backward()
            loss.backward()
        for ours, theirs in zip(model.parameters(), resident.parameters(), strict=True):
            assert torch.equal(ours.grad.to(device), theirs.grad)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        resident.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}, all gradients bit-identical")


def main() -> None:
    device = start_rank()
    try:
        torch.manual_seed(dist.get_rank())
        model, resident = Model(), Model().to(device)
        layers, budget = model.encoder.layers, resident_bytes(model.encoder.layers[0])
        with stream_layers(model, layers, device, budget=budget) as streamed:
            train(streamed, resident)
            assert streamed.loads == STEPS * MICROBATCHES * (2 * (LAYERS - 1) - SLOTS)
        print(f"{streamed.loads} loads, {streamed.stores} stores")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

# %%
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built. CPU streams do nothing, so a missing wait
# changes no bit there; a recorder of stream order finds what nothing orders.
#
# .. recipe-controls::
#
# Memory
# ------
# On the device: embedding, head and what else is no layer, with their gradients; for the layers two
# slots of weights and two of gradients, one input per layer, and what one layer saves for backward.
# On the host: weights and gradients of the layers, page-locked.
#
# When it is not worth it
# -----------------------
# * Few tokens per step: *What it buys* on :doc:`weight_streaming` says how few.
# * A large vocabulary at many tokens: the logits in fp32 may be larger than all that was moved
#   away.
#
# Known limits
# ------------
# * Which parameters are trained, and their memory, is fixed when ``stream_layers`` takes the model.
#   So ``model.to(...)`` and ``load_state_dict(assign=True)`` are an error in the next forward, and
#   a later ``requires_grad_`` in the next one that is trained. Choose the dtype before; load by
#   copy.
# * Change a ``parameter.grad`` in place, or drop all. One that is set by hand, or gone alone, is an
#   error in the next backward. Hooks of a layer's parameters are an error: they would not run.
# * A loss that uses the weights of layers itself, such as a penalty, needs a ``backward()`` of its
#   own, behind the other: in one it is an error.
# * What a loss is computed with must be a layer's result: ``output_attentions``,
#   ``output_router_logits`` (the auxiliary loss of Mixtral and Qwen3-MoE) and hooks on parts of a
#   layer take other tensors out, which is an error in backward: turn them off. To look at them,
#   detach them. A layer that stays on the device may hand them out.
# * Gradients of layers' weights come from ``backward()`` alone: ``backward(inputs=...)`` and
#   ``torch.autograd.grad`` find none of them, and forward-mode derivatives end at the first layer.
# * A trained parameter of a layer that backward does not use has a gradient of zeros, not none.
# * Where several layers read one tensor, a loss takes hidden states, or a layer runs twice,
#   gradients are added in another order: their last bits differ from the resident run's, and
#   ``check_first_step`` returns False.
# * Frozen layers are computed, but nothing of them is stored, and below the lowest trained one
#   there is no backward.
# * Leave the model's own gradient checkpointing off: each layer runs again anyway.
# * A layer that is compiled must be so before, by ``layer.forward = torch.compile(layer.forward)``.
# * Backward runs a layer again, with its attributes, hooks, buffers and random numbers as they
#   were, and those of objects that it is given. It knows nothing of globals, objects elsewhere, and
#   generators that nobody hands over: if they have changed, the first step raises, which compares
#   results. Later ones do not. Hooks in a layer run both times.
# * A weight that a hook or a global keeps without a copy is, behind its turn, another layer's.
# * With a ``GradScaler`` updates in backward are an error; train in bf16, which needs none.
# * ``deepcopy(model)``, and so ``AveragedModel``, raises: average what ``state_dict()`` gives.
# * ``DistributedDataParallel`` finds no gradients of the layers: a forward inside of it is an error.
# * Ranks know nothing of each other here: :doc:`whole_step` averages.
#
# Further reading
# ---------------
# * `functional_call
#   <https://docs.pytorch.org/docs/stable/generated/torch.func.functional_call.html>`__
# * `Hooks of state_dict and load_state_dict
#   <https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html>`__
