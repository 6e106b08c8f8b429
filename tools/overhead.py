"""What rankproof costs beside plain torchrun: one training run, started in each way.

    python tools/overhead.py --seconds 60

trains ``llama-tiny`` on two ranks for as many steps as take that long under plain torchrun, then by
rankproof as it is, with ``--launcher torchrun`` and with ``--order``; prints each way's seconds and
its ratio to plain torchrun, the middle one of ``--times``. Of use on an idle machine alone.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RANKS = 2
FEW = 20  # steps, to learn how long one takes
TRAINING = f"""
    import sys, time

    sys.path.insert(0, {str(ROOT)!r})
    import torch
    import torch.distributed as dist

    from benchmarks.workloads import StockLoop, llama, shard

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    loop = StockLoop(shard(llama("llama-tiny", torch.device("cpu"))), 256, 32, reads=True)
    loop.step()
    started = time.perf_counter()
    for _ in range(int(sys.argv[1])):
        loop.step()
    if dist.get_rank() == 0:
        print("a step takes", (time.perf_counter() - started) / int(sys.argv[1]))
    dist.destroy_process_group()
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")
RANKPROOF = ("-m", "harness", "run")
WAYS = {
    "torchrun": (),
    "rankproof": ("--launcher", "auto"),
    "rankproof --launcher torchrun": ("--launcher", "torchrun"),
    "rankproof --order": ("--order",),
}


def seconds(way: str, script: Path, steps: int) -> tuple[float, float]:
    """How long a way takes as a whole, and for a step."""
    command = [sys.executable, *TORCHRUN, str(script), str(steps)]
    if way != "torchrun":
        command = [sys.executable, *RANKPROOF, str(script), "--ranks", str(RANKS), *WAYS[way]]
        command += ["--deadline", "3600", "--", str(steps)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    started = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    taken = time.monotonic() - started
    told = [line for line in done.stdout.splitlines() if line.startswith("a step takes")]
    if done.returncode or not told:
        sys.exit(f"{way} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return taken, float(told[0].split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(textwrap.dedent(TRAINING))
        _, step_s = seconds("torchrun", script, FEW)
        steps = max(FEW, round(options.seconds / step_s))
        print(f"{steps} steps; load of the machine {os.getloadavg()[0]:.1f}", flush=True)
        plain = 0.0
        for way in WAYS:
            runs = [seconds(way, script, steps) for _ in range(options.times)]
            whole = statistics.median(run[0] for run in runs)
            step = statistics.median(run[1] for run in runs)
            plain = plain or whole
            ratio = whole / plain
            print(f"{way:32} {whole:6.1f} s, {ratio:.2f} x, a step {step * 1e3:.1f} ms", flush=True)


if __name__ == "__main__":
    main()
