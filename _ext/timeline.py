"""Measured timelines: ``.. timeline:: <benchmark> <mode> [<mode> ...]``.

Draws ``benchmarks/traces/<benchmark>.<mode>.<device>-x<ranks>.json``, one panel a mode, all panels
of a machine on one time axis, and offers each trace for download. A trace is in Chrome's format
(``ts`` and ``dur`` in µs); an event is drawn in the lane that its ``args.lane`` names, as a stall
where ``args.stall`` is true; an instant event with ``args.mark`` true is a dashed line. Panels
start together at ``otherData.start_ts`` (µs, default: the first drawn event).
"""

import os
from pathlib import Path

from docutils import nodes
from lanes import Bar, Lane, Mark, Panel, draw, listing, picture
from results import device_tabs, earlier_version, not_measured, note_recipes, remember
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from benchmarks.result_files import (
    TRACE_LANES,
    ResultError,
    device_and_ranks,
    load_trace,
    measured_by_trace,
    round_number,
    seconds,
)

US = 1e-6
TINY = 1 / 400  # share of the axis below which neither a bar nor a gap can be told apart


def end_of(event: dict) -> float:
    return event["ts"] + event["dur"]


def read_panel(title: str, trace: dict) -> Panel:
    """The drawn events of ``trace`` as lanes, in seconds from its start."""
    drawn = [event for event in trace["traceEvents"] if "lane" in event.get("args", {})]
    start = trace["otherData"].get("start_ts", min(event["ts"] for event in drawn))
    finish = max(map(end_of, drawn))
    tiny = (finish - start) * US * TINY

    def bar_of(event: dict, kind: str) -> Bar:
        return Bar(
            max(0.0, event["ts"] - start) * US, (end_of(event) - start) * US, event["name"], kind
        )

    lanes = []
    for name, kind in TRACE_LANES.items():
        mine = [event for event in drawn if event["args"]["lane"] == name and end_of(event) > start]
        stalls = [bar_of(event, "stall") for event in mine if event["args"].get("stall", False)]
        others = [bar_of(event, kind) for event in mine if not event["args"].get("stall", False)]
        stalls, others = merge(stalls, tiny), merge(others, tiny)
        bars = stalls + [bar for bar in others if not hidden(bar, stalls, tiny)]
        if bars:
            lanes.append(Lane(name, tuple(sorted(bars, key=lambda bar: bar.start))))
    marks = [
        Mark((event["ts"] - start) * US, event["name"])
        for event in trace["traceEvents"]
        if event.get("args", {}).get("mark") is True
    ]
    return Panel(title, tuple(lanes), tuple(sorted(marks, key=lambda mark: mark.at)))


def merge(bars: list[Bar], tiny: float) -> list[Bar]:
    """Join bars that overlap, and slivers that a gap below ``tiny`` parts from their neighbour.

    A joined bar keeps its name where all its parts have it.
    """
    merged: list[Bar] = []
    for bar in sorted(bars, key=lambda bar: bar.start):
        last = merged[-1] if merged else None
        sliver = last and min(bar.end - bar.start, last.end - last.start) < 4 * tiny
        if last and (bar.start < last.end - tiny or (sliver and bar.start - last.end < tiny)):
            label = bar.label if bar.label == last.label else ""
            merged[-1] = Bar(last.start, max(last.end, bar.end), label, last.kind)
        else:
            merged.append(bar)
    return merged


def hidden(bar: Bar, stalls: list[Bar], tiny: float) -> bool:
    """Whether ``bar`` is a sliver within a stall, which drawn would look like much more."""
    within = (stall.start - tiny < bar.start and bar.end < stall.end + tiny for stall in stalls)
    return bar.end - bar.start < tiny and any(within)


def scale_bar(span: float) -> float:
    """The largest of 1, 2 or 5 times a power of ten that is at most a quarter of ``span``."""
    power = 10.0**9
    while True:
        for factor in (5, 2, 1):
            if factor * power <= span / 4:
                return factor * power
        power /= 10


class Timeline(SphinxDirective):
    required_arguments = 2
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        benchmark, modes = self.arguments[0], self.arguments[1].split()
        repo = Path(self.config.results_repo)
        machines, absent = {}, []
        for mode in modes:
            found = remember(self.env, repo, "traces", benchmark, mode)
            for path in found:
                machines.setdefault(device_and_ranks(path), []).append((mode, path))
            if not found:
                absent.append(mode)
        if not machines:
            return [not_measured(f"{benchmark}: {', '.join(modes)}")]
        tabs = [self._machine(machines[key], repo) for key in sorted(machines)]
        shown = device_tabs(tabs)
        return [*shown, not_measured(f"{benchmark}: {', '.join(absent)}")] if absent else shown

    def _machine(self, traces: list[tuple[str, Path]], repo: Path) -> tuple[str, list[nodes.Node]]:
        panels, changed, origins = [], set(), {}
        downloads = nodes.bullet_list("", classes=["timeline-downloads"])
        for mode, path in traces:
            try:
                trace = load_trace(path)
            except ResultError as error:
                raise self.error(str(error)) from error
            other = trace["otherData"]
            panels.append(read_panel(mode, trace))
            changed.update(note_recipes(self.env, repo, measured_by_trace(trace)))
            machine = f"{other['ranks']} × {other['device']}"
            model = other.get("model", "synthetic")
            origins[f"{model}; torch {other['torch']}, {other['date']}"] = None
            downloads += nodes.list_item("", nodes.paragraph("", "", self._download(path)))
        name = f"timeline-{self.env.new_serialno('lanes')}"
        words = (
            f"Measured on {machine} ({'; '.join(origins)}): {', '.join(m for m, _ in traces)}, "
            "rank 0, one time axis."
        )
        caption = nodes.caption("", words)
        text = listing(panels, seconds)
        span = max(bar.end for panel in panels for lane in panel.lanes for bar in lane.bars)
        length = scale_bar(span)
        scale = (length, round_number(seconds(length)))
        html = draw(panels, name=name, caption=words, text=text, scale=scale, label_every_bar=False)
        figure = nodes.figure("", picture(html, text), caption, classes=["lanes"])
        hint = nodes.paragraph(
            "",
            "The traces, in Chrome's format: open one in Perfetto or in chrome://tracing.",
            classes=["result-origin"],
        )
        return machine, [*earlier_version(sorted(changed), repo), figure, hint, downloads]

    def _download(self, path: Path) -> addnodes.download_reference:
        # Sphinx reads a leading slash as its source folder, so the path is relative to the page.
        page = Path(self.env.doc2path(self.env.docname)).parent
        target = os.path.relpath(path, page)
        name = nodes.literal("", path.name)
        return addnodes.download_reference("", "", name, reftarget=target, refdoc=self.env.docname)


def setup(app: Sphinx) -> dict[str, object]:
    app.setup_extension("results")
    app.add_directive("timeline", Timeline)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
