"""What the extension runs, when, and what the pages show of it: one small site."""

import json
import re
from pathlib import Path

import torch
from bs4 import BeautifulSoup
from small_site import HELLO, Site

from rankproof import sphinx_ext as rank_output
from rankproof.recipe import load_recipe


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
    assert "a rank raised an exception" in failed.get_text()
    assert "recipes/toys/hello.html" in toy_site.page("index"), "the other pages render"
    summary = BeautifulSoup(toy_site.page("index"), "html.parser").select_one(".build-summary")
    assert summary.get_text() == (
        "For these pages 7 of 8 recipes passed on 2 ranks, and their checks caught 4 of 6 "
        f"deliberate faults in them (CPU, torch {torch.__version__})."
    )


def test_without_execution_nothing_runs_and_the_pages_say_so(site):
    built = site.build("-D", "execute_recipes=0")
    assert built.returncode == 0, built.stdout + built.stderr
    assert "nothing executed" in built.stdout
    assert not (site.root / "_build/recipe_runs").exists()
    page = page_of(site, "hello")
    output = page.select_one(".sphx-glr-script-out").get_text()
    assert "Nothing was executed for this page" in output
    assert "Nothing was executed for these pages" in site.page("index")
    assert "Not executed for this page" in page.select_one(".recipe-control").get_text()
    assert "hello from rank" not in output


def hello(folder: Path):
    path = folder / "hello.py"
    path.write_text(HELLO, encoding="utf-8")
    return load_recipe(path)


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
