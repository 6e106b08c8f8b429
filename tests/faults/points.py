"""Where a save can be hit: hooks around what it calls, counted: a seed finds its point again.

The recipes know nothing of this. A rank that is to be hit counts its hits of each point; the fault
strikes at a given one. Counts of one point are the same in every run, whatever the threads do.
"""

import json
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import _toys
import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem

POINTS = (
    "state_dict",
    "staging",
    "planning",
    "writing",
    "metadata",
    "rename",
    "pointer",
    "deletion",
)
STAGERS = ("checkpoint/copies.py", "staging.py", "_state_dict_stager.py", "_state_dict_utils.py")


SLOW_WRITE_S = 0.001
BALLAST = "ballast"


def point_of(path: str) -> str | None:
    """The point to which writing, flushing or renaming ``path`` belongs."""
    name = os.path.basename(path)
    if name.endswith(".deleted"):
        return "deletion"
    if name.startswith("latest"):
        return "pointer"
    if name.startswith((".metadata", "manifest", "metadata.pkl")):
        return "metadata"
    if name.startswith("__") or name.endswith(".pt"):
        return "writing"
    if name.endswith(".incomplete") or name.startswith("tmp_step"):
        return "rename"
    return None


@dataclass(frozen=True)
class Fault:
    """What strikes which rank, and at which hit of which point."""

    kind: str
    point: str
    rank: int
    hit: int


class Points:
    """Count hits in this process; what ``fault`` says strikes at the hit that it names."""

    def __init__(self, fault: Fault | None, root: Path, pipe: int) -> None:
        self.fault, self.root, self.pipe = fault, root, pipe
        self.counts: Counter[str] = Counter()
        self.lock = threading.Lock()

    def strike(self, what: str) -> None:
        tell(self.pipe, event="struck", what=what, thread=threading.current_thread().name)
        kind = self.fault.kind
        if kind == "raise":
            raise OSError(5, "injected")
        if kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "term":
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
        elif kind == "late":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(20)
        elif kind == "full":
            fill(self.root)
        else:  # kill, slow, truncated, flipped: what follows is the observer's
            os.kill(os.getpid(), signal.SIGKILL)

    def hit(self, point: str | None, what: str) -> None:
        if point is None:
            return
        with self.lock:
            self.counts[point] += 1
            here = self.fault is not None and self.fault.point == point
            strikes = here and self.fault.hit == self.counts[point]
        if here and self.fault.kind == "slow":
            time.sleep(SLOW_WRITE_S)
        if strikes:
            self.strike(what)

    def around(self, owner: object, name: str, point: Callable[..., str | None]) -> None:
        """Hit the point that ``point(*args)`` names before and after each call."""
        original = getattr(owner, name)

        def call(*args, **kwargs):
            where = point(*args, **kwargs)
            self.hit(where, f"before {name}")
            result = original(*args, **kwargs)
            self.hit(where, f"after {name}")
            return result

        setattr(owner, name, call)

    def install(self) -> None:
        for name in ("state_dict", "state_in_place"):  # what DCP asks, and what a save asks
            self.around(_toys.AppState, name, lambda *_: "state_dict")
        for name in ("create_local_plan", "create_global_plan", "finish_plan"):
            self.around(DefaultSavePlanner, name, lambda *_, **__: "planning")
        self.around(torch.Tensor, "copy_", self.staging)
        self.around(torch, "_foreach_copy_", self.staging)
        self.around(torch.UntypedStorage, "copy_", self.staging)
        self.around(os, "rename", self.renamed)
        self.around(os, "replace", lambda _, new: point_of(str(new)))
        self.around(os, "fsync", lambda fd: point_of(os.readlink(f"/proc/self/fd/{fd}")))
        self.around(os, "pwritev", lambda fd, *_: point_of(os.readlink(f"/proc/self/fd/{fd}")))
        self.around(os, "unlink", self.removed)
        self.around(os, "rmdir", self.removed)
        self.watch_streams()

    def staging(self, *_, **__) -> str | None:
        frame = sys._getframe(2)
        return "staging" if frame.f_code.co_filename.endswith(STAGERS) else None

    def renamed(self, old: object, new: object) -> str | None:
        return point_of(str(new)) or point_of(str(old))

    def removed(self, path: object, *, dir_fd: int | None = None) -> str | None:
        if dir_fd is not None:
            path = os.readlink(f"/proc/self/fd/{dir_fd}")
        return "deletion" if re.search(r"\.deleted|/step-\d", str(path)) else None

    def watch_streams(self) -> None:
        create_stream, hit = FileSystem.create_stream, self.hit

        class Watched:
            def __init__(self, stream: object, point: str | None) -> None:
                self.stream, self.point = stream, point

            def write(self, data: object) -> int:
                hit(self.point, "write")
                return self.stream.write(data)

            def __getattr__(self, name: str) -> object:
                return getattr(self.stream, name)

        @contextmanager
        def watched(fs: FileSystem, path: str | os.PathLike, mode: str) -> Iterator:
            with create_stream(fs, path, mode) as stream:
                yield Watched(stream, point_of(str(path))) if "w" in mode else stream

        FileSystem.create_stream = watched


def tell(pipe: int, **message: object) -> None:
    """One line to the observer; short lines are written in one piece."""
    os.write(pipe, json.dumps(message).encode() + b"\n")


def fill(root: Path) -> None:
    """Take all the room that is left below ``root``."""
    with open(root / BALLAST, "ab", buffering=0) as ballast:
        try:
            while True:
                ballast.write(bytes(1 << 12))
        except OSError:
            pass
