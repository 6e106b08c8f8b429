"""Run every reproducer of this folder on the torch that is here; add what came to the record.

    python tests/upstream/record.py    # in any environment; torch alone is enough

A reproducer is a script of at most 20 lines of code that prints ``holds`` or ``fixed``. The page
guide/defects is drawn from ``guide/defects.json``, which this writes: never in CI, a version at a
time.
"""

import json
import subprocess
import sys
from datetime import date
from pathlib import Path

HERE = Path(__file__).resolve().parent
RECORD = HERE.parents[1] / "guide" / "defects.json"


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
    for script in sorted(HERE.glob("*.py")):
        if script != Path(__file__).resolve():
            found[script.stem] = outcome(script)
            print(f"{version}  {script.stem:40} {found[script.stem]}", flush=True)
    record[version] = {"date": date.today().isoformat(), "platform": "CPU", "found": found}
    in_order = dict(sorted(record.items(), key=lambda item: [*map(int, item[0].split("."))]))
    RECORD.write_text(json.dumps(in_order, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
