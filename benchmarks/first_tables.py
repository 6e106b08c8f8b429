"""The first tables of measured gains, and which torch the recipes ran on, for the site.

    python -m benchmarks.first_tables   # exit 1 if a file is bad

A first table has rows of one file: one kind of machine. A row whose cost has changed since, or that
was measured in another run than the others, is left out; the page of results still has it. A row
that others are compared with is on the page on method.
"""

import argparse
import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from benchmarks.code_versions import ChangelogError, code_in_words, cost_changes
from benchmarks.result_files import (
    BENCHMARKS,
    REFERENCES,
    SHOWN,
    Result,
    ResultError,
    cell,
    files,
    heading,
    in_words,
    known,
    load,
    load_trace,
    plain,
)

# Of rows over tokens, these alone are shown.
USUAL = {
    "loop": "reads",
    "compiled": False,
    "reduce_dtype": "float32",
    "activation_checkpointing": False,
}


@dataclass(frozen=True)
class FirstTable:
    """A benchmark's figures on one kind of machine."""

    headings: list[str]
    cells: dict[str, list[str]]  # the name of a row, and its figures
    origin: str  # one sentence
    left_out: list[str]  # names of rows that are outdated
    of_other_runs: list[str]  # names of rows that were not measured beside the others


def first_table(name: str, repo: Path) -> FirstTable | None:
    """The table of a benchmark, from the latest file in which a row of ours is not outdated.

    None if there is no such file.
    """
    found = [load(path) for path in files(repo, "results", name)]
    found.sort(key=lambda result: (result.data["date"][:10], len(result.rows)), reverse=True)
    changes = cost_changes(repo)
    for result in found:
        rows = rows_over_tokens(result) if result.benchmark.lines else rows_of_first_case(result)
        rows = [row for row in rows if row["name"] not in REFERENCES]
        apart = [row for row in rows if "run" in row]
        rows = [row for row in rows if "run" not in row]
        today = [row for row in rows if not result.is_outdated(row, changes)]
        if any(row["ours"] for row in today):
            return table_of(result, rows, today, apart)
    return None


def rows_of_first_case(result: Result) -> list[dict]:
    """The rows that have the parameters of the first row."""
    wanted = first_case(result)
    return [row for row in result.rows if wanted == {name: row.get(name) for name in wanted}]


def first_case(result: Result) -> dict:
    return {parameter: result.rows[0].get(parameter) for parameter in result.varied()}


def rows_over_tokens(result: Result) -> list[dict]:
    """The usual rows of stock models; those of the synthetic one where there are no others."""
    field = result.benchmark.first_table
    rows = [row for row in result.rows if known(row, field)]
    stock = [row for row in rows if row.get("model") not in (None, "synthetic")]
    return [row for row in stock or rows if is_usual(row)]


def is_usual(row: dict) -> bool:
    """Whether ``row`` has what is ``USUAL``, or does not say."""
    return all(row.get(parameter, value) == value for parameter, value in USUAL.items())


def table_of(result: Result, rows: list[dict], today: list[dict], apart: list[dict]) -> FirstTable:
    if result.benchmark.lines:
        headings, cells = cells_over_tokens(result, today)
        case = ""
    else:
        headings, cells = cells_by_field(result, today)
        case = ""
        for parameter, value in first_case(result).items():
            if value is not None:
                case += f"; {parameter}: {plain(value)}"
    shown = [row for row in today if row["name"] in cells]
    origin = f"{result.origin(shown)}; {in_words(result.data['workload'])}{case}."
    earlier = [row["name"] for row in rows if row not in today]
    return FirstTable(
        headings=headings,
        cells=cells,
        origin=origin,
        left_out=list(dict.fromkeys(earlier)),
        of_other_runs=list(dict.fromkeys(row["name"] for row in apart)),
    )


def cells_by_field(result: Result, rows: list[dict]) -> tuple[list[str], dict[str, list[str]]]:
    """A column for each field that a row has."""
    asked = result.benchmark.first_table.split()
    fields = [name for name in asked if any(known(row, name) for row in rows)]
    cells = {}
    for row in rows:
        if any(known(row, name) for name in fields):
            cells[row["name"]] = [cell(row, name) for name in fields]
    return [heading(name) for name in fields], cells


def cells_over_tokens(result: Result, rows: list[dict]) -> tuple[list[str], dict[str, list[str]]]:
    """A column for each number of tokens; names that were measured at most of them."""
    tokens = sorted({row["tokens"] for row in rows})
    value = {(row["name"], row["tokens"]): cell(row, result.benchmark.first_table) for row in rows}
    cells = {}
    for row in rows:
        line = [value.get((row["name"], count), "–") for count in tokens]
        measured = len(line) - line.count("–")
        if measured > len(line) / 2:
            cells[row["name"]] = line
    return [f"{count:,}" for count in tokens], cells


def first_tables(repo: Path) -> dict[str, FirstTable]:
    """Each benchmark that has a first table, and the table."""
    found = {}
    for name, benchmark in BENCHMARKS.items():
        if benchmark.first_table:
            table = first_table(name, repo)
            if table is not None:
                found[name] = table
    return found


@dataclass(frozen=True)
class RunOfRecipes:
    """What ran on one machine and one version of torch."""

    where: str
    torch: str
    passed: int
    recipes: int
    failed: list[str]
    date: str
    codes: list[str]  # versions, and how many recipes ran in each


def runs_of_recipes(repo: Path) -> list[RunOfRecipes]:
    """From the records of ``make verify`` on accelerators, then of ``tests/versions.py``."""
    runs = []
    for path in sorted((repo / "harness" / "verified").glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        where = f"{record['ranks']} × {record['device']}"
        runs.append(run_of(where, record["torch"], record["recipes"]))
    path = repo / "guide" / "versions.json"
    if path.exists():
        for torch, record in json.loads(path.read_text(encoding="utf-8")).items():
            where = f"CPU, {record['ranks']} ranks"
            runs.append(run_of(where, torch, record["recipes"]))
    return runs


def run_of(where: str, torch: str, recipes: dict[str, dict]) -> RunOfRecipes:
    failed = [name for name, result in recipes.items() if not result["ok"]]
    of_code = Counter(code_in_words(result) for result in recipes.values())
    return RunOfRecipes(
        where=where,
        torch=torch,
        passed=len(recipes) - len(failed),
        recipes=len(recipes),
        failed=failed,
        date=max(result["date"] for result in recipes.values()),
        codes=[f"{count} of {code}" for code, count in of_code.most_common()],
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repo", type=Path, default=Path.cwd(), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        for path in (options.repo / "benchmarks" / "results").glob("*.json"):
            load(path)
        for path in (options.repo / "benchmarks" / "traces").glob("*.json"):
            load_trace(path)
        check_changes(options.repo)
    except (ResultError, ChangelogError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def check_changes(repo: Path) -> None:
    """That each benchmark and row that the changelog names as changed in its cost is known.

    Raises:
        ChangelogError: one is not.
    """
    names = set(SHOWN["row_order"].split())
    for path in (repo / "benchmarks" / "results").glob("*.json"):
        names.update(row["name"] for row in load(path).rows)
    for path in (repo / "benchmarks" / "traces").glob("*.json"):
        names.add(path.name.split(".")[1])  # its mode
    for change in cost_changes(repo):
        for name in change.names:
            if name not in names:
                raise ChangelogError(f"a change of a cost names no row: {name}")
        if change.benchmark not in BENCHMARKS:
            raise ChangelogError(f"a change of a cost names no benchmark: {change.benchmark}")


if __name__ == "__main__":
    sys.exit(main())
