"""A training script that any engine starts: torchrun, or srun alone.

train.py ROOT LAST_STEP [GRACE_S]    GRACE_S: from SIGTERM to SIGKILL
"""

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from signal import SIGTERM, SIGUSR1

import torch.distributed as dist
from toy import Toy, say

from overlap_recipes.checkpoint import CheckpointManager, TrainingState


def join_group() -> None:
    """Join the ranks of this job; ``srun`` without ``torchrun`` names them in its own words."""
    if "RANK" not in os.environ:
        os.environ["RANK"] = os.environ["SLURM_PROCID"]
        os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]
        os.environ["WORLD_SIZE"] = os.environ["SLURM_STEP_NUM_TASKS"]
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))


def train(
    root: str,
    last_step: int,
    grace_s: dict[int, float] | None,
    has_notice: Callable[[], object] | None = None,
) -> int:
    """Train until ``last_step``, or until a rank is asked to leave; returns the exit code."""
    job = Toy(last_step)
    state = TrainingState(
        job.model, job.optimizer, scheduler=job.scheduler, per_rank={"data": job.loader}
    )
    with CheckpointManager(root, state, keep_last=2, grace_s=grace_s) as checkpoints:
        done = checkpoints.resume()
        step = done
        say(f"begins after step {done}, one of {dist.get_world_size()} ranks")
        for step, batch in enumerate(job.loader, done + 1):
            job.step(batch)
            if has_notice is not None and has_notice():
                checkpoints.ask_to_leave()
            leave = checkpoints.preempted()
            if leave or step % 20 == 0 or step == last_step:
                checkpoints.save(step)
            if leave:
                break
    if step == last_step:
        say(f"ends after step {step}, weights {job.weights()}")
        return 0
    say(f"leaves after step {step}, exit code {checkpoints.exit_code}")
    return checkpoints.exit_code


def main() -> int:
    root, last_step, *seconds = sys.argv[1:]
    grace_s = {SIGTERM: float(seconds[0]) if seconds else 30.0, SIGUSR1: 300.0}
    join_group()
    exit_code = train(root, int(last_step), grace_s)
    dist.destroy_process_group()
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
