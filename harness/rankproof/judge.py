"""Decide from what a run left on disk whether every rank did what it claims."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from signal import Signals

from rankproof.protocol import RANKS, Record

KINDS = {
    "raised": "a rank raised an exception",
    "hung": "ranks were still running at the deadline",
    "killed": "a rank was ended by a signal",
    "exited_early": "a rank called sys.exit before the script's last line",
    "missing_record": "a rank ended without reaching the script's last line",
    "never_awaited": "a save is never awaited",
    "child_died": "a process that the script started died, and nobody looked",
    "left_process": "a process outlived the script",
    "left_thread": "a thread outlived the script",
    "left_process_group": "a process group was not destroyed",
    "checkpoint_missing": "a save that was called is not on disk",
    "checkpoint_incomplete": "a checkpoint directory does not load",
    "save_failed": "a save failed, and the script went on as if it had not",
    "checkpoint_wrong": "a checkpoint holds other values than were passed to the save",
    "overlapping_saves": "an upload began while another one was in flight",
    "wrote_elsewhere": "files were written outside --dir, the working directory and TMPDIR",
    "deprecation_warning": "the script uses something deprecated",
    "misfit": "a control's edit does not fit the recipe",
    "unordered_access": "two streams touch the same memory in no order",
    "used_before_wait": "a tensor is used while an asynchronous collective works on it",
}

NO_RENDEZVOUS = re.compile(r"Dist\w*Error|connect|timed? ?out|EADDR", re.IGNORECASE)
TAKEN_PORT = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
LOST_PEER = re.compile(r"Connection (closed|reset) by peer|Broken pipe|got signal: 15")
BEFORE_ITS_END = "before the script's last line"
FROM_ABOVE = (None, -15, -10)  # ends that the leader made; -10: it was asked for its stacks


@dataclass
class Failure:
    """One thing that is wrong: its kind (a key of KINDS), the rank if it is one rank's, a text."""

    kind: str
    text: str
    rank: int | None = None
    hint: str = ""


@dataclass
class Rank:
    """What one rank left behind."""

    number: int
    output: str
    stacks: str
    exit: int | None  # exit code, minus the signal's number, None if it was ended from above
    record: Record | None  # as it was at the process's end, else at the recipe's
    process_ended: bool  # False: if there is a record, the interpreter hung or died at its exit
    notes: list[dict]


def read_ranks(run_dir: Path, count: int) -> list[Rank]:
    return [read_rank(run_dir / RANKS / f"rank{number}", number) for number in range(count)]


def read_rank(stem: Path, number: int) -> Rank:
    """What a rank left in the files whose names begin with ``stem``."""

    def text_of(suffix: str) -> str:
        file = stem.with_suffix(suffix)
        return file.read_text(errors="replace") if file.exists() else ""

    code = text_of(".exit")
    at_recipe_end = text_of(".ended")
    at_process_end = text_of(".json")
    record = at_process_end or at_recipe_end
    return Rank(
        number=number,
        output=text_of(".out"),
        stacks=text_of(".stacks"),
        exit=int(code) if code else None,
        record=Record.read(record) if record else None,
        process_ended=bool(at_process_end),
        notes=read_notes(text_of(".notes")),
    )


def read_notes(text: str) -> list[dict]:
    """A rank's notes, but a last line that it was ended in the middle of."""
    lines = text.splitlines()
    if lines and not text.endswith("\n"):
        lines.pop()
    return [json.loads(line) for line in lines]


def some(found: list[str], most: int = 3) -> str:
    more = f"; {len(found) - most} more" if found[most:] else ""
    return "; ".join(found[:most]) + more


def signal_name(number: int) -> str:
    """``SIGTERM``; of a real-time signal, its number."""
    if number in {*Signals}:
        return Signals(number).name
    return f"signal {number}"


def without_record(ranks: list[Rank]) -> str:
    """Which ranks left no record, and what signal ended them; empty if all left one."""
    found = []
    silent = []
    for rank in ranks:
        if rank.record is None and rank.exit is not None and rank.exit < 0:
            found.append(f"rank {rank.number} was ended by {signal_name(-rank.exit)}")
        elif rank.record is None:
            silent.append(str(rank.number))
    if silent:
        found.append(f"no record of ranks {', '.join(silent)}")
    return "; ".join(found)


def judge_ranks(ranks: list[Rank], timed_out: bool, hint: str = "") -> list[Failure]:
    """What ended each rank, and what it left behind; ranks that only lost a peer come last.

    ``hint`` is what is likely to have stopped them.
    """
    failures = []
    all_left_early = all(rank.record.left_early for rank in ranks if rank.record)
    for rank in ranks:
        if rank.record is None:
            failures += _judge_missing(rank, timed_out, hint)
            continue
        ended_well = rank.process_ended and rank.exit in (0, *FROM_ABOVE)
        if rank.record.finished and not ended_well:
            failures += _judge_exit(rank, timed_out, hint)
        failures += _judge_end(rank, hint)
        if all_left_early:  # else the others did what it has left out
            failures.append(_left_early(rank))
        failures += _judge_listed(rank)
    return sorted(failures, key=lambda failure: bool(LOST_PEER.search(failure.text)))


def _judge_end(rank: Rank, hint: str) -> list[Failure]:
    """What a rank raised, or where it ended before its last line."""
    record = rank.record
    failures = []
    for error in [record.error, *record.thread_errors]:
        if error:
            failures.append(Failure("raised", error, rank.number, hint))
    if not record.finished and not record.error:
        how = "ended" if record.exit is None else f"sys.exit({record.exit})"
        failures.append(Failure("exited_early", f"{how} {BEFORE_ITS_END}", rank.number))
    return failures


def _left_early(rank: Rank) -> Failure:
    """That a rank left its process group and ended before its last line, as all have."""
    text = f"{rank.record.left_early} {BEFORE_ITS_END}, as on all ranks"
    return Failure("exited_early", text, rank.number)


def _judge_listed(rank: Rank) -> list[Failure]:
    """What a rank's record lists."""
    record = rank.record
    failures = []
    if record.misfit:
        failures.append(Failure("misfit", record.misfit, rank.number))
    listed = {"deprecation_warning": record.deprecations}
    if record.order is not None:
        listed["unordered_access"] = record.order.conflicts
        listed["used_before_wait"] = record.order.used_before_wait
    if record.finished:
        listed["child_died"] = record.dead_children
    for kind, found in listed.items():
        if found:
            failures.append(Failure(kind, some(found), rank.number))
    if record.left_process_group:
        text = "torch.distributed is still initialised at the script's end"
        advice = "call dist.destroy_process_group() in a finally block"
        failures.append(Failure("left_process_group", text, rank.number, advice))
    return failures


def _judge_missing(rank: Rank, timed_out: bool, hint: str) -> list[Failure]:
    """Why a rank left no record; nothing, if it was ended because another one had failed."""
    if rank.exit in FROM_ABOVE:
        if not timed_out:
            return []
        text = f"still running at the deadline{_innermost(rank.stacks)}"
        return [Failure("hung", text, rank.number, hint)]
    if rank.exit >= 0:
        text = f"ended with exit code {rank.exit}"
        return [Failure("missing_record", text, rank.number, hint)]
    text = f"ended by {signal_name(-rank.exit)}"
    cause = re.search(r"what\(\):\s*(.*)", rank.output)  # of a C++ exception
    if cause:
        text += f": {cause[1]}"
    return [Failure("killed", text, rank.number, hint)]


def _judge_exit(rank: Rank, timed_out: bool, hint: str) -> list[Failure]:
    """What kept an interpreter from ending well after the script's last line."""
    threads = rank.record.threads_at_the_end
    if rank.exit in FROM_ABOVE and timed_out and threads and "in _shutdown" in _main(rank.stacks):
        return [Failure("left_thread", some(threads), rank.number)]
    failures = _judge_missing(rank, timed_out, hint)
    for failure in failures:
        failure.text += ", after the script's last line"
    return failures


def _main(stacks: str) -> str:
    """The stack of the thread that wrote them, the main one, and what comes after it."""
    return stacks.rpartition("Current thread")[2] or stacks


def _innermost(stacks: str) -> str:
    """ " in function (file:line)" of the main thread's innermost frame."""
    frame = re.search(r'File "([^"]+)", line (\d+) in (\S+)', _main(stacks))
    return f", in {frame[3]} ({Path(frame[1]).name}:{frame[2]})" if frame else ""
