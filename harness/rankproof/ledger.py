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
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rankproof.errors import summary
from rankproof.imports import DCP, after_import, around, called_by_recipe
from rankproof.saves import is_unfinished

DONE, EXCEPTION = Future.done, Future.exception  # as they are when nobody sees who asks
OWN_WRITER = "a writer of its own"
GATE_KEY = "harness_gate"  # entries under it are the harness's own and are not compared
ASKS_S = 1.0  # a wait that gives up sooner only asks, as done() does
MOST_COPIED = 256 * 2**20  # bytes of a checkpoint that a later save is about to overwrite


def tensor_sha256(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's elements in row-major order, whatever its dtype or strides.

    A view that negates or conjugates has other bits in its storage than its elements have.
    """
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
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


@dataclass(eq=False)
class Save:
    """One call of ``dcp.save`` or ``dcp.async_save`` on this rank.

    Its listeners are called when the recipe awaits its "staging" or "upload", has "asked" whether
    that is done and heard no (by ``done()``, by ``running()``, or by a wait that gave up), or has
    asked "to be called".
    """

    number: int
    directory: str
    kind: str
    upload: Future | None = None
    uploading: bool = False
    end_known: bool = False  # whether the recipe waited for the upload, or saw that it is done
    called_back: bool = False
    group_gone: bool = False  # this rank left its process group beside the upload
    keeps_nested: bool = False
    failed: bool = False
    writing: bool = False  # the call has not returned
    clones: dict[str, dict] = field(default_factory=dict)
    listeners: list[Callable[[str], None]] = field(default_factory=list)

    @property
    def in_flight(self) -> bool:
        return self.upload is not None and not DONE(self.upload)

    def tell(self, event: str) -> None:
        for listener in self.listeners:
            listener(event)


def keeps_nested(planner: Any) -> bool:
    """Whether a save's planner stores a nested dict as one object, and not leaf by leaf."""
    return not getattr(planner, "flatten_state_dict", True)


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
        self.futures: dict[Future, tuple[Save, str]] = {}  # and what it is the end of
        self.planned: tuple[dict, dict] | None = None  # leaves, clones: by hand, not written yet
        self.backend: str | None = None
        self.overwritten = 0
        self.extra_state: Callable[[Save], dict[str, Any]] = lambda save: {}
        self.on_save: list[Callable[[Save], None]] = []
        self.on_upload: list[Callable[[Save], None]] = []
        self.on_end: list[Callable[[], None]] = []

    def note(self, event: str, **values: Any) -> None:
        with self.lock:
            if not self.notes.closed:
                line = {"event": event, "pid": os.getpid(), **values}
                self.notes.write(json.dumps(line) + "\n")
                self.notes.flush()

    def has_joined(self) -> bool:
        """Whether this rank was ever in a process group."""
        return self.backend is not None

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
        for module in (dist, dist.distributed_c10d):
            around(module, "init_process_group", after=self._sees_backend)
            around(module, "destroy_process_group", self._leaves_group)

    def _install_saves(self) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint import state_dict_saver

        self._save, self._async_save = dcp.save, dcp.async_save
        dcp.save = self._spy_save
        for module in (dcp, state_dict_saver):
            module.async_save = self._spy_async_save
        state_dict_saver.save = self._spy_upload
        around(dcp.DefaultSavePlanner, "set_up_planner", self._plans)
        around(Future, "result", self._waits, self._has_waited)
        around(Future, "exception", self._waits, self._has_waited)
        around(Future, "done", after=self._asks)
        around(Future, "running", after=self._asks_if_running)
        around(Future, "add_done_callback", after=self._asks_to_be_called)

    def _leaves_group(self, *_: Any, **__: Any) -> None:
        for save in self.saves:
            save.group_gone |= save.in_flight

    def _sees_backend(self, *_: Any, **__: Any) -> None:
        if not dist.is_initialized():  # it raised, and that is what the script is to see
            return
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        present = {"cpu", accelerator.type if accelerator else "cpu"}
        pairs = (pair.split(":") for pair in str(dist.get_backend_config()).split(","))
        backends = {backend for device, backend in pairs if device in present}
        self.backend = " + ".join(sorted(backends, reverse=True))

    def _begin(self, kind: str, state_dict: dict, kwargs: dict) -> tuple[Save, dict]:
        from torch.distributed.checkpoint.stateful import Stateful

        writer = kwargs.get("storage_writer")
        directory = kwargs.get("checkpoint_id") or getattr(writer, "path", "")
        unjudged = why_not_loaded(writer, directory)
        place = str(directory) if unjudged else os.path.abspath(os.fspath(directory))
        save = Save(len(self.saves), place, kind)
        save.keeps_nested = keeps_nested(kwargs.get("planner"))
        shared = dist.is_initialized() and kwargs.get("process_group") in (None, dist.group.WORLD)
        if kind != OWN_WRITER and not unjudged and self._leads(kwargs):
            self._keep_what_is_overwritten(save.directory)
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
        self.planned = None
        stateful = [k for k, v in state_dict.items() if isinstance(v, Stateful)]
        self.capture(save, {k: v for k, v in state_dict.items() if k not in stateful})
        spied = {k: _StatefulSpy(state_dict[k], k, save, self) for k in stateful}
        return save, self.extra_state(save) | state_dict | spied

    def _leads(self, kwargs: dict) -> bool:
        """Whether this rank completes the save, for all that take part."""
        if not dist.is_initialized() or kwargs.get("no_dist"):
            return True
        return dist.get_rank(kwargs.get("process_group")) == 0

    def _keep_what_is_overwritten(self, directory: str) -> None:
        """Copy the checkpoint of an earlier save of this rank before a later one replaces it.

        No rank writes yet: saves write once every rank has told its plan.
        """
        earlier = [save for save in self.saves if save.directory == directory]
        if not earlier or is_unfinished(directory):
            return
        if earlier[-1].failed or earlier[-1].in_flight:
            return
        files = [file for file in Path(directory).rglob("*") if file.is_file()]
        if not files:
            return
        size = sum(file.stat().st_size for file in files)
        if size > MOST_COPIED:
            mib = MOST_COPIED // 2**20
            why = f"overwritten by a later save, and larger than {mib} MiB: not compared"
            self.note("not kept", number=earlier[-1].number, why=why)
            return
        self.overwritten += 1
        folder = self.run_dir / "kept" / f"overwritten-{os.getpid()}-{self.overwritten}"
        copy = folder / os.path.basename(directory)
        try:
            shutil.copytree(directory, copy)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            return
        self.note("overwritten", number=earlier[-1].number, copy=str(copy))

    @contextlib.contextmanager
    def _noting_failure(self, save: Save) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._failed(save, error)
            raise

    def _spy_save(self, state_dict: dict, *writer: Any, **kwargs: Any) -> Any:
        """By position, torch takes a storage writer after the state dict, and warns."""
        named = {"storage_writer": writer[0]} if len(writer) == 1 else {}
        save, state_dict = self._begin("save", state_dict, kwargs | named)
        save.writing = True
        try:
            with self._noting_failure(save):
                return self._save(state_dict, *writer, **kwargs)
        finally:
            save.writing = False

    def _spy_upload(self, state_dict: dict, *positional: Any, **kwargs: Any) -> Any:
        """``state_dict_saver.save``: an upload thread calls it once its state is staged."""
        if positional:  # DCP itself names what it passes
            return self._spy_save(state_dict, *positional, **kwargs)
        writer, directory = kwargs.get("storage_writer"), kwargs.get("checkpoint_id")
        directory = os.path.abspath(os.fspath(directory or getattr(writer, "path", "")))
        uploads = [s for s in self.saves if s.directory == directory and s.kind == "async_save"]
        if not uploads or called_by_recipe():
            return self._spy_save(state_dict, **kwargs)  # the recipe calls it by this name
        save = uploads[-1]
        beside = [s.number for s in self.saves if s.uploading and s.in_flight and s is not save]
        self.note("upload", number=save.number, beside=beside)
        save.uploading = True
        for listener in self.on_upload:
            listener(save)
        return self._save(state_dict, **kwargs)

    def _spy_async_save(self, state_dict: dict, **kwargs: Any) -> Any:
        save, state_dict = self._begin("async_save", state_dict, kwargs)
        with self._noting_failure(save), contextlib.ExitStack() as undo:
            if (stager := kwargs.get("async_stager")) is not None:
                undo.callback(around(stager, "stage", after=partial(self._stages, save)))
            save.writing = True
            response = self._async_save(state_dict, **kwargs)
        save.upload = getattr(response, "upload_completion", response)
        save.writing = False
        save.upload.add_done_callback(lambda upload: self._ended(save, upload))
        if hasattr(response, "staging_completion"):
            self.futures[response.staging_completion] = save, "staging"
        self.futures[save.upload] = save, "upload"
        return response

    def _stages(self, save: Save, staged: Any, *_: Any, **__: Any) -> None:
        """A stager itself may return a future: a recipe may keep it and wait for it."""
        if isinstance(staged, Future):
            self.futures[staged] = save, "staging"

    def _ended(self, save: Save, upload: Future) -> None:
        if (error := EXCEPTION(upload)) is not None:
            self._failed(save, error)

    def _failed(self, save: Save, error: BaseException) -> None:
        save.failed = True
        self.note("failed", number=save.number, error=summary(error))

    # How the recipe learns of the end of a save

    def _spy_wait(self, fs: Iterable[Future], timeout: float | None = None, *args: Any, **kw: Any):
        futures = list(fs)
        for future in futures:
            self._waits(future, timeout)
        try:
            return self._wait(futures, timeout, *args, **kw)
        finally:
            for future in futures:
                self._has_waited(None, future)

    def _spy_as_completed(self, fs: Iterable[Future], timeout: float | None = None):
        futures = list(fs)
        for future in futures:
            self._waits(future, timeout)
        try:
            yield from self._as_completed(futures, timeout)
        finally:
            for future in futures:
                self._has_waited(None, future)

    def _awaits(self, future: Future) -> tuple[Save | None, str]:
        """The save and phase that this wait is for: its upload, or on the main thread its staging.

        DCP's own thread waits for staging, too.
        """
        save, phase = self.futures.get(future, (None, ""))
        if phase == "staging" and threading.current_thread() is not threading.main_thread():
            return None, ""
        return save, phase

    def _waits(self, future: Future, timeout: float | None = None) -> None:
        save, phase = self._awaits(future)
        if save is not None and (timeout is None or timeout >= ASKS_S):
            save.tell(phase)

    def _has_waited(self, _: Any, future: Future, *__: Any, **___: Any) -> None:
        save, phase = self._awaits(future)
        if save is None:
            return
        if DONE(future):
            self._learns_the_end(save, phase)
        elif phase == "upload":
            save.tell("asked")

    def _learns_the_end(self, save: Save, phase: str) -> None:
        self.note("awaited", number=save.number, phase=phase)
        save.end_known |= phase == "upload"
        save.tell(phase)

    def _asks(self, is_done: bool, future: Future) -> None:
        save, phase = self.futures.get(future, (None, ""))
        if phase == "upload" and called_by_recipe():
            if is_done:
                self._learns_the_end(save, phase)
            else:
                save.tell("asked")

    def _asks_if_running(self, is_running: bool, future: Future) -> None:
        """One that has not begun is not running either."""
        self._asks(not is_running and DONE(future), future)

    def _asks_to_be_called(self, _: None, future: Future, *__: Any) -> None:
        save, phase = self.futures.get(future, (None, ""))
        if phase == "upload":
            save.called_back = True
            save.tell("to be called")

    # Writers of the recipe's own, that DCP is not told of

    def _plans(self, planner: Any, state_dict: dict, *_: Any, **__: Any) -> None:
        if called_by_recipe():
            clones: dict[str, dict] = {}
            self.planned = self.leaves_of(state_dict, clones), clones

    def written_to(self, path: str) -> None:
        """A file is about to be written: a shard of the plan that the recipe itself has made?"""
        directory, name = os.path.split(path)
        planned = self.planned
        if planned is None or not name.endswith(".distcp"):
            return
        others = {save.directory for save in self.saves if save.writing or save.in_flight}
        if directory not in others:  # a later plan for the same directory is a save of its own
            save, _ = self._begin(OWN_WRITER, {}, {"checkpoint_id": directory})
            leaves, save.clones = planned
            self.note("leaves", number=save.number, leaves=leaves)

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
        if save.keeps_nested:
            leaves = {"(all)": {"unjudged": "its planner stores a nested dict as one object"}}
        else:
            leaves = self.leaves_of(state_dict, save.clones)
        self.note("leaves", number=save.number, leaves=leaves)

    def leaves_of(self, state_dict: dict[str, Any], clones: dict[str, dict]) -> dict[str, Any]:
        from torch.distributed.checkpoint._nested_dict import flatten_state_dict

        leaves: dict[str, Any] = {}
        try:
            for name, value in flatten_state_dict(state_dict)[0].items():
                try:
                    self._leaf(name, value, leaves, clones)
                except Exception as error:  # the harness's own trouble is no trouble of the recipe
                    leaves[name] = {"unjudged": f"{type(value).__name__}: {error!r}"[:200]}
        except Exception as error:
            leaves["(all)"] = {"unjudged": f"the state dict is not read: {error!r}"[:200]}
        return leaves

    def _leaf(self, name: str, value: Any, leaves: dict, clones: dict) -> None:
        parts = [(None, value)]
        if hasattr(value, "__create_chunk_list__"):  # a DTensor
            chunks = [c for c in value.__create_chunk_list__()[:1] if len(c.offsets) == value.dim()]
            parts = [([list(c.offsets), list(c.sizes)], value.to_local()) for c in chunks]
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
                clones[key] = {"chunk": chunk, "tensor": part.detach().clone()} | of

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
            was_called = save.called_back and not save.in_flight and not save.group_gone
            known = save.end_known or was_called
            if finished and save.upload is not None and not known:
                self.note("never_awaited", number=save.number)
        with self.lock:
            self.notes.close()
