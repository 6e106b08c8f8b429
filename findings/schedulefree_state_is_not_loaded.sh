#!/usr/bin/env bash
# schedulefree_state_is_not_loaded, schedulefree==1.4.1 torch==2.13.0: `get_optimizer_state_dict` finds no place for a schedule-free optimizer's moments, so `dcp.load` leaves them out without a word.
# Guess: they come back as `AdamW`'s do, or the load raises.
# Instead: save and load `optimizer.state_dict()` with `torch.save` and
#     `optimizer.load_state_dict`; `overlap_recipes.checkpoint` loads it as it is.
# Took: 1402 s whole, on two cores that twenty other programs had
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
# shellcheck disable=SC2086  # PIP_ARGS are words, such as --extra-index-url URL
venv/bin/pip install -q --no-compile ${PIP_ARGS:-} schedulefree==1.4.1 torch==2.13.0 numpy==2.4.6

cat > program.py <<'END'
import torch
import torch.distributed.checkpoint as dcp
from schedulefree import AdamWScheduleFree
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)


def job(kind) -> tuple:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = kind(model.parameters(), lr=0.1)
    if kind is AdamWScheduleFree:
        optimizer.train()
    return model, optimizer


for kind in (torch.optim.AdamW, AdamWScheduleFree):
    model, optimizer = job(kind)
    for _ in range(3):
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = get_optimizer_state_dict(model, optimizer)
    dcp.save({"optimizer": saved}, checkpoint_id=kind.__name__, no_dist=True)

    model, optimizer = job(kind)
    asked = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(asked, checkpoint_id=kind.__name__, no_dist=True)
    set_optimizer_state_dict(model, optimizer, asked["optimizer"])
    loaded = optimizer.state[model.weight]
    print(kind.__name__, "saved", sorted(saved["state"]["weight"]), "loaded", sorted(loaded))
print("steps counted after the load:", optimizer.param_groups[0]["k"])
END
cat > expected <<'END'
AdamW saved ['exp_avg', 'exp_avg_sq', 'step'] loaded ['exp_avg', 'exp_avg_sq', 'step']
AdamWScheduleFree saved ['exp_avg_sq', 'z'] loaded []
steps counted after the load: 3
END
OMP_NUM_THREADS=1 timeout 600 venv/bin/python -W ignore program.py > seen
cat seen
if ! diff expected seen > difference; then
    echo "schedulefree_state_is_not_loaded: this is no longer what was seen with schedulefree==1.4.1 torch==2.13.0:"
    cat difference
    exit 1
fi
