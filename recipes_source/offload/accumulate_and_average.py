"""
Sum gradients on the host: accumulation and data parallelism
============================================================

Gradients that arrive in host memory one layer at a time have to be summed there, over microbatches
and over ranks, while the device is already computing the next ones. This recipe does both beside
the backward, to the last bit of an ordinary run (on three ranks or more, to the rounding of a sum),
and then lets one load of a layer, and one store, serve all microbatches of a step.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * why no stream can order an addition on the host, and what does
      * in which dtype and order to sum, and what bits to expect over ranks
      * how to keep the collectives of two threads from crossing
      * layer-major microbatches: one load of a layer serves them all

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks; CPU runs everything, a CUDA device overlaps it
      * ``weight_streaming.py``, the recipe before this one: layers, lanes and events come from it

.. verification-badge::

The idea
--------

The copy of a layer's gradients to the host ends at some time that only its event knows. The thread
that queues the training must not wait for it, or the device runs dry; a worker thread can. It
waits for the event ``host_done``, adds the gradients to a sum in fp32, and when the last microbatch
is in, averages the sum over the ranks:

.. lanes:: Schematic. Backward of four layers; each but the last is summed while the next computes.

   compute: 0-6 layer 3; 6-12 layer 2; 12-18 layer 1; 18-24 layer 0
   D2H:     6-9 3 ~; 12-15 2 ~; 18-21 1 ~; 24-27 0 ~
   host:    9-11 add 3; 15-17 add 2; 21-23 add 1; 27-29 add 0
   reduce:  11-14 mean 3 ~; 17-20 mean 2 ~; 23-26 mean 1 ~; 29-32 mean 0 ~

Microbatch after microbatch, every layer crosses the link once for each of them. Turn the two loops
inside out and each layer is loaded once, used for all microbatches, and its gradients, summed on
the device, are stored once:

.. lanes:: Schematic. Forward of microbatches a, b and c, layer-major: three uses for each load.

   compute: 2-4 0a; 4-6 0b; 6-8 0c; 8-10 1a; 10-12 1b; 12-14 1c; 14-16 2a; 16-18 2b; 18-20 2c
   H2D:     0-2 0 ~; 2-4 1 ~; 8-10 2 ~; 14-16 3 ~
"""

# %%
# Imports
# -------
# The streamed stack is that of ``weight_streaming.py``; only its ``backward``, ``store``, ``step``
# and the two methods that compute a layer are extended here.

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

import torch
import torch.distributed as dist
import weight_streaming as streaming
from torch import nn

MICROBATCHES = 3  # per rank and step
LAYERS = 4
STEPS = 2  # the second one uses all buffers again
SUM_DTYPE = torch.float32
CHUNK = 2**18  # elements that a core adds at a time; their fp32 copy, 1 MB, stays in a cache

# %%
# Sums on the host
# ----------------
# **When.** ``store`` queues the copy of a layer's gradients and hands the sum to the worker. The
# worker waits for the event ``host_done`` of that layer: an event holds streams and host threads,
# but nothing holds a host addition that was not told to wait. The buffer that the copy fills is the
# same for every microbatch, so the next copy of that layer is queued only when the worker has read
# it. That is one backward later; unless the host is slower than the device, nobody waits.
#
# **What.** Sums of bf16 gradients are kept in fp32 and made in the order of the microbatches: the
# first is copied, each other one added. That fixes every bit. Adding a bf16 tensor to an fp32 one
# first converts all of the former to a temporary tensor; in chunks, the temporary one never leaves
# the cache.
#
# **Over ranks.** Collectives on one group must be called in the same order on every rank. One
# worker that takes layers in the order of the backward does that, whatever the timing; a group of
# its own keeps it apart from the collectives of training. gloo's ``all_reduce`` gives every rank
# the same bits, and the same again in the next run. It has no mean, so the sum is divided.
#
# **Cores.** One core adds slower than the host's memory allows. ``torchrun`` sets
# ``OMP_NUM_THREADS=1`` when it starts several ranks, and ``torch.set_num_threads``, called in the
# worker, gives it more and leaves the training thread as it is.
#
# **Device.** A new thread's current device is the first one, whatever device its rank uses. To wait
# for an event there is to open a context on it: half a gigabyte of the first GPU for each rank of
# the host. So the worker is first told the device.
#
# As with PyTorch's ``DistributedDataParallel``, the result is a sum over microbatches and a mean
# over ranks: divide the loss by the number of microbatches if you want a mean there as well.


def host_threads() -> int:
    """Cores of the machine that this process may use, divided by the ranks that share it."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // ranks)


class HostSums(streaming.StreamedStack):
    """A streamed stack that sums its gradients on the host and averages them over the ranks.

    Args:
        layers: the modules, in order, the same on every rank.
        device: where they run.
        backwards: backward passes that make one sum.
        threads: cores that the worker adds with; ``host_threads()`` if None.
        settings: of ``StreamedStack``.

    Every rank of the default process group must build one. ``sums`` are flat fp32 tensors, one a
    layer, laid out as its ``gradients``.
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        device: torch.device,
        *,
        backwards: int,
        threads: int | None = None,
        **settings,
    ) -> None:
        super().__init__(layers, device, **settings)
        threads = threads or host_threads()
        self.backwards, self.chunk = backwards, CHUNK * threads
        self.sums = [torch.empty_like(g.flat, dtype=SUM_DTYPE) for g in self.gradients]
        self.added: dict[int, Future] = {}
        self.group = dist.new_group(backend="gloo")
        self.worker = ThreadPoolExecutor(1, "host sums", torch.set_num_threads, (threads,))
        self.worker.submit(self.streams.set_device, self.streams.current_device())

    def backward(self, grad_y: torch.Tensor) -> torch.Tensor | None:
        """As in ``StreamedStack``, but refused with a RuntimeError after one that raised."""
        self.refuse_half_sums()
        return super().backward(grad_y)

    def refuse_half_sums(self) -> None:
        if self.stores % len(self.layers):
            raise RuntimeError("a backward was left half-way, its sums are lost: build a new stack")

    def store(self, layer: int) -> None:
        """Queue the copy of a layer's gradients to the host, and have the worker add them."""
        if layer in self.added:
            self.added[layer].result()
        backward = self.stores // len(self.layers) % self.backwards
        super().store(layer)
        self.added[layer] = self.worker.submit(self.add, layer, backward)

    def add(self, layer: int, backward: int) -> None:
        """Worker: add a layer's gradients when they have arrived; average a complete sum."""
        self.host_done[layer].synchronize()
        total, gradient = self.sums[layer], self.gradients[layer].flat
        for part, new in zip(total.split(self.chunk), gradient.split(self.chunk), strict=True):
            if backward == 0:
                part.copy_(new)
            else:
                part.add_(new)
        if backward == self.backwards - 1 and dist.get_world_size() > 1:
            dist.all_reduce(total, group=self.group)
            total /= dist.get_world_size()

    def finish(self) -> list[dict[str, torch.Tensor]]:
        """Wait for the sums; return them by layer and name (fp32, host, until the next backward).

        Raises:
            RuntimeError: a backward raised half-way.
            Exception: what made the worker fail, such as a rank that has gone.
        """
        self.refuse_half_sums()
        for added in self.added.values():
            added.result()
        return [g.views_of(total) for g, total in zip(self.gradients, self.sums, strict=True)]

    def close(self) -> None:
        """End the worker, leave the group, unlock the host memory."""
        self.worker.shutdown()
        dist.destroy_process_group(self.group)
        super().close()


# %%
# Layer-major microbatches
# ------------------------
# The drivers of the streamed stack hand an input from layer to layer without looking at it. Let it
# be a list of microbatches, and a loaded layer serves all of them before the next one is needed:
# the loads of a step stay what they are for one microbatch. In backward the device adds the
# microbatches in fp32, in their order, into the gradient slot (``gradient_dtype``), which is then
# stored once. The additions are those that the host made before, so the bits are the same.
#
# The loss of each microbatch is differentiated before the next one is computed, as in ordinary
# accumulation: one microbatch's logits are alive at a time, and the gradients of a head in the loss
# function are added in that order.
#
# What it costs is memory on the device: the inputs of all layers for all microbatches, and gradient
# slots of twice the size.


class LayerMajor(streaming.StreamedStack):
    """A streamed stack that takes lists of microbatches: all of them through a layer, then on."""

    def step(
        self, batches: list[torch.Tensor], loss_function: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Queue forward and backward of all microbatches; return their losses (1-D, device)."""
        self.graphs = [deque() for _ in self.layers]
        outputs = [y.detach().requires_grad_() for y in self.forward(batches)]
        losses = []
        for y in outputs:
            loss = loss_function(y)
            loss.backward()
            losses.append(loss.detach())
        grads = self.backward([y.grad for y in outputs])
        if entered := [i for i, grad in enumerate(grads) if grad is not None]:
            torch.autograd.backward([batches[i] for i in entered], [grads[i] for i in entered])
        return torch.stack(losses)

    def compute_forward(self, layer: int, xs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run one layer on every microbatch."""
        compute = super().compute_forward
        return [compute(layer, x) for x in xs]

    def compute_backward(
        self, layer: int, grad_ys: list[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Sum the layer's gradients over the microbatches, in order, in its gradient slot."""
        grad_xs = []
        for microbatch, grad_y in enumerate(grad_ys):
            grad_x, gradients = self.differentiate(layer, grad_y)
            grad_xs.append(grad_x)
            for name, total in self.gradient_views[layer].items():
                if microbatch == 0:
                    total.copy_(gradients[name])
                else:
                    total.add_(gradients[name])
        return grad_xs


class LayerMajorSums(LayerMajor, HostSums):
    """Both: the device sums the microbatches of a layer, the host averages over the ranks."""


# %%
# Run it, and prove it
# --------------------
# Every rank has the same bf16 layers and microbatches of its own. Because batches are made from
# seeds, each rank can also compute what the others do: with ordinary training, all weights
# resident, one microbatch after the other, and fp32 sums in that order.


def build_layers() -> Iterable[nn.Module]:
    torch.manual_seed(0)
    return (streaming.Block().bfloat16() for _ in range(LAYERS))


def batches_of(rank: int, step: int, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    shape = (MICROBATCHES, streaming.BATCH, streaming.TOKENS, streaming.WIDTH)
    return list(torch.randn(shape, generator=generator).to(device, torch.bfloat16))


def resident_sums(layers: nn.ModuleList, batches: list[torch.Tensor]) -> list[dict]:
    """fp32 sums over ``batches``, in their order, of what the resident run gives (by layer)."""
    sums = [{} for _ in layers]
    for x in batches:
        gradients = streaming.resident_gradients(layers, x, streaming.loss_of)
        for total, new in zip(sums, gradients, strict=True):
            for name, gradient in new.items():
                gradient = gradient.float()
                total[name] = total[name] + gradient if name in total else gradient
    return sums


def train(device: torch.device) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stack = HostSums(build_layers(), device, backwards=MICROBATCHES)
    major = LayerMajorSums(build_layers(), device, backwards=1, gradient_dtype=SUM_DTYPE)
    with closing(stack), closing(major):
        for step in range(STEPS):
            everyones = [batches_of(r, step, device) for r in range(ranks)]
            for x in everyones[rank]:
                stack.step(x, streaming.loss_of)
            major.step(everyones[rank], streaming.loss_of)
            prove(stack, major, [resident_sums(stack.layers, batches) for batches in everyones])
        print(f"{STEPS} steps of {MICROBATCHES} microbatches: every sum as in the resident run")

        assert stack.loads == MICROBATCHES * major.loads
        assert stack.stores == MICROBATCHES * major.stores
        print(f"loads {stack.loads}, layer-major {major.loads}")
        print(f"stores {stack.stores}, layer-major {major.stores}")


# %%
# The proof, for every tensor: layer-major gives the bits of the sums on the host; one and two ranks
# give the bits of the resident run over everybody's microbatches. From three ranks on, gloo may add
# the ranks in another order. Two orders of a sum of *n* terms differ by at most about
# :math:`(n-1)\,\varepsilon` times the sum of magnitudes, so that is what is asserted; and all ranks
# hold the same bits.


def prove(stack: HostSums, major: LayerMajorSums, by_rank: list[list[dict]]) -> None:
    """Compare the sums of both stacks with resident ones, ``by_rank[rank][layer][name]``."""
    ranks = len(by_rank)
    for layer, (mean, of_major) in enumerate(zip(stack.finish(), major.finish(), strict=True)):
        for name, value in mean.items():
            assert torch.equal(of_major[name], value), f"layer {layer}, {name}"

            terms = torch.stack([sums[layer][name] for sums in by_rank])
            expected = terms.sum(0) / ranks
            bound = torch.finfo(SUM_DTYPE).eps * terms.abs().sum(0)
            assert ((value - expected).abs() <= bound).all(), f"layer {layer}, {name}"
            assert torch.equal(value, expected) or ranks > 2, f"layer {layer}, {name}"

            copies = [torch.empty_like(value) for _ in range(ranks)]
            dist.all_gather(copies, value, group=stack.group)
            assert all(torch.equal(copy, value) for copy in copies), f"layer {layer}, {name}"


def main() -> None:
    device = streaming.start_rank()
    try:
        train(device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

# %%
# What it buys
# ------------
# The link is the wall where a layer's load takes longer than its compute. Layer-major microbatches
# divide the loads for each token by their number *M*: ``streamed_4_microbatches`` takes its tokens
# in four, so that the activations of a layer take the memory that they take in ``streamed`` at a
# quarter of the tokens. Compare it with four steps of that, not with ``streamed`` at the same
# tokens: one batch of them all is faster, and here, where gradients in fp32 outweigh activations,
# smaller as well (what the columns say: :doc:`weight_streaming`).
#
# .. result-figure:: offload_step
#    :rows: resident streamed streamed_4_microbatches
#    :field: step_s
#
# .. result-table:: offload_step
#    :rows: streamed streamed_4_microbatches
#
# In bytes over the link for each parameter and step, with weights of 2 bytes:
#
# * microbatch-major: :math:`4 M` of loads (forward and backward; a little less, since the slots are
#   kept over the turn-around) and :math:`2 M` of stores;
# * layer-major: :math:`4` of loads and :math:`4` of stores, whatever *M* is; the sum is in fp32.
#
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built. Copies on the CPU are over before the worker
# looks, so the sums come out right even without the waits; a recorder of stream order finds what
# nothing orders. On a CUDA device the same edits add what the microbatch before left behind.
#
# .. recipe-controls::
#
# Memory
# ------
# Host memory for :math:`P` parameters, beside what the optimizer needs: bf16 weights, bf16
# gradients as they arrive, and the sums,
#
# .. math::
#
#    2P + 2P + 4P = 8\,P \text{ bytes.}
#
# Layer-major gradients arrive in fp32, which makes the second term :math:`4 P`. Only the first two
# are page-locked. On the device, layer-major keeps the inputs of all layers for all microbatches:
# the same as for one batch of all their tokens.
#
# The host's own memory traffic is 6 bytes for each parameter of the first microbatch and 10 for
# each other one, and about 10 more for the mean over ranks. Where that takes longer than the
# backward of a layer, training waits for the host.
#
# When it is not worth it
# -----------------------
# * A batch that fits at once is the simplest layer-major there is: one microbatch, no sum.
# * Steps long enough to hide the loads gain nothing from layer-major. To the right of both ridges
#   of the figure microbatch-major costs no time, and layer-major still costs device memory.
# * Over a network, gloo moves the gradients through the CPU. Ranks of one host do so at the speed
#   of its memory; for many hosts, average on the devices before the store.
#
# Known limits
# ------------
# * All ranks need the same number of backward passes a step: a rank with fewer leaves the others
#   waiting in ``all_reduce`` until gloo's timeout.
# * Backward passes are counted, not announced. Call ``finish`` after a multiple of ``backwards``:
#   earlier, the sums are one rank's own, and the next backward adds to them.
# * A backward that raised half-way has added some layers and not others, on this rank: every later
#   backward and ``finish`` refuses. Build a new stack. A loss function or a forward that raised has
#   added nothing to the sums; the microbatch can be repeated. With layer-major, modules in the loss
#   function have by then the gradients of the microbatches before.
# * Layer-major draws the random numbers of dropout in another order than microbatch-major: as good,
#   but other bits.
# * A gradient that is not finite is added like any other: :doc:`pipelined_optimizer` looks for it.
#
# Further reading
# ---------------
# * `DistributedDataParallel
#   <https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html>`__:
#   the convention for means over ranks, and ``no_sync`` for accumulation
# * `Gradient accumulation <https://docs.pytorch.org/docs/stable/notes/amp_examples.html>`__ in the
#   notes on mixed precision
# * `Refilling the source of a copy still in flight
#   <https://github.com/huggingface/diffusers/issues/14657>`__: what the waits prevent
