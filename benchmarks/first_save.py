"""Measure what the first save of a run costs training, with its preparation and without.

    torchrun --nproc-per-node=2 benchmarks/first_save.py --model qwen3-1.7b
    torchrun --nproc-per-node=2 benchmarks/first_save.py --model qwen3-1.7b --unprepared

A process has one first save, so each start of this script adds one sample to the row of its model
and way. What a step takes is the trimmed mean of ``QUIET`` steps before anything is prepared. From
``prepare`` on, ``BETWEEN`` steps run, then the save is called, then steps until its upload has
ended on all ranks, and some more.

* ``first_save_lost_s``: all steps from ``prepare`` to the end of the upload, minus what as many
  steps take without a save.
* ``behind_call_s``: of these, the steps from the call on. Without a preparation it is all there is.
* ``ask_s``: host seconds of the call that asks for the state.
* ``prepared_s``: from there until memory is locked and the files are planned.
* ``none_s``: what the same number of steps loses where nothing is saved: the steps before, in two
  halves, one compared with the other. What the method reads where there is nothing.

All values are rank 0's. The median of the samples is the row's; ``samples`` has each.
"""

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import measuring  # noqa: E402
from benchmarks.measuring import Results, intervals_of, medians, trimmed_mean  # noqa: E402
from benchmarks.workloads import HOST_BOUND, LLAMAS, StockLoop, shard, stock  # noqa: E402
from overlap_recipes.checkpoint.preparation import Preparation  # noqa: E402
from overlap_recipes.checkpoint.saves import Saves  # noqa: E402
from overlap_recipes.checkpoint.state import TrainingState  # noqa: E402

OURS = ("prepared", "unprepared")
WARM = 6  # steps that are not counted
QUIET = 60
BETWEEN = 60  # steps from ``prepare`` to the save
AFTER = 2


class Asked:
    """Notes how long it takes to ask for the state."""

    def __init__(self) -> None:
        self.at = 0.0
        self.took_s = 0.0

    def watch(self, preparation: Preparation) -> None:
        ask = preparation.ask

        def timed() -> None:
            self.at = time.perf_counter()
            ask()
            self.took_s = time.perf_counter() - self.at

        preparation.ask = timed


def lost(ends: list[float], step_s: float) -> float:
    """What the steps between ``ends`` took beyond ``step_s`` each."""
    return ends[-1] - ends[0] - step_s * (len(ends) - 1)


def sample(loop: StockLoop, device: torch.device, prepared: bool, storage: Path) -> dict:
    """One first save of this process."""
    agreement = measuring.Agreement()
    clock = measuring.StepClock(device)

    def steps(count: int) -> None:
        for _ in range(count):
            loop.step()
            clock.tick()

    steps(WARM)
    clock.start()
    steps(QUIET)
    quiet = clock.ends()
    step_s = trimmed_mean(intervals_of(quiet))
    half = QUIET // 2
    first_half_s = trimmed_mean(intervals_of(quiet[: half + 1]))
    made = Path(tempfile.mkdtemp(dir=storage)) if dist.get_rank() == 0 else None
    root = agreement.from_rank_0(made)
    state = {"app": TrainingState(loop.model, loop.optimizer)}
    saves = Saves(device, loop.model.buffers)
    asked = Asked()
    agreement.barrier()
    with saves:
        clock.start()
        done = saves.prepare(state) if prepared else None
        ready_at: list[float] = []
        if done is not None:
            asked.watch(saves.preparation)
            done.add_done_callback(lambda _: ready_at.append(time.perf_counter()))
        steps(BETWEEN)
        called_at = time.perf_counter()
        upload = saves.save(state, root / "step")
        call_s = time.perf_counter() - called_at
        steps(AFTER)
        while agreement.any(not upload.done()):
            steps(2)
        steps(AFTER)
        ends = clock.ends()
        upload.result()
    agreement.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(root)
    return {
        "step_s": step_s,
        "first_save_lost_s": lost(ends, step_s),
        "behind_call_s": lost(ends[BETWEEN:], step_s),
        "call_s": call_s,
        "ask_s": asked.took_s,
        "prepared_s": ready_at[0] - asked.at if ready_at else None,
        "none_s": lost(quiet[half:], first_half_s),
        "steps": len(ends) - 1,
    }


def main() -> None:
    parser = measuring.command_line(__doc__)
    parser.add_argument("--model", choices=[*LLAMAS, *HOST_BOUND], default="llama-1b")
    parser.add_argument("--unprepared", action="store_true", help="without prepare")
    parser.add_argument("--tokens", type=int, default=4096, help="of a step and rank")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="storage in memory")
    arguments = parser.parse_args()
    length = 32 if arguments.small else 1024
    tokens = 64 if arguments.small else arguments.tokens
    name = "unprepared" if arguments.unprepared else "prepared"
    with measuring.started_rank() as device:
        loop = StockLoop(shard(stock(arguments.model, device)), tokens, length)
        workload = {"sharding": "fully_shard, one group a layer"}  # of all models of the file
        head = measuring.header("first_save", device, workload, {})
        memory = measuring.HostMemory()
        found = sample(loop, device, not arguments.unprepared, arguments.memory)
        found |= memory.peaks()
        memory.close()
        results = Results(arguments.out, head, OURS, ("model", "tokens"))
        key = {"model": arguments.model, "tokens": tokens * dist.get_world_size()}
        before = results.find(name, **key).get("samples", {})
        count = len(before.get("step_s", ()))
        samples = [{field: before[field][i] for field in found} for i in range(count)]
        row = medians([*samples, found], ("first_save_lost_s", "behind_call_s"))
        fixed = {"name": name, **key, "loop": "reads", "compiled": False, "storage": "memory"}
        results.add(fixed | row)
    if os.environ.get("RANK", "0") == "0":
        measuring.tell(f"{name}: {found}")


if __name__ == "__main__":
    main()
