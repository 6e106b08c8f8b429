# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.1, overlap_recipes/trainers/transformers.py
"""transformers' ``Trainer`` that saves beside training."""

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

from ..checkpoint.reader import Reader
from ..checkpoint.saves import AskedLater, Saves
from ..checkpoint.writer import FileWriter

STOCK_READER = "torch.distributed.checkpoint.FileSystemReader"  # accelerate makes one a load


class TrainerSaves(Saves):
    """Write the folders that accelerate loads, and beside them ``Trainer``'s small files."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.optimizer_files = FileWriter(self.together, self.files.group)

    def write(self, state: dict, directory: Path) -> None:
        super().write({"model": state["model"]}, directory / "pytorch_model_fsdp_0")
        optimizer = {"optimizer": state["optimizer"]}
        self.optimizer_files.write(optimizer, directory / "optimizer_0", self.threads)
        shutil.copytree(state["files"], directory, dirs_exist_ok=True)
        shutil.rmtree(state["files"])

    def prepare_files(self, state: dict) -> None:
        super().prepare_files({"model": state["model"]})
        self.optimizer_files.prepare({"optimizer": state["optimizer"]})

    def commit(self, aside: Path, directory: Path) -> None:
        if self.rank == 0 and directory.exists():  # of an earlier run, or a callback has made it
            for name in set(os.listdir(directory)) - set(os.listdir(aside)):
                (directory / name).rename(aside / name)
            shutil.rmtree(f"{directory}.replaced", ignore_errors=True)
            directory.rename(f"{directory}.replaced")
        super().commit(aside, directory)


class OverlappedTrainer(Trainer):
    """A ``Trainer`` that saves beside training; FSDP2, ``state_dict_type`` SHARDED_STATE_DICT."""

    def train(self, *args, **kwargs):
        if self.args.load_best_model_at_end or self.args.push_to_hub:
            raise ValueError("load_best_model_at_end and push_to_hub need what is not complete yet")
        plugin = self.accelerator.is_fsdp2 and self.accelerator.state.fsdp_plugin
        if not plugin or "SHARDED" not in str(plugin.state_dict_type):
            raise ValueError("OverlappedTrainer needs FSDP2 and state_dict_type SHARDED_STATE_DICT")
        saves = TrainerSaves(self.args.device, lambda: self.model.buffers())
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
        self.saves.save(state, root / files.name)

    def _load_from_checkpoint(self, *args, **kwargs) -> None:
        with mock.patch(STOCK_READER, Reader):
            super()._load_from_checkpoint(*args, **kwargs)

    def _load_optimizer_and_scheduler(self, *args, **kwargs) -> None:
        with mock.patch(STOCK_READER, Reader):
            super()._load_optimizer_and_scheduler(*args, **kwargs)

    def _get_output_dir(self, trial: None) -> str:
        return self.aside

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, "scheduler.pt"))


def save_state(accelerator, saves, model, optimizer, aside: str, directory: Path) -> None:
    """``accelerator.save_state(directory)`` beside training; ``aside`` is a folder of this rank."""
    with (
        mock.patch("accelerate.accelerator.save_fsdp_model"),
        mock.patch("accelerate.accelerator.save_fsdp_optimizer"),
    ):
        accelerator.save_state(files := tempfile.mkdtemp(dir=aside))
    model, optimizer = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    saves.save({"model": model, "optimizer": optimizer, "files": files}, directory)
