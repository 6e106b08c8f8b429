"""Run every recipe on two ranks with the torch that is here; add what came to the record.

    python tools/versions.py [--go-on] [--launcher torchrun]    # torch alone is enough for most

README's table "What was run where" is drawn from ``guide/versions.json``, which this writes: a
version at a time, on a CPU, never in CI. A recipe that failed beside other work of the machine is
run once more, and what that run says counts. A recipe whose package is not here keeps its record.
"""

import argparse
import json
import platform
import re
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import harness  # noqa: E402, F401 (puts rankproof on the path)
from benchmarks.code_versions import code_of_today  # noqa: E402
from rankproof.recipe import Recipe, discover  # noqa: E402
from rankproof.run import run  # noqa: E402

RECORD = ROOT / "guide" / "versions.json"
RANKS = 2
PATIENCE = 3  # deadlines are for a machine that does nothing else


def judged(recipe: Recipe, launcher: str) -> dict:
    """What the record keeps of a recipe: its version, whether it passed, what did not."""
    reports = []
    while len(reports) < 2 and not (reports and reports[-1].ok):
        deadline_s = recipe.deadline_s * PATIENCE
        reports.append(run(recipe.path, RANKS, launcher=launcher, deadline_s=deadline_s))
        print(reports[-1].describe(), flush=True)
    report = reports[-1]
    return {
        **code_of_today(),
        "date": date.today().isoformat(),
        "ok": report.ok,
        "runs": len(reports),
        "failures": [without_paths(reason) for reason in report.why_not_ok],
    }


def every_script() -> list[Recipe]:
    """The recipes, and the proofs of modules without a page."""
    controls = ROOT / "tests" / "controls"
    recipes = discover(ROOT / "recipes_source", controls)
    return [*recipes, *discover(ROOT / "tests" / "proofs", controls)]


def without_paths(text: str) -> str:
    """``text`` without where this machine keeps its packages."""
    return re.sub(r"/\S*/site-packages/", "", text)


def passed_here(kept: dict) -> bool:
    return kept.get("ok", False) and kept["commit"] == code_of_today()["commit"]


def main() -> int:
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--go-on", action="store_true", help="not what passed at this commit")
    parser.add_argument("--launcher", choices=("warm", "torchrun"), default="warm")
    options = parser.parse_args()
    version = torch.__version__.partition("+")[0]
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    found = {r.name: r for r in every_script()}
    old = record.get(version, {}).get("recipes", {})
    kept = {name: result for name, result in old.items() if name in found and found[name].missing}
    if options.go_on:
        kept |= {name: old[name] for name in old.keys() & found if passed_here(old[name])}
    missing = {name: list(recipe.missing) for name, recipe in found.items() if recipe.missing}
    left_out = {name: packages for name, packages in missing.items() if name not in kept}
    entry = {"python": platform.python_version(), "ranks": RANKS, "left_out": left_out}
    for name, recipe in found.items():
        if recipe.missing:
            continue
        if name not in kept:
            kept[name] = judged(recipe, options.launcher)
        record[version] = entry | {"recipes": dict(sorted(kept.items()))}
        in_order = dict(sorted(record.items(), key=lambda item: [*map(int, item[0].split("."))]))
        RECORD.write_text(json.dumps(in_order, indent=1) + "\n", encoding="utf-8")
    failed = [name for name, result in kept.items() if not result["ok"]]
    print(f"torch {version}: {len(kept)} recipes; failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
