"""Trials: a job is struck, another resumes, and an observer outside both says what was lost.

``python -m faults.soak --trials 500 --seed 1``, from ``tests``; ``make soak``. A trial is one line
of output; ``--only N`` repeats trial N alone. The last line counts.
"""

import argparse
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from faults import job
from faults.edits import Edit
from faults.points import POINTS
from faults.power_cut import OperationLog

RANKS = 2
DEADLINE_S = 25.0  # for a struck job to end by itself, or to be resumed and end
NOTICED_S = 1.0  # a rank that stopped is left alone for so long
TMPFS_BYTES = 1 << 21
ALSO = (  # kinds beside kill, which strikes every point
    ("raise", "state_dict"),
    ("raise", "staging"),
    ("raise", "writing"),
    ("stop", "writing"),
    ("slow", "writing"),
    ("full", "writing"),
    ("truncated", "rename"),
    ("flipped", "pointer"),
)
CASES = (*(("kill", point) for point in POINTS), *ALSO)
DAMAGE = ("truncated", "flipped")


@dataclass
class Told:
    """What a job told the observer: per step and rank."""

    saving: dict[int, dict[int, str]] = field(default_factory=dict)
    committed: dict[int, set[int]] = field(default_factory=dict)
    failed: dict[int, dict[int, str]] = field(default_factory=dict)
    resumed: dict[int, tuple[int | None, str]] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)
    counts: dict[int, dict[str, int]] = field(default_factory=dict)
    struck: str = ""
    hung: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    seconds: float = 0.0

    def hear(self, rank: int, message: dict) -> None:
        event, step = message["event"], message.get("step")
        if event == "saving":
            self.saving.setdefault(step, {})[rank] = message["digest"]
        elif event == "committed":
            self.committed.setdefault(step, set()).add(rank)
        elif event == "failed":
            self.failed.setdefault(step, {})[rank] = message["error"]
        elif event == "resumed":
            self.resumed[rank] = (step, message["digest"])
        elif event == "ended":
            self.ended[rank], self.counts[rank] = message["digest"], message["counts"]
        elif event == "struck":
            self.struck = f"{message['what']} in {message['thread']}"

    def durable(self) -> set[int]:
        """Steps whose commit returned on every rank."""
        return {step for step, ranks in self.committed.items() if len(ranks) == RANKS}


def fork_rank(rank: int, root: Path, scratch: Path, group: int, *how) -> tuple[int, int]:
    """A rank in a process group of its own or in ``group``; its id and the pipe that it tells."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.setpgid(child, group or child)
        os.close(writing)
        return child, reading
    code = 1
    try:
        os.setpgid(0, group or 0)
        os.close(reading)
        output = os.open(scratch / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        job.run(rank, RANKS, root, scratch / "store", writing, *how)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # what the interpreter does at its end: it waits for the threads
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def alive_in(group: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, pgrp = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:3]
            except OSError:
                continue
            if int(pgrp) == group and state not in "ZX":
                found.append(int(entry.name))
    return found


def run_job(
    root: Path,
    scratch: Path,
    fault: job.Fault | None = None,
    go_on: bool = False,
    edit: Edit | None = None,
    log: OperationLog | None = None,
) -> Told:
    """Run one job to its end, or to the deadline; ``go_on``: what was stopped is continued."""
    told, started = Told(), time.monotonic()
    scratch.mkdir()
    pids, pipes, buffers = {}, {}, {}
    for rank in range(RANKS):
        group = next(iter(pids), 0)
        pid, pipe = fork_rank(rank, root, scratch, group, fault, edit, log)
        pids[pid], pipes[pipe], buffers[pipe] = rank, rank, b""
    group, running, stopped_at = next(iter(pids)), dict(pids), None
    while running or pipes:
        now = time.monotonic()
        for pipe in select.select(list(pipes), [], [], 0.02)[0]:
            data = os.read(pipe, 1 << 16)
            if not data:
                os.close(pipe)
                del pipes[pipe]
                continue
            *lines, buffers[pipe] = (buffers[pipe] + data).split(b"\n")
            for line in lines:
                told.hear(pipes[pipe], json.loads(line))
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if ended and os.WIFSTOPPED(status):
                stopped_at = now
            elif ended:
                del running[pid]
        if stopped_at is not None and now - stopped_at > NOTICED_S:
            stopped = next(pid for pid, rank in pids.items() if rank == fault.rank)
            if go_on:
                os.kill(stopped, signal.SIGCONT)
                stopped_at = None
            elif set(running) <= {stopped}:  # the others have given up on it
                os.kill(stopped, signal.SIGKILL)
                stopped_at = None
        if running and now - started > DEADLINE_S:
            told.hung = sorted(running.values())
            os.killpg(group, signal.SIGKILL)
            started = now  # once
        if not running and pipes and now - started > DEADLINE_S + 5:
            break  # somebody else holds a pipe: left
    for pipe in pipes:
        os.close(pipe)
    told.left = alive_in(group)
    for pid in told.left:
        os.kill(pid, signal.SIGKILL)
    told.seconds = time.monotonic() - started
    return told


def damage(root: Path, kind: str, rng: random.Random) -> int | None:
    """Damage a file of the newest checkpoint; return its step."""
    steps = sorted(int(path.name[4:]) for path in root.glob("step*") if path.name[4:].isdigit())
    if not steps:
        return None
    files = sorted(path for path in (root / f"step{steps[-1]}").iterdir())
    file = rng.choice(files)
    place = rng.randrange(file.stat().st_size)
    if kind == "truncated":
        os.truncate(file, place)
    else:
        with file.open("r+b") as stream:
            stream.seek(place)
            byte = stream.read(1)[0]
            stream.seek(place)
            stream.write(bytes([byte ^ (1 << rng.randrange(8))]))
    return steps[-1]


class Observer:
    """Knows a run that nothing struck: how often each point is hit, and the bits at the end."""

    def __init__(self, scratch: Path, edit: Edit | None = None) -> None:
        self.scratch, self.edit = scratch, edit
        clean = run_job(scratch / "clean", scratch / "clean.job", edit=edit)
        if len(clean.ended) != RANKS or clean.hung or clean.left:
            logs = [file.read_text()[-2000:] for file in (scratch / "clean.job").glob("*.log")]
            raise RuntimeError(f"the job fails with no fault: {clean}\n{''.join(logs)}")
        self.counts, self.end = clean.counts, clean.ended
        shutil.rmtree(scratch / "clean")

    def plan(self, trial: int, seed: int) -> tuple[job.Fault, random.Random]:
        """The fault of a trial: kinds and points in turn, rank and hit by chance."""
        kind, point = CASES[trial % len(CASES)]
        rng = random.Random(f"{seed}/{trial}")
        rank = rng.choice([rank for rank in range(RANKS) if self.counts[rank].get(point)])
        return job.Fault(kind, point, rank, rng.randint(1, self.counts[rank][point])), rng

    def trial(self, number: int, fault: job.Fault, rng: random.Random) -> dict:
        """Strike a job, resume it, judge: the trial's result as one flat dict."""
        root = self.scratch / f"root{number}"
        root.mkdir()
        mounted = fault.kind == "full" and mount_tmpfs(root)
        try:
            first = run_job(
                root, self.scratch / f"{number}.struck", fault, rng.random() < 0.5, self.edit
            )
            damaged = damage(root, fault.kind, rng) if fault.kind in DAMAGE else None
            pointer = self.judge_pointer(root, damaged)
            (root / job.BALLAST).unlink(missing_ok=True)
            second = run_job(root, self.scratch / f"{number}.resumed", edit=self.edit)
            wrong = pointer + self.judge(fault, first, second, damaged, root)
        finally:
            if mounted:
                subprocess.run(["umount", "-l", root], check=True)
        result = {"trial": number, **asdict(fault), "what": first.struck, "wrong": wrong}
        result |= {"resumed": second.resumed.get(0, (None,))[0], "hung": first.hung + second.hung}
        result |= {"left": first.left + second.left, "seconds": first.seconds + second.seconds}
        if not (wrong or result["hung"] or result["left"]):
            for folder in (root, *self.scratch.glob(f"{number}.*")):
                shutil.rmtree(folder)
        return result

    def judge_pointer(self, root: Path, damaged: int | None) -> list[str]:
        """The pointer may be late, it may not name what is no checkpoint."""
        pointer = root / "latest"
        name = pointer.read_text() if pointer.exists() else None
        if name is None or name == f"step{damaged}" or not job.durable_saves.faults(root / name):
            return []
        return [f"the pointer names {name!r}, which is not whole"]

    def judge(self, fault, first: Told, second: Told, damaged: int | None, root: Path) -> list[str]:
        """What was lost or is wrong."""
        wrong = [] if first.struck else ["the fault never struck"]
        durable = first.durable() - {damaged}
        must = max(durable, default=None)
        if len(second.resumed) != RANKS:
            return [*wrong, "no resume"]
        chosen = {step for step, _ in second.resumed.values()}
        if len(chosen) != 1:
            return [*wrong, f"ranks resumed from different steps: {chosen}"]
        (step,) = chosen
        if must is not None and (step is None or step < must):
            wrong.append(f"lost: {must} was durable, {step} was chosen")
        if step is not None and step == damaged:
            wrong.append(f"{step} is damaged and was chosen")
        for rank, (_, digest) in second.resumed.items():
            if step is not None and first.saving.get(step, {}).get(rank) != digest:
                wrong.append(f"rank {rank}: not the bits of step {step}")
        if second.ended != self.end:
            wrong.append("the resumed run ends in other bits than the one nothing struck")
        if second.failed:
            wrong.append(f"saves failed after the resume: {second.failed}")
        leftovers = [path.name for path in root.glob("*.incomplete")] + list(root.glob("*.deleted"))
        if leftovers:
            wrong.append(f"not cleaned up: {leftovers}")
        if fault.kind == "full" and len(first.ended) != RANKS:
            wrong.append("a full disk ended training")
        return wrong


def mount_tmpfs(root: Path) -> bool:
    """A small real file system on ``root``; needs root."""
    option = f"size={TMPFS_BYTES}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", option, "soak", root], check=True)
    return True


def scratch_directory() -> Path:
    """In memory where that is possible: a flush to a busy disk can take longer than a trial may."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="soak-", dir=memory if memory.is_dir() else None))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=len(CASES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="repeat this trial alone")
    options = parser.parse_args()
    counted, lost, hung, left = Counter(), 0, 0, 0
    trials = range(options.trials) if options.only is None else [options.only]
    scratch = scratch_directory()
    observer = Observer(scratch)
    for number in trials:
        result = observer.trial(number, *observer.plan(number, options.seed))
        counted[result["kind"], result["point"]] += 1
        lost += bool(result["wrong"])
        hung += bool(result["hung"])
        left += bool(result["left"])
        print(json.dumps(result), flush=True)
    for (kind, point), count in sorted(counted.items()):
        print(f"{kind} at {point}: {count}")
    if lost or hung or left:
        print(f"what is left of them: {scratch}")
    else:
        shutil.rmtree(scratch)
    print(
        f"soak: tried {len(trials)}, lost {lost}, hung {hung}, left {left}, seed {options.seed}",
        flush=True,
    )
    return int(bool(lost or hung or left))


if __name__ == "__main__":
    sys.exit(main())
