"""The first tables show rows of one kind of machine that are not outdated, and nothing else."""

import re

from results_site import OF_TODAY, REPO, change_cost, measure, render, row

from benchmarks import first_tables
from benchmarks.first_tables import FirstTable, first_table

PAGE = ".. first-table:: checkpoint_stall"


def texts(table: FirstTable, name: str) -> list[str]:
    return [cell.text for cell in table.cells[name]]


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


def test_readmes_figures_are_those_of_the_rows_with_pytorch_and_peers():
    table = first_tables.headline_table(REPO)
    text = (REPO / "README.md").read_text()
    assert first_tables.with_figures(text, table) == text
    figures = re.compile(r"\d(?:[\d.,]* (?:m?s|%))")
    for name, stock, other, ours in table.lines:
        assert figures.search(stock) and figures.search(ours), name
        assert "`" in other or other == "none at this size", name
    assert table.measured.count("NVIDIA") == table.measured.count("version") == len(table.lines)
