"""The files that measurements leave: ``benchmarks/results`` and ``benchmarks/traces``.

Reading, checking and describing them, for the pages, the README's table and ``make lint``. Nothing
here measures.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from itertools import chain
from pathlib import Path

from harness.recipe import code_sha256

REQUIRED = {
    "benchmark": str,
    "code_sha256": dict,
    "torch": str,
    "device": str,
    "driver": str,
    "ranks": int,
    "date": str,
    "workload": dict,
    "link": dict,
    "rows": list,
}
PARAMETERS = {
    "model": ("llama-1b", "llama-8b-blocks", "llama-8b", "llama-tiny", "synthetic"),
    "loop": ("reads", "free"),
    "compiled": (False, True),
    "storage": ("memory", "disk"),
    "step": ("long", "short"),
    **{"tokens": (), "layers": (), "every": (), "point": ()},
}
"""What may be varied between rows of one name, and the order in which values are shown."""

PARAMETER_HEADINGS = {
    "model": "Model",
    "loop": "Loop",
    "compiled": "Compiled",
    "storage": "Storage",
    "step": "Step",
    "tokens": "Tokens a step",
    "layers": "Layers",
    "every": "Steps from save to save",
    "point": "Struck at",
}


def shown(value: object) -> str:
    """A parameter's value as pages show it and as ``:where:`` names it."""
    if isinstance(value, bool):
        return yes_no(value)
    return "–" if value is None else str(value)


TRACE_LANES = {
    "compute": "compute",
    **{"copy": "copy", "H2D": "copy", "D2H": "copy"},
    **{"gather": "communication", "reduce-scatter": "communication"},
    **{"host": "stall", "write": "write"},
}
"""The lanes of a trace, from top to bottom, and the kind of what is drawn in each."""

ROW_RECIPES = {
    "async_save": "async_save",
    "pinned": "pinned_staging",
    "default_stager_as_published": "default_stager",
    "default_stager_ordered": "default_stager",
    "cure_turns": "staging_copies",
    "overlapped": "overlapped_stager",
    "overlapped_snapshot": "overlapped_stager",
    "overlapped_writer": "overlapped_writer",
    "three_streams": "three_streams",
    "streamed": "weight_streaming",
    "streamed_adam": "whole_step",
    "streamed_adam_in_backward": "whole_step",
    "activation_offload": "activation_offload",
    "activation_offload_half": "activation_offload",
    "checkpoint_activation_offload": "activation_offload",
    "selective_activation_offload": "activation_offload",
    "fsdp2_tuned": "fsdp2_settings",
    "fsdp2_reduce_group": "fsdp2_settings",
    "fsdp2_in_place": "in_place_gather",
    "fsdp2_copy_engine": "copy_engine_gather",
    "fsdp2_copy_engine_reduce": "copy_engine_reduce",
    "delayed_release": "stream_context",
    "prefetch": "prefetch_schedule",
    "prefetch_copy_engine": "prefetch_schedule",
    "update_in_order": "update_in_order",
}
"""The recipe that a row measures, where its name is not the row's."""

ROW_ORDER = (
    *("none", "torch_save", "dcp_save", "async_save", "pinned"),
    *("default_stager_as_published", "default_stager_ordered"),
    *("overlapped", "overlapped_snapshot", "overlapped_writer", "process"),
    *("cure_at_once", "cure_tiny_kernel", "cure_paced", "cure_turns"),
    *("resident", "resident_whole_recompute", "resident_all_saved", "resident_zeros"),
    *("streamed", "streamed_adam", "streamed_adam_in_backward", "larger_than_device", "host"),
    *("pageable", "pageable_non_blocking", "pinned_blocking", "one_stream"),
    *("three_streams", "record_stream", "fsdp2_cpu_offload"),
    *("activation_offload", "activation_offload_half", "checkpoint"),
    *("checkpoint_activation_offload", "selective", "selective_activation_offload", "save_on_cpu"),
    *("checkpoint_save_on_cpu", "checkpoint_trl", "checkpoint_unsloth"),
    *("no_communication", "fsdp2_no_collectives", "fsdp2", "fsdp2_reduce_group", "fsdp2_tuned"),
    "fsdp2_in_place",
    *("fsdp2_copy_engine", "fsdp2_copy_engine_reduce"),
    *("delayed_release", "prefetch", "prefetch_copy_engine", "update_in_order"),
)
"""Rows in the order in which pages show them; peers, by their package's name, come after."""


class ResultError(ValueError):
    """A result or trace file cannot be used as it is; the message names file and field."""


ROUNDS_UP_TO_ONE = 0.9995  # with three significant digits: 999.6 ms are 1.00 s


def seconds(value: float) -> str:
    """``value`` seconds with three significant digits and a unit: ``2.5 ms``, ``15.9 s``."""
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if abs(value * factor) >= ROUNDS_UP_TO_ONE or unit == "µs" or value == 0:
            return f"{_digits(value * factor)} {unit}"
    raise AssertionError("unreachable")


def round_seconds(value: float) -> str:
    """:func:`seconds` without zeros after the point, for an axis: ``100 ms``, ``0.5 s``."""
    number, unit = seconds(value).split()
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"


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


def count(value: float) -> str:
    return f"{value:,.0f}"


def yes_no(value: bool) -> str:
    return "yes" if value else "no"


def _digits(value: float) -> str:
    if value == 0:
        return "0"
    value = float(f"{value:.2e}")  # rounded first: it may gain a digit
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


@dataclass(frozen=True)
class Column:
    """A field of a row: its heading on the page and how its value is written."""

    field: str
    heading: str
    write: Callable[[float], str]

    def known(self, row: dict) -> bool:
        value = row.get(self.field)
        return value is not None and value == value  # a median of no samples is NaN

    def cell(self, row: dict) -> str:
        return self.write(row[self.field]) if self.known(row) else "–"

    @property
    def in_seconds(self) -> bool:
        return self.write is seconds

    def on_axis(self, value: float) -> str:
        """``value`` without zeros after the point: ``100 ms``, ``0.5 s``, ``95 %``."""
        if value == 0:
            return "0"
        number, unit = self.write(value).split()
        return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"


@dataclass(frozen=True)
class Benchmark:
    """How a benchmark's results are shown.

    ``bars`` is drawn by row, on a logarithmic axis where ``logarithmic``; where rows vary in
    ``over``, ``lines`` is drawn over it instead. ``readme`` names the columns of the README, the
    first of them over tokens where ``lines`` is; without any, the README leaves it out.
    """

    title: str
    columns: tuple[Column, ...]
    readme: tuple[str, ...]
    bars: str
    logarithmic: bool = False
    lines: str | None = None
    over: str = "tokens"

    def column(self, field: str) -> Column:
        return next(column for column in self.columns if column.field == field)


def largest_sample(samples: dict[str, list]) -> str:
    return str(max(map(len, samples.values()), default=0))


def _interval(stem: str, write: Callable[[float], str], unit: str = "") -> tuple[Column, Column]:
    """The columns of a median's interval, right behind the median's."""
    return (
        Column(f"{stem}_low{unit}", "95 % from", write),
        Column(f"{stem}_high{unit}", "to", write),
    )


_SAMPLES = Column("samples", "Samples", largest_sample)
_BOUND = Column("bound_s", "Bound", seconds)
_MEMORY = (
    Column("peak_allocated_bytes", "Peak allocated", byte_count),
    Column("peak_reserved_bytes", "Peak reserved", byte_count),
)

BENCHMARKS = {
    "checkpoint_stall": Benchmark(
        title="What one save costs training",
        columns=(
            Column("staging_cost_s", "Staging costs", seconds),
            *_interval("staging_cost", seconds, "_s"),
            Column("cost_s", "The whole save costs", seconds),
            *_interval("cost", seconds, "_s"),
            Column("upload_slowdown", "Step time during upload", slowdown),
            *_interval("upload_slowdown", slowdown),
            Column("first_exposed_stall_s", "The first save costs", seconds),
            Column("call_s", "Call", seconds),
            Column("staged_s", "Staged after", seconds),
            _BOUND,
            Column("uploaded_s", "Uploaded after", seconds),
            Column("uploaded_idle_s", "Uploaded, GPU idle", seconds),
            Column("write_bytes_per_s", "Written at", rate),
            Column("storage_bytes_per_s", "The storage takes", rate),
            Column("step_s", "Step time", seconds),
            Column("tensors", "Tensors", count),
            Column("bytes_written", "Written", byte_count),
            Column("pinned_bytes", "Pinned memory", byte_count),
            Column("host_peak_bytes", "Host peak", byte_count),
            Column("loaded_back_bitwise", "Loads back bit by bit", yes_no),
            Column("elements_differing", "Elements that differ", share),
            _SAMPLES,
        ),
        readme=(
            *("staging_cost_s", "cost_s", "upload_slowdown", "write_bytes_per_s"),
            "loaded_back_bitwise",
        ),
        bars="staging_cost_s",
        logarithmic=True,
    ),
    "save_interval": Benchmark(
        title="How often one can save",
        columns=(
            Column("kept", "Throughput kept", share),
            *_interval("kept", share),
            Column("step_s", "Step time", seconds),
            Column("saves", "Saves", count),
            Column("saves_skipped", "Skipped, the last not written yet", count),
            _SAMPLES,
        ),
        readme=(),
        bars="kept",
        lines="kept",
        over="every",
    ),
    "soak": Benchmark(
        title="Saves that are struck",
        columns=(
            Column("trials", "Trials", count),
            Column("lost", "Lost or wrong", count),
            Column("hung", "Hung", count),
            Column("left", "Left a process", count),
            Column("longest_s", "The longest took", seconds),
        ),
        readme=(),
        bars="trials",
    ),
    "save_faults": Benchmark(
        title="The same faults, other ways of saving",
        columns=(
            Column("trials", "Trials", count),
            Column("lost", "Lost what was durable", count),
            Column("mixed", "Resumed with other bits", count),
            Column("cannot_resume", "Could not resume", count),
            Column("hung", "Hung", count),
            Column("training_ended", "A failed save ended training", count),
        ),
        readme=(),
        bars="lost",
    ),
    "restart": Benchmark(
        title="From a kill to the next step",
        columns=(
            Column("noticed_s", "Noticed, ranks ended, started", seconds),
            *(Column(f"{p}_s", p.capitalize(), seconds) for p in ("import", "join", "build")),
            Column("choose_s", "Checkpoint chosen, digests read", seconds),
            Column("load_s", "Loaded", seconds),
            Column("first_step_s", "First step", seconds),
            Column("total_s", "In all", seconds),
            _SAMPLES,
        ),
        readme=(),
        bars="total_s",
    ),
    "staging_copies": Benchmark(
        title="Copies to the host beside a loop that reads",
        columns=(
            Column("staging_cost_s", "Copies cost", seconds),
            *_interval("staging_cost", seconds, "_s"),
            Column("staged_s", "Copied after", seconds),
            _BOUND,
            Column("call_s", "Call", seconds),
            Column("step_s", "Step time", seconds),
            _SAMPLES,
        ),
        readme=(),
        bars="staging_cost_s",
    ),
    "offload_step": Benchmark(
        title="Whole steps with layers and optimizer on the host",
        columns=(
            Column("step_s", "Step time", seconds),
            _BOUND,
            Column("eta", "Bound over step time", share),
            Column("kept", "Resident step over step time", share),
            *_MEMORY,
            Column("pinned_bytes", "Pinned memory", byte_count),
            Column("device_state_bytes", "State on the device", byte_count),
            Column("host_parameters", "Parameters on the host", count),
            Column("parameters", "Parameters", count),
            Column("fits_resident", "Would fit resident", count),
            Column("update_s", "Update alone", seconds),
            Column("update_bytes_per_s", "Update, bytes a second", byte_count),
            Column("yardstick_bytes_per_s", "Plain pass, bytes a second", byte_count),
            Column("share_of_yardstick", "Update over plain pass", share),
            Column("first_loss", "First loss", str),
            Column("last_loss", "Last loss", str),
            _SAMPLES,
        ),
        readme=("kept",),
        bars="step_s",
        lines="eta",
    ),
    "offload_memory": Benchmark(
        title="Memory with weights on the host",
        columns=(
            Column("parameters", "Parameters", count),
            Column("state_bytes", "Weights, gradients, optimizer", byte_count),
            Column("state_over_device", "Of the device's memory", share),
            *_MEMORY,
            Column("pinned_bytes", "Pinned memory", byte_count),
            Column("step_s", "Step time", seconds),
            Column("first_loss", "First loss", str),
            Column("last_loss", "Last loss", str),
            _SAMPLES,
        ),
        readme=(),
        bars="peak_reserved_bytes",
        lines="peak_reserved_bytes",
        over="layers",
    ),
    "three_streams": Benchmark(
        title="Chunks to the device, through a kernel, and back",
        columns=(
            Column("step_s", "All chunks", seconds),
            Column("call_s", "Host held", seconds),
            _BOUND,
            Column("eta", "Bound over time", share),
            Column("hidden_share", "Copies behind kernels", share),
            Column("peak_reserved_bytes", "Reserved", byte_count),
            Column("pinned_bytes", "Pinned memory", byte_count),
            _SAMPLES,
        ),
        readme=(),
        bars="step_s",
    ),
    "activation_offload": Benchmark(
        title="Activations on the host",
        columns=(
            Column("step_s", "Step time", seconds),
            Column("over_checkpoint", "Over checkpoint", slowdown),
            *_MEMORY,
            Column("pinned_bytes", "Pinned memory", byte_count),
            _SAMPLES,
        ),
        readme=(),
        bars="peak_allocated_bytes",
    ),
    "fsdp_overlap": Benchmark(
        title="Communication hidden behind compute",
        columns=(
            Column("step_s", "Step time", seconds),
            Column("efficiency", "Speed against no communication", share),
            *_interval("efficiency", share),
            Column("speed_over_fsdp2", "Speed against fsdp2", share),
            *_interval("speed_over_fsdp2", share),
            Column("speed_over_no_collectives", "Against fsdp2_no_collectives", share),
            *_interval("speed_over_no_collectives", share),
            Column("bitwise_steps", "Steps with every bit of fsdp2", count),
            Column("pairs", "Of pairs of windows", count),
            Column("efficiency_spread", "Their quartiles apart", share),
            _BOUND,
            Column("eta", "Bound over step time", share),
            Column("hidden_share", "Hidden", share),
            Column("gemm_slowdown", "GEMM beside a gather", slowdown),
            *_MEMORY,
            Column("peak_device_bytes", "Peak on device", byte_count),
            _SAMPLES,
        ),
        readme=("efficiency",),
        bars="step_s",
        lines="efficiency",
    ),
}


@dataclass(frozen=True)
class Result:
    """One result file, checked."""

    path: Path
    data: dict

    @property
    def machine(self) -> str:
        return f"{self.data['ranks']} × {self.data['device']}"

    @property
    def rows(self) -> list[dict]:
        """The rows in the order in which pages show them."""

        def key(row: dict) -> tuple:
            case = tuple(
                _place(row[parameter], order) if parameter in row else (-1, "")
                for parameter, order in PARAMETERS.items()
            )
            return case, _place(row["name"], ROW_ORDER)

        return sorted(self.data["rows"], key=key)

    def hashes_of(self, rows: list[dict]) -> dict[str, str]:
        """Recipe → code hash, as measured, of the recipes that ``rows`` measure."""
        named = (row.get("recipes", [ROW_RECIPES.get(row["name"])]) for row in rows)
        measured = set(chain.from_iterable(named))
        return {name: sha for name, sha in self.data["code_sha256"].items() if name in measured}

    def missing(self, names: list[str]) -> list[str]:
        """Those of ``names`` that have no row.

        Raises:
            ResultError: one of them is no row's name, here or anywhere.
        """
        absent = [name for name in names if name not in {row["name"] for row in self.rows}]
        known = {*ROW_ORDER, *self.data.get("not_run", {})}
        if unknown := [name for name in absent if name not in known]:
            raise ResultError(f"{self.path.name}: no row is called {', '.join(unknown)}")
        return absent

    def varied(self) -> list[str]:
        """The parameters that rows have."""
        return [p for p in PARAMETERS if any(p in row for row in self.rows)]

    def origin(self, rows: list[dict]) -> str:
        """One sentence: where and when ``rows`` were measured, and beside what else."""
        data = self.data
        place = (
            f"{self.machine}, torch {data['torch']}, driver {data['driver']}, "
            f"{data['ranks']} {'rank' if data['ranks'] == 1 else 'ranks'}, {data['date']}"
        )
        for other in dict.fromkeys(row["beside"] for row in rows if "beside" in row):
            beside = [row for row in rows if row.get("beside") == other]
            names = ", ".join(dict.fromkeys(row["name"] for row in beside))
            place += f", beside {other}" + (f" ({names})" if len(beside) < len(rows) else "")
        return place


def _place(value: object, order: tuple) -> tuple:
    """Sort key: the values in ``order`` first, all others after them by themselves."""
    return (order.index(value), "") if value in order else (len(order), value)


def in_words(facts: dict) -> str:
    """``{"tokens_per_step": 8192}`` → ``tokens per step 8192``; ends of names give the unit."""
    parts = []
    for key, value in facts.items():
        unit = re.search(r"_bytes_per_s$|_bytes(?=_|$)|_s$", key)
        if unit and isinstance(value, int | float):
            write = {"_bytes_per_s": rate, "_s": seconds}.get(unit[0], byte_count)
            key, value = key.replace(unit[0], "", 1), write(value)
        if isinstance(value, dict):
            value = " or ".join(f"{v} ({case})" for case, v in value.items())
        parts.append(f"{key.replace('_', ' ')} {value}")
    return ", ".join(parts)


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
    for field, kind in REQUIRED.items():
        if not isinstance(data.get(field), kind):
            raise ResultError(f"{path.name}: '{field}' is missing or not a {kind.__name__}")
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
    columns = BENCHMARKS[data["benchmark"]].columns
    numbers = [column.field for column in columns if column is not _SAMPLES]
    for number, row in enumerate(data["rows"]):
        if not isinstance(row.get("name"), str) or not isinstance(row.get("samples"), dict):
            raise ResultError(f"{path.name}: row {number} needs 'name' (str), 'samples' (dict)")
        for field in numbers:
            value = row.get(field)
            if value is not None and not isinstance(value, int | float):
                raise ResultError(f"{path.name}: '{field}' of row {row['name']} is not a number")
    return Result(path, data)


def load_trace(path: Path) -> dict:
    """Read a trace that a page draws: Chrome trace format, ``args.lane`` on drawn events.

    Raises:
        ResultError: not JSON, no origin in ``otherData``, or an event that cannot be drawn.
    """
    data = _read(path)
    other = data.get("otherData", {})
    for field in ("device", "ranks", "torch", "date"):
        if field not in other:
            raise ResultError(f"{path.name}: 'otherData' lacks '{field}'")
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


def changed_recipes(hashes: dict[str, str], repo: Path) -> list[str]:
    """The recipes among ``hashes`` (file stem → code hash) whose code is not what was measured."""
    present = {path.stem: path for path in (repo / "recipes_source").rglob("*.py")}
    return sorted(
        name
        for name, measured in hashes.items()
        if name not in present or code_sha256(present[name]) != measured
    )


def stale_results(repo: Path) -> list[str]:
    """One line for each committed result or trace whose recipes' code has changed since.

    Raises:
        ResultError: a file cannot be read.
    """
    lines = []
    for folder, read in (
        ("results", lambda path: load(path).data["code_sha256"]),
        ("traces", lambda path: load_trace(path)["otherData"].get("code_sha256", {})),
    ):
        for path in sorted((repo / "benchmarks" / folder).glob("*.json")):
            if changed := changed_recipes(read(path), repo):
                lines.append(
                    f"benchmarks/{folder}/{path.name}: measured on an earlier version of "
                    f"{', '.join(changed)}"
                )
    return lines
