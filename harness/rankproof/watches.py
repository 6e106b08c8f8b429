"""What watches a rank: the files that it writes, its threads, its children, its warnings."""

import concurrent.futures
import contextlib
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rankproof.errors import summary
from rankproof.imports import around, called_by_recipe, frames, recipe_line, torch_folder

MULTIPROCESSING = os.path.dirname(multiprocessing.__file__)
STARTERS = (threading.__file__, os.path.dirname(concurrent.futures.__file__))
DEPRECATED = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)


class FileWatch:
    """Sees, by an audit hook, what this process writes, and which directories it moves or removes.

    ``elsewhere`` is what was written outside the allowed directories. ``on_written``,
    ``on_renamed`` and ``on_removed`` are called with absolute paths before it happens.
    """

    WRITING_EVENTS = {"os.mkdir": 0, "os.rename": 1, "os.link": 1, "os.symlink": 1}
    EVENTS = frozenset(("open", "os.rmdir", "shutil.rmtree", *WRITING_EVENTS))

    def __init__(self, allowed: list[str]) -> None:
        real = [f"{os.path.realpath(path)}/" for path in allowed]
        self.allowed = tuple(real) + ("/dev/", "/proc/", "/memfd:")
        self.elsewhere: set[str] = set()
        self.on_written: Callable[[str], None] = _ignore
        self.on_renamed: Callable[[str, str], None] = _ignore
        self.on_removed: Callable[[str], None] = _ignore
        self.inside_hook = threading.local()
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple) -> None:
        if event not in self.EVENTS or getattr(self.inside_hook, "busy", False):
            return
        self.inside_hook.busy = True
        try:
            self._see(event, args)
        finally:
            self.inside_hook.busy = False

    def _see(self, event: str, args: tuple) -> None:
        if event == "os.rename" and os.path.isdir(args[0]):
            self.on_renamed(_absolute(args[0]), _absolute(args[1]))
        if event in ("shutil.rmtree", "os.rmdir") and args[1] in (None, -1):
            # else relative to an open directory that rmtree empties
            self.on_removed(_absolute(args[0]))
        path = self._written_by(event, args)
        if not isinstance(path, (str, bytes, os.PathLike)):  # a descriptor, or nothing
            return
        self.on_written(_absolute(path))
        real = os.path.realpath(os.fsdecode(path))
        if event == "os.mkdir" and any(place.startswith(f"{real}/") for place in self.allowed):
            return  # it leads to a directory that is allowed
        if not f"{real}/".startswith(self.allowed):
            self.elsewhere.add(real)

    def _written_by(self, event: str, args: tuple) -> object:
        """What an event writes; None if it writes nothing."""
        if event == "open":
            path, _, flags = args
            if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return path
        elif event in self.WRITING_EVENTS:
            return args[self.WRITING_EVENTS[event]]
        return None


def _ignore(*paths: str) -> None:
    pass


def _absolute(path: str | bytes | os.PathLike) -> str:
    return os.path.abspath(os.fsdecode(path))


class ThreadWatch:
    """Remembers which line started each thread, and what is raised and no caller will see."""

    def __init__(self) -> None:
        self.started: dict[threading.Thread, str] = {}  # the recipe's line
        self.compilers: set[threading.Thread] = set()  # torch's compiler's own
        self.errors: list[str] = []
        around(threading.Thread, "start", self._starts)
        around(threading, "excepthook", self._raises)
        around(sys, "unraisablehook", self._raises_at_exit)

    def _starts(self, thread: threading.Thread) -> None:
        self.started[thread] = recipe_line()
        if next(frames(STARTERS)).f_code.co_filename.startswith(torch_folder() + "_inductor"):
            self.compilers.add(thread)

    def _raises(self, args: threading.ExceptHookArgs) -> None:
        name = args.thread.name if args.thread else "a thread"
        if args.exc_value is not None and args.exc_type is not SystemExit:
            self.errors.append(f"{summary(args.exc_value)} (in thread {name}, seen by nobody)")

    def _raises_at_exit(self, unraisable: Any) -> None:
        """The interpreter prints it, and exits 0."""
        if "atexit" in (unraisable.err_msg or ""):
            self.errors.append(f"{summary(unraisable.exc_value)} (in a callback of atexit)")

    def alive(self) -> list[str]:
        """The threads that the interpreter will wait for when it ends, but torch's compiler's."""
        left = {t for t in threading.enumerate() if not t.daemon} - self.compilers
        left.discard(threading.current_thread())
        starts = {t: f", started at {line}" for t, line in self.started.items() if line}
        return sorted(thread.name + starts.get(thread, "") for thread in left)


class ChildWatch:
    """Knows how the processes ended that the recipe has started by ``multiprocessing.Process``."""

    def __init__(self) -> None:
        self.started: dict[BaseProcess, str] = {}  # the recipe's line
        self.looked_at: set[BaseProcess] = set()  # ended by the recipe, or asked how they ended
        self.exit_code = BaseProcess.exitcode.fget
        around(BaseProcess, "start", self._starts)
        for name in ("terminate", "kill"):
            around(BaseProcess, name, self.looked_at.add)
        BaseProcess.exitcode = property(self._look)  # also sees who asks

    def _starts(self, process: BaseProcess) -> None:
        if called_by_recipe((MULTIPROCESSING,)):
            self.started[process] = recipe_line()

    def _look(self, process: BaseProcess) -> int | None:
        if called_by_recipe((MULTIPROCESSING,)):
            self.looked_at.add(process)
        return self.exit_code(process)

    def died(self) -> list[str]:
        """Those that ended badly, and the recipe never asked. Daemons are ended at the end."""
        found = []
        for process, line in self.started.items():
            with contextlib.suppress(ValueError):  # it was closed
                code = self.exit_code(process)
                ended_as_a_daemon = process.daemon and code == -signal.SIGTERM
                if code and process not in self.looked_at and not ended_as_a_daemon:
                    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                    found.append(f"{process.name} ended with {how}, started at {line}")
        return found


def watch_deprecations(folders: list[str]) -> list[str]:
    """A list that fills with the deprecation warnings that point at the recipe's folders."""
    seen: list[str] = []
    for category in DEPRECATED:
        warnings.simplefilter("default", category)

    def noted(message, category, filename, lineno, *_) -> None:
        if issubclass(category, DEPRECATED) and filename.startswith(tuple(folders)):
            seen.append(f"{os.path.basename(filename)}:{lineno}: {message}")

    around(warnings, "showwarning", noted)
    return seen


def keep_temporary_directories(kept: Path) -> None:
    """Move a ``TemporaryDirectory`` aside where it is removed: its path is gone, as it must be,
    and the judge still finds what was in it."""
    import tempfile

    remove, count = tempfile.TemporaryDirectory._rmtree, itertools.count()

    def move(cls, name, *args, **kwargs) -> None:
        try:
            os.rename(name, kept / f"rank{os.environ.get('RANK', 0)}-{os.getpid()}-{next(count)}")
        except OSError:  # on another file system
            remove(name, *args, **kwargs)

    tempfile.TemporaryDirectory._rmtree = classmethod(move)
    tempfile.tempdir = None
