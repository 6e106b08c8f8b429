"""Decide from what a run left on disk whether every rank did what it claims."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

KINDS = {
    "raised": "a rank raised an exception",
    "hung": "ranks were still running at the deadline",
    "killed": "a rank was ended by a signal",
    "exited_early": "a rank called sys.exit before the recipe's last line",
    "missing_record": "a rank ended without reaching the recipe's last line",
    "never_awaited": "a save is never awaited",
    "left_process": "a process outlived the recipe",
    "left_thread": "a thread outlived the recipe",
    "left_process_group": "a process group was not destroyed",
    "checkpoint_missing": "a save that was called is not on disk",
    "checkpoint_incomplete": "a checkpoint directory does not load",
    "checkpoint_wrong": "a checkpoint holds other values than were passed to the save",
    "overlapping_saves": "an upload began while another one was in flight",
    "wrote_elsewhere": "files were written outside --dir, the working directory and TMPDIR",
    "deprecation_warning": "the recipe uses something deprecated",
    "unordered_access": "two streams touch the same memory in no order",
}

SHARED_GROUP_HINT = (
    "likely cause: async_save ran on the process group that training uses, and their collectives "
    'mixed; pass process_group=dist.new_group(backend="gloo")'
)
NOT_AWAITED_HINT = (
    "its future was never awaited: call result() on the last save's future before "
    "destroy_process_group()"
)
INCOMPLETE = ".incomplete"  # the end of the name of a save that is not complete
MOST_SHOWN = 80  # characters of a value that differs
LOST_PEER = re.compile(r"Connection (closed|reset) by peer|Broken pipe")
SIGNALS = {6: "SIGABRT", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}


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
    output: str = ""
    stacks: str = ""
    exit: int | None = None  # exit code, minus the signal's number, None if it was ended from above
    record: dict | None = None
    ended: bool = True  # False: it reached its end, and the interpreter's was never reached
    notes: list[dict] = field(default_factory=list)


@dataclass
class SavedState:
    """One save as all ranks saw it."""

    directory: str  # where it is now, if a rank has renamed it
    kind: str
    shares_training_group: bool = False
    written: bool = False
    failed: str = ""
    awaited: bool = False
    never_awaited: bool = False
    unjudged: str = ""
    unfinished: bool = False
    removed: bool = False
    beside: list[str] = field(default_factory=list)  # directories of uploads in flight
    leaves: dict[int, dict] = field(default_factory=dict)  # by rank


def read_ranks(run_dir: Path, count: int) -> list[Rank]:
    ranks = []
    for number in range(count):
        stem = run_dir / "ranks" / f"rank{number}"

        def text(suffix: str, stem: Path = stem) -> str:
            path = stem.with_suffix(suffix)
            return path.read_text(errors="replace") if path.exists() else ""

        ranks.append(
            Rank(
                number=number,
                output=text(".out"),
                stacks=text(".stacks"),
                exit=int(code) if (code := text(".exit")) else None,
                record=json.loads(record) if (record := text(".json") or text(".ended")) else None,
                ended=bool(text(".json")),
                notes=[json.loads(line) for line in text(".notes").splitlines() if line],
            )
        )
    return ranks


def gather_saves(ranks: list[Rank]) -> list[SavedState]:
    """The saves of a run, in the order they were called.

    Ranks took part in the same save if it is each one's n-th into the same directory: ranks may
    save alone, and into directories of their own.
    """
    saves: dict[tuple[str, int], SavedState] = {}  # by directory and n
    for rank in ranks:
        own: dict[int, SavedState] = {}  # by the rank's own number
        uses: dict[str, int] = {}
        for note in rank.notes:
            if "number" not in note:
                continue
            number = note["number"]
            if note["event"] == "save":
                directory = note["directory"]
                use = uses[directory] = uses.get(directory, 0) + 1
                save = saves.setdefault((directory, use), SavedState(directory, note["kind"]))
                save.shares_training_group |= note["shares_training_group"]
                save.unjudged = note["unjudged"]
                own[number] = save
            elif note["event"] == "upload":
                beside = {own[other].directory for other in note["beside"]}
                own[number].beside = sorted({*own[number].beside, *beside})
            elif note["event"] == "leaves":
                own[number].leaves.setdefault(rank.number, {}).update(note["leaves"])
            elif note["event"] == "written":
                own[number].written = True
            elif note["event"] == "awaited":
                own[number].awaited |= note["phase"] == "upload"
            elif note["event"] == "never_awaited":
                own[number].never_awaited = True
            elif note["event"] == "unfinished":
                own[number].unfinished = True
            elif note["event"] == "failed":
                own[number].failed = note["error"]
    for save in saves.values():  # a synchronous save reports to its caller
        save.awaited |= save.kind == "save"
        save.never_awaited &= not save.awaited  # one rank may await for all
    for rank in ranks:
        _follow(rank, saves)
    return list(saves.values())


def _follow(rank: Rank, saves: dict[tuple[str, int], SavedState]) -> None:
    """Follow a rank's renamed and removed directories.

    They concern the saves that the rank itself has called before, and those that it never calls.
    """
    own = {note["directory"] for note in rank.notes if note["event"] == "save"}
    uses: dict[str, int] = {}
    for note in rank.notes:
        if note["event"] == "save":
            uses[note["directory"]] = uses.get(note["directory"], 0) + 1
            continue
        if note["event"] not in ("renamed", "removed"):
            continue
        for (directory, use), save in saves.items():
            called = directory not in own or use <= uses.get(directory, 0)
            if not called or not _within(save.directory, note["path"]):
                continue
            if note["event"] == "renamed":
                save.directory = note["to"] + save.directory.removeprefix(note["path"])
            else:
                save.removed = True


def checkpoint_directories(run_dir: Path, saves: list[SavedState]) -> list[str]:
    """Every directory that should hold a checkpoint: named by a save, or with a shard in it.

    One that still has the name of an unfinished save is none.
    """
    shards = {str(p.parent) for p in run_dir.rglob("*.distcp")}
    metadata = {str(p.parent) for p in run_dir.rglob(".metadata")}
    named = {s.directory for s in saves if not (s.failed and s.awaited) and not s.unjudged}
    last_save = {s.directory: s for s in saves}
    gone = {d for d in named if not Path(d).exists() and last_save[d].removed}
    foreign = {s.directory for s in saves if s.unjudged}
    return sorted(d for d in (shards | metadata | named) - gone - foreign if not _unfinished(d))


def _unfinished(directory: str) -> bool:
    return any(part.endswith(INCOMPLETE) for part in Path(directory).parts)


def judge_unfinished(run_dir: Path, saves: list[SavedState]) -> list[Failure]:
    """A run that went well leaves no save under its unfinished name, unless that save failed."""
    failed = {s.directory for s in saves if s.failed and s.awaited}
    found = {str(p.parent) for p in run_dir.rglob("*.distcp")} | {s.directory for s in saves}
    left = {d for d in found if _unfinished(d) and Path(d).exists()} - failed
    text = "it still has the name of an unfinished save, and the run went well"
    return [Failure("checkpoint_incomplete", f"{Path(d).name}: {text}") for d in sorted(left)]


def _within(path: str, parent: str) -> bool:
    return path == parent or path.startswith(parent + "/")


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


def _short(value: str | None) -> str:
    text = str(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def _differences(save: SavedState, found: dict) -> list[str]:
    """Leaves of a loaded checkpoint that are not what the ranks passed to the save."""
    differing = {}  # by leaf: the first rank's difference
    for rank, leaves in sorted(save.leaves.items()):
        for key, expected in leaves.items():
            name = expected.get("of", key)
            loaded = found.get(name)
            if "unjudged" in expected or ("pickle" in expected and loaded is not None):
                continue
            if loaded is None:
                differing.setdefault(name, f"{name} (rank {rank}: not in the checkpoint)")
            elif "value" in expected:
                if (value := loaded.get("value")) != expected["value"]:
                    values = f"{_short(value)} instead of {_short(expected['value'])}"
                    differing.setdefault(name, f"{name} ({values})")
            else:
                key = json.dumps(expected["chunk"]) if expected["chunk"] else "whole"
                if loaded.get("sha256", {}).get(key) != expected["sha256"]:
                    differing.setdefault(name, f"{name} (rank {rank})")
    return list(differing.values())


def judge_checkpoints(
    saves: list[SavedState], directories: list[str], loaded: dict[int, dict]
) -> list[Failure]:
    """Compare what was loaded, per world size of the loading processes, with what was saved."""
    last_save = {s.directory: s for s in saves if not s.failed}
    failures = []
    for directory in directories:
        name = Path(directory).name
        save = last_save.get(directory)
        never_awaited = [s for s in saves if s.directory == directory and not s.awaited]
        hint = NOT_AWAITED_HINT if never_awaited else ""
        path = Path(directory)
        if not path.exists() or not any(path.iterdir()):
            state = "is empty" if path.exists() else "does not exist"
            failures.append(
                Failure("checkpoint_missing", f"{name}: the directory {state}", hint=hint)
            )
            continue
        if any(s.unfinished for s in saves if s.directory == directory):
            text = f"{name}: the recipe ended before it knew that the save had"
            failures.append(Failure("checkpoint_missing", text, hint=hint))
            continue
        for world_size, answers in loaded.items():
            answer = answers.get(directory, {"error": "not tried"})
            where = f"{name}, loaded on {world_size} rank{'s' * (world_size > 1)}"
            if "unjudged" in answer:
                continue
            if "error" in answer:
                text = f"{where}: {answer['error']}"
                failures.append(Failure("checkpoint_incomplete", text, hint=hint))
                break
            if save and (differing := _differences(save, answer["leaves"])):
                total = len(answer["leaves"])
                text = (
                    f"{where}: {len(differing)} of {total} leaves are not what was passed to "
                    f"{save.kind}: {', '.join(differing[:3])}"
                )
                failures.append(Failure("checkpoint_wrong", text))
                break
    return failures


def judge_awaiting(saves: list[SavedState]) -> list[Failure]:
    text = "the recipe ended without having waited for it"
    return [
        Failure("never_awaited", f"{Path(s.directory).name}: {text}", hint=NOT_AWAITED_HINT)
        for s in saves
        if s.never_awaited
    ]


def unjudged(saves: list[SavedState], directories: list[str], loaded: dict) -> list[str]:
    """What was not compared, and why."""
    found = [f"{Path(s.directory).name or 'a save'}: {s.unjudged}" for s in saves if s.unjudged]
    known = {s.directory for s in saves}
    for directory in directories:
        name = Path(directory).name
        for answer in loaded.values():
            if reason := answer.get(directory, {}).get("unjudged"):
                found.append(f"{name}: {reason}")
        if directory not in known:
            found.append(f"{name}: it loads; what was passed to its save was not seen")
    for save in saves:
        answers = [answer.get(save.directory, {}).get("leaves", {}) for answer in loaded.values()]
        for leaves in save.leaves.values():
            for name, leaf in leaves.items():
                where = f"{Path(save.directory).name}: {name}"
                if "unjudged" in leaf:
                    found.append(f"{where} is not compared: {leaf['unjudged']}")
                elif "pickle" in leaf and any(
                    name in a and a[name].get("pickle") != leaf["pickle"] for a in answers
                ):
                    found.append(f"{where}, a {leaf['type']}, does not compare by its pickle")
    return list(dict.fromkeys(found))


def judge_overlap(saves: list[SavedState]) -> list[Failure]:
    """Two uploads at a time share a group, a writer or a stager, and damage each other unseen."""
    return [
        Failure(
            "overlapping_saves",
            f"{Path(s.directory).name}: its upload began while that of "
            f"{Path(s.beside[0]).name} was in flight",
            hint="await each upload before the next one begins",
        )
        for s in saves
        if s.beside
    ]


def judge_ranks(ranks: list[Rank], timed_out: bool, saves: list[SavedState]) -> list[Failure]:
    """What ended each rank, and what it left behind; ranks that only lost a peer come last."""
    failures = []
    shared = (
        any(s.shares_training_group and s.kind == "async_save" for s in saves) and len(ranks) > 1
    )
    hint = SHARED_GROUP_HINT if shared else ""
    for rank in ranks:
        record = rank.record
        if record is None:
            failures += _judge_missing(rank, timed_out, hint)
            continue
        if record["finished"] and (not rank.ended or rank.exit not in (None, 0, -15)):
            failures += _judge_exit(rank, timed_out, hint)
        if record["error"]:
            failures.append(Failure("raised", record["error"], rank.number, hint))
        for error in record.get("thread_errors", []):
            failures.append(Failure("raised", error, rank.number, hint))
        if not record["finished"] and not record["error"]:
            text = f"sys.exit({record.get('exit', '')}) before the recipe's last line"
            failures.append(Failure("exited_early", text, rank.number))
        for kind, key in (
            ("wrote_elsewhere", "wrote_elsewhere"),
            ("deprecation_warning", "deprecations"),
            ("unordered_access", "conflicts"),
        ):
            if found := record.get(key):
                shown = 3
                more = f"; {len(found) - shown} more" if found[shown:] else ""
                text = "; ".join(found[:shown]) + more
                failures.append(Failure(kind, text, rank.number))
        if record.get("left_process_group"):
            text = "torch.distributed is still initialised at the recipe's end"
            advice = "call dist.destroy_process_group() in a finally block"
            failures.append(Failure("left_process_group", text, rank.number, advice))
    return sorted(failures, key=lambda failure: bool(LOST_PEER.search(failure.text)))


def _judge_missing(rank: Rank, timed_out: bool, hint: str) -> list[Failure]:
    """Why a rank left no record; nothing, if it was ended because another one had failed."""
    if rank.exit is None or rank.exit == -15:
        if not timed_out:
            return []
        where = _innermost(rank.stacks)
        return [Failure("hung", f"still running at the deadline{where}", rank.number, hint)]
    if rank.exit < 0:
        signal = SIGNALS.get(-rank.exit, f"signal {-rank.exit}")
        cause = re.search(r"what\(\):\s*(.*)", rank.output)
        text = f"ended by {signal}" + (f": {cause.group(1)}" if cause else "")
        return [Failure("killed", text, rank.number, hint)]
    return [Failure("missing_record", f"ended with exit code {rank.exit}", rank.number, hint)]


def _judge_exit(rank: Rank, timed_out: bool, hint: str) -> list[Failure]:
    """What kept an interpreter from ending well after the recipe's last line."""
    threads = rank.record.get("threads_at_the_end")
    main = rank.stacks.rpartition("Current thread")[2] or rank.stacks
    if rank.exit in (None, -15) and timed_out and threads and "in _shutdown" in main:
        return [Failure("left_thread", "; ".join(threads[:3]), rank.number)]
    failures = _judge_missing(rank, timed_out, hint)
    for failure in failures:
        failure.text += ", after the recipe's last line"
    return failures


def _innermost(stacks: str) -> str:
    """ " in function (file:line)" of the main thread's innermost frame."""
    main = stacks.rpartition("Current thread")[2] or stacks
    frame = re.search(r'File "([^"]+)", line (\d+) in (\S+)', main)
    return f", in {frame[3]} ({Path(frame[1]).name}:{frame[2]})" if frame else ""
