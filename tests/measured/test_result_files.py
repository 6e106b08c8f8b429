"""Files of results and traces: those of this repository can be read, a bad one is reported."""

import json

import pytest
from results_site import REPO, lint, measure, render, row

from benchmarks import result_files


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


def test_every_committed_measurement_can_be_read():
    for path in (REPO / "benchmarks" / "results").glob("*.json"):
        result_files.load(path)
    for path in (REPO / "benchmarks" / "traces").glob("*.json"):
        result_files.load_trace(path)
