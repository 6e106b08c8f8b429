"""Measurements are out of date when the code that they are of has changed, and only then."""

import json

import pytest
from results_site import (
    RECIPE,
    STALE,
    edit_code,
    edit_prose,
    lint,
    measure,
    recipe_of,
    render,
    trace,
)

from benchmarks import result_files
from harness.sources import code_sha256


@pytest.mark.parametrize("directive", ["result-table", "result-figure"])
def test_editing_code_makes_page_and_lint_say_stale_and_editing_prose_does_not(repo, directive):
    measure(repo)
    page = f".. {directive}:: checkpoint_stall"
    html, warnings = render(repo, page)
    assert warnings == "" and STALE not in html
    assert "stale" not in lint(repo).stdout

    edit_prose(repo)
    assert STALE not in render(repo, page)[0]
    assert "stale" not in lint(repo).stdout

    edit_code(repo)
    assert STALE in render(repo, page)[0]
    said = "stale: benchmarks/results/checkpoint_stall.test-x2.json: measured on an earlier version"
    assert f"{said} of async_save" in lint(repo).stdout

    recipe_of(repo).write_text(RECIPE)
    assert STALE not in render(repo, page)[0]


def test_a_page_is_stale_only_where_its_own_rows_are(repo):
    measure(repo)
    edit_code(repo)
    for rows, stale in (("async_save", True), ("overlapped none", False)):
        html, _ = render(repo, f".. result-table:: checkpoint_stall\n   :rows: {rows}")
        assert (STALE in html) is stale


def test_a_row_measured_later_than_its_file_goes_by_its_own_hash(repo):
    path = measure(repo)
    edit_code(repo)
    data = json.loads(path.read_text())
    later = {"async_save": code_sha256(recipe_of(repo))}
    for row in data["rows"]:
        if row["name"] == "async_save":
            row |= {"recipes": ["async_save"], "code_sha256": later}
    path.write_text(json.dumps(data))
    page = ".. result-table:: checkpoint_stall\n   :rows: async_save"
    assert STALE not in render(repo, page)[0]
    recipe_of(repo).write_text(RECIPE)
    assert STALE in render(repo, page)[0]


def test_a_recipe_that_is_gone_makes_its_result_stale(repo):
    measure(repo)
    recipe_of(repo).unlink()
    assert result_files.stale_results(repo)


def test_a_trace_of_other_code_is_stale(repo):
    trace(repo, "pinned", code_sha256={"async_save": code_sha256(recipe_of(repo))})
    page = ".. timeline:: checkpoint_stall pinned"
    assert STALE not in render(repo, page)[0]
    edit_code(repo)
    assert STALE in render(repo, page)[0]
    (line,) = result_files.stale_results(repo)
    assert line.startswith("benchmarks/traces/checkpoint_stall.pinned.test-x2.json: ")


def test_a_page_is_built_again_when_its_first_result_appears(repo):
    page = ".. result-table:: checkpoint_stall"
    assert "Not measured yet" in render(repo, page)[0]
    path = measure(repo)
    assert "Not measured yet" not in render(repo, page)[0]
    path.unlink()
    assert "Not measured yet" in render(repo, page)[0]
