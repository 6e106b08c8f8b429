"""The ways of saving that ``checkpoint_stall.py`` compares: PyTorch's, the recipes', others.

A way is used as its own documentation says. What its package leaves to the training loop (to wait
before the update, to ask whether the write has ended) it does in hooks around the optimizer's step
and behind each step, so that the loop is the same for all.
"""

import gc
import importlib
import importlib.util
import os
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes_source" / "checkpoint"))

from _checks import NamedWhenComplete  # noqa: E402
from _toys import AppState, leaves, same_bits  # noqa: E402
from async_save import AsyncCheckpoints  # noqa: E402
from default_stager import OverlappedStager  # noqa: E402
from pinned_staging import PinnedStager  # noqa: E402

from benchmarks.measuring import PIECE_BYTES, timing_event  # noqa: E402
from overlap_recipes.checkpoint.copies import ALIGNMENT, CopyPlan  # noqa: E402
from overlap_recipes.checkpoint.saves import Saves  # noqa: E402

REUSE_CRASHES = "2.11" <= torch.__version__ < "2.13"


@dataclass
class Save:
    """One save under way: when it was called and returned, what completes it (host times, s)."""

    directory: Path
    called_at: float = 0.0
    returned_at: float = 0.0
    staged_at: float | None = None  # where the way tells
    uploaded_at: float | None = None
    uploaded: Future | None = None  # None: the call returned when all was written

    def watch(self, uploaded: Future, staged: Future | None = None) -> None:
        self.uploaded = uploaded
        uploaded.add_done_callback(lambda _: self.note("uploaded_at"))
        if staged is not None:
            staged.add_done_callback(lambda _: self.note("staged_at"))

    def note(self, moment: str) -> None:
        setattr(self, moment, time.perf_counter())


class Way:
    """A way of saving ``app``. ``start`` is timed as the call."""

    ours: bool = False  # whether it is a recipe or the library
    note: str | None = None
    queued_s = 1.0  # of work before the save that is loaded back: more than staging takes to begin

    def __init__(self, app: AppState, device: torch.device) -> None:
        self.app, self.device = app, device
        self.group = dist.new_group(backend="gloo")
        self.open()
        self.hooks = [  # the loop does what this way asks of it
            app.optimizer.register_step_pre_hook(lambda *_: self.before_update()),
            app.optimizer.register_step_post_hook(lambda *_: self.after_update()),
        ]

    def open(self) -> None: ...

    def save(self, directory: Path) -> Save:
        save = Save(directory, called_at=time.perf_counter())
        self.start(save)
        save.returned_at = time.perf_counter()
        if save.uploaded is None:
            save.staged_at = save.uploaded_at = save.returned_at
        return save

    def start(self, save: Save) -> None:
        raise NotImplementedError

    def before_update(self) -> None: ...

    def after_update(self) -> None: ...

    def after_step(self) -> None: ...

    def finish(self, save: Save) -> None:
        """Return when ``save`` is complete; raise what it failed with."""
        if save.uploaded is not None:
            save.uploaded.result()
            while save.uploaded_at is None:  # callbacks run just after the result is there
                time.sleep(1e-4)

    def load(self, directory: Path, target: dict) -> dict[str, object]:
        """The leaves of the state in ``directory``; ``target`` is like it, with other values."""
        state = {"app": target}
        dcp.load(state, checkpoint_id=directory, process_group=self.group)
        return leaves(state["app"])

    def close(self) -> None:
        self.abandon()
        dist.destroy_process_group(self.group)

    def abandon(self, *error: object) -> None:
        """Leave the loop alone, without asking other ranks."""
        for hook in self.hooks:
            hook.remove()


# -- PyTorch as it is -------------------------------------------------------------------------


class TorchSave(Way):
    note = "one file a rank, its local shards; not reshardable"

    def start(self, save: Save) -> None:
        save.directory.mkdir(parents=True, exist_ok=True)
        torch.save(leaves(self.app.state_dict()), save.directory / f"{dist.get_rank()}.pt")
        dist.barrier(group=self.group)

    def load(self, directory: Path, target: dict) -> dict[str, object]:
        return torch.load(directory / f"{dist.get_rank()}.pt", map_location=self.device)


class DcpSave(Way):
    def start(self, save: Save) -> None:
        dcp.save({"app": self.app}, checkpoint_id=save.directory, process_group=self.group)


class DefaultStagerAsPublished(Way):
    note = "a new stager a save, never ordered after the step; closed here after each save"
    queued_s = 4.0
    staging: Future | None = None

    def start(self, save: Save) -> None:
        on_cpu = self.device.type == "cpu"
        options = StagingOptions(False, False, True, False) if on_cpu else StagingOptions()
        self.stager = DefaultStager(options)
        response = dcp.async_save(
            {"app": self.app},
            checkpoint_id=save.directory,
            process_group=self.group,
            async_stager=self.stager,
        )
        save.watch(response.upload_completion, response.staging_completion)
        self.staging = response.staging_completion

    def before_update(self) -> None:
        if self.staging is not None:
            self.staging.result()
            self.staging = None

    def finish(self, save: Save) -> None:
        super().finish(save)
        self.stager.close()
        self.stager = None  # its memory is freed here, not in the next call


# -- the recipes ------------------------------------------------------------------------------


class RecipeWay(Way):
    """``AsyncCheckpoints`` with a stager: it writes to ``<root>/step<N>``."""

    checkpoints: AsyncCheckpoints

    def open(self) -> None:
        self.checkpoints = AsyncCheckpoints(Path(), self.stager(), NamedWhenComplete)

    def stager(self) -> object | None:
        """The ``async_stager`` of each save."""

    def start(self, save: Save) -> None:
        self.checkpoints.root = save.directory
        self.checkpoints.save(self.app.step, {"app": self.app.state_dict()})
        save.watch(self.checkpoints.upload, self.staging())

    def staging(self) -> Future | None:
        """When the copy of the save that was called last has ended, where the stager tells."""

    def finish(self, save: Save) -> None:
        super().finish(save)
        self.checkpoints.wait()

    def load(self, directory: Path, target: dict) -> dict[str, object]:
        (checkpoint,) = directory.iterdir()
        return super().load(checkpoint, target)

    def close(self) -> None:
        self.checkpoints.close()
        super().close()


class AsyncSave(RecipeWay):
    ours = True


class Pinned(RecipeWay):
    ours = True

    def stager(self) -> PinnedStager:
        return PinnedStager()


class Noted:
    """A stager whose last future is kept."""

    last: Future | None = None

    def __init__(self, stager: object) -> None:
        self.stager = stager

    def stage(self, state_dict: dict) -> Future:
        self.last = self.stager.stage(state_dict)
        return self.last


class Overlapped(RecipeWay):
    ours = True

    def stager(self) -> Noted:
        self.noted = Noted(OverlappedStager(self.device, self.app.model.buffers))
        return self.noted

    def staging(self) -> Future:
        return self.noted.last

    def close(self) -> None:
        super().close()
        self.noted.stager.close()


class OverlappedFrozen(Overlapped):
    """The same; Python's collector does not look at what is there before the first save."""

    def open(self) -> None:
        super().open()
        gc.collect()
        gc.freeze()

    def close(self) -> None:
        gc.unfreeze()
        super().close()


# -- torch's stager, ordered -----------------------------------------------------------------------

FILES_OF_2_13 = os.environ.get("STAGING_FILES")
"""A folder with torch 2.13's ``staging.py`` and ``_state_dict_stager.py``, for another torch."""


class AfterStep:
    """Copied first: it makes the copying thread's stream wait for what is queued now."""

    def __init__(self, device: torch.device) -> None:
        self.streams = torch.get_device_module(device)
        self.event = self.streams.Event()
        self.event.record()

    def __deepcopy__(self, memo: dict) -> int:
        self.streams.current_stream().wait_event(self.event)
        return 0


class OrderedStager:
    """``DefaultStager``, a new one a save where it cannot be used twice."""

    def __init__(self, device: torch.device, kind: type[DefaultStager], is_reused: bool) -> None:
        self.device, self.kind, self.is_reused = device, kind, is_reused
        self.made: DefaultStager | None = None

    def stage(self, state_dict: dict) -> Future:
        if self.made is None or not self.is_reused:
            self.close()
            on_cpu = self.device.type == "cpu"
            self.made = self.kind(
                StagingOptions(False, False, True, False) if on_cpu else StagingOptions()
            )
            self.prepare(self.made)
        return self.made.stage({"after_step": AfterStep(self.device)} | state_dict)

    def prepare(self, stager: DefaultStager) -> None: ...

    def close(self) -> None:
        if self.made is not None:
            self.made.close()


class NumbersPinned(OrderedStager):
    """The same, and numbers of four bytes are page-locked as well."""

    def prepare(self, stager: DefaultStager) -> None:
        stager._state_dict_stager.pin_memory_min_bytes = 0


def stager_of_2_13() -> type[DefaultStager]:
    """``DefaultStager`` from ``FILES_OF_2_13``; torch's own without them."""
    if FILES_OF_2_13 is None:
        return DefaultStager
    inner = "torch.distributed.checkpoint._state_dict_stager"
    kept = sys.modules[inner]
    try:
        sys.modules[inner] = module_from(Path(FILES_OF_2_13, "_state_dict_stager.py"))
        return module_from(Path(FILES_OF_2_13, "staging.py")).DefaultStager
    finally:
        sys.modules[inner] = kept


def module_from(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"of_2_13_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


class DefaultStagerOrdered(RecipeWay):
    queued_s = 4.0
    note = "its stream waits for an event after the step"

    def stager(self) -> Noted:
        if REUSE_CRASHES:
            self.note += "; a new stager a save: this torch fails to use one twice"
        ordered = OrderedStager(self.device, DefaultStager, is_reused=not REUSE_CRASHES)
        self.noted = Noted(ordered)
        return self.noted

    def staging(self) -> Future:
        return self.noted.last

    def before_update(self) -> None:
        if self.noted.last is not None:
            self.noted.last.exception()

    def close(self) -> None:
        super().close()
        self.noted.stager.close()


class DefaultStager213(DefaultStagerOrdered):
    kind: type[OrderedStager] = OrderedStager

    def stager(self) -> Noted:
        if FILES_OF_2_13 is not None:
            self.note += f"; torch 2.13's two files of staging on torch {torch.__version__}"
        self.noted = Noted(self.kind(self.device, stager_of_2_13(), is_reused=True))
        return self.noted


class DefaultStager213Pinned(DefaultStager213):
    kind = NumbersPinned


class OverlappedWriter(Way):
    """``Saves``: staged beside training, written by its two threads."""

    ours = True
    options: dict[str, object] = {}

    def open(self) -> None:
        self.saves = Saves(self.device, self.app.model.buffers, **self.options)
        self.saves.writing.begin = self.begin  # a thread of its own would take the interpreter
        self.saves.__enter__()

    def start(self, save: Save) -> None:
        self.under_way = save
        save.watch(self.saves.save({"app": self.app}, save.directory))

    def begin(self, *arguments: object) -> object:
        """What the writing thread does first: it waits for the copies."""
        writing = self.saves.writing
        begun = type(writing).begin(writing, *arguments)
        self.under_way.note("staged_at")
        return begun

    def close(self) -> None:
        self.saves.__exit__(None, None, None)
        super().close()

    def abandon(self, *error: object) -> None:
        super().abandon()
        if error:
            self.saves.__exit__(*error)


class SevenThreads(OverlappedWriter):
    note = "written by seven threads a rank"
    options = {"write_threads": 7}


class OneThread(OverlappedWriter):
    note = "written by one thread a rank"
    options = {"write_threads": 1}


# -- other packages ---------------------------------------------------------------------------


class TorchCheckpointing(Way):
    """The torch_checkpointing package: staging thread, shared memory, a writer process."""

    def open(self) -> None:
        package = importlib.import_module("torch_checkpointing")
        self.note = f"torch_checkpointing {version('torch_checkpointing')}; no resharder declared"
        self.manager = package.CheckpointManager(package.CheckpointManager.Config())

    def start(self, save: Save) -> None:
        uploaded = self.manager.save(str(save.directory), self.app.state_dict())
        # The manager does not give out its staging future; without it only the upload has an end.
        save.watch(uploaded, getattr(self.manager, "_staging_future", None))

    def before_update(self) -> None:
        self.held = self.manager.lock()
        self.held.__enter__()

    def after_update(self) -> None:
        self.held.__exit__(None, None, None)

    def load(self, directory: Path, target: dict) -> dict[str, object]:
        return leaves(dict(self.manager.load(str(directory), into=target)))

    def close(self) -> None:
        self.manager.close()
        super().close()


class NvidiaResiliencyExt(Way):
    """nvidia-resiliency-ext's TorchAsyncCheckpoint: torch.save in a persistent process."""

    pending: Future | None = None
    load = TorchSave.load

    def open(self) -> None:
        path = "nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt"
        self.checkpoint = importlib.import_module(path).TorchAsyncCheckpoint()
        self.note = (
            f"nvidia-resiliency-ext {version('nvidia-resiliency-ext')}, TorchAsyncCheckpoint: "
            f"one file a rank, not reshardable; its end is seen at the end of a step"
        )

    def start(self, save: Save) -> None:
        save.directory.mkdir(parents=True, exist_ok=True)
        path = save.directory / f"{dist.get_rank()}.pt"
        self.checkpoint.async_save(leaves(self.app.state_dict()), path)
        self.pending = Future()
        save.watch(self.pending)

    def ask(self, wait: bool) -> None:
        """Whether it has ended: the package does not tell by itself."""
        if self.pending is None:
            return
        self.checkpoint.finalize_async_save(blocking=wait)
        queue = self.checkpoint._get_async_calls_queue()
        if queue.get_num_unfinalized_calls() == 0:
            self.pending.set_result(None)
            self.pending = None
        elif not queue.persistent_caller.process.is_alive():  # nobody would answer
            code = queue.persistent_caller.process.exitcode
            queue.close(abort=True)
            raise RuntimeError(f"the writer process ended with exit code {code}")

    def after_step(self) -> None:
        self.ask(wait=False)

    def finish(self, save: Save) -> None:
        self.ask(wait=True)
        super().finish(save)

    def close(self) -> None:
        self.checkpoint.close()
        super().close()


class TorchtitanPinned(Way):
    """torchtitan's CheckpointManager, with model and optimizer as its states."""

    queued_s = 4.0

    def open(self) -> None:
        module = importlib.import_module("torchtitan.components.checkpointer")
        mode = "async_with_pinned_mem"
        self.note = f"torchtitan {version('torchtitan')}, async_mode {mode}"
        if REUSE_CRASHES:
            self.note += "; a new stager a save: this torch fails to use one twice"
        self.manager = module.CheckpointManager(
            module.CheckpointManager.Config(
                enable=True, folder=".", interval=1, keep_latest_k=0, async_mode=mode
            ),
            dataloader=None,
            model_parts=[self.app.model],
            optimizers=self.app,
            lr_schedulers=None,
            states={},
            sd_adapter=None,
        )
        for name in ("model", "dataloader", "lr_scheduler"):  # the state of all ways, once
            del self.manager.states[name]

    def start(self, save: Save) -> None:
        if REUSE_CRASHES and self.manager.stager is not None:
            self.manager.stager.close()
            self.manager.stager = None
        self.manager.folder = str(save.directory)
        self.manager.save(self.app.step)
        save.watch(self.manager.save_future, self.manager.staging_future)

    def before_update(self) -> None:
        self.manager.maybe_wait_for_staging()

    def load(self, directory: Path, target: dict) -> dict[str, object]:
        (checkpoint,) = directory.iterdir()
        state = {"optimizer": target}
        dcp.load(state, checkpoint_id=checkpoint, process_group=self.group)
        return leaves(state["optimizer"])

    def close(self) -> None:
        self.manager.close()
        super().close()
        # PyTorch keeps its process for writing to itself; without the object the process ends
        executor = importlib.import_module("torch.distributed.checkpoint._async_process_executor")
        executor._CHECKPOINT_PROCESS = None


# -- copies alone -----------------------------------------------------------------------------


class AllAtOnce(Way):
    """All of the state to pinned memory, and nothing else: how its copies are queued."""

    by_thread = False
    memory: torch.Tensor | None = None  # kept by the class: to lock it takes seconds

    def open(self) -> None:
        shards = [x for x in leaves(self.app.state_dict()).values() if isinstance(x, torch.Tensor)]
        shards = {x.data_ptr(): x.detach() for x in shards if x.device == self.device}
        self.shards = list(shards.values())
        flat = [x.reshape(-1).view(torch.uint8) for x in self.shards if x.numel()]
        sources = [piece for x in flat for piece in x.split(PIECE_BYTES)]
        sizes = [piece.nbytes for piece in sources]
        self.on_gpu = self.device.type == "cuda"
        if AllAtOnce.memory is None:
            nbytes = sum(sizes) + ALIGNMENT * (1 + len(sizes))  # a plan aligns each
            AllAtOnce.memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.on_gpu)
        self.pieces = list(zip(AllAtOnce.memory[: sum(sizes)].split(sizes), sources, strict=True))
        self.module = torch.get_device_module(self.device)
        self.stream = self.module.Stream()
        self.cell = torch.zeros(1, device=self.device)
        self.copied, self.thread = None, None

    def queue(self) -> None:
        for target, source in self.pieces:
            target.copy_(source, non_blocking=True)

    def start(self, save: Save) -> None:
        save.watch(Future())
        self.stream.wait_stream(self.module.current_stream())
        self.copied = timing_event(self.device)
        if self.by_thread:
            self.thread = threading.Thread(target=self.copy, args=(save,))
            self.thread.start()
        else:
            self.copy(save)

    def copy(self, save: Save) -> None:
        if self.on_gpu:
            self.module.set_device(self.device)  # a thread begins on the first
        with self.module.stream(self.stream):
            self.queue()
            self.copied.record()
        threading.Thread(target=self.end, args=(save,)).start()

    def end(self, save: Save) -> None:
        self.copied.synchronize()
        save.note("staged_at")
        save.uploaded.set_result(None)

    def before_update(self) -> None:
        if self.thread is not None:
            self.thread.join()
        if self.copied is not None and self.on_gpu:
            self.module.current_stream().wait_event(self.copied)


class KernelBetween(AllAtOnce):
    def queue(self) -> None:
        for target, source in self.pieces:
            target.copy_(source, non_blocking=True)
            self.cell.add_(1)


class OnePieceAtATime(AllAtOnce):
    """A thread queues a piece when the piece before it has ended."""

    by_thread = True

    def queue(self) -> None:
        for target, source in self.pieces:
            target.copy_(source, non_blocking=True)
            if self.on_gpu:
                ended = torch.cuda.Event(blocking=True)
                ended.record()
                ended.synchronize()


class InTurns(AllAtOnce):
    """Two streams take turns, queued by a thread: neither ever has a second copy ready."""

    by_thread = True

    def queue(self) -> None:
        first, second = self.stream, self.module.Stream()
        for target, source in self.pieces:
            with self.module.stream(first):
                target.copy_(source, non_blocking=True)
                self.copied.record()
            if self.on_gpu:
                second.wait_event(self.copied)
            first, second = second, first


class WithGaps(AllAtOnce):
    """The recipe's: a few bytes in the other direction between the pieces."""

    ours = True

    def open(self) -> None:
        super().open()
        self.plan = CopyPlan(self.shards, self.device)
        memory = SimpleNamespace(bytes=AllAtOnce.memory)
        self.copies = self.plan.copies(memory)

    def start(self, save: Save) -> None:
        self.plan.take_snapshots()
        super().start(save)

    def queue(self) -> None:
        self.copies.queue(self.module, self.stream)


PIECES: dict[str, type[Way]] = {
    "cure_at_once": AllAtOnce,
    "cure_gaps": WithGaps,
    "cure_tiny_kernel": KernelBetween,
    "cure_paced": OnePieceAtATime,
    "cure_turns": InTurns,
}
WAYS: dict[str, type[Way]] = {
    "torch_save": TorchSave,
    "dcp_save": DcpSave,
    "async_save": AsyncSave,
    "pinned": Pinned,
    "default_stager_as_published": DefaultStagerAsPublished,
    "default_stager_ordered": DefaultStagerOrdered,
    "default_stager_2.13": DefaultStager213,
    "default_stager_2.13_numbers_pinned": DefaultStager213Pinned,
    "overlapped_stager": Overlapped,
    "overlapped_stager_frozen": OverlappedFrozen,
    "overlapped_writer": OverlappedWriter,
    "overlapped_writer_1_thread": OneThread,
    "overlapped_writer_7_threads": SevenThreads,
    "torch_checkpointing": TorchCheckpointing,
    "nvidia-resiliency-ext": NvidiaResiliencyExt,
    "torchtitan_async_with_pinned_mem": TorchtitanPinned,
}


def like(tree: object) -> object:
    """``tree`` with tensors of other values, to be loaded into."""
    if isinstance(tree, dict):
        return {key: like(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [like(value) for value in tree]
    if isinstance(tree, DTensor | torch.Tensor):
        return torch.full_like(tree, 2)
    return tree


def differences(expected: dict[str, object], loaded: dict[str, object]) -> tuple[bool, float]:
    """Whether any leaf differs in a bit, and the share of elements that differ."""
    wrong, differing, total = False, 0, 0
    for path, leaf in expected.items():
        found = loaded.get(path)
        if isinstance(leaf, torch.Tensor):
            found = found.to(leaf.device)
            differing += int((found != leaf).sum())
            total += leaf.numel()
        wrong |= not same_bits(found, leaf)
    return wrong, differing / total
