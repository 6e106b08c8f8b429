"""Tell from a trace of torch.profiler whether all-gathers ran on copy engines or as kernels.

python how_gathers_ran.py trace.json    # what profile.export_chrome_trace wrote
"""

import json
import math
import re
import sys
from collections import Counter

KERNEL = re.compile(r"nccl(Symk)?\w*Kernel_AllGather")


def how_gathers_ran(events: list[dict]) -> Counter:
    """How often each kind of all-gather, and of copy between GPUs, is in ``events``."""
    found: Counter = Counter()
    for event in events:
        kind, name = event.get("cat"), event.get("name", "")
        kernel = KERNEL.match(name)
        if kind == "kernel" and kernel:
            memory = "of symmetric memory" if kernel[1] else "of NCCL"
            blocks = math.prod(event["args"]["grid"])
            found[f"kernel {memory}, {blocks} CTAs"] += 1
        elif kind == "gpu_memcpy" and "PtoP" in name:
            found["copy between GPUs, no CTA"] += 1
        elif kind in ("cuda_runtime", "cuda_driver") and "MemcpyBatchAsync" in name:
            found["batch of copies that was queued, as NCCL's copy-engine gathers are"] += 1
    return found


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as trace:
        for kind, times in how_gathers_ran(json.load(trace)["traceEvents"]).items():
            print(f"{times:6} times: {kind}")
