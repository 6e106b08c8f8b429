"""What the landing page and the section pages list: sections, recipes, their order and pictures.

Nothing here is typed twice: a section is a folder of ``recipes_source/`` with recipes in it, its
title, sentence and order stand in its ``GALLERY_HEADER.rst``, a recipe's title and sentence in
its module docstring, and its thumbnail is the last ``lanes`` schematic of its introduction, drawn
small.
"""

import ast
import os
import re
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import lanes
from docutils import nodes
from docutils.statemachine import StringList
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import nested_parse_with_titles

from rankproof.recipe import Recipe, discover

SOURCE = Path(__file__).parent.parent / "recipes_source"
FOLDER = SOURCE.parent / "_templates"
JINJA = Environment(loader=FileSystemLoader(FOLDER), trim_blocks=True, undefined=StrictUndefined)


@cache
def reading_orders(source: Path) -> list[str]:
    """The names after ``.. order:`` in every ``GALLERY_HEADER.rst``: folders, then recipes."""
    names: list[str] = []
    for header in sorted(source.rglob("GALLERY_HEADER.rst"), key=lambda path: len(path.parts)):
        found = re.search(r"^\.\. order:(.*(?:\n   .*)*)", header.read_text("utf-8"), re.MULTILINE)
        names += found[1].split() if found else []
    return names


def _position(name: str) -> tuple[int, str]:
    """Sort key: the names with an order first, all others after them by name."""
    order = reading_orders(SOURCE)
    return (order.index(name) if name in order else len(order), name)


def section_order(folder: str) -> tuple[int, str]:
    """Key by which sphinx-gallery sorts the folders of ``recipes_source/``."""
    return _position(Path(folder).name)


def reading_order(filename: str) -> tuple[int, str]:
    """Key by which sphinx-gallery sorts the recipes of a folder."""
    return _position(Path(filename).stem)


@dataclass(frozen=True)
class Section:
    """A folder of recipes: its title, its first sentence and its recipes in reading order."""

    folder: str
    title: str
    sentence: str
    recipes: tuple[Recipe, ...]


def first_sentence(rst: str) -> str:
    """The first sentence of the first paragraph after the title of ``rst``, empty if none."""
    paragraphs = [p for p in re.split(r"\n\s*\n", rst.strip()) if not p.startswith("..")]
    text = " ".join(" ".join(paragraphs[1:2]).split())
    return re.match(r".*?[.!?](?=\s|$)|.*", text)[0]


def read_title(rst: str) -> str:
    """The first line of ``rst`` that is neither an over- nor an underline."""
    return next(line for line in rst.strip().splitlines() if re.search(r"\w", line))


@cache
def recipes_of(source: Path) -> tuple[Recipe, ...]:
    """Every recipe below ``source``; read once a build."""
    return tuple(discover(source))


def sections(source: Path = SOURCE) -> list[Section]:
    """Every folder of ``source`` that has recipes, in the order of the site."""
    found: dict[str, list[Recipe]] = {}
    for recipe in recipes_of(source):
        found.setdefault(recipe.folder, []).append(recipe)
    result = []
    for folder in sorted(found, key=section_order):
        header = (source / folder / "GALLERY_HEADER.rst").read_text(encoding="utf-8")
        recipes = sorted(found[folder], key=lambda recipe: reading_order(recipe.path.name))
        result.append(Section(folder, read_title(header), first_sentence(header), tuple(recipes)))
    return result


def docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


class RecipeIndex(SphinxDirective):
    """``.. recipe-index::`` lists every section with a card for each of its recipes."""

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()  # recipes come and go without an edit of this page
        shown = {"sentence": first_sentence, "title": read_title, "doc": docstring}
        rst = JINJA.get_template("recipe_cards.rst").render(sections=sections(), **shown)
        container = nodes.section()
        container.document = self.state.document
        lines = StringList(rst.splitlines(), "recipe-index")
        nested_parse_with_titles(self.state, lines, container)
        return container.children


def thumbnail(path: Path) -> str | None:
    """SVG of the last ``lanes`` schematic of a recipe's docstring, without words; None if none.

    A recipe that draws several ends with its own. One that begins with its code draws below it.
    """
    schematic = re.compile(r"^\.\. lanes::.*\n((?:[ \t]+\S.*\n|[ \t]*\n)+)", re.M)
    matches = list(schematic.finditer(docstring(path) + "\n"))
    if not matches:
        below = re.sub(r"^# ?", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        matches = list(schematic.finditer(below))
    if not matches:
        return None
    match = matches[-1]
    # The directive's caption may go on for some lines; its content begins after a blank one.
    content = re.split(r"\n[ \t]*\n", "\n" + match[1], maxsplit=1)[1]
    panel = lanes.parse(content.splitlines())
    end = max(bar.end for lane in panel.lanes for bar in lane.bars)
    return JINJA.get_template("thumb.svg").render(lanes=panel.lanes, end=end)


def remove_vanished(app: Sphinx) -> None:
    """Remove what an earlier build left of recipes and sections that are no longer there."""
    pages = {(recipe.folder, recipe.name) for recipe in recipes_of(SOURCE)}
    folders = {folder for folder, _ in pages}
    for root in (Path(app.srcdir, "recipes"), Path(app.outdir, "recipes")):
        for folder in root.glob("*/"):
            if folder.name not in folders and not any(
                f"{folder.name}/" in o for o in app.own_files
            ):
                shutil.rmtree(folder)
                continue
            for file in folder.glob("*.*"):
                name = file.name.partition(".")[0]
                own = f"{folder.name}/{file.name}" in app.own_files  # somebody keeps it there
                if name != "index" and (folder.name, name) not in pages and not own:
                    file.unlink()


def draw_thumbnails(app: Sphinx) -> None:
    """Put each recipe's own picture where sphinx-gallery has put the default one.

    It gets the time of what it is drawn from: pages that show it are read again when that changes.
    """
    code = max(Path(module).stat().st_mtime_ns for module in (__file__, FOLDER / "thumb.svg"))
    for section in sections():
        folder = Path(app.srcdir, "recipes", section.folder, "images", "thumb")
        for recipe in section.recipes:
            svg = thumbnail(recipe.path)
            if svg is not None:
                picture = folder / f"sphx_glr_{recipe.name}_thumb.svg"
                picture.write_text(svg, encoding="utf-8")
                drawn_from = max(code, recipe.path.stat().st_mtime_ns)
                os.utime(picture, ns=(drawn_from, drawn_from))


def before_generating(app: Sphinx) -> None:
    """Remember what was in ``recipes/`` and was not made by a build."""
    root = Path(app.srcdir, "recipes")
    listed = root / ".generated"
    made = set(listed.read_text().splitlines()) if listed.exists() else set()
    app.own_files = {name for name in files_below(root) if name not in made}


def mark_generated(app: Sphinx) -> None:
    """List what the build has put into ``recipes/``: make clean removes that and nothing else."""
    root = Path(app.srcdir, "recipes")
    if root.is_dir():
        made = sorted(files_below(root) - app.own_files - {".generated"})
        (root / ".generated").write_text("".join(f"{name}\n" for name in made))


def files_below(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def setup(app: Sphinx) -> dict:
    app.add_directive("recipe-index", RecipeIndex)
    app.connect("builder-inited", before_generating, priority=300)
    app.connect("builder-inited", remove_vanished, priority=400)
    app.connect("builder-inited", draw_thumbnails, priority=600)  # sphinx-gallery: 500
    app.connect("builder-inited", mark_generated, priority=900)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
