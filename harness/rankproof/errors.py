"""What was raised, in a line."""

import ast
import contextlib
import linecache
import traceback


def _cleaning_up(error: BaseException) -> bool:
    """Whether ``error`` was raised in a ``finally`` or by leaving a ``with``, not in an except."""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name in ("__exit__", "__aexit__"):
            return True
        with contextlib.suppress(SyntaxError):
            tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
            bodies = [node.finalbody for node in ast.walk(tree) if isinstance(node, ast.Try)]
            if any(b and b[0].lineno <= line <= b[-1].end_lineno for b in bodies):
                return True
    return False


def summary(error: BaseException) -> str:
    """The error in a line; of a CheckpointException or ChildFailedError, the first rank's cause.

    If it was raised while another one passed through a ``finally``, that one comes first.
    """
    hidden = error.__cause__ or error.__suppress_context__
    if error.__context__ and not hidden and _cleaning_up(error):
        first = summary(error.__context__)
        return f"{first} (then {type(error).__name__} while cleaning up)"
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        rank, failure = next(iter(failures.items()))
        return f"{type(error).__name__}, rank {rank}: {cause_of(failure)}"
    text = ""
    with contextlib.suppress(Exception):  # a class of the recipe's says what it is
        text = str(error).strip()
    if not text and isinstance(error, AssertionError):
        text = failed_assertion(error)
    if text.startswith("-- Process"):  # torch.multiprocessing quotes a traceback
        text = f"{text.split(':')[0].strip('- ')}: {text.splitlines()[-1]}"
    return f"{type(error).__name__}: {text.splitlines()[0][:300]}" if text else type(error).__name__


def cause_of(failure: object) -> str:
    """Of what an error keeps for a rank: DCP an exception with its traceback, torchrun a record."""
    cause = failure[0] if isinstance(failure, tuple) else failure
    if isinstance(cause, BaseException):
        return summary(cause)
    lines = str(getattr(cause, "message", cause)).splitlines()
    return lines[-1][:300] if lines else "it says nothing"


def failed_assertion(error: AssertionError) -> str:
    """The assertion that failed, on one line; empty where its source is not known."""
    steps = list(traceback.walk_tb(error.__traceback__))
    if not steps:
        return ""
    frame, line = steps[-1]
    lines = linecache.getlines(frame.f_code.co_filename)
    with contextlib.suppress(SyntaxError):
        for node in ast.walk(ast.parse("".join(lines))):
            if isinstance(node, ast.Assert) and node.lineno <= line <= node.end_lineno:
                return f"assert {ast.unparse(node.test)}"
    return ""
