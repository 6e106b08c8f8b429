"""The first tables show figures of today's code on one kind of machine, and nothing else."""

import json

from results_site import (
    RECIPE,
    edit_code,
    edit_prose,
    lint,
    measure,
    recipe_of,
    render,
    row,
)

from benchmarks import result_files
from benchmarks.first_tables import first_table, runs_of_recipes
from harness.sources import code_sha256

PAGE = ".. first-table:: checkpoint_stall"
NOTHING = "The present code was not measured yet"


def test_a_first_table_has_the_rows_of_the_first_case_with_their_figures(repo):
    assert first_table("checkpoint_stall", repo) is None
    measure(repo)
    table = first_table("checkpoint_stall", repo)
    assert table.cells["overlapped"][0] == "1.20 ms"
    assert table.origin.startswith("2 × Test GPU, torch 2.11.0") and table.left_out == []


def test_a_row_of_earlier_code_is_left_out_and_named(repo):
    of_another = row("pinned", 0.5) | {"recipes": ["pinned_staging"]}
    pinned = recipe_of(repo).with_name("pinned_staging.py")
    pinned.write_text(RECIPE)
    hashes = {name: code_sha256(recipe_of(repo)) for name in ("async_save", "pinned_staging")}
    measure(repo, rows=[row("async_save", 3.8), of_another, row("a_peer", 0.3)], code_sha256=hashes)
    assert set(first_table("checkpoint_stall", repo).cells) == {"async_save", "pinned", "a_peer"}

    edit_prose(repo)
    assert set(first_table("checkpoint_stall", repo).cells) == {"async_save", "pinned", "a_peer"}

    edit_code(repo)
    table = first_table("checkpoint_stall", repo)
    assert set(table.cells) == {"pinned", "a_peer"} and table.left_out == ["async_save"]
    html, warnings = render(repo, PAGE)
    assert warnings == "" and "Left out, since their code has changed: async_save." in html


def test_a_row_of_another_run_is_left_out_and_named(repo):
    hashes = {"async_save": code_sha256(recipe_of(repo))}
    apart = row("a_peer", 0.3) | {"run": "another host, 2026-07-01"}
    measure(repo, rows=[row("async_save", 3.8), row("pinned", 0.4), apart], code_sha256=hashes)
    table = first_table("checkpoint_stall", repo)
    assert "a_peer" not in table.cells and "pinned" in table.cells
    assert table.of_other_runs == ["a_peer"] and "another host" not in table.origin
    html, warnings = render(repo, PAGE)
    words = "Left out, since they were measured in another run: a_peer."
    assert warnings == "" and words in html


def test_a_note_stands_below_a_first_table_that_has_its_row(repo):
    hashes = {"async_save": code_sha256(recipe_of(repo))}
    note = result_files.FIRST_TABLE_NOTES["torchao"]
    measure(repo, rows=[row("async_save", 3.8), row("a_peer", 0.3)], code_sha256=hashes)
    assert note not in render(repo, PAGE)[0]
    measure(repo, rows=[row("async_save", 3.8), row("torchao", 0.3)], code_sha256=hashes)
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
    measure(repo)
    assert NOTHING not in render(repo, PAGE)[0]
    edit_code(repo)
    assert first_table("checkpoint_stall", repo) is None
    assert NOTHING in render(repo, PAGE)[0]


def test_a_table_comes_from_one_file_the_latest_that_measured_the_code_of_today(repo):
    measure(repo, ranks=2, date="2026-01-02")
    measure(repo, ranks=4, date="2026-01-03")
    assert first_table("checkpoint_stall", repo).origin.startswith("4 × ")
    measure(repo, ranks=4, date="2026-01-03", code_sha256={"async_save": "0" * 64})
    assert first_table("checkpoint_stall", repo).origin.startswith("2 × ")


def test_what_varies_in_tokens_has_a_column_for_each_number(repo):
    today = {"recipes": ["async_save"]}
    steps = [
        {"name": name, "tokens": tokens, "kept": tokens / 8192, "samples": {}} | recipes
        for name, recipes in (("streamed", today), ("resident", {"recipes": []}))
        for tokens in (2048, 4096)
    ]
    path = measure(repo, rows=steps, benchmark="offload_step")
    path.rename(path.with_name("offload_step.test-x2.json"))
    table = first_table("offload_step", repo)
    assert table.headings == ["2,048", "4,096"]
    assert table.cells["streamed"] == ["25.0 %", "50.0 %"]


def test_a_single_figure_of_earlier_code_is_a_dash(repo):
    step = {"name": "async_save", "recipes": ["async_save"], "kept": 0.2, "samples": {}}
    today = {"code_sha256": {"async_save": code_sha256(recipe_of(repo))}}
    earlier = {"code_sha256": {"async_save": "0" * 64}}
    rows = [step | {"tokens": tokens} | today for tokens in (2048, 8192)]
    rows += [step | {"name": "a_peer", "recipes": [], "tokens": 4096}]
    rows += [step | {"tokens": 4096} | earlier]
    path = measure(repo, rows=rows, benchmark="offload_step")
    path.rename(path.with_name("offload_step.test-x2.json"))
    assert first_table("offload_step", repo).cells["async_save"] == ["20.0 %", "–", "20.0 %"]


def test_a_sentence_on_the_landing_page_disappears_with_the_code_it_measured(repo):
    measure(repo, rows=[row("async_save", 3.8) | {"model": "m"}])
    page = ".. result-gain:: checkpoint_stall\n   :rows: async_save\n   :field: staging_cost_s\n"
    page += "\n   What that is.\n"
    html = render(repo, page)[0]
    assert "3.80 s" in html and "What that is." in html
    edit_code(repo)
    html = render(repo, page)[0]
    assert "3.80 s" not in html and "What that is." not in html


def test_a_run_of_the_recipes_says_what_failed_and_what_has_changed_since(repo):
    recipe_of(repo).with_name("pinned_staging.py").write_text(RECIPE)
    recipes = {}
    for name, ok in (("async_save", True), ("pinned_staging", False)):
        hashes = result_files.hashes_of([name], repo)
        recipes[name] = {"code_sha256": hashes, "ok": ok, "date": "2026-01-02", "failures": []}
    (repo / "guide").mkdir()
    record = {"2.9.1": {"ranks": 2, "recipes": recipes}}
    (repo / "guide" / "versions.json").write_text(json.dumps(record))
    (run,) = runs_of_recipes(repo)
    assert (run.where, run.torch, run.passed, run.recipes) == ("CPU, 2 ranks", "2.9.1", 1, 2)
    assert run.failed == ["pinned_staging"] and run.earlier == 0
    edit_code(repo)
    assert runs_of_recipes(repo)[0].earlier == 1


def test_lint_names_results_of_earlier_code_and_fails_on_a_file_that_cannot_be_read(repo):
    path = measure(repo)
    edit_code(repo)
    process = lint(repo)
    assert process.returncode == 0
    assert "stale: benchmarks/results/checkpoint_stall" in process.stdout
    path.write_text("{")
    process = lint(repo)
    assert process.returncode == 1 and "not JSON" in process.stderr
