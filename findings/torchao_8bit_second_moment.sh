#!/usr/bin/env bash
# torchao_8bit_second_moment, torchao==0.18.0 torch==2.13.0: `AdamW8bit` moves a weight whose gradient has stopped by tens of thousands of learning rates in a step: its second moment is rounded to 0, its first is not.
# Guess: a step is at most a few learning rates, as with fp32 moments.
# Instead: keep fp32 moments for embeddings and experts, or round a second moment that is above 0 up to the smallest value above 0. arXiv:2309.01507 names the cause for 4 bits.
# Took: 31 s whole, on two idle cores
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
# shellcheck disable=SC2086  # PIP_ARGS are words, such as --extra-index-url URL
venv/bin/pip install -q --no-compile ${PIP_ARGS:-} torch==2.13.0 torchao==0.18.0 numpy==2.4.6

cat > program.py <<'END'
import torch
from torchao.optim import AdamW8bit

RATE = 1e-3


def largest_move(make) -> float:
    """In learning rates: of any weight of an embedding, in any of 20 steps."""
    torch.manual_seed(0)
    table = torch.nn.Embedding(100, 256)
    optimizer = make(table.parameters(), lr=RATE, weight_decay=0.0)
    target = torch.randn(100, 256)
    moved = 0.0
    for _ in range(20):
        ids = torch.randint(100, (20,))
        before = table.weight.detach().clone()
        (table(ids) * target[ids]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        moved = max(moved, (table.weight.detach() - before).abs().max().item())
    return moved / RATE


with torch.compiler.set_stance("force_eager"):
    for name, make in (("AdamW", torch.optim.AdamW), ("AdamW8bit", AdamW8bit)):
        moved = largest_move(make)
        how = "at most 2" if moved <= 2 else "more than 10,000" if moved > 10000 else f"{moved:.0f}"
        print(f"{name}: a step is {how} learning rates")
END
cat > expected <<'END'
AdamW: a step is at most 2 learning rates
AdamW8bit: a step is more than 10,000 learning rates
END
OMP_NUM_THREADS=1 timeout 600 venv/bin/python -W ignore program.py 2>warnings > seen || { cat warnings; exit 1; }
cat seen
if ! diff expected seen > difference; then
    echo "torchao_8bit_second_moment: this is no longer what was seen with torchao==0.18.0:"
    cat difference
    exit 1
fi
