"""Result files of the trials, for the pages: ``python -m faults.results WHAT FILE ...``.

``soak FILE``: what ``faults.soak --resume FILE`` has written, by kind and point of a fault.
``save_faults FILE ...``: the same of several ways of saving, a row each; rows of other ways, of the
same seed, stay as they are.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

import torch

from benchmarks.code_versions import code_of_today
from benchmarks.measuring import header, machine_label
from faults import REPO


def write(benchmark: str, ranks: int, rows: list[dict], workload: dict) -> None:
    """Write ``benchmarks/results/<benchmark>.<device>-x<ranks>.json``."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    head = header(benchmark, device, workload, {}) | {"ranks": ranks}
    head["driver"] = head["driver"] or "none"
    rows = [{"name": row["name"], **code_of_today()} | row for row in rows]
    file = REPO / "benchmarks" / "results" / f"{benchmark}.{machine_label(head)}.json"
    if benchmark == "save_faults" and file.exists():
        before, measured = json.loads(file.read_text()), {row["name"] for row in rows}
        if before["workload"] == workload:  # the same trials of other ways
            rows += [row for row in before["rows"] if row["name"] not in measured]
        absent = before.get("not_run", {}).items()
        head["not_run"] = {way: why for way, why in absent if way not in measured}
    file.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")
    print(f"wrote {file.name}")


def read(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def soak(results: list[dict]) -> list[dict]:
    """A row a kind and point."""
    groups = defaultdict(list)
    for result in results:
        groups[result["kind"], result["point"]].append(result)
    rows = []
    for (kind, point), group in sorted(groups.items()):
        row = {"name": kind, "point": point, "trials": len(group), "samples": {}}
        row |= {"lost": sum(bool(result["wrong"]) for result in group), "ours": True}
        row |= {what: sum(bool(result[what]) for result in group) for what in ("hung", "left")}
        rows.append(row | {"longest_s": max(result["seconds"] for result in group)})
    return rows


def save_faults(results: list[dict]) -> list[dict]:
    """A row a way of saving."""
    groups = defaultdict(list)
    for result in results:
        groups[result["way"]].append(result)
    rows = []
    for way, group in groups.items():
        row = {"name": way, "trials": len(group), "samples": {}}
        for outcome in ("lost", "mixed", "cannot resume"):
            row[outcome.replace(" ", "_")] = sum(r["outcome"] == outcome for r in group)
        row["hung"] = sum(bool(result["hung"]) for result in group)
        row["training_ended"] = sum(not result["goes_on"] for result in group)
        rows.append(row | {"ours": way == "retention"})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("benchmark", choices=("soak", "save_faults"))
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args()
    results = [result for file in options.files for result in read(file)]
    seeds = sorted({result["seed"] for result in results})
    if options.benchmark == "save_faults":  # the same trials of all, as far as each comes to them
        common = min(max(r["trial"] for r in read(file)) for file in options.files)
        results = [result for result in results if result["trial"] <= common]
    rows = globals()[options.benchmark](results)
    workload = {"seed": ", ".join(map(str, seeds)), "steps": 10, "saves": 5}
    write(options.benchmark, 2, rows, workload)


if __name__ == "__main__":
    main()
