"""Fold on a recipe's page what few readers look at: it unfolds where they ask for it.

That is the code of a proof and of a set-up, long excerpts, and what came of a removed line. What
the ranks printed stays in sight. All of it is in the page, where the browser's search finds it, and
in its Markdown.
"""

from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

LIBRARY = Path(__file__).resolve().parent.parent / "overlap_recipes"
PROOFS = ("run-it-and-prove-it", "kill-it-resume-it", "and-the-proof")  # in a section's id
SET_UP = ("something-to-train", "the-job", "the-model-to-try-it-on", "imports")
SET_UP += ("an-expert-without-tokens", "what-is-in-scope")
SHORT = 10  # lines of code that stay
EXCERPT = 70  # lines at most of code that is an excerpt
IN_VIEW = 100  # lines of code, but for what is longer than an excerpt


def folded(says: str, inside: list[nodes.Node]) -> list[nodes.Node]:
    """``inside``, closed, below a line that says what it is."""
    before = f'<details class="folded"><summary>{says}</summary>'
    opens = nodes.raw("", before, format="html")
    closes = nodes.raw("", "</details>", format="html")
    return [opens, *inside, closes]


def fold(app: Sphinx, doctree: nodes.document) -> None:
    if app.env.docname not in getattr(app, "recipe_runs", {}):
        return
    for section in list(doctree.findall(nodes.section)):
        for name in section["ids"]:
            if any(proof in name for proof in PROOFS):
                fold_code(section, "The proof")
            elif name.startswith(SET_UP):
                fold_code(section, "The code")
    fold_longest_excerpts(doctree)
    for container in list(doctree.findall(nodes.container)):
        if "recipe-control" in container["classes"]:
            fold_control(container)


def fold_code(section: nodes.section, what: str) -> None:
    for block in list(section.findall(nodes.literal_block)):
        lines = lines_of(block)
        if block.get("language") == "Python" and lines > SHORT:
            fold_block(block, f"{what}: {lines} lines")


def fold_block(block: nodes.literal_block, says: str) -> None:
    parent = block.parent
    place = parent.index(block)
    parent.remove(block)
    parent.insert(place, folded(says, [block]))
    block["is_folded"] = True


def fold_longest_excerpts(doctree: nodes.document) -> None:
    """Fold blocks of code until ``IN_VIEW`` lines are in view: the library's first, by length.

    The page's first block stays, and so does what is longer than an excerpt: it is the article.
    """
    excerpts = []
    for block in doctree.findall(nodes.literal_block):
        is_python = block.get("language", "").lower() == "python"
        if is_python and "is_folded" not in block and lines_of(block) <= EXCERPT:
            excerpts.append(block)
    in_view = sum(lines_of(block) for block in excerpts)
    for block in sorted(excerpts[1:], key=longest_of_the_library, reverse=True):
        if in_view > IN_VIEW and lines_of(block) > SHORT:
            whose = "The library's code" if is_of_the_library(block) else "The code"
            fold_block(block, f"{whose}: {lines_of(block)} lines")
            in_view -= lines_of(block)


def is_of_the_library(block: nodes.literal_block) -> bool:
    return Path(block.get("source", "")).is_relative_to(LIBRARY)


def longest_of_the_library(block: nodes.literal_block) -> tuple[bool, int]:
    return is_of_the_library(block), lines_of(block)


def lines_of(block: nodes.literal_block) -> int:
    return len(block.astext().splitlines())


def fold_control(control: nodes.container) -> None:
    """What is removed stays in sight; the edit and its failure unfold."""
    says = control.children[0]
    rest = control.children[1:]
    control.children = []
    control += nodes.raw("", '<details class="folded"><summary>', format="html")
    control += says
    control += nodes.raw("", "</summary>", format="html")
    control += rest
    control += nodes.raw("", "</details>", format="html")


def setup(app: Sphinx) -> dict:
    # After what the ranks printed is there (400), before Sphinx collects downloads (500).
    app.connect("doctree-read", fold, priority=450)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
