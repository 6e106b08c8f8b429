"""Timelines drawn as lanes of bars: the ``lanes`` directive and the renderer behind it.

The directive draws a schematic, one lane a line of its content::

    .. lanes:: Schematic: with ``async_save`` only the staging copy stops training

       training: 0-4 step 7; 4-5 stage !; 5-9 step 8; 9-13 step 9
       upload:   5-11 write checkpoint 7 ~
       @5 call returns

A lane is ``name: start-end label; start-end label``. Times have no unit: only order and
proportion are shown. A label that ends in ``!`` is a stall, one that ends in ``~`` is data moved
in the background, and a plain one is compute. The lane's name says what moves: a write in a lane
named after an upload or a write, communication in one named after a collective, a copy in any
other. ``@time text`` marks a moment in all lanes. Labels are plain text of at most 40 characters;
one that does not fit into its bar is written above it.

``_ext/timeline.py`` draws measured traces with the same renderer, so a colour means one thing on
the whole site.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

KINDS = {
    "compute": "compute",
    "copy": "copy",
    "communication": "communication",
    "write": "write",
    "stall": "stalls",
}
LONGEST_LABEL = 40
MOST_LISTED = 8  # bars of one kind that the text of a lane names one by one

WIDE, NARROW = 720, 345
FONT = 13
LINE = 17
BAR = 26
GAP = 10
CHARACTER = 0.56 * FONT

_NUMBER = r"\d+(?:\.\d+)?"
_BAR = re.compile(rf"({_NUMBER})\s*-\s*({_NUMBER})\s+(.*?)\s*([!~]?)$")
_MARK = re.compile(rf"@\s*({_NUMBER})\s+(\S.*)$")
_WRITE_LANE = re.compile(r"upload|write|disk|storage|save", re.IGNORECASE)
_COMMUNICATION_LANE = re.compile(r"gather|reduce|communicat", re.IGNORECASE)


@dataclass(frozen=True)
class Bar:
    """One stretch of time in a lane; ``kind`` is a key of :data:`KINDS`."""

    start: float
    end: float
    label: str
    kind: str


@dataclass(frozen=True)
class Lane:
    name: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Mark:
    """A moment that all lanes of a panel share."""

    at: float
    text: str


@dataclass(frozen=True)
class Panel:
    """Lanes drawn together; several panels share one time axis."""

    title: str
    lanes: tuple[Lane, ...]
    marks: tuple[Mark, ...] = ()


class LanesError(ValueError):
    """A line of a ``lanes`` directive cannot be read: its number, from 0, and what is wrong."""


def parse(content: list[str]) -> Panel:
    """Read the lines of a ``lanes`` directive; raises :class:`LanesError`."""
    lanes: list[Lane] = []
    marks: list[tuple[int, Mark]] = []
    lines = [(number, line.replace("``", "").strip()) for number, line in enumerate(content)]
    for number, text in filter(lambda line: line[1], lines):
        if text.startswith("@"):
            match = _MARK.match(text)
            if not match:
                raise LanesError(number, f"a mark is '@time text', not {text!r}")
            marks.append((number, Mark(float(match[1]), _label(match[2], number))))
            continue
        name, colon, rest = text.partition(":")
        if not colon or not name.strip() or not rest.strip():
            raise LanesError(number, f"a lane is 'name: start-end label; …', not {text!r}")
        lanes.append(Lane(_label(name.strip(), number), _bars(name, rest, number)))
    if not lanes:
        raise LanesError(0, "no lane: write at least one line 'name: start-end label'")
    end = max(bar.end for lane in lanes for bar in lane.bars)
    for number, mark in marks:
        if mark.at > end:
            raise LanesError(number, f"mark at {mark.at:g} lies after the last bar ({end:g})")
    return Panel("", tuple(lanes), tuple(mark for _, mark in marks))


def _bars(lane: str, text: str, number: int) -> tuple[Bar, ...]:
    bars: list[Bar] = []
    background = "write" if _WRITE_LANE.search(lane) else "copy"
    if _COMMUNICATION_LANE.search(lane):
        background = "communication"
    kinds = {"": "compute", "!": "stall", "~": background}
    for item in filter(None, (part.strip() for part in text.split(";"))):
        match = _BAR.match(item)
        if not match or not match[3]:
            raise LanesError(number, f"a bar is 'start-end label', not {item!r}")
        bar = Bar(float(match[1]), float(match[2]), _label(match[3], number), kinds[match[4]])
        if bar.end <= bar.start:
            raise LanesError(number, f"{item!r} ends before it starts")
        if bars and bar.start < bars[-1].end:
            raise LanesError(number, f"{item!r} starts before the bar to its left ends")
        bars.append(bar)
    if not bars:
        raise LanesError(number, "a lane needs at least one bar")
    return tuple(bars)


def _label(text: str, number: int) -> str:
    if len(text) > LONGEST_LABEL:
        raise LanesError(number, f"{text!r} is longer than {LONGEST_LABEL} characters")
    return text


def listing(panels: list[Panel], time: Callable[[float], str]) -> list[str]:
    """The drawing in words, one line a lane or mark; ``time`` formats a moment."""
    lines = []
    for panel in panels:
        title = f"{panel.title}, " if panel.title else ""
        for lane in panel.lanes:
            lines.append(f"{title}{lane.name}: {'; '.join(_in_words(lane, time))}")
        lines += [f"{title}at {time(mark.at)}: {mark.text}" for mark in panel.marks]
    return lines


def _in_words(lane: Lane, time: Callable[[float], str]) -> list[str]:
    words = []
    for kind in KINDS:
        bars = [bar for bar in lane.bars if bar.kind == kind]
        if len(bars) > MOST_LISTED:
            span = f"{time(bars[0].start)} to {time(bars[-1].end)}"
            words.append(f"{span} {kind} in {len(bars)} blocks")
    few = {kind for kind in KINDS if sum(b.kind == kind for b in lane.bars) <= MOST_LISTED}
    for bar in lane.bars:
        if bar.kind in few:
            note = f" ({KINDS[bar.kind]})" if bar.kind != "compute" else ""
            words.append(f"{time(bar.start)} to {time(bar.end)} {bar.label or bar.kind}{note}")
    return words


class _Drawing:
    """One SVG of a fixed width in user units; its height grows as rows are added."""

    def __init__(self, panels: list[Panel], width: int, name: str, label_every_bar: bool):
        self.width = width
        self.name = name
        self.label_every_bar = label_every_bar
        self.parts: list[str] = []
        self.y = 4.0
        names = [lane.name for panel in panels for lane in panel.lanes]
        self.names_beside = width > NARROW
        self.left = 18 + max(map(_text_width, names)) if self.names_beside else 2
        self.right = width - 10
        self.begin = min(b.start for p in panels for lane in p.lanes for b in lane.bars)
        self.finish = max(b.end for p in panels for lane in p.lanes for b in lane.bars)

    def x(self, time: float) -> float:
        share = (time - self.begin) / (self.finish - self.begin)
        return self.left + share * (self.right - self.left)

    def text(self, x: float, y: float, text: str, css: str = "", anchor: str = "start") -> None:
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" class="{css}" text-anchor="{anchor}">'
            f"{escape(text)}</text>"
        )

    def panel(self, panel: Panel) -> None:
        if panel.title:
            self.text(2, self.y + LINE - 4, panel.title, "lanes-title")
            self.y += LINE + 4
        mark_rows = _rows([self._beside_line(m) for m in panel.marks])
        top = self.y
        self.y += (max(mark_rows) + 1) * LINE + 6 if mark_rows else 0
        lines_at = len(self.parts)
        for lane in panel.lanes:
            self.lane(lane)
        lines = []
        for mark, row in zip(panel.marks, mark_rows, strict=True):
            start, _ = self._beside_line(mark)
            x, y = self.x(mark.at), top + row * LINE
            lines.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y + 2:.1f}" y2="{self.y - GAP + 3:.1f}"'
                ' class="lanes-mark"/>'
            )
            self.text(start, y + LINE - 4, mark.text, "lanes-mark-text")
        self.parts[lines_at:lines_at] = lines

    def _beside_line(self, mark: Mark) -> tuple[float, float]:
        start = self.x(mark.at) + 5
        width = _text_width(mark.text)
        if start + width > self.width:
            start = max(2.0, self.x(mark.at) - 5 - width)
        return start, start + width

    def lane(self, lane: Lane) -> None:
        outside = [b for b in lane.bars if self.label_every_bar and not self._fits(b)]
        spans = []
        for bar in outside:
            width = _text_width(bar.label)
            start = (self.x(bar.start) + self.x(bar.end) - width) / 2
            start = min(max(start, self.left), self.width - 2 - width)
            spans.append((start, start + width))
        if not self.names_beside:
            # The lane's name is written above it, in the row nearest to the bars.
            spans.insert(0, (2, 2 + _text_width(lane.name)))
        rows = _rows(spans)
        self.y += (max(rows) + 1) * LINE if rows else 0
        if not self.names_beside:
            self.text(2, self.y - 5, lane.name, "lanes-name")
            spans, rows = spans[1:], rows[1:]
        else:
            self.text(2, self.y + BAR / 2 + 4.5, lane.name, "lanes-name")
        for bar, (start, _), row in zip(outside, spans, rows, strict=True):
            self.text(start, self.y - 5 - row * LINE, bar.label, "lanes-label")
        self.parts.append(
            f'<line x1="{self.left:.1f}" x2="{self.right:.1f}" y1="{self.y + BAR:.1f}" '
            f'y2="{self.y + BAR:.1f}" class="lanes-base"/>'
        )
        for bar in lane.bars:
            self.bar(bar)
        self.y += BAR + GAP

    def bar(self, bar: Bar) -> None:
        x, end = self.x(bar.start), self.x(bar.end)
        width = max(end - x - 1, 1.0)
        shape = f'x="{x + 0.5:.1f}" y="{self.y:.1f}" width="{width:.1f}" height="{BAR}"'
        corner = f'rx="{min(5.0, width / 2):.1f}"'
        self.parts.append(f'<rect {shape} {corner} class="lanes-{bar.kind}"/>')
        if bar.kind == "stall":
            self.parts.append(f'<rect {shape} {corner} fill="url(#{self.name}-hatch)"/>')
        if bar.label and self._fits(bar):
            middle = (x + end) / 2
            self.text(middle, self.y + BAR / 2 + 4.5, bar.label, "lanes-inside", "middle")

    def _fits(self, bar: Bar) -> bool:
        return self.x(bar.end) - self.x(bar.start) >= _text_width(bar.label) + 8

    def axis(self, scale: tuple[float, str] | None) -> None:
        """A scale bar of ``scale`` = (duration, text), or an arrow where time has no unit."""
        y = self.y + 8
        if scale is None:
            self.text(self.right - 14, y + 4, "time", "lanes-note", "end")
            path = f"M{self.right - 10:.1f} {y:.1f}h9m-4 -4l4 4l-4 4"
        else:
            duration, text = scale
            length = self.x(self.begin + duration) - self.left
            self.text(self.left + length + 6, y + 4, text, "lanes-note")
            path = f"M{self.left:.1f} {y - 4:.1f}v8m0 -4h{length:.1f}m0 -4v8"
        self.parts.append(f'<path d="{path}" class="lanes-arrow"/>')
        self.y += 2 * LINE

    def svg(self) -> str:
        return (
            f'viewBox="0 0 {self.width} {self.y:.0f}" font-size="{FONT}">\n'
            f'<defs><pattern id="{self.name}-hatch" width="7" height="7" '
            'patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
            '<rect width="2" height="7" class="lanes-hatch"/></pattern></defs>\n'
            + "\n".join(self.parts)
            + "\n</svg>"
        )


def _text_width(text: str) -> float:
    return len(text) * CHARACTER


def _rows(spans: list[tuple[float, float]]) -> list[int]:
    """A row for each span such that spans in one row do not touch, lowest row first."""
    taken: list[list[tuple[float, float]]] = []
    rows = []
    for start, end in spans:
        row = 0
        while row < len(taken) and any(s < end + 8 and start < e + 8 for s, e in taken[row]):
            row += 1
        if row == len(taken):
            taken.append([])
        taken[row].append((start, end))
        rows.append(row)
    return rows


def draw(
    panels: list[Panel],
    *,
    name: str,
    caption: str,
    text: list[str],
    scale: tuple[float, str] | None = None,
    label_every_bar: bool = True,
) -> str:
    """HTML of a drawing: one SVG for wide columns, one for narrow ones, a legend and the text.

    A measured timeline, with ``label_every_bar`` off, has one, which scrolls in a narrow column.

    ``name`` is unique on the page; ``caption`` names the picture to a screen reader and ``text``
    (from :func:`listing`) describes it. ``scale`` is (duration, text) of a scale bar, in the unit
    of the bars. With ``label_every_bar`` a label wider than its bar is written above it, otherwise
    it is left out.
    """
    pictures = []
    sizes = {"wide": WIDE, "narrow": NARROW} if label_every_bar else {"only": WIDE}
    for size, width in sizes.items():
        drawing = _Drawing(panels, width, f"{name}-{size}", label_every_bar)
        for panel in panels:
            drawing.panel(panel)
        drawing.axis(scale)
        pictures.append(
            f'<svg class="lanes-svg lanes-{size}" xmlns="http://www.w3.org/2000/svg" role="img" '
            f'aria-label="{escape(caption)}" aria-describedby="{name}-text" {drawing.svg()}'
        )
    used = {bar.kind for panel in panels for lane in panel.lanes for bar in lane.bars}
    legend = "".join(
        f'<span><i class="lanes-key lanes-key-{kind}"></i>{words}</span> '
        for kind, words in KINDS.items()
        if kind in used
    )
    # The theme's Markdown twin of a page leaves out <aside> and keeps the list.
    return (
        f'<aside role="none" class="lanes-picture">\n{"".join(pictures)}\n'
        f'<p class="lanes-legend" aria-hidden="true">{legend}</p>\n</aside>\n'
        f'<ul id="{name}-text" hidden>'
        + "".join(f"<li>{escape(line)}</li>" for line in text)
        + "</ul>\n"
    )


class LanePicture(nodes.General, nodes.Element):
    """A drawing: ``html`` for HTML builders, its children (the listing) for all others."""


def picture(html: str, text: list[str]) -> LanePicture:
    items = [nodes.list_item("", nodes.paragraph("", line)) for line in text]
    return LanePicture("", nodes.bullet_list("", *items), html=html)


def _visit_html(self, node: LanePicture) -> None:
    self.body.append(node["html"])
    raise nodes.SkipNode


def _pass(self, node: LanePicture) -> None:
    pass


class Lanes(Directive):
    """``.. lanes:: caption``; its content is described at the top of this module."""

    has_content = True
    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        try:
            panel = parse(list(self.content))
        except LanesError as error:
            number, message = error.args
            line = self.content_offset + number + 1
            return [self.state.document.reporter.warning(f"lanes: {message}", line=line)]
        words = " ".join(self.arguments[0].split())
        if not words.lower().startswith("schematic"):
            words = f"Schematic. {words}"
        inline, messages = self.state.inline_text(words, self.lineno)
        caption = nodes.caption("", "", *inline)
        env = self.state.document.settings.env
        name = f"lanes-{env.new_serialno('lanes')}"
        text = listing([panel], lambda time: f"{time:g}")
        html = draw([panel], name=name, caption=caption.astext(), text=text)
        figure = nodes.figure("", picture(html, text), caption, classes=["lanes"])
        return [figure, *messages]


def setup(app: Sphinx) -> dict[str, object]:
    passes = (_pass, _pass)
    app.add_node(
        LanePicture, html=(_visit_html, None), text=passes, latex=passes, man=passes, texinfo=passes
    )
    app.add_directive("lanes", Lanes)
    app.add_css_file("lanes.css")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
