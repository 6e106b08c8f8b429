"""Ways of saving, all struck alike: the recipe, and what a reader may use instead."""

import json
import logging
import os
import re
from concurrent.futures import Future
from datetime import timedelta
from multiprocessing.util import Finalize
from pathlib import Path

import _toys as basic
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from kept_saves import KeptSaves, newest_step, steps_in

from faults.points import Fault, Points, point_of, tell
from overlap_recipes.checkpoint import CheckpointManager, TrainingState
from overlap_recipes.checkpoint.stores.objects import Objects, ObjectSink

PATIENCE_S = 8  # for other ranks, where a way lets one say so


class Way:
    """Saves ``app`` below ``root``; a context manager around the loop."""

    checkpoints = "step*"  # below the root: the directories that hold one each
    latest: Future | None = None

    def __init__(self, root: Path, app: basic.AppState, keep_last: int, told: tuple) -> None:
        self.root, self.app, self.keep_last = root, app, keep_last
        self.told = told  # what a process of this way's own needs to know to be struck

    def resume(self) -> None:
        """Load what this way loads after a crash; ``app.step`` stays 0 if there is nothing."""
        raise NotImplementedError

    def install(self, points: Points) -> None:
        """Watch what only this way calls."""

    def save(self) -> Future:
        raise NotImplementedError

    @classmethod
    def folder_of(cls, root: Path, step: int) -> Path | None:
        """The folder with the files of the checkpoint of ``step``, or of the only one."""
        for path in root.glob(cls.checkpoints):
            if "." not in path.name and re.sub(r"\D", "", path.name) in ("", str(step)):
                return path
        return None

    def __enter__(self) -> "Way":
        return self

    def __exit__(self, *error: object) -> None:
        if self.latest is not None and error[0] is None:
            self.latest.result()


class Kept(Way):
    """Kept saves, and the newest checkpoint whose digests are right."""

    def resume(self) -> None:
        chosen = [newest_step(self.root, every_byte=True)]
        dist.broadcast_object_list(chosen)
        if chosen[0] is not None:
            dcp.load({"app": self.app}, checkpoint_id=self.root / f"step{chosen[0]}")

    def __enter__(self) -> Way:
        device, buffers = torch.device("cpu"), self.app.model.buffers()
        self.saves = KeptSaves(self.root, device, buffers, keep_last=self.keep_last)
        self.saves.__enter__()
        return self

    def save(self) -> Future:
        self.latest = self.saves.save({"app": self.app}, self.app.step)
        return self.latest

    def __exit__(self, *error: object) -> None:
        self.saves.__exit__(*error)


class Manager(Way):
    """``CheckpointManager``, which chooses by itself what to resume from."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        state = TrainingState(self.app.model, self.app.optimizer)
        self.manager = CheckpointManager(self.root, state, keep_last=self.keep_last, grace_s=None)

    def install(self, points: Points) -> None:
        points.around(TrainingState, "state_in_place", lambda *_: "state_dict")

    def resume(self) -> None:
        self.manager.__enter__()
        self.app.step = self.manager.resume()

    def save(self) -> Future:
        self.latest = self.manager.save(self.app.step)
        return self.latest

    def __exit__(self, *error: object) -> None:
        self.manager.__exit__(*error)


class Store(Manager):
    """The same with an object store, for which fsspec's local files stand."""

    def __init__(self, root: Path, *args) -> None:
        super().__init__(root, *args)
        state = TrainingState(self.app.model, self.app.optimizer)
        url = f"file://{root}"
        self.manager = CheckpointManager(url, state, keep_last=self.keep_last, grace_s=None)

    def install(self, points: Points) -> None:
        super().install(points)
        points.around(ObjectSink, "write", lambda sink, *_: point_of(sink.path))
        points.around(ObjectSink, "__exit__", lambda sink, *_: point_of(sink.path))
        points.around(Objects, "commit", lambda *_: "rename")
        points.around(Objects, "remove", lambda *_: "deletion")

    @staticmethod
    def folder_of(root: Path, step: int) -> Path | None:
        commit = root / f"step{step}.json"
        return root / json.loads(commit.read_text())["data"] if commit.exists() else None


class AsyncSave(Way):
    """Plain ``async_save`` into one directory, over the checkpoint before."""

    checkpoints = "checkpoint"

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE_S))
        self.directory = self.root / "checkpoint"

    def resume(self) -> None:
        if (self.directory / ".metadata").exists():
            dcp.load({"app": self.app}, checkpoint_id=self.directory)

    def save(self) -> Future:
        if self.latest is not None:
            self.latest.result()
        self.latest = dcp.async_save(
            {"app": self.app}, checkpoint_id=self.directory, process_group=self.group
        )
        return self.latest


class Stepped:
    """The step, as a part of the state that torchtitan's manager saves."""

    def __init__(self, app: basic.AppState) -> None:
        self.app = app

    def state_dict(self) -> dict:
        return {"step": self.app.step}

    def load_state_dict(self, state: dict) -> None:
        self.app.step = state["step"]


class Torchtitan(Way):
    """torchtitan's ``CheckpointManager``, asynchronous; it finds the newest by itself."""

    checkpoints = "step-*"

    def __init__(self, *args) -> None:
        super().__init__(*args)
        from torchtitan.components.checkpointer import base
        from torchtitan.components.checkpointer.dcp import CheckpointManager
        from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

        logging.disable(logging.INFO)
        self.base = base
        config = default_adamw(lr=1e-3)
        config.implementation = "for-loop"
        optimizers = config.build(model_parts=[self.app.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=0)
        self.app.optimizer, self.app.optimizers = optimizers.optimizers[0], optimizers.optimizers
        self.manager = CheckpointManager.Config(
            enable=True,
            folder=str(self.root),
            interval=1,
            async_mode="async",
            keep_latest_k=self.keep_last,
            initial_load_model_only=False,
        ).build(
            dataloader=basic.nn.Identity(),
            model_parts=[self.app.model],
            optimizers=optimizers,
            lr_schedulers=schedule.build(optimizers=optimizers, training_steps=100),
            states={"train_state": Stepped(self.app)},
            sd_adapter=None,
        )

    def install(self, points: Points) -> None:
        points.around(self.base.ModelWrapper, "state_dict", lambda *_: "state_dict")

    def resume(self) -> None:
        self.manager.load()

    def save(self) -> Future:
        self.manager.save(self.app.step)
        self.latest = self.manager.save_future
        return self.latest

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.manager.close()


def in_writing_process(fault: Fault | None, root: Path, parent: int, pipe: int) -> None:
    """Watch the writing process of rank ``parent``; what it counts is told when it ends."""
    from torch_checkpointing.storage.filesystem import WriteStream

    points = Points(fault, root, os.open(f"/proc/{parent}/fd/{pipe}", os.O_WRONLY))
    points.around(WriteStream, "write", lambda stream, _: point_of(str(stream._path)))
    points.install()
    Finalize(None, tell, (points.pipe,), {"event": "counts", "counts": points.counts}, 0)


class TorchCheckpointing(Way):
    """``torch_checkpointing``: a staging thread, a writing process, a directory renamed at the end.

    It has no word on which checkpoint to resume from: here it is the newest that has its name.
    """

    def __init__(self, *args) -> None:
        super().__init__(*args)
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
        from torch_checkpointing.config import AsyncCheckpointSaverConfig

        writer = CheckpointWriterConfig(checkpoint_write_barrier_timeout_sec=PATIENCE_S)
        self.manager = CheckpointManager.Config(
            save=AsyncCheckpointSaverConfig(writer_config=writer, wait_timeout_secs=3 * PATIENCE_S),
            subprocess_init_fn=in_writing_process,
            subprocess_init_args=self.told,
        ).build()
        self.app.optimizer.register_step_pre_hook(self.hold)
        self.app.optimizer.register_step_post_hook(self.release)

    def hold(self, *_) -> None:
        self.held = self.manager.lock()
        self.held.__enter__()

    def release(self, *_) -> None:
        self.held.__exit__(None, None, None)

    def resume(self) -> None:
        chosen = [next(iter(steps_in(self.root)), None)]
        dist.broadcast_object_list(chosen)
        if chosen[0] is not None:
            directory = self.root / f"step{chosen[0]}"
            loaded = self.manager.load(str(directory), into=self.app.state_dict())
            self.app.load_state_dict(dict(loaded))

    def save(self) -> Future:
        if self.latest is not None:
            self.latest.result()
        directory = self.root / f"step{self.app.step}"
        self.latest = self.manager.save(str(directory), self.app.state_dict())
        return self.latest

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.manager.close()


WAYS = {
    "retention": Kept,
    "manager": Manager,
    "store": Store,
    "async_save": AsyncSave,
    "torchtitan": Torchtitan,
    "torch_checkpointing": TorchCheckpointing,
}
