"""A judge that is not ours: ckpt-chaos crashes a training of two ranks at its file events.

``python -m faults.chaos --points 12``; without ``--points`` at every event, in every mode.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TRAIN, START = (Path(__file__).with_name(f"chaos_{what}.py") for what in ("train", "start"))
FAIL_ON = "HARD_FAIL,SILENT_DIVERGENCE,LOST_WORK,CONTROL_FAIL"
EVERY = 10_000  # points: more than there are


def crash(rank: int, points: int, work: Path, edit: str | None = None) -> str:
    """Crash ``rank`` at ``points`` events, resume each time; the table that ckpt-chaos prints.

    With ``edit`` that line of the recipe is edited, and jobs resume from where the pointer says.

    Raises:
        RuntimeError: it found a failure, or an event where nothing crashed.
    """
    # Without the first variable nothing crashes, and it says PASS.
    environment = os.environ | {"CKPT_CHAOS_CRASH_RANK": str(rank), "OMP_NUM_THREADS": "1"}
    if edit is not None:
        environment["FAULTS_EDIT"] = edit
    options = {
        "--ranks": 2,
        "--crash-rank": rank,
        "--modes": "before,torn,term" if edit is None else "before",
        "--max-points": points,
        "--timeout": 200,
        "--grace": 20,
        "--checkpoint-glob": "{out}/step*",
        "--step-regex": r"resumed from step (\d+)",
        "--result-file": "{out}/final",
        "--fail-on": FAIL_ON if edit is None else "HARD_FAIL",
        "--work": work
        / ("-".join(["by-pointer", *edit.split()]) if edit is not None else f"rank{rank}"),
    }
    command = [sys.executable, "-m", "ckpt_chaos", "run"]
    command += [str(part) for option in options.items() for part in option]
    command.append("--ckpt-ignore-size")  # .metadata holds the path, which differs from run to run
    command += ["--", sys.executable, str(START), str(work / "socket"), "{out}"]
    done = subprocess.run(command, env=environment, cwd=work, capture_output=True, text=True)
    table = done.stdout + done.stderr
    saw_checkpoints = re.search(r"\] +[1-9]\d* +", table)  # or it can miss no lost work
    if done.returncode or "DID NOT CRASH" in table or "PLAN DRIFT" in table or not saw_checkpoints:
        raise RuntimeError(f"rank {rank}:\n{table}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--points", type=int, default=EVERY, help="a rank (default: all)")
    parser.add_argument("--rank", type=int, action="append", help="to crash (default: each)")
    parser.add_argument("--control", action="store_true", help="the pointer before the name, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as work, forks(Path(work)):
        for rank in options.rank or (0, 1):
            print(crash(rank, options.points, Path(work)), flush=True)
        if options.control:
            control(Path(work))


@contextmanager
def forks(work: Path) -> Iterator[None]:
    """The process that has imported torch, and from which ranks are forked."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    server = subprocess.Popen([sys.executable, str(TRAIN), str(work / "socket")], env=environment)
    try:
        while not (work / "socket").exists():
            if server.poll() is not None:
                raise RuntimeError("nobody forks ranks: see above")
            time.sleep(0.1)
        yield
    finally:
        server.kill()
        server.wait()


def control(work: Path) -> None:
    """Jobs that trust the pointer outlive every crash; with the pointer first they do not."""
    print(crash(0, EVERY, work, edit=""), flush=True)
    try:
        table = crash(0, EVERY, work, edit="pointer before rename")
    except RuntimeError as failure:
        if "HARD_FAIL" not in str(failure):
            raise
        print(f"The pointer before the name, as it must be:\n{failure}")
    else:
        raise SystemExit(f"the pointer before the name was not caught:\n{table}")


if __name__ == "__main__":
    main()
