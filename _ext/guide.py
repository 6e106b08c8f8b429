"""The guide: templates with data in them, and words that lead to the glossary."""

import ast
import json
import re
from functools import cache
from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from recipe_index import JINJA, SOURCE, recipes_of
from results import link
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from torch_names import addresses

from benchmarks import first_tables

ROOT = Path(__file__).parent.parent
API = re.compile(
    r"torch\.(distributed\.(checkpoint|fsdp|tensor)|autograd|utils\.checkpoint|cuda)(\.[a-z]\w*)*"
    r"\.[A-Za-z]\w*|torch\.(get_device_module|distributed\.new_group)"
)
CHANGELOG = ROOT / "guide" / "changelog.rst"
DATED = re.compile(r"^(\d{4}-\d\d-\d\d[^\n]*)\n-+\n\n(.*?)(?=^\d{4}-|\Z)", re.DOTALL | re.MULTILINE)
MARK = "* **Wrong results.**"
VERSIONS = ROOT / "guide" / "versions.json"
GLOSSARY = ROOT / "guide" / "glossary.rst"


class Template(SphinxDirective):
    """``.. template:: <name>``: a template of ``_templates/guide`` with data in it."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()  # what it shows changes without an edit of this page
        html = JINJA.get_template(f"guide/{self.arguments[0]}").render(
            data=lambda name: json.loads((ROOT / "guide" / name).read_text(encoding="utf-8")),
            apis=apis(),
            documented=addresses(),
            runs=first_tables.runs_of_recipes(ROOT),
            scripts=reproducers(),
        )
        return [nodes.raw("", html, format="html")]


def reproducers() -> list[Path]:
    """The scripts that show a defect of torch, those that start two ranks last."""
    folder = ROOT / "tests" / "upstream"
    one_rank = [path for path in sorted(folder.glob("*.py")) if path.name != "record.py"]
    return one_rank + sorted(folder.glob("two_ranks/*.py"))


class WrongResults(SphinxDirective):
    """``.. wrong-results::``: the changelog's entries that cured results, under their dates."""

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(str(CHANGELOG))
        lines = StringList()
        for date, entries in wrong_results(CHANGELOG.read_text(encoding="utf-8")).items():
            text = f".. rubric:: {date}\n\n" + "\n".join(entries)
            for line in text.splitlines():
                lines.append(line, str(CHANGELOG))
            lines.append("", str(CHANGELOG))
        found = nodes.container()
        self.state.nested_parse(lines, 0, found)
        return found.children


def wrong_results(changelog: str) -> dict[str, list[str]]:
    """The marked entries of each date, without the mark."""
    found: dict[str, list[str]] = {}
    for date, section in DATED.findall(changelog):
        entries = re.split(r"^(?=\* )", section, flags=re.MULTILINE)
        marked = [entry for entry in entries if entry.startswith(MARK)]
        if marked:
            found[date] = ["* " + entry.removeprefix(MARK).lstrip() for entry in marked]
    return found


def apis() -> dict[str, list]:
    """Each public name of torch that moves data or orders it, and the recipes that use it."""
    found: dict[str, list] = {}
    for recipe in recipes_of(SOURCE):
        names = set()
        for file in shown_on_its_page(recipe.path):
            names |= used_names(file.read_text(encoding="utf-8"))
        for name in names:
            found.setdefault(name, []).append(recipe)
    return dict(sorted(found.items()))


def shown_on_its_page(recipe: Path) -> list[Path]:
    """The recipe's file, and the modules of the library that its page includes parts of."""
    text = recipe.read_text(encoding="utf-8")
    included = re.findall(r"literalinclude:: /(overlap_recipes/\S+)", text)
    return [recipe, *(ROOT / name for name in sorted(set(included)))]


def used_names(source: str) -> set[str]:
    """The names that ``API`` matches, as torch calls them, whatever they are imported as."""
    every = list(ast.walk(ast.parse(source)))
    imported = imported_names(every)
    used = set()
    for node in every:
        if isinstance(node, ast.Attribute | ast.Name):
            root, dot, rest = ast.unparse(node).partition(".")
            used.add(imported.get(root, root) + dot + rest)
    modules = set()  # what is only the way to a name: torch.distributed of torch.distributed.Work
    for name in used:
        parent = name.rpartition(".")[0]
        if parent.islower():
            modules.add(parent)
    return {name for name in used - modules if API.fullmatch(name)}


def imported_names(nodes_of_file: list[ast.AST]) -> dict[str, str]:
    """By the name that a file gives to what it imports: its whole name."""
    found = {}
    for node in nodes_of_file:
        if isinstance(node, ast.ImportFrom):
            for each in node.names:
                found[each.asname or each.name] = f"{node.module}.{each.name}"
        elif isinstance(node, ast.Import):
            for each in node.names:
                if each.asname:  # otherwise the file writes the whole name wherever it uses it
                    found[each.asname] = each.name
    return found


@cache
def terms() -> dict[str, str]:
    """Each term of the glossary and its plural, in lower case, and the term."""
    found = {}
    for term in re.findall(r"^   (\w.*)$", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE):
        found[term.lower()] = term
        found[f"{term}s".lower()] = term
    return found


def link_first_uses(app: Sphinx, doctree: nodes.document) -> None:
    """Link the first use of each term in the sentences of a recipe's page."""
    if app.env.docname not in getattr(app, "recipe_runs", {}) or not GLOSSARY.exists():
        return
    left = dict(terms())
    for text in list(doctree.findall(nodes.Text)):
        sentence = isinstance(text.parent, nodes.paragraph) and not text.parent["classes"]
        if not sentence or isinstance(text.parent.parent, nodes.entry):
            continue
        if not left:
            return
        longest_first = sorted((re.escape(name) for name in left), key=len, reverse=True)
        names = "|".join(longest_first)
        match = re.search(rf"(?<![\w-])({names})(?![\w-])", text, re.IGNORECASE)
        if match is None:
            continue
        term = left[match[0].lower()]
        left = {name: other for name, other in left.items() if other != term}
        shown = nodes.inline("", match[0], classes=["glossary-term"])
        reference = link(app.env.docname, "term", term, shown)
        parts = [nodes.Text(text[: match.start()]), reference, nodes.Text(text[match.end() :])]
        text.parent.replace(text, parts)


def say_when_it_ran_on_a_cpu(app: Sphinx, doctree: nodes.document) -> None:
    """Below what ran on accelerators: the newest torch that it ran with on a CPU, and when."""
    if app.env.docname not in getattr(app, "recipe_runs", {}) or not VERSIONS.exists():
        return
    app.env.note_dependency(str(VERSIONS))
    name = app.env.docname.rpartition("/")[2]
    last = ""
    for torch, record in json.loads(VERSIONS.read_text(encoding="utf-8")).items():
        run = record["recipes"].get(name)
        if run is not None and run["ok"]:
            last = f"Verified on a CPU, {record['ranks']} ranks, torch {torch}, {run['date']}"
    for badges in doctree.findall(nodes.container):
        if last and "verification" in badges["classes"]:
            badges += nodes.paragraph("", last, classes=["badge", "badge-verified"])


def setup(app: Sphinx) -> dict:
    app.connect("doctree-read", say_when_it_ran_on_a_cpu)
    app.add_directive("template", Template)
    app.add_directive("wrong-results", WrongResults)
    app.connect("doctree-read", link_first_uses)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
