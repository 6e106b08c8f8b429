"""Which code a row measured, and whether what it measured costs otherwise since.

A row, a trace and a record of runs have ``version``, that of the package, and ``commit``. An entry
of ``guide/changelog.rst`` after which something costs more or less says so and names the rows::

    * **Changes a cost** (checkpoint_stall: overlapped_writer; save_interval). Two threads write.

That is all rows of ``save_interval``, and one name of ``checkpoint_stall``. A row of an earlier
version than the entry's heading is *outdated*. Torch is not needed.
"""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHANGELOG = Path("guide", "changelog.rst")
BEFORE_VERSIONS = "before 0.2.1"  # rows of a time when they had no version
MARK = "**Changes a cost**"
RECORDS = ("benchmarks/results", "benchmarks/traces", "harness/verified", "guide/versions.json")
WRITTEN = [f":!{path}" for path in RECORDS]  # what a measurement itself changes is no edit
Version = tuple[int, ...]
OLDEST: Version = (-1,)  # of what is before versions
UNKNOWN: Version = (0,)  # of a heading without a version: later than that, earlier than all others


class ChangelogError(ValueError):
    """A marked entry of the changelog cannot be read."""


def code_of_today() -> dict[str, str]:
    """``version`` and ``commit`` of this checkout, for a row; ``+`` after a commit: and edits.

    A copy without ``.git`` is told its commit by ``MEASURED_COMMIT`` in the environment.

    Raises:
        RuntimeError: neither says which commit this is.
    """
    text = (ROOT / "overlap_recipes" / "version.py").read_text(encoding="utf-8")
    version = re.search(r'__version__ = "(.+)"', text)[1]
    return {"version": version, "commit": os.environ.get("MEASURED_COMMIT") or _commit()}


def _commit() -> str:
    edits = ["git", "status", "--porcelain", "--untracked-files=no", "--", ".", *WRITTEN]
    commands = (["git", "rev-parse", "--short=10", "HEAD"], edits)
    answers = []
    for command in commands:
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            message = "no git here says which commit is measured: set MEASURED_COMMIT"
            raise RuntimeError(message) from error
        answers.append(done.stdout.strip())
    commit, edited = answers
    return f"{commit}+" if edited else commit


def code_in_words(of: dict) -> str:
    """``0.2.1 (2d0af2d821)``, or the version alone where no commit is known."""
    commit = of.get("commit")
    return f"{of['version']} ({commit})" if commit else of["version"]


@dataclass(frozen=True)
class CostChange:
    """What a marked entry says: since ``version`` rows of ``benchmark`` cost otherwise."""

    version: Version
    benchmark: str
    names: tuple[str, ...]  # of rows; none: all

    def outdates(self, benchmark: str, row: dict) -> bool:
        if not row.get("ours", False) or benchmark != self.benchmark:
            return False
        if self.names and row["name"] not in self.names:
            return False
        return version_of(row["version"]) < self.version


def version_of(text: str) -> Version:
    """``0.2.1`` as numbers, to be compared."""
    if text == BEFORE_VERSIONS:
        return OLDEST
    return tuple(int(part) for part in text.split("."))


def cost_changes(repo: Path) -> list[CostChange]:
    """What the marked entries of the changelog say.

    Raises:
        ChangelogError: a mark is not followed by the rows that it concerns.
    """
    file = repo / CHANGELOG
    if not file.exists():
        return []
    found = []
    version = UNKNOWN
    lines = file.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        following = lines[number + 1] if number + 1 < len(lines) else ""
        if re.fullmatch("-{4,}", following):  # a heading
            said = re.search(r"\bversion (\d+(\.\d+)+)", line)
            version = version_of(said[1]) if said else UNKNOWN
        if line.startswith("* ") and MARK in line:
            entry = " ".join(part.strip() for part in lines[number : number + 8])
            for benchmark, names in rows_named(entry):
                found.append(CostChange(version, benchmark, names))
    return found


def rows_named(entry: str) -> list[tuple[str, tuple[str, ...]]]:
    """Benchmarks and names of rows in the brackets after the mark; no names: all of them."""
    brackets = re.search(re.escape(MARK) + r" \(([^)]+)\)", entry)
    if brackets is None:
        raise ChangelogError(f"{CHANGELOG}: no rows in brackets after {MARK}: {entry[:60]}")
    found = []
    for item in brackets[1].split(";"):
        benchmark, _, names = item.partition(":")
        found.append((benchmark.strip(), tuple(names.split())))
    return found
