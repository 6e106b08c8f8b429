"""
Adam on the host, beside backward and forward
=============================================

AdamW in fp32 needs twelve bytes a parameter for weights and moments, and they are touched once a
step: they belong in host memory, and so does the update. This recipe updates layer by layer, on
threads of the host, while the device computes other layers: the same bits as an ordinary AdamW,
no weight that is a step old.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * when a layer may be updated, and who has to wait for it
      * why the lowest layer goes first
      * clipping by the global norm without giving up the pipeline
      * what the host's memory allows, and when it is the wall

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks; CPU runs everything, a CUDA device overlaps it
      * host memory: 16 bytes a parameter for each rank, and room for one layer in fp32
      * ``weight_streaming.py``: layers, lanes and events come from it

.. verification-badge::

The idea
--------

A layer's weights are read last by its own backward, and next by its own forward. Anywhere between
the two, the host can update them: nothing is stale, and nothing is approximated. Backward ends with
layer 0 and forward begins with it, so of all layers whose gradients have arrived, the **lowest** is
updated first. If the host is the slower one, what is left at the end of backward are the upper
layers, and their updates run beside the next forward:

.. lanes:: Schematic. Backward and the next forward of four layers; the host is the slower one.

   compute: 0-4 3; 4-8 2; 8-12 1; 12-16 0; 26-29 0; 32-35 1; 35-38 2; 38-41 3
   D2H:     4-6 3 ~; 8-10 2 ~; 12-14 1 ~; 16-18 0 ~
   host:    6-12 Adam 3; 12-18 Adam 2; 18-24 Adam 0; 24-30 Adam 1
   H2D:     24-26 0 ~; 30-32 1 ~; 32-34 2 ~; 34-36 3 ~
   @0 backward
   @16 forward

Three waits make it right, and each is a wait of one host thread for one layer:

1. **Update after arrival**: the host reads a layer's gradients after its event ``host_done``.
2. **Load after update**: the copy of a layer's weights to the device is queued when its update has
   ended.
3. **Clip after all**: with a limit on the norm, the first update waits for the last gradient.

In your training
----------------

Layers, batches, loss and ``settings``, the arguments of AdamW, are yours; this file imports two
others, ``weight_streaming.py`` and ``host_layers.py``:

.. code-block:: python

   from pipelined_optimizer import PipelinedAdamW
   from weight_streaming import start_rank

   device = start_rank()
   stack = PipelinedAdamW(layers, device, adamw=settings, max_norm=max_norm)
   for batch in batches:
       loss = stack.step(batch, loss_of)
   stack.finish()
   stack.close()
   torch.distributed.destroy_process_group()
"""

# %%
# Imports
# -------

import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from queue import PriorityQueue

import torch
import torch.distributed as dist
import weight_streaming as streaming
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

LAYERS = 4
CHUNK = 2**23  # parameters updated at a time, 32 MB in fp32; a multiple of 16
STEPS = 5
MAX_NORM = 0.05  # small enough to clip every step of this model
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}

# %%
# Cores
# -----
# ``torchrun`` sets ``OMP_NUM_THREADS=1`` when it starts several ranks, and Adam on one core takes
# minutes for a large model. The number of cores is a property of the calling thread:
# ``torch.set_num_threads`` in a worker gives them to the worker and leaves the training thread as
# it is.


def host_threads() -> int:
    """This rank's part of the machine's cores, less one for the thread that trains."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // ranks - 1)


# %%
# The optimizer
# -------------
# For each layer there are fp32 **masters** of its bf16 weights, cut into chunks, and PyTorch's
# AdamW over each chunk. ``fused=True`` makes one pass over weights, gradients and moments where the
# default makes many. The memory of the host is what limits an update, so each chunk goes through it
# once: its gradients are widened to fp32, Adam steps, and the masters are rounded to the
# page-locked bf16 weights that the next load copies, all while the chunk is in the caches. Adam
# works element by element, so the cuts change no bit. One thread makes all updates, and one fp32
# chunk of gradients serves them all.
#
# **Arrivals** are watched by a thread of their own. It takes the layers in the order of the
# backward, on every rank the same, so it can also average over ranks; a queue of its own order
# tells the thread of updates what is due. Which layer that one updates next depends on timing. The
# result does not: no layer's update reads another layer. This thread is first told the device of
# its rank: a new thread takes the first one, and to wait for an event there is to open a context on
# it, half a gigabyte of the first GPU for each rank of the host.
#
# **Clipping.** ``max_norm`` defers all updates until the norm of all gradients is known. They still
# run beside the next forward, lowest layer first. On the CPU, PyTorch takes the norm of a whole
# tensor on one core, which here would take longer than the update. Norms of rows use all cores;
# the norm of these norms is what ``clip_grad_norm_`` finds, up to rounding.
#
# **Gradients that are not finite** never reach the moments. The mean over ranks carries them to
# every rank, so that every rank raises, in its next ``forward`` or ``finish``. With ``max_norm``
# nothing has been updated by then and training can go on with another batch; ``max_norm=math.inf``
# gives just that, without clipping. Without it, each layer is looked at when its turn comes (no sum
# stays finite over an infinity or a NaN; one that overflows is looked into), and the others may be
# updated already.
#
# **Half an update** is never trained on. If some layers have been updated and others cannot be,
# because their gradients are not finite, a thread of the host failed or the backward raised
# half-way, then every later ``forward`` and ``finish`` raises: the error stays where it is found
# again. Load a checkpoint into a new stack. A loss function or a forward that raises leaves nothing
# of its batch behind, and the next ``step`` goes on.
#
# **Cores.** The update splits each chunk evenly over its cores and waits for the last one. Whatever
# takes a core from it in between, if only for a moment, holds them all. So the training thread
# keeps a core for itself, and the wait for ``host_done`` sleeps (``blocking=True``) where it would
# spin.


def row_norms(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The 2-norms of all rows (the last dimension) of each tensor; 1-D."""
    return [torch.linalg.vector_norm(torch.atleast_1d(x), dim=-1).flatten() for x in tensors]


class PipelinedAdamW(streaming.StreamedStack):
    """A streamed stack that is trained by AdamW on the host, layer by layer.

    Args:
        layers: the modules, in order, the same on every rank.
        device: where they run.
        adamw: arguments of ``torch.optim.AdamW``.
        max_norm: limit of the global gradient norm (a float), or None.
        settings: of ``StreamedStack``.

    Every rank of the default process group must build one. Each call of ``step`` is a training
    step; the loss it returns is that of the weights before. ``masters`` are flat fp32 tensors, one
    a layer. Parameters that do not require gradients are left as they are.
    """

    def __init__(self, layers, device: torch.device, *, adamw: dict, max_norm=None, **settings):
        super().__init__(layers, device, **settings)
        self.max_norm = max_norm
        sizes = [gradients.flat.numel() for gradients in self.gradients]
        self.masters = [w.flat[:n].float() for w, n in zip(self.weights, sizes, strict=True)]
        self.scratch, self.chunk = torch.empty(max(sizes)), torch.empty(CHUNK)
        self.optimizers = [
            [torch.optim.AdamW([nn.Parameter(c)], fused=True, **adamw) for c in master.split(CHUNK)]
            for master in self.masters
        ]
        blocking = {} if device.type == "cpu" else {"blocking": True}  # a wait takes no core
        self.host_done = [self.streams.Event(**blocking) for _ in self.layers]
        self.norms, self.norm = [[] for _ in self.layers], torch.zeros(())  # by rows; of all
        self.received: list[Future] = []
        self.updated: dict[int, Future] = {}
        self.due: PriorityQueue[tuple[int, Future]] = PriorityQueue()
        self.group = dist.new_group(backend="gloo")
        cores = (torch.set_num_threads, (host_threads(),))
        self.arrivals = ThreadPoolExecutor(1, "arrivals", *cores)
        self.arrivals.submit(self.streams.set_device, self.streams.current_device())
        self.updates = ThreadPoolExecutor(1, "updates", *cores)

    # The training thread

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all layers, each once it is updated.

        Raises:
            FloatingPointError: a gradient of the step before is not finite.
            RuntimeError: the backward of the step before raised half-way.
        """
        self.await_arrivals()
        return super().forward(x)

    def load(self, layer: int) -> None:
        """Queue the copy of a layer's weights into its slot, once they are updated."""
        if layer in self.updated:
            self.updated[layer].result()
        super().load(layer)

    def store(self, layer: int) -> None:
        """Queue the copy of a layer's gradients to the host, and all that follows there."""
        super().store(layer)
        self.received.append(self.arrivals.submit(self.receive, layer))

    def await_arrivals(self) -> None:
        for future in wait(self.received).done:
            future.result()
        if len(self.received) % len(self.layers):
            raise RuntimeError("a backward was left half-way: load a checkpoint into a new stack")
        received, self.received = self.received, []
        if received and not self.norm.isfinite():
            raise FloatingPointError(f"gradient norm {self.norm}: nothing updated, skip this batch")

    def finish(self) -> None:
        """Wait for all updates: before weights are read, or learning rates changed.

        Raises:
            FloatingPointError: a gradient of the last step is not finite.
            RuntimeError: the backward of the last step raised half-way.
        """
        self.await_arrivals()
        for updated in self.updated.values():
            updated.result()

    def reload(self) -> None:
        """Make the weights the masters, when something else has changed them since ``finish()``."""
        for master, weights in zip(self.masters, self.weights, strict=True):
            master.copy_(weights.flat[: master.numel()])

    # The thread of arrivals

    def receive(self, layer: int) -> None:
        """Wait for a layer's gradients, average them, and schedule the layers that are due."""
        self.host_done[layer].synchronize()
        host = self.gradients[layer]
        fp32 = self.scratch[: host.flat.numel()]
        if dist.get_world_size() > 1:
            dist.all_reduce(fp32.copy_(host.flat), group=self.group)
            host.flat.copy_(fp32.div_(dist.get_world_size()))
        if self.max_norm is None:
            return self.schedule([layer])
        self.norms[layer] = row_norms(host.views_of(fp32.copy_(host.flat)).values())
        if layer == 0:
            self.norm = get_total_norm([each for rows in self.norms for each in rows])
            if self.norm.isfinite():
                self.schedule(range(len(self.layers)))

    def schedule(self, layers: Iterable[int]) -> None:
        for layer in layers:
            updated = self.updated[layer] = Future()
            self.due.put((layer, updated))
            self.updates.submit(self.update_lowest)

    # The thread of updates

    def update_lowest(self) -> None:
        layer, updated = self.due.get()
        try:
            updated.set_result(self.update(layer))
        except BaseException as error:
            updated.set_exception(error)

    def update(self, layer: int) -> None:
        """Update a layer's masters with its gradients, and its weights with the masters."""
        host = self.gradients[layer]
        finite = (x.sum().isfinite() or x.isfinite().all() for x in host.views.values())
        if self.max_norm is None and not all(finite):
            raise FloatingPointError(f"layer {layer}: inf/NaN, load a checkpoint into a new stack")
        weights = self.weights[layer].flat[: host.flat.numel()]
        pieces = zip(host.flat.split(CHUNK), weights.split(CHUNK), strict=True)
        for optimizer, (gradient, weight) in zip(self.optimizers[layer], pieces, strict=True):
            [master] = optimizer.param_groups[0]["params"]
            master.grad = self.chunk[: gradient.numel()].copy_(gradient)
            if self.max_norm is not None:
                clip_grads_with_norm_([master], self.max_norm, self.norm)
            optimizer.step()
            weight.copy_(master.detach())

    def close(self) -> None:
        """End the threads, leave the group, unlock the host memory."""
        self.arrivals.shutdown()
        self.updates.shutdown()
        dist.destroy_process_group(self.group)
        super().close()


# %%
# Run it, and prove it
# --------------------
# The measure is ordinary training: all weights resident, gradients averaged over ranks after
# backward, clipped, and one fused AdamW for all parameters in fp32 on the host. Means
# over ranks are rounded to the gradients' dtype there as here, which is where they are kept until
# the update.


def build_layers() -> Iterable[nn.Module]:
    torch.manual_seed(0)
    return (streaming.Block().bfloat16() for _ in range(LAYERS))


def batch_of(step: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    shape = (streaming.BATCH, streaming.TOKENS, streaming.WIDTH)
    return torch.randn(shape, generator=generator).to(device, torch.bfloat16)


def train_resident(stack: PipelinedAdamW) -> list[dict[str, nn.Parameter]]:
    """``STEPS`` ordinary steps from the same start; return the masters by layer and name."""
    layers = nn.ModuleList(build_layers())
    masters = [{n: nn.Parameter(p.float()) for n, p in x.state_dict().items()} for x in layers]
    parameters = [p for named in masters for p in named.values()]
    optimizer = torch.optim.AdamW(parameters, fused=True, **SETTINGS)
    for step in range(STEPS):
        x = batch_of(step, stack.device)
        found = streaming.resident_gradients(layers, x, streaming.loss_of)
        for named, gradients, host in zip(masters, found, stack.gradients, strict=True):
            flat = torch.zeros_like(host.flat, dtype=torch.float32)
            for name, view in host.views_of(flat).items():
                named[name].grad = view.copy_(gradients[name])
            dist.all_reduce(flat, group=stack.group)
            flat.copy_((flat / dist.get_world_size()).to(host.flat.dtype))
        norm = get_total_norm(row_norms([master.grad for master in parameters]))
        clip_grads_with_norm_(parameters, stack.max_norm or torch.inf, norm)
        optimizer.step()
        for layer, named in zip(layers, masters, strict=True):
            layer.load_state_dict(named)
    return masters


def prove(stack: PipelinedAdamW) -> None:
    """Train, and compare every bit of the masters and weights with the resident run's."""
    losses = [stack.step(batch_of(i, stack.device), streaming.loss_of) for i in range(STEPS)]
    stack.finish()
    for layer, named in enumerate(train_resident(stack)):
        for name, master in stack.gradients[layer].views_of(stack.masters[layer]).items():
            assert torch.equal(master, named[name]), f"layer {layer}, {name}"
            assert torch.equal(stack.weights[layer].views[name], master.bfloat16()), name
    print(f"max_norm={stack.max_norm}: loss {losses[0]:.3f} to {losses[-1]:.3f}, same bits")


# %%
# One rank then meets an infinity. Every rank must raise, and no weight may have changed.


def prove_nothing_updated(stack: PipelinedAdamW) -> None:
    before = [weight.clone() for weight in stack.layers.parameters()]
    scale = torch.inf if dist.get_rank() == 0 else 1.0
    stack.step(batch_of(STEPS, stack.device) * scale, streaming.loss_of)
    try:
        stack.finish()
    except FloatingPointError as error:
        print(error)
    else:
        raise AssertionError("a gradient that is not finite was not noticed")
    assert all(map(torch.equal, before, stack.layers.parameters()))


def main() -> None:
    device = streaming.start_rank()
    try:
        for max_norm in (None, MAX_NORM):
            stack = PipelinedAdamW(build_layers(), device, adamw=SETTINGS, max_norm=max_norm)
            with closing(stack):
                prove(stack)
                if max_norm is not None:
                    prove_nothing_updated(stack)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

# %%
# What it buys
# ------------
# ``streamed`` is forward and backward alone, with weights on the host: what a training step would
# cost if the update were free. ``streamed_adam`` is the whole step. Its bound is the longer of two
# times: the updates of all layers, measured alone; and forward and backward with the update of
# layer 0, which lies between the last gradient and the first load, so that nothing can hide it.
# What the columns say: :doc:`weight_streaming`.
#
# .. result-figure:: offload_step
#    :rows: resident streamed_adam
#    :field: step_s
#
# ``streamed_adam`` is the host's row more than the device's. An update takes what the cores and the
# memory of the host make of it, beside whatever else runs there; between hosts of the same device
# that differs by half again. Here it had half of the machine's cores. Read the row against its own
# bound, which is of the same host, and time ``update(layer)`` on yours.
#
# On the left the updates are the wall: a step takes at least as long as they do, however few its
# tokens. (The bound is not quite level there: the updates were timed anew at each size.) To the
# right most of them is hidden behind the device's work.
#
# .. result-table:: offload_step
#    :rows: resident streamed streamed_adam torchao deepspeed
#
# Most is missing from the bound where both are busy about as long as each other, here on the right.
# From the last update of a step to the next gradient, the device still has the forward of the
# layers above and the backward of the top layer to do, and the host waits. While updates run, the
# copies over the link share the host's memory with them.
#
# ``torchao`` is that package's ``CPUOffloadOptimizer``: the weights stay on the device, and what
# the host keeps of them, and of the moments, is bf16. Its updates move about half as much, and
# round weights and moments to bf16 in every step. It was measured in another run: its time and that
# of ``streamed_adam`` do not compare.
#
# Weights, gradients and moments may also be larger than the memory of the device. The benchmark can
# train such a model (``python benchmarks/offload_step.py --modes "" --beyond``):
#
# .. result-table:: offload_memory
#    :rows: streamed_adam
#
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built. On the CPU a copy is over before anyone
# looks, so a missing wait changes no bit there; a recorder of stream order finds what nothing
# orders. On a CUDA device the same edits train on weights and gradients that are half old.
#
# .. recipe-controls::
#
# Memory
# ------
# Host memory for :math:`P` parameters: page-locked bf16 weights and gradients, masters, and the two
# moments of Adam,
#
# .. math::
#
#    2P + 2P + 4P + 8P = 16\,P \text{ bytes,}
#
# and with clipping or several ranks 4 bytes for each parameter of the largest layer. On the device
# there are two slots of weights and two of gradients, 8 bytes for each parameter of the largest
# layer, however many layers there are.
#
# An update reads gradients, masters and moments, and writes masters, moments and weights. The
# memory of the host therefore moves at least
#
# .. math::
#
#    (2 + 4 + 8) + (4 + 8 + 2) = 28 \text{ bytes a parameter and step}
#
# for the update, 2 to look at the gradients (with clipping 10, for they are widened to take their
# norms), and 6 to 8 for the copies over the link. **When the host is the wall**: if its memory
# moves :math:`B` bytes/s and the device computes :math:`F` FLOP/s, a step of :math:`T` tokens with
# recomputation takes the device :math:`8PT/F` seconds and the updates :math:`28P/B`. The updates
# are hidden from about :math:`T = 3.5\,F/B` tokens a step on, and only from there does the bound
# grow with the tokens. Below that, raise the tokens of a step, with layer-major microbatches
# (:doc:`accumulate_and_average`) if they do not fit at once: the update costs the same for any
# number of them. With few cores their arithmetic is the wall before the memory is: time
# ``update(layer)`` alone, and use that instead of :math:`28P/B`.
#
# When it is not worth it
# -----------------------
# * The moments fit the device: a fused AdamW there takes milliseconds.
# * Steps of few tokens, see above. An optimizer that keeps less (8-bit moments, none at all) moves
#   less; it is then another optimizer, and not these bits.
# * Several ranks of one host share its memory and its cores: each updates all the weights. Sharding
#   masters and moments over the ranks divides that work.
#
# Known limits
# ------------
# * "The same bits" has one exception. PyTorch's vectorised Adam leaves the last elements of a
#   tensor, fewer than 16, to scalar code that rounds differently. Chunks of padded layers have no
#   such rest; an ordinary optimizer has, for each tensor whose size is not a multiple of 16.
# * Gradients wait for their update in bf16, and so does their mean over ranks: it is made in fp32
#   and rounded once. ``gradient_dtype=torch.float32`` keeps fp32 throughout, for 2 bytes more per
#   parameter and stores of twice the size.
# * The settings of AdamW are the same for all parameters. Change a learning rate in
#   ``optimizers[layer][chunk].param_groups`` after ``finish()``, not while updates may run.
# * What else changes weights, such as ``layers.load_state_dict(pretrained)``, does it between
#   ``finish()`` and ``reload()``. Without the latter the masters stay as they were, and the next
#   update undoes the change without an error. The moments stay in any case.
# * A checkpoint needs ``masters`` and each optimizer's ``state_dict()``, read after ``finish()``.
#   When they are loaded, round the weights: ``weights[layer].flat[: len(m)].copy_(m)``, where ``m``
#   is ``masters[layer]``; ``reload()`` would go the other way, and lose what bf16 does not hold.
# * The padding between parameters holds anything, NaN as well, in the masters, the moments and a
#   checkpoint of them; nothing else is computed from it. Look at the masters by name:
#   ``gradients[layer].views_of(masters[layer])``.
# * Modules outside the stack (an embedding, a head in the loss function) have resident weights and
#   need an optimizer of their own; ``max_norm`` does not see their gradients.
# * A backward that raised half-way ends the stack with ``max_norm`` as well, although nothing has
#   been updated: other ranks may have come further.
# * Every rank must take the same steps. If one leaves out a batch because its forward raised, its
#   next gradients are averaged with those of the others for that batch, without an error.
# * Cores given to these threads are not reserved: data loading on the same ones slows updates.
#
# Further reading
# ---------------
# * `AdamW <https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html>`__: ``fused``,
#   and the rest of its arguments
# * `clip_grads_with_norm_
#   <https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grads_with_norm_.html>`__:
#   clipping in two halves
# * `ZeRO-Offload: Democratizing Billion-Scale Model Training <https://arxiv.org/abs/2101.06840>`__:
#   Adam on the host, and an update delayed by a step where this one is not
