# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, offload/activation_offload.py
"""
Longer sequences: activations on the host between forward and backward
======================================================================

Train on longer sequences: what autograd saves for backward grows with the length, and can wait in
host memory. This file copies those *activations* there while forward goes on, and back while
backward goes on. The device then holds a window of them, not all. Gradients keep every bit.

**When not to bother:** the step fits the device; or ``torch.utils.checkpoint`` frees enough. For
narrow models and short sequences recomputation is cheaper: see the end of this page.

**Scope.** Forward and backward on one stream of one device, and what autograd saves there as plain
tensors of a megabyte and more. Everything else stays on the device, and frees no memory:
parameters, small tensors, subclasses, sparse and nested tensors. What would give wrong gradients
raises: a saved tensor that is changed in place or freed while it is copied, another stream, a
device that is not the current one.

.. result-gain:: activation_offload
   :rows: checkpoint_activation_offload checkpoint checkpoint_save_on_cpu
   :field: peak_allocated_bytes
   :where: model=llama-8b-blocks tokens=65536

   It frees memory, and makes no step faster: *What it buys*.

The loop; ``activations`` is a ``HostActivations(device, window)``. The window, in bytes of device
memory, is what two layers save:

.. literalinclude:: activation_offload.py
   :pyobject: train

The file needs torch alone. Copy it down to ``HostActivations``.

.. grid:: 1 1 2 2

   .. grid-item-card:: What you learn

      * ``saved_tensors_hooks`` with a stream for each direction and a bound on device memory
      * how to free a tensor whose copy is in flight, without ``record_stream`` and without a wait
        of the host
      * what is not worth a copy, and what must not be copied

   .. grid-item-card:: What you need

      * PyTorch 2.9 or later, any number of ranks; each works on its own device
      * host memory for the activations of one step

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
"""

# %%
# Imports and sizes
# -----------------

import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

SMALLEST = 1 << 20  # bytes; a smaller tensor costs more to launch than its copy frees

# %%
# The unit is a storage
# ---------------------
# Autograd saves tensors, but memory belongs to *storages*: three views of one projection are three
# saved tensors and one storage. So storages are copied, as plain bytes, and not again while a copy
# is under way. A handle remembers its view, strides included, so that backward runs the same
# kernels as without hooks.
#
# Without hooks, autograd raises where backward reads a saved tensor that was changed in place: it
# compares ``_version``, which counts changes. With hooks it cannot, so ``unpack`` does.


class Saved:
    """A storage that autograd needs: on the device, on the host, on the device again."""

    def __init__(self, source: torch.Tensor, number: int, streams) -> None:
        nbytes = source.untyped_storage().nbytes()
        self.source: torch.Tensor | None = source  # until its copy to the host is complete
        self.version = source._version
        self.changed = False  # while it was copied
        self.host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=source.device.type == "cuda")
        self.back: torch.Tensor | None = None  # its bytes, on the device again
        self.number = number  # in the order of forward
        self.stored = streams.Event()
        self.loaded = streams.Event()

    def changes(self) -> bool:
        """Whether the source was replaced or freed after its copy was queued."""
        nbytes = self.source.untyped_storage().nbytes()
        return self.source._version != self.version or nbytes != self.host.nbytes


@dataclass
class Moved:
    """What autograd keeps in place of a tensor in a ``Saved``."""

    saved: Saved
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


@dataclass
class Stays:
    """What autograd keeps in place of a tensor that stays on the device."""

    tensor: torch.Tensor
    version: int


def view_of(memory: torch.UntypedStorage, dtype: torch.dtype, *layout) -> torch.Tensor:
    """A tensor in ``memory``; ``layout`` is offset, size and stride, or nothing for all of it."""
    return torch.empty(0, dtype=dtype, device=memory.device).set_(memory, *layout)


def bytes_of(storages: Iterable[Saved]) -> int:
    return sum(saved.host.nbytes for saved in storages)


def stays(tensor: torch.Tensor, base: torch.Tensor, device: torch.device) -> bool:
    """Whether a saved tensor, a view of ``base``, is not worth a copy, or is more than its bytes."""
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
        return True
    if tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return True
    if tensor.device != device or isinstance(base, nn.Parameter):
        return True  # every Linear saves a transposed view of its weight
    nbytes = tensor.untyped_storage().nbytes()
    return nbytes < SMALLEST or nbytes != base.nbytes  # or it is a part with a version of its own


# %%
# The hooks
# ---------
# Five edges order the copies; *compute* is the stream that forward and backward run on:
#
# 1. **To the host, after compute**: the copy waits until the tensor is written.
# 2. ``stored``: before the last reference to a source is dropped, **compute** waits until it has
#    been copied; whatever is allocated in its memory next is written after the copy. This happens
#    as soon as more than ``window`` bytes are on their way.
# 3. **Back, after compute**: memory for a storage that comes back is allocated on compute, so the
#    copy waits for what compute was still doing with it. By edge 2, this is after the copy to the
#    host as well.
# 4. ``loaded``: compute waits for the copy back, right before it reads.
# 5. If a part of the graph gets no backward, nobody reads its copy back. That memory is freed at
#    the next forward, or with the object, after compute has waited for the copy.
#
# The host waits for nothing. Edge 2 makes the *device* wait where the link is slower than forward:
# this is what keeps its memory bounded.


class HostActivations:
    """Keep in host memory what autograd saves.

    ``moved`` counts the bytes that went to the host, ``peak`` the most that were on their way.

    Args:
        device: where the activations are; it must be the current device.
        window: bytes on the device that are on their way to the host, and as many on their way
            back. A single larger storage is let through alone.

    Raises:
        ValueError: a window of no bytes, a device that is not the current one.
        RuntimeError: in ``saving`` or backward, where gradients would be wrong.
    """

    def __init__(self, device: torch.device, window: int) -> None:
        self.leaving: dict[int, Saved] = {}  # by address, the oldest first
        self.arriving: set[Saved] = set()
        self.in_order: list[weakref.ref[Saved]] = []  # the graph holds what it needs
        self.moved = 0
        self.peak = 0
        if window <= 0:
            raise ValueError(f"window {window}: pass bytes, 1 or more")
        self.device = torch.empty(0, device=device).device  # "cuda" is "cuda:0", say
        if self.device != torch.empty(0, device=self.device.type).device:
            raise ValueError(f"make {device} current first: torch.accelerator.set_device_index")
        self.window = window
        self.streams = torch.get_device_module(device)
        self.compute = self.streams.current_stream()
        self.h2d = self.streams.Stream()
        self.d2h = self.streams.Stream()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around a forward: what autograd saves in it goes to the host."""
        self.compute = self.streams.current_stream()
        self.release(0)
        self.give_up_unread()
        if all(reference() is None for reference in self.in_order):
            self.in_order.clear()
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            yield

    def pack(self, tensor: torch.Tensor) -> Moved | Stays:
        base = tensor if tensor._base is None else tensor._base  # views share its version
        tensor = tensor.detach()  # what a hook keeps must not refer to the graph
        if stays(tensor, base, self.device):
            return Stays(tensor, tensor._version)
        self.check_stream()
        saved = self.leaving.get(tensor.untyped_storage().data_ptr())
        if saved is None or saved.changes():
            saved = self.store(tensor)
        layout = tensor.storage_offset(), tensor.size(), tensor.stride()
        return Moved(saved, tensor.dtype, *layout)

    def unpack(self, kept: Moved | Stays) -> torch.Tensor:
        """The tensor that was packed; what backward needs next is on its way then."""
        if isinstance(kept, Stays):
            if kept.tensor._version != kept.version:
                raise RuntimeError(f"changed in place: {tuple(kept.tensor.shape)}, clone it")
            return kept.tensor
        self.check_stream()
        saved = kept.saved
        if saved.changed or (saved.source is not None and saved.changes()):
            raise RuntimeError(f"changed or freed while copied: {tuple(kept.size)}, clone it")
        memory = saved.source
        if memory is None:
            self.release(0)
            memory = self.loaded(saved)
        self.prefetch(saved.number)
        storage = memory.untyped_storage()
        return view_of(storage, kept.dtype, kept.offset, kept.size, kept.stride)

    def check_stream(self) -> None:
        if self.streams.current_stream() != self.compute:
            raise RuntimeError("forward and backward must run on the stream of saving()")

    # To the host

    def store(self, source: torch.Tensor) -> Saved:
        """Queue the copy of a storage to the host."""
        memory = source.untyped_storage()
        self.release(self.window - memory.nbytes())
        saved = Saved(source, len(self.in_order), self.streams)
        written = self.compute.record_event()
        with self.streams.stream(self.d2h):
            self.d2h.wait_event(written)
            saved.host.copy_(view_of(memory, torch.uint8), non_blocking=True)
            saved.stored.record(self.d2h)
        self.in_order.append(weakref.ref(saved))
        self.leaving[memory.data_ptr()] = saved
        self.moved += memory.nbytes()
        self.note_peak()
        return saved

    def release(self, most: int) -> None:
        """Drop the oldest sources until at most ``most`` bytes are on their way to the host."""
        while self.leaving and bytes_of(self.leaving.values()) > most:
            oldest = next(iter(self.leaving))
            saved = self.leaving.pop(oldest)
            self.compute.wait_event(saved.stored)
            saved.changed = saved.changes()
            saved.source = None

    # Back to the device

    def load(self, saved: Saved) -> None:
        """Queue the copy of a storage back to the device."""
        saved.back = torch.empty_like(saved.host, device=self.device)
        free = self.compute.record_event()
        with self.streams.stream(self.h2d):
            self.h2d.wait_event(free)
            saved.back.copy_(saved.host, non_blocking=True)
            saved.loaded.record(self.h2d)
        self.arriving.add(saved)
        self.note_peak()

    def loaded(self, saved: Saved) -> torch.Tensor:
        """A storage's bytes on the device, after their copy."""
        if saved.back is None:
            self.load(saved)
        self.compute.wait_event(saved.loaded)
        self.arriving.discard(saved)
        return saved.back

    def prefetch(self, number: int) -> None:
        """Load what was saved before ``number``, last first, as far as the window allows."""
        for reference in reversed(self.in_order[:number]):
            saved = reference()
            if saved is None or saved.source is not None or saved.back is not None:
                continue
            coming = bytes_of(other for other in self.arriving if other.number < number)
            if coming and coming + saved.host.nbytes > self.window:
                return
            self.load(saved)

    def give_up_unread(self) -> None:
        for saved in self.arriving:
            self.compute.wait_event(saved.loaded)
            saved.back = None
        self.arriving.clear()

    def __del__(self) -> None:
        """No copy may outlive the memory that goes with this object.

        It calls no function of this file: at the end of a program Python may have cleared these.
        """
        for saved in self.leaving.values():
            self.compute.wait_event(saved.stored)
        for saved in self.arriving:
            self.compute.wait_event(saved.loaded)

    def note_peak(self) -> None:
        on_their_way = bytes_of(self.leaving.values()) + bytes_of(self.arriving)
        self.peak = max(self.peak, on_their_way)


# %%
# Run it, and prove it
# --------------------
# Every gradient must have the bits of the run that keeps everything on the device. ``logged`` is a
# metric on which nobody calls backward: what was loaded for it is never read. On a GPU the
# allocator says how much less is held between forward and backward.

WIDTH, HEADS, TOKENS, BATCH = 512, 8, 64, 8
LAYERS, STEPS = 3, 3
WINDOW = 4 << 20  # bytes


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[torch.Tensor],
    activations: HostActivations,
) -> None:
    for batch in batches:
        with activations.saving():
            loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def build(device: torch.device) -> nn.Module:
    """Layers of two kinds, one with attention and dropout."""
    layers = [nn.Linear(WIDTH, WIDTH)]
    for _ in range(LAYERS):
        layers.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)))
    layers.append(nn.TransformerEncoderLayer(WIDTH, HEADS, WIDTH, batch_first=True))
    return nn.Sequential(*layers).to(device)


def allocated(device: torch.device) -> int:
    """Bytes that are in use on a GPU."""
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def gradients_of(model: nn.Module, batch: torch.Tensor, saving) -> tuple[list, int]:
    """All gradients and a figure, and the bytes that are held for backward, on a GPU."""
    torch.manual_seed(0)  # dropout
    before = allocated(batch.device)
    with saving:
        logged = batch.exp().mean()
        loss = model(batch).square().mean()
    held = allocated(batch.device) - before
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return [*gradients, logged.detach()], held


def assert_right(model: nn.Module, batch: torch.Tensor, device: torch.device) -> None:
    gradients_of(model, batch, nullcontext())  # the first call allocates what libraries work with
    expected, held_before = gradients_of(model, batch, nullcontext())
    activations = HostActivations(device, WINDOW)
    for _ in range(STEPS):
        found, held = gradients_of(model, batch, activations.saving())
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(mine, theirs), "other gradients"
    moved = activations.moved // STEPS
    assert moved > 2 * WINDOW and activations.peak <= 2 * WINDOW, f"{activations.peak} at a time"
    if device.type == "cuda":
        assert held_before - held > moved // 2, f"{held} bytes held, {held_before} before"
    print(f"{moved} bytes moved a step, {activations.peak} at a time: same bits")


def assert_refused(device: torch.device) -> None:
    x = torch.ones(8, device=device, requires_grad=True)  # it stays on the device
    with HostActivations(device, WINDOW).saving():
        y = x * 2
        loss = y.square().sum()
        with torch.no_grad():
            y.zero_()
    try:
        loss.backward()
    except RuntimeError as error:
        print("refused:", error)
    else:
        raise AssertionError("gradients of a tensor that was changed in place")


def main() -> None:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    torch.manual_seed(int(os.environ.get("RANK", "0")))
    model = build(device)
    batch = torch.randn(BATCH, TOKENS, WIDTH, device=device, requires_grad=True)
    assert_right(model, batch, device)

    before = model[0].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, [batch.detach()], HostActivations(device, WINDOW))
    assert not torch.equal(model[0].weight, before), "nothing was trained"
    assert_refused(device)


if __name__ == "__main__":
    main()

# %%
# In your training
# ----------------
# The library's class is this one, made for long runs: a pool of host memory of exactly the size that
# you choose, which is page-locked once; what exceeds it stays on the device. It recognises casts of
# weights under autocast, and keeps what you name on the device.
#
# .. code-block:: python
#
#    from overlap_recipes.offload import ActivationOffload
#
#    offload = ActivationOffload(device, budget, window)  # bytes of host memory, of device memory
#    for batch in batches:
#        with offload.saving():
#            loss = loss_of(model(batch))
#        loss.backward()
#        optimizer.step()
#        optimizer.zero_grad()
#    offload.close()
#
# What it buys
# ------------
# Forward and backward of the layers named below the table, with the library's class. Under
# ``checkpoint`` each layer runs again in backward; ``selective`` also keeps what attention
# returned. The rest of a row's name says what moves the layers' inputs to the host. No row makes a
# step faster. If only those inputs move, ``checkpoint_unsloth`` does as well or better: this class
# moves whatever autograd saves.
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
# On the device, of what autograd saves, besides what backward is just reading:
#
# .. math::
#
#    2 \cdot \text{window} + \text{what stays}
#
# On the host, all that moves. PyTorch keeps page-locked memory for the next step, in blocks of a power
# of two; the first step locks it, and is slow.
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
# Below that the link sets the pace, and below half of it (:math:`8\,F/B`) recomputation
# (``torch.utils.checkpoint``) is cheaper. Put this class around a checkpointed model, and only the
# layers' inputs move: :math:`2\,d` bytes per token. That frees memory where the inputs outweigh the
# gradients: from :math:`12\,d` tokens on.
#
# Known limits
# ------------
# * ``fully_shard`` frees gathered weights without a wait for a copy that may still read them.
#   Parameters and views of them are never copied, but ``weight.detach()`` may be: it counts as
#   neither.
# * Under autocast the casts of weights are copied, too.
# * A storage is copied as a whole, even if a small view of a large one was saved, and again if it is
#   saved again after it has left.
# * A part of a graph that gets no backward is copied back as well if more was saved after it, and
#   stays on the device until the next forward.
# * ``retain_graph=True`` keeps on the device all that came back.
# * Forward without backward: use ``torch.no_grad()``, which saves nothing.
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
