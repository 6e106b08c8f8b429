"""Put the library's wheel on the site, and show the line that installs it.

``.. wheel::`` on a page. The wheel is built beside the pages by setuptools, which torch brings
along: no network, no isolated environment.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from overlap_recipes.version import __version__

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "_downloads"
WHEEL = f"overlap_recipes-{__version__}-py3-none-any.whl"
SHOWN = "shows_the_wheel"  # of a page
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


def copy_source(folder: Path) -> None:
    """Copy what a wheel is built from: building leaves files beside the source."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "overlap_recipes", folder / "overlap_recipes", ignore=ignored)
    for name in SOURCES:
        shutil.copy(ROOT / name, folder)


def build_wheel(into: Path) -> Path:
    """Build the library's wheel.

    Raises:
        RuntimeError: setuptools could not; the text is what it said.
    """
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary)
        copy_source(source)
        command = [sys.executable, "-c", BUILD, str(into.resolve())]
        done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"the wheel could not be built:\n{done.stdout}{done.stderr}")
    return into / WHEEL


class WheelDirective(SphinxDirective):
    """``.. wheel::``: the line that installs the library from this site."""

    def run(self) -> list[nodes.Node]:
        self.env.metadata[self.env.docname][SHOWN] = True
        site = self.env.config.html_baseurl
        line = f"pip install {site}{FOLDER}/{WHEEL}"
        if not site:
            line = f"pip install {WHEEL}"
        up = "../" * self.env.docname.count("/")
        download = nodes.paragraph()
        download += nodes.reference("", WHEEL, refuri=f"{up}{FOLDER}/{WHEEL}")
        download += nodes.Text(", the library alone; it needs torch and NumPy.")
        return [download, nodes.literal_block(line, line, language="bash")]


def write_wheel(app: Sphinx, exception: Exception | None) -> None:
    if exception is not None or app.builder.format != "html":
        return
    if any(SHOWN in page for page in app.env.metadata.values()):
        build_wheel(Path(app.outdir, FOLDER))


def setup(app: Sphinx) -> dict:
    app.add_directive("wheel", WheelDirective)
    app.connect("build-finished", write_wheel)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
