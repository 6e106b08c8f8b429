#!/usr/bin/env bash
# merged_groups, torch==2.13.0: `set_optimizer_state_dict` gives a job with one parameter group the settings of the last of two saved groups, for all parameters.
# Guess: other groups than those that were saved raise, as `optimizer.load_state_dict` does.
# Instead: build the groups of the save and compare after the load; `overlap_recipes.checkpoint`
#     lists the difference and raises.
# Took: 888 s whole, on two cores that twenty other programs had
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
# shellcheck disable=SC2086  # PIP_ARGS are words, such as --extra-index-url URL
venv/bin/pip install -q --no-compile ${PIP_ARGS:-} torch==2.13.0 numpy==2.4.6

cat > program.py <<'END'
import torch
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

model = torch.nn.Linear(2, 2)
decayed = {"params": [model.weight], "weight_decay": 0.1}
others = {"params": [model.bias], "weight_decay": 0.0}
optimizer = torch.optim.AdamW([decayed, others], lr=0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
optimizer.zero_grad()
saved = get_optimizer_state_dict(model, optimizer)

merged = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
try:
    merged.load_state_dict(optimizer.state_dict())
except ValueError as error:
    print("optimizer.load_state_dict:", error)
set_optimizer_state_dict(model, merged, saved)
for group in merged.param_groups:
    print("set_optimizer_state_dict:", len(group["params"]), "parameters decay by", group["weight_decay"])
END
cat > expected <<'END'
optimizer.load_state_dict: loaded state dict has a different number of parameter groups
set_optimizer_state_dict: 2 parameters decay by 0.0
END
OMP_NUM_THREADS=1 timeout 600 venv/bin/python -W ignore program.py > seen
cat seen
if ! diff expected seen > difference; then
    echo "merged_groups: this is no longer what was seen with torch==2.13.0:"
    cat difference
    exit 1
fi
