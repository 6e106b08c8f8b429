"""What the search knows of index entries outlives a build in which few pages have changed."""

import subprocess
import sys
from pathlib import Path

EXTENSIONS = Path(__file__).resolve().parents[2] / "_ext"
PAGE = "{name}\n=====\n\n.. index:: single: words of {name}\n\nText.\n"


def build(source: Path) -> str:
    """The search's index behind one more build of ``source``."""
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", ".", "out"]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    return (source / "out" / "searchindex.js").read_text(encoding="utf-8")


def test_a_second_build_keeps_the_entries_of_pages_that_did_not_change(
    tmp_path: Path,
) -> None:
    settings = f"import sys\nsys.path.insert(0, {str(EXTENSIONS)!r})\nextensions = ['kept_index']\n"
    (tmp_path / "conf.py").write_text(settings)
    (tmp_path / "index.rst").write_text("Index\n=====\n\n.. toctree::\n\n   one\n   other\n")
    for name in ("one", "other"):
        (tmp_path / f"{name}.rst").write_text(PAGE.format(name=name))
    assert "words of other" in build(tmp_path)
    with (tmp_path / "one.rst").open("a") as page:
        page.write("\nMore text.\n")
    assert "words of other" in build(tmp_path)
