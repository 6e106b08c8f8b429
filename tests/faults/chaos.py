"""A judge that is not ours: ckpt-chaos crashes a training of two ranks at its file events.

``python -m faults.chaos --points 12``; without ``--points`` at every event, in every mode.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TRAIN = Path(__file__).with_name("chaos_train.py")
FAIL_ON = "HARD_FAIL,SILENT_DIVERGENCE,LOST_WORK,CONTROL_FAIL"
EVERY = 10_000  # points: more than there are


def crash(rank: int, points: int, work: Path, edit: str | None = None) -> str:
    """Crash ``rank`` at ``points`` events, resume each time; the table that ckpt-chaos prints.

    Raises:
        RuntimeError: it found a failure, or an event where nothing crashed.
    """
    # Without the variable nothing crashes, and it says PASS.
    environment = os.environ | {"CKPT_CHAOS_CRASH_RANK": str(rank), "OMP_NUM_THREADS": "1"}
    if edit:
        environment["FAULTS_EDIT"] = edit
    options = {
        "--ranks": 2,
        "--crash-rank": rank,
        "--modes": "before,torn,term",
        "--max-points": points,
        "--timeout": 200,
        "--grace": 20,
        "--checkpoint-glob": "{out}/step*",
        "--step-regex": r"resumed from step (\d+)",
        "--result-file": "{out}/final",
        "--fail-on": FAIL_ON,
        "--work": work / f"rank{rank}",
    }
    command = [sys.executable, "-m", "ckpt_chaos", "run"]
    command += [str(part) for option in options.items() for part in option]
    command += ["--", sys.executable, str(TRAIN), "{out}"]
    done = subprocess.run(command, env=environment, cwd=work, capture_output=True, text=True)
    table = done.stdout + done.stderr
    if done.returncode or "DID NOT CRASH" in table or "PLAN DRIFT" in table:
        raise RuntimeError(f"rank {rank}:\n{table}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--points", type=int, default=EVERY, help="a rank (default: all)")
    parser.add_argument("--rank", type=int, action="append", help="to crash (default: each)")
    parser.add_argument("--edit", help="with this line of the recipe edited: it must be caught")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as work:
        for rank in options.rank or (0, 1):
            print(crash(rank, options.points, Path(work), options.edit), flush=True)


if __name__ == "__main__":
    main()
