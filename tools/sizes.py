"""Print the statements of each room and of each recipe, and hold pages to their words of prose.

    python tools/sizes.py            # exit status 1 if a page is over its ceiling

There is no ceiling on code. What is drawn by a directive, tables, pictures and code, is no prose.
"""

import ast
import re
import sys
from pathlib import Path

from house import ROOMS

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
PROSE = 1260  # words of a page
COPIED = "# The block to copy\n"  # heading of a first cell


def statements(source: str) -> int:
    """The statements of a file or of a block; a docstring is none."""
    tree = ast.parse(source)
    found = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            found += 1
        documented = isinstance(node, DOCUMENTED)
        if documented and ast.get_docstring(node, clean=False) is not None:
            found -= 1
    return found


def statements_of(file: Path) -> int:
    return statements(file.read_text(encoding="utf-8"))


def block_of(recipe: Path) -> str:
    """The code of a recipe's first cell: what a reader copies, where the page says so."""
    source = recipe.read_text(encoding="utf-8")
    return source.split("# %%\n")[1]


def words_of_prose(path: Path) -> int:
    """Words of a recipe's page: its docstring and the comments that sphinx-gallery makes text."""
    source = path.read_text(encoding="utf-8")
    text = (ast.get_docstring(ast.parse(source)) or "") + "\n\n"
    for block in re.findall(r"^# %%.*\n((?:#.*\n)+)", source, re.MULTILINE):
        text += "".join(line[2:] + "\n" for line in block.splitlines()) + "\n"
    text = re.sub(
        r"^\.\. (?!note|warning|tip|important|admonition|grid|card).*\n"
        r"(?:[ \t]+\S.*\n|[ \t]*\n(?=[ \t]))*",
        "\n",
        text,
        flags=re.MULTILINE,
    )
    text = re.sub(r"::[ \t]*\n\n(?:[ \t]+\S.*\n|[ \t]*\n(?=[ \t]))+", "\n", text)
    # An option of a directive has no backtick behind its name: that is a role, and prose.
    text = re.sub(r"^[ \t]*(?::[\w-]+:(?!`).*|[=+|-]{3,}.*|\|.*)$", "", text, flags=re.MULTILINE)
    return len(re.findall(r"\w[\w'’.-]*", text))


def main() -> int:
    for name, pattern in ROOMS.items():
        files = sorted(ROOT.glob(pattern))
        print(f"{sum(map(statements_of, files)):6} statements in {len(files):3} files  {name}")
    status = 0
    for file in sorted(ROOT.glob("recipes_source/*/[!_]*.py")):
        words = words_of_prose(file)
        verdict = ""
        if words > PROSE:
            verdict, status = "  OVER IT", 1
        block = ""
        if COPIED in file.read_text(encoding="utf-8"):
            block = f"{statements(block_of(file))} to copy, "
        name = f"{file.parent.name}/{file.stem}"
        of_page = f"{words:5} of {PROSE} words  {name}{verdict}"
        print(f"{statements_of(file):6} statements, {block:>12}{of_page}")
    return status


if __name__ == "__main__":
    sys.exit(main())
