"""
Gather less and earlier: a prefetch schedule
============================================
"""

import random
from collections import deque

import stream_context as sharding
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

BUFFERS = 4  # units whose full weights may be in memory at once, in training
GRADIENTS = 8  # full gradients that may wait for their reduce-scatter
UNITS = 8
STEPS = 4


class PrefetchContext(sharding.FsdpContext):
    """docs"""

    def __init__(
        self,
        root: nn.Module,
        units: list[nn.Module],
        mesh: DeviceMesh,
        buffers: int = BUFFERS,
        gradients: int = GRADIENTS,
        **options,
    ) -> None:
        super().__init__(root, units, mesh, **options)
        self.buffers, self.gradients = buffers, gradients
        self.reduce_stream = self.streams.Stream(priority=-1)
        self.reduce_group = dist.new_group(dist.get_process_group_ranks(self.group))
        self.reducing: deque = deque()  # full gradients, and the events behind their reduction
        self.order: list[sharding.Unit] = []  # of the units in this forward, or the last
        self.upcoming: list[sharding.Unit] = []  # expected in what is left of this forward
        self.stack: list[sharding.Unit] = []  # run in this forward; backward comes in reverse
        self.busy: set[sharding.Unit] = set()  # computing now
        self.gathers = self.mispredicted = 0

    # what will be needed, soonest first

    def future(self) -> list[sharding.Unit]:
        turn = self.upcoming[::-1] if self.training else []
        return self.upcoming + turn + self.stack[::-1]

    def before_forward(self, unit: sharding.Unit) -> None:
        if unit is not self.units[-1]:
            if self.upcoming and self.upcoming[0] is not unit:
                self.mispredicted += 1
                self.upcoming.clear()
            self.upcoming = self.upcoming[1:]
            self.order.append(unit)
        super().before_forward(unit)
        if self.training and unit is not self.units[-1]:
            self.stack.append(unit)

    def before_backward(self, unit: sharding.Unit) -> None:
        if unit in self.stack:
            self.mispredicted += self.stack[-1] is not unit
            self.stack.reverse()
            self.stack.remove(unit)
            self.stack.reverse()
        super().before_backward(unit)

    # the schedule

    def before(self, unit: sharding.Unit) -> None:
        self.busy.add(unit)
        if not unit.resident:
            self.make_room([unit, *self.future()], unit)
            self.unshard(unit)
        self.compute_stream.wait_event(unit.gathered)

    def after(self, unit: sharding.Unit) -> None:
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

    def make_room(self, future: list, unit: sharding.Unit) -> bool:
        """Release the unit needed last, if there is no free buffer and it is needed after ``unit``."""

        def when(u: sharding.Unit) -> int:
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

    def unshard(self, unit: sharding.Unit) -> None:
        super().unshard(unit)
        self.gathers += bool(unit.parameters)

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

    def reduce(self, p: sharding.ShardedParameter, grad: torch.Tensor) -> None:
        ready, done = self.streams.Event(), self.streams.Event()
        ready.record(self.compute_stream)
        with self.streams.stream(self.reduce_stream):
            self.reduce_stream.wait_event(ready)
            p.reduce_scatter(grad, self.reduce_group)
        done.record(self.reduce_stream)
        self.reducing.append((grad, done))
        self.drain_gradients(keep=self.gradients)

    def drain_gradients(self, keep: int) -> None:
        while len(self.reducing) > keep:
            self.compute_stream.wait_event(self.reducing[0][1])
            self.reducing.popleft()

    def end_backward(self) -> None:
        self.stack.clear()
        self.busy.clear()
        self.drain_gradients(keep=0)
        super().end_backward()


def main() -> None:
    device = sharding.start_rank()
    try:
        model, reference = sharding.build_model(device), sharding.build_model(device)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        context = PrefetchContext(model, [m for m in model if isinstance(m, sharding.Block)], mesh)
        sharding.train(model, device, context)
        sharding.train(reference, device, None)
        sharding.prove_parity(model, reference)
        print(context.gathers, context.mispredicted, context.peak_bytes)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
