"""The first tables of measured gains, and which torch the recipes ran on, for the site.

    python -m benchmarks.first_tables           # exit 1 if a file is bad, or README's figures
    python -m benchmarks.first_tables --write   # write README's figures

A first table has rows of one file: one kind of machine. It leaves out a row whose cost has changed
since, which the page of results still has, and no peer. What others are compared with is on the
page on method.
"""

import argparse
import json
import sys
import textwrap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from benchmarks.code_versions import ChangelogError, code_in_words, cost_changes
from benchmarks.fair import (
    Column,
    beats,
    columns,
    headline,
    how,
    interval,
    is_peer,
    same_case,
)
from benchmarks.result_files import (
    API_NAMES,
    BENCHMARKS,
    PEERS,
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
    written,
)

# Of rows over tokens, these alone are shown.
USUAL = {
    "loop": "reads",
    "compiled": False,
    "reduce_dtype": "float32",
    "activation_checkpointing": False,
}


@dataclass(frozen=True)
class Cell:
    text: str
    is_best: bool = False  # of its column


@dataclass(frozen=True)
class FirstTable:
    """A benchmark's figures on one kind of machine."""

    headings: list[str]
    cells: dict[str, list[Cell]]  # the name of a row, and its figures
    rows: dict[str, dict]  # by name: one row of it, which says how it trains
    origin: str  # one sentence
    behind: list[str]  # where a peer is ahead of a row of ours
    elsewhere: list[str]  # what ours costs with other models on that machine
    left_out: list[str]  # names of rows that are outdated


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
        today = [row for row in rows if not result.is_outdated(row, changes)]
        if any(row["ours"] for row in today):
            return table_of(result, rows, today)
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


def table_of(result: Result, rows: list[dict], today: list[dict]) -> FirstTable:
    case = ""
    if result.benchmark.lines:
        headings, cells = cells_over_tokens(result, today)
    else:
        headings, cells = cells_by_field(result, today)
        for parameter, value in first_case(result).items():
            if value is not None:
                case += f"; {parameter}: {plain(value)}"
    shown = [row for row in today if row["name"] in cells]
    origin = f"{result.origin(shown)}; {in_words(result.data['workload'])}{case}."
    earlier = [row["name"] for row in rows if row not in today]
    return FirstTable(
        headings=headings,
        cells=cells,
        rows={row["name"]: row for row in shown},
        origin=origin,
        behind=where_behind(result, today),
        elsewhere=other_models(result, today),
        left_out=list(dict.fromkeys(earlier)),
    )


def cells_by_field(result: Result, rows: list[dict]) -> tuple[list[str], dict[str, list[Cell]]]:
    """A column for each field that a row has; what is below the noise says so."""
    asked = result.benchmark.first_table.split()
    fields = [name for name in asked if any(known(row, name) for row in rows)]
    cells = {}
    for row in rows:
        if any(known(row, name) for name in fields):
            cells[row["name"]] = [Cell(headline(row, name, result.rows)) for name in fields]
    return [heading(name) for name in fields], cells


def cells_over_tokens(result: Result, rows: list[dict]) -> tuple[list[str], dict[str, list[Cell]]]:
    """A column for each number of tokens."""
    field = result.benchmark.first_table
    counts = sorted({row["tokens"] for row in rows})
    by_place = {(row["name"], row["tokens"]): row for row in rows}
    cells = {}
    for row in rows:
        line = []
        for count in counts:
            here = by_place.get((row["name"], count))
            column = [other for other in rows if other["tokens"] == count]
            if here is None:
                line.append(Cell("–"))
            else:
                is_best = not any(beats(other, here, field) for other in column)
                line.append(Cell(cell(here, field), is_best))
        cells[row["name"]] = line
    return [f"{count:,}" for count in counts], cells


def where_behind(result: Result, rows: list[dict]) -> list[str]:
    """``fsdp2_in_place at 1,024 tokens a step (fsdp2)``: a row of ours, the peers that beat it."""
    if not result.benchmark.lines:
        return []
    found = []
    for name in dict.fromkeys(row["name"] for row in rows if row["ours"]):
        found_here = columns(rows, name, result.benchmark.first_table)
        for column in sorted(found_here, key=lambda column: column.ours["tokens"]):
            if column.better:
                peers = ", ".join(row["name"] for row in column.better)
                found.append(f"{name} at {column.ours['tokens']:,} tokens a step ({peers})")
    return found


def other_models(result: Result, rows: list[dict]) -> list[str]:
    """``overlapped_writer, gpt2-xl: the whole save costs 465 ms (289 ms to 649 ms)``."""
    if result.benchmark.lines:
        return []
    found = []
    for ours in (row for row in rows if row["ours"]):
        for row in result.rows:
            alike = {"model": row.get("model"), "tokens": row.get("tokens")}
            if row["name"] == ours["name"] and row not in rows and same_case(row, ours | alike):
                fields = [f for f in result.benchmark.first_table.split()[:2] if known(row, f)]
                said = [f"{first_lower(heading(f))} {with_interval(row, f)}" for f in fields]
                found.append(f"{row['name']}, {row.get('model')}: {', '.join(said)}")
    return found


def first_lower(text: str) -> str:
    return text[0].lower() + text[1:]


def with_interval(row: dict, field: str) -> str:
    """A figure as it is, with its interval: what is worst is not hidden in the noise."""
    ends = interval(row, field)
    if ends is None:
        return cell(row, field)
    return f"{cell(row, field)} ({written(field, ends[0])} to {written(field, ends[1])})"


# -- the table on the first screen -----------------------------------------------------------------


@dataclass(frozen=True)
class Gain:
    """Columns of one field of one file, the one of the greatest lead first."""

    result: Result
    columns: list[Column]

    @property
    def best(self) -> Column:
        return self.columns[0]

    @property
    def behind(self) -> list[Column]:
        """The others at which a peer is ahead of ours, by tokens a step."""
        found = [column for column in self.columns[1:] if column.better]
        return sorted(found, key=lambda column: column.ours["tokens"])


def gain(
    repo: Path, benchmark: str, names: list[str], field: str, where: dict[str, str]
) -> Gain | None:
    """The columns of ``names[0]``, which is ours, where the parameters are those of ``where``.

    Of the machines where none of the rows of ``names`` is outdated, the one with most of them; of
    several, the latest, then that of most ranks. None where none has the first.
    """
    changes = cost_changes(repo)
    best = None
    most = (0, "")
    for path in reversed(files(repo, "results", benchmark)):  # most ranks first
        result = load(path)
        rows = []
        for row in result.rows:
            in_case = all(plain(row.get(parameter)) == value for parameter, value in where.items())
            if in_case and known(row, field):
                rows.append(row)
        asked = [row for row in rows if row["name"] in names]
        outdated = any(result.is_outdated(row, changes) for row in asked)
        if outdated or names[0] not in {row["name"] for row in asked}:
            continue
        worth = (len({row["name"] for row in asked}), result.data["date"])
        if worth > most:
            best = Gain(result, columns(rows, names[0], field))
            most = worth
    return best


BEGIN = "<!-- Figures: python -m benchmarks.first_tables --write -->"
END = "<!-- End of figures -->"
SAVE = {"model": "llama-1b", "step": "long", "loop": "reads", "compiled": "no", "storage": "memory"}
SHARDED = {
    "model": "llama-8b-blocks",
    "loop": "reads",
    "compiled": "no",
    "reduce_dtype": "float32",
    "activation_checkpointing": "no",
}
HEADINGS = ["What", "PyTorch alone", "Best other package", "Ours"]


@dataclass(frozen=True)
class Headline:
    """A line of the first table that a reader sees: ours, PyTorch alone, and the best peer."""

    name: str
    what: str
    benchmark: str
    ours: str
    field: str
    where: dict[str, str]
    stock: tuple[str, ...]  # rows of PyTorch alone


HEADLINES = (
    Headline(
        name="Save",
        what="training time that one save of Llama 1B takes",
        benchmark="checkpoint_stall",
        ours="overlapped_writer",
        field="cost_s",
        where=SAVE,
        stock=("default_stager_2.13", "async_save"),
    ),
    Headline(
        name="Load",
        what="a checkpoint of Qwen3 1.7B and its optimizer",
        benchmark="restart",
        ours="resume",
        field="load_s",
        where={"storage": "memory"},
        stock=("torch_load_mmap", "dcp_load"),
    ),
    Headline(
        name="Offload",
        what="speed of Llama 8B with layers and optimizer on the host, at {} tokens a step. "
        "100 %: all of it on the device",
        benchmark="offload_step",
        ours="streamed_adam",
        field="kept",
        where={"model": "llama-8b"},
        stock=("fsdp2_cpu_offload",),
    ),
    Headline(
        name="Sharding",
        what="speed of blocks of Llama 8B on two GPUs, at {} tokens a step. 100 %: nothing is sent",
        benchmark="fsdp_overlap",
        ours="fsdp2_in_place",
        field="efficiency",
        where=SHARDED,
        stock=("fsdp2",),
    ),
)


@dataclass(frozen=True)
class HeadlineTable:
    """Lines of cells, and sentences below them, in Markdown: names stand in backticks."""

    lines: list[list[str]]
    slower: str  # where others are ahead of ours
    peers: str  # who they are
    measured: str


def headline_table(repo: Path) -> HeadlineTable | None:
    """What README and the landing page show first; None where a row of ours is not measured."""
    lines = []
    slower = []
    measured = []
    torches = set()
    for line in HEADLINES:
        found = gain(repo, line.benchmark, [line.ours], line.field, line.where)
        if found is None:
            return None
        stock = [row for row in found.best.others if row["name"] in line.stock]
        others = other_packages(line, found.best)
        torches.add(found.result.data["torch"])
        lines.append(cells_of_headline(line, found, stock, others))
        if found.behind:
            slower.append(where_slower(line, found))
        measured.append(f"{line.name}: {measured_with(found, [*stock, *others])}")
    ahead = ""
    if slower:
        ahead = f"**Others are ahead of ours with fewer tokens a step.** {' '.join(slower)}"
    torch = " or ".join(sorted(torches))
    origin = f"Measured on one host, torch {torch}. {'. '.join(measured)}."
    return HeadlineTable(lines, ahead, who_they_are([*lines, slower]), origin)


def cells_of_headline(
    line: Headline, found: Gain, stock: list[dict], others: list[dict]
) -> list[str]:
    ours = found.best.ours
    what = line.what.format(f"{ours['tokens']:,}" if "tokens" in ours else "")
    figure = headline(ours, line.field, found.result.rows)
    return [
        f"**{line.name}**: {what}",
        ", ".join(figure_of(line, found, row) for row in stock),
        ", ".join(figure_of(line, found, row) for row in others) or "none at this size",
        f"**{figure}** `{api_name(ours)}`{in_brackets(how(ours))}",
    ]


def api_name(row: dict) -> str:
    return API_NAMES.get(row["name"], row["name"])


def in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


def figure_of(line: Headline, found: Gain, row: dict) -> str:
    """``87.4 % `torchao` (does not clip)``: a figure, who has it, and what it does otherwise."""
    figure = headline(row, line.field, found.result.rows)
    differs = how(row) != how(found.best.ours)
    return f"{figure} `{api_name(row)}`{in_brackets(how(row) if differs else '')}"


def where_slower(line: Headline, of: Gain) -> str:
    """``Offload at 8,192: ours 47.8 %, `torchao` 55.3 %.``: ours, and all that beat ours."""
    places = []
    for column in of.behind:
        said = [f"ours {headline(column.ours, line.field, of.result.rows)}"]
        for row in column.better:
            said.append(f"`{api_name(row)}` {headline(row, line.field, of.result.rows)}")
        places.append(f"at {column.ours['tokens']:,} {', '.join(said)}")
    return f"{line.name}: {'; '.join(places)}."


def other_packages(line: Headline, column: Column) -> list[dict]:
    """The best of them, and all that beat ours."""
    peers = [row for row in column.others if is_peer(row) and row["name"] not in line.stock]
    return [row for row in peers if row in peers[:1] or row in column.better]


def measured_with(of: Gain, others: list[dict]) -> str:
    """``1 × NVIDIA H200, version 0.3.0 (abc); `torchao` on another host``."""
    said = f"{of.result.machine}, version {code_in_words(of.best.ours)}"
    runs: dict[str, list[str]] = {}
    for row in others:
        if "run" in row:
            runs.setdefault(row["run"], []).append(f"`{api_name(row)}`")
    for run, names in runs.items():
        said += f"; {' and '.join(names)} on {run}"
    return said


def who_they_are(lines: list[list[str]]) -> str:
    """``torch_checkpointing` is Meta's ...`: the packages that ``lines`` name."""
    text = str(lines)
    said = [f"`{name}` is {what}" for name, what in PEERS.items() if f"`{name}`" in text]
    return f"{', '.join(said)}." if said else ""


def in_markdown(table: HeadlineTable) -> str:
    lines = [HEADINGS, ["---"] * len(HEADINGS), *table.lines]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    below = [table.slower, f"{table.peers} {table.measured} [More figures](guide/gains.rst)."]
    return "\n\n".join([text, *[wrapped(each.strip()) for each in below if each]])


def wrapped(text: str) -> str:
    lines = textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def with_figures(text: str, table: HeadlineTable | None) -> str:
    """README with the table between its marks.

    Raises:
        ResultError: it has no marks.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ResultError(f"README.md lacks {BEGIN} and {END}")
    shown = f"\n{in_markdown(table)}" if table else ""
    return f"{before}{begin}\n{shown}\n{end}{after}"


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
    """From the records of ``make verify`` on accelerators, then of ``tools/versions.py``."""
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
    parser.add_argument("--write", action="store_true", help="write README's table of figures")
    parser.add_argument("--repo", type=Path, default=Path.cwd(), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        for path in (options.repo / "benchmarks" / "results").glob("*.json"):
            load(path)
        for path in (options.repo / "benchmarks" / "traces").glob("*.json"):
            load_trace(path)
        check_changes(options.repo)
        readme = options.repo / "README.md"
        if readme.exists():
            text = readme.read_text(encoding="utf-8")
            wanted = with_figures(text, headline_table(options.repo))
            if options.write:
                readme.write_text(wanted, encoding="utf-8")
            elif text != wanted:
                command = "python -m benchmarks.first_tables --write"
                raise ResultError(f"README's figures are not those of the rows: {command}")
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
