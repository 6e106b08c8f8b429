# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, <folder>/<name>.py
"""
Send while you compute: an asynchronous all-reduce
==================================================

Hide an all-reduce behind a matmul. ``dist.all_reduce(..., async_op=True)`` returns at once, and the
sum is there when its work is done. This template shows the shape of a recipe with the smallest
technique there is.

**When not to bother:** the next line needs the sum.

.. code-block:: python

   import torch
   import torch.distributed as dist

   gradient, x = torch.ones(4), torch.ones(4, 4)
   work = dist.all_reduce(gradient, async_op=True)
   y = x @ x    # runs beside the all-reduce
   work.wait()  # before anybody reads the gradient

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * how to start a collective, compute, and wait where you need the result

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks

.. verification-badge::

The idea
--------

.. lanes:: Schematic. The all-reduce runs beside the next matmul.

   compute:     0-4 matmul; 4-8 next matmul; 8-9 use sum
   collective:  4-7 all-reduce ~
"""

# %%
# Sizes
# -----

import os

import torch
import torch.distributed as dist

WIDTH = 256  # features

# %%
# Start, compute, wait
# --------------------
# The tensor belongs to the collective until ``wait()``. Do not read or change it before.


def overlapped_sum(ours: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum ``ours`` over all ranks while ``other`` is squared; both are (WIDTH, WIDTH) float32."""
    total = ours.clone()
    work = dist.all_reduce(total, async_op=True)
    product = other @ other
    work.wait()
    return total, product


# %%
# Run it, and prove it
# --------------------
# Every rank contributes another value, so a missing rank shows in the sum.


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ranks = dist.get_world_size()
        ours = torch.full((WIDTH, WIDTH), float(dist.get_rank() + 1))
        total, product = overlapped_sum(ours, torch.eye(WIDTH))
        expected = ranks * (ranks + 1) / 2
        assert torch.equal(total, torch.full_like(total, expected)), "the sum is wrong"
        assert torch.equal(product, torch.eye(WIDTH)), "the product is wrong"
        print(f"every element of the sum over {ranks} ranks is {expected}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

# %%
# What breaks if you remove a line
# --------------------------------
#
# .. recipe-controls::
