#!/usr/bin/env bash
# torchrun_dies_of_sigusr1, torch==2.13.0: `torchrun` dies of SIGUSR1, the signal of many Slurm scripts, and its ranks go on without it and hear nothing.
# Guess: the ranks get the signal, as they get SIGTERM; or `torchrun` ends, and they with it.
# Instead: give it `--signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1`. It then passes SIGUSR1
#     on, and kills ranks that have not ended after 30 s (`--shutdown-timeout`).
# Took: 31 s whole, on two cores
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
# shellcheck disable=SC2086  # PIP_ARGS are words, such as --extra-index-url URL
venv/bin/pip install -q --no-compile ${PIP_ARGS:-} torch==2.13.0 numpy==2.4.6

cat > program.py <<'END'
import os
import pathlib
import signal
import subprocess
import sys
import time

pathlib.Path("rank.py").write_text(
    """
import os, pathlib, signal, sys, time
def heard(*_):
    pathlib.Path("heard").touch()
    sys.exit(0)
signal.signal(signal.SIGUSR1, heard)
pathlib.Path("pid").write_text(str(os.getpid()))
pathlib.Path("pid").rename("ready")
time.sleep(60)
"""
)
torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
handled = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
for options in ([], [handled]):
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    job = subprocess.Popen([*torchrun, *options, "rank.py"], **quiet)
    ready = pathlib.Path("ready")
    while not ready.exists():
        time.sleep(0.1)
    rank = int(ready.read_text())
    ready.unlink()
    job.send_signal(signal.SIGUSR1)
    code = job.wait()
    time.sleep(2)
    lives = pathlib.Path(f"/proc/{rank}").exists()
    print(*options, "torchrun ends with", code, "- heard by the rank:", pathlib.Path("heard").exists(), "- the rank lives:", lives)
    if lives:
        os.kill(rank, signal.SIGKILL)
END
cat > expected <<'END'
torchrun ends with -10 - heard by the rank: False - the rank lives: True
--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 torchrun ends with 1 - heard by the rank: True - the rank lives: False
END
OMP_NUM_THREADS=1 timeout 600 venv/bin/python -W ignore program.py > seen
cat seen
if ! diff expected seen > difference; then
    echo "torchrun_dies_of_sigusr1: this is no longer what was seen with torch==2.13.0:"
    cat difference
    exit 1
fi
