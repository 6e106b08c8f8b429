"""The files that measurements leave: ``benchmarks/results`` and ``benchmarks/traces``.

Reading, checking and naming what is in them, for the pages and ``make lint``.
Nothing here measures. ``shown.toml`` has the order, headings and columns of what pages show. What a
value means is in the end of its field's name: ``_s``, ``_bytes``,
``_bytes_per_s``, ``_slowdown``; other whole numbers are counts and other fractions are shares.
"""

import json
import math
import re
import tomllib
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from benchmarks.code_versions import BEFORE_VERSIONS, CostChange, code_in_words

REQUIRED = {
    "benchmark": str,
    "torch": str,
    "device": str,
    "driver": str,
    "ranks": int,
    "date": str,
    "workload": dict,
    "link": dict,
    "rows": list,
}
SHOWN = tomllib.loads(Path(__file__).with_name("shown.toml").read_text(encoding="utf-8"))
PARAMETERS = SHOWN["parameters"]
TRACE_LANES = SHOWN["trace_lanes"]
FIRST_TABLE_NOTES = SHOWN["first_table_notes"]
API_NAMES = SHOWN["api_names"]
PEERS = SHOWN["peers"]
REFERENCES = set(SHOWN["references"].split())
ROW_RECIPES: dict[str, str] = {}
for _name, _rows in SHOWN["recipe_rows"].items():
    ROW_RECIPES |= dict.fromkeys(_rows.split(), _name)


class ResultError(ValueError):
    """A result or trace file cannot be used as it is; the message names file and field."""


# -- how values are written ------------------------------------------------------------------------

ROUNDS_UP_TO_ONE = 0.9995  # with three significant digits: 999.6 ms are 1.00 s


def seconds(value: float) -> str:
    """``value`` seconds with three significant digits and a unit: ``2.5 ms``, ``15.9 s``."""
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if abs(value * factor) >= ROUNDS_UP_TO_ONE or value == 0:
            return f"{_digits(value * factor)} {unit}"
    return f"{_digits(value * 1e6)} µs"


def byte_count(value: float) -> str:
    """``value`` bytes with three significant digits and a decimal unit: ``6.44 GB``."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= ROUNDS_UP_TO_ONE * factor:
            return f"{_digits(value / factor)} {unit}"
    return f"{value:.0f} B"


def rate(value: float) -> str:
    return f"{byte_count(value)}/s"


def slowdown(value: float) -> str:
    """A ratio of times as a change: 1.03 is ``+3.0 %``."""
    return f"{(value - 1) * 100:+.1f} %"


def share(value: float) -> str:
    """A share of one: 0.951 is ``95.1 %``."""
    return f"{value * 100:.1f} %"


def plain(value: object) -> str:
    """A flag, a count or a word, as pages show it and as ``:where:`` names it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _digits(value: float) -> str:
    if value == 0:
        return "0"
    value = float(f"{value:.2e}")  # rounded first: it may gain a digit
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


UNITS = {  # what a field's name ends in, perhaps before the end of an interval
    "_bytes_per_s": rate,
    "_bytes": byte_count,
    "_s": seconds,
    "_slowdown": slowdown,
    "over_checkpoint": slowdown,
    "_loss": plain,
    "steps_beside_upload": plain,
}


def written(name: str, value: object) -> str:
    """``value`` of the field ``name`` with its unit."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        for end, write in UNITS.items():
            if re.sub("_(low|high)$", "", name).endswith(end):
                return write(value)
        return share(value) if isinstance(value, float) else f"{value:,}"
    return plain(value)


def heading(name: str) -> str:
    words = re.sub("_bytes_per_s$|_bytes$|_s$", "", name).replace("_", " ")
    return SHOWN["headings"].get(name, words[:1].upper() + words[1:])


def round_number(text: str) -> str:
    """``text`` without zeros after the point, for an axis: ``100 ms``, ``0.5 s``, ``95 %``."""
    number, _, unit = text.partition(" ")
    if "." in number:
        number = number.rstrip("0").rstrip(".")
    return f"{number} {unit}".rstrip()


def in_words(facts: dict) -> str:
    """``{"tokens_per_step": 8192}`` → ``tokens per step 8192``; ends of names give the unit."""
    parts = []
    for key, value in facts.items():
        unit = re.search(r"_bytes_per_s$|_bytes(?=_|$)|_s$", key)
        if unit and isinstance(value, int | float):
            key = key.replace(unit[0], "", 1)
            write = UNITS[unit[0]]
            value = write(value)
        if isinstance(value, dict):
            value = " or ".join(f"{v} ({case})" for case, v in value.items())
        parts.append(f"{key.replace('_', ' ')} {value}")
    return ", ".join(parts)


# -- what pages show of a benchmark ----------------------------------------------------------------


@dataclass(frozen=True)
class Benchmark:
    """How a benchmark's results are shown.

    ``deciding`` fields are a table's columns, the first that rows have. ``bars`` is drawn by row,
    on a logarithmic axis where ``logarithmic``; where rows vary in tokens, ``lines`` is drawn over
    them instead. ``first_table`` names the columns of the first table, or the field that it
    shows over tokens where ``lines`` is; without any, there is no first table.
    """

    title: str
    deciding: str
    bars: str
    lines: str = ""
    first_table: str = ""
    logarithmic: bool = False


BENCHMARKS = {name: Benchmark(**shown) for name, shown in SHOWN["benchmarks"].items()}


def known(row: dict, name: str) -> bool:
    """Whether ``row`` has a value for the field ``name``; a median of no samples is NaN."""
    value = row.get(name)
    return value is not None and value == value


def cell(row: dict, name: str) -> str:
    return written(name, row[name]) if known(row, name) else "–"


def fields_of(row: dict) -> list[str]:
    """What ``row`` has measured, numbers and flags; no parameter and no end of an interval."""
    found = []
    for name, value in row.items():
        ends_interval = re.search("_(low|high)(_s)?$", name)
        if isinstance(value, int | float) and known(row, name):
            if name not in PARAMETERS and name not in ("ours", "clips") and not ends_interval:
                found.append(name)
    return found


@dataclass(frozen=True)
class Result:
    """One result file, checked."""

    path: Path
    data: dict

    @property
    def benchmark(self) -> Benchmark:
        return BENCHMARKS[self.data["benchmark"]]

    @property
    def machine(self) -> str:
        return f"{self.data['ranks']} × {self.data['device']}"

    @property
    def rows(self) -> list[dict]:
        """The rows in the order in which pages show them."""

        def key(row: dict) -> tuple:
            case = []
            for parameter, order in PARAMETERS.items():
                is_there = parameter in row
                case.append(_place(row[parameter], order) if is_there else (-1, ""))
            return case, _place(row["name"], SHOWN["row_order"])

        return sorted(self.data["rows"], key=key)

    def is_outdated(self, row: dict, changes: list[CostChange]) -> bool:
        """Whether one of the changelog's ``changes`` of costs is later than ``row``."""
        return any(change.outdates(self.data["benchmark"], row) for change in changes)

    def missing(self, names: list[str]) -> list[str]:
        """Those of ``names`` that have no row.

        Raises:
            ResultError: one of them is no row's name, here or on any machine.
        """
        absent = [name for name in names if name not in {row["name"] for row in self.rows}]
        anywhere = {*SHOWN["row_order"].split(), *self.data.get("not_run", {})}
        for path in self.path.parent.glob(f"{self.data['benchmark']}.*.json"):
            anywhere.update(row.get("name") for row in _read(path)["rows"])
        unknown = [name for name in absent if name not in anywhere]
        if unknown:
            raise ResultError(f"{self.path.name}: no row is called {', '.join(unknown)}")
        return absent

    def varied(self) -> list[str]:
        """The parameters that rows have."""
        return [p for p in PARAMETERS if any(p in row for row in self.rows)]

    def origin(self, rows: list[dict]) -> str:
        """One sentence: where and when ``rows`` were measured, and beside what else."""
        data = self.data
        driver = "" if data["driver"] == "none" else f"driver {data['driver']}, "
        ranks = f"{data['ranks']} {'rank' if data['ranks'] == 1 else 'ranks'}"
        place = f"{self.machine}, torch {data['torch']}, {driver}{ranks}, {data['date']}"
        place += code_of_rows(rows)
        for other in dict.fromkeys(row["beside"] for row in rows if "beside" in row):
            beside = [row for row in rows if row.get("beside") == other]
            place += f", beside {other}"
            if len(beside) < len(rows):  # not all of them: which
                names = ", ".join(dict.fromkeys(row["name"] for row in beside))
                place += f" ({names})"
        return place + "".join(f"; {run}" for run in of_other_runs(rows))


def code_of_rows(rows: list[dict]) -> str:
    """``, version 0.2.1 (2d0af2d821)``: which code of ours ``rows`` measured; empty for none."""
    ours = [row for row in rows if row["ours"]]
    codes = dict.fromkeys(code_in_words(row) for row in ours)
    return f", version {' and '.join(codes)}" if codes else ""


def of_other_runs(rows: list[dict]) -> list[str]:
    """``torchao, torchao_clipped: another host, 2026-11-23``: what was not in the file's run."""
    runs: dict[str, list[str]] = {}
    for row in rows:
        if "run" in row:
            names = runs.setdefault(row["run"], [])
            if row["name"] not in names:
                names.append(row["name"])
    return [f"{', '.join(names)}: {run}" for run, names in runs.items()]


def _place(value: object, order: str) -> tuple:
    """Sort key: the words of ``order`` first, all other values after them by themselves."""
    words = order.split()
    word = plain(value)
    if word in words:
        return words.index(word), ""
    return len(words), value


# -- reading ---------------------------------------------------------------------------------------


def files(repo: Path, folder: str, benchmark: str, mode: str | None = None) -> list[Path]:
    """The files of a benchmark in ``benchmarks/<folder>``, most ranks last."""
    stem = benchmark if mode is None else f"{benchmark}.{mode}"
    found = (repo / "benchmarks" / folder).glob(f"{stem}.*-x*.json")
    return sorted(found, key=lambda path: (*device_and_ranks(path), path.name))


def device_and_ranks(path: Path) -> tuple[str, int]:
    """``checkpoint_stall.h200-x2.json`` → ``("h200", 2)``.

    Raises:
        ResultError: the name does not end in ``.<device>-x<ranks>.json``.
    """
    device, _, ranks = path.stem.rpartition(".")[2].rpartition("-x")
    if not device or not ranks.isdecimal():
        raise ResultError(f"{path.name}: name it <benchmark>.<device>-x<ranks>.json")
    return device, int(ranks)


def _read(path: Path) -> dict:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ResultError(f"{path.name}:{error.lineno}: not JSON: {error.msg}") from error
    if not isinstance(data, dict):
        raise ResultError(f"{path.name}: must hold one JSON object")
    return data


def load(path: Path) -> Result:
    """Read a result file.

    Raises:
        ResultError: not JSON, a field is missing or of another type, or the file's name says
            something else than its content.
    """
    data = _read(path)
    for name, kind in REQUIRED.items():
        if not isinstance(data.get(name), kind):
            raise ResultError(f"{path.name}: '{name}' is missing or not a {kind.__name__}")
    if data["benchmark"] not in BENCHMARKS or data["benchmark"] != path.name.split(".")[0]:
        raise ResultError(
            f"{path.name}: 'benchmark' is {data['benchmark']!r}; it must be the file's first name "
            f"and one of {', '.join(BENCHMARKS)}"
        )
    if data["ranks"] != device_and_ranks(path)[1]:
        raise ResultError(f"{path.name}: 'ranks' is {data['ranks']}, the name says otherwise")
    try:
        date.fromisoformat(data["date"][:10])
    except ValueError as error:
        raise ResultError(f"{path.name}: 'date' must begin with YYYY-MM-DD") from error
    for number, row in enumerate(data["rows"]):
        if not isinstance(row.get("name"), str) or not isinstance(row.get("samples"), dict):
            raise ResultError(f"{path.name}: row {number} needs 'name' (str), 'samples' (dict)")
        check_code(path, row, f"row {row['name']}")
        for name, value in row.items():
            if name.endswith(tuple(UNITS)) and isinstance(value, str):
                raise ResultError(f"{path.name}: '{name}' of row {row['name']} is not a number")
    return Result(path, data)


def check_code(path: Path, of: dict, which: str) -> None:
    """That a row or a trace says whether it is of our code, and of which."""
    if not isinstance(of.get("ours"), bool) or not isinstance(of.get("version"), str):
        raise ResultError(f"{path.name}: {which} needs 'ours' (bool) and 'version' (str)")
    if of["version"] != BEFORE_VERSIONS and not of.get("commit"):
        raise ResultError(f"{path.name}: {which} lacks 'commit'")


def load_trace(path: Path) -> dict:
    """Read a trace that a page draws: Chrome trace format, ``args.lane`` on drawn events.

    Raises:
        ResultError: not JSON, no origin in ``otherData``, or an event that cannot be drawn.
    """
    data = _read(path)
    other = data.get("otherData", {})
    for name in ("device", "ranks", "torch", "date"):
        if name not in other:
            raise ResultError(f"{path.name}: 'otherData' lacks '{name}'")
    check_code(path, other, "'otherData'")
    drawn = [event for event in data.get("traceEvents", []) if "lane" in event.get("args", {})]
    if not drawn:
        raise ResultError(f"{path.name}: no event has 'args.lane'")
    for event in drawn:
        if event.get("ph") != "X" or event["args"]["lane"] not in TRACE_LANES:
            raise ResultError(
                f"{path.name}: event {event.get('name')!r}: a drawn event has 'ph' \"X\" and "
                f"'args.lane' in {', '.join(TRACE_LANES)}"
            )
    return data
