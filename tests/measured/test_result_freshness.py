"""A row is outdated when the changelog has a change of its cost since, and only then."""

import re

import pytest
from results_site import STALE, change_cost, lint, measure, render, row

from benchmarks.code_versions import BEFORE_VERSIONS, ChangelogError, cost_changes


@pytest.mark.parametrize("directive", ["result-table", "result-figure"])
def test_a_change_of_a_cost_marks_the_rows_that_it_names_and_another_does_not(repo, directive):
    measure(repo)
    page = f".. {directive}:: checkpoint_stall"
    html, warnings = render(repo, page)
    assert warnings == "" and STALE not in html
    change_cost(repo, "checkpoint_stall: pinned; restart", "0.2.9")
    assert STALE not in render(repo, page)[0]
    change_cost(repo, "checkpoint_stall: async_save")
    html = render(repo, page)[0]
    assert STALE in html and "0.2.1 (abc): async_save" in html


def test_a_table_has_a_dagger_at_the_rows_that_are_outdated_and_a_mark_if_it_shows_one(repo):
    change_cost(repo, "checkpoint_stall", "0.2.0")
    old = row("async_save", 2.0, storage="disk") | {"version": BEFORE_VERSIONS, "commit": None}
    measure(repo, rows=[row("async_save", 1.0), old, row("pinned", 1.0)])
    html, _ = render(repo, ".. result-table:: checkpoint_stall")
    lines = re.findall(r"<tr[^>]*>.*?</tr>", html, re.DOTALL)
    (marked,) = [line for line in lines if "†" in line]
    assert "2.00 s" in marked and STALE in html
    assert STALE not in render(repo, ".. result-table:: checkpoint_stall\n   :rows: pinned")[0]


@pytest.mark.parametrize(
    ("version", "changed_in", "outdated"),
    [
        (BEFORE_VERSIONS, "0.2.0", True),
        (BEFORE_VERSIONS, "0.2.1", True),
        ("0.2.1", "0.2.1", False),
        ("0.2.1", "0.2.10", True),
        ("0.3.0", "0.2.10", False),
    ],
)
def test_a_row_is_outdated_by_what_is_later_than_its_version(repo, version, changed_in, outdated):
    change_cost(repo, "checkpoint_stall", changed_in)
    changes = cost_changes(repo)
    ours = row("async_save", 1.0) | {"version": version}
    assert [change.outdates("checkpoint_stall", ours) for change in changes] == [outdated]
    assert not changes[0].outdates("checkpoint_stall", ours | {"ours": False}), "a peer's"
    assert not changes[0].outdates("restart", ours)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("checkpoint_stalls", "names no benchmark: checkpoint_stalls"),
        ("checkpoint_stall: no_such_row", "names no row: no_such_row"),
        ("", "no rows in brackets"),
    ],
)
def test_a_mark_that_names_nothing_fails_lint(repo, rows, says):
    measure(repo)
    change_cost(repo, rows)
    process = lint(repo)
    assert process.returncode == 1 and says in process.stderr
    if not rows:
        with pytest.raises(ChangelogError):
            cost_changes(repo)


def test_a_row_says_which_version_and_commit_it_is_of(repo):
    old = row("pinned", 0.5) | {"version": BEFORE_VERSIONS, "commit": None}
    measure(repo, rows=[row("async_save", 3.8), old, row("none", 0.1)])
    html, _ = render(repo, ".. result-table:: checkpoint_stall")
    assert ", version 0.2.1 (abc) and before 0.2.1. Workload" in html
