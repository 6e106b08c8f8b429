"""Lead from PyTorch's names to PyTorch's documentation.

``torch_names.txt`` is a small inventory: names as pages write them, and addresses. On each page the
first use of a name in a sentence leads there. A build asks no network for it.
"""

from functools import cache
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

DOCUMENTATION = "https://docs.pytorch.org/docs/stable/"
INVENTORY = Path(__file__).with_name("torch_names.txt")
PLACES = (nodes.paragraph, nodes.term)


@cache
def addresses() -> dict[str, str]:
    """By name: the address at which PyTorch's documentation has it."""
    found = {}
    for line in INVENTORY.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            name, place = line.split()
            found[name] = DOCUMENTATION + place
    return found


def link_first_uses(app: Sphinx, doctree: nodes.document) -> None:
    app.env.note_dependency(str(INVENTORY))
    left = dict(addresses())
    for literal in list(doctree.findall(nodes.literal)):
        name = literal.astext().removesuffix("()")
        if name in left and isinstance(literal.parent, PLACES) and not literal.parent["classes"]:
            reference = nodes.reference("", "", refuri=left.pop(name), classes=["torch-name"])
            literal.replace_self(reference)
            reference += literal


def setup(app: Sphinx) -> dict:
    app.connect("doctree-read", link_first_uses)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
