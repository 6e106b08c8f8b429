# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/offload/host_adam.py
"""AdamW on threads of the host, the lowest layer first, since the next forward begins with it."""

import mmap
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from heapq import heappop, heappush
from typing import NamedTuple

import torch

from ..page_locked import private_memory
from . import adam_in_pieces as pieces
from .follower import Follower, LayerUpdates
from .host_layers import HostBuffer

BLOCK = 2**20  # parameters that a thread updates in one call


class _Buffers(NamedTuple):
    """What an update of some of a layer's parameters, of one dtype, reads and writes."""

    gradients: HostBuffer
    weights: HostBuffer
    master: HostBuffer  # the weights themselves where they are in fp32
    exp_avg: HostBuffer
    exp_avg_sq: HostBuffer


class LayerUpdate:
    """A layer's update to come: its ``settings`` (by group), ``scale`` and ``steps``."""

    def __init__(self, settings: list[dict]) -> None:
        self.settings = settings
        self.scale = 1.0  # of the gradients
        self.steps = None  # by parameter: which update this is; None until it starts
        self.waiting = 0  # blocks that no thread has begun
        self.left = 0  # blocks that have not ended
        self.versions = []  # of the layer's parameters, when it was announced
        self.error = None  # what kept a block from being updated
        self.number = 0  # which update of its layer it is, where ranks of a host share that
        self.ended = Future()


class HostUpdates(LayerUpdates):
    """AdamW for the layers of a streamed model, on threads of the host.

    Args:
        streamed: the model.
        group_of: for each trained parameter of the layers the number of its settings.
        threads: of the host; all cores of this rank but one if None.
        allocate: where the memory of masters and moments comes from, bytes -> mmap.

    ``state[parameter]`` are in fp32 its ``step``, its ``master`` and its moments.
    """

    takes_sums = True

    def __init__(
        self,
        streamed,
        group_of: dict,
        threads: int | None = None,
        allocate: Callable[[int], mmap.mmap] = private_memory,
    ) -> None:
        if streamed.optimizer:
            raise ValueError("this model has an optimizer: close it, and make both again")
        super().__init__(streamed)
        self.refuse_without_room(self.bytes_of_state(), "masters and moments of layers")
        self.group_of = group_of
        self.allocate = allocate
        self.state = {}
        # By layer: how often each of its trained parameters has been updated.
        self.steps = []
        for layer in streamed.layers:
            self.steps.append(torch.zeros(len(layer.trained), dtype=pieces.FP32, device="cpu"))
        self.buffers = []  # by layer
        for layer, steps in zip(streamed.layers, self.steps, strict=True):
            self.buffers.append(self.take(layer, steps))
        # By layer some elements of weights and of their masters; by parameter, how often something
        # else had changed it when its master was the same.
        self.few = [self.few_of(buffers) for buffers in self.buffers]
        self.seen = {parameter: parameter._version for parameter in self.state}
        self.blocks = [self.cut(layer) for layer in range(len(streamed.layers))]

        self.due = []  # a heap of layers whose blocks wait for a thread, the lowest first
        self.lock = threading.Lock()
        self.of_thread = threading.local()
        self.threads = threads or pieces.host_threads()
        self.update = pieces.without_lock(pieces.update_pieces)
        self.workers = ThreadPoolExecutor(self.threads, "adam", torch.set_num_threads, (1,))
        self.arrivals = ThreadPoolExecutor(1, "arrivals")
        self.arrivals.submit(streamed.streams.set_device, streamed.streams.current_device())

        self.updates = {}  # by layer: its latest update
        self.latest = Future()  # of the latest step: what its thread of arrivals did
        self.latest.set_result(None)

        streamed.follower = self

    def bytes_of_state(self) -> int:
        """What masters and moments of the layers will take of the host for this rank."""
        nbytes = 0
        for layer in self.streamed.layers:
            for parameter in layer.trained.values():
                nbytes += 2 * pieces.FP32.itemsize * parameter.numel()
                if parameter.dtype != pieces.FP32:
                    nbytes += pieces.FP32.itemsize * parameter.numel()
        return nbytes // self.ranks_of_copy(self.streamed)

    def ranks_of_copy(self, streamed) -> int:
        """How many ranks have one copy together."""
        return 1

    def take(self, layer, steps: torch.Tensor) -> list[_Buffers]:
        """Buffers of a ``HostLayer``: gradients, weights, and new ones of masters and moments."""
        missing = [name for name, p in layer.trained.items() if p not in self.group_of]
        if missing:
            raise ValueError(f"give all parameters that are trained; it lacks {missing}")
        taken = []
        step_of = dict(zip(layer.trained, steps.unbind(), strict=True))
        # What is frozen comes last among the weights, and has no gradients.
        for weights, gradients in zip(layer.weights, layer.gradients, strict=False):
            like = {name: layer.trained[name] for name in weights.shapes}
            cpu = torch.device("cpu")  # no device reads what is new: it is not page-locked
            exp_avg = HostBuffer(like, pieces.FP32, cpu, self.allocate)
            exp_avg_sq = HostBuffer(like, pieces.FP32, cpu, self.allocate)
            master = weights
            if weights.flat.dtype != torch.float32:
                master = HostBuffer(like, pieces.FP32, cpu, self.allocate)
                master.flat.copy_(weights.flat)
            for name, parameter in like.items():
                self.state[parameter] = {
                    "step": step_of[name],
                    "master": master.views[name],
                    "exp_avg": exp_avg.views[name],
                    "exp_avg_sq": exp_avg_sq.views[name],
                }
            taken.append(_Buffers(gradients, weights, master, exp_avg, exp_avg_sq))
        return taken

    def cut(self, layer: int) -> list[tuple]:
        """A layer's blocks: the parameter's number, its group, and a slice of each buffer."""
        blocks = []
        trained = self.streamed.layers[layer].trained
        numbers = {name: number for number, name in enumerate(trained)}
        for buffers in self.buffers[layer]:
            weights = buffers.weights
            for (name, shape), begin in zip(weights.shapes.items(), weights.offsets, strict=True):
                # Without the room behind it: torch's kernel rounds its last elements otherwise.
                end = begin + shape.numel()
                group = self.group_of[trained[name]]
                for at in range(begin, end, BLOCK):
                    part = slice(at, min(at + BLOCK, end))
                    slices = [buffer.flat[part] for buffer in buffers]
                    blocks.append((numbers[name], group, *slices))
        return blocks

    # The training thread

    def few_of(self, buffers: list[_Buffers]) -> list[tuple]:
        """Of weights that have a master of their own: a few elements, with the master's."""
        few = []
        for each in buffers:
            if each.master is not each.weights:
                few.append((each.weights.few_of_each(), each.master.few_of_each()))
        return few

    def is_changed(self, layer: int) -> bool:
        """Whether something else has changed a layer's weights since its last update."""
        if self.is_counted(layer):
            return True
        for weights, masters in self.few[layer]:
            here = torch.cat(weights)
            if not torch.equal(here, torch.cat(masters).to(here.dtype)):
                return True
        return False

    def take_changes(self, layer: int) -> None:
        """Let masters be the weights where something else has changed these since the update."""
        if not self.is_changed(layer):
            return
        self.note_masters(self.streamed.layers[layer].trained.values())
        for buffers in self.buffers[layer]:
            if buffers.master is not buffers.weights:
                pieces.take_changes(buffers.master.flat, buffers.weights.flat)

    def announce(self, layers: Iterable[int], settings: list[dict]) -> dict[int, LayerUpdate]:
        """Layers that are going to be updated: from here on, their next load waits for it."""
        announced = {layer: LayerUpdate(settings) for layer in layers}
        for layer, update in announced.items():
            update.versions = self.versions(layer)
        self.updates |= announced
        self.let_go(announced)
        return announced

    def may_load(self, layer: int) -> bool:
        """Whether a load now would not wait; if it would, it is made when the layer is called."""
        return layer not in self.updates or self.updates[layer].ended.done()

    def before_load(self, layer: int) -> None:
        """Wait until a layer is updated; raises what kept it from that."""
        self.check()
        if layer in self.updates:
            self.updates[layer].ended.result()

    def check(self) -> None:
        """Raise what kept the latest step from being a whole one, as far as that is known."""
        if self.latest.done():
            self.latest.result()

    def before_host(self, raises: bool) -> None:
        """Wait until all that was announced is updated, or has failed."""
        error = self.latest.exception()
        with self.lock:  # what an interrupted step has announced may never begin
            for layer, update in self.updates.items():
                if update.steps is None:
                    self.end(layer, update, error)
        errors = [error]
        for update in self.updates.values():
            errors.append(update.ended.exception())
        if not raises:
            return
        for error in errors:
            if error:
                raise error

    def has_failed(self) -> bool:
        """Whether the latest step was no whole one; waits for what tells."""
        return self.latest.exception() is not None

    def begin_load(self) -> None:
        """Before weights and state are loaded: wait for updates, failed or not."""
        self.streamed.wait(raises=False)

    def end_load(self) -> None:
        """When they are loaded."""
        self.note_masters(list(self.seen))
        self.forget()

    def forget(self) -> None:
        """Go on as if nothing had been announced or gone wrong: all weights are others now."""
        self.updates = {}
        self.latest = Future()
        self.latest.set_result(None)

    @contextmanager
    def later(self, work: Callable, layers: Iterable[int], settings: list[dict], *args) -> Iterator:
        """Have layers updated when ``work(announced, *args)`` starts it on the thread of arrivals.

        From here on, loads of these layers wait for their updates. If ``work`` raises, whoever
        waits gets that error. The block is a part of the same step: until it ends without an error,
        the step counts as interrupted, and whoever waits is told to load a checkpoint.
        """
        interrupted = Future()
        interrupted.set_exception(RuntimeError("a step was interrupted: load a checkpoint"))
        self.latest = interrupted  # before loads wait for what may never begin
        announced = self.announce(layers, settings)
        arrived = self.arrivals.submit(partial(self.run_or_drop, announced, work, args))
        yield
        self.latest = arrived

    def run_or_drop(self, announced: dict[int, LayerUpdate], work: Callable, args: tuple) -> None:
        """The thread of arrivals: call ``work``; who waits for these layers gets what it raises."""
        try:
            work(announced, *args)
        except BaseException as error:
            self.drop(announced, error)
            raise

    # Any thread, when the gradients are on the host

    def start(self, announced: dict[int, LayerUpdate], scale: float = 1.0) -> None:
        """Hand out the blocks of all layers; gradients are multiplied by ``scale``."""
        for layer, update in announced.items():
            with self.lock:
                if update.ended.done():  # a step that was interrupted
                    continue
                self.steps[layer] += 1
                weights = [buffers.weights.flat for buffers in self.buffers[layer]]
                torch.autograd.graph.increment_version(weights)
                update.steps = self.steps[layer].clone()
                update.scale = scale
                update.waiting = len(self.blocks[layer])
                update.left = update.waiting
                if update.left == 0:
                    self.end(layer, update)
                else:
                    heappush(self.due, (layer, id(update), update))  # ``id`` for equal layers
        for _ in range(self.threads):
            self.workers.submit(self.work)

    def drop(self, announced: dict, error: BaseException | None = None) -> None:
        """Update none of these layers; whoever waits for one gets the error, if there is one."""
        with self.lock:  # a thread that waits may end them, too
            for layer, update in announced.items():
                self.end(layer, update, error)

    def end(self, layer: int, update: LayerUpdate, error: BaseException | None = None) -> None:
        """Let those go on who wait for a layer; the caller holds the lock."""
        if update.ended.done():
            return
        if error:
            update.ended.set_exception(error)
        else:
            update.ended.set_result(None)

    # The threads of the host

    def work(self) -> None:
        """Update blocks of the lowest layer that is due, until none is."""
        while True:
            with self.lock:
                if not self.due:
                    return
                layer, _, update = self.due[0]
                update.waiting -= 1
                number = update.waiting  # of the block: the last one is begun first
                if number == 0:
                    heappop(self.due)
            try:
                self.update_block(layer, number, update)
            except BaseException as error:
                update.error = error
            with self.lock:
                update.left -= 1
                if update.left == 0:
                    error = update.error or self.error_of_changes(layer, update.versions)
                    self.end(layer, update, error)

    def update_block(self, layer: int, number: int, update: LayerUpdate) -> None:
        if not hasattr(self.of_thread, "scratch"):
            self.of_thread.scratch = torch.empty(pieces.PIECE, dtype=pieces.FP32, device="cpu")
        parameter, group, *block = self.blocks[layer][number]
        numbers = pieces.numbers_of(update.settings[group], update.scale)
        step = update.steps[parameter]
        block.append(self.of_thread.scratch)
        pieces.update_block(self.update, block, step, numbers)

    def close(self) -> None:
        """End the threads, and let the model stream without them."""
        self.arrivals.shutdown()
        self.workers.shutdown()
        self.buffers = []  # and with these the memory of gradients
        self.blocks = []
        self.few = []
        self.streamed.follower = Follower()
