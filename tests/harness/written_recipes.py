"""What the tests of the harness share: files that they write, a controls file, the command."""

import sys
import textwrap
from pathlib import Path

import pytest

from rankproof.__main__ import main


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


CONTROL = """
    [[control]]
    name = "n"
    says = "s"
    find = "x = 1"
    replace = "x = 2"
    fails.raised = 'AssertionError: x is 2'
"""


def command(monkeypatch: pytest.MonkeyPatch, *options: object) -> int:
    """The exit status of ``rankproof`` with these options."""
    monkeypatch.setattr(sys, "argv", ["rankproof", *map(str, options)])
    try:
        return main()
    except SystemExit as ended:
        return ended.code
