# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, offload/train_what_does_not_fit.py
"""
Train what does not fit
=======================

``stream_layers`` keeps the layers of a stock model in host memory, and brings each to the device
when it is needed. ``HostAdamW`` updates them on the host while the device computes others. The loop
stays yours: accumulation, clipping by the norm of **all** gradients, a schedule, checkpoints,
several ranks. Losses and weights are those of a run that keeps everything on the device; a GPU's
Adam rounds differently from the host's.

.. result-gain:: offload_step
   :rows: 8bit_in_backward
   :field: kept
   :where: model=llama-8b tokens=8192

   100 % is the speed of a **resident** run, which keeps everything on the device. ``max_norm`` clips;
   ``in_backward=True`` updates during backward, too, and cannot clip.

.. index::
   single: model too big for the GPU
   single: train an 8B model on one GPU
   single: CPU offload of the optimizer is slow
   single: ZeRO-Offload, CPU offload, FSDP CPUOffloadPolicy

**When not to bother:** if weights, gradients and Adam's state fit the device, a resident run is faster.
If only activations do not fit, use :doc:`activation_offload`. :doc:`weight_streaming` shows how layers are
streamed.

.. code-block:: python

   from overlap_recipes.offload import HostAdamW, check_first_step, stream_layers

   # The model is on the CPU; layers are its model.model.layers, or transformer.h, say.
   with (
       stream_layers(model, layers, device) as streamed,
       HostAdamW(model.parameters(), streamed, lr=1e-3, max_norm=1.0) as optimizer,
   ):
       schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
       for step, batch in enumerate(batches):
           inputs = {name: tensor.to(device) for name, tensor in batch.items()}
           if step == 0:
               check_first_step(streamed, lambda: model(**inputs))  # not needed
           model(**inputs).loss.backward()
           optimizer.step()  # takes the gradients: there is none left to zero
           schedule.step()
       streamed.wait()  # before weights are read (save_pretrained), or changed by anything else

.. warning::

   A layer's weights are on the device only while its own forward or backward runs; then their place
   is another layer's. Code that keeps a layer's weights from there (a hook, a global, another
   layer) and reads them later gets **another layer's weights, without an error**.

.. list-table:: Per parameter of the layers, each rank
   :header-rows: 1

   * - Call
     - Needs
     - Keeps on the device
     - Host memory
   * - ``stream_layers``
     - an optimizer
     - weights and gradients of two layers; all that is in no layer
     - bfloat16: 4 bytes; float32: 8 (weights, gradients; page-locked)
   * - ``HostAdamW``
     - cores of the host
     - gradients and Adam's state of what is in no layer
     - bfloat16: 12 bytes more (masters, moments); float32: 8 (moments)
   * - ``in_backward=True``
     - no ``max_norm``
     - the same
     - the same
   * - ``moments="8bit"``
     - bfloat16 or float32
     - the same with 8-bit moments; pieces of state
     - bfloat16: 4.1 bytes more, not 12; with ``in_backward`` 2.1
   * - ``budget=``
     - bytes of the device
     - the lowest layers as well, ``resident_bytes(layer)`` each
     - none for these layers
   * - ``one_copy_a_host=True``
     - ``torchrun``, x86
     - the same
     - bfloat16: 2 bytes a rank (gradients), and 14 once

With ``moments="8bit"`` the device does the update, with torchao's quantization tables and exact
masters; each rank has its own copy. If the ranks of a host need more memory than it has, the call
raises.

``check_first_step`` runs a batch streamed and resident. It raises if a bit of outputs, buffers or
gradients differs, and returns False if only the order of sums does.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * how to replace a layer's forward, and nothing else
      * how to clip by the norm of all gradients without a wait
      * why the host updates the lowest layer first

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later on Linux, any number of ranks; CPU runs everything, a GPU overlaps it
      * the package ``overlap_recipes``: ``pip install .`` in this repository, or a copy of its
        folder ``overlap_recipes``; this script trains a Llama of ``transformers``

.. verification-badge::

The idea
--------

Each layer stays where the model has it. Only ``layer.forward`` is replaced: the new one waits for
the layer's weights, runs the layer's own forward as one node of the graph, and starts to load the
next layers. In backward the node loads the weights again, and sends the gradients to the host.

Between a layer's backward and its next forward nothing reads its weights. The host updates
them in that time, so no weight is stale. Forward begins with layer 0, so the **lowest** waiting layer
is updated first.

.. lanes:: Schematic. A clipped step: the update runs during the next forward. B2 is the backward of layer 2, F0 the forward of layer 0, n the norm.

   compute: 0-4 B2; 4-8 B1; 8-12 B0; 12-13 norm; 19-24 F0; 25-30 F1; 31-36 F2
   D2H:     4-6 2 ~; 8-10 1 ~; 12-14 0 ~; 14-15 n ~
   host:    15-18 Adam 0; 18-21 Adam 1; 21-24 Adam 2
   H2D:     18-19 0 ~; 24-25 1 ~; 30-31 2 ~
"""

# %%
# The job
# -------
# A stock Llama of transformers, and batches of each rank. The weights are float32, so that the resident run
# is plain AdamW of torch. For bfloat16 weights the host also keeps float32 **masters**.

import argparse
import logging
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import CosineAnnealingLR

for talkative in ("torchao", "torch.utils._pytree"):  # if torchao is there, transformers imports it
    logging.getLogger(talkative).setLevel(logging.ERROR)
from transformers import LlamaConfig, LlamaForCausalLM

from overlap_recipes.checkpoint import CheckpointManager, TrainingState
from overlap_recipes.offload import HostAdamW, check_first_step, stream_layers
from overlap_recipes.ranks import start_rank

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)
BATCH, LENGTH = 2, 8  # sequences of a micro-batch, tokens of each
LAST_STEP, MICRO_BATCHES, SAVE_EVERY = 4, 2, 2
RATE, MAX_NORM = 1e-2, 0.5


def new_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(CONFIG)


def loss_of(
    model: LlamaForCausalLM, step: int, micro_batch: int, device: torch.device
) -> torch.Tensor:
    """Of this rank's tokens, (BATCH, LENGTH) int64."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + 10 * step + micro_batch)
    tokens = torch.randint(CONFIG.vocab_size, (BATCH, LENGTH), generator=generator).to(device)
    with sdpa_kernel(SDPBackend.MATH):  # a GPU's faster ones add in any order
        return model(input_ids=tokens, labels=tokens).loss


# %%
# The loop
# --------
# It is the block from the top with accumulation and checkpoints.
# Under ``no_sync()`` gradients are summed, and not averaged over the ranks. Only the proof uses
# ``interrupted_in``.


class Interrupted(Exception):
    """A job that ends in the middle of a step."""


def train(
    model: LlamaForCausalLM, device: torch.device, root: Path, interrupted_in: int = 0
) -> dict[int, float]:
    """Train until LAST_STEP; returns the last loss of each step."""
    losses = {}
    with (
        stream_layers(model, model.model.layers, device) as streamed,
        HostAdamW(model.parameters(), streamed, lr=RATE, max_norm=MAX_NORM) as optimizer,
    ):
        schedule = CosineAnnealingLR(optimizer, LAST_STEP)
        state = TrainingState(model, optimizer, scheduler=schedule)
        with CheckpointManager(root, state) as checkpoints:
            done = checkpoints.resume()
            if done == 0:
                same = check_first_step(streamed, lambda: loss_of(model, 0, 0, device))
                assert same, "sums had to be in another order"
            for step in range(done + 1, LAST_STEP + 1):
                for micro_batch in range(MICRO_BATCHES):
                    is_last = micro_batch == MICRO_BATCHES - 1
                    with nullcontext() if is_last else optimizer.no_sync():
                        loss = loss_of(model, step, micro_batch, device)
                        (loss / MICRO_BATCHES).backward()
                if step == interrupted_in:
                    raise Interrupted
                optimizer.step()
                schedule.step()
                losses[step] = loss.item()
                if step % SAVE_EVERY == 0:
                    checkpoints.save(step)
    return losses


# %%
# A layer's forward
# -----------------
# ``as_node`` makes a layer one node of the autograd graph. Backward loads its weights and runs it
# again. After a layer has run, its slot is free, and the next layers are loaded.
#
# .. literalinclude:: /overlap_recipes/offload/weight_streaming.py
#    :language: python
#    :pyobject: StreamedLayers.forward
#
# The host holds the sum of gradients until the step takes it. During a layer's backward the sum of
# earlier micro-batches is loaded into the gradient slot, and backward adds to it. So the order of
# additions is that of a resident run.
#
# .. literalinclude:: /overlap_recipes/offload/streamed_model.py
#    :language: python
#    :pyobject: StreamedModel.load_sum
#
# A load waits until its layer's update is over. A step waits for the host nowhere else.
#
# .. literalinclude:: /overlap_recipes/offload/host_adam.py
#    :language: python
#    :pyobject: HostUpdates.before_load
#
# A step that waits for nothing
# -----------------------------
# When a layer's gradients are in their slot, the device averages them over the ranks and takes
# their norms. ``step()`` combines the norms on the device, and updates what stays there (embedding, head).
# After the last gradients it sends the norm and the clipping factor to the host.
#
# .. literalinclude:: /overlap_recipes/offload/whole_step.py
#    :language: python
#    :pyobject: HostAdamW.average
#
# .. literalinclude:: /overlap_recipes/offload/whole_step.py
#    :language: python
#    :pyobject: HostAdamW.step
#
# A thread of the host waits for both, then starts the updates. If the norm is not finite, it updates
# nothing and adds one to ``skipped``.
#
# .. literalinclude:: /overlap_recipes/offload/whole_step.py
#    :language: python
#    :pyobject: HostAdamW.arrive
#
# A rank has an update thread for each of its cores but one. A free thread takes a block of the lowest
# waiting layer, and updates it in one pass, without the GIL.
#
# .. literalinclude:: /overlap_recipes/offload/host_adam.py
#    :language: python
#    :pyobject: HostUpdates.work
#
# Run it, and prove it
# --------------------
# The resident run is stock: AdamW of torch, a mean over the ranks, ``clip_grad_norm_``. On the CPU
# every loss and weight must equal it bit by bit; on a GPU, within ``ON_DEVICE``.
# Then a job is interrupted in the middle of a step. A new job, built with another seed, resumes, and
# must equal the uninterrupted one bit by bit.

ON_DEVICE = 1e-2


def train_resident(model: LlamaForCausalLM, device: torch.device) -> dict[int, float]:
    """The same training with everything on the device."""
    losses = {}
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    schedule = CosineAnnealingLR(optimizer, LAST_STEP)
    for step in range(1, LAST_STEP + 1):
        for micro_batch in range(MICRO_BATCHES):
            loss = loss_of(model, step, micro_batch, device)
            (loss / MICRO_BATCHES).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses[step] = loss.item()
    return losses


def prove(root: Path, device: torch.device) -> None:
    resident, model = new_model(seed=0), new_model(seed=0)
    expected = train_resident(resident, device)
    losses = train(model, device, root / "whole")
    tolerance = 0.0 if device.type == "cpu" else ON_DEVICE
    for step, loss in losses.items():
        assert abs(loss - expected[step]) <= tolerance, f"step {step}: loss {loss}, not resident's"
    for name, theirs in resident.named_parameters():
        apart = (model.get_parameter(name).to(device) - theirs).abs().max().item()
        assert apart <= tolerance, f"{name} is {apart} from resident"
    print(f"{len(losses)} losses and all weights: at most {tolerance} from the resident run")

    try:
        train(new_model(seed=0), device, root / "interrupted", interrupted_in=3)
    except Interrupted:
        print("interrupted in step 3, after the save of step 2")
    resumed = new_model(seed=1)
    for step, loss in train(resumed, device, root / "interrupted").items():
        assert loss == losses[step], f"step {step}: loss {loss}, uninterrupted {losses[step]}"
        print(f"step {step}: the loss of the uninterrupted run")
    for name, theirs in model.named_parameters():
        same = torch.equal(resumed.get_parameter(name), theirs)
        assert same, f"{name} differs from the run without interruption"


def main(directory: Path) -> None:
    device = start_rank()
    try:
        of_rank_0 = [directory]
        dist.broadcast_object_list(of_rank_0)  # a checkpoint is one directory for all ranks
        prove(of_rank_0[0], device)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, help="where checkpoints go (default: temporary)")
    with tempfile.TemporaryDirectory() as temporary:
        main(parser.parse_args().dir or Path(temporary))

# %%
# What it buys
# ------------
# A stock Llama of 8 B parameters, a budget of 24 GB on the device (:doc:`/guide/measured`).
# Throughput is relative to a resident run. ``torchao_clipped`` is torchao's offload with our
# clipping.
#
# .. result-table:: offload_step
#    :rows: streamed_adam streamed_adam_in_backward 8bit 8bit_in_backward torchao_clipped
#    :where: model=llama-8b tokens=16384
#
# .. dropdown:: Another model with torchao, losses with 8 bits, a device limited to 24 GB
#
#    .. result-table:: offload_step
#       :rows: 8bit_in_backward torchao
#       :where: model=qwen3-4b tokens=8192
#
#    .. losses:: eight_bit_loss
#
#    .. result-table:: offload_step
#       :rows: 8bit_held
#
# A deeper model, whose state is larger than the device:
#
# .. result-table:: offload_step
#    :rows: larger_than_device
#
# If backward takes :math:`B`, forward :math:`F` and the update :math:`U`, a step takes at least
# :math:`B + \max(F, U)`. With ``in_backward=True``, which cannot clip, it is :math:`\max(B + F, U)`. So
# with **few tokens per step** this is slow: accumulate, or set ``budget``. :doc:`/guide/results` has
# other token counts and packages.
#
# What breaks if you remove a line
# --------------------------------
# Each edit of the library was made and run when this page was built. A recorder finds accesses that no
# event orders.
#
# .. recipe-controls::
#
# Memory
# ------
# Host: see the table; a save needs one more copy of what it saves. The end of the block frees the
# gradients. Adam's state is freed with the optimizer.
#
# Device: 16 bytes for each other parameter; slots for two layers' weights and two layers' gradients;
# one input per layer; what one layer saves for backward. With ``budget`` bytes more, the lowest layers
# stay there; each takes ``resident_bytes(layer)``.
#
# One copy for all ranks of a host
# --------------------------------
# With ``stream_layers(..., one_copy_a_host=True)``, under ``torchrun``, a host's :math:`n` ranks share weights,
# masters and moments; each rank updates its part. In bfloat16 these take :math:`14\,P` bytes once,
# and gradients :math:`2\,n\,P`. Two ranks train as one rank that takes all batches.
#
# .. result-table:: offload_step
#    :rows: one_copy own_copy
#
# **It can be wrong without an error** on processors whose writes other cores may see out of order, such
# as Arm.
#
# Limits that can be silent
# -------------------------
# The worst is in the warning at the top. The others:
#
# * Code that reads weights after a step (an average of weights, a logged norm) gets old ones
#   unless it calls ``streamed.wait()``. ``state_dict()`` waits.
# * Code that changes weights must call it, too, and ``optimizer.reload()`` afterwards.
#   ``load_state_dict()`` does both.
# * A trained parameter that a step does not use (an expert without tokens) has a gradient of zeros,
#   not ``None``: Adam still updates its moments and applies weight decay.
# * bfloat16 sums are rounded after each micro-batch, as ``parameter.grad`` always is;
#   ``gradient_dtype=torch.float32`` avoids this.
# * Backward runs a layer again. Globals, closures and objects outside modules must not change
#   in between. Only the first step checks this.
# * If you change rows of a gradient through ``.data``, clipping uses the old norm.
# * If several layers read one tensor, or a layer runs twice, the order of sums differs, and
#   ``check_first_step`` returns False.
#
# Known limits
# ------------
# These raise, and say what to do:
#
# * ``DistributedDataParallel`` around the model; on several ranks, LayerDrop or different initial weights
# * hooks on parameters of layers; tensors from inside a layer in the loss (``output_attentions``,
#   ``output_router_logits``); a weight that a layer shares with another module; ``deepcopy(model)``
# * a change of weights between backward and step; with ``max_norm`` or ``in_backward``, of gradients, too
# * ``model.to(...)``, or a change of ``requires_grad``, inside the block
#
# Leave the model's own gradient checkpointing off: each layer runs again anyway.
#
# Further reading
# ---------------
# * :doc:`weight_streaming`: slots, streams and events from scratch
# * `ZeRO-Offload <https://arxiv.org/abs/2101.06840>`__ and `SuperOffload
#   <https://arxiv.org/abs/2509.21271>`__: Adam on the host, a
#   step late in the first, rolled back if need be in the second
