"""Losses of a result file drawn as lines: the ``losses`` directive.

    .. losses:: eight_bit_loss

One line for each name of the file's rows: the mean over their seeds, and over ``SMOOTHED`` steps.
"""

import statistics
from pathlib import Path

from docutils import nodes
from matplotlib.figure import Figure
from results import SERIES, TEXT, as_picture, blank_figure
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from benchmarks.result_files import files, load

SMOOTHED = 10
STYLES = ("-", "--")


def lines_of(rows: list[dict]) -> dict[str, list[float]]:
    """By name the mean loss of all seeds, smoothed."""
    by_name: dict[str, list[list[float]]] = {}
    for row in rows:
        by_name.setdefault(row["name"], []).append(row["samples"]["loss"])
    found = {}
    for name, seeds in by_name.items():
        means = [statistics.mean(step) for step in zip(*seeds, strict=True)]
        ends = range(SMOOTHED, len(means) + 1)
        found[name] = [statistics.mean(means[end - SMOOTHED : end]) for end in ends]
    return found


def drawn(lines: dict[str, list[float]]) -> Figure:
    figure = blank_figure(2.6, "")
    (axes,) = figure.axes
    for number, (name, losses) in enumerate(lines.items()):
        steps = range(SMOOTHED, SMOOTHED + len(losses))
        axes.plot(steps, losses, color=SERIES[number], linestyle=STYLES[number], label=name)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("Step", color=TEXT)
    axes.set_ylabel("Loss", color=TEXT)
    axes.legend(frameon=False, labelcolor=TEXT)
    return figure


class Losses(SphinxDirective):
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        path = files(Path(self.env.app.srcdir), "results", self.arguments[0])[0]
        self.env.note_dependency(str(path))
        rows = load(path).rows
        said = []
        for row in rows:
            said.append(f"{row['name']}, seed {row['seed']}: {row['last_loss']:.4f}")
        words = f"Mean losses at the end: {'; '.join(said)}."
        figure = drawn(lines_of(rows))
        return [
            as_picture(figure, "Losses over steps; at the end:", said),
            nodes.paragraph("", words),
        ]


def setup(app: Sphinx) -> dict:
    app.add_directive("losses", Losses)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
