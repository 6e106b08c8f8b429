"""The ways of saving that ``checkpoint_stall.py`` compares: PyTorch's, the recipes', others.

A way is used as its own documentation says. What its package leaves to the training loop (to wait
before the update, to ask whether the write has ended) it does in hooks around the optimizer's step
and behind each step, so that the loop is the same for all.
"""

import importlib
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes_source" / "checkpoint"))

from _toys import AppState, leaves, same_bits  # noqa: E402
from async_save import AsyncCheckpoints  # noqa: E402
from default_stager import REUSE_CRASHES, StagedCheckpoints  # noqa: E402
from pinned_staging import PinnedCheckpoints  # noqa: E402

from benchmarks.measuring import PIECE_BYTES, timing_event  # noqa: E402
from overlap_recipes.checkpoint.copies import ALIGNMENT, CopyPlan  # noqa: E402
from overlap_recipes.checkpoint.saves import Saves  # noqa: E402
from overlap_recipes.checkpoint.state import TrainingState  # noqa: E402


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
    """A class of ``async_save`` and what builds on it: it writes to ``<root>/step<N>``."""

    checkpoints: AsyncCheckpoints

    def start(self, save: Save) -> None:
        self.checkpoints.root = save.directory
        self.checkpoints.save(self.app.step, {"app": self.app.state_dict()})
        save.watch(self.checkpoints.upload)

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

    def open(self) -> None:
        self.checkpoints = AsyncCheckpoints(Path())


class Pinned(RecipeWay):
    ours = True

    def open(self) -> None:
        self.checkpoints = PinnedCheckpoints(Path())


class DefaultStagerOrdered(RecipeWay):
    ours = True
    queued_s = 4.0

    def open(self) -> None:
        self.checkpoints = StagedCheckpoints(Path(), self.device, self.app.model.buffers)
        built = "a new stager a save" if REUSE_CRASHES else "one stager for all saves"
        self.note = f"{built}; its stream waits for an event behind the step"

    def before_update(self) -> None:
        self.checkpoints.wait_staged()


class LibraryApp(Stateful):
    """The state of the other ways, with the same keys, as the library reads it."""

    def __init__(self, app: AppState) -> None:
        self.app, self.state = app, TrainingState(app.model, app.optimizer)

    def state_dict(self) -> dict:
        state = self.state.state_dict()
        others = {"step": self.app.step, "has_state": state["has_state"]}
        return {"model": state["model"], "optim": state["optim"], **others}


class OverlappedWriter(Way):
    """``Saves``: staged beside training, written by its two threads."""

    ours = True
    options: dict[str, object] = {}

    def open(self) -> None:
        self.saves = Saves(self.device, self.app.model.buffers, **self.options)
        self.saves.writing.begin = self.begin  # a thread of its own would take the interpreter
        self.saves.__enter__()
        self.state = LibraryApp(self.app)

    def start(self, save: Save) -> None:
        self.under_way = save
        save.watch(self.saves.save({"app": self.state}, save.directory))

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
