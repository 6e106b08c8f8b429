"""Count lines of code by room and words of prose by page, against their ceilings.

    python tests/sizes.py            # all rooms and pages; exit status 1 if one is over

Lines that are blank, comments or docstrings are no code; tables, pictures, code and what a page
draws by a directive is no prose. What was over its ceiling when the ceiling was set is listed in
``NOT_YET``, and is held from the day on which it is rewritten.
"""

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECIPE, BENCHMARK, PROSE = 170, 500, 1260  # a page: about 1,200 words
ROOMS = {  # ceiling, files
    "harness, with the Sphinx extension that it ships": (2900, ["harness/**/*.py"]),
    "the rest of _ext": (1100, ["_ext/*.py"]),
    "benchmarks": (2600, ["benchmarks/*.py"]),
}
NOT_YET = {
    "benchmarks",
}
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def lines_of_code(path: Path) -> int:
    """Lines that are not blank, comment or docstring."""
    source = path.read_text(encoding="utf-8")
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            lines.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


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
    text = re.sub(r"^[ \t]*(?::[\w-]+:.*|[=+|-]{3,}.*|\|.*)$", "", text, flags=re.MULTILINE)
    return len(re.findall(r"\w[\w'’.-]*", text))


def measured() -> list[tuple[str, int, int]]:
    """(name, size, ceiling) of every room, script and page."""
    found = []
    for name, (ceiling, patterns) in ROOMS.items():
        files = {file for pattern in patterns for file in ROOT.glob(pattern)}
        found.append((name, sum(map(lines_of_code, files)), ceiling))
    for file in sorted(ROOT.glob("benchmarks/*.py")):
        found.append((str(file.relative_to(ROOT)), lines_of_code(file), BENCHMARK))
    for file in sorted(ROOT.glob("recipes_source/*/*.py")):
        found.append((str(file.relative_to(ROOT)), lines_of_code(file), RECIPE))
        found.append((f"page {file.parent.name}/{file.stem}", words_of_prose(file), PROSE))
    return found


def main() -> int:
    status = 0
    for name, size, ceiling in measured():
        unit = "words" if name.startswith("page") else "lines"
        verdict = ""
        if size > ceiling and name in NOT_YET:
            verdict = "  over it, not yet rewritten"
        elif size > ceiling:
            verdict, status = "  OVER IT", 1
        elif name in NOT_YET:
            verdict = "  below its ceiling: strike it from NOT_YET in tests/sizes.py"
        print(f"{size:6} of {ceiling:5} {unit}  {name}{verdict}")
    return status


if __name__ == "__main__":
    sys.exit(main())
