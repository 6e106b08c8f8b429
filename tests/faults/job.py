"""The job that is hit: a rank that resumes, trains, saves, and tells the observer what it knows."""

import hashlib
import os
import signal
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import durable_saves
import overlapped_stager
import retention
import state_to_save as basic
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from faults.edits import Edit
from faults.points import Points, fill, tell
from faults.power_cut import OperationLog

basic.WIDTH, basic.HIDDEN = 16, 64
STEPS, SAVE_EVERY, KEEP_LAST = 10, 2, 2
GROUP_TIMEOUT = timedelta(seconds=8)  # how long a rank waits for one that is stopped
SLOW_WRITE_S = 0.001
BALLAST = "ballast"
STATE_DICT = basic.AppState.state_dict  # as it is before points are counted


@dataclass(frozen=True)
class Fault:
    """What strikes which rank, and at which hit of which point."""

    kind: str
    point: str
    rank: int
    hit: int


def digest(app: basic.AppState) -> str:
    """Of every leaf that this rank holds, bit by bit."""
    sha256 = hashlib.sha256()
    for path, leaf in sorted(basic.leaves(STATE_DICT(app)).items()):
        content = leaf.detach().contiguous().numpy().tobytes() if torch.is_tensor(leaf) else leaf
        sha256.update(f"{path} {content!r}".encode())
    return sha256.hexdigest()


class Striker:
    """Does to this rank what the fault says."""

    def __init__(self, fault: Fault, root: Path, pipe: int) -> None:
        self.fault, self.root, self.pipe = fault, root, pipe

    def __call__(self, what: str) -> None:
        tell(self.pipe, event="struck", what=what, thread=threading.current_thread().name)
        kind = self.fault.kind
        if kind == "raise":
            raise OSError(5, "injected")
        if kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "full":
            fill(self.root)
        else:  # kill, slow, truncated, flipped: what follows is the observer's
            os.kill(os.getpid(), signal.SIGKILL)


def run(
    rank: int,
    ranks: int,
    root: Path,
    store: Path,
    pipe: int,
    fault: Fault | None,
    edit: Edit | None = None,
    log: OperationLog | None = None,
) -> None:
    """Resume from what is below ``root``, train to the last step, save on the way."""
    if edit is not None:
        edit.apply()
    torch.set_num_threads(1)
    overlapped_stager.DEADLINE_S = overlapped_stager.EXIT_S = GROUP_TIMEOUT.total_seconds()
    mine = fault is not None and fault.rank == rank
    points = Points((fault.point, fault.hit) if mine else None, mine and Striker(fault, root, pipe))
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), ranks),
        rank=rank,
        world_size=ranks,
        timeout=GROUP_TIMEOUT,
    )
    device = torch.device("cpu")
    app = basic.build_app(device)
    chosen = [durable_saves.newest_step(root, digests=True) if rank == 0 else None]
    dist.broadcast_object_list(chosen)
    if chosen[0] is not None:
        dcp.load({"app": app}, checkpoint_id=root / f"step{chosen[0]}")
    tell(pipe, event="resumed", step=chosen[0], digest=digest(app))
    points.install()
    if log is not None:
        dcp.FileSystemWriter = partial(dcp.FileSystemWriter, sync_files=False)  # or we do not
        log.install()
    if mine and fault.kind == "slow":
        points.write_delay_s = SLOW_WRITE_S
    keep = edit.keep_last if edit else KEEP_LAST
    with retention.RetainedSaves(root, device, app.model.buffers(), keep_last=keep) as saves:
        while app.step < STEPS:
            basic.train_step(app, device)
            if app.step % SAVE_EVERY == 0:
                save(app, saves, root, pipe, log)
                if mine and fault.kind == "full" and app.step == STEPS - SAVE_EVERY:
                    saves_ended(saves)
                    (root / BALLAST).unlink(missing_ok=True)
    tell(pipe, event="ended", digest=digest(app), counts=dict(points.counts))
    dist.destroy_process_group()


def save(app: basic.AppState, saves, root: Path, pipe: int, log: OperationLog | None) -> None:
    step = app.step
    tell(pipe, event="saving", step=step, digest=digest(app))

    def ended(upload) -> None:
        error = upload.exception()
        if log is not None and not error:
            log.note(do="committed", step=step, rank=dist.get_rank(), path="")
        tell(pipe, event="failed" if error else "committed", step=step, error=str(error)[:500])

    upload = saves.save({"app": app}, root / f"step{step}")
    upload.add_done_callback(ended)


def saves_ended(saves: retention.RetainedSaves) -> None:
    while saves.latest is not None and not saves.latest.done():
        time.sleep(0.01)
