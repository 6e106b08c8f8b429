"""Add rows of ``fsdp_overlap`` that were measured elsewhere to our result files.

    python benchmarks/join_rows.py FOLDER...

Each folder has a ``results/``. Rows of other code than ours are refused.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.fsdp_overlap import RECIPES, VARIED  # noqa: E402
from benchmarks.measuring import Results  # noqa: E402


def join(folder: Path) -> None:
    """Add the rows of ``folder``'s files to ours of the same name.

    Raises:
        AssertionError: a row is of other code than ours.
    """
    for path in sorted((folder / "results").glob("fsdp_overlap.*.json")):
        theirs = json.loads(path.read_text())
        head = {k: v for k, v in theirs.items() if k not in ("rows", "code_sha256", "not_run")}
        ours = Results(ROOT / "benchmarks", head, RECIPES, VARIED)
        assert ours.path.name == path.name, f"{path.name} would become {ours.path.name}"
        for row in theirs["rows"]:
            for recipe, sha in ours.hashes(row["name"]).items():
                assert theirs["code_sha256"][recipe] == sha, f"{recipe} has changed since"
            ours.add(row)
        print(f"{path.name}: {len(theirs['rows'])} rows joined, {len(ours.data['rows'])} in all")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        join(Path(argument))
