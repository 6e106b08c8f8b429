"""Add rows of ``fsdp_overlap`` that were measured elsewhere to our result files.

    python benchmarks/join_rows.py FOLDER...

Each folder has a ``results/``. Of two rows with one key that of more pairs is added, or the first;
what it does not measure stays as it was known, and the row is then of the older version.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.fsdp_overlap import VARIED  # noqa: E402


def join(folder: Path, joined: dict, repo: Path = ROOT) -> None:
    """``joined``: pairs of the rows that this command has added, by key."""
    for path in sorted((folder / "results").glob("fsdp_overlap.*.json")):
        ours_path = repo / "benchmarks" / "results" / path.name
        theirs = json.loads(path.read_text())
        ours = json.loads(ours_path.read_text()) if ours_path.exists() else theirs | {"rows": []}
        rows = {key(row): row for row in ours["rows"]}
        for row in theirs["rows"]:
            here, old = (path.name, key(row)), rows.get(key(row), {})
            fewer = "pairs" in row and row["pairs"] <= joined.get(here, -1)
            if here not in joined or not fewer:
                # what it does not measure, memory or bits, is another task's
                old = {k: v for k, v in old.items() if k != "beside"}
                new = old | row
                new["samples"] = old.get("samples", {}) | row.get("samples", {})
                if old.keys() - row.keys():
                    new |= {"version": old["version"], "commit": old["commit"]}
                rows[key(row)] = new
                joined[here] = row.get("pairs", joined.get(here, -1))
        ours |= {"rows": list(rows.values()), "date": theirs["date"]}
        ours_path.write_text(json.dumps(ours, indent=1) + "\n")
        print(f"{path.name}: {len(theirs['rows'])} rows read, {len(rows)} in all")


def key(row: dict) -> tuple:
    return (row["name"], *(row.get(field) for field in VARIED))


if __name__ == "__main__":
    found: dict = {}
    for argument in sys.argv[1:]:
        join(Path(argument), found)
