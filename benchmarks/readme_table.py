"""Write the README's tables: measured gains, and which torch the recipes ran on.

    python -m benchmarks.readme_table           # write them
    python -m benchmarks.readme_table --check   # exit 1 if they differ; list results out of date

Each stands between two markers and is never edited by hand. Where the code of a recipe has changed
since, it says so.
"""

import argparse
import json
import sys
from itertools import chain
from pathlib import Path

from benchmarks.result_files import (
    BENCHMARKS,
    Result,
    ResultError,
    cell,
    changed_recipes,
    files,
    heading,
    in_words,
    known,
    load,
    plain,
    stale_results,
)

COMMAND = "make readme"
NO_RESULTS = "No results yet: nothing has been measured on a GPU."
USUAL = {"loop": "reads", "compiled": False, "reduce_dtype": "float32"}
USUAL |= {"activation_checkpointing": False}  # of rows over tokens, these alone are shown


def results(repo: Path) -> str:
    """For each benchmark a result file: its first case of today's code, or of the latest day."""
    sections = []

    def preferred(result: Result) -> tuple[bool, str, int]:
        if result.benchmark.lines:
            return False, "", len(result.rows)
        today = not any(changed(row, result, repo) for row in first_case(result)[1])
        return today, result.data["date"][:10], len(result.rows)

    for name, benchmark in BENCHMARKS.items():
        found = [load(path) for path in files(repo, "results", name)]
        if benchmark.readme and found:
            show = over_tokens if benchmark.lines else first_workload
            sections.append(show(max(found, key=preferred), repo))
    return "\n\n".join(sections) or NO_RESULTS


def first_case(result: Result) -> tuple[dict, list[dict]]:
    """The parameters of the first row, and the rows that have them."""
    first = {parameter: result.rows[0].get(parameter) for parameter in result.varied()}
    return first, [row for row in result.rows if all(row.get(p) == v for p, v in first.items())]


def first_workload(result: Result, repo: Path) -> str:
    """A row for each row of the first case, a column for each field."""
    first, rows = first_case(result)
    asked = result.benchmark.readme.split()
    fields = [name for name in asked if any(known(row, name) for row in rows)]
    rows = [row for row in rows if any(known(row, name) for name in fields)]
    cells = {row["name"]: [cell(row, name) for name in fields] for row in rows}
    case = "".join(f"; {p}: {plain(value)}" for p, value in first.items() if value is not None)
    return section(result.benchmark.title, map(heading, fields), cells, result, rows, repo, case)


def over_tokens(result: Result, repo: Path) -> str:
    """A row for each name that was measured at most numbers of tokens, a column for each number.

    Rows of the synthetic model are left out where there are rows of a stock one, and of those all
    that differ from ``USUAL``.
    """
    field = result.benchmark.readme
    rows = [row for row in result.rows if known(row, field)]
    rows = [row for row in rows if row.get("model") not in (None, "synthetic")] or rows
    rows = [row for row in rows if all(row.get(p, value) == value for p, value in USUAL.items())]
    tokens = sorted({row["tokens"] for row in rows})
    value = {(row["name"], row["tokens"]): cell(row, field) for row in rows}
    earlier = [row for row in rows if changed(row, result, repo)]
    of_today = {row["name"] for row in rows if row not in earlier}
    for row in earlier:
        value[row["name"], row["tokens"]] += " †" * (row["name"] in of_today)
    cells = {}
    for row in rows:
        line = [value.get((row["name"], count), "–") for count in tokens]
        if 2 * line.count("–") < len(line):
            cells[row["name"]] = line
    rows = [row for row in rows if row["name"] in cells]
    what = heading(field)
    title = f"{result.benchmark.title}: {what[0].lower()}{what[1:]}, by tokens a step"
    return section(title, (f"{count:,}" for count in tokens), cells, result, rows, repo)


def changed(row: dict, result: Result, repo: Path) -> list[str]:
    """The recipes of a row whose code is another one now."""
    return changed_recipes(result.measured([row]), repo)


def section(
    title: str, headings, cells: dict, result: Result, rows: list, repo: Path, case: str = ""
) -> str:
    """A table in Markdown, then what it was measured on; a dagger marks figures of earlier code."""
    earlier = {row["name"]: changed(row, result, repo) for row in rows}
    lines = {
        f"`{name}`" + " †" * (bool(earlier[name]) and "†" not in "".join(line)): line
        for name, line in cells.items()
    }
    table = markdown(headings, lines)
    found = chain.from_iterable(changed(row, result, repo) for row in rows)
    recipes = ", ".join(f"`{name}`" for name in sorted({*found}))
    note = f"† Measured on an earlier version of {recipes}: the code has changed since.\n\n"
    origin = f"{result.origin(rows)}; {in_words(result.data['workload'])}{case}."
    return f"**{title}**\n\n{table}\n\n{note if recipes else ''}Measured on {origin}"


def markdown(headings, cells: dict[str, list[str]]) -> str:
    headings = list(headings)
    lines = ["| | " + " | ".join(headings) + " |", "|---|" + "---:|" * len(headings)]
    lines += [f"| {name} | {' | '.join(line)} |" for name, line in cells.items()]
    return "\n".join(lines)


def versions(repo: Path) -> str:
    """A row for each version of torch and each device that the recipes ran on, from the records."""
    runs = []
    for path in sorted((repo / "harness" / "verified").glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        runs.append((f"{record['ranks']} × {record['device']}", record["torch"], record))
    path = repo / "guide" / "versions.json"
    if path.exists():
        for torch, record in json.loads(path.read_text(encoding="utf-8")).items():
            runs.append((f"CPU, {record['ranks']} ranks", torch, record))
    lines = ["| where | torch | recipes that passed | failed | run |", "|---|---|---:|---|---|"]
    for where, torch, record in runs:
        recipes = record["recipes"]
        failed = [f"`{name}`" for name, result in recipes.items() if not result["ok"]]
        then = [(name, result["code_sha256"]) for name, result in recipes.items()]
        earlier = changed_recipes(then, repo)
        when = max(result["date"] for result in recipes.values())
        when += f", {len(earlier)} of them in an earlier version" if earlier else ""
        passed = f"{len(recipes) - len(failed)} of {len(recipes)}"
        lines.append(f"| {where} | {torch} | {passed} | {', '.join(failed) or '–'} | {when} |")
    return "\n".join(lines)


TABLES = {"results": results, "versions": versions}


def with_tables(readme: str, repo: Path) -> str:
    """``readme`` with the present tables between their markers.

    Raises:
        ResultError: the markers of a table are not there exactly once, in order.
    """
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, _, rest = readme.partition(begin)
        _, _, after = rest.partition(end)
        if readme.count(begin) != 1 or readme.count(end) != 1 or end not in rest:
            raise ResultError(f"README.md needs the lines {begin} and {end}, once, in this order")
        readme = f"{before}{begin}\n{table(repo)}\n{end}{after}"
    return readme


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 if it differs")
    parser.add_argument("--repo", type=Path, default=Path.cwd(), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    readme = options.repo / "README.md"
    try:
        present = readme.read_text(encoding="utf-8")
        wanted = with_tables(present, options.repo)
        stale = stale_results(options.repo)
    except (ResultError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for line in stale:
        print(f"stale: {line}")
    if not options.check:
        readme.write_text(wanted, encoding="utf-8")
    elif present != wanted:
        print(f"README.md: its tables are not what results and recipes say; run: {COMMAND}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
