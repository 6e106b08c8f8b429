# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/trainers/lightning.py
"""Lightning's ``ModelParallelStrategy`` that saves during training."""

import io
import sys
import time
from concurrent.futures import Future, wait
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from ..checkpoint.preparation import AskedLater
from ..checkpoint.reader import Reader
from ..checkpoint.saves import Saves
from ..checkpoint.state import digest
from ..checkpoint.talk import Talk
from ..checkpoint.writer import FileWriter
from ..checkpoint.writing import Target

_LOADS_SHARDS = "lightning.fabric.strategies.model_parallel._distributed_checkpoint_load"
_REST = "rest_of_ranks"  # what Lightning keeps in meta.pt, of each rank
_OTHER_RANKS = (
    "%s was saved on %d ranks whose loaders were at other positions, here are %d: resume on as "
    "many ranks, or load the weights alone"
)


class LightningFiles:
    """Writes the checkpoints that Lightning loads; see ``Writer`` of ``checkpoint.writing``."""

    def __init__(self) -> None:
        self.files = FileWriter()

    def prepare(self, state: dict, talk: Talk) -> None:
        self.files.prepare(state["sharded"], talk)

    def write(self, state: dict, target: Target, talk: Talk, threads: int) -> None:
        self.files.write(state["sharded"], target, talk, threads)
        if talk.rank == 0:
            content = state["meta"].getvalue()
            with target.create("meta.pt") as sink:
                sink.write(len(content), [content])

    def forget(self) -> None:
        self.files.forget()


def _load_shards(state: dict, path: Path) -> None:
    dcp.load(state, storage_reader=Reader(path))


def _rests_of_ranks(path: Path) -> list[bytes]:
    """What each rank has saved besides tensors; none in a checkpoint of another strategy."""
    reader = Reader(path)
    names = reader.read_metadata().state_dict_metadata
    ranks = sum(name.startswith(f"{_REST}.") for name in names)
    rests = {_REST: {str(rank): None for rank in range(ranks)}}
    if ranks > 0:
        dcp.load(rests, storage_reader=reader)
    return list(rests[_REST].values())


def rest_of(rests: list[dict], rank: int, ranks: int, path: Path) -> dict:
    """What rank ``rank`` of ``ranks`` goes on with: its own, or on other ranks that of rank 0.

    Raises:
        ValueError: there are other ranks now, and loaders were at other positions.
    """
    if len(rests) == ranks:
        return rests[rank]
    loops = {digest(rest.get("loops")) for rest in rests}
    if len(loops) > 1:
        raise ValueError(_OTHER_RANKS % (path, len(rests), ranks))
    return rests[0]


class OverlappedStrategy(ModelParallelStrategy):
    """``ModelParallelStrategy`` that saves during training."""

    saves = nullcontext()  # if training ends before setup

    def setup(self, trainer) -> None:
        super().setup(trainer)
        saves = Saves(self.root_device, self.model.buffers, writer=LightningFiles())
        self.saves = saves.__enter__()
        whole = False
        for callback in trainer.checkpoint_callbacks:
            callback.file_exists = self.file_exists
            if not getattr(callback, "save_weights_only", False):
                whole = True
        if whole:
            self.saves.prepare({"sharded": AskedLater(self.parts, lambda: self.optimizers)})

    def parts(self) -> dict:
        """What a save of now would write next to ``meta.pt``."""
        optimizers = [self.optimizer_state(optimizer) for optimizer in self.optimizers]
        return self.named(optimizers, self.lightning_module_state_dict(), b"")

    def named(self, optimizers: list[dict], model: dict, rest: bytes) -> dict:
        parts = {f"optimizer_{i}": state for i, state in enumerate(optimizers)}
        return {**parts, "state_dict": model, _REST: {str(self.global_rank): rest}}

    def lightning_module_state_dict(self) -> dict:
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer) -> dict:
        return get_optimizer_state_dict(self.model, getattr(optimizer, "_optimizer", optimizer))

    def save_checkpoint(self, checkpoint: dict, filepath: str, storage_options=None) -> None:
        if self.saves.hook is None:  # after fit
            return super().save_checkpoint(checkpoint, filepath, storage_options)
        optimizers = checkpoint.pop("optimizer_states", [])
        model = checkpoint.pop("state_dict")
        torch.save(checkpoint, meta := io.BytesIO())
        if b"DTensor" in meta.getvalue():
            raise TypeError("sharded in a callback: all ranks would load rank 0's; use full_tensor")
        parts = self.named(optimizers, model, meta.getvalue())
        saved = self.saves.save({"sharded": parts, "meta": meta}, self.broadcast(filepath))
        wait([saved] if sys.exc_info()[0] else [])  # training has raised: the last one

    def load_checkpoint(self, checkpoint_path: str, weights_only: bool | None = None) -> dict:
        with mock.patch(_LOADS_SHARDS, _load_shards):
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        path = Path(self.broadcast(checkpoint_path))
        if not (path / ".metadata").exists():
            return checkpoint
        rests = []
        for rest in _rests_of_ranks(path):
            rests.append(torch.load(io.BytesIO(rest), weights_only=weights_only))
        if not rests:
            return checkpoint
        return rest_of(rests, self.global_rank, self.world_size, path)

    def remove_checkpoint(self, filepath: str) -> None:
        # until the newest save is complete, this may be the only one
        self.saves.latest.add_done_callback(partial(self.remove_if_saved, Path(filepath)))

    def remove_if_saved(self, old: Path, newest: Future) -> None:
        if self.is_global_zero and not newest.exception() and old.exists():
            super().remove_checkpoint(old.rename(f"{old}.{time.time_ns()}.replaced"))

    def file_exists(self, filepath: str, trainer) -> bool:
        wait([self.saves.latest])  # now it exists, or its save has failed
        return self.broadcast(Path(filepath).exists())

    def optimizer_step(self, optimizer, closure, **rest):
        loss = [closure()]  # before any hook of the optimizer; LBFGS asks again
        return super().optimizer_step(optimizer, lambda: loss.pop() if loss else closure(), **rest)

    def teardown(self) -> None:
        self.saves.__exit__(*sys.exc_info())
        super().teardown()
