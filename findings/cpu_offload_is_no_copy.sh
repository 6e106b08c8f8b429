#!/usr/bin/env bash
# cpu_offload_is_no_copy, torch==2.13.0: `StateDictOptions(cpu_offload=True)` of a model on the CPU gives the live weights, which the next step changes.
# Guess: a copy on the host, as of a model on a GPU.
# Instead: clone what you keep or write later: `{name: tensor.clone() for name, tensor in
#     state.items()}`.
# Took: 1070 s whole, on two cores that twenty other programs had
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
# shellcheck disable=SC2086  # PIP_ARGS are words, such as --extra-index-url URL
venv/bin/pip install -q --no-compile ${PIP_ARGS:-} torch==2.13.0 numpy==2.4.6

cat > program.py <<'END'
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

for full in (False, True):
    model = torch.nn.Linear(2, 2)
    options = StateDictOptions(cpu_offload=True, full_state_dict=full)
    kept = get_model_state_dict(model, options=options)["weight"]
    torch.nn.init.zeros_(model.weight)
    print("full_state_dict:", full, "what was kept is 0 after a step:", bool((kept == 0).all()))
END
cat > expected <<'END'
full_state_dict: False what was kept is 0 after a step: True
full_state_dict: True what was kept is 0 after a step: True
END
OMP_NUM_THREADS=1 timeout 600 venv/bin/python -W ignore program.py > seen
cat seen
if ! diff expected seen > difference; then
    echo "cpu_offload_is_no_copy: this is no longer what was seen with torch==2.13.0:"
    cat difference
    exit 1
fi
