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
                record=json.loads(record) if (record := text(".json")) else None,
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
            elif note["event"] == "unfinished":
                own[number].unfinished = True
            elif note["event"] == "failed":
                own[number].failed = note["error"]
    for save in saves.values():  # a synchronous save reports to its caller
        save.awaited |= save.kind == "save"
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
    """Every directory that should hold a checkpoint: named by a save, or with a shard in it."""
    shards = {str(p.parent) for p in run_dir.rglob("*.distcp")}
    metadata = {str(p.parent) for p in run_dir.rglob(".metadata")}
    named = {s.directory for s in saves if not (s.failed and s.awaited)}
    last_save = {s.directory: s for s in saves}
    gone = {d for d in named if not Path(d).exists() and last_save[d].removed}
    return sorted((shards | metadata | named) - gone)


def _within(path: str, parent: str) -> bool:
    return path == parent or path.startswith(parent + "/")


def chunks_by_directory(directories: list[str], saves: list[SavedState]) -> dict[str, dict]:
    """What :mod:`rankproof.load_back` is to hash: by directory and leaf, the chunks passed."""
    request: dict[str, dict] = {directory: {} for directory in directories}
    for save in saves:
        for leaves in save.leaves.values():
            for name, leaf in leaves.items():
                if leaf.get("chunk") and save.directory in request:
                    chunks = request[save.directory].setdefault(name, [])
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
        for name, expected in leaves.items():
            loaded = found.get(name)
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
        if record["error"]:
            failures.append(Failure("raised", record["error"], rank.number, hint))
        for error in record.get("thread_errors", []):
            failures.append(Failure("raised", error, rank.number, hint))
        if not record["finished"] and not record["error"]:
            text = f"sys.exit({record.get('exit', '')}) before the recipe's last line"
            failures.append(Failure("exited_early", text, rank.number))
        for kind, key in (
            ("left_thread", "left_threads"),
            ("left_process", "left_processes"),
            ("wrote_elsewhere", "wrote_elsewhere"),
            ("deprecation_warning", "deprecations"),
            ("unordered_access", "conflicts"),
        ):
            if found := record.get(key):
                shown = 1 if kind == "unordered_access" else 3  # a conflict takes two lines
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


def _innermost(stacks: str) -> str:
    """ " in function (file:line)" of the main thread's innermost frame."""
    main = stacks.rpartition("Current thread")[2] or stacks
    frame = re.search(r'File "([^"]+)", line (\d+) in (\S+)', main)
    return f", in {frame[3]} ({Path(frame[1]).name}:{frame[2]})" if frame else ""
