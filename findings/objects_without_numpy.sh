#!/usr/bin/env bash
# objects_without_numpy, torch==2.13.0: where NumPy is not installed, `all_gather_object` raises, and with it `dcp.save` wherever there is a process group; `broadcast_object_list` works.
# Guess: torch declares no need of NumPy, and goes on without it with a warning: its own collectives do, too.
# Instead: name numpy among the requirements of whatever gathers objects, or saves with a process group.
# Took: 30 s whole, on two cores
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
# shellcheck disable=SC2086  # PIP_ARGS are words, such as --extra-index-url URL
venv/bin/pip install -q --no-compile ${PIP_ARGS:-} torch==2.13.0

cat > program.py <<'END'
import os
import pathlib
import subprocess
import sys

RANK = """
import importlib.util, sys
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
assert importlib.util.find_spec("numpy") is None
rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)

def tensors():
    dist.all_reduce(torch.ones(2))

def gather():
    dist.all_gather_object([None] * ranks, rank)

def broadcast():
    dist.broadcast_object_list([rank])

def save():
    dcp.save({"weight": torch.ones(2)}, checkpoint_id=f"{folder}/checkpoint")

for name, call in (
    ("all_reduce", tensors),
    ("all_gather_object", gather),
    ("broadcast_object_list", broadcast),
    ("dcp.save", save),
):
    try:
        call()
        outcome = "works"
    except BaseException as error:
        text = str(error)
        outcome = "Numpy is not available" if "Numpy is not available" in text else text
    if rank == 0:
        print(f"ranks: {ranks}, {name}: {outcome}", flush=True)
"""
pathlib.Path("rank.py").write_text(RANK)
for number in (1, 2):
    folder = pathlib.Path(f"of{number}").absolute()
    os.mkdir(folder)
    ranks = []
    for rank in range(number):
        command = [sys.executable, "-W", "ignore", "rank.py", str(rank), str(number), str(folder)]
        ranks.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
    for rank in ranks:
        rank.wait(120)
END
cat > expected <<'END'
ranks: 1, all_reduce: works
ranks: 1, all_gather_object: Numpy is not available
ranks: 1, broadcast_object_list: works
ranks: 1, dcp.save: Numpy is not available
ranks: 2, all_reduce: works
ranks: 2, all_gather_object: Numpy is not available
ranks: 2, broadcast_object_list: works
ranks: 2, dcp.save: Numpy is not available
END
OMP_NUM_THREADS=1 timeout 600 venv/bin/python -W ignore program.py > seen
cat seen
if ! diff expected seen > difference; then
    echo "objects_without_numpy: this is no longer what was seen with torch==2.13.0:"
    cat difference
    exit 1
fi
