"""Tables, figures and gains on pages: what they show, of which machine, and what they say of it."""

import re

import pytest
from results_site import REPO, measure, render, row


@pytest.mark.parametrize("directive", ["result-table", "result-figure"])
def test_a_row_that_is_not_measured_yet_is_named(repo, directive):
    measure(repo, rows=[row("async_save", 1.0)])
    html, warnings = render(
        repo, f".. {directive}:: checkpoint_stall\n   :rows: async_save process"
    )
    assert warnings == "" and "1.00 s" in html
    assert "Not measured yet (checkpoint_stall: process)" in html
    html, warnings = render(repo, f".. {directive}:: checkpoint_stall\n   :rows: process")
    assert warnings == "" and "Not measured yet (checkpoint_stall: process)" in html


def test_the_page_of_all_rows_has_every_benchmark_that_was_measured():
    page = (REPO / "guide" / "results.rst").read_text()
    files = (REPO / "benchmarks" / "results").glob("*.json")
    shown = re.findall(r"^\.\. result-table:: (\w+)$", page, re.MULTILINE)
    assert sorted(shown) == sorted({path.name.split(".")[0] for path in files})
