#!/usr/bin/env bash
# moonclip_step_counter, moonclip==0.3.1: `save_dtype="bf16"` rounds `AdamW`'s step counter, too: step 100001 comes back as 99840, and as infinity with `"fp16"`.
# Guess: what is cast is the weights, perhaps the moments, and no counter.
# Instead: leave `save_dtype` out for a checkpoint that training goes on from.
# Took: 1321 s whole, on two cores that twenty other programs had
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
# shellcheck disable=SC2086  # PIP_ARGS are words, such as --extra-index-url URL
venv/bin/pip install -q --no-compile ${PIP_ARGS:-} moonclip==0.3.1 torch==2.13.0 numpy==2.4.6

cat > program.py <<'END'
import torch
from moonclip import CheckpointManager


def job() -> tuple:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


for dtype in (None, "bf16", "fp16"):
    model, optimizer = job()
    for state in optimizer.state.values():
        state["step"].fill_(100001.0)
    saves = CheckpointManager(f"./saved-{dtype}", save_dtype=dtype)
    saves.save(step=100001, model=model, optimizer=optimizer)
    saves.flush()
    model, optimizer = job()
    resumed = CheckpointManager(f"./saved-{dtype}", save_dtype=dtype)
    resumed.resume(model=model, optimizer=optimizer)
    print(dtype, optimizer.state[model.weight]["step"].item())
END
cat > expected <<'END'
None 100001.0
bf16 99840.0
fp16 inf
END
OMP_NUM_THREADS=1 timeout 600 venv/bin/python -W ignore program.py > seen
cat seen
if ! diff expected seen > difference; then
    echo "moonclip_step_counter: this is no longer what was seen with moonclip==0.3.1:"
    cat difference
    exit 1
fi
