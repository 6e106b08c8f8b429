# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, offload/host_adam.py
"""
Adam on the host, the lowest layer first
========================================

Update layers on threads of the host while the device computes others. AdamW in fp32 needs 12 bytes
per parameter for weights and moments, three quarters of what training in bf16 takes, and touches
them once per step. So they can live in host memory, and the update can run there. The result has
the bits of ``torch.optim.AdamW``. There is nothing to paste here: :doc:`whole_step` makes an
optimizer of it, and has the lines for your loop.

.. result-gain:: offload_step
   :rows: host
   :field: share_of_yardstick
   :where: model=llama-8b

That is the rate at which the update moves bytes, over the rate of a plain pass over the same
memory.

**When not to bother:** the moments fit the device, where an update takes milliseconds; or the host
has few cores, so that their arithmetic is the limit.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * threads that share the update of the lowest layer (the first in forward)
      * why the lowest layer goes first
      * what the host's memory allows, and how to know it

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later on Linux, any number of ranks
      * host memory: 16 bytes per parameter
      * the package ``overlap_recipes``: ``pip install .`` in this repository, or a copy of its
        folder ``overlap_recipes``

.. verification-badge::

The idea
--------

A layer's weights are read last by its own backward, and next by its own forward. Anywhere between
the two, the host can update them: nothing is stale. Forward begins with layer 0, so of all layers
that are due the **lowest** is updated first, and the others beside the next forward:

.. lanes:: Schematic. The end of a backward and the next forward of four layers. B1 is the backward of layer 1, F0 the forward of layer 0.

   compute: 0-4 B1; 4-8 B0; 16-20 F0; 22-26 F1; 28-32 F2; 34-38 F3
   host:    8-14 Adam 0; 14-20 Adam 1; 20-26 Adam 2; 26-32 Adam 3
   H2D:     14-16 0 ~; 20-22 1 ~; 26-28 2 ~; 32-34 3 ~
"""

# %%
# Imports and sizes
# -----------------
# :doc:`streamed_model` keeps the layers; this page updates them. The imports are the proof's. The
# size is the module's.
#
# .. literalinclude:: /overlap_recipes/offload/host_adam.py
#    :language: python
#    :start-at: BLOCK = 2**20
#    :end-at: BLOCK = 2**20

import streamed_model as streaming
import torch
import torch.distributed as dist

from overlap_recipes.offload import adam_in_pieces as pieces
from overlap_recipes.offload.host_adam import HostUpdates
from overlap_recipes.offload.streamed_model import StreamedModel
from overlap_recipes.ranks import start_rank

# %%
# The update of a model
# ---------------------
# The thread that trains calls ``announce``: from then on, the next load of the layers that it names
# waits. Whoever knows that their gradients are on the host calls ``start``. ``later`` announces,
# and has another thread start. An error in a thread is raised by each call that waits for that
# thread. After a step that was interrupted, by Ctrl-C say, each such call raises until a checkpoint
# is loaded. Each layer counts its own steps, for Adam's bias correction.
#
# Each core but one has a thread, and a free thread takes the next block (up to ``BLOCK`` parameters
# of one tensor). What it does with a block is on :doc:`adam_in_pieces`: one pass over its memory,
# without Python's lock. The thread that trains needs the core that is left, many times per step.
#
# .. literalinclude:: /overlap_recipes/offload/host_adam.py
#    :language: python
#    :pyobject: Buffers
#
# .. literalinclude:: /overlap_recipes/offload/host_adam.py
#    :language: python
#    :pyobject: LayerUpdate
#
# .. literalinclude:: /overlap_recipes/offload/host_adam.py
#    :language: python
#    :pyobject: HostUpdates
#
# Run it, and prove it
# --------------------
# An AdamW of torch gets the same gradients. Masters and weights must have its bits.


def main() -> None:
    device = start_rank()
    try:
        torch.manual_seed(dist.get_rank())
        model = streaming.Model().bfloat16()
        streamed = StreamedModel(model, model.encoder.layers, device)
        trained = list(model.encoder.layers.parameters())
        masters = [torch.nn.Parameter(p.detach().float()) for p in trained]
        optimizer = torch.optim.AdamW(masters, fused=True, **pieces.SETTINGS)
        updates = HostUpdates(streamed, dict.fromkeys(trained, 0))
        for step in range(streaming.STEPS):
            streaming.loss_of(model, step, device).backward()  # loads a layer when it is updated
            for master, parameter in zip(masters, trained, strict=True):
                master.grad = parameter.grad.float()
            optimizer.step()
            updates.start(updates.announce(range(len(streamed.layers)), [pieces.SETTINGS]))
            model.zero_grad()
        streamed.wait()
        for parameter, master in zip(trained, masters, strict=True):
            assert torch.equal(updates.state[parameter]["master"], master)
            assert torch.equal(parameter, master.bfloat16())
        print(f"{len(trained)} tensors have the bits of torch.optim.AdamW")
        updates.close()
        streamed.close()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

# %%
# What it buys
# ------------
# See :doc:`whole_step`: an update gains only what it hides. What it moves, beside what the memory
# allows, is on :doc:`adam_in_pieces`. Measure yours: an in-place ``mul_`` over the same masters by
# the same threads moves 8 bytes per parameter, the update 28.
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
# Beside weights and gradients in bf16 (4 bytes per parameter), masters and moments take 12. Where
# weights are in fp32, they are their own masters.
#
# Known limits
# ------------
# * PyTorch's vectorised Adam leaves the last elements of a tensor, fewer than 16, to scalar code
#   that rounds differently. Padded layers have no such rest. In an ordinary optimizer each tensor
#   whose size is not a multiple of 16 has one, and there its bits may differ from these.
# * Each rank of a host updates all weights, on its part of the cores. To share work and memory:
#   :doc:`one_copy_a_host`.
# * After an update that failed, or a step that was interrupted, ``state_dict()`` raises until a
#   checkpoint is loaded. ``dcp.load`` needs a state dict to fill: give it a copy of an earlier one,
#   or start anew.
# * Cores are not reserved: data loading on the same cores slows updates.
#
# Further reading
# ---------------
# * `AdamW <https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html>`__
# * `ZeRO-Offload: Democratizing Billion-Scale Model Training <https://arxiv.org/abs/2101.06840>`__:
#   Adam on the host, and an update delayed by a step where this one is not
