"""What the harness needs to know about the script's own imports and its own lines."""

import importlib.abc
import importlib.util
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

HARNESS = str(Path(__file__).parent)
STDLIB = sysconfig.get_path("stdlib") + "/"
DCP = "torch.distributed.checkpoint"


class _AfterImport(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self.name, self.call = name, call

    def find_spec(self, name, path, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        exec_module = spec.loader.exec_module

        def exec_and_call(module) -> None:
            exec_module(module)
            self.call()

        spec.loader.exec_module = exec_and_call
        return spec


def after_import(name: str, call: Callable[[], None]) -> None:
    """Call ``call`` when ``name`` has been imported: now, if it is; never, if nobody does."""
    if name in sys.modules:
        call()
    else:
        sys.meta_path.insert(0, _AfterImport(name, call))


def torch_folder() -> str:
    return sys.modules["torch"].__path__[0] + "/"


def frames(depth: int = 2) -> Iterator[FrameType]:
    """The frames of the calling thread, the caller's caller first."""
    frame = sys._getframe(depth)
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_recipe(frame: FrameType) -> bool:
    """Whether a frame belongs neither to torch, the standard library nor the harness."""
    file = frame.f_code.co_filename
    if file.startswith((torch_folder(), HARNESS, "<")):
        return False
    return "-packages/" in file or not file.startswith(STDLIB)


def called_by_recipe() -> bool:
    """Whether the caller of the function that asks was called by the script or its libraries."""
    return is_recipe(sys._getframe(2))


def line_of(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
