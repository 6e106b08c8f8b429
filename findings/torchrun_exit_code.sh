#!/usr/bin/env bash
# torchrun_exit_code, torch==2.13.0: `torchrun` ends with 1 whatever code its ranks end with, and also where all ranks leave with 0 after its SIGTERM.
# Guess: the code of the first rank that failed, and 0 where every rank ended well.
# Instead: write a file that says how the job ended, or start ranks by `srun`, which hands the
#     code on: Slurm's `RequeueExit` never sees it through `torchrun`.
# Took: 191 s whole, on two busy cores
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
# shellcheck disable=SC2086  # PIP_ARGS are words, such as --extra-index-url URL
venv/bin/pip install -q --no-compile ${PIP_ARGS:-} torch==2.13.0 numpy==2.4.6

cat > program.py <<'END'
import pathlib
import signal
import subprocess
import sys
import time

pathlib.Path("rank.py").write_text(
    """
import pathlib, signal, sys, time, os
code = int(sys.argv[1])
if code:
    sys.exit(code)
left = []
signal.signal(signal.SIGTERM, lambda *_: left.append(1))
pathlib.Path("ready" + os.environ["RANK"]).touch()
while not left:
    time.sleep(0.1)
sys.exit(0)
"""
)
torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "rank.py"]
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
for code in (3, 85):
    print("ranks end with", code, "torchrun with", subprocess.run([*torchrun, str(code)], **quiet).returncode)

job = subprocess.Popen([*torchrun, "0"], **quiet)
while not (pathlib.Path("ready0").exists() and pathlib.Path("ready1").exists()):
    time.sleep(0.1)
job.send_signal(signal.SIGTERM)
print("ranks leave with 0 after SIGTERM, torchrun with", job.wait())
END
cat > expected <<'END'
ranks end with 3 torchrun with 1
ranks end with 85 torchrun with 1
ranks leave with 0 after SIGTERM, torchrun with 1
END
OMP_NUM_THREADS=1 timeout 600 venv/bin/python -W ignore program.py > seen
cat seen
if ! diff expected seen > difference; then
    echo "torchrun_exit_code: this is no longer what was seen with torch==2.13.0:"
    cat difference
    exit 1
fi
