"""Fold on a recipe's page what few readers look at: it unfolds where they ask for it.

That is the code of a proof, and the removed lines after the first ones. What the ranks printed
stays in sight. All of it is in the page, where the browser's search finds it, and in its Markdown.
"""

from docutils import nodes
from sphinx.application import Sphinx

PROOFS = ("run-it-and-prove-it", "kill-it-resume-it", "and-the-proof")  # in a section's id
SHORT = 25  # lines of a proof's code that stay
CONTROLS = 3  # that stay


def folded(says: str, inside: list[nodes.Node]) -> list[nodes.Node]:
    """``inside``, closed, below a line that says what it is."""
    before = f'<details class="folded"><summary>{says}</summary>'
    opens = nodes.raw("", before, format="html")
    closes = nodes.raw("", "</details>", format="html")
    return [opens, *inside, closes]


def fold(app: Sphinx, doctree: nodes.document) -> None:
    if app.env.docname not in getattr(app, "recipe_runs", {}):
        return
    for section in doctree.findall(nodes.section):
        if any(proof in name for name in section["ids"] for proof in PROOFS):
            fold_code(section)
    fold_controls(doctree)


def fold_code(section: nodes.section) -> None:
    for block in list(section.findall(nodes.literal_block)):
        lines = len(block.astext().splitlines())
        if block.get("language") == "Python" and lines > SHORT:
            put_in_place(block.parent, [block], f"The proof: {lines} lines of code")


def fold_controls(doctree: nodes.document) -> None:
    controls = []
    for container in doctree.findall(nodes.container):
        if "recipe-control" in container["classes"]:
            controls.append(container)
    rest = controls[CONTROLS:]
    if rest:
        lines = "line" if len(rest) == 1 else "lines"
        put_in_place(rest[0].parent, rest, f"{len(rest)} more {lines}, and what each breaks")


def put_in_place(parent: nodes.Element, those: list[nodes.Node], says: str) -> None:
    """Put ``those`` children of ``parent``, which follow each other, into a fold."""
    place = parent.index(those[0])
    for each in those:
        parent.remove(each)
    parent.insert(place, folded(says, those))


def setup(app: Sphinx) -> dict:
    # After what the ranks printed is there (400), before Sphinx collects downloads (500).
    app.connect("doctree-read", fold, priority=450)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
