#!/usr/bin/env bash
# reduce_dtype_none, torch==2.15.0: `fully_shard` with `param_dtype=bfloat16` and no `reduce_dtype` now reduces gradients in float32, twice the bytes of torch 2.13.
# Guess: None means the dtype in which the unit computes, as in all versions before.
# Instead: say `reduce_dtype=torch.bfloat16` or `torch.float32`, which are the same on every
#     version.
# Took: 676 s whole, a CUDA build of 2 GB among it, on two busy cores
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
# shellcheck disable=SC2086  # PIP_ARGS are words, such as --extra-index-url URL
venv/bin/pip install -q --no-compile ${PIP_ARGS:-} torch==2.15.0 numpy==2.4.6

cat > program.py <<'END'
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode


class Collectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        for name in ("allgather", "reduce_scatter"):
            if f"c10d._{name}" in str(operator):
                self.seen.append((name, str(args[1].dtype)))
        return operator(*args, **(kwargs or {}))


def rank(number: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=store, rank=number, world_size=2)
    for dtype in (None, torch.bfloat16):
        model = torch.nn.Linear(8, 8)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=dtype)
        fully_shard(model, mp_policy=policy)
        with Collectives() as collectives:
            model(torch.randn(2, 8)).float().sum().backward()
        if number == 0:
            print("reduce_dtype", dtype, collectives.seen)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(rank, (f"file://{tempfile.mkdtemp()}/store",), 2)
END
cat > expected <<'END'
reduce_dtype None [('allgather', 'torch.bfloat16'), ('reduce_scatter', 'torch.float32')]
reduce_dtype torch.bfloat16 [('allgather', 'torch.bfloat16'), ('reduce_scatter', 'torch.bfloat16')]
END
OMP_NUM_THREADS=1 timeout 600 venv/bin/python -W ignore program.py > seen
cat seen
if ! diff expected seen > difference; then
    echo "reduce_dtype_none: this is no longer what was seen with torch==2.15.0:"
    cat difference
    exit 1
fi
