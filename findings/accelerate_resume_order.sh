#!/usr/bin/env bash
# accelerate_resume_order, accelerate==1.15.0 torchdata==0.11.0: a job that accelerate loads in its third epoch shuffles as in its first.
# Guess: the order of the epoch that was interrupted: the sampler's seed and the loader's position
#     are saved, so the epoch is, too.
# Instead: call `set_epoch(epoch)` on the prepared loader after `load_state`, with the number of
#     the epoch that you resume.
# Took: 38 s whole, on two cores
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
# shellcheck disable=SC2086  # PIP_ARGS are words, such as --extra-index-url URL
venv/bin/pip install -q --no-compile ${PIP_ARGS:-} accelerate==1.15.0 torchdata==0.11.0 torch==2.13.0 numpy==2.4.6

cat > program.py <<'END'
import tempfile

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader


def job() -> tuple:
    settings = DataLoaderConfiguration(use_seedable_sampler=True, use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, dataloader_config=settings)
    set_seed(3)
    loader = DataLoader(torch.arange(8), batch_size=2, shuffle=True)
    return accelerator, *accelerator.prepare(torch.nn.Linear(1, 1), loader)


folder = tempfile.mkdtemp(dir=".")
accelerator, _, loader = job()
epochs = []
for epoch in range(3):
    seen = []
    for number, batch in enumerate(loader):
        seen += batch.tolist()
        if (epoch, number) == (2, 1):
            accelerator.save_state(folder)
    epochs.append(seen)

AcceleratorState._reset_state(True)  # as a new process
accelerator, _, loader = job()
accelerator.load_state(folder)
resumed = []
for batch in loader:
    resumed += batch.tolist()
print("resumed with as many samples as were left:", len(resumed) == 4)
print("resumed with the samples that were left of the third epoch:", resumed == epochs[2][4:])
print("resumed with the end of the first epoch:", resumed == epochs[0][4:])
END
cat > expected <<'END'
resumed with as many samples as were left: True
resumed with the samples that were left of the third epoch: False
resumed with the end of the first epoch: True
END
OMP_NUM_THREADS=1 timeout 600 venv/bin/python -W ignore program.py > seen
cat seen
if ! diff expected seen > difference; then
    echo "accelerate_resume_order: this is no longer what was seen with accelerate==1.15.0 torchdata==0.11.0:"
    cat difference
    exit 1
fi
