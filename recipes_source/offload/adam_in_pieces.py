# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, offload/adam_in_pieces.py
"""
Adam in pieces: one pass over the memory, without the GIL
=========================================================

Update weights that lie in host memory in one pass over that memory. The weights and gradients are
in bf16. Beside each weight Adam keeps a **master** (the weight in fp32) and two moments (its
running averages). This recipe updates all of them in pieces that stay in a core's cache, with all
cores at once. The result has the bits of ``torch.optim.AdamW``. :doc:`host_adam` updates the layers
of a model with it.

.. result-gain:: offload_step
   :rows: host
   :field: update_bytes_per_s

``host`` is this update with a thread on each core but one; 28 bytes count for each parameter
(below).

**When not to bother:** weights, gradients and moments are in fp32 and a plain
``torch.optim.AdamW(fused=True)`` is called once for all: that is one pass already.

.. code-block:: python

   import torch
   from overlap_recipes.offload.adam_in_pieces import PIECE, numbers_of, update_block
   from overlap_recipes.offload.adam_in_pieces import update_pieces, without_lock

   settings = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
   update = without_lock(update_pieces)                       # once
   master, scratch = weight.float(), torch.empty(PIECE)       # weight: bf16, flat, on the host
   exp_avg, exp_avg_sq = torch.zeros(2, weight.numel())
   gradient = torch.empty_like(weight)                        # always this tensor, filled anew
   block = [gradient, weight, master, exp_avg, exp_avg_sq, scratch]

   for step in range(1, 101):
       ...                                                    # the gradient arrives, in bf16
       update_block(update, block, torch.tensor(float(step)), numbers_of(settings, scale=1.0))

For all cores, cut the model into blocks and call ``update_block`` from one thread a core, each with
a scratch of its own and ``torch.set_num_threads(1)``, as ``main`` does.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * why small pieces are slow from Python, and large ones too
      * several operators in one call that holds no lock
      * a trap of TorchScript: an update that is removed in silence

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks; no compiler
      * the package ``overlap_recipes``: ``pip install .`` in this repository, or a copy of its
        folder ``overlap_recipes``

.. verification-badge::

The idea
--------

A step reads a gradient in bf16, widens it, scales it, updates master and moments, and rounds the
master to the weight that the device will load. Per parameter that is, read and written once,

.. math::

   (2 + 4 + 8) + (4 + 8 + 2) = 28 \\text{ bytes.}

But these are four operators (widen, scale, update, round), and each of the last three reads again
what another has just written. If a piece is larger than the cache, it comes from memory again. If
it is small, Python is in the way: each operator gives up Python's lock (the GIL) and takes it
again, and with a thread for each core the threads wait for it more than for memory.

So a thread makes **one call for many small pieces**. It is written in TorchScript, which runs
several operators without the lock.
"""

# %%
# Imports and sizes
# -----------------
# The imports are the proof's. Size and settings are the module's.
#
# .. literalinclude:: /overlap_recipes/offload/adam_in_pieces.py
#    :language: python
#    :start-at: PIECE = 2**16
#    :end-at: Tensors = list[torch.Tensor]

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

from overlap_recipes.offload.adam_in_pieces import (
    PIECE,
    SETTINGS,
    groups_of,
    numbers_of,
    update_block,
    update_pieces,
    without_lock,
)
from overlap_recipes.ranks import start_rank

THREADS = 2
STEPS = 3
PARAMETERS = 2 * PIECE + 1000  # of each block


# %%
# AdamW of torch, for Python and for TorchScript
# ----------------------------------------------
# ``_fused_adamw_`` makes one pass over weights, gradients and moments where the default AdamW makes
# many. It is what ``torch.optim.AdamW(fused=True)`` calls; the function that torch documents calls
# it too, with more Python around it. Adam works element by element, so cuts change no bit.
#
# .. literalinclude:: /overlap_recipes/offload/adam_in_pieces.py
#    :language: python
#    :pyobject: fused_adamw
#
# .. literalinclude:: /overlap_recipes/offload/adam_in_pieces.py
#    :language: python
#    :pyobject: adamw
#
# .. literalinclude:: /overlap_recipes/offload/adam_in_pieces.py
#    :language: python
#    :pyobject: numbers_of
#
# The pieces of a block
# ---------------------
# ``parts`` are lists that the caller made. They could be made here, where they are filled. But
# TorchScript removes what it takes for useless, and it takes an operator that changes tensors in a
# list of its own for useless: no error, and nothing is updated. A list that comes from outside is
# safe.
#
# .. literalinclude:: /overlap_recipes/offload/adam_in_pieces.py
#    :language: python
#    :pyobject: update_pieces
#
# .. literalinclude:: /overlap_recipes/offload/adam_in_pieces.py
#    :language: python
#    :pyobject: without_lock
#
# .. literalinclude:: /overlap_recipes/offload/adam_in_pieces.py
#    :language: python
#    :pyobject: update_block
#
# .. literalinclude:: /overlap_recipes/offload/adam_in_pieces.py
#    :language: python
#    :pyobject: host_threads
#
# What stays on the device
# ------------------------
# A parameter that stays on the device has its state there. ``skip`` (torch's ``found_inf``) makes
# the kernel change nothing, and no thread has to read it. A number that the host must read, such as
# a norm, goes there by ``to_host``: only the thread that reads it waits for its event.
#
# .. literalinclude:: /overlap_recipes/offload/adam_in_pieces.py
#    :language: python
#    :start-at: MOMENTS = ("exp_avg", "exp_avg_sq")
#    :end-at: FP32 = torch.float32
#
# .. literalinclude:: /overlap_recipes/offload/adam_in_pieces.py
#    :language: python
#    :pyobject: state_on_device
#
# .. literalinclude:: /overlap_recipes/offload/adam_in_pieces.py
#    :language: python
#    :pyobject: load_states
#
# .. literalinclude:: /overlap_recipes/offload/adam_in_pieces.py
#    :language: python
#    :pyobject: refuse_other_adams
#
# .. literalinclude:: /overlap_recipes/offload/adam_in_pieces.py
#    :language: python
#    :pyobject: update_on_device
#
# .. literalinclude:: /overlap_recipes/offload/adam_in_pieces.py
#    :language: python
#    :pyobject: to_host
#
# Ordinary training
# -----------------
# The next recipes are compared with this:
#
# .. literalinclude:: /overlap_recipes/offload/adam_in_pieces.py
#    :language: python
#    :pyobject: groups_of


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))


def train_resident(model: nn.Module, losses: Iterable, max_norm: float) -> None:
    """Training on the device: fp32 masters, means over ranks, clipping, a schedule."""
    masters = {p: nn.Parameter(p.detach().float()) for p in model.parameters()}
    groups = groups_of(masters.values())
    optimizer = torch.optim.AdamW(groups, fused=True, **SETTINGS)
    schedule = schedule_of(optimizer)
    in_order = []
    for group in groups:
        in_order += group["params"]
    for loss in losses:  # each is computed when the step before is done
        loss.backward()
        for parameter, master in masters.items():
            total = parameter.grad.float()
            dist.all_reduce(total)
            mean = (total / dist.get_world_size()).to(parameter.dtype)  # rounded, as ours arrive
            master.grad = mean.float()
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in in_order]))
        if norm.isfinite():
            clip_grads_with_norm_(in_order, max_norm, norm)
            optimizer.step()
        schedule.step()
        model.zero_grad()
        for parameter, master in masters.items():
            parameter.data.copy_(master)


# %%
# Run it, and prove it
# --------------------
# Threads update two blocks, whose lengths are no multiple of a piece's, beside an AdamW of torch
# that gets the same gradients. Masters, moments and weights must have its bits.


def main() -> None:
    start_rank()
    try:
        torch.manual_seed(dist.get_rank())
        update = without_lock(update_pieces)
        scale = 0.3
        weights = [torch.randn(PARAMETERS).bfloat16() for _ in range(THREADS)]
        masters = [nn.Parameter(weight.float()) for weight in weights]
        optimizer = torch.optim.AdamW(masters, fused=True, **SETTINGS)
        blocks = []
        for weight in weights:
            gradient = torch.empty_like(weight)
            exp_avg = torch.zeros(PARAMETERS)
            exp_avg_sq = torch.zeros(PARAMETERS)
            scratch = torch.empty(PIECE)
            blocks.append([gradient, weight, weight.float(), exp_avg, exp_avg_sq, scratch])
        with ThreadPoolExecutor(THREADS, "adam", torch.set_num_threads, (1,)) as workers:
            for step in range(STEPS):
                for block, master in zip(blocks, masters, strict=True):
                    gradient = block[0]
                    gradient.normal_()
                    master.grad = gradient.float() * scale
                optimizer.step()
                count = torch.tensor(step + 1.0)
                numbers = numbers_of(SETTINGS, scale)
                jobs = []
                for block in blocks:
                    jobs.append(workers.submit(update_block, update, block, count, numbers))
                for job in jobs:
                    job.result()  # raises what the thread has raised
        for block, master in zip(blocks, masters, strict=True):
            _, weight, mine, exp_avg, exp_avg_sq, _ = block
            state = optimizer.state[master]
            assert torch.equal(mine, master) and torch.equal(weight, master.bfloat16())
            assert torch.equal(exp_avg, state["exp_avg"])
            assert torch.equal(exp_avg_sq, state["exp_avg_sq"])
        print(f"{STEPS} steps in pieces: the bits of torch.optim.AdamW")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

# %%
# What it buys
# ------------
# The yardstick is a plain pass: an in-place ``mul_`` over masters and moments by all threads, which
# shows what the host's memory allows. The table has its rate and that of the update:
#
# .. result-table:: offload_step
#    :rows: host
#
# One reason why the update does not reach the plain pass: a processor reads a line of memory before
# it writes to it. The weights are only written, so 30 bytes are moved for 28 that count. Copies
# between host and device that run beside take their part of the memory's rate from both.
#
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built.
#
# .. recipe-controls::
#
# When it is not worth it
# -----------------------
# With few cores: then arithmetic is the limit, not memory, and pieces cost a few operators' calls.
#
# Known limits
# ------------
# * TorchScript is deprecated. It needs no compiler and keeps torch's bits; ``torch.compile`` of one
#   pass needs a compiler and time before the first step, and rounds in another way.
# * ``step`` must be on the host. The scaled gradients are not kept: the next piece overwrites the
#   scratch.
#
# Further reading
# ---------------
# * `AdamW <https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html>`__
# * `TorchScript <https://docs.pytorch.org/docs/stable/jit.html>`__
