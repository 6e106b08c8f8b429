# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.1.0, offload/activation_offload.py
"""
Longer sequences: activations on the host between forward and backward
======================================================================

Train on longer sequences: what autograd saves for backward grows with the length, and can wait in
host memory. This recipe copies those *activations* there while forward goes on, and back while
backward goes on. The device then holds a window of them, not all.

**When not to bother:** the step fits the device; or ``torch.utils.checkpoint`` frees enough. Below
a length that grows with the model's width, recomputation is cheaper: see the end of this page.

.. code-block:: python

   from activation_offload import ActivationOffload  # host_layers.py beside it

   offload = ActivationOffload(device, budget, window)
   for batch in batches:
       with offload.saving():
           loss = loss_of(model(batch))
       loss.backward()
       optimizer.step()
       optimizer.zero_grad()
   offload.close()

Budget (of host memory) and window (of device memory) are in bytes. A window of what two layers save
is enough. After a forward with a budget of 0, ``offload.wanted`` says how much a budget can use.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * ``saved_tensors_hooks`` with a stream for each direction and a bound on device memory
      * to free a tensor whose copy is in flight, with no ``record_stream`` and no wait of the host
      * what is not worth a copy, and how to tell it

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks; each works on its own device
      * host memory for the activations of one step
      * this file and, for its proof, ``host_layers.py``; for its pinned buffer the package
        ``overlap_recipes``: ``pip install .`` in this repository, or a copy of its folder
        ``overlap_recipes``

.. verification-badge::

The idea
--------

Autograd can keep something else in place of a tensor: a *pack hook* turns each saved tensor into a
handle, and an *unpack hook* gives a tensor back when backward asks for it. Packing starts a copy to
the host and unpacking waits for the copy back, which was started some time before:

.. lanes:: Schematic. What layer 3 saved is still on the device when backward begins.

   compute:  0-4 forward 1; 4-8 forward 2; 8-12 forward 3; 12-18 backward 3; 18-24 backward 2; 24-30 backward 1
   D2H:      4-7 saved by 1 ~; 8-11 saved by 2 ~; 12-15 saved by 3 ~
   H2D:      12-15 for 2 ~; 18-21 for 1 ~
   @12 turn-around

Forward fills the pool from its start, so a budget that is too small leaves on the device what was
saved *last*. That is what backward wants first: it should stay anyway.
"""

# %%
# Imports and sizes
# -----------------
# The page-locked buffer of exact size is the one of :doc:`host_layers`; the layers and the loss of
# the proof are its toys.

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext

import host_layers as toys
import torch
import torch.distributed as dist
from torch import nn

from overlap_recipes.offload.host_layers import HostBuffer
from overlap_recipes.ranks import start_rank

SMALLEST = 1 << 20  # bytes; a smaller tensor costs more to launch than its copy frees

LAYERS, HEADS = 4, 4
TOY = {"window": 24 << 10, "smallest": 512}  # bytes, for the small layers of this page

# %%
# The unit is a storage
# ---------------------
# Autograd saves tensors, memory is held by *storages*: three views of one projection are three
# saved tensors and one storage. So storages are copied, as plain bytes, each **once**. A handle
# remembers its view, strides included, so that backward runs the kernels that it would have run. A
# storage is known here until autograd has run, or dropped, every node that saved it.


class Storage:
    """A storage that autograd needs: on the device, in the pool, on the device again."""

    def __init__(self, source: torch.Tensor, host: torch.Tensor, index: int, streams) -> None:
        self.source: torch.Tensor | None = source  # until its copy to the host is complete
        # The version that is copied, that of a released source, bytes in the pool, number in forward:
        self.version, self.latest, self.host, self.index = source._version, None, host, index
        self.back: torch.Tensor | None = None  # its bytes on the device again
        self.stored, self.loaded = streams.Event(), streams.Event()


def unchanged(tensor: torch.Tensor, saved: int, latest: int) -> torch.Tensor:
    """The tensor, or a RuntimeError: autograd compares versions itself only without hooks."""
    if latest != saved:
        raise RuntimeError(f"changed in place after autograd saved it: {tensor.shape}, clone it")
    return tensor


def cast_of(tensor: torch.Tensor) -> torch.Tensor:
    """The leaf of which a tensor is a cast, as autocast makes them of weights; else the tensor."""
    node = tensor.grad_fn
    cast = node is not None and node.name() == "ToCopyBackward0"
    return getattr(node.next_functions[0][0], "variable", tensor) if cast else tensor


def view_of(memory: torch.UntypedStorage, dtype: torch.dtype, *layout) -> torch.Tensor:
    """A tensor in ``memory``; ``layout`` is offset, size and stride, or nothing for all of it."""
    return torch.empty(0, dtype=dtype, device=memory.device).set_(memory, *layout)


def total(storages: Iterable[Storage]) -> int:
    return sum(storage.host.nbytes for storage in storages)


# %%
# The hooks
# ---------
# ``pack`` leaves alone what is not worth a copy or must not be copied: small tensors, tensors
# elsewhere, and what bytes and strides do not describe; parameters and their casts, which autocast
# keeps (every ``Linear`` saves a transposed *view* of its weight, which is recognised by its base);
# and parts of a storage that are no views of the whole, such as ``unsafe_chunk`` makes.
#
# Without hooks, autograd raises where backward reads a saved tensor that was changed in place. With
# hooks it cannot tell, so ``unchanged`` compares versions there.
#
# Five edges order the copies; *compute* is the stream that forward and backward run on:
#
# 1. ``ready``: the copy to the host waits until compute has written the tensor.
# 2. ``stored``: before the last reference to a source is dropped, **compute** waits until it has
#    been copied; whatever is allocated in its memory next is written behind the copy. The program
#    chooses when: as soon as more than ``window`` bytes are on their way.
# 3. ``free``: memory for a storage that comes back is allocated on compute, so the copy waits for
#    what compute was still doing with it. By edge 2, this is behind the copy to the host as well.
# 4. ``loaded``: compute waits for the copy back, right before it reads.
# 5. Before the pool is used again, compute waits for copies back that nobody has read: those of a
#    part of the graph that had no backward.
#
# The host waits for nothing. Edge 2 makes the *device* wait where the link is slower than forward:
# this is what keeps its memory bounded.


class ActivationOffload:
    """Keep in host memory what autograd saves, up to a budget.

    Args:
        device: where the activations are; it must be the current device.
        budget: bytes of host memory, page-locked here and now. What exceeds it stays on the device.
        window: bytes on the device that are on their way to the host, and as many on their way
            back. A single larger storage is let through alone. What two layers save is enough.
        stay: what else stays on the device, such as a batch that you keep; parameters do anyway.
        smallest: bytes; a smaller storage stays.
        lanes: the streams for copies to the device and to the host; two new ones if None.

    In bytes: ``used`` is what the pool holds after the latest forward, ``wanted`` what one without
    a limit would hold, ``peak`` the most that has been on its way, both ways together.

    Raises:
        ValueError: a negative budget, a window of no bytes, a device that is not the current one.
        RuntimeError: the host cannot lock as much memory; in backward, a saved tensor was changed
            in place while the device held it.
    """

    def __init__(self, device, budget: int, window: int, stay=(), smallest=SMALLEST, lanes=None):
        if budget < 0 or window <= 0:
            raise ValueError(f"budget {budget}, window {window}: pass bytes, 0 or more, 1 or more")
        self.device = torch.empty(0, device=device).device  # "cuda" is "cuda:0", say
        if self.device != torch.empty(0, device=self.device.type).device:
            first = "call torch.accelerator.set_device_index(i) first"
            raise ValueError(f"{device} is not the current device: {first}")
        self.budget, self.window, self.smallest, self.stay = budget, window, smallest, list(stay)
        self.streams = torch.get_device_module(device)
        self.h2d, self.d2h = lanes or (self.streams.Stream(), self.streams.Stream())
        pool = torch.empty(budget, dtype=torch.uint8, device="meta")
        self.pool = HostBuffer({"pool": pool}, torch.uint8, self.device)
        self.used = self.wanted = self.peak = 0
        self.known = weakref.WeakKeyDictionary()  # storage in memory -> reference to its Storage
        self.in_order: list[weakref.ref[Storage]] = []
        self.leaving, self.arriving = deque[Storage](), set[Storage]()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around a forward: what autograd saves in it goes to the host."""
        self.release(0)
        self.streams.current_stream().wait_stream(self.h2d)
        while self.arriving:
            self.arriving.pop().back = None
        if not any(storage() for storage in self.in_order):  # no graph needs the pool
            self.in_order, self.used, self.known = [], 0, weakref.WeakKeyDictionary()
        self.wanted = self.used
        self.staying = {tensor.untyped_storage().data_ptr() for tensor in self.stay}
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            yield

    def pack(self, tensor: torch.Tensor) -> tuple:
        """Queue the copy of the storage of ``tensor``, unless it is known or should stay."""
        base = tensor if tensor._base is None else tensor._base  # with it, views share a version
        tensor = tensor.detach()  # what a hook keeps must not refer to the graph
        special = tensor.is_conj() or tensor.is_neg() or tensor.is_nested or tensor.is_quantized
        plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided and not special
        memory = tensor.untyped_storage() if plain and tensor.device == self.device else None
        whole = memory and self.smallest <= memory.nbytes() == base.nbytes
        if (
            not whole
            or isinstance(cast_of(base), nn.Parameter)
            or memory.data_ptr() in self.staying
        ):
            return tensor, tensor._version
        storage = self.known[memory]() if memory in self.known else None
        if storage is None or storage.version != tensor._version:
            storage = self.store(tensor)
        view = tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()
        return (storage, *view) if storage else (tensor, tensor._version)

    def unpack(self, packed: tuple) -> torch.Tensor:
        """The tensor that was packed; what backward needs next is on its way then."""
        if isinstance(packed[0], torch.Tensor):
            return unchanged(*packed, latest=packed[0]._version)
        storage, dtype, *layout = packed
        left = storage.source is None
        if left:
            self.release(0)
            if storage.back is None:
                self.load(storage)
            self.streams.current_stream().wait_event(storage.loaded)
            self.arriving.discard(storage)
        self.prefetch(storage.index)
        memory = storage.back if left else storage.source
        latest = storage.latest if left else storage.source._version
        return unchanged(view_of(memory.untyped_storage(), dtype, *layout), storage.version, latest)

    # To the host

    def store(self, source: torch.Tensor) -> Storage | None:
        """Queue the copy of a storage to the host; None if the budget does not hold it."""
        memory = source.untyped_storage()
        self.wanted += 0 if memory in self.known else memory.nbytes()
        self.known[memory] = lambda: None
        if self.used + memory.nbytes() > self.budget:
            return None
        host = self.pool.flat[self.used : self.used + memory.nbytes()]
        self.used += host.nbytes
        self.release(self.window - host.nbytes)
        storage = Storage(source, host, len(self.in_order), self.streams)
        ready = self.streams.current_stream().record_event()
        with self.streams.stream(self.d2h):
            self.d2h.wait_event(ready)
            host.copy_(view_of(memory, torch.uint8), non_blocking=True)
            storage.stored.record(self.d2h)
        self.known[memory] = weakref.ref(storage)
        self.in_order.append(self.known[memory])
        self.leaving.append(storage)
        self.peak = max(self.peak, total(self.leaving) + total(self.arriving))
        return storage

    def release(self, most: int) -> None:
        """Drop the oldest sources until at most ``most`` bytes are on their way to the host."""
        while self.leaving and total(self.leaving) > most:
            storage = self.leaving.popleft()
            self.streams.current_stream().wait_event(storage.stored)
            storage.latest, storage.source = storage.source._version, None

    # Back to the device

    def load(self, storage: Storage) -> None:
        """Queue the copy of a storage back to the device."""
        storage.back = torch.empty_like(storage.host, device=self.device)
        free = self.streams.current_stream().record_event()
        with self.streams.stream(self.h2d):
            self.h2d.wait_event(free)
            storage.back.copy_(storage.host, non_blocking=True)
            storage.loaded.record(self.h2d)
        self.arriving.add(storage)
        self.peak = max(self.peak, total(self.leaving) + total(self.arriving))

    def prefetch(self, index: int) -> None:
        """Load what was saved before number ``index``, last first, as far as the window allows."""
        for storage in (reference() for reference in reversed(self.in_order[:index])):
            if storage and storage.source is None and storage.back is None:
                coming = total(other for other in self.arriving if other.index < index)
                if coming and coming + storage.host.nbytes > self.window:
                    break
                self.load(storage)

    def close(self) -> None:
        """Wait for the device and unlock the pool."""
        self.streams.synchronize()
        self.pool.close()


# %%
# Run it, and prove it
# --------------------
# Every gradient must have the bits of the run that keeps everything on the device: with a pool of
# exactly the size that is needed, and with half of it. ``logged`` is a figure whose graph nobody
# runs backward, as happens with metrics: what was loaded for it is never read.


def build_layers() -> Iterator[nn.Module]:
    """Layers of three kinds, one with attention and dropout."""
    yield nn.Linear(toys.WIDTH, toys.WIDTH)
    yield from (toys.Block() for _ in range(LAYERS))
    yield nn.TransformerEncoderLayer(toys.WIDTH, HEADS, 4 * toys.WIDTH, batch_first=True)


def gradients_of(model: nn.Module, batch: torch.Tensor, saving) -> tuple:
    torch.manual_seed(0)  # dropout
    with saving:
        logged = batch.exp().mean()
        loss = toys.loss_of(model(batch))
    return *torch.autograd.grad(loss, list(model.parameters())), logged.detach()


def same_bits(ours: Iterable[torch.Tensor], theirs: Iterable[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def prove(device: torch.device, model: nn.Module, batch: torch.Tensor) -> None:
    expected = gradients_of(model, batch, nullcontext())
    with closing(ActivationOffload(device, 0, stay=[batch], **TOY)) as trial:
        assert same_bits(gradients_of(model, batch, trial.saving()), expected)
    for budget in (trial.wanted, trial.wanted // 2):
        with closing(ActivationOffload(device, budget, stay=[batch], **TOY)) as offload:
            for _ in range(toys.STEPS):
                assert same_bits(gradients_of(model, batch, offload.saving()), expected)
        assert budget / 2 < offload.used <= budget and offload.peak <= 2 * TOY["window"]
        print(f"{offload.used} of {trial.wanted} bytes moved, {offload.peak} at a time: same bits")


def main() -> None:
    device = start_rank()
    try:
        torch.manual_seed(0)
        model = nn.Sequential(*build_layers()).to(device)
        batch = torch.randn(2, toys.TOKENS, toys.WIDTH, device=device, requires_grad=True)
        prove(device, model, batch)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

# %%
# What it buys
# ------------
# Forward and backward of the layers named below the table. Under ``checkpoint`` each layer runs
# again in backward; ``selective`` also keeps what attention returned. The name behind them says
# what moves the layers' inputs to the host. This recipe costs a few percent of a step there, as
# Unsloth's design does; TRL's class and ``save_on_cpu`` cost several times as much. None makes a
# step faster. In memory the gain is small at these lengths (*Peak allocated*), and the other three
# free a little more.
#
# .. result-table:: activation_offload
#
# What breaks if you remove a line
# --------------------------------
# Each edit was made and run when this page was built. CPU streams do nothing, so the bits come out
# right even without the events; a recorder of stream order finds what no event orders.
#
# .. recipe-controls::
#
# Memory
# ------
# On the host, the budget, page-locked. On the device, of what autograd saves, beside what backward
# is just reading and what it has passed without reading it:
#
# .. math::
#
#    \max(0,\; \text{saved} - \text{budget}) + 2 \cdot \text{window} + \text{what is never copied}
#
# When it is not worth it
# -----------------------
# A transformer layer of width :math:`d`, with an MLP of :math:`4\,d`, computes :math:`24\,d^2`
# operations per token in forward, and causal attention over :math:`T` tokens :math:`2\,T d` more.
# In two-byte numbers, without dropout, it saves about :math:`32\,d` bytes per token. On a device of
# :math:`F` operations per second and a link of :math:`B` bytes per second, forward hides its copies
# where
#
# .. math::
#
#    12\,d + T \;\ge\; 16\,\frac{F}{B}
#
# * Below that the link sets the pace, and recomputation (``torch.utils.checkpoint``) is cheaper.
#   Put this class around a checkpointed model, and only the layers' inputs move: :math:`2\,d` bytes
#   per token. That frees memory where the inputs outweigh the gradients: from :math:`12\,d` tokens
#   on.
# * Forward without backward: use ``torch.no_grad()``, which saves nothing.
#
# Known limits
# ------------
# * Forward and backward must run on one stream.
# * What bytes and strides do not describe stays on the device: tensor subclasses, sparse, nested
#   and quantized tensors, lazily conjugated or negated views (``x.conj()``).
# * ``fully_shard`` frees gathered weights without a wait for a copy that may still read them. None
#   is copied if it is saved as a parameter or a view of one; ``weight.detach()`` is neither.
# * Under autocast the cast of a weight that is not trained is copied: no graph tells whose it is.
# * A storage is copied as a whole, even if a small view of a large one was saved.
# * A batch that you keep is copied like everything else: add it to ``stay``.
# * A part of a graph that gets no backward is copied back as well if more was saved after it, and
#   stays on the device until the next forward.
# * The pool is used from its start again only when no graph needs it. A loss or a metric that is
#   kept without a backward (keep ``metric.detach()``) fills it step by step, until everything stays
#   on the device.
#
# Further reading
# ---------------
# * `Hooks for autograd saved tensors
#   <https://docs.pytorch.org/tutorials/intermediate/autograd_saved_tensors_hooks_tutorial.html>`__
# * `torch.autograd.graph.save_on_cpu
#   <https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.graph.save_on_cpu>`__
# * `torchtune's OffloadActivations
#   <https://docs.pytorch.org/torchtune/stable/generated/torchtune.training.OffloadActivations.html>`__,
#   which holds sources with events as well
# * `record_stream keeps memory longer than needed
#   <https://github.com/pytorch/pytorch/issues/147168>`__
# * :doc:`weight_streaming`
