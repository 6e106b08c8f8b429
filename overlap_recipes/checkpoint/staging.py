# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/staging.py
"""The copy of a state in page-locked memory, made during what training does next."""

import logging
import time
from collections.abc import Callable, Iterable

import torch

from .copies import Copies, CopyPlan, PinnedArena

LOG = logging.getLogger(__name__)


class Staging:
    """A buffer of this rank's state, and the copies that fill it; for one thread at a time.

    Args:
        device: where most of the tensors live, with its index.
        changed_by_forward: returns tensors that forward changes in place.
        host_bytes: how much page-locked memory there may be; None: no bound.

    Attributes:
        hosts: the tensors of the plan, as they lie in the buffer.
    """

    def __init__(
        self,
        device: torch.device,
        changed_by_forward: Callable[[], Iterable[torch.Tensor]],
        host_bytes: int | None,
    ) -> None:
        self.device = device
        self.changed_by_forward = changed_by_forward
        self.host_bytes = host_bytes
        self.streams = torch.get_device_module(device)
        self.copy_stream = self.streams.Stream()
        self.plan: CopyPlan | None = None
        self.arena: PinnedArena | None = None
        self.copies: Copies | None = None
        self.hosts: list[torch.Tensor] = []
        self.has_been_read = None  # an event: the latest copies have read the tensors in place

    def fits(self, tensors: list[torch.Tensor]) -> bool:
        """Whether the buffer is made for ``tensors``."""
        return self.plan is not None and self.plan.fits(tensors)

    def make_buffer(self, tensors: list[torch.Tensor]) -> None:
        """Plan the copies of ``tensors``, and lock memory for them unless there is enough.

        Raises:
            RuntimeError: they need more than ``host_bytes``; before any is locked.
        """
        began = time.monotonic()
        self.plan = None
        self.copies = None
        self.hosts = []
        plan = CopyPlan(tensors, self.device, self.changed_by_forward())
        if self.host_bytes is not None and plan.nbytes > self.host_bytes:
            raise RuntimeError(f"a save needs {plan.nbytes} bytes, host_bytes is {self.host_bytes}")
        if self.arena is None or self.arena.bytes.nbytes < plan.nbytes:
            self.arena = None  # before there is another
            self.arena = PinnedArena(plan.nbytes, self.device)
        self.copies = plan.copies(self.arena)
        self.hosts = plan.hosts(self.arena)
        self.plan = plan
        LOG.info("%d bytes planned in %.1f s", plan.nbytes, time.monotonic() - began)

    def queue(self):
        """Queue the copies of the plan's tensors after what the current stream has been given.

        Returns:
            An event: all is in the buffer.
        """
        training = self.streams.current_stream()
        training.wait_stream(self.copy_stream)  # which may read older snapshots
        self.plan.take_snapshots()
        self.copy_stream.wait_stream(training)
        self.has_been_read, copied = self.copies.queue(self.streams, self.copy_stream)
        return copied

    def finish_copies(self) -> None:
        """Return when no copy is under way; one of a save that failed may be."""
        self.streams.synchronize()

    def before_update(self) -> None:
        """Make the current stream wait until the latest copies have read the tensors."""
        if self.has_been_read is not None:
            self.streams.current_stream().wait_event(self.has_been_read)
