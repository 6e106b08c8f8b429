"""The ledger of saves: what a rank passed to DCP, hashed at the call, to be found on disk later.

It stands between the recipe and ``dcp.save`` / ``dcp.async_save`` and changes neither. Each line of
a rank's ``.notes`` file is one event as JSON, written at once, so that it outlives an abort.
"""

import concurrent.futures
import contextlib
import ctypes
import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

TORCH = str(Path(torch.__file__).parent)
HARNESS = str(Path(__file__).parent)
GATE_KEY = "harness_gate"  # entries under it are the harness's own and are not compared


def tensor_sha256(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's elements in row-major order, whatever its dtype or strides."""
    tensor = tensor.detach().cpu().contiguous()
    size = tensor.numel() * tensor.element_size()
    buffer = (ctypes.c_char * size).from_address(tensor.data_ptr()) if size else b""
    return hashlib.sha256(buffer).hexdigest()


def is_plain(value: object) -> bool:
    """Whether the repr of a value says all about it."""
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(is_plain, value))
    return isinstance(value, (int, float, str, bytes, bool, type(None)))


def by_recipe() -> bool:
    """Whether the caller of the function that asks was called by neither torch nor the harness."""
    return not sys._getframe(2).f_code.co_filename.startswith((TORCH, HARNESS))


class Save:
    """One call of ``dcp.save`` or ``dcp.async_save`` on this rank."""

    def __init__(self, number: int, directory: str, kind: str) -> None:
        self.number = number
        self.directory = directory
        self.kind = kind
        self.upload: Future | None = None
        self.staging: Future | None = None
        self.uploading = False
        self.upload_done: Callable[[], bool] = lambda: True  # asks without being seen to ask
        self.end_known = False  # whether the recipe waited for the upload, or saw that it is done
        self.on_await: list[Callable[[str], None]] = []  # called with "staging" or "upload"
        self.on_poll: list[Callable[[], None]] = []  # the recipe saw that the upload is not done
        self.on_callback: list[Callable[[], None]] = []  # the recipe asked to be called at its end
        self.clones: dict[str, dict] = {}

    @property
    def in_flight(self) -> bool:
        return self.upload is not None and not self.upload_done()

    def awaited(self, phase: str) -> None:
        self.end_known |= phase == "upload"
        for listener in self.on_await:
            listener(phase)


class _StatefulSpy(Stateful):
    """Passes calls on to a Stateful and shows its state dict to the ledger."""

    def __init__(self, inner: Stateful, key: str, save: Save, ledger: "Ledger") -> None:
        self.inner, self.key, self.save, self.ledger = inner, key, save, ledger

    def state_dict(self) -> dict[str, Any]:
        state_dict = self.inner.state_dict()
        self.ledger.capture(self.save, {self.key: state_dict})
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


class Ledger:
    """Records this rank's saves; gates listen to it."""

    def __init__(self, notes: Path) -> None:
        self.notes = open(notes, "w", encoding="utf-8")  # noqa: SIM115 (open until close())
        self.lock = threading.Lock()
        self.saves: list[Save] = []
        self.backend: str | None = None
        self.extra_state: Callable[[Save], dict[str, Any]] = lambda save: {}
        self.on_save: list[Callable[[Save], None]] = []
        self.on_upload: list[Callable[[Save], None]] = []
        self.on_end: list[Callable[[], None]] = []

    def note(self, event: str, **values: Any) -> None:
        with self.lock:
            if not self.notes.closed:
                self.notes.write(json.dumps({"event": event, **values}) + "\n")
                self.notes.flush()

    def device(self) -> str:
        """This rank's accelerator by name, or "CPU"."""
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            return "CPU"
        return torch.get_device_module(accelerator).get_device_name()

    # Between the recipe and torch

    def install(self) -> None:
        """Replace the public entry points, in every module a recipe may take them from."""
        self._save, self._async_save = dcp.save, dcp.async_save
        self._wait, self._as_completed = concurrent.futures.wait, concurrent.futures.as_completed
        dcp.save = self._spy_save
        for module in (dcp, state_dict_saver):
            module.async_save = self._spy_async_save
        state_dict_saver.save = self._spy_upload
        for module in (concurrent.futures, concurrent.futures._base):
            module.wait, module.as_completed = self._spy_wait, self._spy_as_completed
        self._init_process_group = dist.init_process_group
        for module in (dist, dist.distributed_c10d):
            module.init_process_group = self._spy_init

    def _spy_init(self, *args: Any, **kwargs: Any) -> None:
        self._init_process_group(*args, **kwargs)
        pairs = (pair.split(":") for pair in str(dist.get_backend_config()).split(","))
        present = {
            "cpu",
            getattr(torch.accelerator.current_accelerator(check_available=True), "type", "cpu"),
        }
        backends = {backend for device, backend in pairs if device in present}
        self.backend = " + ".join(sorted(backends, reverse=True))

    def _begin(self, kind: str, state_dict: dict, kwargs: dict) -> tuple[Save, dict]:
        writer = kwargs.get("storage_writer")
        directory = kwargs.get("checkpoint_id") or getattr(writer, "path", "")
        save = Save(len(self.saves), os.path.abspath(os.fspath(directory)), kind)
        group = kwargs.get("process_group")
        shared = dist.is_initialized() and group in (None, dist.group.WORLD)
        self.note(
            "save",
            number=save.number,
            kind=kind,
            directory=save.directory,
            shares_training_group=bool(shared),
        )
        for listener in self.on_save:
            listener(save)
        self.saves.append(save)
        plain = {k: v for k, v in state_dict.items() if not isinstance(v, Stateful)}
        self.capture(save, plain)
        spied = {
            k: _StatefulSpy(v, k, save, self) if isinstance(v, Stateful) else v
            for k, v in state_dict.items()
        }
        return save, self.extra_state(save) | spied

    def _spy_save(self, state_dict: dict, **kwargs: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return self._save(state_dict, **kwargs)
        save, state_dict = self._begin("save", state_dict, kwargs)
        try:
            result = self._save(state_dict, **kwargs)
        except BaseException as error:
            self.note("failed", number=save.number, error=repr(error), seen=True)
            raise
        self.note("written", number=save.number)
        return result

    def _spy_upload(self, state_dict: dict, **kwargs: Any) -> Any:
        """``state_dict_saver.save``: an upload thread calls it once its state is staged."""
        writer, directory = kwargs.get("storage_writer"), kwargs.get("checkpoint_id")
        directory = os.path.abspath(os.fspath(directory or getattr(writer, "path", "")))
        uploads = [s for s in self.saves if s.directory == directory and s.kind == "async_save"]
        if threading.current_thread() is not threading.main_thread() and uploads:
            save = uploads[-1]
            beside = [s.number for s in self.saves if s.uploading and s.in_flight and s is not save]
            self.note("upload", number=save.number, beside=beside)
            save.uploading = True
            for listener in self.on_upload:
                listener(save)
            return self._save(state_dict, **kwargs)
        return self._spy_save(state_dict, **kwargs)  # the recipe calls it by this name

    def _spy_wait(self, fs: Iterable[Future], *args: Any, **kwargs: Any) -> Any:
        futures = list(fs)
        self._await_uploads(futures)
        return self._wait(futures, *args, **kwargs)

    def _spy_as_completed(
        self, fs: Iterable[Future], *args: Any, **kwargs: Any
    ) -> Iterator[Future]:
        futures = list(fs)
        self._await_uploads(futures)
        yield from self._as_completed(futures, *args, **kwargs)

    def _await_uploads(self, futures: list[Future]) -> None:
        for save in self.saves:
            if save.upload in futures:
                self._note_await(save, "upload")

    def _note_await(self, save: Save, phase: str) -> None:
        self.note("awaited", number=save.number, phase=phase)
        save.awaited(phase)

    def _spy_async_save(self, state_dict: dict, **kwargs: Any) -> Any:
        save, state_dict = self._begin("async_save", state_dict, kwargs)
        stager = kwargs.get("async_stager")
        try:
            with self._watched_staging(save, stager):
                response = self._async_save(state_dict, **kwargs)
        except BaseException as error:
            self.note("failed", number=save.number, error=repr(error), seen=True)
            raise
        save.upload = getattr(response, "upload_completion", response)
        unspied = save.upload.exception
        save.upload.add_done_callback(lambda _: self._ended(save, unspied()))
        save.staging = getattr(response, "staging_completion", None)
        save.upload_done = save.upload.done
        self._watch(save, "upload", save.upload)
        self._watch_end(save, save.upload)
        if save.staging is not None:
            self._watch(save, "staging", save.staging)
        return response

    @contextlib.contextmanager
    def _watched_staging(self, save: Save, stager: AsyncStager | None) -> Iterator[None]:
        """Watch the future that the stager itself returns: a recipe may keep it and wait for it."""
        if stager is None:
            yield
            return
        stage = stager.stage

        def watched(*args: Any, **kwargs: Any) -> Any:
            staged = stage(*args, **kwargs)
            if isinstance(staged, Future):
                self._watch(save, "staging", staged)
            return staged

        stager.stage = watched
        try:
            yield
        finally:
            del stager.stage

    def _ended(self, save: Save, error: BaseException | None) -> None:
        if error is None:
            self.note("written", number=save.number)
        else:
            self.note("failed", number=save.number, error=repr(error), seen=False)

    def _watch(self, save: Save, phase: str, future: Future) -> None:
        """Note when the recipe waits for ``future``: only then does it learn of an error.

        DCP's own thread waits for staging, never for the upload.
        """
        original = {"result": future.result, "exception": future.exception}

        def waiting(method: str) -> Callable:
            def wait(timeout: float | None = None) -> Any:
                if phase == "upload" or threading.current_thread() is threading.main_thread():
                    self._note_await(save, phase)
                return original[method](timeout)

            return wait

        future.result, future.exception = waiting("result"), waiting("exception")

    def _watch_end(self, save: Save, future: Future) -> None:
        """See the recipe ask whether the upload is done, or ask to be called when it is.

        Torch's own callbacks are registered before.
        """
        add_done_callback = future.add_done_callback

        def done() -> bool:
            is_done = save.upload_done()
            if by_recipe():
                if is_done:
                    self._note_await(save, "upload")
                else:
                    for listener in save.on_poll:
                        listener()
            return is_done

        def call_back(callback: Callable[[Future], object]) -> None:
            add_done_callback(callback)
            for listener in save.on_callback:
                listener()

        future.done, future.add_done_callback = done, call_back

    def end(self) -> None:
        """The recipe has reached its last line."""
        for listener in self.on_end:
            listener()

    # What was passed

    def capture(self, save: Save, state_dict: dict[str, Any]) -> None:
        """Note the bits of every leaf, as they are now on the calling thread's stream.

        An accelerator's tensors are cloned in stream order and hashed when the recipe has ended:
        copying them now would synchronise, and synchronising hides the very error looked for.
        """
        leaves = {}
        for name, value in flatten_state_dict(state_dict)[0].items():
            chunk = None
            if isinstance(value, DTensor):
                chunks = value.__create_chunk_list__()
                chunk = [list(chunks[0].offsets), list(chunks[0].sizes)] if chunks else None
                value = value.to_local()
                if chunk is None:
                    continue
            if isinstance(value, torch.Tensor):
                if value.device.type == "cpu":
                    leaves[name] = {"chunk": chunk, "sha256": tensor_sha256(value)}
                else:
                    save.clones[name] = {"chunk": chunk, "tensor": value.detach().clone()}
            elif is_plain(value):
                leaves[name] = {"value": repr(value)}
        self.note("leaves", number=save.number, leaves=leaves)

    def close(self) -> None:
        """Hash what was cloned on an accelerator, and end the notes."""
        for save in self.saves:
            leaves = {
                name: {"chunk": clone["chunk"], "sha256": tensor_sha256(clone["tensor"])}
                for name, clone in save.clones.items()
            }
            if leaves:
                self.note("leaves", number=save.number, leaves=leaves)
        with self.lock:
            self.notes.close()
