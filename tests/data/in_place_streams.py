"""Programs on several streams, for the recorder of stream order."""

from collections.abc import Callable, Sequence
from unittest import mock

import torch
import torch.distributed as dist
from in_place_models import PLAIN, STEPS, Model, in_place, loss_of, shard, step
from torch.distributed.fsdp import FSDPModule

from overlap_recipes.fsdp2 import in_place_reduce


class Switch(torch.autograd.Function):
    """Enters or leaves a stream; so does its backward, for on a CPU autograd knows no streams.

    Where a branch begins and ends, whoever goes on waits for what comes in.
    """

    @staticmethod
    def forward(ctx, x, stream, enters: bool, edge: bool):
        ctx.told = stream, enters, edge
        Switch.change(stream, enters, edge and enters)  # the model itself waits behind a branch
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        stream, enters, edge = ctx.told
        Switch.change(stream, not enters, edge)
        return gradient, None, None, None

    @staticmethod
    def change(stream, enters: bool, waits: bool) -> None:
        if enters:
            if waits:
                stream.wait_stream(torch.cpu.current_stream())
            stream.__enter__()
        else:
            stream.__exit__(None, None, None)
            if waits:
                torch.cpu.current_stream().wait_stream(stream)


class Towers(Model):
    """Branches of blocks, each on a stream of its own; the head waits for all of them."""

    def __init__(self, towers: Sequence[int]) -> None:
        super().__init__()
        self.towers, self.streams = towers, [torch.cpu.Stream() for _ in set(towers)]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        xs = [self.embed(ids)] * len(self.streams)
        for number, (tower, block) in enumerate(zip(self.towers, self.blocks, strict=True)):
            begins, ends = (
                tower not in t for t in (self.towers[:number], self.towers[number + 1 :])
            )
            x = Switch.apply(xs[tower], self.streams[tower], True, begins)
            xs[tower] = Switch.apply(block(x), self.streams[tower], False, ends)
        for stream in self.streams:
            torch.cpu.current_stream().wait_stream(stream)
        return self.output(self.norm(sum(xs))).float()


def others_push(reduce: Callable) -> Callable:
    """Behind a barrier of gradients other ranks may write to the next slot: tell the recorder."""

    def reducing(pushed, *arguments: object) -> None:
        reduce(pushed, *arguments)
        slot = pushed.slots[pushed.calls % in_place_reduce.SLOTS][dist.get_rank()]
        recorder = pushed.stream.recorder
        pushed.stream.launch(recorder.this_thread())
        recorder.access("push", slot, True, pushed.stream, "another rank")

    return reducing


def branches() -> None:
    """Parts of a model compute on streams of their own, in any order of the host."""
    pushes = others_push(in_place_reduce.PushedGradients.reduce)
    for towers in ((0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2, 0)):
        model = in_place(shard(PLAIN, model=Towers(towers), grouped=True))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with mock.patch.object(in_place_reduce.PushedGradients, "reduce", pushes):
            for turn in range(4):
                loss_of(model, turn).backward()
                if turn % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        torch.cpu.synchronize()  # before the model goes


def evaluation_beside() -> None:
    """Another stream still evaluates while training goes on."""
    model = shard(PLAIN, grouped=True)
    for unit in filter(lambda module: isinstance(module, FSDPModule), model.modules()):
        unit.set_modules_to_backward_prefetch([unit])  # stock's own prefetch fails on a CPU
    in_place(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    side = torch.cpu.Stream()
    for turn in range(STEPS):
        step(model, turn)
        optimizer.step()
        side.wait_stream(torch.cpu.current_stream())
        with torch.cpu.stream(side), torch.no_grad():
            loss_of(model, 90 + turn)
