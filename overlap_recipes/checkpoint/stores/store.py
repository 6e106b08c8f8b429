# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.3.0, overlap_recipes/checkpoint/stores/store.py
"""What a store of checkpoints gives, and the names of checkpoints in it.

A store knows names and bytes: what it is asked for, and nothing of ranks, of states, or of when a
checkpoint counts. Which one is resumed, pruned or refused is decided above, for all stores alike.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch.distributed.checkpoint as dcp

from ..writing import Sink

NAME = re.compile(r"step(0|[1-9][0-9]*)")


def name_of(step: int) -> str:
    """The name of the checkpoint of ``step``."""
    return f"step{step}"


def step_of(name: str) -> int | None:
    """The step that a name stands for; None for any other, such as ``step-5`` or ``step05``."""
    found = NAME.fullmatch(name)
    return int(found.group(1)) if found else None


def steps_of(names: Iterable[str]) -> list[int]:
    """The steps of all ``names`` that stand for one, the newest first."""
    found = []
    for name in names:
        step = step_of(name)
        if step is not None:
            found.append(step)
    return sorted(found, reverse=True)


class Store(Protocol):
    """Checkpoints below a root, by step.

    Attributes:
        root: the directory, or the URL.
    """

    root: Path | str

    def open(self) -> None:
        """On rank 0: take the root for this job, and remove what crashes have left.

        Raises:
            RuntimeError: another job has it; it cannot be reached, or keeps no promise.
        """

    def close(self) -> None:
        """On rank 0: the job has ended."""

    def leave_probe(self) -> str:
        """Write a file for other ranks to look for; return its name."""

    def sees(self, probe: str) -> bool: ...

    def remove_probe(self, probe: str) -> None: ...

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, whole or damaged, the newest first.

        Raises:
            RuntimeError: the root was opened here, and another job has taken it since.
        """

    def wrong(self, step: int, every_byte: bool = False) -> list[str]:
        """What is wrong with the checkpoint of ``step``, a line each; [] if it is whole.

        Args:
            every_byte: compare digests, too, and not names and sizes alone.
        """

    def sizes(self, step: int) -> dict[str, int]:
        """The files of the checkpoint of ``step`` that are there, with their bytes."""

    def reader(self, step: int) -> dcp.StorageReader:
        """What ``dcp.load`` reads the checkpoint with; it checks the bytes that it reads."""

    def set_aside(self, step: int, why: str) -> None:
        """Give the checkpoint of ``step`` a name with ``why``, under which it is none."""

    def remove(self, step: int) -> None:
        """Delete the checkpoint of ``step``; what a crash leaves of it is none."""

    def unfinished(self) -> list[str]:
        """Names of what crashes have left over."""

    def begin(self, step: int, nbytes: int) -> str:
        """On rank 0: where a save of ``step`` is written until it is committed.

        Raises:
            OSError: there is no room for ``nbytes``.
        """

    def join(self, place: str) -> None:
        """On any rank: be ready to write to ``place``."""

    def create(self, place: str, name: str) -> Sink: ...

    def settle(self, place: str) -> None:
        """Return when the storage has the names of the files that this rank has written."""

    def commit(self, step: int, place: str, files: dict[str, int]) -> None:
        """On rank 0: make what is at ``place`` the checkpoint of ``step``, in one step.

        ``steps`` is asked right before, and has refused a root that another job has taken.

        Raises:
            FileExistsError: there is a checkpoint of ``step``.
        """

    def drop(self, place: str) -> None:
        """Delete what is at ``place``, if that can be done; a failure is no error."""
