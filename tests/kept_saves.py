"""Saves of any state into a store, committed and kept as by the manager; and questions of tests."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import torch

from overlap_recipes.checkpoint.kept import Checkpoint
from overlap_recipes.checkpoint.loading import load_newest
from overlap_recipes.checkpoint.saves import Saves, is_end_of_job
from overlap_recipes.checkpoint.stores import store_of
from overlap_recipes.checkpoint.stores.directory import Directory
from overlap_recipes.checkpoint.stores.store import Store, step_of


class KeptSaves:
    """A block around a loop; ``save`` takes any state and its step."""

    def __init__(
        self,
        root: Path | str | Store,
        device: torch.device | str = "cpu",
        changed_by_forward: Iterable[torch.Tensor] | Callable = (),
        keep_last: int = 100,
        keep_every: int = 0,
    ) -> None:
        self.store = store_of(root) if isinstance(root, Path | str) else root
        self.saves = Saves(device, changed_by_forward)
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.latest: Future | None = None

    def __enter__(self) -> "KeptSaves":
        self.saves.calling.on_first_rank(self.store.open)
        self.saves.__enter__()
        return self

    def save(self, state: dict, step: int) -> Future:
        target = Checkpoint(self.store, step, self.keep_last, self.keep_every)
        self.latest = self.saves.save(state, target)
        return self.latest

    def __exit__(self, kind, error, trace) -> None:
        """As the manager: failures of earlier saves have been logged, that of the last counts."""
        try:
            if is_end_of_job(kind):
                with suppress(RuntimeError):
                    self.saves.wait()
            self.saves.__exit__(kind, error, trace)
            if is_end_of_job(kind) and self.latest is not None:
                self.latest.result()
        finally:
            self.store.close()


def resume(states: dict, root: Path | str, step: int | None = None) -> int:
    """Load as the manager does; the step, 0 if there is no checkpoint."""
    chosen = load_newest(states, store_of(root), step, ())
    return 0 if chosen is None else chosen


def steps_in(root: Path | str) -> list[int]:
    """The steps that have a checkpoint below ``root``, the newest first."""
    return store_of(root).steps()


def newest_step(root: Path | str, every_byte: bool = False) -> int | None:
    """The newest step whose checkpoint is whole."""
    store = store_of(root)
    for step in store.steps():
        if not store.wrong(step, every_byte):
            return step
    return None


def wrong(checkpoint: Path, every_byte: bool = False) -> list[str]:
    """What is wrong with a checkpoint in a directory."""
    return Directory(checkpoint.parent).wrong(step_of(checkpoint.name), every_byte)
