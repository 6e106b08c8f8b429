"""Measured results on the pages: the ``result-figure`` and ``result-table`` directives.

::

    .. result-figure:: checkpoint_stall
       :rows: async_save process
       :where: storage=memory

Both read ``benchmarks/results/<benchmark>.<device>-x<ranks>.json``, one tab a file: first those
without outdated rows, then those with most of the names, then the latest. ``rows`` keeps rows by
name, ``where`` those with these parameters. A dagger marks a row that is outdated: the changelog
has a change of its cost since. A figure draws the benchmark's own field, or another with
``:field: step_s``. Without a file the page says "Not measured yet". A machine on which none of the
rows was measured, or only what they are compared with, has no tab.
"""

import io
import re
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from docutils import nodes
from docutils.parsers.rst import directives
from folded import folded
from lanes import LanePicture, picture
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective
from sphinx_design.shared import create_component

from benchmarks import first_tables
from benchmarks.code_versions import CHANGELOG, CostChange, code_in_words, cost_changes
from benchmarks.fair import (
    Column,
    better_peers,
    headline,
    how,
    interval,
    with_better_peers,
)
from benchmarks.first_tables import Gain, first_lower, gain
from benchmarks.result_files import (
    BENCHMARKS,
    FIRST_TABLE_NOTES,
    REFERENCES,
    ROW_RECIPES,
    Result,
    ResultError,
    cell,
    fields_of,
    files,
    heading,
    in_words,
    known,
    load,
    of_other_runs,
    plain,
    round_number,
    written,
)

logger = logging.getLogger(__name__)

REPO = Path(__file__).resolve().parent.parent

# Colours of the figure as matplotlib writes them, and what stands in the page instead: the page's
# own text and series colours, so that one drawing serves the light and the dark theme.
TEXT, GRID, PEER = "#010101", "#020202", "#030303"
SERIES = ("#040404", "#050505", "#060606", "#070707", "#080808", "#090909")
MARKERS = "osD^vP"
PAGE_COLOURS = {
    TEXT: "currentColor",
    GRID: "var(--result-grid)",
    PEER: "var(--result-peer)",
}
for number, colour in enumerate(SERIES, 1):
    PAGE_COLOURS[colour] = f"var(--result-series-{number})"
# What matplotlib writes into an SVG and a page does not need
NEEDLESS = (
    r"(?<=\d\.\d)\d{4,}",  # more digits than a screen shows
    r"(?<=\n) +",  # indentation
    r' font-family: [^;"]*;',
    r' id="\w+_\d+"',  # of groups that nothing refers to
    r"<metadata>.*?</metadata>",
    r"<defs>\s*<style.*?</defs>",
    r"<!--.*?-->",
)


HIDDEN = ("tokens",)  # a table of one number of tokens has peers that are ahead at another, too
IN_SIGHT = 5  # rows of a table on a recipe's page; the others unfold
DECIDING = 3  # columns of a table: the first that decide; the result's file has all of them
ALL_ROWS = "guide/results"
CASES = {  # parameters that stand below a row's name, and how; the others have a column
    "model": plain,
    "loop": plain,
    "storage": plain,
    "compiled": lambda compiled: "compiled" if compiled else "eager",
    "reduce_dtype": lambda dtype: f"reduced in {dtype}",
    "activation_checkpointing": lambda recomputes: "with recomputation" if recomputes else "",
}


def _pairs(text: str) -> dict[str, str]:
    pairs = {}
    for item in text.split():
        parameter, _, value = item.partition("=")
        pairs[parameter] = value
    if not all(pairs.values()):
        raise ValueError("write it as 'storage=memory step=long'")
    return pairs


@dataclass(frozen=True)
class Tab:
    """What a page shows of one file."""

    machine: str
    shown: list[nodes.Node]
    is_measured: bool  # whether ``shown`` has rows, not only why there are none
    worth: tuple[bool, int, str]  # whether no row is outdated; its names; its date


class ResultDirective(SphinxDirective):
    """What the two directives share: reading the files, and a tab for each."""

    required_arguments = 1
    option_spec = {"rows": directives.unchanged_required, "where": _pairs}

    def show(self, result: Result, rows: list[dict]) -> list[nodes.Node]:
        raise NotImplementedError

    def chosen(self, result: Result) -> list[dict]:
        """The rows that the directive asks for."""
        return [row for row in result.rows if self._wanted(row)]

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        if name not in BENCHMARKS:
            raise self.error(f"{self.name}: unknown benchmark {name!r}: {', '.join(BENCHMARKS)}")
        repo = Path(self.config.results_repo)
        tabs = []
        for path in remember(self.env, repo, "results", name):
            tabs.append(self._tab(path, name, repo))
        measured = [tab for tab in tabs if tab.is_measured]
        measured.sort(key=lambda tab: tab.worth)
        kept = measured or tabs[-1:]
        if not kept:
            return [not_measured(name)]
        return device_tabs([(tab.machine, tab.shown) for tab in kept])

    def _tab(self, path: Path, name: str, repo: Path) -> Tab:
        try:
            result = load(path)
            absent = result.missing(self.options.get("rows", "").split())
        except ResultError as error:
            raise self.error(str(error)) from error
        rows = self.chosen(result)
        names = {row["name"] for row in rows}
        asked = set(self.options.get("rows", "").split())
        if names <= REFERENCES and not asked <= REFERENCES:  # nothing to compare
            rows = []
            names = set()
        changes = note_changes(self.env, repo)
        outdated = [row for row in rows if result.is_outdated(row, changes)]

        drawn = []
        if rows:
            drawn = self.show(result, rows)
        shown = list(drawn)
        if drawn:
            shown = earlier_version(outdated) + drawn
        reasons = result.data.get("not_run", {})
        unexplained = [row for row in absent if row not in reasons]
        if unexplained:
            shown.append(not_measured(f"{name}: {', '.join(unexplained)}"))
        elif not drawn:
            shown.append(not_measured(name))
            for row in absent:
                shown.append(_small(not_run(row, reasons[row])))
        worth = (not outdated, len(names), result.data["date"])
        return Tab(result.machine, shown, is_measured=bool(drawn), worth=worth)

    def _name(self, name: str) -> nodes.paragraph:
        """A row's name in the API's words, and below them as it stands in the file."""
        words = first_tables.API_NAMES.get(name, name)
        literal = nodes.literal("", words)
        stem = ROW_RECIPES.get(name, name)
        page = next((d for d in self.env.found_docs if d.endswith(f"/{stem}")), None)
        shown = nodes.paragraph()
        if page is None:
            shown += literal
        else:
            leads = nodes.inline("", "", literal)
            shown += link(self.env.docname, "doc", f"/{page}", leads)
        if words != name:
            shown += nodes.inline("", f" {name}", classes=["result-interval"])
        return shown

    def _all_rows(self, words: str) -> nodes.reference:
        """A link to the page of all rows."""
        up = "../" * self.env.docname.count("/")
        return nodes.reference("", words, refuri=f"{up}{ALL_ROWS}.html")

    def _wanted(self, row: dict, whatever: tuple[str, ...] = ()) -> bool:
        """Whether ``row`` is asked for, ``whatever`` its values of these parameters are."""
        names = self.options.get("rows", "").split()
        if names and row["name"] not in names:
            return False
        for parameter, value in self.options.get("where", {}).items():
            if parameter not in whatever and plain(row.get(parameter)) != value:
                return False
        return True


class ResultTable(ResultDirective):
    """``.. result-table:: <benchmark>``: medians with their units, and where they were measured.

    Peers that beat a row of ours are shown unasked, those of other tokens a step, too.
    """

    def chosen(self, result: Result) -> list[dict]:
        rows = super().chosen(result)
        of_ours = [row for row in result.rows if self._wanted(row, whatever=HIDDEN)]
        return with_better_peers(rows, of_ours, result)

    def show(self, result: Result, rows: list[dict]) -> list[nodes.Node]:
        columns = columns_of(result, rows)
        rows = [row for row in rows if any(known(row, name) for name in columns)]
        varied, same = parameters_of(result, rows)
        with_column = [parameter for parameter in varied if parameter not in CASES]
        notes = list(dict.fromkeys(row["note"] for row in rows if row.get("note")))
        body = []
        for row in rows:
            line = [self._name_and_case(result, row, varied, notes)]
            for parameter in with_column:
                line.append(nodes.paragraph("", plain(row.get(parameter))))
            for column in columns:
                line.append(cell_with_interval(row, column))
            body.append(line)
        headings = ["Way"] + [heading(name) for name in with_column + columns]
        first = list(range(len(body)))
        if self.env.docname.startswith("recipes/"):
            first = rows_in_sight(rows, result.benchmark.deciding.split())
        shown = [_table(headings, [body[number] for number in first])]
        rest = [line for number, line in enumerate(body) if number not in first]
        if rest:
            rows_of = "row" if len(rest) == 1 else "rows"
            shown += folded(f"{len(rest)} more {rows_of}", [_table(headings, rest)])
        shown += _numbered(notes)
        origin = self._origin(result, rows, same, columns)
        if self.env.docname.startswith("recipes/"):
            origin = folded(f"Measured on {result.machine}, {result.data['date']}: how", origin)
        shown += origin
        shown.append(self._others(result))
        return shown

    def _name_and_case(
        self, result: Result, row: dict, varied: list[str], notes: list[str]
    ) -> nodes.paragraph:
        """The first cell of a row, with the number of its note, and a dagger if it is outdated."""
        shown = self._name(row["name"])
        if row.get("note"):
            shown += nodes.superscript("", str(notes.index(row["note"]) + 1))
        if result.is_outdated(row, note_changes(self.env, Path(self.config.results_repo))):
            shown += nodes.superscript("", " †")
        cases = []
        for parameter in varied:
            if parameter in CASES and parameter in row:
                words = CASES[parameter](row[parameter])
                if words:
                    cases.append(words)
        if how(row):
            cases.append(how(row))
        if cases:
            shown += nodes.inline("", f" {', '.join(cases)}", classes=["result-interval"])
        return shown

    def _others(self, result: Result) -> nodes.paragraph:
        """A way to what the table leaves out: the page of all rows, and there the file itself."""
        if self.env.docname == ALL_ROWS:
            file = f"../_static/{result.path.name}"
            link = nodes.reference("", "All columns and samples", refuri=file)
        else:
            link = self._all_rows("Everything that was measured")
        return nodes.paragraph("", "", link, nodes.Text("."), classes=["result-origin"])

    def _origin(self, result: Result, rows: list, same: dict, columns: list) -> list[nodes.Node]:
        """Where the rows were measured; parameters that are the ``same`` in all have no column."""
        data = result.data
        what = "Counts" if are_counts(rows, columns) else "Medians"
        if same:
            what += f" ({', '.join(named(parameter, value) for parameter, value in same.items())})"
        lines = [f"{what}. {result.origin(rows)}. Workload: {in_words(data['workload'])}."]
        if data["link"]:
            lines.append(f"The link, measured in the same run: {in_words(data['link'])}.")
        bounds = dict.fromkeys(row["bound_from"] for row in rows if row.get("bound_from"))
        if bounds and "bound_s" in columns:
            lines.append(f"Bound: {'; '.join(bounds)}.")
        wanted = self.options.get("rows", "").split()
        for name, reason in data.get("not_run", {}).items():
            if not wanted or name in wanted:
                lines.append(not_run(name, reason))
        return [_small(line) for line in lines]


def rows_in_sight(rows: list[dict], fields: list[str]) -> list[int]:
    """Which of ``rows`` a table shows at once, at most ``IN_SIGHT`` if so few will do.

    All peers that beat a row of ours which is in sight are among them.
    """
    if len(rows) <= IN_SIGHT + 1:  # a fold for one row saves nothing
        return list(range(len(rows)))
    chosen: list[int] = []
    for number, row in enumerate(rows):
        better = []
        if row["ours"]:
            better = [rows.index(peer) for peer in better_peers(row, rows, fields)]
        added = [each for each in [number, *better] if each not in chosen]
        if not chosen or len(chosen) + len(added) <= IN_SIGHT:
            chosen += added
    return sorted(chosen)


def parameters_of(result: Result, rows: list[dict]) -> tuple[list[str], dict[str, object]]:
    """The parameters in which ``rows`` differ; and those that have one value in all, with it."""
    varied = []
    same = {}
    for parameter in result.varied():
        values = {row.get(parameter) for row in rows}
        if len(values) > 1:
            varied.append(parameter)
        elif values and None not in values:
            same[parameter] = values.pop()
    return varied, same


def are_counts(rows: list[dict], columns: list[str]) -> bool:
    """Whether a table of ``rows`` has no values but whole numbers."""
    for row in rows:
        for column in columns:
            if not isinstance(row.get(column), int | None):
                return False
    return True


def columns_of(result: Result, rows: list[dict]) -> list[str]:
    """The fields that a table of ``rows`` shows: those that decide, or the first that rows have."""
    fields = result.benchmark.deciding.split()
    for row in rows:
        for field in fields_of(row):
            values = {other.get(field) for other in rows}
            if len(rows) == 1 or len(values) > 1:
                fields.append(field)
    shown = []
    for field in dict.fromkeys(fields):
        if any(known(row, field) for row in rows):
            shown.append(field)
    return shown[:DECIDING]


def cell_with_interval(row: dict, name: str) -> nodes.paragraph:
    """A value, and below it the interval in which it lies, where the row has one."""
    paragraph = nodes.paragraph("", cell(row, name))
    low, high = interval(row, name) or (None, None)
    if low != high:
        ends = f" ({written(name, low)} to {written(name, high)})"
        paragraph += nodes.inline("", ends, classes=["result-interval"])
    return paragraph


def link(page: str, kind: str, target: str, shown: nodes.Node) -> addnodes.pending_xref:
    """``shown`` on ``page``, which leads to a document (``doc``) or a word (``term``)."""
    where = {"refdomain": "std", "reftype": kind, "reftarget": target, "refdoc": page}
    return addnodes.pending_xref("", shown, **where, refexplicit=True, refwarn=True)


def not_run(name: str, reason: str) -> str:
    return f"Not run: {name}: {reason.rstrip('.')}."


def _numbered(notes: list[str]) -> list[nodes.Node]:
    return [_small(f"{number}. {note}") for number, note in enumerate(notes, 1)]


def _small(text: str) -> nodes.paragraph:
    """``text`` as it is: a ``--option`` in it keeps its two hyphens."""
    return nodes.paragraph("", text, classes=["result-origin"], support_smartquotes=False)


def _table(headings: list[str], body: list[list[nodes.Node]]) -> nodes.table:
    def entry(child: nodes.Node, number: int) -> nodes.entry:
        return nodes.entry("", child, classes=["result-name" if number == 0 else "result-value"])

    widths = [len(text) for text in headings]
    for line in body:
        lengths = [len(child.astext()) for child in line]
        widths = [max(pair) for pair in zip(widths, lengths, strict=True)]
    group = nodes.tgroup("", cols=len(headings))
    for width in widths:
        group += nodes.colspec(colwidth=width + 1)

    head = nodes.row()
    for number, text in enumerate(headings):
        head += entry(nodes.paragraph("", text), number)
    group += nodes.thead("", head)

    rows = nodes.tbody()
    for line in body:
        row = nodes.row()
        for number, child in enumerate(line):
            row += entry(child, number)
        rows += row
    group += rows
    return nodes.table("", group, classes=["result-table"])


class ResultFigure(ResultDirective):
    """``.. result-figure:: <benchmark>``: one drawing for each workload of the result."""

    option_spec = ResultDirective.option_spec | {"field": directives.unchanged_required}

    def show(self, result: Result, rows: list[dict]) -> list[nodes.Node]:
        benchmark = result.benchmark
        as_lines = benchmark.lines != "" and len({row.get("tokens") for row in rows}) > 1
        field = self.options.get("field", benchmark.lines if as_lines else benchmark.bars)
        if "field" in self.options and not any(field in row for row in result.rows):
            raise self.error(f"{self.name}: {benchmark.title} has no field {field!r}")
        rows = [row for row in rows if known(row, field)]
        if not rows:
            return []
        parameters = result.varied()
        if as_lines and "tokens" in parameters:
            parameters.remove("tokens")
        drawings: dict[tuple, list[dict]] = {}  # by case: parameters and values
        for row in rows:
            case = tuple((name, row[name]) for name in parameters if name in row)
            drawings.setdefault(case, []).append(row)
        in_all = set(next(iter(drawings)))
        for case in drawings:
            in_all &= set(case)

        pictures = []
        for case, members in drawings.items():
            title = ", ".join(named(*pair) for pair in case if pair not in in_all)
            if as_lines:
                drawn = _lines(field, members, title)
            else:
                drawn = _bars(field, members, title, rows, benchmark.logarithmic)
            pictures.append(as_picture(drawn, benchmark.title, _words(field, members)))
        shown = first_lower(heading(field))
        if in_all:
            value_of = dict(in_all)
            shared = [named(p, value_of[p]) for p in parameters if p in value_of]
            shown += f" ({', '.join(shared)})"
        words = f"{benchmark.title}: {shown}. Measured on {result.origin(rows)}."
        caption = nodes.caption("", words)
        grid = nodes.container("", *pictures, classes=["result-grid"])
        return [nodes.figure("", grid, caption, classes=["result-figure"])]


def named(parameter: str, value: object) -> str:
    return f"{parameter.replace('_', ' ')}: {plain(value)}"


def _words(field: str, rows: list[dict]) -> list[str]:
    """A drawing in words, a line a row."""
    lines = []
    for row in rows:
        at = f" at {row['tokens']} tokens" if "tokens" in row else ""
        lines.append(f"{row['name']}{at}: {first_lower(heading(field))} {cell(row, field)}")
    return lines


def blank_figure(height: float, title: str) -> Figure:
    figure = Figure(figsize=(4.4, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(colors=TEXT, color=GRID, labelsize=10)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    if title:
        axes.set_title(title, loc="left", color=TEXT, fontsize=11)
    return figure


def _bars(
    field: str, rows: list[dict], title: str, beside: list[dict], logarithmic: bool
) -> Figure:
    """A bar a row, its name and value written above it: names stay readable on a phone.

    ``beside`` are the rows of all drawings of the figure: they share one axis.
    """
    figure = blank_figure(0.42 * len(rows) + 1.0, title)
    (axes,) = figure.axes
    values = [row[field] for row in rows]
    kind = type(values[0])  # a whole number is a count
    ends = [row[field] for row in beside]
    if in_seconds(field):
        ends += [row["bound_s"] for row in beside if row.get("bound_s")]
    positive = [end for end in ends if end > 0]
    left = 0.0
    if logarithmic:
        left = min(positive, default=1e-3) / 2
        axes.set_xscale("log")
    else:
        axes.xaxis.set_major_locator(MaxNLocator(4))
    # A stall of zero or below has no place on a logarithmic axis: its value is written, no bar.
    widths = [max(value - left, 0.0) for value in values]
    colours = []
    for row in rows:
        runs_a_recipe = row["name"] in ROW_RECIPES and row["ours"]
        colours.append(SERIES[0] if runs_a_recipe else PEER)
    places = range(len(rows))
    axes.barh(places, widths, left=left, height=0.4, color=colours)
    axes.set_xlim(left, max(positive + [left * 4]) * 1.15)
    axes.set_ylim(len(rows) - 0.6, -0.75)
    axes.set_yticks([])
    axes.grid(axis="y", visible=False)
    axes.xaxis.set_major_formatter(lambda value, _: on_axis(field, kind(value)))
    axes.xaxis.set_minor_formatter("")
    for place, row in zip(places, rows, strict=True):
        text = f"{row['name']}  {cell(row, field)}"
        if row.get("loaded_back_bitwise") is False:
            text += ", saved wrong data"
        axes.annotate(
            text, (0, place - 0.26), xycoords=("axes fraction", "data"),
            xytext=(3, 2), textcoords="offset points", color=TEXT, fontsize=10,
        )  # fmt: skip
    label = heading(field)
    for place, row in zip(places, rows, strict=True):
        bound = row.get("bound_s")
        if bound and in_seconds(field):  # across its own bar, below the text
            axes.vlines(bound, place - 0.2, place + 0.32, color=TEXT, linestyle=(0, (2, 1)))
            label = f"{heading(field)} (dashed: bound)"
    axes.set_xlabel(label, color=TEXT)
    return figure


def in_seconds(field: str) -> bool:
    return field.endswith("_s") and not field.endswith("_per_s")


def on_axis(field: str, value: float) -> str:
    """``value`` without zeros after the point: ``100 ms``, ``0.5 s``, ``95 %``."""
    return "0" if value == 0 else round_number(written(field, value))


def _lines(field: str, rows: list[dict], title: str) -> Figure:
    """A line a row name over tokens."""
    figure = blank_figure(3.6, title)
    (axes,) = figure.axes
    for number, name in enumerate(dict.fromkeys(row["name"] for row in rows)):
        mine = [row for row in rows if row["name"] == name]
        mine.sort(key=lambda row: (row["tokens"], row[field]))
        tokens = [row["tokens"] for row in mine]
        values = [row[field] for row in mine]
        style = {"color": SERIES[number % len(SERIES)], "marker": MARKERS[number % len(MARKERS)]}
        if number >= len(SERIES):
            style["linestyle"] = "--"
        axes.plot(tokens, values, **style, label=name, markersize=5)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({row["tokens"] for row in rows}))
    kind = type(rows[0][field])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: on_axis(field, kind(value)))
    axes.set_xlabel(heading("tokens"), color=TEXT)
    axes.set_ylabel(heading(field), color=TEXT)
    shown = {"frameon": False, "labelcolor": TEXT, "fontsize": 9.5}
    figure.legend(loc="outside upper left", ncols=2, **shown)
    return figure


def model_in_words(row: dict) -> str:
    """What was trained, "" where a row has no model."""
    if "model" not in row:
        return ""
    if row["model"] == "synthetic":
        return "A stack of matrices"
    return f"Stock {row['model']}"


class ResultGain(ResultDirective):
    """``.. result-gain:: <benchmark>``: rows of one field in a sentence, the first in bold.

    The first of ``rows`` is ours. Where it was measured at several numbers of tokens a step, the
    sentence has those at which it is furthest ahead of the best peer, and then all at which a peer
    is ahead. The others of ``rows`` and every peer that beats ours are named there, and the best.

    ``first_tables.gain`` says of which machine. Nothing is shown where none has the first row. What
    stands in the directive explains the rows: it is shown after them, or not either.
    """

    has_content = True

    option_spec = ResultDirective.option_spec | {"field": directives.unchanged_required}

    def run(self) -> list[nodes.Node]:
        repo = Path(self.config.results_repo)
        remember(self.env, repo, "results", self.arguments[0])
        note_changes(self.env, repo)
        names = self.options["rows"].split()
        where = self.options.get("where", {})
        found = gain(repo, self.arguments[0], names, self.options["field"], where)
        if found is None and self.env.docname.startswith("recipes/"):
            words = "Not measured since its cost changed: What it buys has earlier rows."
            return [nodes.paragraph("", words, classes=["result-gain"])]
        if found is None:
            return []
        explained = nodes.container()
        self.state.nested_parse(self.content, self.content_offset, explained)
        return [self._sentence(found), *explained.children]

    def _sentence(self, found: Gain) -> nodes.paragraph:
        first = found.best
        text = nodes.paragraph("", f"{heading(self.options['field'])}: ", classes=["result-gain"])
        shown = self._column(text, found.result, first, nodes.strong)
        if first.better and len(found.columns) == 1:
            text += nodes.Text(" (a peer is ahead)")
        for number, column in enumerate(found.behind):
            words = "a peer is ahead at" if number == 0 else "at"
            text += nodes.Text(f"; {words} {column.ours['tokens']:,} tokens a step: ")
            shown += self._column(text, found.result, column, nodes.emphasis)
        at = f", {first.ours['tokens']:,} tokens a step" if "tokens" in first.ours else ""
        if found.behind:
            at += " where no other is said"
        machine = "; ".join([found.result.machine, *of_other_runs(shown)])
        text += nodes.Text(f". {model_in_words(first.ours)}{at}, {machine}.".replace(". , ", ". "))
        return text

    def _column(
        self, text: nodes.paragraph, result: Result, column: Column, emphasis: type
    ) -> list[dict]:
        """Add a column's figures to ``text``; the rows that it names."""
        field = self.options["field"]
        named = column.named(self.options["rows"].split())
        for number, row in enumerate([column.ours, *named]):
            kind = emphasis if number == 0 else nodes.emphasis
            if number > 0:
                text += nodes.Text(", ")
            text += kind("", headline(row, field, result.rows))
            text += nodes.Text(" ")
            text += nodes.literal("", first_tables.api_name(row))
            differs = how(row) != how(column.ours)
            if how(row) and differs:
                text += nodes.Text(f" ({how(row)})")
        return [column.ours, *named]


class HeadlineTableDirective(ResultDirective):
    """``.. headline-table::``: README's table of figures."""

    required_arguments = 0
    option_spec: dict = {}

    def run(self) -> list[nodes.Node]:
        repo = Path(self.config.results_repo)
        for line in first_tables.HEADLINES:
            remember(self.env, repo, "results", line.benchmark)
        note_changes(self.env, repo)
        table = first_tables.headline_table(repo)
        if table is None:
            return []
        body = []
        for line in table.lines:
            body.append([from_markdown(nodes.paragraph(), cell_of_line) for cell_of_line in line])
        shown = [_table(first_tables.HEADINGS, body)]
        shown[0]["classes"].append("headline-table")
        if table.slower:
            shown.append(from_markdown(nodes.paragraph(), table.slower))
        small = nodes.paragraph(classes=["result-origin"], support_smartquotes=False)
        shown.append(from_markdown(small, f"{table.peers} {table.measured}".strip()))
        return shown


def from_markdown(paragraph: nodes.paragraph, text: str) -> nodes.paragraph:
    """``paragraph`` with ``text``, in which names stand in backticks and stars make bold."""
    for part in re.split(r"(`[^`]+`|\*\*[^*]+\*\*)", text):
        if part.startswith("`"):
            paragraph += nodes.literal("", part.strip("`"))
        elif part.startswith("**"):
            paragraph += nodes.strong("", part.strip("*"))
        else:
            paragraph += nodes.Text(part)
    return paragraph


class FirstTableDirective(ResultDirective):
    """``.. first-table:: <benchmark>``: rows that are not outdated, of one kind of machine."""

    option_spec: dict = {}

    def run(self) -> list[nodes.Node]:
        repo = Path(self.config.results_repo)
        name = self.arguments[0]
        remember(self.env, repo, "results", name)
        note_changes(self.env, repo)
        table = first_tables.first_table(name, repo)
        if table is None:
            words = "Not measured since its cost changed. What was measured before: "
            link = self._all_rows("every measured row")
            return [nodes.paragraph("", "", nodes.Text(words), link, nodes.Text("."))]
        body = []
        notes = []
        for row, cells in table.cells.items():
            way = self._name(row)
            if row in FIRST_TABLE_NOTES:
                note = FIRST_TABLE_NOTES[row]
                if note not in notes:
                    notes.append(note)
                way += nodes.superscript("", str(notes.index(note) + 1))
            if how(table.rows[row]):
                way += nodes.inline("", f" {how(table.rows[row])}", classes=["result-interval"])
            line = [way]
            for cell_of_row in cells:
                kind = nodes.strong if cell_of_row.is_best else nodes.inline
                line.append(nodes.paragraph("", "", kind("", cell_of_row.text)))
            body.append(line)
        shown = [_table(["Way"] + table.headings, body)]
        shown += _numbered(notes)
        if table.behind:
            shown.append(_small(f"A peer is ahead of {'; of '.join(table.behind)}."))
        if table.elsewhere:
            shown.append(_small(f"With other models: {'; '.join(table.elsewhere)}."))
        shown.append(_small(f"Measured on {table.origin}"))
        if table.left_out:
            names = ", ".join(table.left_out)
            shown.append(_small(f"Left out, since their cost has changed: {names}."))
        return shown


def as_picture(figure: Figure, alternative: str, text: list[str]) -> LanePicture:
    """``figure`` as inline SVG that takes its colours and its font from the page."""
    settings = {"svg.fonttype": "none", "svg.hashsalt": "\n".join(text), "font.size": 10}
    buffer = io.StringIO()
    with matplotlib.rc_context(settings):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    for pattern in NEEDLESS:
        svg = re.sub(pattern, "", svg, flags=re.DOTALL)
    for drawn, page in PAGE_COLOURS.items():
        svg = svg.replace(drawn, page)
    words = f'class="result-svg" role="img" aria-label="{alternative}"'
    svg = re.sub(r'(<svg [^>]*?)width="[^"]*" height="[^"]*"', r"\1", svg, count=1)
    svg = svg.replace("<svg ", f"<svg {words} ", 1)
    # The theme's Markdown twin of a page leaves out <aside> and keeps the list.
    items = "".join(f"<li>{line}</li>" for line in text)
    return picture(
        f'<aside role="none" class="result-picture">{svg}</aside><ul hidden>{items}</ul>', text
    )


def remember(
    env: BuildEnvironment, repo: Path, folder: str, benchmark: str, mode: str | None = None
) -> list[Path]:
    """The benchmark's files; the present page is read again when they or their number change."""
    found = files(repo, folder, benchmark, mode)
    for path in found:
        env.note_dependency(str(path))
    looked_for = env.metadata[env.docname].setdefault("measured_files", [])
    looked_for.append((folder, benchmark, mode, [path.name for path in found]))
    return found


def _pages_with_new_files(
    app: Sphinx, env: BuildEnvironment, added: set, changed: set, removed: set
) -> list[str]:
    repo = Path(app.config.results_repo)
    outdated = []
    for page, metadata in env.metadata.items():
        for folder, benchmark, mode, names in metadata.get("measured_files", []):
            now = [path.name for path in files(repo, folder, benchmark, mode)]
            if now != names:
                outdated.append(page)
    return outdated


def note_changes(env: BuildEnvironment, repo: Path) -> list[CostChange]:
    """The changelog's changes of costs; the page is read again when the changelog is edited."""
    file = repo / CHANGELOG
    if file.exists():
        env.note_dependency(str(file))
    return cost_changes(repo)


def earlier_version(outdated: list[dict]) -> list[nodes.Node]:
    """The notice above rows, or a trace, whose cost has changed since."""
    if not outdated:
        return []
    names = ", ".join(dict.fromkeys(row["name"] for row in outdated))
    codes = ", ".join(dict.fromkeys(code_in_words(row) for row in outdated))
    words = nodes.strong("", "Measured on an earlier version")
    which = nodes.Text(f", {codes}: {names}. The cost has changed since: see the changelog.")
    return [nodes.container("", nodes.paragraph("", "", words, which), classes=["result-stale"])]


def not_measured(name: str) -> nodes.paragraph:
    return nodes.paragraph("", f"Not measured yet ({name}).", classes=["result-none"])


def device_tabs(tabs: list[tuple[str, list[nodes.Node]]]) -> list[nodes.Node]:
    """One tab a machine, the last first; a single one needs no tab."""
    if len(tabs) == 1:
        return tabs[0][1]
    tab_set = create_component("tab-set", classes=["sd-tab-set"])
    for number, (label, content) in enumerate(reversed(tabs)):
        item = create_component("tab-item", classes=["sd-tab-item"], selected=number == 0)
        item += nodes.rubric(label, label, classes=["sd-tab-label"])
        item += create_component("tab-content", classes=["sd-tab-content"], children=content)
        tab_set += item
    return [tab_set]


def setup(app: Sphinx) -> dict[str, object]:
    app.setup_extension("lanes")
    app.setup_extension("sphinx_design")
    app.add_config_value("results_repo", str(REPO), "env")
    app.add_directive("result-figure", ResultFigure)
    app.add_directive("result-table", ResultTable)
    app.add_directive("result-gain", ResultGain)
    app.add_directive("first-table", FirstTableDirective)
    app.add_directive("headline-table", HeadlineTableDirective)
    app.connect("env-get-outdated", _pages_with_new_files)
    app.add_css_file("results.css")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
