"""Measurements on pages and in the README: where they come from, and when they are out of date."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from lanes import Bar
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace
from timeline import merge, read_panel, scale_bar

from benchmarks import readme_table, result_files
from harness.sources import code_sha256

REPO = Path(__file__).resolve().parents[2]
RECIPE = '''"""A recipe."""


def save(app):
    """Save it."""
    return app  # at once
'''


@pytest.fixture
def repo(tmp_path) -> Path:
    """A repository with one recipe, its page, and nothing measured."""
    repo = tmp_path / "repo"
    for folder in ("benchmarks/results", "benchmarks/traces", "recipes_source/checkpoint"):
        (repo / folder).mkdir(parents=True)
    recipe_of(repo).write_text(RECIPE)
    (repo / "README.md").write_text(
        "# Title\n\n<!-- results:begin -->\n<!-- results:end -->\n"
        "<!-- versions:begin -->\n<!-- versions:end -->\n\nAfter.\n"
    )
    return repo


def recipe_of(repo: Path) -> Path:
    return repo / "recipes_source" / "checkpoint" / "async_save.py"


def row(name: str, stall: float | None, **more) -> dict:
    return {"name": name, "staging_cost_s": stall, "samples": {"staging_cost_s": [stall] * 3}} | {
        "storage": "memory",
        "step": "long",
        "recipes": ["async_save"] if name == "async_save" else [],
        **more,
    }


def measure(repo: Path, ranks: int = 2, rows: list[dict] | None = None, **more) -> Path:
    """Write a result file of made-up values into a repository made for a test."""
    rows = rows or [
        row("overlapped", 0.0012, bound_s=0.116, bound_from="state over the pinned rate"),
        row("none", None, step_s=0.3),
        row("async_save", 3.8, loaded_back_bitwise=True, note="the shipped defaults"),
        row("a_peer", 0.3, loaded_back_bitwise=False),
    ]
    data = {
        "benchmark": "checkpoint_stall",
        "code_sha256": {"async_save": code_sha256(recipe_of(repo))},
        "torch": "2.11.0",
        "device": "Test GPU",
        "driver": "1.2",
        "ranks": ranks,
        "date": "2026-01-02",
        "workload": {"model": "a stack of layers", "state_bytes_per_rank": 6_440_000_000}
        | {"tokens_per_step": {"long": 65536, "short": 8192}},
        "link": {"pinned_d2h_bytes_per_s": 55.4e9},
        "rows": rows,
        "not_run": {"another_peer": "ImportError: no wheel, see --help"},
    } | more
    path = repo / "benchmarks" / "results" / f"checkpoint_stall.test-x{ranks}.json"
    path.write_text(json.dumps(data))
    return path


def trace(repo: Path, mode: str, **other) -> Path:
    def event(name, lane, ts, dur, **args):
        args = {"lane": lane, **args}
        return {"ph": "X", "name": name, "pid": 0, "tid": 1, "ts": ts, "dur": dur, "args": args}

    data = {
        "otherData": {"device": "Test GPU", "ranks": 2, "torch": "2.11.0", "date": "2026-01-02"}
        | other,
        "traceEvents": [
            event("step", "compute", 1000, 40_000),
            event("save", "compute", 41_000, 20_000, stall=True),
            event("step", "compute", 61_000, 40_000),
            event("copy", "copy", 42_000, 18_000),
            event("write", "write", 61_000, 90_000),
            {"ph": "i", "name": "call returns", "ts": 61_000, "args": {"mark": True}},
            {"ph": "X", "name": "not drawn", "ts": 0, "dur": 1e9, "args": {}},
        ],
    }
    path = repo / "benchmarks" / "traces" / f"checkpoint_stall.{mode}.test-x2.json"
    path.write_text(json.dumps(data))
    return path


def render(repo: Path, page: str) -> tuple[str, str]:
    """Build (or build again) a site of a page and a recipe's page; return HTML and warnings."""
    source = repo / "site"
    (source / "recipes" / "checkpoint").mkdir(parents=True, exist_ok=True)
    (source / "conf.py").write_text(
        f'extensions = ["lanes", "results", "timeline"]\nresults_repo = {str(repo)!r}\n'
    )
    files = {
        "index.rst": "Title\n=====\n\n.. toctree::\n\n   recipes/checkpoint/async_save\n\n" + page,
        "recipes/checkpoint/async_save.rst": "Async save\n==========\n",
    }
    for name, text in files.items():
        if not (source / name).exists() or (source / name).read_text() != text:
            (source / name).write_text(text)
    warnings = repo / "warnings"
    with warnings.open("w") as stream, docutils_namespace():
        trees = repo / "trees"
        Sphinx(source, source, repo / "out", trees, "html", status=None, warning=stream).build()
    return (repo / "out" / "index.html").read_text(), warnings.read_text()


def edit_code(repo: Path) -> None:
    recipe_of(repo).write_text(RECIPE.replace("return app", "return [app]"))


def edit_prose(repo: Path) -> None:
    prose = RECIPE.replace("Save it.", "Save it, once.").replace("# at once", "# later")
    recipe_of(repo).write_text(prose.replace("A recipe.", "Another title.") + "\n# %%\n# Words.\n")


def lint(repo: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "benchmarks.readme_table", "--repo", str(repo), *arguments]
    environment = os.environ | {"PYTHONPATH": str(REPO)}
    return subprocess.run(command, cwd=repo, env=environment, capture_output=True, text=True)


STALE = "Measured on an earlier version"


def test_a_figure_that_rounds_up_gets_the_larger_unit():
    written = [result_files.seconds(value) for value in (0.9996, 0.9994, 0.0009996)]
    assert written == ["1.00 s", "999 ms", "1.00 ms"]
    assert result_files.byte_count(999.7e6) == "1.00 GB"


# -- freshness ---------------------------------------------------------------------------------


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


# -- pages -------------------------------------------------------------------------------------


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
    assert "2026-01-02, beside another job on two other GPUs." in html
    measure(repo, rows=[row("overlapped", 0.001, **job), row("async_save", 3.8)])
    html, _ = render(repo, ".. result-table:: checkpoint_stall")
    assert "2026-01-02, beside another job on two other GPUs (overlapped)." in html
    html, _ = render(repo, ".. result-table:: checkpoint_stall\n   :rows: async_save\n")
    assert "2026-01-02. Workload" in html


def test_the_figure_takes_its_colours_from_the_page(repo):
    measure(repo)
    html, warnings = render(repo, ".. result-figure:: checkpoint_stall")
    assert warnings == ""
    (svg,) = re.findall(r"<svg class=\"result-svg\".*?</svg>", html, re.S)
    assert not re.search(r"#0[1-9]0[1-9]0[1-9]|<style|font:|width=\"\d+[\d.]*pt\"", svg)
    assert "currentColor" in svg and "var(--result-series-1)" in svg and "var(--result-peer)" in svg
    for text in ("overlapped  1.20 ms", "a_peer  300 ms, saved wrong data"):
        assert text in svg, text
    assert "staging costs (storage: memory, step: long). Measured on" in html
    assert "storage: memory" not in svg


def test_what_drawings_share_stands_below_them_and_what_parts_them_above(repo):
    stock = {"model": "llama-1b", "loop": "reads"}
    measure(
        repo,
        rows=[
            row("async_save", 1.0, **stock, compiled=False),
            row("async_save", 2.0, **stock, compiled=True),
        ],
    )
    html, warnings = render(repo, ".. result-figure:: checkpoint_stall")
    assert warnings == "" and "(model: llama-1b, loop: reads, storage: memory, step: long)" in html
    drawings = re.findall(r"<svg class=\"result-svg\".*?</svg>", html, re.S)
    assert ["compiled: yes" in drawing for drawing in drawings] == [False, True]
    assert "llama-1b" not in "".join(drawings)
    html, _ = render(repo, ".. result-table:: checkpoint_stall\n   :where: compiled=yes")
    assert "2.00 s" in html and "1.00 s" not in html and "compiled: yes" in html


def test_a_stall_of_zero_or_below_is_written_without_a_bar(repo):
    measure(repo, rows=[row("overlapped", -0.0004), row("pinned", 0.12), row("process", None)])
    html, _ = render(repo, ".. result-figure:: checkpoint_stall")
    assert "overlapped  -400 µs" in html and "process  " not in html


def test_rows_over_tokens_are_lines(repo):
    rows = [
        {"name": name, "tokens": tokens, "efficiency": 0.9, "step_s": 0.1, "samples": {}}
        for name in ("fsdp2", "prefetch")
        for tokens in (1024, 2048)
    ]
    path = measure(repo, rows=rows, benchmark="fsdp_overlap")
    path.rename(path.with_name("fsdp_overlap.test-x2.json"))
    html, warnings = render(repo, ".. result-figure:: fsdp_overlap")
    assert warnings == "" and html.count("<svg class=") == 1
    assert "1,024" in html and "var(--result-series-2)" in html


def test_pairs_are_shown_with_their_spread_and_rows_without_them_as_before(repo):
    paired = {"efficiency": 0.951, "pairs": 8, "efficiency_spread": 0.0042}
    rows = [
        {"name": "fsdp2", "tokens": 8192, "efficiency": 0.8, "samples": {"step_s": [0.3]}},
        {"name": "update_in_order", "tokens": 8192, "samples": {"mode_window_s": [[0.3, 0.3]] * 8}},
    ]
    path = measure(repo, rows=[rows[0], rows[1] | paired], benchmark="fsdp_overlap")
    path = path.rename(path.with_name("fsdp_overlap.test-x2.json"))
    html, warnings = render(repo, ".. result-table:: fsdp_overlap")
    assert warnings == "" and "Of pairs of windows" in html
    assert "80.0 %" in html and "95.1 %" in html and "0.4 %" in html
    without = json.loads(path.read_text()) | {"rows": rows[:1]}
    path.write_text(json.dumps(without))
    html, warnings = render(repo, ".. result-table:: fsdp_overlap")
    assert warnings == "" and "80.0 %" in html and "Of pairs of windows" not in html


def measured_steps(repo: Path) -> None:
    rows = [
        {
            "name": name,
            "tokens": tokens,
            "step_s": tokens / 1e4,
            "eta": 0.9,
            "samples": {},
            "recipes": [],
        }
        for name in ("resident", "streamed")
        for tokens in (2048, 4096)
    ]
    rows = [row | {"bound_s": row["step_s"] * 0.9, "kept": row["tokens"] / 8192} for row in rows]
    path = measure(
        repo, rows=rows, benchmark="offload_step", workload={"ridge_tokens_forward": 3000}
    )
    path.rename(path.with_name("offload_step.test-x2.json"))


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
    assert "Not measured yet" in render(repo, gain)[0]
    measure(repo, 4, rows[:1])
    assert "4 × Test GPU" in render(repo, gain)[0]
    measure(repo, 2, rows)
    html, _ = render(repo, gain)
    assert "2 × Test GPU" in html and "a_peer" in html
    measure(repo, 4, rows)
    assert "4 × Test GPU" in render(repo, gain)[0]


def test_a_gain_is_of_the_code_of_today_and_names_the_tokens_of_a_step(repo):
    rows = [row("async_save", 1.0) | {"model": "m", "tokens": 4096}]
    measure(repo, 4, rows, code_sha256={"async_save": "of an earlier version"})
    measure(repo, 2, rows)
    gain = ".. result-gain:: checkpoint_stall\n   :rows: async_save\n   :field: staging_cost_s\n"
    html, _ = render(repo, gain)
    assert "Stock m, 4,096 tokens a step, 2 × Test GPU." in html


def test_a_gain_of_earlier_code_alone_is_the_latest(repo):
    earlier = {"code_sha256": {"async_save": "of an earlier version"}}
    measure(repo, 4, [row("async_save", 1.0) | {"model": "m"}], date="2026-01-01", **earlier)
    measure(repo, 2, [row("async_save", 1.0) | {"model": "m"}], date="2026-02-01", **earlier)
    gain = ".. result-gain:: checkpoint_stall\n   :rows: async_save\n   :field: staging_cost_s\n"
    assert "2 × Test GPU, by an earlier version" in render(repo, gain)[0]


def test_rows_of_one_name_are_told_apart_by_what_differs(repo):
    case = {"tokens": 2048, "efficiency": 0.8, "samples": {}}
    rows = [
        {"name": "fsdp2", "reduce_dtype": dtype, "activation_checkpointing": again} | case
        for dtype, again in (("float32", False), ("bfloat16", False), ("float32", True))
    ]
    only_bits = {"name": "fsdp2", "tokens": 512, "reduce_dtype": "float32", "samples": {}}
    path = measure(repo, rows=[*rows, only_bits], benchmark="fsdp_overlap")
    path.rename(path.with_name("fsdp_overlap.test-x2.json"))
    html, warnings = render(repo, ".. result-table:: fsdp_overlap")
    cells = re.findall(r'result-name"><p><code.*?</code>(.*?)</p>', html, re.S)
    said = [re.sub(r"<[^>]+>", "", cell).strip() for cell in cells]
    words = ["reduced in float32", "reduced in float32, with recomputation", "reduced in bfloat16"]
    assert warnings == "" and said == words  # and no row of dashes


def test_a_machine_that_measured_the_reference_alone_has_no_tab(repo):
    measure(repo, 1, rows=[row("none", 0.1)])
    measure(repo, 2, rows=[row("none", 0.1), row("async_save", 2.0)])
    html, warnings = render(repo, ".. result-table:: checkpoint_stall\n   :rows: none async_save")
    assert warnings == "" and "2.00 s" in html and "1 × Test GPU" not in html


def test_one_tab_a_file_most_ranks_first(repo):
    measure(repo, 1)
    measure(repo, 2)
    html, _ = render(repo, ".. result-table:: checkpoint_stall")
    labels = re.findall(r'class="sd-tab-label"[^>]*>\s*([^<]+?)\s*<', html)
    assert labels == ["2 × Test GPU", "1 × Test GPU"]


def test_of_tabs_of_earlier_code_the_latest_comes_first(repo):
    earlier = {"code_sha256": {"async_save": "of an earlier version"}}
    measure(repo, 2, date="2026-02-01", **earlier)
    measure(repo, 4, date="2026-01-01", **earlier)
    html, _ = render(repo, ".. result-table:: checkpoint_stall")
    labels = re.findall(r'class="sd-tab-label"[^>]*>\s*([^<]+?)\s*<', html)
    assert labels == ["2 × Test GPU", "4 × Test GPU"]


def test_a_tab_of_todays_code_comes_before_one_of_an_earlier_version(repo):
    measure(repo, 4, code_sha256={"async_save": "of an earlier version"})
    measure(repo, 1)
    measure(repo, 2)
    html, _ = render(repo, ".. result-table:: checkpoint_stall")
    labels = re.findall(r'class="sd-tab-label"[^>]*>\s*([^<]+?)\s*<', html)
    assert labels == [f"{ranks} × Test GPU" for ranks in (2, 1, 4)]


def test_the_tab_with_most_of_the_rows_comes_first(repo):
    measure(repo, 1, rows=[row("overlapped", 1.0), row("pinned", 2.0), row("process", 3.0)])
    measure(repo, 2, rows=[row("overlapped", 1.0), row("pinned", 2.0)])
    html, _ = render(repo, ".. result-table:: checkpoint_stall")
    labels = re.findall(r'class="sd-tab-label"[^>]*>\s*([^<]+?)\s*<', html)
    assert labels == ["1 × Test GPU", "2 × Test GPU"]


def test_a_table_marks_the_rows_of_an_earlier_version(repo):
    earlier = {"code_sha256": {"async_save": "of an earlier version"}}
    rows = [row("async_save", 1.0), row("async_save", 2.0, storage="disk") | earlier]
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


def test_a_parameter_that_all_rows_share_has_no_column(repo):
    measure(repo, rows=[row("async_save", 1.0), row("async_save", 2.0, storage="disk")])
    html, _ = render(repo, ".. result-table:: checkpoint_stall")
    assert "> memory<" in html and "> disk<" in html
    assert ">Step<" not in html and "Medians (step: long)." in html


def test_a_table_has_the_three_columns_that_decide_and_the_rest_elsewhere(repo):
    measure(repo)
    html, _ = render(repo, ".. result-table:: checkpoint_stall")
    headings = re.findall(r"<th[^>]*><p>(.*?)</p>", html)
    assert headings[0] == "Way" and len(headings) == 4
    assert 'href="guide/results.html"' in html


def test_a_workload_without_a_value_is_not_drawn(repo):
    rows = [row("async_save", 1.0), row("none", None), row("none", None, step="short")]
    measure(repo, rows=rows)
    html, _ = render(repo, ".. result-figure:: checkpoint_stall")
    assert html.count("<svg class=") == 1 and "step: short" not in html
    html, warnings = render(repo, ".. result-figure:: checkpoint_stall\n   :rows: none")
    assert warnings == "" and "<svg" not in html and "Not measured yet" in html


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


@pytest.mark.parametrize(
    ("name", "recipes", "colour"),
    [
        ("default_stager_as_published", [], "peer"),
        ("default_stager_ordered", ["default_stager"], "series-1"),
        ("one_stream", ["weight_streaming"], "peer"),
    ],
)
def test_a_bar_is_in_the_recipes_colour_where_the_row_is_what_the_recipe_shows(
    repo, name, recipes, colour
):
    measure(repo, rows=[row(name, 1.2, recipes=recipes, bound_s=0.1)])
    html, _ = render(repo, ".. result-figure:: checkpoint_stall")
    assert f"var(--result-{colour})" in html and "(dashed: bound)" in html


def test_an_unknown_benchmark_is_reported(repo):
    assert "unknown benchmark 'stalls'" in render(repo, ".. result-table:: stalls")[1]


# -- traces ------------------------------------------------------------------------------------


def test_traces_share_an_axis_and_can_be_downloaded(repo):
    paths = [trace(repo, "async_save"), trace(repo, "pinned")]
    html, warnings = render(repo, ".. timeline:: checkpoint_stall async_save pinned process")
    assert warnings == ""
    assert html.count('<svg class="lanes-svg') == 1 and "50 ms" in html
    for mode in ("async_save", "pinned"):
        assert f"{mode}, compute: 0 s to 40.0 ms step; 40.0 ms to 60.0 ms save" in html
    for path in paths:
        (copy,) = (repo / "out" / "_downloads").rglob(path.name)
        assert copy.read_bytes() == path.read_bytes()
    assert "Not measured yet (checkpoint_stall: process)" in html


def test_events_outside_the_lanes_are_not_drawn_and_stalls_are(repo):
    panel = read_panel("pinned", result_files.load_trace(trace(repo, "pinned")))
    assert [lane.name for lane in panel.lanes] == ["compute", "copy", "write"]
    kinds = [bar.kind for bar in panel.lanes[0].bars]
    assert sorted(kinds) == ["compute", "compute", "stall"]
    assert panel.marks[0].at == pytest.approx(0.06)


def test_what_holds_the_host_is_drawn_as_a_stall(repo):
    path = trace(repo, "pinned")
    path.write_text(path.read_text().replace('"lane": "write"', '"lane": "host"'))
    panel = read_panel("pinned", result_files.load_trace(path))
    assert [(lane.name, lane.bars[0].kind) for lane in panel.lanes][-1] == ("host", "stall")


def test_a_sliver_between_stalls_is_not_drawn_and_a_step_between_them_is(repo):
    path = trace(repo, "pinned")
    data = json.loads(path.read_text())
    held = [
        {"ph": "X", "name": name, "ts": ts, "dur": dur, "args": {"lane": "compute"} | stall}
        for name, ts, dur, stall in [
            ("stall", 110_000, 20_000, {"stall": True}),
            ("sliver", 130_000, 100, {}),
            ("stall", 130_100, 20_000, {"stall": True}),
            ("step", 150_100, 10_000, {}),
            ("stall", 160_100, 20_000, {"stall": True}),
        ]
    ]
    data["traceEvents"] += held
    path.write_text(json.dumps(data))
    bars = read_panel("pinned", result_files.load_trace(path)).lanes[0].bars
    late = [(bar.label, bar.kind) for bar in bars if bar.start > 0.1]
    assert late == [("stall", "stall")] * 2 + [("step", "compute"), ("stall", "stall")]


def test_slivers_are_merged_and_steps_are_not():
    slivers = [Bar(i * 1e-3, i * 1e-3 + 0.9e-3, "gemm", "compute") for i in range(100)]
    assert merge(slivers, 1e-3) == [Bar(0, pytest.approx(0.0999), "gemm", "compute")]
    steps = [Bar(0, 0.1, "step 1", "compute"), Bar(0.1001, 0.2, "step 2", "compute")]
    assert merge(steps, 1e-3) == steps


@pytest.mark.parametrize(("span", "length"), [(1.0, 0.2), (0.1, 0.02), (4.0, 1.0), (0.8, 0.2)])
def test_scale_bar(span, length):
    assert scale_bar(span) == pytest.approx(length)


# -- files that cannot be read -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"driver": None}, "'driver' is missing"),
        ({"benchmark": "stall"}, "'benchmark' is 'stall'"),
        ({"ranks": 4}, "'ranks' is 4"),
        ({"date": "yesterday"}, "'date' must begin"),
        ({"rows": [{"name": "x"}]}, "row 0 needs"),
        ({"rows": [row("x", "3 s")]}, "'staging_cost_s' of row x is not a number"),
    ],
)
def test_a_bad_result_file_fails_lint_and_page(repo, change, says):
    path = measure(repo)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(result_files.ResultError, match=says):
        result_files.load(path)
    process = lint(repo, "--check")
    assert process.returncode == 1 and path.name in process.stderr
    _, warnings = render(repo, ".. result-table:: checkpoint_stall")
    assert path.name in warnings


def test_a_bad_trace_is_reported(repo):
    path = trace(repo, "pinned")
    path.write_text(path.read_text().replace('"lane": "copy"', '"lane": "copies"'))
    with pytest.raises(result_files.ResultError, match="'copy': a drawn event"):
        result_files.load_trace(path)
    assert path.name in render(repo, ".. timeline:: checkpoint_stall pinned")[1]


# -- the README --------------------------------------------------------------------------------


def test_the_readme_is_written_checked_and_a_hand_edit_fails(repo):
    readme = repo / "README.md"
    assert lint(repo).returncode == 0
    assert readme_table.NO_RESULTS in readme.read_text()
    assert lint(repo, "--check").returncode == 0

    measure(repo)
    process = lint(repo, "--check")
    assert process.returncode == 1 and "run: make readme" in process.stdout
    assert lint(repo).returncode == 0
    written = readme.read_text()
    assert "| `overlapped` | 1.20 ms |" in written and "`none`" not in written
    assert written.startswith("# Title\n\n") and written.endswith("\n\nAfter.\n")
    assert lint(repo, "--check").returncode == 0

    readme.write_text(written.replace("1.20 ms", "1.10 ms"))
    assert lint(repo, "--check").returncode == 1
    assert "1.10 ms" in readme.read_text()


def test_the_readme_shows_what_varies_in_tokens_as_a_table_over_tokens(repo):
    measured_steps(repo)
    assert lint(repo).returncode == 0
    written = (repo / "README.md").read_text()
    assert "| | 2,048 | 4,096 |" in written and "| `streamed` | 25.0 % | 50.0 % |" in written


@pytest.mark.parametrize("over_tokens", [False, True])
def test_the_readme_marks_what_was_measured_on_an_earlier_version(repo, over_tokens):
    if over_tokens:
        steps = {"tokens": 2048, "kept": 0.2, "samples": {}}
        rows = [steps | {"name": "overlapped", "recipes": []}, steps | {"name": "async_save"}]
        path = measure(repo, rows=rows, benchmark="offload_step")
        path.rename(path.with_name("offload_step.test-x2.json"))
    else:
        measure(repo)
    readme = repo / "README.md"
    note = "\n\n† Measured on an earlier version of `async_save`: the code has changed since."
    assert lint(repo).returncode == 0 and "†" not in readme.read_text()

    edit_prose(repo)
    assert lint(repo, "--check").returncode == 0

    edit_code(repo)
    process = lint(repo, "--check")
    assert process.returncode == 1 and "run: make readme" in process.stdout
    assert lint(repo).returncode == 0
    written = readme.read_text()
    assert "| `async_save` † | " in written and "| `overlapped` | " in written
    assert written.count(note) == 1


def test_the_readme_marks_a_single_figure_of_an_earlier_version(repo):
    row = {"name": "async_save", "kept": 0.2, "samples": {}}
    of_today = {"code_sha256": {"async_save": code_sha256(recipe_of(repo))}}
    earlier = {"code_sha256": {"async_save": "0" * 64}}
    rows = [row | {"tokens": 2048} | of_today, row | {"tokens": 4096} | earlier]
    path = measure(repo, rows=rows, benchmark="offload_step")
    path.rename(path.with_name("offload_step.test-x2.json"))
    assert lint(repo).returncode == 0
    written = (repo / "README.md").read_text()
    assert "| `async_save` | 20.0 % | 20.0 % † |" in written and f"† {STALE}" in written


def test_the_readme_says_which_torch_the_recipes_ran_on(repo):
    recipe_of(repo).with_name("pinned_staging.py").write_text(RECIPE)

    def run(name: str, ok: bool) -> dict:
        hashes = result_files.hashes_of([name], repo)
        return {"code_sha256": hashes, "ok": ok, "date": "2026-01-02", "failures": []}

    (repo / "guide").mkdir()
    recipes = {
        "async_save": run("async_save", True),
        "pinned_staging": run("pinned_staging", False),
    }
    record = {"2.9.1": {"ranks": 2, "recipes": recipes}}
    (repo / "guide" / "versions.json").write_text(json.dumps(record))
    readme = repo / "README.md"
    assert lint(repo).returncode == 0
    row = "| CPU, 2 ranks | 2.9.1 | 1 of 2 | `pinned_staging` | 2026-01-02"
    assert f"{row} |" in readme.read_text()
    edit_code(repo)
    assert lint(repo, "--check").returncode == 1 and lint(repo).returncode == 0
    assert f"{row}, 1 of them in an earlier version |" in readme.read_text()


def with_library(repo: Path) -> Path:
    """Let the recipe of ``repo`` import a module of the library; the module."""
    library = repo / "overlap_recipes" / "checkpoint"
    library.mkdir(parents=True)
    for folder in (library, library.parent):
        (folder / "__init__.py").write_text("")
    module = library / "saves.py"
    module.write_text('"""Saves."""\n\n\ndef save():\n    return 1\n')
    imports = "from overlap_recipes.checkpoint.saves import save\n"
    recipe_of(repo).write_text(f"{imports}{RECIPE}")
    return module


def test_a_row_is_stale_when_the_library_that_it_measured_has_changed(repo):
    module = with_library(repo)
    name = "overlap_recipes.checkpoint.saves"
    hashes = result_files.hashes_of(["async_save", name], repo)
    assert set(hashes) > {"async_save", "overlap_recipes", name}
    measured = [("async_save", hashes), (name, hashes)]
    assert result_files.changed_recipes(measured, repo) == []
    module.write_text('"""Prose."""\n\n\ndef save():\n    return 1\n')
    assert result_files.changed_recipes(measured, repo) == []
    module.write_text('"""Prose."""\n\n\ndef save():\n    return 22\n')
    assert result_files.changed_recipes(measured, repo) == ["async_save", name]


def test_a_row_without_the_librarys_hash_is_stale_and_so_is_one_of_a_name_that_is_gone(repo):
    module = with_library(repo)
    own = {"async_save": code_sha256(recipe_of(repo))}
    assert result_files.changed_recipes([("async_save", own)], repo) == ["async_save"]
    name = "overlap_recipes.checkpoint.saves"
    hashes = result_files.hashes_of([name], repo)
    module.rename(module.with_name("other.py"))
    assert result_files.changed_recipes([(name, hashes)], repo) == [name]
    measure(repo, code_sha256=hashes, rows=[row("ours", 0.1, recipes=[name])])
    (line,) = result_files.stale_results(repo)
    assert line.endswith(f"test-x2.json: measured on an earlier version of {name}")


def test_a_name_that_nothing_has_is_no_hash_to_write(repo):
    with pytest.raises(result_files.ResultError, match="no recipe and no module .* async_safe"):
        result_files.hashes_of(["async_safe"], repo)


def test_a_readme_without_markers_is_an_error(repo):
    (repo / "README.md").write_text("# Title\n")
    process = lint(repo, "--check")
    assert process.returncode == 1 and "<!-- results:begin -->" in process.stderr


# -- this repository ---------------------------------------------------------------------------


def test_every_committed_measurement_can_be_read():
    for path in (REPO / "benchmarks" / "results").glob("*.json"):
        result_files.load(path)
    for path in (REPO / "benchmarks" / "traces").glob("*.json"):
        result_files.load_trace(path)


def test_the_code_hash_is_the_same_under_every_python(repo):
    """A result is measured under one Python and read under another: 3.12 computed this one."""
    expected = "976adbfca22b3ca6fc498b9698c616b81605ff7ebd1f5409283a4ea941d56891"
    assert code_sha256(recipe_of(repo)) == expected
