"""The scripts of ``findings/`` have the heading that their page is made of, and exact pins."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "_ext"))
import surprises  # noqa: E402

SCRIPTS = sorted((ROOT / "findings").glob("*.sh"))
INSTALLED = re.compile(
    r"^venv/bin/pip install -q --no-compile \$\{PIP_ARGS:-\} (.+)$", re.MULTILINE
)


def check(script: Path) -> None:
    """Raise, or fail, if a script has another form than all have."""
    finding = surprises.read(script)
    assert re.search(r"\d+ s", finding.took), "say how long the whole script ran"
    source = script.read_text(encoding="utf-8")
    assert "set -euo pipefail" in source and "overlap_recipes" not in program(source)
    if script.name.startswith("device_"):  # the torch that is there
        return
    assert "folder=$(mktemp -d)\ntrap 'rm -rf \"$folder\"' EXIT" in source
    (packages,) = INSTALLED.findall(source)
    for package in packages.split():
        assert surprises.PACKAGE.fullmatch(package), f"{package} is no exact pin"
    assert set(finding.packages) <= set(packages.split()), "the heading names what is installed"


def program(source: str) -> str:
    """All of a script but its heading."""
    return re.sub(r"^#.*\n", "", source, flags=re.MULTILINE)


def test_there_are_as_many_as_were_asked_for() -> None:
    assert len(SCRIPTS) >= 10


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_has_the_form_of_all(script: Path) -> None:
    check(script)


def test_code_of_a_sentence_is_code_on_the_page() -> None:
    assert surprises.markup("`a_b` of *c* and d_") == r"``a_b`` of \*c\* and d\_"
