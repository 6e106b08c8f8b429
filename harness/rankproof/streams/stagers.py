"""``DefaultStager``: whether its thread copies in turn with the default stream, on any machine.

With ``use_non_blocking_copy=False`` it does. On a CPU nothing else is possible: a script whose
source also has a stager with other options, for accelerators, is judged as it behaves there. Its
thread then copies on a stream of its own.
"""

import ast
from pathlib import Path

from rankproof.imports import after_import, frames, is_recipe
from rankproof.streams.recorder import Recorder

STAGING = "torch.distributed.checkpoint.staging"
BLOCKING = "use_non_blocking_copy"
ITS_POSITION = 3


def watch(recorder: Recorder) -> None:
    """See who makes a stager."""

    def stands_around() -> None:
        from torch.distributed.checkpoint.staging import DefaultStager

        recorder.watch(DefaultStager, "__init__", made)

    after_import(STAGING, stands_around)


def made(stager: object, *_: object, **__: object) -> None:
    script = next((frame for frame in frames() if is_recipe(frame)), None)
    stager.order_in_turn = script is not None and always_blocks(script.f_code.co_filename)


def is_of_a_stager_in_turn(work: object) -> bool:
    """Whether a method of such a stager is to run in a thread."""
    stager = getattr(work, "__self__", None)
    return getattr(stager, "order_in_turn", False)


def always_blocks(file: str) -> bool:
    """Whether no stager that a file makes copies without blocking."""
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return False
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        makes_by_default = called == "DefaultStager" and not node.args and not node.keywords
        if makes_by_default or (called == "StagingOptions" and not says_blocking(node)):
            return False
    return True


def says_blocking(options: ast.Call) -> bool:
    given = {keyword.arg: keyword.value for keyword in options.keywords}
    if len(options.args) > ITS_POSITION:
        given[BLOCKING] = options.args[ITS_POSITION]
    return getattr(given.get(BLOCKING), "value", None) is False
