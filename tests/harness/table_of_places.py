"""The table of verdicts from three places: a home directory, ``/tmp``, and neither of them.

    python tests/harness/table_of_places.py --launchers warm --elsewhere /opt

copies the harness and the scripts of the table to each place, runs the table there by the copy,
and says which lines differ. Places are judged differently where rankproof lays private mounts.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
COPIED = ("harness", "tests/harness", "tests/data/good", "tests/data/bad")
SECONDS = re.compile(r", [\d.]+ s ")


def is_below(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def three_places(elsewhere: Path) -> dict[str, Path]:
    """Where the table runs, by name.

    Raises:
        ValueError: ``elsewhere`` is below the home directory, or below a temporary one.
    """
    for folder in (Path.home(), Path("/tmp"), Path("/var/tmp")):
        if is_below(elsewhere, folder):
            raise ValueError(f"{elsewhere} is below {folder}: name another place by --elsewhere")
    return {"home": Path.home(), "tmp": Path("/tmp"), "elsewhere": elsewhere}


def table_at(place: Path, options: list[str]) -> str:
    """What the table prints when harness and scripts lie in a new folder of ``place``."""
    with tempfile.TemporaryDirectory(dir=place, prefix="rankproof-table-") as folder:
        copy = Path(folder)
        for part in COPIED:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(REPO / part, copy / part, ignore=ignored)
        table = copy / "tests" / "harness" / "test_verdicts.py"
        command = [sys.executable, str(table), *options]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"the table at {place} ended with {done.returncode}: {done.stderr}")
    return done.stdout


def without_seconds(table: str) -> list[str]:
    """The lines of verdicts, without what differs from run to run."""
    lines = []
    for line in table.splitlines():
        if line.startswith(("good", "bad")):
            lines.append(SECONDS.sub(" ", line))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elsewhere", type=Path, default=REPO.parent)
    options, passed_on = parser.parse_known_args()
    tables = {}
    for name, place in three_places(options.elsewhere).items():
        printed = table_at(place, passed_on)
        print(f"== {name}: {place}\n{printed}", flush=True)
        tables[name] = without_seconds(printed)
    first = tables["home"]
    differing = 0
    for name, lines in tables.items():
        for here, there in zip(first, lines, strict=True):
            if here != there:
                differing += 1
                print(f"{name} differs from home:\n  {here}\n  {there}")
    print(f"{len(first)} lines in {len(tables)} places, {differing} differ")
    wrong = [line for lines in tables.values() for line in lines if "1/1 right" not in line]
    return int(bool(differing or wrong))


if __name__ == "__main__":
    sys.exit(main())
