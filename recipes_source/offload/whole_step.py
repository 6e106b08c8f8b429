# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, offload/whole_step.py
"""
A whole step: clipped, scheduled, averaged
==========================================

Train a model whose layers and Adam live in host memory, with an ordinary loop: clipping by the norm
of **all** gradients, a schedule, accumulation, several ranks. A batch that overflows changes
nothing. The thread that trains waits only for the weights of the layer that it needs next.

.. result-gain:: offload_step
   :rows: streamed_adam streamed_adam_in_backward
   :field: kept
   :where: model=llama-8b tokens=32768

100 % is the speed of a run that keeps everything on the device. ``streamed_adam`` clips.
``streamed_adam_in_backward`` does not, and hides the update behind backward, too.

**When not to bother:** Adam's moments fit on the device; or your steps have so few tokens that the
host's memory decides (see the end of this page).

.. code-block:: python

   from overlap_recipes.offload import HostAdamW, stream_layers

   with (
       stream_layers(model, layers, device) as streamed,  # layers: model.model.layers, say
       HostAdamW(model.parameters(), streamed, lr=1e-3, max_norm=1.0) as optimizer,
   ):
       schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
       for batch in batches:
           inputs = {name: tensor.to(device) for name, tensor in batch.items()}
           model(**inputs).loss.backward()
           optimizer.step()
           schedule.step()
       streamed.wait()  # before weights are read, and before anything else changes them

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * a norm of everything, and a decision that no thread waits for
      * accumulation and means over ranks, for the layers and for the rest of the model
      * what clipping costs: it leaves only the next forward to hide the update

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later on Linux, any number of ranks
      * host memory: 16 bytes per parameter of the layers, for each rank
      * the package ``overlap_recipes``: ``pip install .`` in this repository, or a copy of its
        folder ``overlap_recipes``

.. verification-badge::

The idea
--------

The device takes the norms where the gradients are, layer by layer. ``step()`` adds them up there,
updates what stays on the device, and sends two numbers to the host after the last gradients: the
norm, and the factor of clipping. A thread waits for them, and has the layers updated or not; the
device decides by the same number. Layer 0 is updated first, and the next forward begins with it:

.. lanes:: Schematic. A clipped step: the update hides behind the next forward alone. B2 is the backward of layer 2, F0 the forward of layer 0, n the norm.

   compute: 0-4 B2; 4-8 B1; 8-12 B0; 12-13 norm; 19-24 F0; 25-30 F1; 31-36 F2
   D2H:     4-6 2 ~; 8-10 1 ~; 12-14 0 ~; 14-15 n ~
   host:    15-18 Adam 0; 18-21 Adam 1; 21-24 Adam 2
   H2D:     18-19 0 ~; 24-25 1 ~; 30-31 2 ~
"""

# %%
# Imports and sizes
# -----------------
# :doc:`host_adam` updates the layers; this page decides when, and by how much. Embedding, head, and
# layers within the budget have masters and moments on the device, and are updated there. The
# imports are the proof's.
#
# .. literalinclude:: /overlap_recipes/offload/whole_step.py
#    :language: python
#    :start-at: DEFAULTS = {
#    :end-at: DEFAULTS = {

from collections.abc import Iterator
from copy import deepcopy

import torch
import torch.distributed as dist
from adam_in_pieces import schedule_of, train_resident
from streamed_model import Model, loss_of

from overlap_recipes.offload import adam_in_pieces as pieces
from overlap_recipes.offload.streaming import stream_layers
from overlap_recipes.offload.whole_step import HostAdamW
from overlap_recipes.ranks import start_rank

# How far weights may differ where the device's Adam rounds in another way: ``ON_DEVICE``.
STEPS, BAD_STEP, MAX_NORM, ON_DEVICE = 5, 2, 0.5, 1e-2

# %%
# The optimizer
# -------------
# * ``reduce`` runs in backward, when a layer's gradients are in their slot: it averages them over
#   the ranks in fp32, rounds once, and takes their norms. The rest of the model is averaged in
#   ``step``. Under ``no_sync()`` microbatches are only summed.
# * ``settings()`` copies rates and decays of all groups. The threads get the copy, so a schedule
#   may change the groups at once. With ``in_backward`` backward uses them: a loop that sets a rate
#   between backward and step gets an error.
# * ``step`` takes the gradients. ``zero_grad()`` drops gradients that are not to be used, before a
#   step; with ``in_backward`` that is too late, and an error.
# * ``check`` refuses a layer whose last microbatch was in ``no_sync()``: its norm is not known.
# * ``in_backward=True`` updates each layer when its gradients arrive: the update hides behind
#   backward as well, and nothing is clipped. Earlier microbatches must be in ``no_sync()``; another
#   is an error.
# * **A norm that is not finite.** Without ``in_backward`` the step changes nothing and is counted
#   in ``skipped``, without an error. With it, higher layers may be updated already. So the next
#   call that waits, a forward say, raises ``FloatingPointError``. Then load a checkpoint of model
#   and optimizer; several ranks must start anew, since each raises when it knows. To clip exactly
#   *and* hide the update behind backward, one would have to update ahead and roll back, as
#   SuperOffload does.
# * A loop that clips by itself, such as a trainer's, is right without ``max_norm``: then gradients
#   may be changed after backward. With ``max_norm`` or ``in_backward`` that is an error.
# * ``load_state_dict`` of the model ends in a hook that makes masters of the weights, except where
#   a weight is its rounded master: then the master keeps its bits. What changes weights in another
#   way calls ``streamed.wait()`` before and ``reload()`` after it.
#
# .. literalinclude:: /overlap_recipes/offload/whole_step.py
#    :language: python
#    :pyobject: HostAdamW
#
# Run it, and prove it
# --------------------
# The yardstick is ordinary training on the device, with masters, means over ranks, clipping, a rate
# that changes every step, and one loss that is not a number. On the CPU all weights must have its
# bits. A GPU's Adam rounds in another way than the host's: there no weight may be further away than
# ``ON_DEVICE``. (The tests on a GPU train longer, with gradients that are nearly zero, where Adam
# may step the other way. They let one weight in a thousand be further away, by two rates per step.)


def losses(model: torch.nn.Module, device: torch.device) -> Iterator[torch.Tensor]:
    """Of ``STEPS`` batches of this rank; one is not a number."""
    for step in range(STEPS):
        loss = loss_of(model, 1000 * dist.get_rank() + step, device)
        yield loss * (torch.nan if step == BAD_STEP else 1)


def train(optimizer: HostAdamW, device: torch.device) -> None:
    """``STEPS`` steps with another rate in each."""
    schedule = schedule_of(optimizer)
    for loss in losses(optimizer.streamed.model, device):
        loss.backward()
        optimizer.step()
        schedule.step()
    optimizer.streamed.wait()


def main() -> None:
    device = start_rank()
    try:
        torch.manual_seed(0)
        model = Model().bfloat16()
        ordinary = deepcopy(model).to(device)
        groups, settings = pieces.groups_of(model.parameters()), pieces.SETTINGS
        with (
            stream_layers(model, model.encoder.layers, device) as streamed,
            HostAdamW(groups, streamed, max_norm=MAX_NORM, **settings) as optimizer,
        ):
            train(optimizer, device)
            assert optimizer.skipped == 1, f"{optimizer.skipped} steps skipped, not the bad one"
        train_resident(ordinary, losses(ordinary, device), MAX_NORM)
        for name, theirs in ordinary.named_parameters():
            apart = (model.get_parameter(name).to(device) - theirs).abs().max().item()
            assert apart <= ON_DEVICE * (device.type != "cpu"), f"{name} is {apart} from resident"
        print(f"{STEPS} steps, one of them skipped: the weights of the resident run")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

# %%
# What it buys
# ------------
# ``benchmarks/offload_step.py`` trains a stock Llama of 8 G parameters, clipped and with a
# schedule, with a budget of 24 GB for state on the device, of which whole layers use a part. With
# backward :math:`B`, forward :math:`F` and update :math:`U` a step takes at least
# :math:`B + \max(F, U)`, and with ``in_backward=True`` at least :math:`\max(B + F, U)`.
#
# .. result-table:: offload_step
#    :rows: resident streamed_adam streamed_adam_in_backward torchao torchao_clipped torchao_fp32 torchao_fp32_clipped deepspeed_offload fsdp2_cpu_offload
#
# ``resident`` has everything on the device. ``torchao`` trained the same model in the same loop on
# as many cores. It does not clip: its step begins while the device still runs
# backward. So compare it with ``streamed_adam_in_backward``. In the rows ``_clipped`` we clip for
# it, as cheaply as we know: norms are taken in backward, and its Adam gets their factor. Compare
# those with ``streamed_adam``. They differ:
#
# * ``torchao`` keeps the weights on the device. Weights and moments are in bf16, without fp32
#   masters, so an update moves half the bytes: at the fewest tokens, where a clipped step waits
#   for its update, ``torchao_clipped`` is ahead. It trains less exactly: a second moment with
#   ``betas`` of 0.999 never falls, and a weight of 1 is not moved by a rate of 1e-4 (a test shows
#   both). The rows ``torchao_fp32``, from another host, have the precision of this page, and fp32
#   weights on the device.
# * ``deepspeed_offload``, on another host with twice the cores: ZeRO stage 3, weights and optimizer
#   on the host, clipped; extended from fewer layers, as ``resident`` is.
# * ``fsdp2_cpu_offload``, on other hosts, 16 cores a rank: the same by FSDP2; two ranks can
#   prefetch.
#
# A deeper model, whose state is larger than the device:
#
# .. result-table:: offload_step
#    :rows: larger_than_device
#
# What breaks if you remove a line
# --------------------------------
# .. recipe-controls::
#
# Memory
# ------
# Host, for :math:`P` parameters of layers: weights and gradients in bf16, masters and moments in
# fp32, :math:`16\,P` bytes; with sums in fp32 :math:`18\,P`. Device: 16 bytes for each other
# parameter, and the slots of :doc:`weight_streaming`.
#
# When it is not worth it
# -----------------------
# Few tokens per step. If the host's memory moves :math:`M` bytes/s and the device computes
# :math:`C` FLOP/s, forward takes :math:`2PT/C` seconds for :math:`T` tokens and the update
# :math:`28P/M`. A clipped update is hidden from :math:`T = 14\,C/M` tokens per step on; below that,
# accumulate, or give the device a budget.
#
# Known limits
# ------------
# * Each rank keeps and updates all weights of the layers; :doc:`one_copy_a_host` shares them.
# * Every rank must take the same steps, and run the same layers in each: a mean over ranks is a
#   collective, and pairs gradients by their order.
# * With weights in bf16 and ``gradient_dtype`` unset, sums of microbatches are rounded to bf16 each
#   time, as ``parameter.grad`` is anywhere. With ``gradient_dtype`` only the optimizer's
#   ``zero_grad()`` drops the sums, not the model's.
# * A trained parameter that a step does not use (an expert without tokens) has a gradient of zeros,
#   where it would have none elsewhere: its moments and its decay go on.
# * The optimizer's ``load_state_dict`` makes the weights its rounded masters: load the model first.
# * Gradients are judged as backward left them: what changes ``p.grad.data`` is not seen, and a step
#   whose NaN the loop has taken out is skipped.
#
# Further reading
# ---------------
# * `clip_grads_with_norm_
#   <https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grads_with_norm_.html>`__
# * `SuperOffload <https://arxiv.org/abs/2509.21271>`__
