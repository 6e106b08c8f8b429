"""
Hide the ends: update in the order of the next forward
======================================================
"""

from collections.abc import Callable
from functools import partial
from itertools import groupby

import prefetch_schedule as prefetch
import torch
import torch.distributed as dist
from prefetch_schedule import PrefetchContext, Unit, rows
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


class UpdateContext(PrefetchContext):
    """docs"""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.optimizers: dict[Unit, torch.optim.Optimizer] = {}
        self.reduced = {unit: self.streams.Event() for unit in self.units}
        self.updated = self.streams.Event()
        self.fresh = False  # whether what is in memory was gathered behind its update
        self.early = 0  # units gathered before their forward began

    def optimize(self, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
        """Give each unit an optimizer of its own, made from its sharded parameters."""
        for unit in self.units:
            if unit.parameters:
                self.optimizers[unit] = make([p.parameter for p in unit.parameters])

    def take_gradient(self, unit: Unit, p: rows.ShardedParameter, full: nn.Parameter) -> None:
        super().take_gradient(unit, p, full)
        self.reduced[unit].record(self.reduce_stream)

    def end_backward(self) -> None:
        """As before, but nothing waits for the reduce-scatters: each update waits for its own."""
        self.release_all()

    def step(self) -> None:
        """Update all units and drop their gradients; gather what the next forward needs first."""
        self.fresh, self.upcoming = True, []
        *first, last = dict.fromkeys([self.root, *self.order])
        rest = [unit for unit in self.units if unit not in [*first, last]]
        for unit in [last, *rest, *first]:
            self.update(unit)
            if unit is self.root:
                self.unshard(unit)
            elif unit in first:
                self.upcoming.append(unit)
                self.prefetch()
        self.upcoming = list(self.order)
        self.early += sum(unit.resident for unit in self.units)
        self.drain_gradients(keep=0)

    def update(self, unit: Unit) -> None:
        if unit in self.optimizers:
            self.compute_stream.wait_event(self.reduced[unit])
            self.optimizers[unit].step()
            self.optimizers[unit].zero_grad()
        self.updated.record(self.compute_stream)
        self.gather_stream.wait_event(self.updated)

    def predict(self) -> None:
        """After a step, what is in memory is up to date."""
        if self.fresh:
            self.fresh, self.order = False, []
        else:
            super().predict()


def train(model: rows.Stack, context: UpdateContext) -> list[str]:
    """Train as ``rows.train`` does; return what the last step queued, in order."""
    queued, gather = [], context.gather

    def watched(full: torch.Tensor, shard: torch.Tensor) -> None:
        queued.append("gather")
        gather(full, shard)

    context.gather = watched
    for optimizer in context.optimizers.values():
        optimizer.register_step_post_hook(lambda *_: queued.append("update"))
    for turn in range(prefetch.PASSES):
        context.backward(rows.loss_of(model, turn, dist.get_rank()))
        if turn % rows.MICRO_BATCHES == rows.MICRO_BATCHES - 1:
            queued.clear()
            context.step()
    return queued


def prove(shuffled: bool, device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model, reference = rows.Stack(device, shuffled), rows.Stack(device, shuffled)
    context = UpdateContext(model, model.blocks, mesh)
    context.optimize(partial(torch.optim.AdamW, lr=1e-3))
    queued = train(model, context)
    rows.train(reference)
    rows.prove_parity(model, reference)
    assert context.early == rows.STEPS * (prefetch.BUFFERS + 1), "each step fills the buffers"
    expected = ["update", "gather"] * (prefetch.BUFFERS + 1) + ["update"]
    assert [name for name, _ in groupby(queued)] == expected, "not each gather behind its update"
    if not shuffled:
        kept = prefetch.PASSES * (2 * rows.BLOCKS - prefetch.BUFFERS + 1) + prefetch.BUFFERS + 1
        assert context.gathers == kept, "no unit is gathered twice for one forward"
        assert context.late == rows.BLOCKS, "all but the first forward knows the order"
    order = "another order each pass" if shuffled else "one order"
    print(f"{order}: {context.early} units gathered behind their update, {context.late} late")
    context.release_all()
    assert context.live_bytes == 0


def main() -> None:
    device = rows.start_rank()
    try:
        for shuffled in (False, True):
            prove(shuffled, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
