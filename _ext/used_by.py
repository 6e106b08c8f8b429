"""Below each name of the reference: the recipes that import it, found in their text."""

import re
from pathlib import Path

from docutils import nodes
from recipe_index import SOURCE, recipes_of
from results import link
from sphinx import addnodes
from sphinx.application import Sphinx

PAGE = "guide/reference"
IMPORTS = re.compile(r"from (overlap_recipes[\w.]*) import (\([^)]*\)|[^\n]*)")


def imported(source: str) -> set[str]:
    """The names that a recipe's code, or a block of its page, imports of the library."""
    found = set()
    for _, names in IMPORTS.findall(source):
        found.update(re.findall(r"\w+", re.sub(r"#.*| as \w+", "", names)))
    return found


def recipes_that_use() -> dict[str, list[Path]]:
    """By name of the library: the files of the recipes, in reading order."""
    found: dict[str, list[Path]] = {}
    for recipe in recipes_of(SOURCE):
        for name in imported(recipe.path.read_text(encoding="utf-8")):
            found.setdefault(name, []).append(recipe.path)
    return found


def name_recipes(app: Sphinx, doctree: nodes.document) -> None:
    if app.env.docname != PAGE:
        return
    app.env.note_reread()  # recipes come and go without an edit of this page
    recipes = recipes_that_use()
    for described in doctree.findall(addnodes.desc):
        names = described[0].get("fullname", "").split(".")
        if len(names) != 1 or names[0] not in recipes:  # a method stands below its class
            continue
        line = nodes.paragraph("", "In use: ", classes=["result-origin"])
        for number, path in enumerate(recipes[names[0]]):
            line += nodes.Text(", " if number else "")
            page = f"/recipes/{path.parent.name}/{path.stem}"
            line += link(PAGE, "doc", page, nodes.literal("", path.stem))
        described[1].insert(0, line)


def setup(app: Sphinx) -> dict:
    app.connect("doctree-read", name_recipes)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
