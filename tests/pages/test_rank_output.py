"""What the extension runs, when, and what the pages show of it."""

import json
import re

import torch
from bs4 import BeautifulSoup
from small_site import HELLO, HELLO_CONTROLS, RAISES, ROOT


def executed(log: str) -> list[str]:
    """The runs that a build made, as the log names them."""
    return re.findall(r"^  (\w+ (?:on|with).*?): .* in ", log, re.MULTILINE)


def test_every_rank_and_every_control_is_on_the_page(site):
    built = site.build()
    assert built.returncode == 0, built.stdout + built.stderr
    assert "1 of 1 recipes ran on 2 ranks (2 runs with their negative controls)" in built.stdout
    page = BeautifulSoup(site.page("recipes/toys/hello"), "html.parser")
    summary = BeautifulSoup(site.page("index"), "html.parser").select_one(".build-summary")
    assert summary.get_text() == (
        "For these pages 1 of 1 recipes passed on 2 ranks, and 1 of 1 deliberate faults in them "
        f"were caught (CPU, torch {torch.__version__})."
    )
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
    twin = (site.root / "_build/html/recipes/toys/hello.md").read_text()
    assert "hello from rank 1" in twin
    assert "```python\nimport os\n\n\ndef main() -> None:\n    rank = int(os.environ" in twin


def test_only_what_is_stale_runs_again(site):
    page = "recipes/toys/hello"
    edit = "hello with the edit 'rank_denied'"
    assert executed(site.build().stdout) == ["hello on 2 ranks", edit]
    assert executed(site.build().stdout) == []

    site.recipe("hello", HELLO.replace("A rank knows", "Every rank knows"))
    assert executed(site.build().stdout) == []
    assert "Every rank knows" in site.page(page)

    site.recipe("hello", HELLO, HELLO_CONTROLS.replace("Expect", "Assume"))
    assert executed(site.build().stdout) == []
    assert "Assume a rank below zero" in site.page(page)

    site.recipe("hello", HELLO, HELLO_CONTROLS.replace("rank < 0", "rank < -1"))
    assert executed(site.build().stdout) == [edit]
    assert "rank &lt; -1" in site.page(page)

    site.recipe("hello", HELLO.replace("hello from", "good day from"))
    assert executed(site.build().stdout) == ["hello on 2 ranks", edit]
    assert "good day from rank 1" in site.page(page)

    assert executed(site.build(RANKS="3").stdout) == ["hello on 3 ranks"]
    assert "good day from rank 2" in site.page(page)

    with (site.root / "harness/__init__.py").open("a") as harness:
        harness.write("# another harness\n")
    assert executed(site.build().stdout) == ["hello on 2 ranks", edit]
    assert "good day from rank 2" not in site.page(page)


def pages_read(log: str) -> set[str]:
    return set(re.findall(r"reading sources\.\.\. \[ *\d+%\] (\S+)", log))


def test_an_unchanged_build_reads_the_landing_page_alone(site):
    def drawn(end: int) -> str:
        schematic = f".. lanes:: One rank.\n\n   rank: 0-{end} hello\n\n"
        return HELLO.replace(".. verification-badge::", schematic + ".. verification-badge::")

    site.recipe("hello", drawn(2), HELLO_CONTROLS)
    build = ("-D", "execute_recipes=0")
    assert "recipes/toys/index" in pages_read(site.build(*build).stdout)
    assert pages_read(site.build(*build).stdout) == {"index"}
    site.recipe("hello", drawn(3))
    assert "recipes/toys/index" in pages_read(site.build(*build).stdout)


def test_an_edited_import_makes_a_recipe_stale(site):
    site.recipe(
        "second", HELLO.replace("import os\n", "import os\n\nimport hello\n"), HELLO_CONTROLS
    )
    site.build()
    site.recipe("hello", HELLO.replace("hello from", "good day from"))
    assert "second on 2 ranks" in executed(site.build().stdout)


def test_what_is_broken_fails_the_build_and_shows_on_its_page(site):
    site.recipe("raises", RAISES)
    site.recipe("blind", HELLO, HELLO_CONTROLS.replace('"rank < 0"', '"rank > -1"'))
    site.recipe("misfit", HELLO, HELLO_CONTROLS.replace("rank >= 0", "rank >= 1"))
    site.recipe("silent", HELLO.replace("# .. recipe-controls::\n", ""), HELLO_CONTROLS)
    built = site.build()
    assert built.returncode != 0
    log = built.stderr
    assert "Recipes failed" in log
    assert "raises on 2 ranks: FAILED" in log
    assert "RuntimeError: no such luck" in log
    assert "run it again: python -m harness run recipes_source/toys/raises.py --ranks 2" in log
    assert "blind.py: the control 'rank_denied' was not caught: expected raised, observed no" in log
    assert "misfit.py: control 'rank_denied': its 'find' text occurs 0 times" in log
    assert "silent has controls that its page does not show" in log

    page = BeautifulSoup(site.page("recipes/toys/raises"), "html.parser")
    assert "This recipe failed" in page.select_one(".admonition.danger").get_text()
    failed = page.select_one("#recipe-failed")
    assert "no such luck" in failed.get_text()
    assert str(site.root) not in failed.get_text()
    assert [rank.has_attr("open") for rank in failed.select("details.rank")] == [False, True]
    assert "Not caught" in site.page("recipes/toys/blind")
    assert "text occurs 0 times" in site.page("recipes/toys/misfit")
    assert "hello from rank 1" in site.page("recipes/toys/hello")
    assert "4 of 5 recipes passed on 2 ranks, and 2 of 4 deliberate faults" in site.page("index")

    again = executed(site.build().stdout)
    assert again[0] == "blind with the edit 'rank_denied'", "a control not caught must not be kept"
    assert again[-1] == "raises on 2 ranks", "a failed run must not be kept"


BAD = {
    "raises": "a rank raised an exception",
    "hangs": "ranks were still running at the deadline",
    "killed": "a rank was ended by a signal",
    "exits_early": "a rank called sys.exit",
    "leaves_a_process": "a process outlived the recipe",
    "leaves_a_thread": "a thread outlived the recipe",
    "leaves_a_process_group": "a process group was not destroyed",
}


def test_bad_recipes_are_reported_and_the_other_pages_render(site):
    for name in BAD:
        source = (ROOT / f"tests/data/bad/{name}.py").read_text(encoding="utf-8")
        title = f"It {name.replace('_', ' ')}"
        docstring = f'"""\n{title}\n{"=" * len(title)}\n\nA bad one.\n"""'
        site.recipe(name, re.sub(r'^""".*?"""', docstring, source, flags=re.DOTALL))
    site.write("tests/controls/hangs.toml", "deadline_s = 8")
    built = site.build()
    assert built.returncode != 0
    for name, words in BAD.items():
        assert f"{name} on 2 ranks: FAILED" in built.stderr
        failed = BeautifulSoup(site.page(f"recipes/toys/{name}"), "html.parser")
        assert words in failed.select_one("#recipe-failed").get_text()
    assert "hello from rank 1" in site.page("recipes/toys/hello")
    assert "recipes/toys/hello.html" in site.page("index")


def test_without_execution_nothing_runs_and_the_page_says_so(site):
    built = site.build("-D", "execute_recipes=0", out="html-noplot")
    assert built.returncode == 0, built.stdout + built.stderr
    assert "nothing executed" in built.stdout
    assert not (site.root / "_build/recipe_runs").exists()
    page = BeautifulSoup(site.page("recipes/toys/hello", out="html-noplot"), "html.parser")
    output = page.select_one(".sphx-glr-script-out").get_text()
    assert "Nothing was executed for this page" in output
    assert "Nothing was executed for these pages" in site.page("index", out="html-noplot")
    assert "Not executed for this page" in page.select_one(".recipe-control").get_text()
    assert "hello from rank" not in page.select_one("details.rank, .sphx-glr-script-out").get_text()


def test_a_vanished_recipe_takes_its_page_along(site):
    site.recipe("second", HELLO, HELLO_CONTROLS)
    site.build()
    assert (site.root / "_build/html/recipes/toys/second.html").exists()
    (site.root / "recipes_source/toys/second.py").unlink()
    built = site.build()
    assert built.returncode == 0, built.stderr
    assert not list((site.root / "_build/html/recipes").rglob("second.*"))
    assert "toys/second" not in site.page("index")


def test_ranks_must_be_a_number(site):
    built = site.build(RANKS="many")
    assert built.returncode != 0
    assert "RANKS='many': give a number of ranks, for example RANKS=4" in built.stderr


def test_the_badge_tells_this_code_from_an_earlier_one(site):
    def record(device: str, ok: bool, sha: str) -> None:
        content = {
            "device": device,
            "ranks": 2,
            "torch": "2.11.0",
            "date": "2026-01-02",
            "recipes": {"hello": {"code_sha256": {"hello": sha}, "ok": ok, "date": "2026-01-02"}},
        }
        site.write("harness/verified/device-x2.json", json.dumps(content))

    def badge() -> str:
        assert site.build("-D", "execute_recipes=0").returncode == 0
        page = BeautifulSoup(site.page("recipes/toys/hello"), "html.parser")
        return page.select_one(".verification").get_text().strip()

    from harness.recipe import code_sha256

    sha = code_sha256(site.root / "recipes_source/toys/hello.py")
    unseen = "Not yet verified: “make verify” has not run this code on an accelerator"
    assert badge() == unseen
    record("TEST", True, sha)
    assert badge() == "Verified on 2 × TEST, torch 2.11.0, this code, 2026-01-02"
    record("TEST", True, "another")
    assert badge() == "Verified on an earlier version: 2 × TEST, torch 2.11.0, 2026-01-02"
    record("TEST", False, sha)
    assert badge() == "Fails on 2 × TEST, torch 2.11.0, this code, 2026-01-02"


def test_the_smallest_number_of_ranks_wins_over_ranks(site):
    site.recipe("hello", HELLO, "ranks = [2, 3]\n" + HELLO_CONTROLS)
    assert executed(site.build(RANKS="1").stdout)[0] == "hello on 2 ranks"
