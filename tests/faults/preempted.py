"""A job that is asked to leave in the middle of what a loop does, and what it leaves behind."""

import os
import signal
import time
from pathlib import Path

import _toys as basic
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from kept_saves import KeptSaves, newest_step

from faults.job import digest
from faults.points import Fault, Points, tell
from faults.soak import run_ranks
from overlap_recipes.checkpoint import preemption

STEPS, SAVE_EVERY, RANKS = 20, 2, 2
GRACE_S = {"late": 4.0}  # of a save that does not end in time; others have a minute
DEAD_S = 30.0  # for a rank to see that another is gone, while its own main thread hears nothing
CASES = {  # the point and hit at which rank 1 is struck, and how
    "step": Fault("term", "step", 1, 5),
    "state_dict": Fault("term", "state_dict", 1, 3),
    "staging": Fault("term", "staging", 1, 3),
    "upload": Fault("term", "writing", 1, 15),
    "before the name": Fault("term", "metadata", 1, 10),
    "late": Fault("late", "writing", 1, 15),
    "a rank is gone": Fault("kill", "step", 1, 5),
}


def train(rank: int, ranks: int, store: Path, pipe: int, root: Path, fault: Fault | None) -> None:
    torch.set_num_threads(1)
    grace = GRACE_S.get(fault.kind, 60.0) if fault else 60.0
    leaving = preemption.Preemption(grace_s=grace)
    store = dist.FileStore(str(store), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    app = basic.build_app(torch.device("cpu"))
    chosen = newest_step(root)
    dist.barrier()
    if chosen is not None:
        dcp.load({"app": app}, checkpoint_id=root / f"step{chosen}")
    tell(pipe, event="resumed", step=chosen, digest=digest(app))
    points = Points(fault if fault and fault.rank == rank else None, root, pipe)
    points.install()
    optimizer_step = app.optimizer.step

    def struck_step() -> None:
        points.hit("step", "between backward and update")
        if fault and fault.kind == "kill" and rank == 0 and app.step == fault.hit - 1:
            os.kill(os.getpid(), signal.SIGTERM)  # as torchrun does when a rank has died
            time.sleep(DEAD_S)  # as in a collective that nobody joins
        optimizer_step()

    app.optimizer.step = struck_step
    with leaving, KeptSaves(root, "cpu", app.model.buffers()) as saves:
        while app.step < STEPS:
            basic.train_step(app, torch.device("cpu"))
            leave = leaving.agreed()
            if leave or app.step % SAVE_EVERY == 0:
                tell(pipe, event="saving", step=app.step, digest=digest(app))
                saves.save({"app": app}, app.step)
            if leave:
                break
    tell(pipe, event="ended", digest=digest(app))
    dist.destroy_process_group()
    if app.step < STEPS:
        raise SystemExit(preemption.AGAIN)


def case(scratch: Path, name: str) -> dict:
    """What a job that is struck as in ``name`` leaves, and whether the next one ends it rightly."""
    scratch = scratch / name.replace(" ", "-")
    scratch.mkdir()
    alone = run_ranks(train, RANKS, scratch / "alone", (scratch / "root0", None))
    first = run_ranks(train, RANKS, scratch / "first", (scratch / "root", CASES[name]))
    second = run_ranks(train, RANKS, scratch / "second", (scratch / "root", None))
    steps = {step for step, _ in second.resumed.values()}
    resumed = steps.pop() if len(steps) == 1 else f"ranks differ: {steps}"
    began = {rank: digest for rank, (_, digest) in alone.resumed.items()}
    found = {rank: digest for rank, (_, digest) in second.resumed.items()}
    return {
        "struck": first.struck,
        "codes": [first.codes[rank] for rank in range(RANKS)],
        "last_saved": max(first.saving),
        "resumed": resumed,
        "same_bits": found == first.saving.get(resumed, began),
        "same_end": second.ended == alone.ended and len(alone.ended) == RANKS,
        "seconds": first.seconds,
        "hung": first.hung + second.hung,
    }
