"""What the harness needs to know about the script's own imports, and about who calls it."""

import importlib.abc
import importlib.util
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cache, wraps
from pathlib import Path
from types import FrameType

HARNESS = str(Path(__file__).parent)
STDLIB = sysconfig.get_path("stdlib") + "/"
DCP = "torch.distributed.checkpoint"
THREAD_START = threading.Thread.start.__code__
SCRIPT = "script"
LIBRARY = "library"  # that the script uses
BELOW = "below"  # torch, the standard library, the harness


class _AfterImport(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self.name = name
        self.call = call

    def find_spec(self, name, path, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        around(spec.loader, "exec_module", after=lambda *_: self.call())
        return spec


def after_import(name: str, call: Callable[[], None]) -> None:
    """Call ``call`` when ``name`` has been imported: now, if it is; never, if nobody does."""
    if name in sys.modules:
        call()
    else:
        sys.meta_path.insert(0, _AfterImport(name, call))


def around(
    owner: object, name: str, before: Callable | None = None, after: Callable | None = None
) -> Callable[[], None]:
    """Call ``before(*args, **kwargs)`` and ``after(result, *args, **kwargs)`` with ``owner.name``.

    What raises has no result: None. Returns what puts the original back.
    """
    original = getattr(owner, name)

    @wraps(original)  # torch reads the signatures of planners
    def call(*args, **kwargs):
        result = None
        if before:
            before(*args, **kwargs)
        try:
            result = original(*args, **kwargs)
            return result
        finally:
            if after:
                after(result, *args, **kwargs)

    setattr(owner, name, call)
    return lambda: setattr(owner, name, original)


@cache
def torch_folder() -> str:
    return sys.modules["torch"].__path__[0] + "/"


def frames(passing: tuple[str, ...] = ()) -> Iterator[FrameType]:
    """This thread's frames, innermost first, without the harness's and those of files ``passing``
    names by their beginning."""
    hidden = (HARNESS, *passing)
    frame = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(hidden):
            yield frame
        frame = frame.f_back


@cache
def belongs_to(file: str) -> str:
    """Whose code a file has: ``SCRIPT``, ``LIBRARY`` or ``BELOW``."""
    if file.startswith((torch_folder(), HARNESS, "<")):
        return BELOW
    if "-packages/" in file:
        return LIBRARY
    return BELOW if file.startswith(STDLIB) else SCRIPT


def is_recipe(frame: FrameType) -> bool:
    """Whether a frame belongs neither to torch, the standard library nor the harness."""
    return belongs_to(frame.f_code.co_filename) != BELOW


def called_by_recipe(passing: tuple[str, ...] = ()) -> bool:
    """Whether what the harness stands before was called by the script or its libraries."""
    caller = next(frames(passing), None)
    return caller is not None and is_recipe(caller)


def main_thread_waits() -> bool:
    """Whether the script's main thread waits, and neither torch nor the harness for it.

    To wait until a new thread has begun is no waiting.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    if not recipe_line():  # the script has ended: the harness waits
        return False
    if any(frame.f_code is THREAD_START for frame in frames()):
        return False
    waiting = next(frames((threading.__file__,)))  # what called threading's own code
    return not waiting.f_code.co_filename.startswith(torch_folder())


@cache
def name_of(file: str) -> str:
    return os.path.basename(file)


def recipe_line() -> str:
    """The innermost line of the script, else of its libraries, empty if there is none."""
    return innermost_line((frame.f_code.co_filename, frame.f_lineno) for frame in frames())


def innermost_line(calls: Iterable[tuple[str, int]]) -> str:
    """The same of calls, each a file and a line, innermost first."""
    library = ""
    for file, line in calls:
        owner = belongs_to(file)
        if owner == SCRIPT:
            return f"{name_of(file)}:{line}"
        if owner == LIBRARY and not library:
            library = f"{name_of(file)}:{line}"
    return library
