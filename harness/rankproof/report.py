"""What a run did, as a value, as a text and as JSON."""

import contextlib
import os
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rankproof.judge import Failure

COMMAND = os.environ.get("RANKPROOF_COMMAND", "rankproof")  # how a person calls this
TAIL_LINES = 25
JUDGED = ("saves", "leaves", "streams", "asynchronous collectives", "non-blocking copies")
VERDICTS = {"passed": 0, "failed": 1, "not judged": 2}  # and their exit statuses
ONE_OF = {"leaves": "leaf", "accesses": "access", "non-blocking copies": "non-blocking copy"}
# of others, the plural without its "s"


@dataclass
class Report:
    """What a run did. ``ok`` if every rank proved its claim."""

    recipe: str
    path: str
    ranks: int
    launcher: str
    command: str
    control: str | None = None
    gate: str | None = None
    device: str = ""
    torch: str = ""
    seconds: float = 0.0
    outputs: list[str] = field(default_factory=list)
    stacks: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    checkpoints: list[str] = field(default_factory=list)
    judged: dict[str, int | str] = field(default_factory=dict)
    unjudged: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    conclusive: bool = True  # False: it was not run, or what failed may not be the script's

    @property
    def ok(self) -> bool:
        """Whether every rank ended as it must; of what it saved, a part may be ``unjudged``."""
        return self.conclusive and not self.failures

    def give_up(self, why: str) -> None:
        """Say that nothing is known of the script."""
        self.unjudged = [why]
        self.failures = []
        self.conclusive = False

    @property
    def why_not_ok(self) -> list[str]:
        """What failed, or why nothing is known of it; empty if ``ok``."""
        found = [f"{failure.kind}: {failure.text}" for failure in self.failures]
        if not self.conclusive:
            found += [f"not judged: {reason}" for reason in self.unjudged]
        return found

    @property
    def verdict(self) -> str:
        """A key of VERDICTS; ``not judged`` where something was not, see ``unjudged``."""
        if self.failures:
            return "failed"
        return "not judged" if self.unjudged else "passed"

    @property
    def nothing_to_judge(self) -> bool:
        """Whether the script saved nothing and no order was recorded, however it ended."""
        return not any(self.judged.get(what) for what in JUDGED)

    @property
    def exit_code(self) -> int:
        return VERDICTS[self.verdict]

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of failure that occurred."""
        return frozenset(failure.kind for failure in self.failures)

    @property
    def which_ranks(self) -> str:
        """How many; a script that starts its own is one process here, whatever their number."""
        if self.launcher == "python":
            return "its own ranks"
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}"

    def to_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, table: dict) -> "Report":
        return cls(**table | {"failures": [Failure(**f) for f in table["failures"]]})

    def describe(self) -> str:
        """A text for a person: what failed, the last lines of each rank, how to run it again."""
        shown = self.verdict if self.verdict == "passed" else self.verdict.upper()
        if self.verdict == "passed" and self.nothing_to_judge:
            shown = "ran; nothing to judge"
        lines = [f"{self.recipe} on {self.which_ranks}: {shown}"]
        for failure in self.failures:
            where = "" if failure.rank is None else f" [rank {failure.rank}]"
            lines.append(f"  {failure.kind}{where}: {failure.text}")
            if failure.hint:
                lines.append(f"    {failure.hint}")
        lines += [f"  not judged: {reason}" for reason in self.unjudged]
        if self.ok and self.judged and not self.nothing_to_judge:
            said = [_counted(value, what) for what, value in self.judged.items()]
            lines.append(f"  judged: {', '.join(said)}")
        lines += [f"  note: {note}" for note in self.notes]
        if self.failures:
            lines += self._last_words()
        return "\n".join(lines)

    def _last_words(self) -> list[str]:
        """What each rank wrote last, and how to run it again."""
        lines = []
        for rank, text in enumerate(self.outputs):
            lines += [f"--- rank {rank}, last lines", *text.splitlines()[-TAIL_LINES:]]
        for rank, text in enumerate(self.stacks):
            if text:
                lines.append(f"--- rank {rank}, stacks at the deadline")
                lines += text.splitlines()[-TAIL_LINES:]
        return [*lines, f"run it again: {self.command}"]


def _counted(value: int | str, what: str) -> str:
    """``1 save``, ``2 saves``, ``loaded on 1 rank``."""
    if isinstance(value, str):
        return f"{what} {value}"
    if value == 1:
        what = ONE_OF.get(what, what.removesuffix("s"))
    return f"{value} {what}"


def reproduce(path: Path | str, args: tuple[str, ...], **options: object) -> str:
    """The command that runs the same again.

    ``path`` is a file, or a text that stands there as it is, such as ``-m package.module``. An
    option that is a tuple is given once for each of its values; True needs no value; what is
    empty is left out.
    """
    if isinstance(path, Path):
        with contextlib.suppress(ValueError):
            path = path.relative_to(Path.cwd())
        path = shlex.quote(str(path))
    words = [COMMAND, "run", path]
    for name, value in options.items():
        values = value if isinstance(value, tuple) else (value,)
        for one in values:
            if one is True:
                words.append(f"--{name}")
            elif one:
                words.append(f"--{name} {shlex.quote(str(one))}")
    if args:
        words.append(f"-- {shlex.join(args)}")
    return " ".join(words)
