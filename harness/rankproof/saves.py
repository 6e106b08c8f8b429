"""The saves of a run, as all its ranks saw them, from what each noted."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from rankproof.judge import Rank

INCOMPLETE = ".incomplete"  # the end of the name of a save that is not complete


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


def is_unfinished(directory: str) -> bool:
    return any(part.endswith(INCOMPLETE) for part in Path(directory).parts)


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
    gathered = _Gathered()
    for rank in ranks:
        gathered.read(rank)
    for rank in ranks:
        gathered.follow(rank)
    return list(gathered.saves.values())


class _Gathered:
    def __init__(self) -> None:
        self.saves: dict[tuple[str, int], SavedState] = {}  # by directory and n

    def read(self, rank: Rank) -> None:
        """Take what a rank noted of its saves."""
        own = _NumberedSaves()
        calls: Counter[str] = Counter()  # so far, by directory
        for note in rank.notes:
            if note["event"] == "save":
                calls[note["directory"]] += 1
                save = self.called(note, calls[note["directory"]])
                save.callers.add(rank.number)
                own.add(note, save)
            elif "number" in note:
                _take(note, own.get(note, note["number"]), own, rank.number)

    def called(self, note: dict, nth: int) -> SavedState:
        """The save that a rank calls, as its n-th into that directory."""
        directory = note["directory"]
        new = SavedState(directory, note["kind"], note["unjudged"], called=directory)
        save = self.saves.setdefault((directory, nth), new)
        save.shares_training_group |= note["shares_training_group"]
        return save

    def follow(self, rank: Rank) -> None:
        """Follow the directories that a rank has renamed and removed.

        They concern the saves that it has called before, and those into directories that it never
        saves into.
        """
        directories = {note["directory"] for note in rank.notes if note["event"] == "save"}
        calls: Counter[str] = Counter()  # so far, by directory
        for note in rank.notes:
            if note["event"] == "save":
                calls[note["directory"]] += 1
            if note["event"] not in ("renamed", "removed"):
                continue
            for (directory, nth), save in self.saves.items():
                comes_later = directory in directories and nth > calls[directory]
                if not comes_later and f"{save.directory}/".startswith(f"{note['path']}/"):
                    _move(save, note)


def _take(note: dict, save: SavedState, own: _NumberedSaves, rank: int) -> None:
    """Take what a rank noted of a save."""
    event = note["event"]
    save.events.add("staging awaited" if note.get("phase") == "staging" else event)
    if event == "upload":
        save.beside += [own.get(note, other).directory for other in note["beside"]]
    elif event == "leaves":
        save.leaves.setdefault(rank, {}).update(note["leaves"])
    elif event == "failed":
        save.failures[rank] = note["error"]
    elif event == "not kept":
        save.not_kept = note["why"]
    elif event == "overwritten":
        save.directory = note["copy"]


def _move(save: SavedState, note: dict) -> None:
    save.events.add(note["event"])
    if note["event"] == "renamed":
        save.directory = note["to"] + save.directory.removeprefix(note["path"])


def last_of(saves: list[SavedState]) -> SavedState | None:
    """The save whose values a directory holds: the last one into it that a rank completed."""
    return next((save for save in reversed(saves) if not save.failed), None)
