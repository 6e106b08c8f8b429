#!/usr/bin/env bash
# optimizer_looked_at, torch==2.13.0: an optimizer whose state was read once, as a log does, loads none of its moments from a DCP checkpoint, without an error.
# Guess: reading `optimizer.state[parameter]` changes nothing, or the load raises.
# Instead: read with `optimizer.state.get(parameter, {})`, or load before anything looks; then
#     assert that `optimizer.state` is not empty.
# Took: 901 s whole, on two cores that twenty other programs had
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
# shellcheck disable=SC2086  # PIP_ARGS are words, such as --extra-index-url URL
venv/bin/pip install -q --no-compile ${PIP_ARGS:-} torch==2.13.0 numpy==2.4.6

cat > program.py <<'END'
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)


def job() -> tuple:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


model, optimizer = job()
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
optimizer.zero_grad()
saved = {"optimizer": get_optimizer_state_dict(model, optimizer)}
dcp.save(saved, checkpoint_id="saved", no_dist=True)

for looked in (False, True):
    model, optimizer = job()
    if looked:
        for parameter in model.parameters():
            optimizer.state[parameter].get("exp_avg")
    asked = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(asked, checkpoint_id="saved", no_dist=True)
    set_optimizer_state_dict(model, optimizer, asked["optimizer"])
    print("looked at:", looked, "loaded:", sorted(optimizer.state[model.weight]))
END
cat > expected <<'END'
looked at: False loaded: ['exp_avg', 'exp_avg_sq', 'step']
looked at: True loaded: []
END
OMP_NUM_THREADS=1 timeout 600 venv/bin/python -W ignore program.py > seen
cat seen
if ! diff expected seen > difference; then
    echo "optimizer_looked_at: this is no longer what was seen with torch==2.13.0:"
    cat difference
    exit 1
fi
