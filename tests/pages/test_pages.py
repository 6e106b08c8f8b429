"""The real pages: complete, linked, and free of anything from elsewhere."""

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bs4 import BeautifulSoup
from moved import MOVED
from small_site import ROOT

import overlap_recipes
from guide import reproducers
from rankproof.recipe import discover

sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT / "tools"))
from check_links import broken_links
from selection import proofs_under_test
from sizes import statements_of

RECIPES = discover(ROOT / "recipes_source", ROOT / "tests" / "controls")
TARGETS = {"html", "html-noplot", "serve", "test", "check", "verify", "lint", "linkcheck"}
TARGETS |= {"clean", "soak", "new-recipe", "installed", "engines"}


def page(site: Path, name: str) -> BeautifulSoup:
    return BeautifulSoup((site / f"{name}.html").read_text(encoding="utf-8"), "html.parser")


def links(soup: BeautifulSoup) -> list[str]:
    return [a["href"] for a in soup.select("article a[href]")]


def test_every_recipe_has_its_controls_and_every_controls_file_its_recipe():
    scripts = {recipe.name for recipe in [*RECIPES, *proofs_under_test()]}
    files = {path.stem for path in (ROOT / "tests" / "controls").glob("*.toml")}
    assert scripts == files
    assert not [recipe.name for recipe in RECIPES if len(recipe.controls) < 4]


def test_every_recipe_has_a_page_and_every_page_a_recipe(built_site):
    pages = {path.relative_to(built_site) for path in built_site.glob("recipes/*/*.html")}
    pages = {path.with_suffix("") for path in pages if path.name != "index.html"}
    pages -= {Path(old) for old in MOVED}
    assert pages == {Path("recipes", recipe.folder, recipe.name) for recipe in RECIPES}


def test_no_address_is_lost():
    """Each that was published is a page, or leads to one."""
    there = {f"recipes/{recipe.folder}/{recipe.name}" for recipe in RECIPES}
    there |= {f"recipes/{recipe.folder}/index" for recipe in RECIPES}
    there |= {f"guide/{path.stem}" for path in (ROOT / "guide").glob("*.rst")} | {"index"}
    addresses = set((ROOT / "tests" / "pages" / "addresses.txt").read_text().split())
    assert addresses - there == set(MOVED), "a page has gone without an entry in _ext/moved.py"
    assert set(MOVED.values()) <= there


def test_the_reference_has_25_names_at_most_and_a_page_shows_each():
    reference = (ROOT / "guide" / "reference.rst").read_text(encoding="utf-8")
    listed = r"^\.\. (?:auto(?:class|function|exception)|data):: (?:\w+\.)*(\w+)"
    names = re.findall(listed, reference, re.MULTILINE)
    assert 0 < len(names) <= 25
    pages = (ROOT / "README.md").read_text(encoding="utf-8")
    for recipe in RECIPES:
        pages += recipe.path.read_text(encoding="utf-8")
    unseen = [name for name in names if not re.search(rf"\b{name}\b", pages)]
    assert not unseen, "no page shows these in use"


def test_an_old_address_leads_to_the_new_page(built_site):
    for old, new in MOVED.items():
        refresh = page(built_site, old).select_one('meta[http-equiv="refresh"]')["content"]
        target = (built_site / old).parent / refresh.partition("url=")[2]
        assert target.resolve() == (built_site / f"{new}.html").resolve()


def test_index_and_section_pages_list_every_recipe_and_no_other(built_site):
    wanted = {f"recipes/{recipe.folder}/{recipe.name}.html" for recipe in RECIPES}
    index = {link for link in links(page(built_site, "index")) if link.startswith("recipes/")}
    assert {link for link in index if not link.endswith("/index.html")} == wanted
    cards = page(built_site, "index").select(".recipe-cards .sd-card")
    assert len(cards) == len(wanted)
    for card in cards:
        title = card.select_one(".sd-card-title").text.strip()
        assert title == card.select_one("a.sd-stretched-link").text
    for folder in {recipe.folder for recipe in RECIPES}:
        cards = page(built_site, f"recipes/{folder}/index").select(".sphx-glr-thumbcontainer a")
        listed = {f"recipes/{folder}/{card['href']}" for card in cards}
        assert listed == {link for link in wanted if f"/{folder}/" in link}
    twins = (built_site / "llms.txt").read_text(encoding="utf-8")
    assert not [link for link in wanted if link.replace(".html", ".md") not in twins]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_page_shows_its_ranks_its_controls_and_offers_the_file(built_site, recipe):
    soup = page(built_site, f"recipes/{recipe.folder}/{recipe.name}")
    shown = soup.select(".sphx-glr-script-out details.rank")
    assert len(shown) == recipe.page_ranks
    controls = soup.select(".recipe-control")
    assert len(controls) == len(recipe.controls)
    assert not soup.select(".verdict-missed, #recipe-failed")
    download = next(
        a for a in soup.select("a[download]") if a["href"].endswith(f"/{recipe.path.name}")
    )
    file = built_site / f"recipes/{recipe.folder}" / download["href"]
    assert file.read_bytes() == recipe.path.read_bytes()


def test_internal_links_lead_somewhere(built_site):
    assert broken_links(built_site) == []


def test_a_broken_link_and_a_broken_anchor_are_found(tmp_path):
    (tmp_path / "a.html").write_text('<a href="b.html#there">1</a> <a href="b.html#not">2</a>')
    (tmp_path / "b.html").write_text('<p id="there"><img src="gone.png"></p>')
    assert broken_links(tmp_path) == [
        "a.html: b.html#not: no such anchor",
        "b.html: gone.png: no such file",
    ]


def test_pages_name_no_other_host_to_load_from(built_site):
    foreign = []
    for path in built_site.rglob("*.html"):
        for element in BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser").find_all(
            ["script", "link", "img", "iframe", "source", "form"]
        ):
            for attribute in ("src", "href", "srcset", "action"):
                if re.match(r"(https?:)?//", element.get(attribute, "")):
                    foreign.append(f"{path.name}: {element[attribute]}")
    assert foreign == []


def test_nothing_suggests_affiliation(built_site):
    words = re.compile(
        r"linux foundation|pytorch foundation|pytorch contributors|pytorch ecosystem|google colab"
        r"|googletagmanager|fbevents|hubspot|osano|pytorch[-_]?logo",
        re.IGNORECASE,
    )
    found = {
        f"{path.name}: {match[0]}"
        for path in (*built_site.rglob("*.html"), *built_site.rglob("*.md"))
        for match in words.finditer(path.read_text(encoding="utf-8"))
    }
    assert found == set()


MODULES = [path for path in (ROOT / "overlap_recipes").rglob("*.py") if path.name != "version.py"]
COPIED = {f"{recipe.folder}/{recipe.path.name}": recipe.path for recipe in RECIPES}
COPIED |= {str(path.relative_to(ROOT)): path for path in sorted(MODULES)}


def test_a_file_that_a_reader_copies_says_its_licence_and_version():
    for name, path in COPIED.items():
        licence, origin = path.read_text().splitlines()[:2]
        assert licence == "# SPDX-License-Identifier: BSD-3-Clause", name
        assert origin == f"# Overlap Recipes {overlap_recipes.__version__}, {name}"


def test_make_help_lists_the_targets():
    out = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = re.findall(r"^  make (\S+)", out.stdout, re.MULTILINE)
    assert sorted(listed) == sorted(TARGETS | {"help"})
    plain = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert plain.stdout == out.stdout


def test_make_clean_leaves_what_is_yours_in_recipes(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in (".generated", "index.rst", "checkpoint/made.rst", "checkpoint/mine.txt"):
        (tmp_path / "recipes" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "recipes" / name).write_text("index.rst\ncheckpoint/made.rst\n")
    subprocess.run(["make", "clean"], cwd=tmp_path, check=True, capture_output=True)
    left = [path.name for path in (tmp_path / "recipes").rglob("*") if path.is_file()]
    assert left == ["mine.txt"]


def test_a_new_recipe_passes_at_once(tmp_path):
    parts = ["Makefile", "harness", "pyproject.toml", "tests/data/template", "recipes_source"]
    for part in parts:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        (tmp_path / part).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / part, tmp_path / part)
    (tmp_path / "tests" / "controls").mkdir()
    make = ["make", "new-recipe", "NAME=checkpoint/mine"]
    subprocess.run(make, cwd=tmp_path, check=True, capture_output=True)
    again = subprocess.run(make, cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode != 0 and "there already" in again.stdout
    run = [sys.executable, "-m", "harness", "run", "recipes_source/checkpoint/mine.py"]
    for options in (["--ranks", "2"], ["--control", "no_sum"]):
        ran = subprocess.run([*run, *options], cwd=tmp_path, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_feed_a_sitemap_and_a_page_for_what_is_not_there(built_site):
    for name in ("changelog.xml", "sitemap.xml"):
        ElementTree.parse(built_site / name)
    both = (built_site / "changelog.xml").read_text() + (built_site / "sitemap.xml").read_text()
    assert "guide/changelog.html" in both
    assert "search.html" not in (built_site / "sitemap.xml").read_text()
    missing = page(built_site, "404")
    assert all(a["href"].startswith(("/", "http", "#")) for a in missing.select("a[href]"))


def test_what_needs_an_address_is_there_where_it_is_set_and_left_out_where_not(site):
    site.build("-D", "execute_recipes=0", out="none")
    assert "Report a problem" not in site.page("index", out="none")
    assert 'rel="canonical"' not in site.page("index", out="none")
    addresses = {"SITE_URL": "https://a.example/x", "REPO_URL": "https://b.example/r"}
    site.build("-D", "execute_recipes=0", out="both", **addresses)
    text = site.page("recipes/toys/hello", out="both")
    assert 'rel="canonical" href="https://a.example/x/recipes/toys/hello.html"' in text
    assert re.search(r"https://b.example/r/blob/\w+/recipes_source/toys/hello.py", text)
    assert "https://b.example/r/issues/new?title=recipes/toys/hello" in text
    assert "torch%20" in text
    assert "https://a.example/x/recipes" in (site.root / "_build/both/sitemap.xml").read_text()


def test_recipes_are_found_by_the_names_of_torch_that_they_use(built_site):
    found = page(built_site, "guide/apis")
    name = found.find(id="torch.distributed.checkpoint.async_save")
    links = [a["href"] for a in name.find_next("dd").select("a")]
    assert "../recipes/checkpoint/async_save.html" in links
    assert all((built_site / "guide" / a).resolve().exists() for a in links)
    pictures = [img["src"] for img in found.select(".apis img")]
    assert pictures and all((built_site / "guide" / src).resolve().exists() for src in pictures)


def test_the_upstream_scripts_are_short_and_recorded():
    record = json.loads((ROOT / "guide" / "defects.json").read_text())
    *_, newest = record
    for script in reproducers():
        longest = 30 if script.parent.name == "two_ranks" else 20
        assert statements_of(script) <= longest, script.name
        place = r"^Avoided by ((recipes_source|harness)/\S+)\.$"
        avoided_by = re.search(place, script.read_text(), re.M)
        assert (ROOT / avoided_by[1]).is_file(), script.name
        for version in (newest, "2.13.0"):
            found = record[version]["found"]
            assert script.stem in found, f"{script.name} was not run on torch {version}"


def build_requirements(file: Path) -> list[str]:
    """What a project is built with, each as ``name==version  # reason``, one a line of its list."""
    text = file.read_text(encoding="utf-8")
    listed = re.search(r"^requires = \[\n(.*?)^\]", text, re.M | re.S)[1]
    pins = [re.sub(r'^ *"(.*)", *#', r"\1  #", line) for line in listed.splitlines()]
    names = [pin.partition("  #")[0] for pin in pins]
    assert names == tomllib.loads(text)["build-system"]["requires"]
    return pins


def test_requirements_are_pinned_with_a_reason_and_cover_every_import():
    names = {"bs4": "beautifulsoup4", "sphinx_gallery": "sphinx-gallery", "yaml": "PyYAML"}
    names |= {"axe_playwright_python": "axe-playwright-python", "zlib_ng": "zlib-ng"}
    names |= {"sphinx_design": "sphinx-design", "pytorch_sphinx_theme2": "pytorch-sphinx-theme2"}
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line.strip()]
    pins = [line for line in lines if not line.startswith(("#", "-e . "))]
    pins += build_requirements(ROOT / "pyproject.toml")
    assert not [line for line in pins if not re.fullmatch(r"[\w-]+==[\w.]+ +# \S.*", line)]
    pinned = {line.partition("==")[0] for line in pins}
    command = ["git", "ls-files", "*.py"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    left_out = {".venv", "overlap_recipes"}
    own = {path.stem for path in ROOT.rglob("*.py") if not left_out & set(path.parts)}
    own |= {"harness", "benchmarks", "rankproof", "faults", "overlap_recipes", "recipes_source"}
    # On the GPU machine alone, or brought by torchtitan; a row says so where a peer is not there.
    peers = {"deepspeed", "torch_checkpointing"}
    peers.add("ray")  # tools/engines/ray.sh installs its own
    imported = set()
    for name in files.stdout.split():
        for node in ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add(node.module.partition(".")[0])
    third_party = imported - set(sys.stdlib_module_names) - own - peers
    third_party -= {"docutils", "jinja2"}  # Sphinx brings them
    assert {names.get(module, module) for module in third_party} <= pinned
