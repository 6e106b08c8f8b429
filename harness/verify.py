"""Run every recipe on the accelerators that are there, and write down which code passed.

Torch and the standard library are enough. The saves run behind queued work
(:func:`harness.gates.queue_work`), which no CPU can imitate: a copy that is not ordered after the
optimizer step takes the weights of the step before. Controls of that order must be caught.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path

from harness.recipe import Recipe, RecipeError, discover
from harness.run import Report, run

WORLD_SIZES = (1, 2, 4)
ON_DEVICE = frozenset({"raised", "checkpoint_wrong"})  # how a missing order shows in real streams
GATE = "queue_work"

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


def _failures(report: Report) -> list[str]:
    return [f"{f.kind}: {f.text}" for f in report.failures]


def verify_recipe(recipe: Recipe, ranks: int, say: Callable[[str], None]) -> dict:
    """What the record keeps of one recipe: its code, whether it passed, what did not."""
    report = run(recipe.path, ranks, launcher="warm", gate=GATE, deadline_s=recipe.deadline_s)
    say(report.describe())
    failures, caught = _failures(report), []
    for control in recipe.controls:
        if not control.order_on_device:
            continue
        broken = run(recipe.path, ranks, launcher="warm", control=control, gate=GATE)
        if broken.kinds & ON_DEVICE:
            caught.append(control.name)
        else:
            failures.append(f"control '{control.name}' was not caught: {sorted(broken.kinds)}")
        verdict = "caught" if control.name in caught else "NOT caught"
        say(f"  control {control.name}: {verdict} {sorted(broken.kinds)}")
    return {
        "code_sha256": recipe.code_sha256,
        "ok": not failures,
        "failures": failures,
        "controls_caught": caught,
        "seconds": round(report.seconds, 1),
    }


def verify(recipes: Path, controls: Path, out: Path, sizes: tuple[int, ...]) -> int:
    """Write ``out/<device>-x<ranks>.json`` for each world size; return the exit status.

    Raises:
        RecipeError: there is no accelerator.
    """
    device, count, torch_version = accelerators()
    if count == 0:
        raise RecipeError("no accelerator here, so nothing to verify; make test judges on the CPU")
    out.mkdir(parents=True, exist_ok=True)
    status = 0
    for ranks in (n for n in sizes if n <= count):
        record = {"device": device, "ranks": ranks, "torch": torch_version}
        record |= {"date": date.today().isoformat(), "recipes": {}}
        file = out / f"{device.split()[-1].lower()}-x{ranks}.json"
        for recipe in discover(recipes, controls):
            if ranks < recipe.min_ranks:
                continue
            result = verify_recipe(recipe, ranks, lambda text: print(text, flush=True))
            record["recipes"][recipe.name] = result
            status |= not result["ok"]
            file.write_text(json.dumps(record, indent=1) + "\n")
        print(f"wrote {file}", flush=True)
    return int(status)
