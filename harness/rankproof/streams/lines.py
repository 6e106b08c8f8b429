"""Which line an access comes from: the script's, else torch's.

Looked for at each operator, a line would cost more than all else that is noted of it. So a
:class:`Line` keeps the stack as torch's own profiler does, and is told when somebody asks.
"""

from pathlib import Path

import torch
from torch._C._profiler import gather_traceback, symbolize_tracebacks

from rankproof.imports import HARNESS, innermost_line

TORCH = str(Path(torch.__file__).parent)
DISPATCHERS = tuple(f"{TORCH}/{name}" for name in ("_dynamo", "_compile.py", "utils/_"))


class Line:
    """The line that a thread runs: the script's, else torch's and who started the thread."""

    __slots__ = ("stack", "origin", "text")

    def __init__(self, origin: object = "") -> None:
        self.stack = gather_traceback(True, False, False)  # Python's calls, no C++
        self.origin = origin
        self.text = ""

    def __str__(self) -> str:
        if not self.text:
            (stack,) = symbolize_tracebacks([self.stack])
            calls = [(call["filename"], call["line"]) for call in stack]
            started = f" (thread started at {self.origin})" if self.origin else ""
            self.text = innermost_line(calls) or torch_line(calls) + started
        return self.text


def torch_line(calls: list[tuple[str, int]]) -> str:
    """The innermost line of torch that is none of its dispatchers'."""
    hidden = (HARNESS, *DISPATCHERS)
    for file, line in calls:
        if file.startswith(TORCH) and not file.startswith(hidden):
            return f"torch/{Path(file).relative_to(TORCH)}:{line}"
    return "unknown line"
