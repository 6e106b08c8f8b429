"""The process above the ranks: it starts them, watches the clock, and leaves none behind.

A leader is the head of a session of its own and a *subreaper*: whatever its ranks start and
abandon becomes its child, so that it can name and end it by id. :mod:`rankproof.server` forks one
for each run.
"""

import contextlib
import ctypes
import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from rankproof import private
from rankproof.protocol import Outcome, Record, Spec

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.02
START_S = 120.0  # how long ranks may take to begin: the deadline counts from there
STACK_DUMP_S = 3.0  # how long a rank gets to write its stacks after the deadline
GRACE_AFTER_FAILURE_S = 10.0  # how long the other ranks get to fail by themselves
# How long interpreters get to end behind the recipe's last line: the deadline, but within these.
LEAST_AT_EXIT_S = 5.0
MOST_AT_EXIT_S = 15.0
TEARDOWN_S = 60.0  # how long C++ code then gets: it waits for nobody, but a machine may be busy
LEFTOVER_GRACE_S = 3.0  # helpers such as multiprocessing's resource tracker end with their parent


def prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed; the harness needs Linux")


def die_with_parent(parent: int) -> None:
    """End this process by SIGKILL when the thread that started it ends."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def descendants() -> dict[int, str]:
    """Command lines of the living processes below this one, by process id; no zombies."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = " ".join(process.cmdline())
    return found


def _reap() -> dict[int, int]:
    """Wait status by process id of every child that has ended."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:  # those that are left still run
                break
            ended[pid] = status
    return ended


def _has_children() -> bool:
    """Whether this process has a child, ended or not: a subreaper has one while it has any
    descendant. :func:`descendants` may overlook one whose parent ends while it reads."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_all() -> None:
    """End every descendant of this process by id, and wait until none is left."""
    while _has_children():
        _kill(descendants())
        _reap()
        time.sleep(POLL_S)


def dump_stacks(ranks_dir: Path) -> None:
    """Have every living rank write all its Python stacks to ``rank<r>.stacks``."""
    own = descendants()  # a process id may belong to somebody else by now
    asked = []
    for file in ranks_dir.glob("*.pid"):
        pid = int(file.read_text())
        if pid in own:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
                asked.append(file.with_suffix(".stacks"))
    until = time.monotonic() + STACK_DUMP_S
    while time.monotonic() < until and not all(p.exists() and p.stat().st_size for p in asked):
        time.sleep(POLL_S)


def failed_already(ranks_dir: Path) -> bool:
    """Whether a rank has ended otherwise than it must, or is on its way to."""
    if any(path.read_text() not in ("0", "") for path in ranks_dir.glob("*.exit")):
        return True
    return any(not Record.read(p.read_text()).finished for p in ranks_dir.glob("*.ended"))


def write_exit(ranks_dir: Path, rank: int, status: int) -> None:
    """Keep a rank's wait status, where the judge looks for it."""
    (ranks_dir / f"rank{rank}.exit").write_text(str(os.waitstatus_to_exitcode(status)))


def held_open(pipe: int) -> bool:
    """False once the process that holds the writing end of ``pipe`` is gone."""
    poll = select.poll()
    poll.register(pipe, 0)
    return not poll.poll(0)  # a hang-up is reported without being asked for


class _Patience:
    """Until when ranks may run: the deadline, or earlier if one has failed or all are at their end.

    The deadline counts from when all have begun.
    """

    def __init__(self, ranks_dir: Path, processes: int, deadline_s: float) -> None:
        self.ranks_dir = ranks_dir
        self.processes = processes
        self.deadline_s = deadline_s
        self.deadline = time.monotonic() + START_S + deadline_s
        self.have_begun = False
        self.exits_by: float | None = None
        self.are_torn_down = False

    def is_over(self, failed: bool) -> bool:
        """To be asked again and again; ``failed``: whether a rank has."""
        now = time.monotonic()
        if not self.have_begun and self.all_have("began"):
            self.have_begun = True
            self.deadline = min(self.deadline, now + self.deadline_s)
        if self.exits_by is None:
            if failed:
                self.exits_by = now + GRACE_AFTER_FAILURE_S
            elif self.all_have("ended"):
                at_least = max(self.deadline_s, LEAST_AT_EXIT_S)
                self.exits_by = now + min(at_least, MOST_AT_EXIT_S)
        if not self.are_torn_down and self.all_have("json"):
            self.are_torn_down = True
            self.exits_by = now + TEARDOWN_S
        if self.exits_by is not None and now > self.exits_by:
            return True
        return now > self.deadline

    def all_have(self, suffix: str) -> bool:
        """Whether all ranks have written their file of that name."""
        return len(list(self.ranks_dir.glob(f"*.{suffix}"))) == self.processes


def _wait_for(running: dict[int, int], patience: _Patience, requests: int) -> bool | None:
    """Wait until processes have ended, or end them; whether they ran out of time.

    None, if nobody can ask for the run any more: they still run then.
    """
    ranks_dir = patience.ranks_dir
    while running:
        for pid, status in _reap().items():
            rank = running.pop(pid, -1)
            if rank >= 0:
                write_exit(ranks_dir, rank, status)
        if not held_open(requests):
            return None
        failed = failed_already(ranks_dir)
        if running and patience.is_over(failed):
            dump_stacks(ranks_dir)
            if patience.all_have("exit"):
                _kill(running)  # torchrun alone: what the ranks have left is named later
            else:
                kill_all()
            return not failed
        time.sleep(POLL_S)
    return False


def _wait_for_leftovers() -> dict[int, str]:
    """Give what ranks have left time to end by itself; return what is still there, and its names.

    While there is something, it waits until that has a name.
    """
    until = time.monotonic() + LEFTOVER_GRACE_S
    left = descendants()
    while _has_children() and (time.monotonic() < until or not left):
        _reap()
        time.sleep(POLL_S)
        left = descendants()
    return left


def lead(spec: Spec, start: Callable[[], dict[int, int]], requests: int) -> None:
    """Start ranks, wait for them, judge nothing, write ``outcome.json``.

    Args:
        spec: what to run.
        start: starts the processes and returns ``{pid: rank}``; rank -1 is torchrun.
        requests: a pipe; once nobody holds its other end everything ends at once.
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    run_dir = Path(spec.run_dir)
    ranks_dir = spec.ranks_dir
    layers = private.enter(spec.run_dir, spec.through)
    os.chdir(spec.cwd)
    patience = _Patience(ranks_dir, spec.processes, spec.deadline_s)
    running = start()
    timed_out = _wait_for(running, patience, requests)
    if timed_out is None:
        kill_all()
        return
    left = _wait_for_leftovers()
    kill_all()
    # Behind the last writer, and before what is in the layers is listed as left.
    private.move_made(layers, spec.through, run_dir / "made")
    outcome = Outcome(
        timed_out=timed_out,
        left_processes=[f"{pid}: {command}" for pid, command in left.items()],
        private=sorted(layers),
        written=private.left_in(layers),
    )
    outcome.write(run_dir)
