"""Losses of a result file drawn as lines: the ``losses`` directive.

    .. losses:: eight_bit_loss

One line for each name of the file's rows: the mean over their seeds, and over ``SMOOTHED`` steps.
"""

import json
import statistics
from html import escape
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

WIDTH, HEIGHT = 345, 190  # as narrow as a phone's column, in the units of ``lanes``
LEFT, RIGHT, TOP, BOTTOM = 34, 335, 12, 160
SMOOTHED = 10
DASHES = ("", "5 4")


def lines_of(rows: list[dict]) -> dict[str, list[float]]:
    """By name the mean loss of all seeds, smoothed."""
    by_name: dict[str, list[list[float]]] = {}
    for row in rows:
        by_name.setdefault(row["name"], []).append(row["samples"]["loss"])
    found = {}
    for name, seeds in by_name.items():
        means = [statistics.mean(step) for step in zip(*seeds, strict=True)]
        windows = range(SMOOTHED, len(means) + 1)
        found[name] = [statistics.mean(means[end - SMOOTHED : end]) for end in windows]
    return found


def svg(lines: dict[str, list[float]]) -> str:
    highest = max(max(line) for line in lines.values())
    steps = max(len(line) for line in lines.values())
    last = f"{steps + SMOOTHED - 1} steps"
    parts = [
        f'<line x1="{LEFT}" x2="{RIGHT}" y1="{BOTTOM}" y2="{BOTTOM}" class="lanes-base"/>',
        f'<text x="{LEFT - 6}" y="{TOP + 4}" text-anchor="end">{highest:.1f}</text>',
        f'<text x="{LEFT - 6}" y="{BOTTOM}" text-anchor="end">0</text>',
        f'<text x="{RIGHT}" y="{BOTTOM + 18}" text-anchor="end">{last}</text>',
    ]
    for number, (name, line) in enumerate(lines.items()):
        points = []
        for step, loss in enumerate(line):
            x = LEFT + step / (steps - 1) * (RIGHT - LEFT)
            y = BOTTOM - loss / highest * (BOTTOM - TOP)
            points.append(f"{x:.1f},{y:.1f}")
        stroke = f'fill="none" stroke="currentColor" stroke-dasharray="{DASHES[number]}"'
        parts.append(f'<polyline points="{" ".join(points)}" stroke-width="1.5" {stroke}/>')
        y = TOP + 14 + 18 * number
        parts.append(f'<line x1="230" x2="262" y1="{y - 4}" y2="{y - 4}" {stroke}/>')
        parts.append(f'<text x="270" y="{y}">{escape(name)}</text>')
    return "\n".join(parts)


class Losses(Directive):
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        env = self.state.document.settings.env
        folder = Path(env.app.srcdir) / "benchmarks" / "results"
        path = sorted(folder.glob(f"{self.arguments[0]}.*.json"))[0]
        env.note_dependency(str(path))
        rows = json.loads(path.read_text())["rows"]
        said = []
        for row in rows:
            said.append(f"{row['name']}, seed {row['seed']}: {row['last_loss']:.4f}")
        words = f"Mean losses at the end: {'; '.join(said)}."
        html = (
            f'<figure class="lanes"><div class="lanes-picture"><svg class="lanes-svg" role="img" '
            f'style="max-width: {WIDTH * 1.4:.0f}px" viewBox="0 0 {WIDTH} {HEIGHT}" font-size="13" '
            f'aria-label="{escape(words)}">\n{svg(lines_of(rows))}\n</svg></div>'
            f"<figcaption>{escape(words)}</figcaption></figure>"
        )
        return [nodes.raw("", html, format="html")]


def setup(app: Sphinx) -> dict:
    app.add_directive("losses", Losses)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
