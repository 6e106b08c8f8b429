"""Decide from what a run left on disk whether every rank did what it claims."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals

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

SHARED_GROUP_HINT = (
    "likely cause: async_save ran on the process group that training uses, and their collectives "
    'mixed; pass process_group=dist.new_group(backend="gloo")'
)
NO_RENDEZVOUS = re.compile(r"Dist\w*Error|connect|timed? ?out|EADDR", re.IGNORECASE)
TAKEN_PORT = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
NOT_AWAITED_HINT = (
    "its future was never awaited: call result() on the last save's future before "
    "destroy_process_group()"
)
INCOMPLETE = ".incomplete"  # the end of the name of a save that is not complete
MOST_SHOWN = 80  # characters of a value that differs
LOST_PEER = re.compile(r"Connection (closed|reset) by peer|Broken pipe")
LISTED = {  # what a rank's record lists, and the kind of failure that it is
    "deprecations": "deprecation_warning",
    "conflicts": "unordered_access",
    "used_before_wait": "used_before_wait",
    "dead_children": "child_died",
}
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
    record: dict | None  # as it was at the process's end, else at the recipe's
    process_ended: bool  # False: if there is a record, the interpreter hung or died at its exit
    notes: list[dict]


@dataclass
class SavedState:
    """One save as all ranks saw it."""

    directory: str  # where it is now, if a rank has renamed it
    kind: str
    unjudged: str = ""
    shares_training_group: bool = False
    events: set[str] = field(default_factory=set)  # what was noted of it, see the ledger
    beside: list[str] = field(default_factory=list)  # directories of uploads in flight
    leaves: dict[int, dict] = field(default_factory=dict)  # by rank
    callers: set[int] = field(default_factory=set)  # ranks that called it
    failures: dict[int, str] = field(default_factory=dict)  # by rank: what it raised
    called: str = ""  # the directory as it was called
    not_kept: str = ""  # why what it wrote was not looked at before it was overwritten

    @property
    def name(self) -> str:
        return Path(self.directory).name or "a save"

    @property
    def awaited(self) -> bool:
        """By a rank, which may await for all; a synchronous save reports to its caller."""
        return self.kind != "async_save" or "awaited" in self.events

    @property
    def failed(self) -> bool:
        """On every rank that called it."""
        return bool(self.failures) and self.failures.keys() >= self.callers

    @property
    def leaf_names(self) -> set[str]:
        names = set()
        for leaves in self.leaves.values():
            names |= {leaf.get("of", name) for name, leaf in leaves.items()}
        return names


def read_ranks(run_dir: Path, count: int) -> list[Rank]:
    return [read_rank(run_dir / "ranks" / f"rank{number}", number) for number in range(count)]


def read_rank(stem: Path, number: int) -> Rank:
    """What a rank left in the files whose names begin with ``stem``."""

    def text_of(suffix: str) -> str:
        file = stem.with_suffix(suffix)
        return file.read_text(errors="replace") if file.exists() else ""

    code = text_of(".exit")
    at_recipe_end = text_of(".ended")
    at_process_end = text_of(".json")
    return Rank(
        number=number,
        output=text_of(".out"),
        stacks=text_of(".stacks"),
        exit=int(code) if code else None,
        record=json.loads(at_process_end or at_recipe_end or "null"),
        process_ended=bool(at_process_end),
        notes=[json.loads(line) for line in text_of(".notes").splitlines()],
    )


class _NumberedSaves:
    """The saves of a rank and of the processes that it forks, each of which numbers its own."""

    def __init__(self) -> None:
        self.by_process: dict[tuple[int, int], SavedState] = {}
        self.latest: dict[int, SavedState] = {}

    def add(self, note: dict, save: SavedState) -> None:
        self.by_process[note["pid"], note["number"]] = save
        self.latest[note["number"]] = save

    def get(self, note: dict, number: int) -> SavedState:
        """The save of that number, of the process that noted this or of the one that forked it."""
        return self.by_process.get((note["pid"], number), self.latest[number])


def gather_saves(ranks: list[Rank]) -> list[SavedState]:
    """The saves of a run, in the order they were called.

    Ranks took part in the same save if it is each one's n-th into the same directory: ranks may
    save alone, and into directories of their own.
    """
    saves: dict[tuple[str, int], SavedState] = {}  # by directory and n
    for rank in ranks:
        own = _NumberedSaves()
        directories: list[str] = []
        for note in rank.notes:
            event = note["event"]
            if event == "save":
                directory = note["directory"]
                directories.append(directory)
                key = directory, directories.count(directory)
                new = SavedState(directory, note["kind"], note["unjudged"], called=directory)
                save = saves.setdefault(key, new)
                own.add(note, save)
                save.callers.add(rank.number)
                save.shares_training_group |= note["shares_training_group"]
            elif "number" in note:
                save = own.get(note, note["number"])
                save.events.add(event if note.get("phase") != "staging" else "staging awaited")
                if event == "upload":
                    save.beside += [own.get(note, other).directory for other in note["beside"]]
                elif event == "leaves":
                    save.leaves.setdefault(rank.number, {}).update(note["leaves"])
                elif event == "failed":
                    save.failures[rank.number] = note["error"]
                elif event == "not kept":
                    save.not_kept = note["why"]
                elif event == "overwritten":
                    save.directory = note["copy"]
    for rank in ranks:
        _follow(rank, saves)
    return list(saves.values())


def _follow(rank: Rank, saves: dict[tuple[str, int], SavedState]) -> None:
    """Follow a rank's renamed and removed directories.

    They concern the saves that the rank itself has called before, and those that it never calls.
    """
    calls = [note["directory"] for note in rank.notes if note["event"] == "save"]
    called: list[str] = []
    for note in rank.notes:
        if note["event"] == "save":
            called.append(note["directory"])
        if note["event"] not in ("renamed", "removed"):
            continue
        for (directory, use), save in saves.items():
            later = directory in calls and use > called.count(directory)
            if later or not f"{save.directory}/".startswith(f"{note['path']}/"):
                continue
            save.events.add(note["event"])
            if note["event"] == "renamed":
                save.directory = note["to"] + save.directory.removeprefix(note["path"])


def _found(run_dir: Path, name: str) -> set[str]:
    return {str(path.parent) for path in run_dir.rglob(name)}


def is_unfinished(directory: str) -> bool:
    return any(part.endswith(INCOMPLETE) for part in Path(directory).parts)


def checkpoint_directories(run_dir: Path, saves: list[SavedState]) -> list[str]:
    """Every directory that should hold a checkpoint: named by a save, or with a shard in it.

    One that still has the name of an unfinished save is none.
    """
    wanted = _found(run_dir, "*.distcp") | _found(run_dir, ".metadata")
    wanted |= {s.directory for s in saves if not (s.failed and s.awaited)}
    for save in {s.directory: s for s in saves}.values():  # the last one to each
        if "removed" in save.events and not Path(save.directory).exists():
            wanted.discard(save.directory)
    wanted -= {s.directory for s in saves if s.unjudged}
    return sorted(directory for directory in wanted if not is_unfinished(directory))


def chunks_by_directory(directories: list[str], saves: list[SavedState]) -> dict[str, dict]:
    """What :mod:`rankproof.load_back` is to hash: by directory and leaf, the chunks passed."""
    request: dict[str, dict] = {directory: {} for directory in directories}
    for save in saves:
        for leaves in save.leaves.values():
            for name, leaf in leaves.items():
                if leaf.get("chunk") and save.directory in request:
                    chunks = request[save.directory].setdefault(leaf.get("of", name), [])
                    if leaf["chunk"] not in chunks:
                        chunks.append(leaf["chunk"])
    return request


def some(found: list[str], most: int = 3) -> str:
    more = f"; {len(found) - most} more" if found[most:] else ""
    return "; ".join(found[:most]) + more


def _differences(save: SavedState, found: dict) -> list[str]:
    """Leaves of a loaded checkpoint that are not what the ranks passed to the save."""
    differing = {}  # by leaf: the first rank's difference
    for rank, leaves in sorted(save.leaves.items()):
        for key, expected in leaves.items():
            name = expected.get("of", key)
            loaded = found.get(name)
            chunk = json.dumps(expected["chunk"]) if expected.get("chunk") else "whole"
            if "unjudged" in expected or ("pickle" in expected and loaded is not None):
                continue
            if loaded is None:
                difference = f"rank {rank}: not in the checkpoint"
            elif "value" in expected and loaded.get("value") != expected["value"]:
                values = loaded.get("value"), expected["value"]
                difference = " instead of ".join(str(value)[:MOST_SHOWN] for value in values)
            elif "sha256" in expected and loaded.get("sha256", {}).get(chunk) != expected["sha256"]:
                difference = f"rank {rank}"
            else:
                continue
            differing.setdefault(name, f"{name} ({difference})")
    return list(differing.values())


def judge_checkpoints(
    saves: list[SavedState],
    directories: list[str],
    loaded: dict[int, dict],
    elsewhere: tuple[str, ...] = (),
) -> list[Failure]:
    """Compare what was loaded, per world size of the loading processes, with what was saved.

    What was written elsewhere, and is named as such, is not missing as well. Nor is what another
    process seems to have moved.
    """
    failures = []
    moved = moved_by_others(saves, directories, loaded)
    for directory in directories:
        if directory in moved:
            continue
        path = Path(directory)
        here = [s for s in saves if s.directory == directory]
        hint = "" if all(s.awaited for s in here) else NOT_AWAITED_HINT
        missing = ""
        if not path.exists() or not any(path.iterdir()):
            missing = f"the directory {'is empty' if path.exists() else 'does not exist'}"
        elif any("unfinished" in s.events for s in here):
            missing = "the script ended before it knew that the save had"
        if missing and any(file.startswith(f"{directory}/") for file in elsewhere):
            continue
        if missing:
            failures.append(Failure("checkpoint_missing", f"{path.name}: {missing}", hint=hint))
            continue
        last = last_of(here)
        for world_size, answers in loaded.items():
            answer = answers.get(directory, {"error": "not tried"})
            where = f"{path.name}, loaded on {world_size} rank{'s' * (world_size > 1)}"
            if "unjudged" in answer:
                continue
            if "error" in answer:
                text = f"{where}: {answer['error']}"
                failures.append(Failure("checkpoint_incomplete", text, hint=hint))
                break
            differing = _differences(last, answer["leaves"]) if last else []
            if differing:
                count = f"{len(differing)} of {len(answer['leaves'])}"
                text = f"{where}: {count} leaves are not what was passed to {last.kind}: "
                text += ", ".join(differing[:3])
                unequal = ranks_disagree_on(last)
                if unequal:
                    text += f"; the ranks passed different values of {some(unequal)}"
                failures.append(Failure("checkpoint_wrong", text))
                break
    return failures


def moved_by_others(
    saves: list[SavedState], directories: list[str], loaded: dict[int, dict]
) -> dict[str, str]:
    """By directory of a save that is gone: the one that no rank named and that is there instead.

    It has the leaves that were saved, or is not loaded back.
    """
    named = {save.directory for save in saves}
    unnamed = [directory for directory in directories if directory not in named]
    moved = {}
    for directory in directories:
        last = last_of([save for save in saves if save.directory == directory])
        if last is None or not last.awaited or Path(directory).exists():
            continue
        for candidate in unnamed:
            answers = [by_directory.get(candidate, {}) for by_directory in loaded.values()]
            if all(_may_hold(answer, last) for answer in answers):
                moved[directory] = candidate
                unnamed.remove(candidate)  # it is what one of them has become
                break
    return moved


def _may_hold(answer: dict, save: SavedState) -> bool:
    if "error" in answer:
        return False
    return "unjudged" in answer or answer.get("leaves", {}).keys() == save.leaf_names


def ranks_disagree_on(save: SavedState) -> list[str]:
    """Leaves of which ranks passed different values for the same part: one of them is on disk."""
    passed: dict[tuple[str, str], set[str]] = {}  # by leaf and chunk
    for leaves in save.leaves.values():
        for name, leaf in leaves.items():
            value = leaf.get("sha256") or leaf.get("value")
            if value is not None:
                part = leaf.get("of", name), json.dumps(leaf.get("chunk"))
                passed.setdefault(part, set()).add(value)
    return sorted({name for (name, _), values in passed.items() if len(values) > 1})


def last_of(saves: list[SavedState]) -> SavedState | None:
    """The save whose values a directory holds: the last one into it that a rank completed."""
    return next((save for save in reversed(saves) if not save.failed), None)


def compared(saves: list[SavedState], loaded: dict[int, dict]) -> list[SavedState]:
    """The saves whose values were compared with what is on disk."""
    found = []
    for directory in dict.fromkeys(save.directory for save in saves):
        last = last_of([save for save in saves if save.directory == directory])
        answers = [by_directory.get(directory, {}) for by_directory in loaded.values()]
        if last and any("leaves" in answer for answer in answers):
            found.append(last)
    return found


def not_compared(saves: list[SavedState], directories: list[str]) -> list[str]:
    """What became of saves that nothing on disk is left of, for a person.

    What is on disk, or should be, is judged, or said not to be.
    """
    notes = []
    gone = []
    for save in saves:
        said_elsewhere = save.failed or save.unjudged or save.not_kept
        last = last_of([other for other in saves if other.directory == save.directory])
        is_removed = save.directory not in directories and not Path(save.directory).exists()
        if not said_elsewhere and (save is not last or is_removed):
            gone.append(save)
    if gone:
        names = some([save.name for save in gone])
        notes.append(f"removed or replaced before the end, so not compared: {names}")
    return notes


def judge_replaced(saves: list[SavedState]) -> list[Failure]:
    """Leaves that a directory held and lost, when a later save of other leaves replaced them."""
    failures = []
    complete = [save for save in saves if not save.failed and "removed" not in save.events]
    for number, save in enumerate(complete):
        later = [other for other in complete[number + 1 :] if other.called == save.called]
        gone = sorted(save.leaf_names - later[0].leaf_names) if later else []
        if gone and "renamed" not in save.events:
            text = f"{Path(save.called).name}: a later save into it replaced {some(gone)}"
            hint = "pass all of a checkpoint's state to one save, or save to two directories"
            failures.append(Failure("checkpoint_wrong", text, hint=hint))
    return failures


def judge_failed_saves(saves: list[SavedState]) -> list[Failure]:
    """Saves that failed where no later one into the same directory made up for it.

    One under the name of an unfinished save does not pass for a checkpoint: whoever names it so
    knows that it may fail. What a writer for other places than a directory has tried is not judged.
    """
    failures = []
    for number, save in enumerate(saves):
        later = [other for other in saves[number + 1 :] if other.called == save.called]
        made_up_for = any(not other.failures for other in later)
        if is_unfinished(save.directory) or made_up_for or save.unjudged:
            continue
        if save.failures and save.awaited:
            rank, error = min(save.failures.items())
            text = f"{save.name}: {error}, and the script went on"
            hint = "let it raise, or save again"
            failures.append(Failure("save_failed", text, rank, hint))
    return failures


def judge_saves(run_dir: Path, saves: list[SavedState], went_well: bool) -> list[Failure]:
    """Saves that nobody awaited, that run beside each other, or are left half done.

    Two uploads at a time share a group, a writer or a stager, and damage each other unseen. A run
    that went well leaves no save under its unfinished name, unless that save failed.
    """
    failures = []
    if went_well:
        known = {s.directory for s in saves if s.failed and s.awaited}
        left = _found(run_dir, "*.distcp") | {s.directory for s in saves}
        text = "it still has the name of an unfinished save, and the run went well"
        for directory in sorted(left - known):
            if is_unfinished(directory) and Path(directory).exists():
                failures.append(Failure("checkpoint_incomplete", f"{Path(directory).name}: {text}"))
        failures += judge_failed_saves(saves)
        failures += judge_replaced(saves)
    for save in saves:
        if "never_awaited" in save.events and not save.awaited:
            text = f"{save.name}: the script ended without having waited for it"
            failures.append(Failure("never_awaited", text, hint=NOT_AWAITED_HINT))
        if save.beside:
            other = Path(min(save.beside)).name
            text = f"{save.name}: its upload began while that of {other} was in flight"
            hint = "await each upload before the next one begins"
            failures.append(Failure("overlapping_saves", text, hint=hint))
    return failures


def unjudged(saves: list[SavedState], directories: list[str], loaded: dict) -> list[str]:
    """What was not compared, and why."""
    found = [f"{s.name}: {s.unjudged}" for s in saves if s.unjudged]
    found += [f"{s.name}: {s.not_kept}" for s in saves if s.not_kept]
    moved = moved_by_others(saves, directories, loaded)
    for old, new in moved.items():
        to = Path(new).name
        found.append(f"{Path(old).name}: another process seems to have moved it to {to}")
    for directory in directories:
        name = Path(directory).name
        reasons = [answer.get(directory, {}).get("unjudged") for answer in loaded.values()]
        found += [f"{name}: {reason}" for reason in reasons if reason]
        is_named = directory in {s.directory for s in saves}
        if not is_named and directory not in moved.values():
            found.append(f"{name}: it loads; what was passed to its save was not seen")
    for save in saves:
        answers = [answer.get(save.directory, {}).get("leaves", {}) for answer in loaded.values()]
        for leaves in save.leaves.values():
            for name, leaf in leaves.items():
                pickles = {a[name].get("pickle") for a in answers if name in a}
                where = f"{save.name}: {name}"
                if "unjudged" in leaf:
                    found.append(f"{where} is not compared: {leaf['unjudged']}")
                elif "pickle" in leaf and pickles - {leaf["pickle"]}:
                    found.append(f"{where}, a {leaf['type']}, does not compare by its pickle")
    return list(dict.fromkeys(found))


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


def judge_ranks(ranks: list[Rank], timed_out: bool, saves: list[SavedState]) -> list[Failure]:
    """What ended each rank, and what it left behind; ranks that only lost a peer come last."""
    failures = []
    shared = any(s.shares_training_group and s.kind == "async_save" for s in saves)
    hint = SHARED_GROUP_HINT if shared and len(ranks) > 1 else ""
    records = [rank.record for rank in ranks if rank.record]
    nobody_went_on = all(record.get("left_early") for record in records)
    for rank in ranks:
        record = rank.record
        if record is None:
            failures += _judge_missing(rank, timed_out, hint)
            continue
        ended_well = rank.process_ended and rank.exit in (0, *FROM_ABOVE)
        if record["finished"] and not ended_well:
            failures += _judge_exit(rank, timed_out, hint)
        for error in [record["error"], *record["thread_errors"]]:
            failures += [Failure("raised", error, rank.number, hint)] if error else []
        if not record["finished"] and not record["error"]:
            text = f"sys.exit({record.get('exit', '')}) before the script's last line"
            failures.append(Failure("exited_early", text, rank.number))
        if record.get("left_early") and nobody_went_on:
            text = f"{record['left_early']} before the script's last line, as on all ranks"
            failures.append(Failure("exited_early", text, rank.number))
        if record.get("misfit"):
            failures.append(Failure("misfit", record["misfit"], rank.number))
        for key, kind in LISTED.items():
            found = record.get(key)
            if found and (key != "dead_children" or record["finished"]):
                failures.append(Failure(kind, some(found), rank.number))
        if record.get("left_process_group"):
            text = "torch.distributed is still initialised at the script's end"
            advice = "call dist.destroy_process_group() in a finally block"
            failures.append(Failure("left_process_group", text, rank.number, advice))
    return sorted(failures, key=lambda failure: bool(LOST_PEER.search(failure.text)))


def _judge_missing(rank: Rank, timed_out: bool, hint: str) -> list[Failure]:
    """Why a rank left no record; nothing, if it was ended because another one had failed."""
    kind, text = "missing_record", f"ended with exit code {rank.exit}"
    if rank.exit in FROM_ABOVE:
        if not timed_out:
            return []
        kind, text = "hung", f"still running at the deadline{_innermost(rank.stacks)}"
    elif rank.exit < 0:
        signal = signal_name(-rank.exit)
        cause = re.search(r"what\(\):\s*(.*)", rank.output)
        kind, text = "killed", f"ended by {signal}" + (f": {cause[1]}" if cause else "")
    return [Failure(kind, text, rank.number, hint)]


def _judge_exit(rank: Rank, timed_out: bool, hint: str) -> list[Failure]:
    """What kept an interpreter from ending well after the script's last line."""
    threads = rank.record.get("threads_at_the_end")
    if rank.exit in FROM_ABOVE and timed_out and threads and "in _shutdown" in _main(rank.stacks):
        return [Failure("left_thread", some(threads), rank.number)]
    failures = _judge_missing(rank, timed_out, hint)
    for failure in failures:
        failure.text += ", after the script's last line"
    return failures


def _main(stacks: str) -> str:
    return stacks.rpartition("Current thread")[2] or stacks


def _innermost(stacks: str) -> str:
    """ " in function (file:line)" of the main thread's innermost frame."""
    frame = re.search(r'File "([^"]+)", line (\d+) in (\S+)', _main(stacks))
    return f", in {frame[3]} ({Path(frame[1]).name}:{frame[2]})" if frame else ""
