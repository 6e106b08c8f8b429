"""What a save costs beside an earlier version: both in turn, in pairs, on two ranks of a CPU.

    python tools/pairs.py    # about four minutes on an idle machine

unpacks ``overlap_recipes`` of ``--commit`` (0.2.1) into a temporary folder, and starts one job with
it and one with this working tree, ``--pairs`` times. A job trains ``llama-tiny``, then a model
whose state has 2,304 tensors, and saves after each step. The table has the median of a ``save()``
call on the slower rank, without the first of a run; of both ranks the plans, the calls that write
tensors, and the bytes that would be page-locked on a GPU, in all saves together; and for each what
it is to the earlier version's: the median of the pairs, the least and the largest.
"""

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EARLIER = "2d0af2d"  # version 0.2.1
RANKS = 2
MEASURES = ("call, ms", "first call, ms", "plans", "writes", "locked, MB")
JOB = f"""
    import json, os, sys, time
    from collections import Counter
    from pathlib import Path

    library, folder, saves = sys.argv[1:]
    sys.path[:0] = [library, {str(ROOT)!r}]
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.fsdp import fully_shard

    from benchmarks.workloads import StockLoop, llama, shard
    from overlap_recipes import page_locked
    from overlap_recipes.checkpoint import CheckpointManager, TrainingState

    assert Path(page_locked.__file__).is_relative_to(library), page_locked.__file__
    counts = Counter()


    def counted(owner, name, what, amount):
        stock = getattr(owner, name)

        def call(*args, **options):
            counts[what] += amount(*args)
            return stock(*args, **options)

        setattr(owner, name, call)


    def is_of_tensors(file, *_):
        return os.readlink(f"/proc/self/fd/{{file}}").endswith(".distcp")


    for name in ("pwrite", "pwritev"):
        counted(os, name, "writes", is_of_tensors)
    counted(DefaultSavePlanner, "create_local_plan", "plans", lambda *_: 1)
    counted(page_locked.PageLocked, "__init__", "locked, MB", lambda _, nbytes, *__: nbytes / 1e6)


    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(64, 16) for _ in range(768))

        def forward(self):
            return torch.stack([weight.square().mean() for weight in self.weights]).sum()


    class Loop:
        def __init__(self):
            self.model = fully_shard(Many())
            self.optimizer = torch.optim.AdamW(self.model.parameters())

        def step(self):
            self.model().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


    def measured(loop, root):
        counts.clear()
        calls = []
        state = TrainingState(loop.model, loop.optimizer)
        with CheckpointManager(root, state, keep_last=2) as checkpoints:
            checkpoints.resume()
            for step in range(1, int(saves) + 1):
                loop.step()
                dist.barrier()
                begun = time.perf_counter()
                saved = checkpoints.save(step)
                calls.append(1000 * (time.perf_counter() - begun))
                saved.result()
        calls = {{"first call, ms": calls[0], "call, ms": sorted(calls[1:])[len(calls) // 2]}}
        return {{**calls, **counts}}


    dist.init_process_group("gloo")
    torch.manual_seed(0)
    loops = {{
        "llama-tiny": lambda: StockLoop(shard(llama("llama-tiny", "cpu")), 256, 32, reads=True),
        "2,304 tensors": Loop,
    }}
    found = {{name: measured(make(), Path(folder, name)) for name, make in loops.items()}}
    Path(folder, f"rank{{dist.get_rank()}}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
"""


def unpacked(commit: str, folder: Path) -> Path:
    command = ["git", "archive", commit, "overlap_recipes"]
    archive = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    return folder


def run(script: Path, library: Path, saves: int) -> dict[tuple[str, str], float]:
    """One job: by model and measure, what its ranks have seen."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={RANKS}", str(script)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    env.pop("PYTHONPATH", None)  # the job takes the library that it is told
    with tempfile.TemporaryDirectory() as folder:
        command += [str(library), folder, str(saves)]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"a job of {library} failed:\n{done.stderr[-4000:]}")
        ranks = [json.loads(file.read_text()) for file in sorted(Path(folder).glob("rank*.json"))]
    found = {}
    for model in ranks[0]:
        for measure in MEASURES:
            values = [rank[model].get(measure, 0) for rank in ranks]
            found[model, measure] = max(values) if measure.endswith("ms") else sum(values)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default=EARLIER, help="of the earlier version")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--saves", type=int, default=15, help="of each model in a job")
    options = parser.parse_args()
    pairs = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        script = folder / "job.py"
        script.write_text(textwrap.dedent(JOB))
        earlier = unpacked(options.commit, folder / "earlier")
        print(f"load of the machine {os.getloadavg()[0]:.1f}", flush=True)
        for number in range(options.pairs):
            pairs.append([run(script, library, options.saves) for library in (earlier, ROOT)])
            print(f"pair {number + 1} of {options.pairs}", flush=True)
    print(f"{'':32} {options.commit:>10} {'now':>10}   now to then (least, largest)")
    for model, measure in pairs[0][0]:
        then = [pair[0][model, measure] for pair in pairs]
        now = [pair[1][model, measure] for pair in pairs]
        ratios = [b / a for a, b in zip(then, now, strict=True) if a]
        said = "none then"
        if ratios:
            said = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f})"
        medians = f"{statistics.median(then):10.1f} {statistics.median(now):10.1f}"
        print(f"{model:15} {measure:16} {medians}   {said}")


if __name__ == "__main__":
    main()
