"""The job that is hit: a rank that resumes, trains, saves, and tells the observer what it knows."""

import hashlib
import os
from datetime import timedelta
from pathlib import Path

import _toys as basic
import torch
import torch._dynamo  # noqa: F401 (imported here, not by each rank: that takes longer than it trains)
import torch.distributed as dist

from faults.edits import Edit
from faults.points import BALLAST, Fault, Points, tell
from faults.power_cut import OperationLog
from faults.ways import WAYS, Way
from overlap_recipes.checkpoint import saves as saves_module
from overlap_recipes.checkpoint import talk as talk_module

basic.WIDTH, basic.HIDDEN = 16, 64
STEPS, SAVE_EVERY, KEEP_LAST = 10, 2, 2
GROUP_TIMEOUT = timedelta(seconds=8)  # how long a rank waits for one that is stopped
STATE_DICT = basic.AppState.state_dict  # as it is before points are counted


def digest(app: basic.AppState) -> str:
    """Of every leaf that this rank holds, bit by bit, but for random numbers: no step uses any."""
    sha256 = hashlib.sha256()
    for path, leaf in sorted(basic.leaves(STATE_DICT(app)).items()):
        if path.startswith("/per_rank"):
            continue
        content = leaf.detach().contiguous().numpy().tobytes() if torch.is_tensor(leaf) else leaf
        sha256.update(f"{path} {content!r}".encode())
    return sha256.hexdigest()


def run(
    rank: int,
    ranks: int,
    store: Path,
    pipe: int,
    root: Path,
    fault: Fault | None,
    edit: Edit | None = None,
    log: OperationLog | None = None,
    way: str = "retention",
) -> None:
    """Resume from what is below ``root``, train to the last step, save on the way."""
    if edit is not None:
        edit.apply()
    torch.set_num_threads(1)
    talk_module.wait_of_ranks = lambda: GROUP_TIMEOUT
    saves_module.EXIT_S = GROUP_TIMEOUT.total_seconds()
    if fault is not None and fault.rank != rank:
        fault = None
    points = Points(fault, root, pipe)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), ranks),
        rank=rank,
        world_size=ranks,
        timeout=GROUP_TIMEOUT,
    )
    app = basic.build_app(torch.device("cpu"))
    saves = WAYS[way](root, app, KEEP_LAST, (fault, root, os.getpid(), pipe))
    saves.resume()
    tell(pipe, event="resumed", step=app.step or None, digest=digest(app))
    points.install()
    saves.install(points)
    if log is not None:
        log.install()
    with saves:
        while app.step < STEPS:
            basic.train_step(app, torch.device("cpu"))
            if app.step % SAVE_EVERY == 0:
                save(app, saves, pipe, log)
                if fault and fault.kind == "full" and app.step == STEPS - SAVE_EVERY:
                    saves.latest.exception()
                    (root / BALLAST).unlink(missing_ok=True)
        tell(pipe, event="trained")
    tell(pipe, event="counts", counts=dict(points.counts))
    tell(pipe, event="ended", digest=digest(app))
    dist.destroy_process_group()


def save(app: basic.AppState, saves: Way, pipe: int, log: OperationLog | None) -> None:
    step = app.step
    tell(pipe, event="saving", step=step, digest=digest(app))

    def ended(upload) -> None:
        error = upload.exception()
        if log is not None and not error:
            log.note(do="committed", step=step, rank=dist.get_rank(), path="")
        tell(pipe, event="failed" if error else "committed", step=step, error=str(error)[:500])

    saves.save().add_done_callback(ended)
