#!/usr/bin/env bash
# offload_policy_recomputes, torch==2.13.0: a selective checkpoint with `MUST_CPU_OFFLOAD` offloads nothing in eager mode: it recomputes, without a word.
# Guess: it raises where nobody implements it.
# Instead: in eager code move activations with saved-tensor hooks:
#     `torch.autograd.graph.save_on_cpu`, or `overlap_recipes.offload.ActivationOffload`.
# Took: 30 s whole, on two cores
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
# shellcheck disable=SC2086  # PIP_ARGS are words, such as --extra-index-url URL
venv/bin/pip install -q --no-compile ${PIP_ARGS:-} torch==2.13.0 numpy==2.4.6

cat > program.py <<'END'
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)


class Count(TorchDispatchMode):
    products = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        Count.products += operator is torch.ops.aten.mm.default
        return operator(*args, **(kwargs or {}))


def choose(policy, context, operator, *args, **kwargs):
    return policy if operator is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


weight = torch.randn(8, 8, requires_grad=True)
for policy in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_CPU_OFFLOAD):
    contexts = partial(create_selective_checkpoint_contexts, partial(choose, policy))
    result = checkpoint(
        lambda x: torch.tanh(torch.sin(x @ weight)),
        torch.randn(4, 8),
        use_reentrant=False,
        context_fn=contexts,
    )
    Count.products = 0
    with Count():
        result.sum().backward()
    print(policy.name, "products in backward:", Count.products)
END
cat > expected <<'END'
MUST_SAVE products in backward: 1
MUST_RECOMPUTE products in backward: 2
MUST_CPU_OFFLOAD products in backward: 2
END
OMP_NUM_THREADS=1 timeout 600 venv/bin/python -W ignore program.py > seen
cat seen
if ! diff expected seen > difference; then
    echo "offload_policy_recomputes: this is no longer what was seen with torch==2.13.0:"
    cat difference
    exit 1
fi
