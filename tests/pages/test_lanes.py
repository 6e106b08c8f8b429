"""The ``lanes`` directive: what it draws, what it says, and what it refuses."""

import re
from pathlib import Path

import lanes
import pytest
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace

GOOD = """\
training:  0-4 step 7; 4-5 stage !; 5-9 step 8
upload:    5-8 write checkpoint 7 ~
copies:    0-2 fetch ~
@5 call returns
"""


def build(tmp_path: Path, page: str, builder: str = "html") -> tuple[str, str]:
    """Build a one-page site; return the page and the warnings."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "conf.py").write_text('extensions = ["lanes"]\nhtml_theme = "basic"\n')
    (source / "index.rst").write_text(page)
    out = tmp_path / "out"
    warnings = tmp_path / "warnings"
    with warnings.open("w") as stream, docutils_namespace():
        app = Sphinx(source, source, out, tmp_path / "trees", builder, status=None, warning=stream)
        app.build()
    suffix = {"html": "html", "text": "txt"}[builder]
    return (out / f"index.{suffix}").read_text(), warnings.read_text()


def page(content: str, caption: str = "Only staging stops training") -> str:
    body = "".join(f"   {line}\n" for line in content.splitlines())
    return f"Title\n=====\n\n.. lanes:: {caption}\n\n{body}"


def test_kinds_come_from_the_marker_and_the_name_of_the_lane():
    panel = lanes.parse(GOOD.splitlines())
    kinds = {lane.name: [bar.kind for bar in lane.bars] for lane in panel.lanes}
    assert kinds == {
        "training": ["compute", "stall", "compute"],
        "upload": ["write"],
        "copies": ["copy"],
    }
    assert panel.marks == (lanes.Mark(5.0, "call returns"),)


@pytest.mark.parametrize(
    ("content", "line", "says"),
    [
        ("", 0, "no lane"),
        ("training 0-4 step", 0, "a lane is"),
        ("training: 0-4 step\nupload:", 1, "a lane is"),
        ("training: 0-4", 0, "a bar is"),
        ("training: 4 step", 0, "a bar is"),
        ("training: 4-4 step", 0, "ends before it starts"),
        ("training: 0-4 step; 3-5 step", 0, "starts before the bar to its left ends"),
        ("training: 0-4 step\n@five call", 1, "a mark is"),
        ("training: 0-4 step\n\n@5 call", 2, "after the last bar"),
        ("training: 0-4 " + 41 * "x", 0, "longer than 40"),
    ],
)
def test_malformed_content_is_refused_with_its_line(content, line, says):
    with pytest.raises(lanes.LanesError, match=says) as raised:
        lanes.parse(content.splitlines())
    assert raised.value.args[0] == line


def test_a_malformed_line_is_a_warning_with_the_line_of_the_page(tmp_path):
    html, warnings = build(tmp_path, page("training: 0-4 step\nupload: oops"))
    assert "index.rst:7: WARNING: lanes: a bar is 'start-end label', not 'oops'" in warnings
    assert "<svg" not in html


def test_html_has_both_sizes_a_name_a_description_and_the_text(tmp_path):
    html, warnings = build(tmp_path, page(GOOD))
    assert warnings == ""
    assert re.findall(r'class="lanes-svg lanes-(\w+)"', html) == ["wide", "narrow"]
    assert html.count('role="img" aria-label="Schematic. Only staging stops training"') == 2
    (described,) = set(re.findall(r'aria-describedby="([^"]+)"', html))
    assert f'<ul id="{described}" hidden><li>training: 0 to 4 step 7; 4 to 5 stage' in html
    assert "lanes.css" in html


def test_every_label_is_drawn_whole_at_both_sizes(tmp_path):
    html, _ = build(tmp_path, page("training: 0-99 step; 99-100 a label wider than its bar !"))
    for size, width in (("wide", lanes.WIDE), ("narrow", lanes.NARROW)):
        svg = re.search(rf'lanes-{size}".*?</svg>', html, re.S)[0]
        x, anchor = re.search(
            r'<text x="([\d.]+)"[^>]*text-anchor="(\w+)">a label wider', svg
        ).groups()
        assert (
            anchor == "start"
            and float(x) + len("a label wider than its bar") * lanes.CHARACTER <= width
        )


def test_labels_above_bars_never_overlap():
    content = "; ".join(f"{i}-{i + 1} label number {i}" for i in range(12))
    panel = lanes.parse([f"training: {content}"])
    html = lanes.draw([panel], name="x", caption="c", text=[])
    for svg in re.findall(r"<svg.*?</svg>", html, re.S):
        found = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" class="lanes-label"[^>]*>([^<]+)', svg)
        spans = [(y, float(x), float(x) + len(t) * lanes.CHARACTER) for x, y, t in found]
        assert len(spans) == 12
        for i, (row, start, end) in enumerate(spans):
            assert all(r != row or e <= start or end <= s for r, s, e in spans[i + 1 :])


@pytest.mark.parametrize("caption", ["Schematic: two lanes", "schematic of two lanes"])
def test_a_caption_that_says_schematic_is_left_alone(tmp_path, caption):
    html, _ = build(tmp_path, page(GOOD, caption))
    assert f'<span class="caption-text">{caption}</span>' in html


def test_other_builders_get_the_text(tmp_path):
    text, warnings = build(tmp_path, page(GOOD), "text")
    assert warnings == ""
    assert "* upload: 5 to 8 write checkpoint 7 (write)" in text
    assert "Schematic. Only staging stops training" in text


def test_markup_in_labels_is_escaped():
    panel = lanes.parse(["a<b: 0-4 x < y & z"])
    html = lanes.draw([panel], name="n", caption='say "c"', text=["a<b"])
    assert "x &lt; y &amp; z" in html and "a&lt;b" in html and "&quot;c&quot;" in html
