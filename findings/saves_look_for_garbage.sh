#!/usr/bin/env bash
# saves_look_for_garbage, torch==2.13.0: in every second `dcp.async_save` of some 600 tensors, Python 3.11's collector looks at every object of the process, which stops all of its threads.
# Guess: never in twenty saves: what a save makes is freed by its reference counts, and the oldest
#     generation is looked at when a quarter of the process is new.
# Instead: call `gc.freeze()` once, when model and optimizer are there, in a job that keeps them.
# Took: 308 s on two busy cores
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
# shellcheck disable=SC2086  # PIP_ARGS are words, such as --extra-index-url URL
venv/bin/pip install -q --no-compile ${PIP_ARGS:-} torch==2.13.0 numpy==2.4.6

cat > program.py <<'END'
import gc
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

SAVES = 20


def whole_searches(state: dict, group: dist.ProcessGroup) -> int:
    """How often the oldest generation is looked at in SAVES saves."""
    before = gc.get_stats()[2]["collections"]
    for _ in range(SAVES):
        with tempfile.TemporaryDirectory() as folder:
            dcp.async_save(state, checkpoint_id=folder, process_group=group).result()
    return gc.get_stats()[2]["collections"] - before


dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
group = dist.new_group(backend="gloo")
model, moments = {}, {}
for number in range(146):
    model[f"weight{number}"] = torch.zeros(4)
    moments[f"weight{number}"] = {
        "step": torch.zeros(()), "exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(4),
    }
state = {"model": model, "optimizer": moments}
found = whole_searches(state, group)
print("whole searches in twenty saves: eight or more:", found >= 8)
gc.collect()
gc.freeze()
print("objects that a search still looks at, once frozen:", "few" if len(gc.get_objects()) < 20000 else "many")
dist.destroy_process_group()
END
cat > expected <<'END'
whole searches in twenty saves: eight or more: True
objects that a search still looks at, once frozen: few
END
OMP_NUM_THREADS=1 timeout 600 venv/bin/python -W ignore program.py > seen
cat seen
if ! diff expected seen > difference; then
    echo "saves_look_for_garbage: this is no longer what was seen with torch==2.13.0:"
    cat difference
    exit 1
fi
