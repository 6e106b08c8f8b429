"""From what a run left behind to its verdict: fills in a report."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rankproof import checkpoints, judge
from rankproof.checkpoints import Loaded
from rankproof.judge import Failure, Rank, some
from rankproof.launch import SERVERS_OWN, load_back
from rankproof.protocol import Outcome, Record
from rankproof.recipe import DEFAULT_DEADLINE_S
from rankproof.report import Report
from rankproof.saves import SavedState, gather_saves

if TYPE_CHECKING:
    from rankproof.run import Options

SHARED_MEMORY = "/dev/shm/"
MAY_WRITE_HINT = "if that is where it is to write: --allow DIR"
NO_MOUNTS = "not judged: what C++ code and subprocesses write elsewhere (no private mounts here)"


@dataclass
class Left:
    """What a run has left, and what it is judged by."""

    run_dir: Path
    deadline_s: float
    own_places: tuple[str, ...]  # where the script's project lies

    def readable(self, text: str) -> str:
        return text.replace(str(self.run_dir), "<run>")

    def log(self) -> str:
        """The end of what the leader and torchrun wrote."""
        texts = [file.read_text(errors="replace") for file in self.run_dir.glob("*.out")]
        return "".join(texts).strip()[-2000:]


def fill_in(report: Report, left: Left, options: "Options") -> None:
    """Judge what is left of a run."""
    ranks = judge.read_ranks(left.run_dir, report.ranks)
    report.outputs = [left.readable(rank.output) for rank in ranks]
    outcome = Outcome.read(left.run_dir)
    if outcome is None:
        text = f"the leader ended before the ranks did: {left.log()}"
        report.failures = [Failure("missing_record", text)]
        return
    if outcome.timed_out:
        report.stacks = [rank.stacks for rank in ranks]
    saves = gather_saves(ranks)
    cached, elsewhere = written(outcome, ranks, left.own_places)
    if cached:
        report.notes.append(f"written to caches: {some(cached)}")
    if not outcome.private:
        report.notes.append(NO_MOUNTS)
    failures = _judge_ends(outcome, ranks, saves, elsewhere)
    # What is turned off excuses no lost save.
    went_well = all(failure.kind in options.off for failure in failures)
    missing = judge.without_record(ranks)
    if missing and went_well:
        failures.append(_missing_record(missing, left))
        went_well = False
    failures += checkpoints.judge_saves(left.run_dir, saves, ranks, went_well)
    counted = () if "wrote_elsewhere" in options.off else tuple(elsewhere)
    failures += _judge_checkpoints(report, left, saves, counted)
    for failure in failures:
        failure.text = left.readable(failure.text)
    report.failures = failures
    records = [rank.record for rank in ranks if rank.record is not None]
    is_to_order = options.control.order if options.control else options.order
    _say_what_order_was_judged(report, records, is_to_order)  # by the report's failures
    _say_where(report, records)
    _turn_off(report, options.off)


def _judge_ends(
    outcome: Outcome, ranks: list[Rank], saves: list[SavedState], elsewhere: list[str]
) -> list[Failure]:
    """How ranks ended, and what they left besides saves."""
    hint = checkpoints.hint_at_a_shared_group(saves, len(ranks))
    failures = judge.judge_ranks(ranks, outcome.timed_out, hint)
    if outcome.left_processes:
        failures.append(Failure("left_process", "; ".join(sorted(outcome.left_processes))))
    if elsewhere:
        failures.append(Failure("wrote_elsewhere", some(elsewhere), hint=MAY_WRITE_HINT))
    return failures


def _missing_record(missing: str, left: Left) -> Failure:
    """Ranks left no record, and nothing else says why but perhaps the leader's log."""
    text = missing
    log = left.log()
    if log:
        text += f"; {log}"
    return Failure("missing_record", text)


def _judge_checkpoints(
    report: Report, left: Left, saves: list[SavedState], elsewhere: tuple[str, ...]
) -> list[Failure]:
    """Load what is on disk, compare it with the saves, and say in the report what was judged."""
    directories = checkpoints.checkpoint_directories(left.run_dir, saves)
    loaded = _loaded(directories, saves, report, left)
    unjudged = checkpoints.unjudged(saves, directories, loaded)
    report.unjudged = [left.readable(text) for text in unjudged]
    report.checkpoints = list(dict.fromkeys(Path(d).name for d in directories))
    report.notes += checkpoints.not_compared(saves, directories)
    report.judged = _judged(report, saves, loaded)
    return checkpoints.judge_checkpoints(saves, directories, loaded, elsewhere)


def _loaded(directories: list[str], saves: list[SavedState], report: Report, left: Left) -> Loaded:
    """What fresh processes read: on one rank, and once a script, of a run on one, on two."""
    if not directories:
        return {}
    request = checkpoints.chunks_by_directory(directories, saves)
    limit = max(left.deadline_s, DEFAULT_DEADLINE_S)
    loaded = {1: load_back(request, 1, left.run_dir, limit)}
    if report.ranks == 1 and not report.control and not report.gate:
        loaded[2] = load_back(request, 2, left.run_dir, limit)
    return loaded


def _say_where(report: Report, records: list[Record]) -> None:
    """On which devices the ranks ran, with which backend and torch."""
    told = [record for record in records if record.device]
    if not told:
        return
    device = told[0].device
    backend = told[0].backend or "no process group"
    count = f"{len(records)} × " if device != "CPU" else ""
    report.device = f"{count}{device}, {backend}"
    report.torch = told[0].torch


def _turn_off(report: Report, off: tuple[str, ...]) -> None:
    """Make notes of failures of kinds that are turned off."""
    counted = []
    for failure in report.failures:
        if failure.kind in off:
            report.notes.append(f"{failure.kind} is turned off: {failure.text}")
        else:
            counted.append(failure)
    report.failures = counted


def _say_what_order_was_judged(report: Report, records: list[Record], is_to_order: bool) -> None:
    """Counts of what ranks recorded of streams."""
    recorded = [record.order for record in records if record.order is not None]
    if not recorded:
        if is_to_order and records:
            report.notes.append("stream order is not judged where there is an accelerator")
        return
    streams = max(order.streams for order in recorded)
    collectives = max(order.async_collectives for order in recorded)
    copies = max(order.copies for order in recorded)
    report.judged["streams"] = streams
    report.judged["accesses"] = sum(order.accesses for order in recorded)
    if collectives:
        report.judged["asynchronous collectives"] = collectives
    if copies:
        report.judged["non-blocking copies"] = copies
    found = any(failure.kind == "unordered_access" for failure in report.failures)
    is_judged = streams or collectives or copies or found
    if not is_judged and report.launcher != "python":
        report.notes.append("no stream was made, so there was no order to judge")


def _caches() -> tuple[str, ...]:
    """Where programs keep what they have downloaded or compiled: listed, no failure."""
    named = [os.environ.get(name, "") for name in ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME")]
    usual = [f"~/{name}" for name in (".cache", ".triton", ".nv", ".config/matplotlib")]
    return tuple(os.path.realpath(os.path.expanduser(p)) + "/" for p in [*named, *usual] if p)


def written(
    outcome: Outcome, ranks: list[Rank], own: tuple[str, ...]
) -> tuple[list[str], list[str]]:
    """What was written to caches, and elsewhere.

    Where places were private, what was left in them counts, not what was ever opened there: a
    script may use ``/tmp``. In its own project, what was opened counts, wherever that lies. A
    directory that torch 2.9 makes when it is imported is the server's: each forked rank removes it.
    Of a script that was ended at its deadline, shared memory is left, whose names the resource
    tracker would have removed.
    """
    servers_own = f"-{tempfile.gettempdir()}/{SERVERS_OWN}"  # "-": it was removed
    left = {path for path in outcome.written if not path.startswith(servers_own)}
    if outcome.timed_out:
        left = {path for path in left if not path.startswith(SHARED_MEMORY)}
    private = tuple(f"{place}/" for place in outcome.private)
    own = tuple(place for place in own if place not in private)  # a script in /tmp itself
    seen = set()  # opened by ranks, to be written
    for rank in ranks:
        if rank.record is not None:
            seen.update(rank.record.wrote_elsewhere)
    cached = {path for path in left | seen if path.startswith(_caches())}
    elsewhere = set(left)
    for path in seen:
        if path.startswith(own) or not path.startswith(private):
            elsewhere.add(path)
    return sorted(cached), sorted(elsewhere - cached)


def _judged(report: Report, saves: list[SavedState], loaded: dict) -> dict[str, int | str]:
    """What a pass rests on."""
    leaves = []
    for answers in loaded.values():
        for answer in answers.values():
            leaves += answer.get("leaves", {}).values()
    judged: dict[str, int | str] = {"saves": len(checkpoints.compared(saves, loaded))}
    if leaves:
        judged["leaves"] = len(leaves)
        judged["bytes"] = sum(leaf.get("bytes", 0) for leaf in leaves)
        judged["loaded on"] = "1 and 2 ranks" if 2 in loaded else "1 rank"
    if report.gate:
        judged["held by the gate"] = report.gate
    return judged
