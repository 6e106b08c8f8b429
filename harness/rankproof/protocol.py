"""What the processes of a run tell each other, and in which files of its directory.

A caller writes ``spec.json``. Each rank leaves files in ``ranks``: ``rank0.pid`` and ``.began``
when its script begins, ``.out`` and ``.stacks``, ``.notes`` of its saves, its record as ``.ended``
when the script has ended and as ``.json`` when the process has, and its wait status as ``.exit``.
The leader writes ``outcome.json`` when nothing is left.

Nothing here needs torch: the server imports it before it imports that.
"""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

SPEC = "spec.json"
OUTCOME = "outcome.json"
RANKS = "ranks"
INTERRUPTED = "interrupted"  # beside a spec: its caller lives, and removes the run itself


@dataclass
class Edited:
    """A module that a control has edited: its dotted name, and the file to be imported."""

    name: str
    file: str


@dataclass
class Spec:
    """What is to run, and how."""

    run_dir: str
    file: str
    ranks: int
    env: dict[str, str]
    deadline_s: float
    callers_dir: str = ""  # to be removed with the caller; the run's own where empty
    cwd: str = ""  # the run's "work" where empty
    launcher: str = "warm"
    processes: int = 0  # that leave a record; as many as there are ranks where 0
    args: list[str] = field(default_factory=list)
    module: str = ""  # the file's dotted name, where it runs as ``python -m`` runs it
    import_from: list[str] = field(default_factory=list)
    pythonpath: list[str] = field(default_factory=list)
    harness: str = ""  # what to take off the path, so that the script sees no harness
    own_folders: list[str] = field(default_factory=list)  # whose deprecations are the script's
    through: list[str] = field(default_factory=list)  # what it may write besides, and keeps
    edited: Edited | None = None
    gate: str | None = None
    order: bool = False

    def __post_init__(self) -> None:
        self.callers_dir = self.callers_dir or self.run_dir
        self.cwd = self.cwd or str(Path(self.run_dir) / "work")
        self.processes = self.processes or self.ranks

    @property
    def path(self) -> Path:
        return Path(self.run_dir) / SPEC

    @property
    def ranks_dir(self) -> Path:
        return Path(self.run_dir) / RANKS

    def write(self) -> None:
        self.path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path | str) -> "Spec":
        table = json.loads(Path(path).read_text())
        if table["edited"] is not None:
            table["edited"] = Edited(**table["edited"])
        return cls(**table)


@dataclass
class OrderRecord:
    """What ``--order`` saw on a rank."""

    conflicts: list[str]
    used_before_wait: list[str]
    async_collectives: int
    copies: int  # that nobody waited for, between the host and a device
    streams: int
    accesses: int


@dataclass
class Record:
    """What a rank says of itself. One that was cut short has the defaults."""

    torch: str = ""
    device: str = ""
    backend: str | None = None
    finished: bool = False  # the script's last line was reached, or the rank left as it may
    seconds: float = 0.0
    error: str | None = None
    exit: str | None = None  # what it passed to sys.exit
    left_early: str = ""  # how it ended before the last line, having left its process group
    misfit: str = ""
    thread_errors: list[str] = field(default_factory=list)
    threads_at_the_end: list[str] = field(default_factory=list)
    deprecations: list[str] = field(default_factory=list)
    dead_children: list[str] = field(default_factory=list)
    wrote_elsewhere: list[str] = field(default_factory=list)
    left_process_group: bool = False
    order: OrderRecord | None = None

    def write(self, file: Path) -> None:
        """At once: others look at any time."""
        part = file.with_suffix(".tmp")
        part.write_text(json.dumps(asdict(self)))
        part.rename(file)

    @classmethod
    def read(cls, text: str) -> "Record":
        table = json.loads(text)
        if table["order"] is not None:
            table["order"] = OrderRecord(**table["order"])
        return cls(**table)


@dataclass
class Outcome:
    """What the leader saw of a run."""

    timed_out: bool
    left_processes: list[str]
    private: list[str]  # places where what was written lay aside
    written: list[str]  # what was left there; ``-path`` is what was removed

    def write(self, run_dir: Path) -> None:
        (run_dir / OUTCOME).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, run_dir: Path) -> "Outcome | None":
        """None if the leader ended before it knew."""
        file = run_dir / OUTCOME
        return cls(**json.loads(file.read_text())) if file.exists() else None


def own_number() -> int:
    """The number of the rank that this process is."""
    return int(os.environ.get("RANK", 0))
