"""Files of results and traces: those of this repository can be read, a bad one is reported."""

import json

import pytest
from results_site import REPO, lint, measure, render, row, trace

from benchmarks import result_files


def test_a_figure_that_rounds_up_gets_the_larger_unit():
    written = [result_files.seconds(value) for value in (0.9996, 0.9994, 0.0009996)]
    assert written == ["1.00 s", "999 ms", "1.00 ms"]
    assert result_files.byte_count(999.7e6) == "1.00 GB"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"driver": None}, "'driver' is missing"),
        ({"benchmark": "stall"}, "'benchmark' is 'stall'"),
        ({"ranks": 4}, "'ranks' is 4"),
        ({"date": "yesterday"}, "'date' must begin"),
        ({"rows": [{"name": "x"}]}, "row 0 needs"),
        ({"rows": [row("x", "3 s")]}, "'staging_cost_s' of row x is not a number"),
    ],
)
def test_a_bad_result_file_fails_lint_and_page(repo, change, says):
    path = measure(repo)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(result_files.ResultError, match=says):
        result_files.load(path)
    process = lint(repo)
    assert process.returncode == 1 and path.name in process.stderr
    _, warnings = render(repo, ".. result-table:: checkpoint_stall")
    assert path.name in warnings


def test_a_bad_trace_is_reported(repo):
    path = trace(repo, "pinned")
    path.write_text(path.read_text().replace('"lane": "copy"', '"lane": "copies"'))
    with pytest.raises(result_files.ResultError, match="'copy': a drawn event"):
        result_files.load_trace(path)
    assert path.name in render(repo, ".. timeline:: checkpoint_stall pinned")[1]


def test_every_committed_measurement_can_be_read():
    for path in (REPO / "benchmarks" / "results").glob("*.json"):
        result_files.load(path)
    for path in (REPO / "benchmarks" / "traces").glob("*.json"):
        result_files.load_trace(path)
