"""Where a script may end: at its last line, or earlier, if nothing of it is left out."""

import ast
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

from rankproof.imports import around, called_by_recipe
from rankproof.watches import MULTIPROCESSING


class ExitWatch:
    """Knows where the script calls ``sys.exit`` or ``os._exit``, and whether it may.

    One may where nothing of the script follows, or after it has left its process group.

    Args:
        script: its file.
        has_joined: whether it was ever in a process group.
        ends_at_once: called before an ``os._exit(0)`` that it may call: with an empty text at the
            script's last line, else with the call.
    """

    def __init__(
        self, script: str, has_joined: Callable[[], bool], ends_at_once: Callable[[str], None]
    ) -> None:
        self.script = script
        self.has_joined = has_joined
        self.ends_at_once = ends_at_once
        self.had_left = False  # when it called sys.exit
        self.pid = os.getpid()
        around(sys, "exit", self._exits)
        around(os, "_exit", self._exits_at_once)

    def _has_left(self) -> bool:
        return self.has_joined() and not group_is_left()

    def had_left_group(self, error: SystemExit) -> bool:
        """Also for ``raise SystemExit``, if no ``finally`` may have left the group since."""
        if self.had_left:
            return True
        if not self._has_left():
            return False
        tree = ast.parse(Path(self.script).read_text(encoding="utf-8"))
        tries = [node for node in ast.walk(tree) if isinstance(node, ast.Try) and node.finalbody]
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename != self.script:
                continue
            if any(_holds(node, frame.lineno) for node in tries):
                return False
        return True

    def _exits(self, *_: object) -> None:
        self.had_left = self._has_left()

    def _exits_at_once(self, status: int) -> None:
        """A process that the recipe has forked is no rank."""
        if os.getpid() != self.pid or status != 0 or not called_by_recipe((MULTIPROCESSING,)):
            return
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and ends_there(traceback.extract_stack(), self.script):
            self.ends_at_once("")
        elif self._has_left():
            self.ends_at_once("os._exit(0)")


def group_is_left() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _nothing_follows(body: list[ast.stmt], line: int) -> bool:
    """Whether ``line`` is in the last statement of ``body``, and only a ``finally`` comes after."""
    last = body[-1]
    if not _holds(last, line):
        return False
    if isinstance(last, ast.For | ast.While):  # its next turn would follow
        return False
    if isinstance(last, ast.Try | ast.TryStar) and last.orelse:
        if line <= last.body[-1].end_lineno:  # its ``else`` would follow
            return False
    for block in _blocks_of(last):
        is_in_block = block[0].lineno <= line <= block[-1].end_lineno
        if is_in_block and not _nothing_follows(block, line):
            return False
    return True


def _holds(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= node.end_lineno


def _blocks_of(statement: ast.stmt) -> list[list[ast.stmt]]:
    """The blocks of statements in a statement, in its handlers and in its cases."""
    parts = [statement]
    parts += getattr(statement, "handlers", [])
    parts += getattr(statement, "cases", [])
    blocks = []
    for part in parts:
        for name in ("body", "orelse", "finalbody"):
            block = getattr(part, name, [])
            if block:
                blocks.append(block)
    return blocks


def exits_at_its_end(error: SystemExit, script: str) -> bool:
    """Whether ``sys.exit`` with status 0 left nothing of the script out."""
    if error.code not in (None, 0, False):
        return False
    return ends_there(traceback.extract_tb(error.__traceback__), script)


def ends_there(frames: Iterable[traceback.FrameSummary], script: str) -> bool:
    """Whether nothing of the script follows where these frames stand.

    That may be anywhere, in ``main()`` or in a library that the script's last line called, as long
    as nothing but a ``finally`` follows in any of the script's functions among them.
    """
    tree = ast.parse(Path(script).read_text(encoding="utf-8"))
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    for frame in frames:
        if frame.filename != script:
            continue
        innermost = tree
        if frame.name != "<module>":
            holding = [function for function in functions if _holds(function, frame.lineno)]
            innermost = max(holding, key=lambda function: function.lineno, default=tree)
        if not _nothing_follows(innermost.body, frame.lineno):
            return False
    return True
