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

   from streamed_model import StreamedModel

   streamed = StreamedModel(model, layers, device)  # layers: model.model.layers, say
   optimizer = torch.optim.AdamW(model.parameters())
   for batch in batches:
       inputs = {name: tensor.to(device) for name, tensor in batch.items()}
       model(**inputs).loss.backward()
       torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
       optimizer.step()
       optimizer.zero_grad()
   streamed.close()

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * to exchange a layer's forward, and nothing else of the model
      * who must wait for whom when a checkpoint is loaded or weights are swapped
      * sums of microbatches, without a thread
      * a budget: some layers stay on the device

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks; CPU runs everything, a CUDA device overlaps it
      * host memory for weights and gradients, page-locked
      * ``weight_streaming.py`` and what it imports

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
# ``weight_streaming.py`` has the slots, the lanes and their events.

from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from weight_streaming import GRADIENT_SLOTS, SLOTS, StreamedLayers, node

OPTIMIZER_BYTES = 12  # a trained parameter: fp32 master and two moments of Adam
LAYERS, WORDS, STEPS, MICROBATCHES = 4, 50, 3, 2

# %%
# The streamed model
# ------------------
# **A cache.** ``generate()`` runs under ``no_grad`` and each layer gets its cache: the tokens are
# those of a resident run. In training, backward runs a layer again, and a cache would grow twice.
# So it is left out, as transformers does under checkpointing; one that is not empty is refused.
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


def resident_bytes(layer: nn.Module) -> int:
    """What a layer takes on the device, with its gradients and the state of Adam in fp32."""
    trained = [p for p in layer.parameters() if p.requires_grad]
    more = sum(p.nbytes + OPTIMIZER_BYTES * p.numel() for p in trained)
    return more + sum(p.nbytes for p in layer.parameters())


class StreamedModel(StreamedLayers):
    """A model whose layers live in host memory; everything else of it moves to the device.

    Args:
        model: any module; its forward is not changed.
        layers: those of its submodules that run one after the other, in order.
        device: where it runs.
        budget: bytes of device memory for layers that stay there, the lowest ones, each with its
            gradients and the state of Adam.
        settings: of ``StreamedLayers``.
    """

    def __init__(self, model: nn.Module, layers: Iterable, device, *, budget=0, **settings) -> None:
        self.model, self.optimizer, self.hooks = model, None, []
        # Layers of whose gradients the host has a sum; those that this backward has stored.
        self.summed, self.stored = set(), set()
        streamed, resident = list(layers), []
        while streamed and resident_bytes(streamed[0]) <= budget:
            budget -= resident_bytes(streamed[0])
            resident.append(streamed.pop(0))
        inside = {*(m for layer in streamed for m in layer.modules())}
        taken = {*nn.ModuleList(streamed).parameters()}
        if any({*m._parameters.values()} & taken for m in {*model.modules()} - inside):
            raise ValueError("a layer and another module share a parameter: keep it out of layers")
        super().__init__(streamed, device, **settings)
        for parameter in {*model.parameters()} - taken:
            parameter.data = parameter.data.to(device)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
        for m in inside:
            self.hooks.append(m.register_state_dict_pre_hook(lambda *_: self.wait()))
            self.hooks.append(m.register_load_state_dict_pre_hook(lambda *_: self.wait(False)))
        self.resident = [node.Plain(layer) for layer in resident]
        for plain in self.resident:
            plain.layer.forward = partial(self.recomputed, plain.original)
        self.hooks.append(register_optimizer_step_pre_hook(self.before_step))
        for n, each in enumerate(self.layers):
            self.hooks += [p.register_hook(partial(self.outside, n)) for p in each.trained.values()]

    def call(self, index: int, *args, **kwargs):
        """What ``layer.forward`` is now."""
        self.check(self.layers[index])
        if torch.is_grad_enabled():
            args, kwargs = without_cache(args, kwargs)
        return super().call(index, *args, **kwargs)

    @staticmethod
    def check(layer) -> None:
        """Refuse a ``HostLayer`` whose parameters are not those that were taken, or have hooks."""
        taken = {name: view for weights in layer.weights for name, view in weights.views.items()}
        for name, p in layer.module.named_parameters():
            trained, grads = name in layer.trained, torch.is_grad_enabled()
            moved = name not in taken or p.data_ptr() != taken[name].data_ptr()
            if moved or (grads and p.requires_grad is not trained):
                raise RuntimeError(
                    f"{name}: its memory, or what is trained, has changed; take it anew"
                )
            if len(p._backward_hooks or ()) > trained or p._post_accumulate_grad_hooks:
                raise RuntimeError(f"{name}: a parameter's hooks do not run here: use its grad")

    @staticmethod
    def recomputed(forward: Callable, *args, **kwargs):
        """What the forward of a layer is that stays on the device."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        args, kwargs = without_cache(args, kwargs)
        return node.checkpoint(forward, *args, use_reentrant=False, **kwargs)

    # Sums of microbatches

    def has_sum(self, layer: int) -> bool:
        """Whether the host has a sum of a layer; none if ``zero_grad()`` has dropped it.

        Raises:
            RuntimeError: a ``parameter.grad`` is another tensor now, or gone alone; all is closed.
        """
        if not self.plain:
            raise RuntimeError("this model is closed")
        views = (view for host in self.layers[layer].gradients for view in host.views.values())
        both = zip(self.layers[layer].trained.values(), views, strict=True)
        found = [(p.grad, view, p.dtype == view.dtype) for p, view in both]
        handed = [grad for grad, _, same in found if same]
        if handed and all(grad is None for grad in handed):
            self.summed.discard(layer)  # zero_grad() has forgotten it
        gone = layer in self.summed and any(grad is None for grad in handed)
        if gone or any(grad is not None and grad is not view for grad, view, _ in found):
            raise RuntimeError(
                "parameter.grad was exchanged: change it in place, or drop all; what uses a layer's "
                "weights outside of it goes in a backward of its own, behind"
            )
        return layer in self.summed

    def load_sum(self, layer: int) -> bool:
        """Queue the copy of a sum of earlier microbatches into the gradient slot, if there is one."""
        slot, mine = layer % GRADIENT_SLOTS, self.layers[layer]
        if not self.has_sum(layer):
            return False
        self.h2d.wait_event(self.grad_free[slot])
        with self.streams.stream(self.h2d):
            for flat, host in zip(self.gradient_flats[layer], mine.gradients, strict=True):
                flat.copy_(host.flat, non_blocking=True)
        self.sum_ready[slot].record(self.h2d)
        return True

    def store(self, layer: int) -> None:
        super().store(layer)
        self.summed.add(layer)
        self.stored.add(layer)
        torch.autograd.Variable._execution_engine.queue_callback(self.host_done[layer].synchronize)
        torch.autograd.Variable._execution_engine.queue_callback(self.stored.clear)

    def outside(self, layer: int, _) -> None:
        """Refuse a gradient that autograd would add to one that is on its way to the host."""
        if layer in self.stored:
            raise RuntimeError("a layer's weight is used outside of it: in a backward of its own")

    # The host's side

    def before_host(self, raises: bool) -> None:
        """Called before the host reads or writes weights; a later recipe ends its updates."""

    def wait(self, raises: bool = True) -> None:
        """Wait for updates and copies: then the host may read gradients, and change weights.

        A failed update is raised, unless weights are going to be loaded.
        """
        self.before_host(raises)
        super().wait()
        self.held.clear()  # what the device has may be old then
        self.stored.clear()
        torch.clear_autocast_cache()

    def before_step(self, optimizer: torch.optim.Optimizer, *_) -> None:
        """Before any optimizer's step, but that of one which waits by itself, layer by layer."""
        torch.clear_autocast_cache()  # of an autocast around several steps
        if optimizer is not self.optimizer:
            self.wait()

    def close(self) -> None:
        """Give the layers their forward back, and unlock the host's memory."""
        for hook in self.hooks:
            hook.remove()
        while self.resident:
            self.resident.pop().give_back()
        super().close()


def without_cache(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Arguments of a layer that backward runs again: it would append to a cache a second time."""
    caches = [x for x in (*args, *kwargs.values()) if hasattr(x, "get_seq_length")]
    if any(cache.get_seq_length() for cache in caches):
        raise ValueError("a layer that is trained cannot go on with a cache: use torch.no_grad")
    args = tuple(None if any(x is cache for cache in caches) else x for x in args)
    kwargs = {n: None if any(x is cache for cache in caches) else x for n, x in kwargs.items()}
    return args, kwargs | ({"use_cache": False} if "use_cache" in kwargs else {})


# %%
# Run it, and prove it
# --------------------
# The model is one of torch's own, between an embedding and a head that share their weight; layers
# have dropout and take a mask. Every step, an ordinary copy loads the streamed model's state, and
# all gradients of two microbatches are compared bit by bit. ``tests/test_offload.py`` does this
# with transformers' Llama, adapters of peft, and ``generate()``.


class Model(nn.Module):
    """An encoder of torch between an embedding and a head that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        options = {"batch_first": True, "norm_first": True}
        layer = nn.TransformerEncoderLayer(node.WIDTH, 4, 4 * node.WIDTH, **options)
        self.embedding = nn.Embedding(WORDS, node.WIDTH)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(node.WIDTH, WORDS, bias=False)
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
    device = node.start_rank()
    try:
        torch.manual_seed(dist.get_rank())
        model, resident = Model(), Model().to(device)
        layers, budget = model.encoder.layers, resident_bytes(model.encoder.layers[0])
        with closing(StreamedModel(model, layers, device, budget=budget)) as streamed:
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
# * Which parameters are trained, and their memory, is fixed when ``StreamedModel`` takes the model.
#   So ``model.to(...)`` and ``load_state_dict(assign=True)`` are an error in the next forward, and
#   a later ``requires_grad_`` in the next one that is trained. Choose the dtype before; load by
#   copy.
# * Change a ``parameter.grad`` in place, or drop all. One that is set by hand, or gone alone, is an
#   error in the next backward. Hooks of a layer's parameters are an error: they would not run.
# * A loss that uses the weights of layers itself, such as a penalty, needs a ``backward()`` of its
#   own, behind the other: in one it is an error.
# * What a loss is computed with must be a layer's result: ``output_attentions``,
#   ``output_router_logits`` and hooks on parts of a layer take other tensors out, which is an error
#   in backward. To look at them, detach them.
# * Gradients of layers' weights come from ``backward()`` alone: ``backward(inputs=...)`` and
#   ``torch.autograd.grad`` find none of them, and forward-mode derivatives end at the first layer.
# * A trained parameter of a layer that backward does not use has a gradient of zeros, not none.
# * Where several layers read one tensor, a loss takes hidden states, or a layer runs twice,
#   gradients are added in another order: their last bits differ from the resident run's.
# * Frozen layers are computed, but nothing of them is stored, and below the lowest trained one
#   there is no backward.
# * Leave the model's own gradient checkpointing off: each layer runs again anyway.
# * A layer that is compiled must be so before, by ``layer.forward = torch.compile(layer.forward)``.
# * Close one ``StreamedModel`` before you make the next, in a notebook too: until then its memory
#   stays locked, and every optimizer's ``step()`` waits for it and gets its errors.
# * A ``GradScaler`` is not tested here: train in bf16, which needs none.
# * ``deepcopy(model)``, and so ``AveragedModel``, raises: average what ``state_dict()`` gives.
# * ``DistributedDataParallel`` finds no gradients of the layers. It raises in the second step, but
#   not with ``find_unused_parameters=True``.
# * Ranks know nothing of each other here: :doc:`whole_step` averages.
#
# Further reading
# ---------------
# * `functional_call
#   <https://docs.pytorch.org/docs/stable/generated/torch.func.functional_call.html>`__
# * `Hooks of state_dict and load_state_dict
#   <https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html>`__
