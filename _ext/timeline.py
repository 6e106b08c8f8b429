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
from folded import folded
from lanes import Bar, Lane, Mark, Panel, draw, listing, picture
from results import device_tabs, earlier_version, not_measured, note_changes, remember
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from benchmarks.code_versions import code_in_words
from benchmarks.result_files import (
    TRACE_LANES,
    ResultError,
    device_and_ranks,
    load_trace,
    round_number,
    seconds,
)

US = 1e-6
TINY = 1 / 400  # share of the axis below which neither a bar nor a gap can be told apart
SLIVER = 4  # a bar below so many times that share is a sliver


def end_of(event: dict) -> float:
    return event["ts"] + event["dur"]


def read_panel(title: str, trace: dict) -> Panel:
    """The drawn events of ``trace`` as lanes, in seconds from its start."""
    drawn = [event for event in trace["traceEvents"] if "lane" in event.get("args", {})]
    start = trace["otherData"].get("start_ts", min(event["ts"] for event in drawn))
    finish = max(end_of(event) for event in drawn)
    tiny = (finish - start) * US * TINY

    def bar_of(event: dict, kind: str) -> Bar:
        begin_s = max(0.0, event["ts"] - start) * US
        end_s = (end_of(event) - start) * US
        return Bar(begin_s, end_s, event["name"], kind)

    lanes = []
    for name, kind in TRACE_LANES.items():
        stalls = []
        others = []
        for event in drawn:
            if event["args"]["lane"] != name or end_of(event) <= start:
                continue
            if event["args"].get("stall", False):
                stalls.append(bar_of(event, "stall"))
            else:
                others.append(bar_of(event, kind))
        stalls = merge(stalls, tiny)
        others = merge(others, tiny)
        bars = stalls + [bar for bar in others if not hidden(bar, stalls, tiny)]
        if bars:
            lanes.append(Lane(name, tuple(sorted(bars, key=lambda bar: bar.start))))
    marks = []
    for event in trace["traceEvents"]:
        if event.get("args", {}).get("mark") is True:
            marks.append(Mark((event["ts"] - start) * US, event["name"]))
    return Panel(title, tuple(lanes), tuple(sorted(marks, key=lambda mark: mark.at)))


def merge(bars: list[Bar], tiny: float) -> list[Bar]:
    """Join neighbours that are drawn as one, see ``belong_together``.

    A joined bar keeps its name where all its parts have it.
    """
    merged: list[Bar] = []
    for bar in sorted(bars, key=lambda bar: bar.start):
        if merged and belong_together(merged[-1], bar, tiny):
            last = merged.pop()
            label = bar.label if bar.label == last.label else ""
            bar = Bar(last.start, max(last.end, bar.end), label, last.kind)
        merged.append(bar)
    return merged


def belong_together(first: Bar, second: Bar, tiny: float) -> bool:
    """Whether two bars overlap, or one is a sliver and the gap between them is below ``tiny``.

    Two long bars that touch stay two.
    """
    if second.start < first.end - tiny:
        return True
    shorter = min(first.end - first.start, second.end - second.start)
    return shorter < SLIVER * tiny and second.start - first.end < tiny


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
        benchmark = self.arguments[0]
        modes = self.arguments[1].split()
        repo = Path(self.config.results_repo)
        machines: dict[tuple[str, int], list[tuple[str, Path]]] = {}  # modes and their traces
        absent = []
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
        if self.env.docname.startswith("recipes/"):
            shown = folded(f"A measured timeline of {', '.join(modes)}", shown)
        if absent:
            shown = shown + [not_measured(f"{benchmark}: {', '.join(absent)}")]
        return shown

    def _machine(self, traces: list[tuple[str, Path]], repo: Path) -> tuple[str, list[nodes.Node]]:
        panels = []
        outdated = []
        origins = {}  # an ordered set of words
        downloads = nodes.bullet_list("", classes=["timeline-downloads"])
        for mode, path in traces:
            try:
                trace = load_trace(path)
            except ResultError as error:
                raise self.error(str(error)) from error
            other = trace["otherData"]
            panels.append(read_panel(mode, trace))
            row = {"name": mode, **other}
            benchmark = self.arguments[0]
            if any(change.outdates(benchmark, row) for change in note_changes(self.env, repo)):
                outdated.append(row)
            machine = f"{other['ranks']} × {other['device']}"
            model = other.get("model", "synthetic")
            code = f", version {code_in_words(other)}" if other["ours"] else ""
            origins[f"{model}; torch {other['torch']}, {other['date']}{code}"] = None
            downloads += nodes.list_item("", nodes.paragraph("", "", self._download(path)))
        name = f"timeline-{self.env.new_serialno('lanes')}"
        modes = [mode for mode, _ in traces]
        words = (
            f"Measured on {machine} ({'; '.join(origins)}): {', '.join(modes)}, "
            "rank 0, one time axis."
        )
        caption = nodes.caption("", words)
        text = listing(panels, seconds)
        ends = []
        for panel in panels:
            for lane in panel.lanes:
                ends += [bar.end for bar in lane.bars]
        length = scale_bar(max(ends))
        scale = (length, round_number(seconds(length)))
        html = draw(panels, name=name, caption=words, text=text, scale=scale, label_every_bar=False)
        figure = nodes.figure("", picture(html, text), caption, classes=["lanes"])
        hint = nodes.paragraph(
            "",
            "The traces, in Chrome's format: open one in Perfetto or in chrome://tracing.",
            classes=["result-origin"],
        )
        return machine, [*earlier_version(outdated), figure, hint, downloads]

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
