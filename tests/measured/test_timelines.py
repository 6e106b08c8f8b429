"""Timelines of traces on pages: what is drawn, and what is merged."""

import json

import pytest
from lanes import Bar
from results_site import render, trace
from timeline import merge, read_panel, scale_bar

from benchmarks import result_files


def test_traces_share_an_axis_and_can_be_downloaded(repo):
    paths = [trace(repo, "async_save"), trace(repo, "pinned")]
    html, warnings = render(repo, ".. timeline:: checkpoint_stall async_save pinned process")
    assert warnings == ""
    assert html.count('<svg class="lanes-svg') == 1 and "50 ms" in html
    for mode in ("async_save", "pinned"):
        assert f"{mode}, compute: 0 s to 40.0 ms step; 40.0 ms to 60.0 ms save" in html
    for path in paths:
        (copy,) = (repo / "out" / "_downloads").rglob(path.name)
        assert copy.read_bytes() == path.read_bytes()
    assert "Not measured yet (checkpoint_stall: process)" in html


def test_events_outside_the_lanes_are_not_drawn_and_stalls_are(repo):
    panel = read_panel("pinned", result_files.load_trace(trace(repo, "pinned")))
    assert [lane.name for lane in panel.lanes] == ["compute", "copy", "write"]
    kinds = [bar.kind for bar in panel.lanes[0].bars]
    assert sorted(kinds) == ["compute", "compute", "stall"]
    assert panel.marks[0].at == pytest.approx(0.06)


def test_what_holds_the_host_is_drawn_as_a_stall(repo):
    path = trace(repo, "pinned")
    path.write_text(path.read_text().replace('"lane": "write"', '"lane": "host"'))
    panel = read_panel("pinned", result_files.load_trace(path))
    assert [(lane.name, lane.bars[0].kind) for lane in panel.lanes][-1] == ("host", "stall")


def test_a_sliver_between_stalls_is_not_drawn_and_a_step_between_them_is(repo):
    path = trace(repo, "pinned")
    data = json.loads(path.read_text())
    held = [
        {"ph": "X", "name": name, "ts": ts, "dur": dur, "args": {"lane": "compute"} | stall}
        for name, ts, dur, stall in [
            ("stall", 110_000, 20_000, {"stall": True}),
            ("sliver", 130_000, 100, {}),
            ("stall", 130_100, 20_000, {"stall": True}),
            ("step", 150_100, 10_000, {}),
            ("stall", 160_100, 20_000, {"stall": True}),
        ]
    ]
    data["traceEvents"] += held
    path.write_text(json.dumps(data))
    bars = read_panel("pinned", result_files.load_trace(path)).lanes[0].bars
    late = [(bar.label, bar.kind) for bar in bars if bar.start > 0.1]
    assert late == [("stall", "stall")] * 2 + [("step", "compute"), ("stall", "stall")]


def test_slivers_are_merged_and_steps_are_not():
    slivers = [Bar(i * 1e-3, i * 1e-3 + 0.9e-3, "gemm", "compute") for i in range(100)]
    assert merge(slivers, 1e-3) == [Bar(0, pytest.approx(0.0999), "gemm", "compute")]
    steps = [Bar(0, 0.1, "step 1", "compute"), Bar(0.1001, 0.2, "step 2", "compute")]
    assert merge(steps, 1e-3) == steps


@pytest.mark.parametrize(("span", "length"), [(1.0, 0.2), (0.1, 0.02), (4.0, 1.0), (0.8, 0.2)])
def test_scale_bar(span, length):
    assert scale_bar(span) == pytest.approx(length)
