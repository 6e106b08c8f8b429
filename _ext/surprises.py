"""The page "What surprised us": each script of ``findings/`` by its heading.

# NAME, PACKAGE==VERSION ...: what it does, in one sentence.
# Guess: what a good guess would have been.
# Instead: what to do.
# Took: how long the whole script ran, and where.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

FOLDER = Path(__file__).resolve().parent.parent / "findings"
FIRST = re.compile(r"# (?P<name>\w+), (?P<packages>[^:]+): (?P<sentence>.+\.)")
PACKAGE = re.compile(r"[A-Za-z][\w.-]*==\d[\w.]*")
LABELS = ("Guess", "Instead", "Took")


@dataclass(frozen=True)
class Finding:
    script: Path
    packages: list[str]
    sentence: str
    guess: str
    instead: str
    took: str


def read(script: Path) -> Finding:
    """What the heading of a script says; ``ValueError`` if it has another form."""
    lines = script.read_text(encoding="utf-8").splitlines()
    first = FIRST.fullmatch(lines[1])
    if lines[0] != "#!/usr/bin/env bash" or first is None or first["name"] != script.stem:
        raise ValueError(f"{script.name}: the heading begins '# {script.stem}, PACKAGE==VERSION: '")
    packages = first["packages"].split()
    for package in packages:
        if not PACKAGE.fullmatch(package):
            raise ValueError(f"{script.name}: {package} is no exact pin")
    said: dict[str, str] = {}
    label = ""
    for line in lines[2:]:
        if not line.startswith("# "):
            break
        found = re.match(r"# ([A-Z]\w+): (.*)", line)
        if found:
            label = found[1]
            said[label] = found[2]
        elif label:
            said[label] += " " + line.removeprefix("#").strip()
    if tuple(said) != LABELS:
        raise ValueError(f"{script.name}: after the first line come {', '.join(LABELS)}")
    return Finding(
        script, packages, first["sentence"], said["Guess"], said["Instead"], said["Took"]
    )


def read_all() -> list[Finding]:
    found = [read(script) for script in FOLDER.glob("*.sh")]
    return sorted(found, key=lambda each: (each.packages[0].lower(), each.script.name))


def markup(text: str) -> str:
    """reStructuredText of a sentence with code between single backticks."""
    parts = text.split("`")
    for position, part in enumerate(parts):
        if position % 2:
            parts[position] = f"``{part}``"
        else:
            parts[position] = re.sub(r"([\\*_|])", r"\\\1", part)
    return "".join(parts)


class Findings(SphinxDirective):
    """``.. findings::``: a definition list of all scripts."""

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()  # a script that is new is no dependency yet
        lines = StringList()
        for each in read_all():
            behaviour = markup(each.sentence[0].upper() + each.sentence[1:])
            entry = [
                ", ".join(package.replace("==", " ") for package in each.packages),
                f"   {behaviour} *Instead:* {markup(each.instead)}",
                f"   :download:`{each.script.name} </findings/{each.script.name}>`",
                "",
            ]
            for line in entry:
                lines.append(line, str(each.script))
        found = nodes.container()
        self.state.nested_parse(lines, 0, found)
        return found.children


def setup(app: Sphinx) -> dict:
    app.add_directive("findings", Findings)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
