# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/offload/device_adam.py
"""AdamW on the device, of layers whose state with 8-bit moments lives in host memory.

A layer's state comes in pieces on the stream that brings weights, is updated on a stream of its
own, and goes home on the stream that brings gradients. An update begins when its layer, or the one
below, is going to be loaded: so the next forward runs meanwhile, from the lowest layer up.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

from . import adam_in_pieces as pieces
from . import eight_bit
from .follower import Follower, LayerUpdates
from .host_adam import HostUpdates
from .host_layers import HostBuffer
from .weight_streaming import GRADIENT_SLOTS

_AHEAD = 1  # layers above the one to be loaded whose updates are queued before that is awaited
ROOMS = 3  # pieces on the device: one that comes, one that is updated, one that goes


class _Piece(NamedTuple):
    """Some elements of a parameter of a layer."""

    parameter: int  # its number among those that are trained
    group: int  # of its settings
    host: dict[str, torch.Tensor]  # weight and state there, flat
    gradient: torch.Tensor  # there
    gradient_here: torch.Tensor  # in the layer's slot on the device


class _Update(NamedTuple):
    """What a layer's update to come takes besides its state."""

    settings: list[dict]  # by group
    scale: torch.Tensor  # of the gradients
    skip: torch.Tensor  # 1 if nothing is to change
    ready: torch.Event  # gradients, ``scale`` and ``skip`` are there


class _Room:
    """Where a piece is on the device: ``parts`` by name and dtype, as long as the longest piece."""

    def __init__(self, sizes: dict[tuple, int], streamed) -> None:
        self.parts = {}
        for (name, dtype), numel in sizes.items():
            self.parts[name, dtype] = torch.empty(numel, dtype=dtype, device=streamed.device)
        self.here = streamed.streams.Event()  # a piece has come
        self.updated = streamed.streams.Event()
        self.free = streamed.streams.Event()  # it has gone

    def like(self, host: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Parts of the lengths of a piece's."""
        return {name: self.parts[name, on.dtype][: on.numel()] for name, on in host.items()}


class DeviceUpdates(LayerUpdates):
    """AdamW with 8-bit moments for the layers of a streamed model.

    Args:
        streamed: the model.
        group_of: for each trained parameter of the layers the number of its settings.

    ``state[parameter]`` is on the host, as ``eight_bit`` describes it.
    """

    takes_sums = True

    def __init__(self, streamed, group_of: dict) -> None:
        if streamed.optimizer:
            raise ValueError("this model has an optimizer: close it, and make both again")
        super().__init__(streamed)
        self.refuse_without_room(self.bytes_of_state(), "rests and moments of layers")
        self.group_of = group_of
        self.state = {}
        self.buffers = []  # all that is new on the host
        self.steps = []  # by layer: how often each of its trained parameters has been updated
        self.counted = []  # the same on the device, where a step that is skipped is known first
        self.pieces = []  # by layer
        for number, layer in enumerate(streamed.layers):
            self.steps.append(torch.zeros(len(layer.trained), dtype=pieces.FP32, device="cpu"))
            self.counted.append(self.steps[number].to(streamed.device, copy=True))
            self.pieces.append(self.take(number))
        self.seen = {parameter: parameter._version for parameter in self.state}

        eight_bit.make_tables(torch.empty(0, device=streamed.device).device)
        sizes = self.sizes_of_pieces()
        self.rooms = [_Room(sizes, streamed) for _ in range(ROOMS)]
        self.turn = 0  # pieces so far
        self.stream = streamed.streams.Stream()
        self.stream.wait_stream(streamed.streams.current_stream())
        streamed.h2d.wait_stream(streamed.streams.current_stream())
        event = streamed.streams.Event
        if streamed.device.type != "cpu":  # a wait takes no core
            event = partial(event, blocking=True)
        self.home = defaultdict(event)  # by layer: its state is on the host again

        self.due = {}  # by layer: an ``_Update`` that is not queued yet
        self.queued = {}  # by layer: the latest one that is; its tensors are read until it is home
        self.announced = {}  # by layer that is not home: its ``versions`` of then
        self.arriving = []  # events, and what is to be done when they have come
        self.error = None  # what kept a step from being a whole one
        streamed.follower = self

    def bytes_of_state(self) -> int:
        """What rests and moments of the layers will take of the host."""
        nbytes = 0
        for layer in self.streamed.layers:
            for parameter in layer.trained.values():
                for shape, dtype in eight_bit.kinds_of_state(parameter).values():
                    nbytes += shape.numel() * dtype.itemsize
        return nbytes

    def take(self, number: int) -> list[_Piece]:
        """A layer's pieces; makes the memory of its state, and ``state`` of its parameters."""
        layer = self.streamed.layers[number]
        missing = [name for name, p in layer.trained.items() if p not in self.group_of]
        if missing:
            raise ValueError(f"give all parameters that are trained; it lacks {missing}")
        step_of = dict(zip(layer.trained, self.steps[number].unbind(), strict=True))
        for name, parameter in layer.trained.items():
            self.state[parameter] = {"step": step_of[name]}
        found = []
        slots = self.streamed.gradient_flats[number]
        # What is frozen comes last among the weights, and has no gradients.
        for weights, gradients, slot in zip(layer.weights, layer.gradients, slots, strict=False):
            buffers = self.state_buffers({n: layer.trained[n] for n in weights.shapes})
            found += self.cut(layer, weights, gradients, slot, buffers)
        return found

    def state_buffers(self, like: dict) -> dict[str, HostBuffer]:
        """Page-locked memory for the state of parameters of one dtype, by the state's name."""
        shapes = {}  # by the state's name and dtype, and in it by parameter
        for name, parameter in like.items():
            for kind, (shape, dtype) in eight_bit.kinds_of_state(parameter).items():
                of_that_shape = torch.empty(shape, device="meta")
                shapes.setdefault((kind, dtype), {})[name] = of_that_shape
        found = {}
        for (kind, dtype), of_kind in shapes.items():
            found[kind] = HostBuffer(of_kind, dtype, self.streamed.device)
            self.buffers.append(found[kind])
            for name in of_kind:
                self.state[like[name]][kind] = found[kind].views[name]
        return found

    def cut(self, layer, weights, gradients, slot, buffers: dict) -> list[_Piece]:
        """Pieces of the parameters in a buffer, each of whole blocks but for a parameter's last."""
        found = []
        numbers = {name: number for number, name in enumerate(layer.trained)}
        for name, begin in zip(weights.shapes, weights.offsets, strict=True):
            numel = weights.shapes[name].numel()
            flat = {"weight": weights.flat[begin : begin + numel]}
            for kind, buffer in buffers.items():
                if name in buffer.shapes:
                    start = buffer.offsets[list(buffer.shapes).index(name)]
                    flat[kind] = buffer.flat[start:]
            for at in range(0, numel, eight_bit.PIECE):
                end = min(at + eight_bit.PIECE, numel)
                here = slice(begin + at, begin + end)
                found.append(
                    _Piece(
                        numbers[name],
                        self.group_of[layer.trained[name]],
                        eight_bit.part_of(flat, at, end),
                        gradients.flat[here],
                        slot[here],
                    )
                )
        return found

    def sizes_of_pieces(self) -> dict[tuple, int]:
        """By name and dtype the largest number of elements that a piece has."""
        sizes = {}
        for of_layer in self.pieces:
            for piece in of_layer:
                for name, on in {**piece.host, "gradient": piece.gradient}.items():
                    kind = (name, on.dtype)
                    sizes[kind] = max(sizes.get(kind, 0), on.numel())
        return sizes

    def take_changes(self, layer: int) -> None:
        """From here on, changes are those between backward and step; digests tell of others."""
        self.note_masters(self.streamed.layers[layer].trained.values())

    # Steps

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Until the block ends without an error, whoever waits is told to load a checkpoint."""
        before = self.error
        if before is None:
            self.error = RuntimeError("a step was interrupted: load a checkpoint")
        yield
        self.error = before

    @contextmanager
    def later(
        self, work: Callable, layers: Iterable[int], settings: list[dict], arrived, copy, source
    ) -> Iterator[None]:
        """Have layers updated; call ``work({}, arrived, copy, source)`` when ``copy`` is here.

        ``source`` has on the device what ``copy`` will have: the gradients' norm, and their scale.
        The block is a part of the same step.
        """
        with self.whole():
            skip = (~source[0].isfinite()).float()
            ready = self.streamed.streams.Event()
            ready.record(self.streamed.streams.current_stream())
            announced = dict.fromkeys(layers, _Update(settings, source[1], skip, ready))
            self.due |= announced
            for layer in announced:
                self.announced[layer] = self.versions(layer)
            self.let_go(announced)
            self.arriving.append((arrived, partial(work, announced, arrived, copy, source)))
            yield
        self.queue_up_to(_AHEAD)

    def start(self, announced: dict[int, _Update], scale: float) -> None:
        """The host has heard that a step counts; the device has begun it."""
        for layer in announced:
            self.steps[layer] += 1

    def drop(self, announced: dict[int, _Update]) -> None:
        """The host has heard that a step is skipped; so the device has done."""

    def queue_up_to(self, last: int) -> None:
        """Queue the updates of layers up to this one that are due, the lowest first."""
        for layer in sorted(self.due):
            if layer <= last:
                self.queue(layer)

    @torch.no_grad()
    def queue(self, layer: int, here: bool = False) -> None:
        """Queue a layer's update; its gradients are on the host, or still ``here``, in its slot."""
        with self.whole(), torch.inference_mode(False):
            job = self.due.pop(layer)
            self.queued[layer] = job
            self.stream.wait_event(job.ready)
            with self.streamed.streams.stream(self.stream):
                self.counted[layer] += 1 - job.skip
            for piece in self.pieces[layer]:
                self.queue_piece(layer, piece, job, here)
            if here:
                self.streamed.grad_free[layer % GRADIENT_SLOTS].record(self.stream)
            self.home[layer].record(self.streamed.d2h)

    def queue_piece(self, layer: int, piece: _Piece, job: _Update, here: bool) -> None:
        streams = self.streamed.streams
        h2d = self.streamed.h2d
        d2h = self.streamed.d2h
        room = self.rooms[self.turn % ROOMS]
        self.turn += 1
        coming = dict(piece.host)
        if not here:
            coming["gradient"] = piece.gradient
        parts = room.like(coming)
        h2d.wait_event(room.free)
        with streams.stream(h2d):
            for name, on_host in coming.items():
                parts[name].copy_(on_host, non_blocking=True)
        room.here.record(h2d)
        self.stream.wait_event(room.here)
        gradient = parts.pop("gradient", piece.gradient_here)
        settings = job.settings[piece.group]
        step = self.counted[layer][piece.parameter]
        with streams.stream(self.stream):
            eight_bit.update(settings, parts, gradient, step, job.scale, job.skip)
        room.updated.record(self.stream)
        d2h.wait_event(room.updated)
        with streams.stream(d2h):
            for name, on_host in piece.host.items():
                on_host.copy_(parts[name], non_blocking=True)
        room.free.record(d2h)

    # The training thread

    def may_load(self, layer: int) -> bool:
        """Whether a load now would not wait; if it would, it is made when the layer is called."""
        return layer not in self.due and self.home[layer].query()

    def before_load(self, layer: int) -> None:
        """Wait until a layer is updated; raises what kept a step from being a whole one."""
        self.check()
        self.queue_up_to(layer + _AHEAD)
        self.await_home(layer)
        if self.error:
            raise self.error

    def await_home(self, layer: int) -> None:
        """Wait until a layer is updated; notes if something else has changed it meanwhile."""
        self.home[layer].synchronize()
        before = self.announced.pop(layer, None)
        if before is not None:
            self.error = self.error or self.error_of_changes(layer, before)

    def check(self) -> None:
        """Raise what kept the latest step from being a whole one, as far as that is known."""
        while self.arriving and self.arriving[0][0].query():
            self.settle()
        if self.error:
            raise self.error

    def settle(self) -> None:
        """Wait for the first norm that is to come, and do what is to be done then."""
        _, work = self.arriving.pop(0)
        try:
            work()
        except Exception as error:
            self.error = self.error or error

    def has_failed(self) -> bool:
        """Whether a step was no whole one; waits for its norms."""
        while self.arriving:
            self.settle()
        return self.error is not None

    def before_host(self, raises: bool) -> None:
        """Wait until all that was announced is updated."""
        if self.has_failed():
            self.due.clear()
        self.queue_up_to(len(self.pieces))
        for layer in range(len(self.pieces)):
            self.await_home(layer)
        if self.error and raises:
            raise self.error

    def begin_load(self) -> None:
        """Before weights and state are loaded: wait for updates, failed or not."""
        self.streamed.wait(raises=False)

    def end_load(self) -> None:
        """When they are loaded."""
        self.note_masters(list(self.seen))
        for counted, steps in zip(self.counted, self.steps, strict=True):
            counted.copy_(steps)
        self.forget()

    def forget(self) -> None:
        """Go on as if nothing had been announced or gone wrong: all weights are others now."""
        self.due.clear()
        self.announced.clear()
        self.arriving.clear()
        self.error = None

    def close(self) -> None:
        """Make what is due of a whole step, wait, and let the model stream without updates."""
        if not self.has_failed():
            self.queue_up_to(len(self.pieces))
        for event in self.home.values():
            event.synchronize()
        for buffer in self.buffers:
            buffer.close()
        self.buffers = []
        self.pieces = []  # and with these the memory of gradients
        self.rooms = []
        self.streamed.follower = Follower()


def updates_of(
    streamed, group_of: dict, threads: int | None, moments: str, in_backward: bool
) -> Follower:
    """What updates the layers of a streamed model, for ``HostAdamW``.

    Raises:
        ValueError: what is asked for is not there.
    """
    is_shared = hasattr(streamed, "updates")  # by the ranks of its host
    if moments == "fp32" and is_shared:
        return streamed.updates(group_of, threads)
    if moments == "fp32":
        return HostUpdates(streamed, group_of, threads)
    if moments != "8bit":
        raise ValueError(f'moments are "fp32" or "8bit", not {moments!r}')
    if threads is not None:
        raise ValueError('with moments="8bit" the device updates: leave threads out')
    if is_shared:
        raise ValueError('moments="8bit" is not there with one_copy_a_host: leave one of them out')
    eight_bit.refuse_dtypes(group_of)
    if in_backward and not streamed.summed:  # gradients will not be there, if nobody sums them
        for layer in streamed.layers:
            layer.give_gradients_away()
    return DeviceUpdates(streamed, group_of)
