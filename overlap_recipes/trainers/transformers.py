# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/trainers/transformers.py
"""transformers' ``Trainer`` that saves during training."""

import os
import shutil
import tempfile
from concurrent.futures import wait
from pathlib import Path
from unittest import mock

import torch
from accelerate.utils.fsdp_utils import _get_model_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from transformers import Trainer

from ..checkpoint.preparation import AskedLater
from ..checkpoint.reader import Reader
from ..checkpoint.saves import Saves
from ..checkpoint.stores.directory import Folder
from ..checkpoint.talk import Talk
from ..checkpoint.writer import FileWriter
from ..checkpoint.writing import Target

_STOCK_READER = "torch.distributed.checkpoint.FileSystemReader"  # accelerate makes one a load


class TrainerFiles:
    """Writes the folders that accelerate loads; see ``Writer`` of ``checkpoint.writing``."""

    def __init__(self) -> None:
        self.model = FileWriter("pytorch_model_fsdp_0")
        self.optimizer = FileWriter("optimizer_0")

    def prepare(self, state: dict, talk: Talk) -> None:
        self.model.prepare({"model": state["model"]}, talk)
        self.optimizer.prepare({"optimizer": state["optimizer"]}, talk)

    def write(self, state: dict, target: Target, talk: Talk, threads: int) -> None:
        self.model.write({"model": state["model"]}, target, talk, threads)
        self.optimizer.write({"optimizer": state["optimizer"]}, target, talk, threads)
        shutil.copytree(state["files"], target.place, dirs_exist_ok=True)
        shutil.rmtree(state["files"])

    def forget(self) -> None:
        self.model.forget()
        self.optimizer.forget()


class TrainerFolder(Folder):
    """Where a checkpoint keeps what another run, or a callback, has put there."""

    def commit(self, files: dict[str, int]) -> None:
        if self.directory.exists():
            for name in set(os.listdir(self.directory)) - set(os.listdir(self.place)):
                (self.directory / name).rename(Path(self.place, name))
            older = Path(f"{self.directory}.replaced")
            shutil.rmtree(older, ignore_errors=True)
            self.directory.rename(older)
        super().commit(files)


class OverlappedTrainer(Trainer):
    """A ``Trainer`` that saves during training; FSDP2, ``state_dict_type`` SHARDED_STATE_DICT."""

    def train(self, *args, **kwargs):
        if self.args.load_best_model_at_end or self.args.push_to_hub:
            raise ValueError("load_best_model_at_end and push_to_hub need what is not complete yet")
        plugin = self.accelerator.is_fsdp2 and self.accelerator.state.fsdp_plugin
        if not plugin or "SHARDED" not in str(plugin.state_dict_type):
            raise ValueError(
                "OverlappedTrainer needs FSDP2 and state_dict_type SHARDED_STATE_DICT, on one GPU "
                "and in place of DDP, too: start it by torchrun, with TrainingArguments(..., "
                'fsdp=True, fsdp_config={"version": 2, "state_dict_type": "SHARDED_STATE_DICT"})'
            )
        saves = Saves(self.args.device, lambda: self.model.buffers(), writer=TrainerFiles())
        with tempfile.TemporaryDirectory() as self.aside, saves as self.saves:
            if self.args.save_strategy != "no":
                self.prepare_saves()
            return super().train(*args, **kwargs)

    def prepare_saves(self) -> None:
        model = AskedLater(self.model_state, list)
        optimizer = AskedLater(self.optimizer_state, self.stepping_optimizers)
        self.saves.prepare({"model": model, "optimizer": optimizer})

    def model_state(self) -> dict:
        return _get_model_state_dict(self.model, True, StateDictOptions())

    def optimizer_state(self) -> dict:
        return get_optimizer_state_dict(self.model, self.optimizer)

    def stepping_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizer, without accelerate's wrapper; none before it is made."""
        if self.optimizer is None:
            return []
        return [getattr(self.optimizer, "optimizer", self.optimizer)]

    def _save_checkpoint(self, model: torch.nn.Module, trial: None) -> None:
        wait([self.saves.latest])  # it has ended: what is older may go
        self.saves.raise_difference()
        root, limit = Path(self.args.output_dir), self.args.save_total_limit or 0
        named = root.glob("checkpoint-*[0-9]") if self.args.should_save and limit > 0 else []
        for old in sorted(named, key=lambda x: (x.stat().st_mtime, len(x.name), x.name))[:-limit]:
            shutil.rmtree(old, ignore_errors=True)
        super()._save_checkpoint(model, trial)
        files = Path(self.aside, f"checkpoint-{self.state.global_step}")
        state = {"model": self.model_state(), "optimizer": self.optimizer_state(), "files": files}
        folder = TrainerFolder((root / files.name).absolute())
        self.saves.save(state, folder)

    def _load_from_checkpoint(self, *args, **kwargs) -> None:
        with mock.patch(_STOCK_READER, Reader):
            super()._load_from_checkpoint(*args, **kwargs)

    def _load_optimizer_and_scheduler(self, *args, **kwargs) -> None:
        with mock.patch(_STOCK_READER, Reader):
            super()._load_optimizer_and_scheduler(*args, **kwargs)

    def _get_output_dir(self, trial: None) -> str:
        return self.aside

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, "scheduler.pt"))


def save_state(accelerator, saves, model, optimizer, aside: str, directory: Path) -> None:
    """``accelerator.save_state(directory)`` during training; ``aside`` is a folder of this rank."""
    with (
        mock.patch("accelerate.accelerator.save_fsdp_model"),
        mock.patch("accelerate.accelerator.save_fsdp_optimizer"),
    ):
        accelerator.save_state(files := tempfile.mkdtemp(dir=aside))
    model, optimizer = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "files": files}
    saves.save(state, TrainerFolder(Path(directory).absolute()))
