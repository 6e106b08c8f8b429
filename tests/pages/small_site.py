"""A small site: the real configuration, extensions and harness with recipes made for the tests."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

HELLO = '''
"""
Hello from every rank
=====================

Each rank says hello, so that each has something to show.

.. verification-badge::
"""

# %%
# Say it
# ------
# A rank knows its number from its environment.

import os


def main() -> None:
    rank = int(os.environ.get("RANK", "0"))
    print(f"hello from rank {rank}")
    assert rank >= 0


if __name__ == "__main__":
    main()

# %%
# What breaks if you remove a line
# --------------------------------
#
# .. recipe-controls::
#
# Say it elsewhere
# ----------------
#
# .. code-block:: python
#
#     print("hello")
'''

HELLO_CONTROLS = """
[[control]]
name = "rank_denied"
says = "Expect a rank below zero"
find = "rank >= 0"
replace = "rank < 0"
fails.raised = 'AssertionError: '
"""

RAISES = '''
"""
A recipe that raises
====================

Rank 1 raises and rank 0 does not.
"""

# %%
# Raise
# -----

import os

if __name__ == "__main__":
    print("still fine")
    if os.environ["RANK"] == "1":
        raise RuntimeError("no such luck")
'''

NO_CONTROLS = HELLO.replace("# .. recipe-controls::\n", "")

INDEX = """
Toys
====

.. build-summary::

Recipes
-------

.. recipe-index::

.. toctree::
   :glob:

   recipes/*/index
"""

PARTS = ("conf.py", "pyproject.toml", "_ext", "_static", "_templates", "benchmarks", "harness")


class Site:
    """A copy of the site with recipes of its own; ``log`` is what its first build said."""

    log = ""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True)
        for name in PARTS:
            source, copy = ROOT / name, root / name
            if source.is_dir():
                shutil.copytree(
                    source, copy, ignore=shutil.ignore_patterns("__pycache__", "*.json")
                )
            else:
                shutil.copy(source, copy)
        self.write("index.rst", INDEX)
        self.write("recipes_source/GALLERY_HEADER.rst", "Recipes\n=======\n\nAll of them.\n")
        self.write("recipes_source/toys/GALLERY_HEADER.rst", "Toys\n====\n\nThey test the site.\n")
        self.write("tests/controls/README", "")

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"), encoding="utf-8")

    def recipe(
        self, name: str, source: str, controls: str | None = None, folder: str = "toys"
    ) -> None:
        self.write(f"recipes_source/{folder}/{name}.py", source)
        if controls is not None:
            self.write(f"tests/controls/{name}.toml", controls)

    def build(self, *options: str, out: str = "html", **env: str) -> subprocess.CompletedProcess:
        command = ["-W", "--keep-going", "-b", "html", "-d", f"_build/doctrees-{out}"]
        command += [*options, ".", f"_build/{out}"]
        return subprocess.run(
            [sys.executable, "-m", "sphinx", *command],
            cwd=self.root,
            env={k: v for k, v in os.environ.items() if k != "RANKS"} | env,
            capture_output=True,
            text=True,
            timeout=600,
        )

    def page(self, name: str, out: str = "html") -> str:
        return (self.root / "_build" / out / f"{name}.html").read_text(encoding="utf-8")
