"""The first tables show rows of one kind of machine that are not outdated, and nothing else."""

import json

from results_site import (
    OF_TODAY,
    change_cost,
    lint,
    measure,
    render,
    row,
)

from benchmarks import result_files
from benchmarks.first_tables import first_table, runs_of_recipes

PAGE = ".. first-table:: checkpoint_stall"
NOTHING = "Not measured since its cost changed"


def test_a_first_table_has_the_rows_of_the_first_case_with_their_figures(repo):
    assert first_table("checkpoint_stall", repo) is None
    measure(repo)
    table = first_table("checkpoint_stall", repo)
    assert table.cells["overlapped"][0] == "1.20 ms"
    assert table.origin.startswith("2 × Test GPU, torch 2.11.0") and table.left_out == []


def test_an_outdated_row_is_left_out_and_named(repo):
    measure(repo, rows=[row("async_save", 3.8), row("pinned", 0.5), row("a_peer", 0.3)])
    assert set(first_table("checkpoint_stall", repo).cells) == {"async_save", "pinned", "a_peer"}

    change_cost(repo, "checkpoint_stall: async_save")
    table = first_table("checkpoint_stall", repo)
    assert set(table.cells) == {"pinned", "a_peer"} and table.left_out == ["async_save"]
    html, warnings = render(repo, PAGE)
    assert warnings == "" and "Left out, since their cost has changed: async_save." in html


def test_a_row_of_another_run_is_left_out_and_named(repo):
    apart = row("a_peer", 0.3) | {"run": "another host, 2026-07-01"}
    measure(repo, rows=[row("async_save", 3.8), row("pinned", 0.4), apart])
    table = first_table("checkpoint_stall", repo)
    assert "a_peer" not in table.cells and "pinned" in table.cells
    assert table.of_other_runs == ["a_peer"] and "another host" not in table.origin
    html, warnings = render(repo, PAGE)
    words = "Left out, since they were measured in another run: a_peer."
    assert warnings == "" and words in html


def test_a_note_stands_below_a_first_table_that_has_its_row(repo):
    note = result_files.FIRST_TABLE_NOTES["torchao"]
    measure(repo, rows=[row("async_save", 3.8), row("a_peer", 0.3)])
    assert note not in render(repo, PAGE)[0]
    measure(repo, rows=[row("async_save", 3.8), row("torchao", 0.3)])
    assert f"1. {note}" in render(repo, PAGE)[0]


def test_what_others_are_compared_with_is_in_no_first_table_and_shown_where_it_alone_is_asked_for(
    repo,
):
    measure(repo, rows=[row("async_save", 3.8), row("none", 0.0271)])
    assert "none" not in first_table("checkpoint_stall", repo).cells
    alone = ".. result-table:: checkpoint_stall\n   :rows: none\n"
    assert "27.1 ms" in render(repo, alone)[0]
    assert "27.1 ms" not in render(repo, alone.replace("none", "none pinned"))[0]


def test_peers_alone_are_no_first_table(repo):
    measure(repo, rows=[row("async_save", 3.8), row("a_peer", 0.3)])
    assert NOTHING not in render(repo, PAGE)[0]
    change_cost(repo, "checkpoint_stall")
    assert first_table("checkpoint_stall", repo) is None
    assert NOTHING in render(repo, PAGE)[0]


def test_a_table_comes_from_one_file_the_latest_that_is_not_outdated(repo):
    measure(repo, ranks=2, date="2026-01-02")
    measure(repo, ranks=4, date="2026-01-03")
    assert first_table("checkpoint_stall", repo).origin.startswith("4 × ")
    old = row("async_save", 3.8) | {"version": "0.1.0"}
    measure(repo, ranks=4, date="2026-01-03", rows=[old])
    change_cost(repo, "checkpoint_stall", "0.2.0")
    assert first_table("checkpoint_stall", repo).origin.startswith("2 × ")


def test_what_varies_in_tokens_has_a_column_for_each_number(repo):
    steps = [
        {"name": name, "tokens": tokens, "kept": tokens / 8192, "samples": {}}
        | OF_TODAY
        | {"ours": name == "streamed"}
        for name in ("streamed", "resident")
        for tokens in (2048, 4096)
    ]
    path = measure(repo, rows=steps, benchmark="offload_step")
    path.rename(path.with_name("offload_step.test-x2.json"))
    table = first_table("offload_step", repo)
    assert table.headings == ["2,048", "4,096"]
    assert table.cells["streamed"] == ["25.0 %", "50.0 %"]


def test_a_single_outdated_figure_is_a_dash(repo):
    step = {"name": "async_save", "ours": True, "kept": 0.2, "samples": {}} | OF_TODAY
    rows = [step | {"tokens": tokens} for tokens in (2048, 8192)]
    rows += [step | {"name": "a_peer", "ours": False, "tokens": 4096}]
    rows += [step | {"tokens": 4096, "version": "0.1.0"}]
    change_cost(repo, "offload_step", "0.2.0")
    path = measure(repo, rows=rows, benchmark="offload_step")
    path.rename(path.with_name("offload_step.test-x2.json"))
    assert first_table("offload_step", repo).cells["async_save"] == ["20.0 %", "–", "20.0 %"]


def test_a_sentence_on_the_landing_page_disappears_when_its_row_is_outdated(repo):
    measure(repo, rows=[row("async_save", 3.8) | {"model": "m"}])
    page = ".. result-gain:: checkpoint_stall\n   :rows: async_save\n   :field: staging_cost_s\n"
    page += "\n   What that is.\n"
    html = render(repo, page)[0]
    assert "3.80 s" in html and "What that is." in html
    change_cost(repo, "checkpoint_stall: async_save")
    html = render(repo, page)[0]
    assert "3.80 s" not in html and "What that is." not in html


def test_a_run_of_the_recipes_says_what_failed_and_of_which_versions_it_was(repo):
    recipes = {}
    for name, ok, version in (
        ("async_save", True, {"version": "before 0.2.1", "commit": None}),
        ("pinned_staging", False, OF_TODAY),
        ("load", True, OF_TODAY),
    ):
        recipes[name] = {**version, "ok": ok, "date": "2026-01-02", "failures": []}
    record = {"2.9.1": {"ranks": 2, "recipes": recipes}}
    (repo / "guide" / "versions.json").write_text(json.dumps(record))
    (run,) = runs_of_recipes(repo)
    assert (run.where, run.torch, run.passed, run.recipes) == ("CPU, 2 ranks", "2.9.1", 2, 3)
    assert run.failed == ["pinned_staging"]
    assert run.codes == ["2 of 0.2.1 (abc)", "1 of before 0.2.1"]


def test_lint_fails_on_a_file_that_cannot_be_read(repo):
    path = measure(repo)
    assert lint(repo).returncode == 0
    path.write_text("{")
    process = lint(repo)
    assert process.returncode == 1 and "not JSON" in process.stderr
