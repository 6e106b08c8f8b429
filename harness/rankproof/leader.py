"""The process above the ranks: it starts them, watches the clock, and leaves none behind.

A leader is the head of a session of its own and a *subreaper*: whatever its ranks start and
abandon becomes its child, so that it can name and end it by id. It is started in one of two ways:
``python -m rankproof.leader SPEC`` runs real ``torchrun``; :mod:`rankproof.warm` forks one that
forks the ranks. It imports no torch.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rankproof import private

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.02
START_S = 120.0  # how long ranks may take to begin: the deadline counts from there
STACK_DUMP_S = 3.0  # how long a rank gets to write its stacks after the deadline
GRACE_AFTER_FAILURE_S = 10.0  # how long the other ranks get to fail by themselves
GRACE_AT_EXIT_S = 15.0  # how long interpreters may take to end when all have run the last line
LEFTOVER_GRACE_S = 3.0  # helpers such as multiprocessing's resource tracker end with their parent


@dataclass
class Outcome:
    """What the leader saw; written to ``outcome.json`` in the run's directory."""

    timed_out: bool = False
    seconds: float = 0.0
    left_processes: list[str] = field(default_factory=list)
    private: list[str] = field(default_factory=list)  # places where what was written lay aside
    written: list[str] = field(default_factory=list)  # what was left there


def prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed; the harness needs Linux")


def die_with_parent(parent: int) -> None:
    """End this process by SIGKILL when the thread that started it ends."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _stat(pid: int) -> tuple[str, int] | None:
    """(state, parent) of a process, None once it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[1])


def descendants(root: int) -> list[int]:
    """Living processes below ``root``, parents first; zombies are left out."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := _stat(int(entry))) and stat[0] != "Z":
            parents[int(entry)] = stat[1]
    found, frontier = [], {root}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier}
        found += sorted(frontier)
    return found


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def _reap() -> dict[int, int]:
    """Wait status by process id of every child that has ended."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = status
    return ended


def kill_all() -> None:
    """End every descendant of this process by id, and wait until none is left."""
    while below := descendants(os.getpid()):
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        time.sleep(POLL_S)
    _reap()


def _rank_pids(ranks_dir: Path) -> dict[int, int]:
    return {int(p.stem.removeprefix("rank")): int(p.read_text()) for p in ranks_dir.glob("*.pid")}


def dump_stacks(ranks_dir: Path) -> None:
    """Have every living rank write all its Python stacks to ``rank<r>.stacks``."""
    asked, own = [], descendants(os.getpid())  # a process id may belong to somebody else by now
    for rank, pid in _rank_pids(ranks_dir).items():
        if pid in own:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
                asked.append(ranks_dir / f"rank{rank}.stacks")
    until = time.monotonic() + STACK_DUMP_S
    while time.monotonic() < until and not all(p.exists() and p.stat().st_size for p in asked):
        time.sleep(POLL_S)


def _count(ranks_dir: Path, suffix: str) -> int:
    return len(list(ranks_dir.glob(f"*.{suffix}")))


def failed_already(ranks_dir: Path) -> bool:
    """Whether a rank has ended otherwise than it must, or is on its way to."""
    if any(path.read_text() not in ("0", "") for path in ranks_dir.glob("*.exit")):
        return True
    return any(not json.loads(p.read_text())["finished"] for p in ranks_dir.glob("*.ended"))


def write_exit(ranks_dir: Path, rank: int, status: int) -> None:
    """Keep a rank's wait status, where the judge looks for it."""
    code = os.waitstatus_to_exitcode(status)
    (ranks_dir / f"rank{rank}.exit").write_text(str(code))


def lead(spec: dict, start: Callable[[], dict[int, int]], alive: Callable[[], bool]) -> None:
    """Start ranks, wait for them, judge nothing, write ``outcome.json``.

    Args:
        spec: the run's description, see :func:`rankproof.run.run`.
        start: starts the processes and returns ``{pid: rank}``; rank -1 is torchrun.
        alive: False once whoever asked for the run is gone: then everything ends at once.
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    ranks_dir = Path(spec["run_dir"]) / "ranks"
    started = time.monotonic()
    deadline, began = started + START_S + spec["deadline_s"], False
    exits_by = float("inf")
    layers = private.enter(spec["run_dir"], spec["through"])
    outcome = Outcome(private=sorted(layers))
    os.chdir(spec["cwd"])
    running = start()
    while running:
        for pid, status in _reap().items():
            rank = running.pop(pid, None)
            if rank is None or rank < 0:
                continue
            write_exit(ranks_dir, rank, status)
        if not alive():
            kill_all()
            return
        now = time.monotonic()
        if not began and _count(ranks_dir, "began") == spec["processes"]:
            began, deadline = True, min(deadline, now + spec["deadline_s"])
        failed = failed_already(ranks_dir)
        if exits_by == float("inf"):
            if failed:
                exits_by = now + GRACE_AFTER_FAILURE_S
            elif _count(ranks_dir, "ended") == spec["processes"]:
                exits_by = now + min(GRACE_AT_EXIT_S, spec["deadline_s"])
        if running and now > min(deadline, exits_by):
            outcome.timed_out = not failed
            dump_stacks(ranks_dir)
            kill_all()
            running = {}
        time.sleep(POLL_S)
    until = time.monotonic() + LEFTOVER_GRACE_S
    while (left := descendants(os.getpid())) and time.monotonic() < until:
        _reap()
        time.sleep(POLL_S)
    outcome.left_processes = [f"{pid}: {command_line(pid)}" for pid in left]
    kill_all()
    outcome.written = private.left_in(layers)
    outcome.seconds = time.monotonic() - started
    temporary = Path(spec["run_dir"]) / "outcome.tmp"
    temporary.write_text(json.dumps(asdict(outcome)))
    temporary.rename(Path(spec["run_dir"]) / "outcome.json")


def held_open(pipe: int) -> bool:
    """False once the process that holds the writing end of ``pipe`` is gone."""
    poll = select.poll()
    poll.register(pipe, 0)
    return not poll.poll(0)  # a hang-up is reported without being asked for


def main(spec_path: str) -> None:
    """Run ``torchrun``, or the file as one process, as the spec says."""
    spec = json.loads(Path(spec_path).read_text())

    def start() -> dict[int, int]:
        me = os.getpid()
        log = open(Path(spec["run_dir"]) / "torchrun.out", "wb")  # noqa: SIM115 (torchrun's for good)
        rank = ("-m", "rankproof.rank", spec_path)
        if spec["launcher"] == "torchrun":
            standalone = ("torch.distributed.run", "--standalone")
            rank = ("-m", *standalone, f"--nproc-per-node={spec['ranks']}", *rank)
        torchrun = subprocess.Popen(
            [sys.executable, *rank],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=spec["cwd"],
            env=spec["env"],
            preexec_fn=lambda: die_with_parent(me),
        )
        return {torchrun.pid: -1}

    lead(spec, start, alive=lambda: held_open(0))


if __name__ == "__main__":
    main(sys.argv[1])
