"""The real pages: complete, linked, and free of anything from elsewhere."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from bs4 import BeautifulSoup
from moved import MOVED
from small_site import ROOT

import overlap_recipes
from rankproof.recipe import discover

sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT / "tools"))
from check_links import broken_links
from selection import proofs_under_test

RECIPES = discover(ROOT / "recipes_source", ROOT / "tests" / "controls")


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
    peers.add("triton")  # torch for CUDA brings it
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
