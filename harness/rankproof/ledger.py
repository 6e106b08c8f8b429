"""The ledger of saves: what a rank passed to DCP, hashed at the call, to be found on disk later.

It stands between the recipe and ``dcp.save`` / ``dcp.async_save`` and changes neither, once the
recipe has imported them. It never raises into a recipe: what it cannot judge it notes as such.
Each line of a rank's ``.notes`` file is one event as JSON, written at once, so that it outlives an
abort.
"""

import concurrent.futures
import contextlib
import ctypes
import hashlib
import json
import os
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rankproof.imports import DCP, after_import, called_by_recipe

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


def pickled_sha256(value: object) -> str:
    return hashlib.sha256(pickle.dumps(value)).hexdigest()


def why_not_loaded(writer: object, directory: object) -> str:
    """Why a save cannot be loaded back by :mod:`rankproof.load_back`, empty if it can."""
    names = {kind.__name__ for kind in type(writer).__mro__}
    if writer is not None and (
        "FileSystemWriter" not in names or names & {"FsspecWriter", "HuggingFaceStorageWriter"}
    ):
        return f"written by {type(writer).__name__}, not loaded back"
    if not directory:
        return "written to no path that the harness knows, not loaded back"
    if "://" in str(directory):
        return f"written to {directory}, not loaded back"
    return ""


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
        self.called_back = False
        self.clones: dict[str, dict] = {}

    @property
    def in_flight(self) -> bool:
        return self.upload is not None and not self.upload_done()

    def awaited(self, phase: str) -> None:
        self.end_known |= phase == "upload"
        for listener in self.on_await:
            listener(phase)


class _StatefulSpy:
    """Passes calls on to a Stateful and shows its state dict to the ledger."""

    def __init__(self, inner: Any, key: str, save: Save, ledger: "Ledger") -> None:
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
        self.run_dir = notes.parent.parent
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
        after_import(DCP, self._install_saves)
        self._wait, self._as_completed = concurrent.futures.wait, concurrent.futures.as_completed
        for module in (concurrent.futures, concurrent.futures._base):
            module.wait, module.as_completed = self._spy_wait, self._spy_as_completed
        self._init_process_group = dist.init_process_group
        for module in (dist, dist.distributed_c10d):
            module.init_process_group = self._spy_init

    def _install_saves(self) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint import state_dict_saver

        self._save, self._async_save = dcp.save, dcp.async_save
        dcp.save = self._spy_save
        for module in (dcp, state_dict_saver):
            module.async_save = self._spy_async_save
        state_dict_saver.save = self._spy_upload

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
        unjudged = why_not_loaded(writer, directory)
        place = str(directory) if unjudged else os.path.abspath(os.fspath(directory))
        save = Save(len(self.saves), place, kind)
        group = kwargs.get("process_group")
        shared = dist.is_initialized() and group in (None, dist.group.WORLD)
        self.note(
            "save",
            number=save.number,
            kind=kind,
            directory=save.directory,
            shares_training_group=bool(shared),
            unjudged=unjudged,
        )
        for listener in self.on_save:
            listener(save)
        self.saves.append(save)
        stateful = [k for k, v in state_dict.items() if _is_stateful(v)]
        self.capture(save, {k: v for k, v in state_dict.items() if k not in stateful})
        spied = {k: _StatefulSpy(state_dict[k], k, save, self) for k in stateful}
        return save, self.extra_state(save) | state_dict | spied

    def _spy_save(self, state_dict: dict, **kwargs: Any) -> Any:
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
        if uploads and not called_by_recipe():
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
    def _watched_staging(self, save: Save, stager: Any) -> Iterator[None]:
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
            if called_by_recipe():
                if is_done:
                    self._note_await(save, "upload")
                else:
                    for listener in save.on_poll:
                        listener()
            return is_done

        def call_back(callback: Callable[[Future], object]) -> None:
            add_done_callback(callback)
            save.called_back = True
            for listener in save.on_callback:
                listener()

        future.done, future.add_done_callback = done, call_back

    def last_line(self) -> None:
        """The recipe has reached its last line."""
        for listener in self.on_end:
            listener()

    # What was passed

    def capture(self, save: Save, state_dict: dict[str, Any]) -> None:
        """Note the bits of every leaf, as they are now on the calling thread's stream.

        An accelerator's tensors are cloned in stream order and hashed when the recipe has ended:
        copying them now would synchronise, and synchronising hides the very error looked for.
        """
        leaves: dict[str, Any] = {}
        try:
            for name, value in self._flat(state_dict).items():
                try:
                    self._leaf(save, name, value, leaves)
                except Exception as error:  # the harness's own trouble is no trouble of the recipe
                    leaves[name] = {"unjudged": f"{type(value).__name__}: {error!r}"[:200]}
        except Exception as error:
            leaves["(all)"] = {"unjudged": f"the state dict is not read: {error!r}"[:200]}
        self.note("leaves", number=save.number, leaves=leaves)

    @staticmethod
    def _flat(state_dict: dict[str, Any]) -> dict[str, Any]:
        from torch.distributed.checkpoint._nested_dict import flatten_state_dict

        return flatten_state_dict(state_dict)[0]

    def _leaf(self, save: Save, name: str, value: Any, leaves: dict[str, Any]) -> None:
        parts = [(None, value)]
        if hasattr(value, "__create_chunk_list__"):  # a DTensor
            chunks = value.__create_chunk_list__()
            parts = [([list(c.offsets), list(c.sizes)], value.to_local()) for c in chunks[:1]]
        elif hasattr(value, "local_shards"):  # a ShardedTensor
            parts = [
                ([list(s.metadata.shard_offsets), list(s.metadata.shard_sizes)], s.tensor)
                for s in value.local_shards()
            ]
        for number, (chunk, part) in enumerate(parts):
            key = f"{name}#{number}" if number else name
            of = {"of": name} if number else {}
            if not isinstance(part, torch.Tensor):
                if is_plain(part):
                    leaves[key] = {"value": repr(part)}
                else:
                    with contextlib.suppress(TypeError, AttributeError, pickle.PicklingError):
                        leaves[key] = {"pickle": pickled_sha256(part), "type": type(part).__name__}
            elif part.device.type == "cpu":
                leaves[key] = {"chunk": chunk, "sha256": tensor_sha256(part)} | of
            else:
                save.clones[key] = {"chunk": chunk, "tensor": part.detach().clone()} | of

    def hash_clones(self) -> None:
        """Hash what was cloned on an accelerator."""
        for save in self.saves:
            leaves = {
                name: clone | {"sha256": tensor_sha256(clone.pop("tensor"))}
                for name, clone in save.clones.items()
            }
            save.clones.clear()
            if leaves:
                self.note("leaves", number=save.number, leaves=leaves)

    def close(self, finished: bool) -> None:
        """The interpreter ends: what was not awaited by now never is."""
        self.hash_clones()
        for save in self.saves:
            known = save.end_known or (save.called_back and not save.in_flight)
            if finished and save.upload is not None and not known:
                self.note("never_awaited", number=save.number)
        with self.lock:
            self.notes.close()


def _is_stateful(value: object) -> bool:
    from torch.distributed.checkpoint.stateful import Stateful

    return isinstance(value, Stateful)
