# SPDX-License-Identifier: BSD-3-Clause
# Overlap Recipes 0.2.1, overlap_recipes/checkpoint/stores.py
"""The three places of a job's checkpoints, as the manager sees them: alike but for where they are.

Each has ``root``, ``saves``, and the same methods; all ranks call ``load`` and ``save``.
"""

import uuid
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

import torch.distributed as dist

from .durable import committed_steps
from .loading import load
from .names import name_of
from .restart import load_newest, of_all_ranks
from .retention import RetainedSaves
from .two_hosts import PartnerSaves, gather, steps_in

NONE_IS_WHOLE = (
    "no checkpoint is what was committed, by step: %s. To begin anew, remove them or take another "
    "root"
)


class SharedDirectory:
    """A directory that all ranks see."""

    def __init__(self, root: Path | str, settings: dict) -> None:
        self.root = Path(root).absolute()
        self.saves = RetainedSaves(self.root, **settings)

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, the newest first."""
        return committed_steps(self.root)

    def leave_probe(self) -> str:
        """Write a file for other ranks to look for; return its name."""
        name = f"probe.{uuid.uuid4().hex}"
        (self.root / name).touch()
        return name

    def sees(self, probe: str) -> bool:
        return (self.root / probe).exists()

    def remove(self, probe: str) -> None:
        (self.root / probe).unlink()

    def load(self, state: dict, step: int | None, skip: Iterable[str]) -> int | None:
        """Load the newest checkpoint, or that of ``step``; return its step, None if there is none.

        All ranks get the same.
        """
        return load_newest(state, self.root, step, skip)

    def save(self, state: dict, step: int) -> Future:
        return self.saves.save(state, self.root / name_of(step))


class DirectoryOfEachHost:
    """A directory of each host's own disk; ``load`` gathers what the hosts have between them."""

    def __init__(self, root: Path | str, settings: dict) -> None:
        if not dist.is_initialized():
            raise ValueError("on_each_host needs a process group: call init_process_group first")
        self.root = Path(root).absolute()
        self.saves = PartnerSaves(**settings)

    def steps(self) -> list[int]:
        return steps_in(self.root)

    def leave_probe(self) -> None:
        """There is nothing that other ranks should see."""

    def sees(self, probe: None) -> bool:
        return True

    def remove(self, probe: None) -> None:
        """There is nothing."""

    def load(self, state: dict, step: int | None, skip: Iterable[str]) -> int | None:
        if step is not None:
            raise ValueError("hosts gather the newest step that they have between them: give none")
        chosen = gather(self.root)
        if chosen is not None:
            load(state, self.root / name_of(chosen), skip=skip)
        return chosen

    def save(self, state: dict, step: int) -> Future:
        return self.saves.save(state, self.root / name_of(step))


class ObjectStore:
    """An object store, by a URL that fsspec knows."""

    def __init__(self, url: str, settings: dict) -> None:
        from . import object_storage  # which needs fsspec

        self.objects = object_storage
        self.root = url
        self.saves = object_storage.ObjectSaves(url, **settings)

    def steps(self) -> list[int]:
        return self.objects.committed(self.root)

    def leave_probe(self) -> str:
        return self.objects.leave_probe(self.root)

    def sees(self, probe: str) -> bool:
        return self.objects.sees(self.root, probe)

    def remove(self, probe: str) -> None:
        self.objects.remove(self.root, probe)

    def load(self, state: dict, step: int | None, skip: Iterable[str]) -> int | None:
        chosen = self.choose(step)
        if chosen is not None:
            load(state, self.objects.reader(self.root, chosen), skip=skip)
        return chosen

    def choose(self, step: int | None) -> int | None:
        """The step to load, the same on all ranks; None if there is no checkpoint."""
        error = None
        if not dist.is_initialized() or dist.get_rank() == 0:
            try:
                step = self.newest_whole(step)
            except Exception as failure:  # whatever a store raises: other ranks wait for the answer
                error = failure
        step, error = of_all_ranks((step, error))[0]
        if error is not None:
            raise RuntimeError(f"cannot resume from {self.root}: {error}") from error
        return step

    def newest_whole(self, step: int | None) -> int | None:
        """On rank 0: the step to resume from; newer ones are set aside."""
        there = self.steps()
        if step is None:
            wrong_by_step = {}
            for candidate in there:
                wrong_by_step[candidate] = self.objects.wrong_objects(self.root, candidate)
                if not wrong_by_step[candidate]:
                    step = candidate
                    break
            if there and step is None:
                raise RuntimeError(NONE_IS_WHOLE % wrong_by_step)
        elif step not in there:
            raise RuntimeError(f"there is no step {step}, only {there}")
        else:
            wrong = self.objects.wrong_objects(self.root, step)
            if wrong:
                raise RuntimeError(f"step {step} is not what was committed: {wrong}")
        for newer in there:
            if step is None or newer > step:
                self.objects.set_aside(self.root, newer)
        return step

    def save(self, state: dict, step: int) -> Future:
        return self.saves.save(state, step)


def store_of(root: Path | str, on_each_host: bool, settings: dict):
    """The store of ``root``.

    Raises:
        ValueError: ``root`` is a URL and of each host, or a URL as a ``Path``.
    """
    is_url = "://" in str(root)
    scheme, _, _ = str(root).partition("/")  # Path("s3://b") is "s3:/b"
    if scheme.endswith(":") and not is_url:
        raise ValueError(f"{root} has lost a slash, as a Path does: give the URL as text")
    if is_url and on_each_host:
        raise ValueError(f"{root} is a store that all hosts see: leave out on_each_host")
    if is_url:
        return ObjectStore(str(root), settings)
    if on_each_host:
        return DirectoryOfEachHost(root, settings)
    return SharedDirectory(root, settings)
