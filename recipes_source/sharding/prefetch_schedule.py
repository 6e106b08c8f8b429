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

BUFFERS = 3  # units whose full weights may be in memory at once
GRADIENTS = 4  # full gradients that may wait for their reduce-scatter


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
        self.root, self.buffers, self.gradients = self.units[-1], buffers, gradients
        self.reduce_stream = self.streams.Stream(priority=-1)
        self.reducing: deque = deque()  # (event behind it, what it reads, what it writes)
        self.order: list[Unit] = []  # of the units in this forward, or the last
        self.upcoming: list[Unit] = []  # expected in what is left of this forward
        self.returning: list[Unit] = []  # expected in backward: the last of forward first
        self.busy: set[Unit] = set()  # computing now
        self.late = self.mispredicted = 0  # gathers asked for when needed; units out of order

    # what will be needed, soonest first

    def future(self) -> list[Unit]:
        turn = self.upcoming[::-1] if self.training else []
        return self.upcoming + turn + self.returning

    def before_forward(self, unit: Unit) -> None:
        if unit is not self.root:
            if self.upcoming and self.upcoming[0] is not unit:
                self.mispredicted += 1
                self.upcoming.clear()
            del self.upcoming[:1]
            self.order.append(unit)
        super().before_forward(unit)

    def after_forward(self, unit: Unit, output: torch.Tensor) -> None:
        if unit is not self.root and self.training:
            self.returning.insert(0, unit)
        super().after_forward(unit, output)

    def before_backward(self, unit: Unit) -> None:
        if unit is not self.root:
            self.mispredicted += self.returning[:1] != [unit]
            if unit in self.returning:
                self.returning.remove(unit)
        super().before_backward(unit)

    # the schedule

    def before(self, unit: Unit) -> None:
        self.busy.add(unit)
        if not unit.resident:
            self.late += 1
            self.make_room([unit, *self.future()], unit)
            self.unshard(unit)
        self.compute_stream.wait_event(unit.gathered)

    def after(self, unit: Unit) -> None:
        unit.consumed.record(self.compute_stream)
        self.busy.discard(unit)
        self.prefetch()
        if self.training and unit.resident and unit is not self.root and unit not in self.future():
            self.release(unit)

    def prefetch(self) -> None:
        """Gather what is needed next, as far as there is room."""
        future = self.future()
        for unit in future:
            if not unit.resident:
                if not self.make_room(future, unit):
                    return
                self.unshard(unit)

    def make_room(self, future: list[Unit], unit: Unit) -> bool:
        """Release the unit needed last, if there is no free buffer and ``unit`` is needed before."""
        resident = [u for u in self.units if u.resident and u is not self.root]
        if len(resident) < self.buffers:
            return True

        def position(u: Unit) -> int:
            return future.index(u) if u in future else len(future)

        last = max((u for u in resident if u not in self.busy), key=position, default=unit)
        if position(last) <= position(unit):
            return False
        self.release(last)
        return True

    def begin_forward(self) -> None:
        super().begin_forward()
        self.training = torch.is_grad_enabled()
        self.predict()
        if not self.root.resident:
            self.unshard(self.root)
        self.prefetch()

    def predict(self) -> None:
        """Nothing in memory is up to date; expect the order of the last forward."""
        self.release_all()
        self.upcoming, self.order = self.order, []

    def end_forward(self) -> None:
        self.upcoming.clear()
        if self.training:
            self.prefetch()
        else:
            self.release_all()

    def release_all(self) -> None:
        self.returning.clear()
        self.busy.clear()
        super().release_all()

    # gradients

    def reduce(self, p: rows.ShardedParameter, grad: torch.Tensor) -> None:
        reduced = torch.empty_like(p.shard, dtype=grad.dtype)  # memory of the compute stream
        ready, done = self.streams.Event(), self.streams.Event()
        ready.record(self.compute_stream)
        with self.streams.stream(self.reduce_stream):
            self.reduce_stream.wait_event(ready)
            p.reduce(grad, reduced, self.reduce_scatter)
        done.record(self.reduce_stream)
        self.reducing.append((done, grad, reduced))
        self.drain_gradients(keep=self.gradients)

    def drain_gradients(self, keep: int) -> None:
        while len(self.reducing) > keep:
            self.compute_stream.wait_event(self.reducing[0][0])
            self.reducing.popleft()  # the memory goes back to the compute stream

    def end_backward(self) -> None:
        self.drain_gradients(keep=0)
        super().end_backward()


PASSES = rows.STEPS * rows.MICRO_BATCHES  # forward and backward, each


def watch(collective: rows.Collective, context: FsdpContext, used: list) -> rows.Collective:
    """``collective``, noting the stream that it is queued on."""

    def call(output: torch.Tensor, source: torch.Tensor) -> None:
        used.append(context.streams.current_stream())
        collective(output, source)

    return call


def prove(schedule: type[FsdpContext], shuffled: bool, device: torch.device) -> FsdpContext:
    """Train under ``schedule`` and unsharded; compare the weights, print what it took."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model, reference = rows.Stack(device, shuffled), rows.Stack(device, shuffled)
    context, used = schedule(model, model.blocks, mesh), []
    context.reduce_scatter = watch(context.reduce_scatter, context, used)
    rows.train(model, context.backward)
    rows.train(reference)
    rows.prove_parity(model, reference)
    stream = getattr(context, "reduce_stream", context.compute_stream)
    assert all(where == stream for where in used) and context.live_bytes == 0
    units = context.peak_bytes // context.units[0].nbytes
    order = "another order each pass" if shuffled else "one order"
    print(f"{schedule.__name__}, {order}: {context.gathers} gathers, {units} units in memory")
    return context


def main() -> None:
    device = rows.start_rank()
    try:
        for shuffled in (False, True):
            delayed = prove(FsdpContext, shuffled, device)
            assert delayed.gathers == PASSES * 2 * (rows.BLOCKS + 1), (
                "each unit twice, and the root"
            )
            ahead = prove(PrefetchContext, shuffled, device)
            assert ahead.reduce_stream != ahead.compute_stream, "one stream for both"
            assert ahead.peak_bytes <= BUFFERS * ahead.units[0].nbytes + ahead.root.nbytes
            print(f"{ahead.late} gathers late, {ahead.mispredicted} units out of order")
            if shuffled:
                assert ahead.mispredicted > 0
            else:
                assert ahead.gathers == PASSES * (2 * rows.BLOCKS - BUFFERS + 1), "kept too few"
                assert ahead.late == rows.BLOCKS, "all but the first forward knows the order"
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
