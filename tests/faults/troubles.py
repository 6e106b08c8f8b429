"""Troubles of a save that end no process: each answers what became of it, as a dict."""

import os
import signal
import time
from pathlib import Path

import _toys as basic
import torch
import torch.distributed as dist
from kept_saves import KeptSaves, steps_in, wrong

from faults.job import digest
from faults.points import Fault, Points, tell
from faults.soak import run_ranks
from overlap_recipes.checkpoint.stores.directory import Directory

STEPS, SAVE_EVERY, RANKS = 8, 2, 2


def train(rank: int, ranks: int, store: Path, pipe: int, root: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(store), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    app = basic.build_app(torch.device("cpu"))
    Points(Fault("raise", "deletion", 0, 1) if rank == 0 else None, root, pipe).install()
    with KeptSaves(root, keep_last=2) as saves:
        while app.step < STEPS:
            basic.train_step(app, torch.device("cpu"))
            if app.step % SAVE_EVERY == 0:
                dist.barrier()
                upload = saves.save({"app": app}, app.step)
                error = upload.exception()
                tell(
                    pipe, event="failed" if error else "committed", step=app.step, error=str(error)
                )
    loaded = basic.load_app(root / f"step{STEPS}", torch.device("cpu"))
    tell(pipe, event="ended", digest=digest(loaded) == digest(app))
    dist.destroy_process_group()


def deletion_fails(scratch: Path) -> dict:
    """A job whose storage refuses a deletion."""
    root = scratch / "root"
    root.mkdir()
    told = run_ranks(train, RANKS, scratch / "job", (root,))
    whole = sorted(step for step in steps_in(root) if not wrong(root / f"step{step}", True))
    logs = [file.read_text() for file in (scratch / "job").glob("*.log")]
    return {"failed": told.failed, "whole": whole, "same_bits": told.ended, "logs": logs}


def lease_of_a_killed_rank(scratch: Path) -> str:
    """A rank with the lease forks, as a data loader does, and is killed; who holds the lease?"""
    reading, writing = os.pipe()
    holder = os.fork()
    if holder == 0:
        saves = KeptSaves(scratch)
        saves.__enter__()
        if os.fork() == 0:
            os.write(writing, b"forked")
            time.sleep(5)
            os._exit(0)
        time.sleep(60)
        os._exit(0)
    os.read(reading, 6)
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    try:
        Directory(scratch).lock()
    except RuntimeError as error:
        return str(error)
    return "free"
