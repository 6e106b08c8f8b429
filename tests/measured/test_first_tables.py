"""The first tables show rows of one kind of machine that are not outdated, and nothing else."""

import json
import re

from results_site import (
    OF_TODAY,
    REPO,
    change_cost,
    lint,
    measure,
    render,
    row,
)

from benchmarks import first_tables, result_files
from benchmarks.first_tables import FirstTable, first_table, runs_of_recipes

PAGE = ".. first-table:: checkpoint_stall"


def texts(table: FirstTable, name: str) -> list[str]:
    return [cell.text for cell in table.cells[name]]


NOTHING = "Not measured since its cost changed"


def test_a_first_table_has_the_rows_of_the_first_case_with_their_figures(repo):
    assert first_table("checkpoint_stall", repo) is None
    measure(repo)
    table = first_table("checkpoint_stall", repo)
    assert texts(table, "overlapped")[0] == "1.20 ms"
    assert table.origin.startswith("2 × Test GPU, torch 2.11.0") and table.left_out == []


def test_an_outdated_row_is_left_out_and_named(repo):
    measure(repo, rows=[row("async_save", 3.8), row("pinned", 0.5), row("a_peer", 0.3)])
    assert set(first_table("checkpoint_stall", repo).cells) == {"async_save", "pinned", "a_peer"}

    change_cost(repo, "checkpoint_stall: async_save")
    table = first_table("checkpoint_stall", repo)
    assert set(table.cells) == {"pinned", "a_peer"} and table.left_out == ["async_save"]
    html, warnings = render(repo, PAGE)
    assert warnings == "" and "Left out, since their cost has changed: async_save." in html


def test_a_peer_of_another_run_is_shown_and_said_to_be(repo):
    apart = row("a_peer", 0.3) | {"run": "another host, 2026-07-01"}
    measure(repo, rows=[row("async_save", 3.8), row("pinned", 0.4), apart])
    html, warnings = render(repo, PAGE)
    assert warnings == "" and ">a_peer<" in html
    assert "; a_peer: another host, 2026-07-01" in html


def test_a_row_says_whether_it_clips_and_in_which_precision(repo):
    peer = row("a_peer", 0.3) | {"clips": False, "precision": "bfloat16 gradients"}
    measure(
        repo, rows=[row("async_save", 3.8) | {"clips": True, "model": "m"}, peer | {"model": "m"}]
    )
    said = "does not clip, bfloat16 gradients"
    assert said in render(repo, PAGE)[0]
    assert said in render(repo, ".. result-table:: checkpoint_stall")[0]
    gain = ".. result-gain:: checkpoint_stall\n   :rows: async_save\n   :field: staging_cost_s\n"
    assert f"({said})" in render(repo, gain)[0]


def test_a_headline_within_the_interval_of_none_is_below_the_noise(repo):
    noise = {"staging_cost_low_s": -0.1, "staging_cost_high_s": 0.05}
    gain = ".. result-gain:: checkpoint_stall\n   :rows: async_save\n   :field: staging_cost_s\n"
    for cost, said in ((0.049, "below noise (±100 ms)"), (-0.2, "below noise"), (0.051, "51.0 ms")):
        ours = row("async_save", cost) | {"model": "m"}
        measure(repo, rows=[ours, row("none", 0.01, model="m") | noise])
        assert texts(first_table("checkpoint_stall", repo), "async_save")[0].startswith(said)
        assert said in render(repo, gain)[0]
    measure(repo, rows=[ours, row("none", 0.01, model="m")])
    assert texts(first_table("checkpoint_stall", repo), "async_save") == [
        "51.0 ms (noise not measured)"
    ]
    measure(repo, rows=[ours, row("none", 0.01, model="other") | noise])
    assert texts(first_table("checkpoint_stall", repo), "async_save") == ["51.0 ms"]


def test_a_note_stands_below_a_first_table_that_has_its_row(repo):
    note = result_files.FIRST_TABLE_NOTES["torchao_clipped"]
    measure(repo, rows=[row("async_save", 3.8), row("a_peer", 0.3)])
    assert note not in render(repo, PAGE)[0]
    measure(repo, rows=[row("async_save", 3.8), row("torchao_clipped", 0.3)])
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
    assert texts(table, "streamed") == ["25.0 %", "50.0 %"]


def test_a_first_table_has_what_a_save_costs_with_other_models(repo):
    ends = {"staging_cost_low_s": 0.3, "staging_cost_high_s": 0.5}
    rows = [row("async_save", 0.1, model="llama-1b"), row("none", 0.1, model="gpt2-xl") | ends]
    rows.append(row("async_save", 0.4, model="gpt2-xl", tokens=8) | ends)
    measure(repo, rows=rows)
    (line,) = first_table("checkpoint_stall", repo).elsewhere
    assert line == "async_save, gpt2-xl: staging costs 400 ms (300 ms to 500 ms)"
    assert line in render(repo, PAGE)[0]


def test_a_first_table_says_where_a_peer_is_ahead_and_needs_one_column_of_it(repo):
    step = {"ours": False, "samples": {}} | OF_TODAY
    rows = [
        step | {"name": "streamed", "ours": True, "tokens": tokens, "kept": kept}
        for tokens, kept in ((1024, 0.5), (2048, 0.6), (4096, 0.7))
    ]
    rows.append(step | {"name": "a_peer", "tokens": 2048, "kept": 0.65})
    path = measure(repo, rows=rows, benchmark="offload_step")
    path.rename(path.with_name("offload_step.test-x2.json"))
    table = first_table("offload_step", repo)
    assert table.behind == ["streamed at 2,048 tokens a step (a_peer)"]
    assert texts(table, "a_peer") == ["–", "65.0 %", "–"]
    assert [cell.is_best for cell in table.cells["streamed"]] == [True, False, True]
    html, warnings = render(repo, ".. first-table:: offload_step")
    assert warnings == "" and "A peer is ahead of streamed at 2,048 tokens a step (a_peer)." in html


def test_a_gain_has_the_best_column_and_all_at_which_a_peer_is_ahead(repo):
    step = {"ours": False, "samples": {}, "model": "m"} | OF_TODAY
    rows = [
        step | {"name": name, "ours": name == "streamed", "tokens": tokens, "kept": kept}
        for name, tokens, kept in (
            ("streamed", 1024, 0.5),
            ("a_peer", 1024, 0.51),
            ("streamed", 2048, 0.6),
            ("a_peer", 2048, 0.3),
            ("streamed", 4096, 0.7),
            ("a_peer", 4096, 0.6),
            ("b_peer", 4096, 0.1),
        )
    ]
    path = measure(repo, rows=rows, benchmark="offload_step")
    path.rename(path.with_name("offload_step.test-x2.json"))
    gain = ".. result-gain:: offload_step\n   :rows: streamed\n   :field: kept\n"
    html = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", render(repo, gain)[0]))
    assert (
        "Throughput kept: 60.0 % streamed, 30.0 % a_peer; a peer is ahead at 1,024 tokens a step: "
        "50.0 % streamed, 51.0 % a_peer. Stock m, 2,048 tokens a step where no other is said"
    ) in html


def test_a_single_outdated_figure_is_a_dash(repo):
    step = {"name": "async_save", "ours": True, "kept": 0.2, "samples": {}} | OF_TODAY
    rows = [step | {"tokens": tokens} for tokens in (2048, 8192)]
    rows += [step | {"name": "a_peer", "ours": False, "tokens": 4096}]
    rows += [step | {"tokens": 4096, "version": "0.1.0"}]
    change_cost(repo, "offload_step", "0.2.0")
    path = measure(repo, rows=rows, benchmark="offload_step")
    path.rename(path.with_name("offload_step.test-x2.json"))
    assert texts(first_table("offload_step", repo), "async_save") == ["20.0 %", "–", "20.0 %"]


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


def test_readmes_figures_are_those_of_the_rows():
    line = first_tables.line_of_figures(REPO)
    text = (REPO / "README.md").read_text()
    assert line and first_tables.with_figures(text, line) == text
    for benchmark, name in (
        ("checkpoint_stall", "torch_checkpointing"),
        ("offload_step", "torchao"),
    ):
        assert f"`{name}`" in line, benchmark
    assert "NVIDIA" in line and "0.2.1" in line


def test_lint_fails_where_readmes_figures_are_not_those_of_the_rows(repo):
    steps = [
        {"name": name, "tokens": tokens, "kept": kept, "samples": {}, "model": "llama-8b"}
        | OF_TODAY
        | {"ours": name == "streamed_adam", "clips": name == "streamed_adam"}
        for name, tokens, kept in (
            ("streamed_adam", 2048, 0.4),
            ("a_peer", 2048, 0.5),
            ("streamed_adam", 4096, 0.8),
            ("a_peer", 4096, 0.3),
        )
    ]
    path = measure(repo, rows=steps, benchmark="offload_step")
    path.rename(path.with_name("offload_step.test-x2.json"))
    case = {"model": "llama-1b", "loop": "reads", "compiled": False, "cost_s": 0.1}
    measure(repo, rows=[row("overlapped_writer", 0.1, ours=True) | case])
    readme = repo / "README.md"
    readme.write_text("# R\n\nNo marks.\n")
    assert "lacks <!-- Figures" in lint(repo).stderr
    readme.write_text(f"# R\n\n{first_tables.BEGIN}\n{first_tables.END}\n\nMore.\n")
    assert "README's figures are not those of the rows" in lint(repo).stderr
    assert first_tables.main(["--write", "--repo", str(repo)]) == 0
    assert lint(repo).returncode == 0
    text = " ".join(readme.read_text().split())
    assert "ours 100 ms, on 2 × Test GPU." in text
    said = "at 4,096 tokens ours 80.0 %, `a_peer` 30.0 % (does not clip); "
    assert said + "at 2,048 tokens ours 40.0 %, `a_peer` 50.0 %." in text
    readme.write_text(readme.read_text().replace("80.0 %", "90.0 %"))
    assert lint(repo).returncode == 1
