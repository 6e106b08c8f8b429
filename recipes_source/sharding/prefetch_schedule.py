"""
Gather less and earlier: a prefetch schedule
============================================
"""

from collections import deque
from collections.abc import Iterable

import torch
import torch.distributed as dist
from stream_context import FsdpContext, Unit, rows
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

BUFFERS = 4  # units whose full weights may be in memory at once, in training
GRADIENTS = 8  # full gradients that may wait for their reduce-scatter


class PrefetchContext(FsdpContext):
    """docs"""

    def __init__(
        self,
        root: nn.Module,
        units: Iterable[nn.Module],
        mesh: DeviceMesh,
        buffers: int = BUFFERS,
        gradients: int = GRADIENTS,
        **options,
    ) -> None:
        super().__init__(root, units, mesh, **options)
        self.buffers, self.gradients = buffers, gradients
        self.reduce_stream = self.streams.Stream(priority=-1)
        self.reducing: deque = deque()  # full gradients, and the events behind their reduction
        self.order: list[Unit] = []  # of the units in this forward, or the last
        self.upcoming: list[Unit] = []  # expected in what is left of this forward
        self.stack: list[Unit] = []  # run in this forward; backward comes in reverse
        self.busy: set[Unit] = set()  # computing now
        self.mispredicted = 0

    # what will be needed, soonest first

    def future(self) -> list[Unit]:
        turn = self.upcoming[::-1] if self.training else []
        return self.upcoming + turn + self.stack[::-1]

    def before_forward(self, unit: Unit) -> None:
        if unit is not self.units[-1]:
            if self.upcoming and self.upcoming[0] is not unit:
                self.mispredicted += 1
                self.upcoming.clear()
            self.upcoming = self.upcoming[1:]
            self.order.append(unit)
        super().before_forward(unit)
        if self.training and unit is not self.units[-1]:
            self.stack.append(unit)

    def before_backward(self, unit: Unit) -> None:
        if unit in self.stack:
            self.mispredicted += self.stack[-1] is not unit
            self.stack.reverse()
            self.stack.remove(unit)
            self.stack.reverse()
        super().before_backward(unit)

    # the schedule

    def before(self, unit: Unit) -> None:
        self.busy.add(unit)
        if not unit.resident:
            self.make_room([unit, *self.future()], unit)
            self.unshard(unit)
        self.compute_stream.wait_event(unit.gathered)

    def after(self, unit: Unit) -> None:
        unit.consumed.record(self.compute_stream)
        self.busy.discard(unit)
        self.prefetch()

    def prefetch(self) -> None:
        future = self.future()
        for unit in future:
            if not unit.resident:
                if not self.make_room(future, unit):
                    return
                self.unshard(unit)

    def make_room(self, future: list, unit: Unit) -> bool:
        """Release the unit needed last, if there is no free buffer and it is needed after ``unit``."""

        def when(u: Unit) -> int:
            return future.index(u) if u in future else len(future)

        resident = [u for u in self.units[:-1] if u.resident]
        if len(resident) < self.limit:
            return True
        idle = [u for u in resident if u not in self.busy]
        last = max(idle, key=when, default=unit)
        if when(last) <= when(unit):
            return False
        self.release(last)
        return True

    def begin_forward(self) -> None:
        super().begin_forward()
        self.training = torch.is_grad_enabled()
        self.limit = self.buffers if self.training else self.buffers - 1
        self.end_backward()
        self.upcoming, self.order = self.order, []
        self.unshard(self.units[-1])
        self.prefetch()

    def end_forward(self) -> None:
        self.upcoming.clear()
        if not self.training:
            self.end_backward()
        else:
            self.prefetch()

    # gradients

    def reduce(self, p: rows.ShardedParameter, grad: torch.Tensor) -> None:
        ready, done = self.streams.Event(), self.streams.Event()
        ready.record(self.compute_stream)
        with self.streams.stream(self.reduce_stream):
            self.reduce_stream.wait_event(ready)
            p.reduce(grad, self.reduce_scatter)
        done.record(self.reduce_stream)
        self.reducing.append((grad, done))
        self.drain_gradients(keep=self.gradients)

    def drain_gradients(self, keep: int) -> None:
        while len(self.reducing) > keep:
            self.compute_stream.wait_event(self.reducing[0][1])
            self.reducing.popleft()  # the memory goes back to the compute stream

    def end_backward(self) -> None:
        self.stack.clear()
        self.busy.clear()
        self.drain_gradients(keep=0)
        super().end_backward()


def compare(shuffled: bool, device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    reference = rows.Stack(device, shuffled)
    rows.train(reference)
    for schedule in (FsdpContext, PrefetchContext):
        model = rows.Stack(device, shuffled)
        context = schedule(model, model.blocks, mesh)
        rows.train(model, context.backward)
        rows.prove_parity(model, reference)
        print(
            schedule.__name__,
            shuffled,
            getattr(context, "gathers", None),
            getattr(context, "mispredicted", None),
            context.peak_bytes,
        )


def main() -> None:
    device = rows.start_rank()
    try:
        for shuffled in (False, True):
            compare(shuffled, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
