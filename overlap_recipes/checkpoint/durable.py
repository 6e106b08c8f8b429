# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.1, overlap_recipes/checkpoint/durable.py
"""A commit that is durable on every rank before the checkpoint has its name; manifests, faults."""

import os
import shutil
import time
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from .digests import MANIFEST, described, has_changed, manifest_text, read_manifest
from .names import check_name, name_of, steps_of
from .saves import Saves

POINTER = "latest"  # in the root: the name of the newest checkpoint, for people and other programs


def flush(path: Path) -> None:
    """Return when ``path``, a file or a directory, is on the storage."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` in one step: readers see the old content or the new."""
    aside = path.with_name(f"{path.name}.new")
    aside.write_text(text)
    flush(aside)
    aside.replace(path)
    flush(path.parent)


def faults(directory: Path, digests: bool = False) -> list[str]:
    """What is wrong with the checkpoint ``directory``, one line per file; [] if it is complete.

    Args:
        digests: read every byte, too.
    """
    parts = sorted(directory.glob(MANIFEST.format("*")))
    try:
        manifests = [read_manifest(part) for part in parts]
        files = {name: what for part in manifests for name, what in part["files"].items()}
        ranks = {part["ranks"] for part in manifests}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"a manifest cannot be read: {error!r}"]
    if ranks != {len(parts)}:
        return [f"{len(parts)} manifests, of a job of {ranks or 'no'} ranks"]
    found = []
    for name, expected in files.items():
        file = directory / name
        if not file.is_file():
            found.append(f"{name}: missing")
        elif file.stat().st_size != expected.get("bytes"):
            found.append(f"{name}: {file.stat().st_size} bytes, not {expected.get('bytes')}")
        elif digests and has_changed(file, expected):
            found.append(f"{name}: its content has changed")
    return found


def committed_steps(root: Path | str) -> list[int]:
    """The steps whose checkpoints have their final name, the newest first."""
    return steps_of(path.name for path in Path(root).glob("step*"))


def newest_step(root: Path | str, digests: bool = False) -> int | None:
    """The newest step whose checkpoint is complete, None if there is none."""
    for step in committed_steps(root):
        if not faults(Path(root, name_of(step)), digests):
            return step
    return None


class DurableSaves(Saves):
    """Overlapped saves that are durable once their future is done.

    The future of a save that failed raises a ``RuntimeError`` on every rank. Nothing of a save that
    could not be written stays on disk; one whose commit failed may stay as ``.incomplete``. Older
    checkpoints are untouched, training goes on, and the next save can succeed, unless a rank has
    died or was ten minutes late.
    """

    latest: Future | None = None

    def save(self, state_dict: dict, directory: Path) -> Future | None:
        """As ``Saves.save``; ``directory`` is ``root / name_of(step)``.

        Raises:
            ValueError: the name of ``directory`` does not stand for a step.
        """
        check_name(Path(directory))
        upload = super().save(state_dict, directory)
        if upload is not None:
            self.latest = upload
        return upload

    def wait(self) -> None:
        """Return when all saves have ended.

        Raises:
            RuntimeError: the latest one failed. Failures of earlier ones have been logged.
        """
        with suppress(RuntimeError):
            super().wait()
        if self.latest is not None:
            self.latest.result()

    def write(self, state: dict, directory: Path) -> None:
        """Write this rank's part of ``state``, which flushes it, and describe it."""
        super().write(state, directory)
        files = list(directory.glob(f"__{self.rank}_*"))
        if self.rank == 0:
            files.append(directory / ".metadata")
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        manifest = manifest_text(ranks, {file.name: described(file) for file in files})
        write_durably(directory / MANIFEST.format(self.rank), manifest)

    def commit(self, aside: Path, directory: Path) -> None:
        """Give the checkpoint its name, durably; then update the pointer."""
        if self.rank != 0:
            return
        if directory.exists():
            if not faults(directory, digests=True):
                shutil.rmtree(aside)
                raise FileExistsError(f"{directory} is there and whole")
            directory.rename(f"{directory}.damaged-{time.time_ns()}")
        aside.rename(directory)
        flush(directory.parent)
        write_durably(directory.with_name(POINTER), directory.name)
