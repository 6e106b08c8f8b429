"""Tables, figures and gains on pages: what they show, of which machine, and what they say of it."""

import re

import pytest
from results_site import OF_TODAY, REPO, STALE, change_cost, measure, measured_steps, render, row

PEER = OF_TODAY | {"ours": False}


@pytest.mark.parametrize(
    "page",
    [
        ".. result-table:: fsdp_overlap",
        ".. result-figure:: offload_step",
        ".. timeline:: checkpoint_stall async_save pinned",
    ],
)
def test_without_a_file_the_page_says_not_measured_yet(repo, page):
    html, warnings = render(repo, page)
    assert warnings == "" and "Not measured yet" in html and "<svg" not in html


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
    assert html.index(">async_save<") < html.index("overlapped") < html.index("a_peer")


def test_the_origin_says_what_else_the_machine_did_and_for_which_rows(repo):
    job = {"beside": "another job on two other GPUs"}
    measure(repo, rows=[row("overlapped", 0.001, **job), row("async_save", 3.8, **job)])
    html, _ = render(repo, ".. result-table:: checkpoint_stall")
    assert "2026-01-02, version 0.2.1 (abc), beside another job on two other GPUs." in html
    measure(repo, rows=[row("overlapped", 0.001, **job), row("async_save", 3.8)])
    html, _ = render(repo, ".. result-table:: checkpoint_stall")
    assert "(abc), beside another job on two other GPUs (overlapped)." in html
    html, _ = render(repo, ".. result-table:: checkpoint_stall\n   :rows: async_save\n")
    assert "(abc). Workload" in html


def test_the_origin_names_the_rows_of_other_runs(repo):
    stock = {"model": "llama-1b"}
    apart = row("a_peer", 0.3, **stock, run="another host, 2025-12-31")
    measure(repo, rows=[row("overlapped", 0.001, **stock), apart, row("b_peer", 0.2)])
    html, _ = render(repo, ".. result-table:: checkpoint_stall")
    assert "(abc); a_peer: another host, 2025-12-31. Workload" in html
    gain = ".. result-gain:: checkpoint_stall\n   :rows: overlapped a_peer b_peer\n"
    html, _ = render(repo, gain + "   :field: staging_cost_s\n")
    assert "2 × Test GPU; a_peer: another host, 2025-12-31." in html


def test_a_field_that_the_benchmark_lacks_is_reported(repo):
    measured_steps(repo)
    _, warnings = render(repo, ".. result-figure:: offload_step\n   :field: stall_s")
    assert "no field 'stall_s'" in warnings


def test_a_gain_is_of_the_machine_that_measured_most_of_its_rows(repo):
    rows = [row(name, cost) | {"model": "m"} for name, cost in (("overlapped", 1), ("a_peer", 2))]
    gain = """.. result-gain:: checkpoint_stall
   :rows: overlapped a_peer
   :field: staging_cost_s
"""
    assert "Test GPU" not in render(repo, gain)[0]
    measure(repo, 4, rows[:1])
    assert "4 × Test GPU" in render(repo, gain)[0]
    measure(repo, 2, rows)
    html, _ = render(repo, gain)
    assert "2 × Test GPU" in html and "a_peer" in html
    measure(repo, 4, rows)
    assert "4 × Test GPU" in render(repo, gain)[0]


EARLIER = {"version": "before 0.2.1", "commit": None}


def test_a_gain_is_of_rows_that_are_not_outdated_and_names_the_tokens_of_a_step(repo):
    change_cost(repo, "checkpoint_stall", "0.2.0")
    rows = [row("async_save", 1.0) | {"model": "m", "tokens": 4096}]
    measure(repo, 4, [rows[0] | EARLIER])
    measure(repo, 2, rows)
    gain = ".. result-gain:: checkpoint_stall\n   :rows: async_save\n   :field: staging_cost_s\n"
    html, _ = render(repo, gain)
    assert "Stock m, 4,096 tokens a step, 2 × Test GPU." in html


def test_rows_of_one_name_are_told_apart_by_what_differs(repo):
    case = PEER | {"tokens": 2048, "efficiency": 0.8, "samples": {}}
    rows = [
        {"name": "fsdp2", "reduce_dtype": dtype, "activation_checkpointing": again} | case
        for dtype, again in (("float32", False), ("bfloat16", False), ("float32", True))
    ]
    only_bits = PEER | {"name": "fsdp2", "tokens": 512, "reduce_dtype": "float32", "samples": {}}
    path = measure(repo, rows=[*rows, only_bits], benchmark="fsdp_overlap")
    path.rename(path.with_name("fsdp_overlap.test-x2.json"))
    html, warnings = render(repo, ".. result-table:: fsdp_overlap")
    cells = re.findall(r'result-name"><p><code.*?</code>(.*?)</p>', html, re.S)
    said = [re.sub(r"<[^>]+>", "", cell).strip() for cell in cells]
    words = ["reduced in float32", "reduced in float32, with recomputation", "reduced in bfloat16"]
    assert warnings == "" and said == words  # and no row of dashes


def test_a_table_marks_the_rows_that_are_outdated(repo):
    change_cost(repo, "checkpoint_stall", "0.2.0")
    rows = [row("async_save", 1.0), row("async_save", 2.0, storage="disk") | EARLIER]
    measure(repo, rows=rows)
    html, _ = render(repo, ".. result-table:: checkpoint_stall")
    lines = re.findall(r"<tr[^>]*>.*?</tr>", html, re.DOTALL)
    assert [line.count("†") for line in lines] == [0, 0, 1] and STALE in html


def test_rows_and_where_choose(repo):
    measure(repo, rows=[row("async_save", 1.0), row("async_save", 2.0, storage="disk")])
    options = "   :rows: async_save\n   :where: storage=disk"
    html, _ = render(repo, f".. result-table:: checkpoint_stall\n{options}")
    assert "2.00 s" in html and "1.00 s" not in html
    _, warnings = render(repo, ".. result-table:: checkpoint_stall\n   :rows: nothing")
    assert "checkpoint_stall.test-x2.json: no row is called nothing" in warnings


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


def test_a_row_of_one_machine_is_not_measured_yet_on_the_others(repo):
    measure(repo, 1, rows=[row("a_peer", 1.0)])
    measure(repo, 2, rows=[row("async_save", 2.0)])
    html, warnings = render(repo, ".. result-table:: checkpoint_stall\n   :rows: async_save a_peer")
    assert warnings == "" and "Not measured yet (checkpoint_stall: a_peer)" in html


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


def test_an_unknown_benchmark_is_reported(repo):
    assert "unknown benchmark 'stalls'" in render(repo, ".. result-table:: stalls")[1]


def test_the_page_of_all_rows_has_every_benchmark_that_was_measured():
    page = (REPO / "guide" / "results.rst").read_text()
    files = (REPO / "benchmarks" / "results").glob("*.json")
    shown = re.findall(r"^\.\. result-table:: (\w+)$", page, re.MULTILINE)
    assert sorted(shown) == sorted({path.name.split(".")[0] for path in files})


def test_whose_a_row_is_and_of_which_version_are_no_columns(repo):
    measure(repo, rows=[row("async_save", 1.0), row("a_peer", 2.0)])
    html, _ = render(repo, ".. result-table:: checkpoint_stall")
    assert re.findall(r"<th[^>]*><p>(.*?)</p>", html) == ["Way", "Staging costs"]
