#!/usr/bin/env bash
# torchdata_own_sampler, torchdata==0.11.0: `StatefulDataLoader` resumes a `RandomSampler` that you gave it, from the second epoch on, in another order.
# Guess: `shuffle=True` with a generator resumes exactly, so a `RandomSampler` with the same
#     generator does.
# Instead: say `shuffle=True, generator=...` in place of a sampler.
# Took: about 600 s whole, on two cores that twenty other programs had
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
# shellcheck disable=SC2086  # PIP_ARGS are words, such as --extra-index-url URL
venv/bin/pip install -q --no-compile ${PIP_ARGS:-} torchdata==0.11.0 torch==2.13.0 numpy==2.4.6

cat > program.py <<'END'
import torch
from torch.utils.data import RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

DATA = range(12)


def loader(own: bool) -> StatefulDataLoader:
    generator = torch.Generator().manual_seed(5)
    if own:
        sampler = RandomSampler(DATA, generator=generator)
        return StatefulDataLoader(list(DATA), batch_size=2, sampler=sampler)
    return StatefulDataLoader(list(DATA), batch_size=2, shuffle=True, generator=generator)


def samples(batches) -> list[int]:
    found = []
    for batch in batches:
        found += batch.tolist()
    return found


for own in (False, True):
    for before in (0, 1):
        trained = loader(own)
        for _ in range(before):
            samples(trained)
        batches = iter(trained)
        seen = samples(next(batches) for _ in range(3))
        state = trained.state_dict()
        left = samples(batches)
        resumed = loader(own)
        resumed.load_state_dict(state)
        found = samples(resumed)
        print(
            "a sampler of one's own" if own else "shuffle=True",
            "in epoch", before + 1, "resumes as it was:", found == left,
            "again a sample of that epoch:", bool(set(found) & set(seen)),
        )
END
cat > expected <<'END'
shuffle=True in epoch 1 resumes as it was: True again a sample of that epoch: False
shuffle=True in epoch 2 resumes as it was: True again a sample of that epoch: False
a sampler of one's own in epoch 1 resumes as it was: True again a sample of that epoch: False
a sampler of one's own in epoch 2 resumes as it was: False again a sample of that epoch: True
END
OMP_NUM_THREADS=1 timeout 600 venv/bin/python -W ignore program.py > seen
cat seen
if ! diff expected seen > difference; then
    echo "torchdata_own_sampler: this is no longer what was seen with torchdata==0.11.0:"
    cat difference
    exit 1
fi
