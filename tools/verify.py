"""Run recipes and proofs on the accelerators that are there, and write down what passed.

    python tools/verify.py [--ranks 1 2 4] [--go-on]    # make verify

The saves run behind queued work, which no CPU can imitate: a copy that is not ordered after the
optimizer step takes the weights of the step before. Recipes run side by side; one that failed
beside others is run once more by itself, and what that run says counts.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import date
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

import harness  # noqa: E402, F401 (puts rankproof on the path)
from benchmarks.code_versions import code_of_today  # noqa: E402
from benchmarks.measuring import machine_label  # noqa: E402
from rankproof.recipe import Recipe, RecipeError, discover  # noqa: E402
from rankproof.run import run  # noqa: E402

WORLD_SIZES = (1, 2, 4)
ON_DEVICE = frozenset({"raised", "checkpoint_wrong"})  # how a missing order shows in real streams
GATE = f"{REPO / 'tests/controls/gates.py'}:queue_work"
CORES_A_RANK = 4  # as many recipes run side by side as there are cores for

_PROBE = (
    "import json, torch\n"
    "kind = torch.accelerator.current_accelerator(check_available=True)\n"
    "count = torch.accelerator.device_count() if kind else 0\n"
    "name = torch.get_device_module(kind).get_device_name() if kind else ''\n"
    "print(json.dumps([name, count, torch.__version__]))"
)


def accelerators() -> tuple[str, int, str]:
    """Name and number of the accelerators, torch's version; asked in a process of its own."""
    answer = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True)
    if answer.returncode != 0:
        raise RecipeError(f"torch does not start:\n{answer.stderr}")
    return tuple(json.loads(answer.stdout.splitlines()[-1]))


def usable_cores() -> int:
    """Cores that this process may run on; all of them where the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def verify_recipe(recipe: Recipe, ranks: int) -> dict:
    """What the record keeps of one run of a recipe: its version, whether it passed, why not."""
    report = run(recipe.path, ranks, launcher="warm", gate=GATE, deadline_s=recipe.deadline_s)
    lines, failures, caught = [report.describe()], report.why_not_ok, []
    for control in recipe.controls:
        if not control.order_on_device:
            continue
        broken = run(recipe.path, ranks, launcher="warm", control=control, gate=GATE)
        if broken.kinds & ON_DEVICE:
            caught.append(control.name)
        else:
            failures.append(f"control '{control.name}' was not caught: {sorted(broken.kinds)}")
        verdict = "caught" if control.name in caught else "NOT caught"
        lines.append(f"  control {control.name}: {verdict} {sorted(broken.kinds)}")
    print("\n".join(lines), flush=True)
    return {
        **code_of_today(),
        "date": date.today().isoformat(),
        "ok": not failures,
        "failures": failures,
        "controls_caught": caught,
        "seconds": round(report.seconds, 1),
    }


def passed_here(kept: dict) -> bool:
    """Whether ``kept``, a recipe's part of a record, says that it passed at this commit."""
    return kept.get("ok", False) and kept["commit"] == code_of_today()["commit"]


def verify_all(recipes: list[Recipe], ranks: int) -> Iterator[tuple[str, dict]]:
    """The name of each recipe and what the record keeps of it, as they are done.

    Of a recipe that failed beside others, that is its run by itself, marked ``alone``, with what
    had failed under ``beside_others``.
    """
    workers = max(1, usable_cores() // (CORES_A_RANK * ranks))
    beside_others = min(workers, len(recipes)) > 1
    to_repeat: list[tuple[Recipe, list[str]]] = []
    with ThreadPoolExecutor(workers) as pool:
        running = {pool.submit(verify_recipe, recipe, ranks): recipe for recipe in recipes}
        for done in as_completed(running):
            recipe, result = running[done], done.result()
            if beside_others and not result["ok"]:
                to_repeat.append((recipe, result["failures"]))
            else:
                yield recipe.name, result
    for recipe, failures in to_repeat:
        print(f"{recipe.name} failed beside others; once more, by itself:", flush=True)
        said = {"alone": True, "beside_others": failures}
        yield recipe.name, verify_recipe(recipe, ranks) | said


def verify(
    recipes: tuple[Path, ...],
    controls: Path,
    out: Path,
    sizes: tuple[int, ...],
    go_on: bool = False,
) -> int:
    """Write ``out/<device>-x<ranks>.json`` for each world size; return the exit status.

    Args:
        go_on: keep what a record of the same device and torch says of recipes that passed at this
            commit, and run the others.

    Raises:
        RecipeError: there is no accelerator.
    """
    device, count, torch_version = accelerators()
    if count == 0:
        raise RecipeError("no accelerator here, so nothing to verify; make test judges on the CPU")
    out.mkdir(parents=True, exist_ok=True)
    status = False
    for ranks in (n for n in sizes if n <= count):
        record = {"device": device, "ranks": ranks, "torch": torch_version, "recipes": {}}
        file = out / f"{machine_label(record)}.json"
        scripts = [script for folder in recipes for script in discover(folder, controls)]
        found = {script.name: script for script in scripts if script.min_ranks <= ranks}
        for name in [name for name, recipe in found.items() if recipe.missing]:
            print(f"left out: {name} needs {', '.join(found.pop(name).missing)}, not installed")
        old = json.loads(file.read_text()) if go_on and file.exists() else {}
        if (old.get("device"), old.get("torch")) == (device, torch_version):
            kept = old["recipes"].items()
            record["recipes"] = {k: v for k, v in kept if k in found and passed_here(v)}
        to_run = [recipe for name, recipe in found.items() if name not in record["recipes"]]
        for name, result in verify_all(to_run, ranks):
            record["recipes"] = dict(sorted((record["recipes"] | {name: result}).items()))
            file.write_text(json.dumps(record, indent=1) + "\n")
        failed = [name for name, result in record["recipes"].items() if not result["ok"]]
        print(f"wrote {file}; failed: {', '.join(failed) or 'none'}", flush=True)
        status |= bool(failed)
    return int(status)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=WORLD_SIZES, help="world sizes")
    parser.add_argument("--go-on", action="store_true", help="not what passed at this commit")
    options = parser.parse_args()
    recipes = REPO / "recipes_source", REPO / "tests" / "proofs"
    places = recipes, REPO / "tests" / "controls", REPO / "harness" / "verified"
    try:
        return verify(*places, tuple(options.ranks), options.go_on)
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
