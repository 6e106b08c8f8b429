"""Reads and writes of memory that are no operators, and where memory comes from and goes to."""

import ctypes
import os
from collections.abc import Callable
from functools import partial

import torch

from rankproof.imports import called_by_recipe
from rankproof.streams.lanes import Stream
from rankproof.streams.lines import DISPATCHERS
from rankproof.streams.operators import PLAIN, tensors_in
from rankproof.streams.recorder import Recorder

FACTORIES = ("tensor", "as_tensor", "from_numpy", "arange", "linspace", "eye", "full", "ones")
FACTORIES += ("zeros", "rand", "randn", "randint", "randperm")


class BesideOperators:
    """What stands around the functions that touch memory without an operator."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def watch(self) -> None:
        recorder = self.recorder
        recorder.watch(torch, "frombuffer", after=self.mapped)
        recorder.watch(torch, "save", self.saved)
        recorder.watch(os, "pwritev", self.written)
        for name in ("tolist", "numpy", "__repr__", "__format__"):
            shown = name.strip("_")
            recorder.watch(torch.Tensor, name, partial(self.read_by_python, shown))
        recorder.watch(torch.UntypedStorage, "resize_", self.resized)
        recorder.replace(torch.Tensor, "record_stream", self.record_stream_instead())
        for name in FACTORIES:
            recorder.replace(torch, name, self.makes_host_values(getattr(torch, name)))

    def mapped(self, tensor: torch.Tensor | None, *_: object, **__: object) -> None:
        if tensor is not None:
            self.recorder.region_of(tensor).on_host = True

    def saved(self, value: object, *_: object, **__: object) -> None:
        """Whoever saves on the main thread waits for its stream; another thread does not."""
        self.read("torch.save", list(tensors_in(value)), self.recorder.this_thread().is_main)

    def read_by_python(self, name: str, tensor: torch.Tensor, *_: object, **__: object) -> None:
        if type(tensor) in PLAIN and called_by_recipe(DISPATCHERS):
            self.read(name, [tensor], waits=True)

    def read(self, name: str, tensors: list[torch.Tensor], waits: bool) -> None:
        """On the calling thread: host memory as it is by now, a device's after waiting."""
        recorder = self.recorder
        thread = recorder.this_thread()
        with recorder.lock:
            if waits and not all(map(recorder.on_host, tensors)):
                thread.learn(thread.current.clock)
            thread.launch(thread)
            for tensor in tensors:
                recorder.access(name, tensor, False, thread, thread.line())

    def written(self, _: int, buffers: list, *__: object) -> None:
        """A system call reads memory as it is by now, on whatever thread."""
        recorder = self.recorder
        thread = recorder.this_thread()
        with recorder.lock:
            thread.launch(thread)
            for buffer in buffers:
                if isinstance(buffer, memoryview) and buffer.nbytes and not buffer.readonly:
                    start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
                    recorder.read_at("os.pwritev", start, buffer.nbytes, thread, thread.line())

    def resized(self, storage: torch.UntypedStorage, size: int) -> None:
        """Shrinking a storage gives its memory back, in the order of the current lane.

        What it grows to is other memory, even where the CPU gives the same address again: a caching
        allocator may take it from another stream's pool.
        """
        recorder = self.recorder
        if size >= storage.nbytes() or storage.device.type != "cpu":
            return
        thread = recorder.this_thread()
        whole = torch.empty(0, dtype=torch.uint8).set_(storage)
        with recorder.lock:
            thread.current.launch(thread)
            recorder.access("resize_", whole, True, thread.current, thread.line())
            region = recorder.memory.region_of(storage)
            region.home = None  # given back, in order, now
            recorder.memory.forget(region)

    def record_stream_instead(self) -> Callable[[torch.Tensor, Stream], None]:
        recorder = self.recorder

        def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
            with recorder.lock:
                recorder.region_of(tensor).used_by.add(stream.lane)

        return record_stream

    def makes_host_values(self, factory: Callable) -> Callable:
        """``factory``, whose tensor the host makes where no device is named."""
        recorder = self.recorder

        def call(*args, **kwargs):
            thread = recorder.this_thread()
            before = thread.makes_host_values
            thread.makes_host_values = kwargs.get("device") is None
            try:
                return factory(*args, **kwargs)
            finally:
                thread.makes_host_values = before

        return call
