"""Write the README's table of measured gains from the result files.

    python -m benchmarks.readme_table           # write it
    python -m benchmarks.readme_table --check   # exit 1 if it differs; list results out of date

The table stands between two markers and is never edited by hand. Where the code of a recipe has
changed since, it says so.
"""

import argparse
import sys
from itertools import chain
from pathlib import Path

from benchmarks.result_files import (
    BENCHMARKS,
    Column,
    Result,
    ResultError,
    changed_recipes,
    files,
    in_words,
    load,
    shown,
    stale_results,
)

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
COMMAND = "make readme"
NO_RESULTS = "No results yet: nothing has been measured on a GPU."


def table(repo: Path) -> str:
    """Markdown: for each benchmark the result file with the most ranks, its first workload."""
    sections = [
        _section(load(found[-1]), repo)
        for name, benchmark in BENCHMARKS.items()
        if benchmark.readme and (found := files(repo, "results", name))
    ]
    return "\n\n".join(sections) or NO_RESULTS


def _names(result: Result, rows: list[dict], repo: Path) -> tuple[dict[str, str], list[str]]:
    """How a row of each name begins, and what stands below the table of ``rows``.

    A dagger marks rows whose recipes' code is not what was measured.
    """
    changed = {row["name"]: changed_recipes(result.hashes_of([row]), repo) for row in rows}
    cells = {name: f"| `{name}`{' †' if earlier else ''} | " for name, earlier in changed.items()}
    recipes = ", ".join(f"`{name}`" for name in sorted({*chain.from_iterable(changed.values())}))
    note = ["", f"† Measured on an earlier version of {recipes}: the code has changed since."]
    return cells, note if recipes else []


def _section(result: Result, repo: Path) -> str:
    benchmark = BENCHMARKS[result.data["benchmark"]]
    if benchmark.lines:
        return _over_tokens(result, benchmark.column(benchmark.readme[0]), repo)
    varied = result.varied()
    first = {parameter: result.rows[0].get(parameter) for parameter in varied}
    rows = [row for row in result.rows if all(row.get(p) == v for p, v in first.items())]
    columns = [
        column for column in map(benchmark.column, benchmark.readme) if any(map(column.known, rows))
    ]
    rows = [row for row in rows if any(column.known(row) for column in columns)]
    names, note = _names(result, rows, repo)
    case = "".join(f"; {p}: {shown(value)}" for p, value in first.items() if value is not None)
    lines = [
        f"**{benchmark.title}**: {result.origin(rows)}; {in_words(result.data['workload'])}{case}.",
        "",
        "| | " + " | ".join(column.heading for column in columns) + " |",
        "|---|" + "---:|" * len(columns),
    ]
    lines += [
        names[row["name"]] + " | ".join(column.cell(row) for column in columns) + " |"
        for row in rows
    ]
    return "\n".join(lines + note)


def _over_tokens(result: Result, column: Column, repo: Path) -> str:
    """A row for each name that was measured at most numbers of tokens, a column for each number.

    Rows of the synthetic model are left out where there are rows of a stock one, and of those all
    but eager ones of a loop that reads, reduced in float32.
    """
    known = [row for row in result.rows if column.known(row)]
    rows = [row for row in known if row.get("model") not in (None, "synthetic")] or known
    usual = {"loop": "reads", "compiled": False, "reduce_dtype": "float32"}
    usual |= {"activation_checkpointing": False}
    rows = [row for row in rows if all(row.get(p, value) == value for p, value in usual.items())]
    tokens = sorted({row["tokens"] for row in rows})
    cells = {(row["name"], row["tokens"]): column.cell(row) for row in rows}
    often = {n for n, _ in cells if 2 * sum((n, count) in cells for count in tokens) > len(tokens)}
    everywhere = [row for row in rows if row["name"] in often]
    title = f"{BENCHMARKS[result.data['benchmark']].title}: {column.heading[0].lower()}"
    lines = [
        f"**{title}{column.heading[1:]}, by tokens a step**: {result.origin(everywhere)}; "
        f"{in_words(result.data['workload'])}.",
        "",
        "| | " + " | ".join(f"{count:,}" for count in tokens) + " |",
        "|---|" + "---:|" * len(tokens),
    ]
    names, note = _names(result, everywhere, repo)
    for name, begin in names.items():
        lines.append(begin + " | ".join(cells.get((name, count), "–") for count in tokens) + " |")
    return "\n".join(lines + note)


def with_table(readme: str, repo: Path) -> str:
    """``readme`` with the present table between its markers.

    Raises:
        ResultError: the markers are not there exactly once, in order.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise ResultError(f"README.md needs the lines {BEGIN} and {END}, once, in this order")
    return f"{before}{BEGIN}\n{table(repo)}\n{END}{after}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 if it differs")
    parser.add_argument("--repo", type=Path, default=Path.cwd(), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    readme = options.repo / "README.md"
    try:
        present = readme.read_text(encoding="utf-8")
        wanted = with_table(present, options.repo)
        stale = stale_results(options.repo)
    except (ResultError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for line in stale:
        print(f"stale: {line}")
    if not options.check:
        readme.write_text(wanted, encoding="utf-8")
    elif present != wanted:
        print(f"README.md: its table is not what results and recipes say; run: {COMMAND}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
