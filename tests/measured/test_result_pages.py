"""Tables, figures and gains on pages: what they show, of which machine, and what they say of it."""

import re

import pytest
from results import rows_in_sight
from results_site import REPO, measure, render, row


def test_the_table_shows_values_origin_and_links(repo):
    measure(repo)
    html, warnings = render(repo, ".. result-table:: checkpoint_stall")
    assert warnings == ""
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))
    for words in (
        *("1.20 ms", "3.80 s", "Everything that was measured"),
        "Medians (storage: memory, step: long). 2 × Test GPU",
        *("2 × Test GPU", "torch 2.11.0", "driver 1.2", "2 ranks", "2026-01-02"),
        *("pinned d2h 55.4 GB/s", "state per rank 6.44 GB"),
        "tokens per step 65536 (long) or 8192 (short)",
        *("1. the shipped defaults", "Not run: another_peer: ImportError: no wheel, see --help"),
    ):
        assert words in text, words
    assert "Bound: " not in text  # no column has one
    assert re.search(r'href="recipes/checkpoint/async_save.html"[^>]*>.*async_save', html)
    assert "a_peer.html" not in html
    assert html.index(">dcp.async_save<") < html.index("overlapped") < html.index("a_peer")


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


def test_why_a_row_was_not_run_is_said_where_it_is_asked_for(repo):
    measure(repo)
    said = "Not run: another_peer: ImportError: no wheel, see --help."
    table = ".. result-table:: checkpoint_stall\n   :rows: "
    for rows, shown in (
        ("overlapped another_peer", True),
        ("overlapped", False),
        ("another_peer", True),
    ):
        html, warnings = render(repo, table + rows)
        assert warnings == "" and (said in html) is shown
        assert ("Not measured yet" in html) is (rows == "another_peer")


def test_the_page_of_all_rows_has_every_benchmark_that_was_measured():
    page = (REPO / "guide" / "results.rst").read_text()
    files = (REPO / "benchmarks" / "results").glob("*.json")
    shown = re.findall(r"^\.\. result-table:: (\w+)$", page, re.MULTILINE)
    assert sorted(shown) == sorted({path.name.split(".")[0] for path in files})


def test_a_recipes_table_shows_five_rows_and_each_peer_that_beats_one_of_ours_in_sight():
    costs = {"async_save": 5.0, "pinned": 3.0, "a": 4.0, "b": 9.0, "c": 8.0, "d": 7.0, "e": 2.0}
    rows = [row(name, cost) for name, cost in costs.items()]
    shown = [rows[number]["name"] for number in rows_in_sight(rows, ["staging_cost_s"])]
    assert shown == ["async_save", "pinned", "a", "b", "e"]
    assert len(rows_in_sight(rows[:6], ["staging_cost_s"])) == 6  # no fold for a single row
