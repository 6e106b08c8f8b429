# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/offload/activations.py
"""What autograd saves for backward, in host memory between forward and backward.

A pack hook turns each saved tensor into a handle and starts a copy to the host; an unpack hook
waits for the copy back, which was started some time before. The unit is a storage, not a tensor:
three views of one projection are one storage, and it is copied once. A handle remembers its view,
strides included, so that backward runs the kernels that it would have run.

Five edges order the copies; *compute* is the stream that forward and backward run on:

1. ``ready``: the copy to the host waits until compute has written the tensor.
2. ``stored``: before the last reference to a source is dropped, compute waits until it has been
   copied; whatever is allocated in its memory next is written after the copy. The program chooses
   when: as soon as more than ``window`` bytes are on their way.
3. ``free``: memory for a storage that comes back is allocated on compute, so the copy waits for
   what compute was still doing with it. By edge 2, this is after the copy to the host as well.
4. ``loaded``: compute waits for the copy back, right before it reads.
5. Before the pool is used again, compute waits for copies back that nobody has read: those of a
   part of the graph that had no backward.

The host waits for nothing. Forward fills the pool from its start, so a budget that is too small
leaves on the device what was saved last: that is what backward wants first.

``fully_shard`` frees gathered weights without a wait for a copy that may still read them. None is
copied if it is saved as a parameter or a view of one; ``weight.detach()`` is neither. Forward and
backward must run on one stream.
"""

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from .. import host_memory
from ..page_locked import PageLocked

__all__ = ["ActivationOffload"]

SMALLEST = 1 << 20  # bytes; a smaller tensor costs more to launch than its copy frees


class _Storage:
    """A storage that autograd needs: on the device, in the pool, on the device again."""

    def __init__(self, source: torch.Tensor, host: torch.Tensor, index: int, streams) -> None:
        self.source: torch.Tensor | None = source  # until its copy to the host is complete
        self.version = source._version  # that is copied
        self.latest: int | None = None  # of a released source
        self.host = host  # its bytes in the pool
        self.index = index  # in forward
        self.back: torch.Tensor | None = None  # its bytes on the device again
        self.stored = streams.Event()
        self.loaded = streams.Event()


def _unchanged(tensor: torch.Tensor, saved: int, latest: int) -> torch.Tensor:
    """The tensor, or a RuntimeError: autograd compares versions itself only without hooks."""
    if latest != saved:
        raise RuntimeError(f"changed in place after autograd saved it: {tensor.shape}, clone it")
    return tensor


def _cast_of(tensor: torch.Tensor) -> torch.Tensor:
    """The leaf of which a tensor is a cast, as autocast makes them of weights; else the tensor."""
    node = tensor.grad_fn
    cast = node is not None and node.name() == "ToCopyBackward0"
    return getattr(node.next_functions[0][0], "variable", tensor) if cast else tensor


def _view_of(memory: torch.UntypedStorage, dtype: torch.dtype, *layout) -> torch.Tensor:
    """A tensor in ``memory``; ``layout`` is offset, size and stride, or nothing for all of it."""
    return torch.empty(0, dtype=dtype, device=memory.device).set_(memory, *layout)


def _total(storages: Iterable[_Storage]) -> int:
    return sum(storage.host.nbytes for storage in storages)


class ActivationOffload:
    """Keep in host memory what autograd saves, up to a budget.

    Args:
        device: where the activations are; it must be the current device.
        budget: bytes of host memory, page-locked here and now. What exceeds it stays on the device.
        window: bytes on the device that are on their way to the host, and as many on their way
            back. A single larger storage is let through alone. What two layers save is enough.
        stay: what else stays on the device, such as a batch that you keep; parameters do anyway.
        unified_memory: offload though the device computes in the host's memory.

    In bytes: ``used`` is what the pool holds after the latest forward, ``wanted`` what one without
    a limit would hold, ``peak`` the most that has been on its way, both ways together.

    Raises:
        ValueError: a negative budget, a window of no bytes, a device that is not the current one.
        RuntimeError: the host has not, or cannot lock, as much memory, or the device shares it; in
            backward, a saved tensor was changed in place while the device held it.
    """

    def __init__(self, device, budget: int, window: int, stay=(), unified_memory=False):
        if budget < 0 or window <= 0:
            raise ValueError(f"budget {budget}, window {window}: pass bytes, 0 or more, 1 or more")
        self.device = torch.empty(0, device=device).device  # "cuda" is "cuda:0", say
        if self.device != torch.empty(0, device=self.device.type).device:
            first = "call torch.accelerator.set_device_index(i) first"
            raise ValueError(f"{device} is not the current device: {first}")
        if not unified_memory:
            host_memory.refuse_shared_with(self.device, "what autograd saves")
        self.budget = budget
        self.window = window
        self.stay = list(stay)
        self.streams = torch.get_device_module(device)
        self.h2d = self.streams.Stream()
        self.d2h = self.streams.Stream()
        try:
            self.pool = PageLocked(budget, self.device)
        except RuntimeError as error:
            raise RuntimeError(f"{error}, or pass a smaller budget") from error
        self.used = 0
        self.wanted = 0
        self.peak = 0
        self.known = weakref.WeakKeyDictionary()  # storage in memory -> reference to its Storage
        # Storage in memory -> (reference to the saved tensor that stays on the device, version)
        self.left_out = weakref.WeakKeyDictionary()
        self.in_order: list[weakref.ref[_Storage]] = []
        self.leaving = deque[_Storage]()
        self.arriving = set[_Storage]()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around a forward: what autograd saves in it goes to the host."""
        self.release(0)
        self.streams.current_stream().wait_stream(self.h2d)
        while self.arriving:
            self.arriving.pop().back = None
        if not any(storage() for storage in self.in_order):  # no graph needs the pool
            self.in_order = []
            self.used = 0
            self.known = weakref.WeakKeyDictionary()
        self.wanted = self.used
        self.left_out.clear()
        self.staying = {tensor.untyped_storage().data_ptr() for tensor in self.stay}
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            yield

    def pack(self, tensor: torch.Tensor) -> tuple:
        """Queue the copy of the storage of ``tensor``, unless it is known or should stay."""
        base = tensor if tensor._base is None else tensor._base  # with it, views share a version
        tensor = tensor.detach()  # what a hook keeps must not refer to the graph
        if self.stays(tensor, base):
            return tensor, tensor._version
        memory = tensor.untyped_storage()
        storage = self.known[memory]() if memory in self.known else None
        if storage is None or storage.version != tensor._version:
            storage = self.store(tensor)
        view = tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()
        return (storage, *view) if storage else (tensor, tensor._version)

    def stays(self, tensor: torch.Tensor, base: torch.Tensor) -> bool:
        """Whether a saved tensor, a view of ``base``, is to stay on the device."""
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
            return True
        if tensor.is_conj() or tensor.is_neg() or tensor.is_nested or tensor.is_quantized:
            return True
        if tensor.device != self.device or isinstance(_cast_of(base), nn.Parameter):
            return True
        memory = tensor.untyped_storage()
        if memory.data_ptr() in self.staying or memory.nbytes() < SMALLEST:
            return True
        return memory.nbytes() != base.nbytes  # a part of it, with a version of its own

    def unpack(self, packed: tuple) -> torch.Tensor:
        """The tensor that was packed; what backward needs next is on its way then."""
        if isinstance(packed[0], torch.Tensor):
            return _unchanged(*packed, latest=packed[0]._version)
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
        return _unchanged(
            _view_of(memory.untyped_storage(), dtype, *layout), storage.version, latest
        )

    # To the host

    def store(self, source: torch.Tensor) -> _Storage | None:
        """Queue the copy of a storage to the host; None if the budget does not hold it."""
        memory = source.untyped_storage()
        if self.used + memory.nbytes() > self.budget:
            self.leave_out(source)
            return None
        self.wanted += memory.nbytes()
        host = self.pool.bytes[self.used : self.used + memory.nbytes()]
        self.used += host.nbytes
        self.release(self.window - host.nbytes)
        storage = _Storage(source, host, len(self.in_order), self.streams)
        ready = self.streams.current_stream().record_event()
        with self.streams.stream(self.d2h):
            self.d2h.wait_event(ready)
            host.copy_(_view_of(memory, torch.uint8), non_blocking=True)
            storage.stored.record(self.d2h)
        self.known[memory] = weakref.ref(storage)
        self.in_order.append(self.known[memory])
        self.leaving.append(storage)
        self.peak = max(self.peak, _total(self.leaving) + _total(self.arriving))
        return storage

    def leave_out(self, source: torch.Tensor) -> None:
        """Count in ``wanted`` what the budget does not hold, once for all that is saved of it."""
        memory = source.untyped_storage()
        if memory in self.left_out:
            before, version = self.left_out[memory]
            if before() is not None and version == source._version:
                return
        self.wanted += memory.nbytes()
        self.left_out[memory] = (weakref.ref(source), source._version)

    def release(self, most: int) -> None:
        """Drop the oldest sources until at most ``most`` bytes are on their way to the host."""
        while self.leaving and _total(self.leaving) > most:
            storage = self.leaving.popleft()
            self.streams.current_stream().wait_event(storage.stored)
            storage.latest = storage.source._version
            storage.source = None

    # Back to the device

    def load(self, storage: _Storage) -> None:
        """Queue the copy of a storage back to the device."""
        storage.back = torch.empty_like(storage.host, device=self.device)
        free = self.streams.current_stream().record_event()
        with self.streams.stream(self.h2d):
            self.h2d.wait_event(free)
            storage.back.copy_(storage.host, non_blocking=True)
            storage.loaded.record(self.h2d)
        self.arriving.add(storage)
        self.peak = max(self.peak, _total(self.leaving) + _total(self.arriving))

    def prefetch(self, index: int) -> None:
        """Load what was saved before number ``index``, last first, as far as the window allows."""
        for storage in (reference() for reference in reversed(self.in_order[:index])):
            if storage and storage.source is None and storage.back is None:
                coming = _total(other for other in self.arriving if other.index < index)
                if coming and coming + storage.host.nbytes > self.window:
                    break
                self.load(storage)

    def close(self) -> None:
        """Wait for the device and unlock the pool."""
        self.streams.synchronize()
        self.pool.close()
