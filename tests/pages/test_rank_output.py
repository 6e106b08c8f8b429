"""What the extension runs, when, and what the pages show of it: one small site, built twice."""

import dataclasses
import json
import re
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bs4 import BeautifulSoup
from small_site import BAD, HELLO, HELLO_CONTROLS, Site
from sphinx.errors import SphinxError

from rankproof import sphinx_ext as rank_output
from rankproof.recipe import load_recipe
from rankproof.run import Report

EDIT = "with the edit 'rank_denied'"


def executed(log: str) -> set[str]:
    """The runs that a build made, as the log names them."""
    return set(re.findall(r"^  (\w+ (?:on|with).*?): .* in ", log, re.MULTILINE))


def page_of(site: Site, name: str) -> BeautifulSoup:
    return BeautifulSoup(site.page(f"recipes/toys/{name}"), "html.parser")


def test_every_rank_and_every_control_is_on_the_page(toy_site):
    page = page_of(toy_site, "hello")
    output = page.select_one(".sphx-glr-script-out")
    ranks = output.select("details.rank")
    assert [r.pre.get_text().strip() for r in ranks] == ["hello from rank 0", "hello from rank 1"]
    assert [rank.has_attr("open") for rank in ranks] == [True, False]
    assert re.search(r"2 ranks · CPU.* · torch .* · [\d.]+ s", output.get_text())
    last_code = page.select("div.highlight-Python")[-1]
    assert last_code.find_next_sibling("div") is output
    control = page.select_one(".recipe-control").get_text()
    assert "Expect a rank below zero" in control
    assert "-    assert rank >= 0\n+    assert rank < 0" in control
    assert "AssertionError" in control
    twin = (toy_site.root / "_build/html/recipes/toys/hello.md").read_text()
    assert "hello from rank 1" in twin
    assert "```python\nimport os\n\n\ndef main() -> None:\n    rank = int(os.environ" in twin


def test_a_recipe_of_another_folder_is_offered_with_the_one_that_imports_it(toy_site):
    page = BeautifulSoup(toy_site.page("recipes/more/second"), "html.parser")
    assert "hello from rank 1" in page.select_one(".sphx-glr-script-out").get_text()
    assert "put next to it hello.py" in page.select_one(".recipe-files").get_text()
    names = [a["href"].rpartition("/")[2] for a in page.select(".recipe-files a[download]")]
    assert names == ["second.py", "hello.py"]
    (archive,) = page.select('.recipe-files a[href$=".zip"]')
    bundle = toy_site.root / "_build/html/recipes/more" / archive["href"]
    with zipfile.ZipFile(bundle) as files:
        assert sorted(files.namelist()) == ["hello.py", "second.py"]


def test_what_is_broken_fails_the_build_and_shows_on_its_page(toy_site):
    log = toy_site.log
    assert "Recipes failed" in log
    assert "raises on 2 ranks: FAILED" in log
    assert "RuntimeError: no such luck" in log
    assert "run it again: python -m harness run recipes_source/toys/raises.py --ranks 2" in log
    missed = "no failure is one that the control names: expected raised (AssertionError: )"
    assert f"blind.py: the control 'rank_denied' was not caught: {missed}" in log
    assert "observed misfit (control 'rank_denied': its 'find' text occurs 0 times" in log
    assert "silent has controls that its page does not show" in log

    page = page_of(toy_site, "raises")
    assert "This recipe failed" in page.select_one(".admonition.danger").get_text()
    failed = page.select_one("#recipe-failed")
    assert "no such luck" in failed.get_text()
    assert str(toy_site.root) not in failed.get_text()
    assert [rank.has_attr("open") for rank in failed.select("details.rank")] == [False, True]
    assert "Not caught" in toy_site.page("recipes/toys/blind")
    assert "text occurs 0 times" in toy_site.page("recipes/toys/misfit")
    for name, words in BAD.items():
        assert f"{name} on 2 ranks: FAILED" in log
        assert words in page_of(toy_site, name).select_one("#recipe-failed").get_text()
    assert "recipes/toys/hello.html" in toy_site.page("index"), "the other pages render"
    summary = BeautifulSoup(toy_site.page("index"), "html.parser").select_one(".build-summary")
    passed = f"7 of {7 + len(BAD)}"
    assert summary.get_text() == (
        f"For these pages {passed} recipes passed on 2 ranks, and their checks caught 4 of 6 "
        f"deliberate faults in them (CPU, torch {torch.__version__})."
    )


def test_only_what_is_stale_runs_again_and_what_is_gone_is_gone(toy_site, tmp_path):
    site = Site(tmp_path / "site", copy_of=toy_site)
    site.recipe("prose", HELLO.replace("A rank knows", "Every rank knows"))
    site.recipe("prose", HELLO, HELLO_CONTROLS.replace("Expect", "Assume"))
    site.recipe("edited", HELLO, HELLO_CONTROLS.replace("rank < 0", "rank < -1"))
    site.recipe("hello", HELLO.replace("hello from", "good day from"))
    for name in (*BAD, "misfit", "silent"):
        (site.root / f"recipes_source/toys/{name}.py").unlink()
    shutil.rmtree(site.root / "recipes")
    built = site.build("-D", "rank_launcher=warm")
    must = {"hello on 2 ranks", f"hello {EDIT}", "second on 2 ranks", f"edited {EDIT}"}
    assert executed(built.stdout) == must | {f"blind {EDIT}"}, "what is not caught is not kept"
    assert "rank &lt; -1" in site.page("recipes/toys/edited")
    assert "Assume a rank below zero" in site.page("recipes/toys/prose")
    assert "good day from rank 1" in site.page("recipes/toys/hello")
    assert not list((site.root / "_build/html/recipes").rglob("raises.*"))
    assert "toys/raises" not in site.page("index")


def pages_read(log: str) -> set[str]:
    return set(re.findall(r"reading sources\.\.\. \[ *\d+%\] (\S+)", log))


def test_without_execution_nothing_runs_and_an_unchanged_build_reads_the_landing_page_alone(site):
    def drawn(end: int) -> str:
        schematic = f".. lanes:: One rank.\n\n   rank: 0-{end} hello\n\n"
        return HELLO.replace(".. verification-badge::", schematic + ".. verification-badge::")

    site.recipe("hello", drawn(2), HELLO_CONTROLS)
    build = ("-D", "execute_recipes=0")
    built = site.build(*build)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "nothing executed" in built.stdout
    assert not (site.root / "_build/recipe_runs").exists()
    page = page_of(site, "hello")
    assert (
        "Nothing was executed for this page" in page.select_one(".sphx-glr-script-out").get_text()
    )
    assert "Nothing was executed for these pages" in site.page("index")
    assert "Not executed for this page" in page.select_one(".recipe-control").get_text()
    assert "hello from rank" not in page.select_one("details.rank, .sphx-glr-script-out").get_text()

    assert "recipes/toys/index" in pages_read(built.stdout)
    assert pages_read(site.build(*build).stdout) == {"index"}
    site.recipe("hello", drawn(3))
    assert "recipes/toys/index" in pages_read(site.build(*build).stdout)


def hello(folder: Path):
    path = folder / "hello.py"
    path.write_text(HELLO, encoding="utf-8")
    return load_recipe(path)


def test_ranks_is_a_number_and_never_fewer_than_a_recipe_needs(tmp_path, monkeypatch):
    recipe = dataclasses.replace(hello(tmp_path), ranks=(2, 3))
    for asked, ranks in (("", 2), ("1", 2), ("3", 3)):
        monkeypatch.setenv("RANKS", asked)
        assert rank_output.page_ranks(recipe) == ranks
    monkeypatch.setenv("RANKS", "many")
    with pytest.raises(SphinxError, match="RANKS='many': give a number of ranks, for example"):
        rank_output.page_ranks(recipe)


def test_a_recipe_that_was_not_run_fails_the_build_and_its_page_says_why(tmp_path):
    why = "it starts its ranks itself (spawn, line 4): use --launcher python"
    report = Report("hello", "hello.py", 2, "torchrun", "command", unjudged=[why])
    report.conclusive = False
    runs = rank_output.RecipeRuns(hello(tmp_path), report)
    assert why in "".join(runs.problems())
    page = rank_output.output_of(report)
    assert page.astext().startswith("This recipe failed")
    assert why in page.astext()
    assert summary_of(runs).startswith("For these pages 0 of 1 recipes passed")


def summary_of(runs: rank_output.RecipeRuns) -> str:
    app = SimpleNamespace(recipe_runs={"page": runs})
    env = SimpleNamespace(app=app, note_reread=lambda: None)
    (paragraph,) = rank_output.BuildSummary.run(SimpleNamespace(env=env))
    return paragraph.astext()


def test_the_badge_says_which_version_ran_and_how_it_ended(tmp_path, monkeypatch):
    recipe = hello(tmp_path)
    monkeypatch.setattr(rank_output, "VERIFIED", tmp_path)

    def badge(*record: object) -> str:
        if record:
            version, commit, ok = record
            mine = {"version": version, "commit": commit, "ok": ok, "date": "2026-01-02"}
            content = {"device": "TEST", "ranks": 2, "torch": "2.11.0", "recipes": {"hello": mine}}
            (tmp_path / "device-x2.json").write_text(json.dumps(content))
        rank_output.verified_records.cache_clear()
        return rank_output.badge(recipe).astext()

    assert badge() == "Not yet verified: “make verify” has not run it on an accelerator"
    where = "2 × TEST, torch 2.11.0"
    said = f"Verified on {where}, version 0.2.1 (abc), 2026-01-02"
    assert badge("0.2.1", "abc", True) == said
    said = f"Verified on {where}, version before 0.2.1, 2026-01-02"
    assert badge("before 0.2.1", None, True) == said
    assert badge("0.2.1", "abc", False) == f"Fails on {where}, version 0.2.1 (abc), 2026-01-02"
    rank_output.verified_records.cache_clear()
