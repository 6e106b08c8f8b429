"""Which line of torch a call comes from, for accesses that no line of the script causes."""

from pathlib import Path

import torch

from rankproof.imports import frames

TORCH = str(Path(torch.__file__).parent)
DISPATCHERS = tuple(f"{TORCH}/{name}" for name in ("_dynamo", "_compile.py", "utils/_"))


def torch_line() -> str:
    """The innermost line of torch that is none of its dispatchers'."""
    for frame in frames(DISPATCHERS):
        file = frame.f_code.co_filename
        if file.startswith(TORCH):
            return f"torch/{Path(file).relative_to(TORCH)}:{frame.f_lineno}"
    return "unknown line"
