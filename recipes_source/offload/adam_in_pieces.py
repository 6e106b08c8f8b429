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
   from adam_in_pieces import PIECE, numbers_of, update_block, update_pieces, without_lock

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
      * ``host_layers.py``

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

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from host_layers import start_rank
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

PIECE = 2**16  # parameters: what is read twice of a piece stays in the cache of one core
THREADS, STEPS, PARAMETERS = 2, 3, 2 * PIECE + 1000
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
Tensors = list[torch.Tensor]

# %%
# AdamW of torch, for Python and for TorchScript
# ----------------------------------------------
# ``_fused_adamw_`` makes one pass over weights, gradients and moments where the default AdamW makes
# many. It is what ``torch.optim.AdamW(fused=True)`` calls; the function that torch documents calls
# it too, with more Python around it. Adam works element by element, so cuts change no bit.


def fused_adamw(settings: dict, gradient, step, master, exp_avg, exp_avg_sq, skip=None) -> None:
    """One step of AdamW in fp32, the one that ``step`` counts; none if ``skip`` is 1."""
    numbers = {"lr": float(settings["lr"]), "weight_decay": settings["weight_decay"]}
    numbers |= dict(zip(("beta1", "beta2"), settings["betas"], strict=True), eps=settings["eps"])
    tensors = [master], [gradient], [exp_avg], [exp_avg_sq], [], [step]
    torch._fused_adamw_(*tensors, amsgrad=False, maximize=False, found_inf=skip, **numbers)


def adamw(p: Tensors, g: Tensors, m: Tensors, v: Tensors, step: Tensors, numbers: list[float]):
    """The same, as TorchScript can have it; ``numbers`` by ``numbers_of``."""
    torch._fused_adamw_(
        p,
        g,
        m,
        v,
        [],
        step,
        lr=numbers[0],
        beta1=numbers[1],
        beta2=numbers[2],
        eps=numbers[3],
        weight_decay=numbers[4],
        amsgrad=False,
        maximize=False,
    )


def numbers_of(settings: dict, scale: float) -> list[float]:
    """What a step computes with: rate, betas, eps, decay; gradients are multiplied by ``scale``."""
    decay = settings["weight_decay"]
    return [float(settings["lr"]), *settings["betas"], settings["eps"], decay, scale]


# %%
# The pieces of a block
# ---------------------
# ``parts`` are lists that the caller made. They could be made here, where they are filled. But
# TorchScript removes what it takes for useless, and it takes an operator that changes tensors in a
# list of its own for useless: no error, and nothing is updated. A list that comes from outside is
# safe.


def update_pieces(block: Tensors, parts: list[Tensors], step: Tensors, numbers: list[float]):
    """A step for a block: gradient, weight, master, two moments, and a scratch as long as a piece.

    ``parts``: four lists of one tensor each, to be overwritten. A weight in fp32 is its own master.
    """
    weight, scratch = block[1], block[5]
    scale = scratch[0].clone().fill_(numbers[5])
    pieces = [whole.split(scratch.numel()) for whole in block[:5]]
    for i, gradient in enumerate(pieces[0]):
        for part, cut in zip(parts, pieces[2:]):  # noqa: B905
            part[0] = cut[i]
        parts[3][0] = scratch[: gradient.numel()].copy_(gradient)
        if numbers[5] != 1.0:
            parts[3][0].mul_(scale)
        adamw(parts[0], parts[3], parts[1], parts[2], step, numbers)
        if weight.dtype != torch.float32:
            pieces[1][i].copy_(parts[0][0])


def without_lock(function: Callable) -> Callable:
    """A function as TorchScript; as it is, right and slower, in a PyTorch that has that no longer."""
    return getattr(torch.jit, "script", lambda plain: plain)(function)


def update_block(update: Callable, block: Tensors, step: torch.Tensor, numbers: list) -> None:
    """Call ``update``, which is ``update_pieces``.

    Raises:
        ValueError: a block's tensors are not flat, without gaps and of one length; master, moments or
            scratch are not in fp32; or a weight in fp32 has another master than itself.
    """
    gradient, weight, master = block[:3]
    if not all(tensor.ndim == 1 and tensor.is_contiguous() for tensor in block):
        raise ValueError("a block is of flat tensors without gaps")
    if {tensor.numel() for tensor in block[:5]} != {gradient.numel()}:
        raise ValueError("a block is of flat tensors of one length")
    if {tensor.dtype for tensor in block[2:]} != {torch.float32}:
        raise ValueError("master, moments and scratch are in fp32")
    if weight.dtype == torch.float32 and weight.data_ptr() != master.data_ptr():
        raise ValueError("a weight in fp32 is its own master: pass it twice")
    update(block, [[tensor] for tensor in block[2:]], [step], numbers)


def host_threads() -> int:
    """This rank's part of the machine's cores, less one for the thread that trains."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // ranks - 1)


# %%
# What stays on the device
# ------------------------
# A parameter that stays on the device has its state there. ``skip`` (torch's ``found_inf``) makes
# the kernel change nothing, and no thread has to read it. A number that the host must read, such as
# a norm, goes there by ``to_host``: only the thread that reads it waits for its event.

MOMENTS = ("exp_avg", "exp_avg_sq")
FP32 = torch.float32  # whatever the default dtype is


def state_on_device(parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    """Of a parameter that stays on the device: step, fp32 master and moments."""
    master = parameter.detach().float()
    state = {name: torch.zeros_like(master) for name in MOMENTS}
    return state | {"step": torch.zeros((), dtype=FP32, device=master.device), "master": master}


def load_states(state: dict, parameters: Iterable[nn.Parameter], saved: dict) -> None:
    """Load a state dict: moments that it lacks are zeros, weights become the rounded masters."""
    for kept in state.values():
        kept["step"].zero_()
    names = (name for group in saved["param_groups"] for name in group["params"])  # or numbers
    for name, p in zip(names, parameters, strict=True):
        found = saved["state"].get(name, {})
        for which, tensor in state.get(p, {}).items():
            if which in found:
                tensor.copy_(found[which])
            elif which in MOMENTS:
                tensor.zero_()
        if p in state:
            p.copy_(state[p]["master"])


def steps_apart(state: dict) -> dict:
    """With a ``step`` for each parameter: torch's optimizers, which may load it, count in place."""
    return {name: {**kept, "step": kept["step"].clone()} for name, kept in state.items()}


def refuse_other_adams(groups: list[dict], others: Iterable[str] = ()) -> None:
    """Raise where groups have settings that this AdamW has not: it would train in another way."""
    found = {name for group in groups for name in ("amsgrad", "maximize") if group.get(name)}
    found |= {"momentum" for group in groups if "betas" not in group}
    if any(not g.get("decoupled_weight_decay", True) and g["weight_decay"] for g in groups):
        found.add("decoupled_weight_decay=False")
    if others := sorted(found.union(others)):
        raise ValueError(f"this AdamW has no setting {', '.join(others)}")


def update_on_device(settings: dict, parameter: nn.Parameter, state, scale, skip) -> None:
    """The same step there; ``scale`` and ``skip`` are on the device as well, nothing waits."""
    state["step"] += 1 - skip
    tensors = (state[name] for name in ("step", "master", *MOMENTS))
    fused_adamw(settings, parameter.grad.float().mul_(scale), *tensors, skip)
    if parameter.dtype != torch.float32:
        parameter.copy_(state["master"])


def to_host(stream: torch.Stream, *numbers: torch.Tensor) -> tuple:
    """Queue the copy of numbers, after all that is queued; their event, copy and source."""
    source, on_gpu = torch.stack(numbers), numbers[0].is_cuda
    streams = torch.get_device_module(source.device)
    arrived = streams.Event(**({"blocking": True} if on_gpu else {}))
    copy = torch.empty(len(numbers), dtype=FP32, pin_memory=on_gpu)
    stream.wait_stream(streams.current_stream())
    with streams.stream(stream):
        copy.copy_(source, non_blocking=True)
    arrived.record(stream)
    return arrived, copy, source


# %%
# Ordinary training
# -----------------
# The next recipes are compared with this:


def groups_of(parameters: Iterable[nn.Parameter]) -> list[dict]:
    """Matrices, and what is not decayed."""
    both = list(parameters)
    matrices, others = ([p for p in both if (p.ndim > 1) is wanted] for wanted in (True, False))
    return [{"params": matrices}, {"params": others, "weight_decay": 0.0}]


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))


def train_resident(model: nn.Module, losses: Iterable, max_norm: float) -> None:
    """Training on the device: fp32 masters, means over ranks, clipping, a schedule."""
    masters = {p: nn.Parameter(p.detach().float()) for p in model.parameters()}
    groups = groups_of(masters.values())
    optimizer = torch.optim.AdamW(groups, fused=True, **SETTINGS)
    schedule, in_order = schedule_of(optimizer), [p for group in groups for p in group["params"]]
    for loss in losses:  # each is computed when the step before is done
        loss.backward()
        for parameter, master in masters.items():
            master.grad = parameter.grad.float()
            dist.all_reduce(master.grad)
            master.grad = (master.grad / dist.get_world_size()).to(parameter.dtype).float()
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
        update, scale = without_lock(update_pieces), 0.3
        weights = [torch.randn(PARAMETERS).bfloat16() for _ in range(THREADS)]
        masters = [nn.Parameter(weight.float()) for weight in weights]
        optimizer = torch.optim.AdamW(masters, fused=True, **SETTINGS)
        blocks = [
            [torch.empty_like(w), w, w.float(), *torch.zeros(2, PARAMETERS), torch.empty(PIECE)]
            for w in weights
        ]
        with ThreadPoolExecutor(THREADS, "adam", torch.set_num_threads, (1,)) as workers:
            for step in range(STEPS):
                for block, master in zip(blocks, masters, strict=True):
                    block[0].normal_()
                    master.grad = block[0].float() * scale
                optimizer.step()
                count, numbers = torch.tensor(step + 1.0), numbers_of(SETTINGS, scale)
                jobs = [workers.submit(update_block, update, b, count, numbers) for b in blocks]
                [job.result() for job in jobs]
        for (_, weight, mine, exp_avg, exp_avg_sq, _), master in zip(blocks, masters, strict=True):
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
