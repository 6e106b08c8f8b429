"""Reads and writes of memory that are no operators, and where memory comes from and goes to."""

import ctypes
import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch
from torch.jit._builtins import _find_builtin, _register_builtin
from torch.utils._device import _device_constructors

from rankproof.imports import called_by_recipe
from rankproof.streams.lanes import Stream
from rankproof.streams.lines import DISPATCHERS
from rankproof.streams.operators import PLAIN, tensors_in
from rankproof.streams.places import made_by_host, moved
from rankproof.streams.recorder import Recorder

FACTORIES = ("tensor", "as_tensor", "from_numpy", "arange", "linspace", "eye", "full", "ones")
FACTORIES += ("zeros", "rand", "randn", "randint", "randperm", "empty")


class BesideOperators:
    """What stands around the functions that touch memory without an operator."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def watch(self) -> None:
        recorder = self.recorder
        recorder.watch(torch, "frombuffer", after=self.mapped)
        recorder.watch(torch, "save", partial(self.saved, "torch.save"))
        if find_spec("safetensors"):
            safetensors = import_module("safetensors.torch")
            for name in ("save", "save_file"):
                recorder.watch(safetensors, name, partial(self.saved, "safetensors"))
        recorder.watch(os, "pwritev", self.written)
        for name in ("tolist", "numpy", "__array__", "__dlpack__", "__repr__", "__format__"):
            shown = name.strip("_")
            recorder.watch(torch.Tensor, name, partial(self.read_by_python, shown))
        recorder.watch(torch.Tensor, "to", after=partial(moved, recorder))
        recorder.replace(torch.UntypedStorage, "resize_", self.resize_storage_instead())
        recorder.replace(torch.Tensor, "record_stream", self.record_stream_instead())
        _device_constructors()  # torch.device("meta") keeps those that its first use finds
        for name in FACTORIES:
            original = getattr(torch, name)
            by = made_by_host(recorder, original)
            recorder.replace(torch, name, by)
            self.have_torchscript_know(by, original)

    def mapped(self, tensor: torch.Tensor | None, *_: object, **__: object) -> None:
        if tensor is not None:
            with self.recorder.lock:
                self.recorder.region_of(tensor).on_host = True

    def saved(self, by: str, value: object, *_: object, **__: object) -> None:
        """A tensor that is pickled gives its storage to ``torch.save``."""
        storage = getattr(value, "_untyped_storage", value)
        if isinstance(storage, torch.UntypedStorage):
            by = "pickle"
            value = torch.empty(0, dtype=torch.uint8).set_(storage)
        self.read(by, list(tensors_in(value)))

    def read_by_python(self, name: str, tensor: torch.Tensor, *_: object, **__: object) -> None:
        if type(tensor) in PLAIN and called_by_recipe(DISPATCHERS):
            self.read(name, list(tensors_in(tensor)))

    def read(self, name: str, tensors: list[torch.Tensor]) -> None:
        """On the calling thread: host memory as it is by now, a device's after waiting."""
        recorder = self.recorder
        thread = recorder.this_thread()
        with recorder.lock:
            if not all(map(recorder.is_read_by_host, tensors)):
                thread.wait_for_current_stream()
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

    def resize_storage_instead(self) -> Callable[[torch.UntypedStorage, int], object]:
        recorder = self.recorder
        plain_resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> object:
            with recorder.resizing(storage):
                return plain_resize(storage, size)

        return resize_

    def record_stream_instead(self) -> Callable[[torch.Tensor, Stream], None]:
        recorder = self.recorder

        def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
            with recorder.lock:
                recorder.region_of(tensor).used_by |= {stream.lane}

        return record_stream

    def have_torchscript_know(self, by: Callable, original: Callable) -> None:
        """A scripted function that names ``by`` gets the operator of ``original``."""
        operator = _find_builtin(original)
        if operator is not None:
            _register_builtin(by, operator)
            self.recorder.undo.callback(_register_builtin, by, None)
