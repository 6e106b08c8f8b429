# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/trainers/torchtitan.py
"""torchtitan's ``CheckpointManager`` that saves during training."""

import atexit
import sys
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpointer.base import MODEL, OPTIMIZER
from torchtitan.components.checkpointer.dcp import AsyncMode, CheckpointManager

from ..checkpoint.reader import Reader
from ..checkpoint.saves import Saves
from ..checkpoint.state import digest

_ADVICE = "give each rank's state a name of its own, as torchtitan's loaders do (dp_rank_0)"


def _digests_without_tensors(state: dict) -> dict[str, str]:
    """Digests of what is no tensor; the optimizer's settings are those of the schedulers."""
    found: dict[str, str] = {}
    for name in state.keys() - {OPTIMIZER}:
        _add_digests(state[name], name, found)
    return found


def _add_digests(tree: object, name: str, found: dict[str, str]) -> None:
    if isinstance(tree, dict):
        for key, value in tree.items():
            _add_digests(value, f"{name}.{key}", found)
    elif not torch.is_tensor(tree):
        found[name] = digest(tree)


class OverlappedCheckpointManager(CheckpointManager):
    """torchtitan's ``CheckpointManager``, which saves during training."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        async_mode: Literal["disabled", "async"] = "async"

    def __init__(self, config: Config, *, model_parts: list, **others) -> None:
        self.block = ExitStack()
        super().__init__(config, model_parts=model_parts, **others)
        if self.enable:
            if config.async_mode == "async_with_pinned_mem" or "://" in self.folder:
                raise ValueError("needs async_mode 'async' or 'disabled', and a folder on disk")
            saves = Saves(
                next(model_parts[0].parameters()).device,
                torch.nn.ModuleList(model_parts).buffers,
                shared=_digests_without_tensors,
                advice=_ADVICE,
            )
            self.saves = self.block.enter_context(saves)
            if self.async_mode != AsyncMode.DISABLED:
                self.saves.prepare(self._flattened_model_states_sd())
            atexit.register(self.close)  # Ctrl-C ends torchtitan without a call of ``close``

    def dcp_save(
        self, state_dict: dict, checkpoint_id: str, async_mode: AsyncMode, **options
    ) -> Future | None:
        if async_mode == AsyncMode.DISABLED:  # the last step: its weights may have another dtype
            Path(checkpoint_id, ".metadata").unlink(missing_ok=True)  # of an older one
            return super().dcp_save(state_dict, checkpoint_id, async_mode, **options)
        return self.saves.save(state_dict, Path(checkpoint_id))

    def dcp_load(
        self, state_dict: dict, checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        if from_hf or "://" in str(checkpoint_id):
            return super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        dcp.load(state_dict, storage_reader=Reader(checkpoint_id))
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)

    def complete_steps(self, folder: str = "") -> list[int]:
        found = Path(folder or self.folder).glob("step-*/.metadata")
        steps = [path.parent.name.removeprefix("step-") for path in found]
        return sorted(int(step) for step in steps if step.isdigit())

    def _find_load_step(self, folder: str = "") -> int:
        return max(self.complete_steps(folder), default=-1)

    def _purge_stale_checkpoints(self) -> None:
        if self._should_purge():
            for step in self.complete_steps()[: -self.keep_latest_k]:
                self.purge_queue.put(self._create_checkpoint_id(step))

    def _close(self) -> None:
        atexit.unregister(self.close)
        self.block.__exit__(*sys.exc_info())
        super()._close()
