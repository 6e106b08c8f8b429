"""A row is outdated when the changelog has a change of its cost since, and only then."""

import json
import os
import subprocess
import sys

import pytest
from results_site import (
    OF_TODAY,
    REPO,
    STALE,
    change_cost,
    lint,
    measure,
    render,
    row,
    trace,
)

from benchmarks import code_versions, result_files
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


def test_a_page_is_marked_only_where_its_own_rows_are(repo):
    measure(repo)
    change_cost(repo, "checkpoint_stall: async_save")
    for rows, marked in (("async_save", True), ("overlapped none", False)):
        html, _ = render(repo, f".. result-table:: checkpoint_stall\n   :rows: {rows}")
        assert (STALE in html) is marked


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


def test_a_mark_below_a_heading_without_a_version_is_later_than_what_had_none(repo):
    change_cost(repo, "checkpoint_stall: pinned async_save; soak")
    changelog = repo / code_versions.CHANGELOG
    changelog.write_text(
        changelog.read_text()
        .replace(", version 0.3.0", "    ")
        .replace("(checkpoint_stall: pinned async_save", "(checkpoint_stall: pinned\n  async_save")
    )
    stall, soak = cost_changes(repo)
    assert (stall.names, soak.names) == (("pinned", "async_save"), ())
    old = row("async_save", 1.0) | {"version": BEFORE_VERSIONS}
    assert stall.outdates("checkpoint_stall", old)
    assert not stall.outdates("checkpoint_stall", row("async_save", 1.0))


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


def test_the_rows_of_before_versions_whose_cost_has_changed_are_known_as_such():
    """The rows of flat files: other threads, other copies. A changelog cut shorter keeps this."""
    changes = cost_changes(REPO)
    for name in ("checkpoint_stall.h200-x1", "checkpoint_stall.h100-x1", "save_interval.h200-x1"):
        result = result_files.load(REPO / "benchmarks" / "results" / f"{name}.json")
        rows = [row for row in result.rows if row["name"] == "overlapped_writer"]
        old = [row for row in rows if row["version"] == "before 0.2.1"]
        assert old and all(result.is_outdated(row, changes) for row in old)


def test_a_trace_whose_cost_has_changed_is_marked(repo):
    trace(repo, "pinned")
    page = ".. timeline:: checkpoint_stall pinned"
    assert STALE not in render(repo, page)[0]
    change_cost(repo, "checkpoint_stall: pinned")
    assert STALE in render(repo, page)[0]


def test_a_page_is_built_again_when_its_first_result_appears(repo):
    page = ".. result-table:: checkpoint_stall"
    assert "Not measured yet" in render(repo, page)[0]
    path = measure(repo)
    assert "Not measured yet" not in render(repo, page)[0]
    path.unlink()
    assert "Not measured yet" in render(repo, page)[0]


def test_a_row_says_which_version_and_commit_it_is_of(repo):
    old = row("pinned", 0.5) | {"version": BEFORE_VERSIONS, "commit": None}
    path = measure(repo, rows=[row("async_save", 3.8), old, row("none", 0.1)])
    html, _ = render(repo, ".. result-table:: checkpoint_stall")
    assert ", version 0.2.1 (abc) and before 0.2.1. Workload" in html
    for lacking, says in (
        ({"version": None}, "row async_save needs 'ours'"),
        ({"ours": None}, "row async_save needs 'ours'"),
        ({"commit": ""}, "row async_save lacks 'commit'"),
    ):
        data = json.loads(path.read_text())
        data["rows"] = [row("async_save", 3.8) | lacking]
        path.write_text(json.dumps(data))
        with pytest.raises(result_files.ResultError, match=says):
            result_files.load(path)


def test_the_commit_of_today_is_gits_or_said_and_never_guessed(monkeypatch, tmp_path):
    monkeypatch.delenv("MEASURED_COMMIT", raising=False)
    commands = [
        ("git", "init", "-q"),
        ("git", "add", "."),
        ("git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "first"),
    ]
    (tmp_path / "overlap_recipes").mkdir()
    version = tmp_path / "overlap_recipes" / "version.py"
    version.write_text('__version__ = "1.2.3"\n')
    monkeypatch.setattr(code_versions, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(RuntimeError, match="set MEASURED_COMMIT"):
        code_versions.code_of_today()
    for command in commands:
        subprocess.run(command, cwd=tmp_path, check=True)
    clean = code_versions.code_of_today()
    assert clean["version"] == "1.2.3" and len(clean["commit"]) == 10
    version.write_text('__version__ = "1.2.4"\n')
    assert code_versions.code_of_today()["commit"] == clean["commit"] + "+", "with edits"
    monkeypatch.setenv("MEASURED_COMMIT", "abc")
    assert code_versions.code_of_today() == {"version": "1.2.4", "commit": "abc"}


def test_the_versions_of_rows_need_no_torch():
    program = "import sys, benchmarks.code_versions; sys.exit('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(REPO)}
    assert subprocess.run([sys.executable, "-c", program], env=environment).returncode == 0
    assert OF_TODAY.keys() == {"version", "commit"}
