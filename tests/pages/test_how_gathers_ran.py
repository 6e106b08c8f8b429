"""The script of guide/symptoms_sharding tells copy engines from kernels of few and of many CTAs."""

import json
import runpy
import subprocess
import sys

import pytest
import torch
from small_site import ROOT

SCRIPT = ROOT / "guide" / "how_gathers_ran.py"


def kernel(name: str, *grid: int) -> dict:
    return {"ph": "X", "cat": "kernel", "name": name, "args": {"grid": list(grid), "stream": 20}}


def call(name: str, kind: str = "cuda_runtime") -> dict:
    return {"ph": "X", "cat": kind, "name": name, "args": {}}


# Names and grids as Tencent-Hunyuan/UniRL#467 has them, and the profiler's name of a peer copy.
GATHERS = {
    "NCCL": (
        kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 24, 1, 1),
        "kernel of NCCL, 24 CTAs",
    ),
    "two CTAs": (
        kernel("ncclSymkDevKernel_AllGather_STMC(ncclSymkDevWorkArgs)", 2, 1, 1),
        "kernel of symmetric memory, 2 CTAs",
    ),
    "peer copy": (
        call("Memcpy PtoP (Device -> Device)", "gpu_memcpy"),
        "copy between GPUs, no CTA",
    ),
    "NCCL's copy engines": (
        call("cudaMemcpyBatchAsync"),
        "batch of copies that was queued, as NCCL's copy-engine gathers are",
    ),
}
OTHERS = [
    kernel("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage)", 24, 1, 1),
    kernel("nvjet_hsh_256x128", 132, 1, 1),
    call("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy"),
    call("cudaMemcpyAsync"),
    {"ph": "M", "name": "process_name", "args": {"name": "python"}},
]


@pytest.mark.parametrize("name", GATHERS)
def test_a_gather_is_told_among_other_work(name):
    event, kind = GATHERS[name]
    how_gathers_ran = runpy.run_path(str(SCRIPT))["how_gathers_ran"]
    assert how_gathers_ran([*OTHERS, event, event]) == {kind: 2}


def test_it_reads_what_the_profiler_writes(tmp_path):
    trace = tmp_path / "trace.json"
    with torch.profiler.profile() as profile:
        torch.ones(2).add(1)
    profile.export_chrome_trace(str(trace))
    written = json.loads(trace.read_text())
    written["traceEvents"].append(GATHERS["two CTAs"][0])
    trace.write_text(json.dumps(written))
    command = [sys.executable, str(SCRIPT), str(trace)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said == "     1 times: kernel of symmetric memory, 2 CTAs\n"
