"""Run files as ``python FILE`` does, each in a fork of an interpreter that has imported torch.

A request to :mod:`fork_server` names the file and its working directory. The runs under torchrun
are interpreters of their own.
"""

import atexit
import importlib
import os
import sys
import threading

from fork_server import serve

import harness  # noqa: F401 (puts rankproof on the path)
from rankproof.rank import _run_as_main
from rankproof.recipe import DCP
from rankproof.server import PRELOADED

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # a reader has it not


def run(file: str, work: str) -> int:
    """The exit code of the file, which is run to its end."""
    os.chdir(work)
    sys.argv = [file]
    sys.path[:] = [os.path.dirname(file), *(p for p in sys.path[1:] if p != REPO)]
    code = 0
    try:
        _run_as_main(file, name="")
    except SystemExit as error:
        code = error.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    threading._shutdown()  # what an interpreter does at its end
    atexit._run_exitfuncs()
    return code


def main() -> None:
    for module in (*PRELOADED, *DCP):
        importlib.import_module(module)
    serve(run)


if __name__ == "__main__":
    main()
