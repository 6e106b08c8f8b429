"""Run files as ``python FILE`` does, each in a fork of an interpreter that has imported torch.

A line of JSON on standard input names the file, its working directory and the file for its output;
the answer is its exit code. An interpreter that imports torch itself needs 2 to 4 s for that, and
1 s to end; the runs under torchrun are such interpreters.
"""

import atexit
import importlib
import json
import os
import sys
import threading
import traceback

import harness  # noqa: F401 (puts rankproof on the path)
from rankproof.rank import _run_as_main
from rankproof.recipe import DCP
from rankproof.server import PRELOADED

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # a reader has it not


def run(file: str, work: str, output: str) -> None:
    """In a process of its own, to its end; what it was forked from is not taken down."""
    null = os.open(os.devnull, os.O_RDONLY)
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for target, source in ((0, null), (1, written), (2, written)):
        os.dup2(source, target)
    os.chdir(work)
    sys.argv, code = [file], 1
    sys.path[:] = [os.path.dirname(file), *(p for p in sys.path[1:] if p != REPO)]
    try:
        _run_as_main(file)
        code = 0
    except SystemExit as error:
        code = error.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # what an interpreter does at its end
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    for module in (*PRELOADED, *DCP):
        importlib.import_module(module)
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            run(*json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
