#!/usr/bin/env bash
# sync_of_every_disk, fsspec==2026.2.0 torch==2.13.0: DCP's `FsspecWriter` calls `os.sync()` for every file it writes to a store, which waits for all disks of the machine.
# Guess: nothing is synchronised where a file has no descriptor.
# Instead: give `FsspecWriter` `sync_files=False`; torch 2.15 no longer does it, and warns.
# Took: 1106 s whole, on two cores that twenty other programs had
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
# shellcheck disable=SC2086  # PIP_ARGS are words, such as --extra-index-url URL
venv/bin/pip install -q --no-compile ${PIP_ARGS:-} fsspec==2026.2.0 torch==2.13.0 numpy==2.4.6

cat > program.py <<'END'
import os

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

calls = []
os.sync = lambda: calls.append(1)
state = {"weight": torch.ones(2), "bias": torch.ones(3)}
for sync_files in (True, False):
    calls.clear()
    writer = FsspecWriter(f"memory://saved-{sync_files}", sync_files=sync_files)
    dcp.save(state, storage_writer=writer, no_dist=True)
    print("sync_files:", sync_files, "calls of os.sync:", len(calls))
END
cat > expected <<'END'
sync_files: True calls of os.sync: 2
sync_files: False calls of os.sync: 0
END
OMP_NUM_THREADS=1 timeout 600 venv/bin/python -W ignore program.py > seen
cat seen
if ! diff expected seen > difference; then
    echo "sync_of_every_disk: this is no longer what was seen with fsspec==2026.2.0 torch==2.13.0:"
    cat difference
    exit 1
fi
