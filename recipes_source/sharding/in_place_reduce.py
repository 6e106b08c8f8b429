# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, sharding/in_place_reduce.py
"""
FSDP2 without copies around its reductions
==========================================

One call, and a ``fully_shard`` model sends each gradient straight to the rank that owns it, from
where autograd left it, in the dtype that it is held in. On two ranks every bit stays stock FSDP2's,
for ``reduce_dtype`` float32, bfloat16 and None. :doc:`in_place_gather` shows what this call and its
own gain together.

**When not to bother:** many ranks, since each sends to all others and adds as many parts; several
hosts; or communication costs you little.

.. code-block:: python

   from overlap_recipes.fsdp2 import gather_in_place, reduce_in_place

   for layer in model.layers:
       fully_shard(layer)  # as before; each module that it is called with is a unit
   fully_shard(model)
   gather_in_place(model)
   reduce_in_place(model)

Stock FSDP2 copies a unit's gradients into a buffer of ``reduce_dtype`` on the compute stream,
between the unit's backward and the next one's, and reduces that with a kernel that takes compute
cores (SMs). If bfloat16 gradients are reduced in float32, it sends twice their bytes.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * gradients taken before FSDP2 looks for them, a unit at a time
      * push, one barrier, one sum: why three slots save a second barrier
      * sums that round as FSDP2's do, whatever travels

   .. grid-item-card:: What you need

      * PyTorch 2.11 or later; ranks on one host, each GPU with peer access to the others
      * the package ``overlap_recipes``: ``pip install .`` in this repository, or a copy of its
        folder ``overlap_recipes``

.. verification-badge::

The idea
--------

A reduce-scatter is a transfer, which copy engines can make, and a sum, which needs the cores, but
only for as long as reading and writing take. Weights do not change between two updates, so whoever
needs them pulls them. Gradients are new each time: they are **pushed** as soon as backward has made
them, into a slot on the rank that owns them. Only the slots need memory that others can write to.
After the pushes comes one barrier. One unit later, the compute stream sums what all ranks have left
in the slot.

.. lanes:: Schematic, one rank. Slot A is written again after barrier 3, which no rank passes before all have summed what was there.

   compute:  0-6 backward 2; 6-12 backward 1; 12-13 sum 2; 13-19 backward 0; 19-20 sum 1; 22-24 sum 0
   reduce:   6-9 push to slots A ~; 12-15 push to slots B ~; 19-22 push to slots C ~
   @9 1
   @15 2
   @22 3
"""

# %%
# Imports and sizes
# -----------------
# The imports are the proof's, which trains as :doc:`in_place_gather` does. The sizes are the
# module's.
#
# .. literalinclude:: /overlap_recipes/fsdp2/in_place_reduce.py
#    :language: python
#    :start-at: ALIGNMENT = 512
#    :end-at: NAMES = "post_backward

import in_place_gather as in_place
import peer_memory
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from overlap_recipes.fsdp2 import gather_in_place, reduce_in_place

# %%
# Push, barrier, and the sum a unit later
# ---------------------------------------
# Pushes have a stream of their own. Like that of the gathers it has ordinary priority: on an H200,
# while a stream of high priority, as FSDP2's own are, ran kernels now and then, those of the compute
# stream started later, each of them. A unit's sum is made on the compute stream, when the next unit's
# gradients are there: by then the parts have arrived. On another stream a sum would run beside
# matrix products and take cores from them. A rank's own part is not sent: it is added from where it
# is. On a GPU with Triton, ``torch.compile`` makes a sum one kernel.
#
# A slot has a row for each other rank, so that no two write to the same one. A unit's pushes and
# its barrier come after all that the compute stream had queued before, which includes the sum of
# the unit before the last. So a rank that writes to one of three slots again has passed a barrier
# that every other rank reached only after it had summed what was there. With two slots each barrier
# would have to wait for one sum more; at the end of a backward, where nothing hides them, pushes
# and sums would take turns. ``plan`` works out once where the parts of a unit go.
#
# **What is rounded, and when.** FSDP2 casts gradients to ``reduce_dtype``, sums, divides, and casts
# to the parameter's dtype. Parts travel here in the dtype that they are held in, which loses
# nothing; the sum is made in float32 and rounded once to ``reduce_dtype``. For two summands the
# bits are the same. The rounded sum has memory of its own, since ``torch.compile`` leaves out a
# cast that the next one undoes. A gradient that is wider than ``reduce_dtype`` is rounded before it
# is sent, as FSDP2 does. With ``reduce_dtype=None`` PyTorch 2.15 takes the parameter's dtype; so
# does this recipe, since it asks FSDP2's group.
#
# .. literalinclude:: /overlap_recipes/fsdp2/in_place_reduce.py
#    :language: python
#    :pyobject: PushedGradients
#
# .. literalinclude:: /overlap_recipes/fsdp2/in_place_reduce.py
#    :language: python
#    :pyobject: Plan
#
# .. literalinclude:: /overlap_recipes/fsdp2/in_place_reduce.py
#    :language: python
#    :pyobject: Pushed
#
# .. literalinclude:: /overlap_recipes/fsdp2/in_place_reduce.py
#    :language: python
#    :pyobject: largest
#
# .. literalinclude:: /overlap_recipes/fsdp2/in_place_reduce.py
#    :language: python
#    :pyobject: average
#
# .. literalinclude:: /overlap_recipes/fsdp2/in_place_reduce.py
#    :language: python
#    :pyobject: add
#
# What FSDP2 calls
# ----------------
# FSDP2 calls ``post_backward`` when a unit's gradients are there. They are taken first, so that
# FSDP2 finds none, reshards the unit and returns. What it reduces in other ways stays its own:
# HSDP's second reduction, float16 with its two divisions, float64, complex numbers, hooks, factors
# that are neither 1 nor the number of ranks. Gradients that ``set_requires_gradient_sync(False)``
# holds back wait as they do in stock FSDP2.
#
# .. literalinclude:: /overlap_recipes/fsdp2/in_place_reduce.py
#    :language: python
#    :pyobject: InPlaceReduce
#
# One call
# --------
#
# .. literalinclude:: /overlap_recipes/fsdp2/in_place_reduce.py
#    :language: python
#    :pyobject: reduce_in_place
#
# Run it, and prove it
# --------------------
# A sum of two does not depend on its order: on one and two ranks every loss and weight must have
# the bits of stock FSDP2, in each reduction's dtype. More ranks sum in another order.


def prove(device: torch.device) -> None:
    for dtypes in ((), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)):
        policy = MixedPrecisionPolicy(*dtypes)
        expected = in_place.train(peer_memory.build(device, policy), device)
        model = peer_memory.build(device, policy, stock=False)
        gather_in_place(model)
        pushed = reduce_in_place(model)
        found = in_place.train(model, device)
        assert dist.get_world_size() > 2 or peer_memory.same(found, expected), "not stock's bits"
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.01)
        if pushed is not None:
            assert pushed.calls == peer_memory.UNITS * in_place.STEPS, "FSDP2 reduced by itself"
            print(f"{pushed.calls} reductions by pushes")


def main() -> None:
    peer_memory.run(prove)


if __name__ == "__main__":
    main()

# %%
# What it buys
# ------------
# ``fsdp2_in_place`` gathers and reduces in place; :doc:`in_place_gather` has more rows. First the
# bits: a stock Llama of a few layers trained for the number of steps below, under deterministic
# algorithms. Every loss on the way, and every weight at the end, was that of stock FSDP2. A race
# would show there.
#
# .. result-gain:: fsdp_overlap
#    :rows: fsdp2_in_place
#    :field: bitwise_steps
#
# .. result-table:: fsdp_overlap
#    :rows: fsdp2 fsdp2_reduce_group fsdp2_in_place
#    :where: model=llama-8b-blocks loop=reads compiled=no activation_checkpointing=no
#
# **Two communicators: do they pay?** ``fsdp2_reduce_group`` is stock FSDP2 with its reduce-scatters
# in a group of their own (:doc:`fsdp2_settings`), so that they do not wait for gathers. On two GPUs
# no: the interval of its speed against ``fsdp2`` contains 100 %. In place there is no communicator
# to share.
#
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built. For races between ranks, the ranks take turns
# in the worst order; a recorder of stream order reports a missing wait.
#
# .. recipe-controls::
#
# Memory
# ------
# Three slots of symmetric memory on each of :math:`N` ranks, outside the allocator's statistics:
#
# .. math::
#
#    3 \, \frac{N - 1}{N} \times \text{bytes of the gradients of the largest unit}
#
# and a unit's gradients until the next one's are there.
#
# When it is not worth it
# -----------------------
# * Many ranks: every rank writes to all others, where NCCL's ring adds while it passes parts on.
# * One enormous unit, an embedding say, makes slots of its size.
#
# Limits that are silent
# ----------------------
# * A unit's gradient is in ``.grad`` one unit later than with stock FSDP2, the last unit's at the end
#   of backward. So an optimizer in backward steps one unit later. A unit that runs twice under reentrant
#   checkpointing is then recomputed with the weights of before that step.
# * After an exception in backward, call ``zero_grad()`` before you go on. ``reset_iter_state()`` also
#   drops gradients that were pushed and not summed: stock FSDP2 has them in
#   ``.grad`` by then.
#
# Known limits
# ------------
# * Where a rank has no gradient of a weight, or reduces units in another order, all ranks raise before
#   the sum. Ranks compare checksums in host memory. With
#   ``set_reduce_scatter_unused_params(True)`` (PyTorch 2.13) zeros are reduced.
# * A reduce-scatter of your own (``set_custom_reduce_scatter``) is kept, if it is set before the call;
#   set later it is an error.
# * Branches on streams of their own: each unit is summed on its own stream before the next stream's
#   unit is pushed, so the branches' backwards wait for each other.
# * Accumulation in float32 makes gradients twice as wide: slots grow once, in a collective.
# * When a backward raises, one unit's gradients that stock FSDP2 has added by then are missing here.
# * Two forwards, and the backward of the second raises: call ``model.reset_iter_state()`` (PyTorch 2.13
#   on) before the backward of the first. Without it stock FSDP2 reduces no gradient of the root; here
#   those of other units are missing, too.
# * The barrier's kernel holds a place on an SM until the last rank has pushed.
#
# Further reading
# ---------------
# * `Reduce-scatters in a group of their own <https://github.com/pytorch/pytorch/issues/186335>`__
# * `Symmetric memory <https://docs.pytorch.org/docs/stable/symmetric_memory.html>`__ in PyTorch
