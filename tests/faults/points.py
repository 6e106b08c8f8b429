"""Where a save can be hit: hooks around what it calls, counted: a seed finds its point again.

The recipes know nothing of this. A rank that is to be hit counts its hits of each point; the fault
strikes at a given one. Counts of one point are the same in every run, whatever the threads do.
"""

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import state_to_save
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
STAGERS = ("overlapped_stager.py", "staging_copies.py", "staging.py", "_state_dict_stager.py")


def point_of(path: str) -> str | None:
    """The point to which writing, flushing or renaming ``path`` belongs."""
    name = os.path.basename(path)
    if name.endswith(".deleted"):
        return "deletion"
    if name.startswith("latest"):
        return "pointer"
    if name.startswith((".metadata", "manifest")):
        return "metadata"
    if name.startswith("__"):
        return "writing"
    if name.endswith(".incomplete"):
        return "rename"
    return None


class Points:
    """Count hits in this process and call ``struck`` at the chosen one."""

    def __init__(self, strike_at: tuple[str, int] | None, struck: Callable[[str], None]) -> None:
        self.strike_at = strike_at
        self.struck = struck
        self.counts: Counter[str] = Counter()
        self.write_delay_s = 0.0
        self.lock = threading.Lock()

    def hit(self, point: str | None, what: str) -> None:
        if point is None:
            return
        with self.lock:
            self.counts[point] += 1
            strikes = self.strike_at == (point, self.counts[point])
        if point == "writing" and self.write_delay_s:
            time.sleep(self.write_delay_s)
        if strikes:
            self.struck(what)

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
        self.around(state_to_save.AppState, "state_dict", lambda *_: "state_dict")
        for name in ("create_local_plan", "create_global_plan", "finish_plan"):
            self.around(DefaultSavePlanner, name, lambda *_, **__: "planning")
        self.around(torch.Tensor, "copy_", self.staging)
        self.around(os, "rename", self.renamed)
        self.around(os, "replace", lambda _, new: point_of(str(new)))
        self.around(os, "fsync", lambda fd: point_of(os.readlink(f"/proc/self/fd/{fd}")))
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
        return "deletion" if ".deleted" in str(path) else None

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
    with open(root / "ballast", "ab", buffering=0) as ballast:
        try:
            while True:
                ballast.write(bytes(1 << 12))
        except OSError:
            pass
