"""Answer requests in forks of an interpreter that has imported torch: one server, for all tests.

A line of JSON on standard input is a request; a fork answers it and ends. The reply, a line of JSON
too, has its exit code and what it printed. An interpreter that imports torch itself needs 2 to 4 s
for that, and 1 s to end.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def serve(answer: Callable[..., int]) -> None:
    """Answer each line of standard input by ``answer(*request)``, which returns an exit code."""
    gc.freeze()  # forks neither look through what is imported nor copy it
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as said:
            child = os.fork()
            if child == 0:
                _answer_in_a_fork(answer, json.loads(line), said.fileno())
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            said.seek(0)
            print(json.dumps({"code": code, "said": said.read()}), flush=True)


def _answer_in_a_fork(answer: Callable[..., int], request: list, output: int) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, output), (2, output)):
        os.dup2(source, target)
    code = 1
    try:
        code = answer(*request)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what it was forked from is not taken down


@contextmanager
def asking(
    command: list[str], deadline_s: float, cwd: Path, env: dict[str, str] | None = None
) -> Iterator[Callable[..., dict]]:
    """``ask(*request)`` of a server that ``command`` starts: the reply.

    A request that takes longer than ``deadline_s`` ends the server, and fails.
    """
    with subprocess.Popen(
        command,
        cwd=cwd,
        env=env,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as server:

        def ask(*request: object) -> dict:
            too_late = threading.Timer(deadline_s, _end, [server])
            too_late.start()
            print(json.dumps(request), file=server.stdin, flush=True)
            reply = server.stdout.readline()
            too_late.cancel()
            assert reply, f"no answer to {request} within {deadline_s:g} s"
            return json.loads(reply)

        yield ask
        server.stdin.close()


def _end(server: subprocess.Popen) -> None:
    os.killpg(server.pid, 9)
