"""Every excerpt that a page shows is there: a renamed function would leave a hole in the page."""

import re
from pathlib import Path

import pytest
from sphinx.pycode import ModuleAnalyzer

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "recipes_source").rglob("*.py")), *sorted((ROOT / "guide").glob("*.rst"))]
EXCERPT = re.compile(r"^(?:# ?)?\.\. literalinclude:: (\S+)\n((?:(?:# ?)? +:\S+:.*\n)*)", re.M)
OPTION = re.compile(r":([a-z-]+): *(.*)")
PATTERNS = ("start-at", "end-at", "start-after", "end-before")


def excerpts(page: Path) -> list[tuple[Path, dict[str, str]]]:
    """The file of each excerpt of a page, and its options."""
    found = []
    for name, lines in EXCERPT.findall(page.read_text(encoding="utf-8")):
        file = ROOT / name[1:] if name.startswith("/") else page.with_name(name)
        found.append((file, dict(OPTION.findall(lines))))
    return found


def missing(file: Path, options: dict[str, str]) -> list[str]:
    """What the options name and the file has not."""
    if not file.exists():
        return [str(file)]
    text = file.read_text(encoding="utf-8")
    named = [options[option] for option in PATTERNS if option in options]
    absent = [pattern for pattern in named if pattern.strip() not in text]
    definition = options.get("pyobject")
    if definition and definition not in ModuleAnalyzer.for_string(text, file.stem).find_tags():
        absent.append(definition)
    return absent


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_shows_of_a_file_is_in_the_file(page: Path) -> None:
    for file, options in excerpts(page):
        assert missing(file, options) == [], f"{page.name} shows these of {file.name}"
