"""What the tests of the harness share: files that they write, and a recipe's controls file."""

import textwrap
from pathlib import Path


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
