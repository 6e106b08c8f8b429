"""Run every reproducer of this folder on the torch that is here; add what came to the record.

    python tests/upstream/record.py    # in any environment; torch alone is enough

A reproducer is a script that prints ``holds`` or ``fixed``, of at most 20 lines of code; of at most
30 in ``two_ranks``, where it starts two ranks by itself. The page guide/defects is drawn from
``guide/defects.json``, which this writes: never in CI, a version at a time.
``tests/test_upstream.py`` runs them, too, and compares.
"""

import json
import subprocess
import sys
from datetime import date
from pathlib import Path

HERE = Path(__file__).resolve().parent
RECORD = HERE.parents[1] / "guide" / "defects.json"


def scripts() -> list[Path]:
    """The reproducers, in the order of the page."""
    one_rank = [path for path in sorted(HERE.glob("*.py")) if path.name != "record.py"]
    return one_rank + sorted(HERE.glob("two_ranks/*.py"))


def outcome(script: Path) -> str:
    """``holds``, ``fixed``, or the last line of an error."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", script], capture_output=True, text=True, timeout=120
    )
    lines = (run.stdout if run.returncode == 0 else run.stderr).strip().splitlines()
    return lines[-1] if lines else f"exit code {run.returncode}"


def main() -> None:
    import torch

    version = torch.__version__.partition("+")[0]
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    found = {}
    for script in scripts():
        found[script.stem] = outcome(script)
        print(f"{version}  {script.stem:40} {found[script.stem]}", flush=True)
    record[version] = {"date": date.today().isoformat(), "platform": "CPU", "found": found}
    in_order = dict(sorted(record.items(), key=lambda item: [*map(int, item[0].split("."))]))
    RECORD.write_text(json.dumps(in_order, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
