"""Trials: a job is struck, another resumes, and an observer outside both says what was lost.

``python -m faults.soak --trials 500 --seed 1``, from ``tests``; ``make soak``. A trial is one line
of output; ``--only N`` repeats trial N alone; with ``--resume FILE`` the trials that FILE has are
counted and not run again. The last line counts.
"""

import argparse
import faulthandler
import json
import os
import random
import re
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
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

from kept_saves import wrong as wrong_in

from benchmarks.code_versions import code_of_today
from faults import job
from faults.edits import Edit
from faults.points import BALLAST, POINTS, Fault
from faults.power_cut import OperationLog
from faults.ways import WAYS

RANKS = 2
DEADLINE_S = 25.0  # for a struck job to end by itself, or to be resumed and end
ENDING_S = 1.0  # for what a rank had started to notice that it is gone
NOTICED_S = 1.0  # a rank that stopped is left alone for so long
TMPFS_BYTES = 1 << 21
ALSO = (  # kinds beside kill, which strikes every point
    ("raise", "state_dict"),
    ("raise", "staging"),
    ("raise", "writing"),
    ("stop", "writing"),
    ("slow", "writing"),
    ("full", "writing"),
    ("truncated", "writing"),
    ("flipped", "writing"),
)
CASES = (*(("kill", point) for point in POINTS), *ALSO)
DAMAGE = ("truncated", "flipped")
NOTHING_OLDER = (
    r"^\S*DamagedCheckpoint: .*; there is no older checkpoint\. To start over, remove it"
)


@dataclass
class Told:
    """What a job told the observer: per step and rank."""

    saving: dict[int, dict[int, str]] = field(default_factory=dict)
    committed: dict[int, set[int]] = field(default_factory=dict)
    failed: dict[int, dict[int, str]] = field(default_factory=dict)
    resumed: dict[int, tuple[int | None, str]] = field(default_factory=dict)
    trained: set[int] = field(default_factory=set)
    ended: dict[int, str] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    counts: dict[int, dict[str, int]] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)  # of exit; a signal is negative
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
        elif event == "trained":
            self.trained.add(rank)
        elif event == "loss":
            self.losses[step] = message["loss"]
        elif event == "ended":
            self.ended[rank] = message["digest"]
        elif event == "counts":
            counted = Counter(message["counts"]) + Counter(self.counts.get(rank))
            self.counts[rank] = dict(counted)
        elif event == "struck":
            self.struck = f"{message['what']} in {message['thread']}"

    def goes_on(self, fault: Fault) -> bool:
        """Whether training has outlived a fault that was to cost it a save and no more."""
        in_a_save = fault.kind == "raise" and fault.point != "state_dict"
        return len(self.trained) == RANKS or not (in_a_save or fault.kind == "full")

    def durable(self) -> set[int]:
        """Steps whose commit returned on every rank."""
        return {step for step, ranks in self.committed.items() if len(ranks) == RANKS}


def fork_rank(run: Callable, rank: int, ranks: int, scratch: Path, group: int, *how) -> tuple:
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
        faulthandler.dump_traceback_later(DEADLINE_S - 3, file=2)  # where it hangs, if it does
        run(rank, ranks, scratch / "store", writing, *how)
        code = 0
    except SystemExit as exit:
        code = exit.code
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
    fault: Fault | None = None,
    go_on: bool = False,
    edit: Edit | None = None,
    log: OperationLog | None = None,
    way: str = "retention",
    deadline_s: float = DEADLINE_S,
) -> Told:
    """Run one job of :mod:`faults.job`; ``go_on``: what was stopped is continued."""
    how = (root, fault, edit, log, way)
    return run_ranks(job.run, RANKS, scratch, how, fault, go_on, deadline_s)


def run_ranks(
    run: Callable,
    ranks: int,
    scratch: Path,
    how: tuple,
    fault: Fault | None = None,
    go_on: bool = False,
    deadline_s: float = DEADLINE_S,
) -> Told:
    """Fork ``run(rank, ranks, store, pipe, *how)`` on each rank, to its end or to the deadline."""
    told, started = Told(), time.monotonic()
    scratch.mkdir()
    pids, pipes, buffers = {}, {}, {}
    for rank in range(ranks):
        group = next(iter(pids), 0)
        pid, pipe = fork_rank(run, rank, ranks, scratch, group, *how)
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
                told.codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
        if not running:
            stopped_at = None
        if stopped_at is not None and now - stopped_at > NOTICED_S:
            stopped = next(pid for pid, rank in pids.items() if rank == fault.rank)
            if go_on:
                os.kill(stopped, signal.SIGCONT)
                stopped_at = None
            elif set(running) <= {stopped}:  # the others have given up on it
                os.kill(stopped, signal.SIGKILL)
                stopped_at = None
        if running and now - started > deadline_s:
            told.hung = sorted(running.values())
            os.killpg(group, signal.SIGKILL)
            started = now  # once
        if not running and pipes and now - started > deadline_s + 5:
            break  # somebody else holds a pipe: left
    for pipe in pipes:
        os.close(pipe)
    until = time.monotonic() + ENDING_S
    while alive_in(group) and time.monotonic() < until:
        time.sleep(0.05)
    told.left = alive_in(group)
    for pid in told.left:
        os.kill(pid, signal.SIGKILL)
    told.seconds = time.monotonic() - started
    return told


def damage(root: Path, way: str, told: Told, rng: random.Random, kind: str) -> int | None:
    """Damage a file of the newest checkpoint that was durable; return its step."""
    step = max(told.durable(), default=None)
    folder = None if step is None else WAYS[way].folder_of(root, step)
    if folder is None:
        return None
    file = rng.choice(sorted(folder.iterdir()))
    place = rng.randrange(file.stat().st_size)
    if kind == "truncated":
        os.truncate(file, place)
    else:
        with file.open("r+b") as stream:
            stream.seek(place)
            byte = stream.read(1)[0]
            stream.seek(place)
            stream.write(bytes([byte ^ (1 << rng.randrange(8))]))
    return step


class Observer:
    """Knows a run that nothing struck: how often each point is hit, and the bits at the end."""

    def __init__(self, scratch: Path, edit: Edit | None = None, way: str = "retention") -> None:
        self.scratch, self.edit, self.way = scratch, edit, way
        clean = run_job(
            scratch / "clean", scratch / "clean.job", edit=edit, way=way, deadline_s=100
        )
        self.deadline_s = DEADLINE_S + clean.seconds
        if len(clean.ended) != RANKS or clean.hung or clean.left:
            logs = [file.read_text()[-2000:] for file in (scratch / "clean.job").glob("*.log")]
            raise RuntimeError(f"the job fails with no fault: {clean}\n{''.join(logs)}")
        self.counts, self.end = clean.counts, clean.ended
        self.cases = [case for case in CASES if self.ranks_at(case[1])]
        shutil.rmtree(scratch / "clean")

    def ranks_at(self, point: str) -> list[int]:
        """Those that come to ``point``: some ways of saving never do."""
        return [rank for rank in range(RANKS) if self.counts[rank].get(point)]

    def plan(self, trial: int, seed: int) -> tuple[Fault, random.Random]:
        """The fault of a trial: kinds and points in turn, rank and hit by chance."""
        kind, point = self.cases[trial % len(self.cases)]
        rng = random.Random(f"{seed}/{trial}")
        rank = rng.choice(self.ranks_at(point))
        return Fault(kind, point, rank, rng.randint(1, self.counts[rank][point])), rng

    def trial(self, number: int, fault: Fault, rng: random.Random) -> dict:
        """Strike a job, resume it, judge: the trial's result as one flat dict."""
        root = self.scratch / f"root{number}"
        root.mkdir()
        mounted = fault.kind == "full" and mount_tmpfs(root)
        try:
            first = run_job(
                root,
                self.scratch / f"{number}.struck",
                fault,
                rng.random() < 0.5,
                self.edit,
                way=self.way,
                deadline_s=self.deadline_s,
            )
            damaged = None
            if fault.kind in DAMAGE:
                damaged = damage(root, self.way, first, rng, fault.kind)
            pointer = self.judge_pointer(root, damaged)
            (root / BALLAST).unlink(missing_ok=True)
            second = run_job(
                root,
                self.scratch / f"{number}.resumed",
                edit=self.edit,
                way=self.way,
                deadline_s=self.deadline_s,
            )
            if first.durable() == {damaged} and self.named_damage(number):
                for folder in root.glob(WAYS[self.way].checkpoints):
                    # as the error says
                    shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
                second = run_job(
                    root,
                    self.scratch / f"{number}.anew",
                    edit=self.edit,
                    way=self.way,
                    deadline_s=self.deadline_s,
                )
            outcome, wrong = self.judge(fault, first, second, damaged, root)
        finally:
            if mounted:
                subprocess.run(["umount", "-l", root], check=True)
        result = {"trial": number, **asdict(fault), "what": first.struck, "outcome": outcome}
        result |= {"wrong": pointer + wrong, "resumed": second.resumed.get(0, (None,))[0]}
        result |= {"hung": first.hung + second.hung, "left": first.left + second.left}
        result |= {"goes_on": first.goes_on(fault)}
        result |= {"seconds": first.seconds + second.seconds}
        if not (result["wrong"] or result["hung"] or result["left"]):
            for folder in (root, *self.scratch.glob(f"{number}.*")):
                shutil.rmtree(folder)
        return result

    def named_damage(self, number: int) -> bool:
        """Whether every rank of the resumed job ended by naming damage, with nothing to go back to.

        The error says to remove it, to begin anew.
        """
        logs = [file.read_text() for file in (self.scratch / f"{number}.resumed").glob("*.log")]
        said = [re.search(NOTHING_OLDER, log, re.MULTILINE) for log in logs]
        return len(said) == RANKS and all(said)

    def judge_pointer(self, root: Path, damaged: int | None) -> list[str]:
        """The pointer may be late, it may not name what is no checkpoint."""
        pointer = root / "latest"
        name = pointer.read_text() if pointer.exists() else None
        if name in (None, f"step{damaged}") or not wrong_in(root / name):
            return []
        return [f"the pointer names {name!r}, which is not whole"]

    def judge(
        self, fault: Fault, first: Told, second: Told, damaged: int | None, root: Path
    ) -> tuple[str, list[str]]:
        """What the resume came to, in a word, and all that was lost or is wrong."""
        wrong = [] if first.struck else ["the fault never struck"]
        must = max(first.durable() - {damaged}, default=None)
        if second.hung:
            return "hung", wrong
        if len(second.resumed) != RANKS:
            return "cannot resume", [*wrong, "no resume"]
        chosen = {step for step, _ in second.resumed.values()}
        if len(chosen) != 1:
            return "mixed", [*wrong, f"ranks resumed from different steps: {chosen}"]
        (step,) = chosen
        outcome = "right"
        if must is not None and (step is None or step < must):
            outcome = "lost"
            wrong.append(f"lost: {must} was durable, {step} was chosen")
        for rank, (_, digest) in second.resumed.items():
            if step is not None and first.saving.get(step, {}).get(rank) != digest:
                outcome = "mixed"
                wrong.append(f"rank {rank}: not the bits of step {step}")
        if second.ended != self.end:
            wrong.append("the resumed run ends in other bits than the one nothing struck")
        if second.failed:
            wrong.append(f"saves failed after the resume: {second.failed}")
        leftovers = [path.name for path in root.glob("*.incomplete")] + list(root.glob("*.deleted"))
        if leftovers:
            wrong.append(f"not cleaned up: {leftovers}")
        if not first.goes_on(fault):
            wrong.append("a save that failed has ended training")
        return outcome, wrong


def mount_tmpfs(root: Path) -> bool:
    """A small real file system on ``root``; needs root."""
    option = f"size={TMPFS_BYTES}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", option, "soak", root], check=True)
    return True


def scratch_directory() -> Path:
    """In memory where that is possible: a flush to a busy disk can take longer than a trial may."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="soak-", dir=memory if memory.is_dir() else None))


@cache
def code() -> str:
    """The commit that is struck: trials of another are no trials of this."""
    return code_of_today()["commit"]


def earlier_results(file: Path | None, seed: int, way: str) -> list[dict]:
    """What ``file`` has of trials with this seed and code."""
    if file is None or not file.exists():
        return []
    results = [json.loads(line) for line in file.read_text().splitlines()]
    origin = {"seed": seed, "way": way, "code": code()}
    if any({key: result[key] for key in origin} != origin for result in results):
        raise SystemExit(f"{file} has trials of another seed or of other code: take another file")
    return results


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=len(CASES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="repeat this trial alone")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="of results, added to")
    parser.add_argument("--way", choices=WAYS, default="retention", help="of saving")
    options = parser.parse_args()
    trials = range(options.trials) if options.only is None else [options.only]
    results = earlier_results(options.resume, options.seed, options.way)
    done = {result["trial"] for result in results}
    scratch = scratch_directory()
    observer = Observer(scratch, way=options.way)
    for number in trials:
        if number in done:
            continue
        result = observer.trial(number, *observer.plan(number, options.seed))
        result |= {"seed": options.seed, "way": options.way, "code": code()}
        results.append(result)
        print(json.dumps(result), flush=True)
        if options.resume:
            with options.resume.open("a") as file:
                file.write(json.dumps(result) + "\n")
    counted = Counter((result["kind"], result["point"]) for result in results)
    for (kind, point), count in sorted(counted.items()):
        print(f"{kind} at {point}: {count}")
    for kind, point in CASES:
        if (kind, point) not in observer.cases:
            print(f"{kind} at {point}: saves by {options.way} do not come to it")
    lost, hung, left = (sum(bool(r[what]) for r in results) for what in ("wrong", "hung", "left"))
    if lost or hung or left:
        print(f"what is left of them: {scratch}")
    else:
        shutil.rmtree(scratch)
    tried = f"tried {len(results)}, lost {lost}, hung {hung}, left {left}, seed {options.seed}"
    print(f"soak: {tried}", flush=True)
    return int(bool(lost or hung or left))


if __name__ == "__main__":
    sys.exit(main())
