# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/page_locked.py
"""Host memory of an exact size, page-locked for the copies of a CUDA device.

``torch.empty(..., pin_memory=True)`` asks a caching allocator that rounds every block up to a power
of two (pytorch#150517). An anonymous mapping that is registered with the driver has the size that
is asked for, and is ours to unlock.
"""

import ctypes
import mmap
from collections.abc import Callable
from contextlib import suppress
from weakref import finalize

import torch

from . import host_memory


def private_memory(nbytes: int) -> mmap.mmap:
    """Memory of this process alone, in large pages where the system has them."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(getattr(mmap, "MADV_HUGEPAGE", mmap.MADV_NORMAL))
    return memory


class PageLocked:
    """``nbytes`` of host memory, zeroed, and page-locked where ``device`` is a CUDA device.

    Until ``close()``, ``bytes`` is a 1-D uint8 tensor of them, and ``memory`` what holds it. The
    memory lives as long as a tensor that uses it; its pages are locked until ``close()``, or until
    this object is collected.

    Args:
        nbytes: how many; 0 is allowed.
        device: the device whose copies will read or write them.
        allocate: where they come from, bytes -> mmap.
        piece: how many bytes are touched and locked at a time, by this thread alone, so that a
            training on another thread goes on; no copy may cross a multiple of it. None: all at
            once, touched by all of torch's threads, which is sooner and stops a training.

    Raises:
        RuntimeError: the host has not that much memory left, or the driver will not lock it.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        nbytes: int,
        device: torch.device,
        allocate: Callable[[int], mmap.mmap] = private_memory,
        piece: int | None = None,
    ) -> None:
        self.unlock: list[Callable[[], object]] = []
        self.device = device
        self.is_away = False
        try:
            self.memory = allocate(max(nbytes, 1))
            self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)[:nbytes]
            left = nbytes
            for part in self.bytes.split(piece or max(nbytes, 1)):
                if allocate is private_memory:  # what others take meanwhile counts
                    host_memory.refuse_now(left)
                left -= part.nbytes
                if piece is None:
                    part.zero_()
                else:
                    ctypes.memset(part.data_ptr(), 0, part.nbytes)  # without the interpreter's lock
                if device.type == "cuda" and nbytes > 0:
                    self.lock(part)
        except (OSError, RuntimeError) as error:
            with suppress(Exception):
                torch.ones((), device=device)  # takes the driver's error in place of your kernel
            raise RuntimeError(
                f"cannot lock {nbytes} more bytes of host memory ({error}): free some, or raise "
                "`ulimit -l`"
            ) from error

    def lock(self, part: torch.Tensor) -> None:
        """Register the pages of ``part`` with the driver, and spare forked children their copies.

        A child shares pages with its parent until one of them writes, and the writer gets a copy:
        the device would go on with the original.
        """
        self.memory.madvise(mmap.MADV_DONTFORK)
        cuda = torch.cuda.cudart()
        address = part.data_ptr()
        error = int(cuda.cudaHostRegister(address, part.nbytes, 0))
        if error != 0:
            said = cuda.cudaGetErrorString(cuda.cudaError(error))
            raise RuntimeError(f"CUDA error {error}: {said}")
        self.unlock.append(finalize(self, cuda.cudaHostUnregister, address))

    def give_away(self) -> None:
        """Unlock the pages, and give them back to the system: what is read here then is zeros.

        For memory of ``private_memory``, which no copy reads or writes.
        """
        if not self.is_away:
            self.is_away = True
            for unlock in self.unlock:
                unlock()
            self.memory.madvise(mmap.MADV_DONTNEED)

    def take_back(self) -> None:
        """Lock pages again where they were given away.

        Raises:
            RuntimeError: the driver will not lock them.
        """
        if self.is_away:
            self.is_away = False
            self.bytes.zero_()
            if self.device.type == "cuda" and self.bytes.nbytes > 0:
                self.lock(self.bytes)

    def close(self) -> None:
        """Unlock the pages, once; the memory is the host's when no tensor uses it any more."""
        for unlock in self.unlock:
            unlock()
        self.memory = None
        self.bytes = None
