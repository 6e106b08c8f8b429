"""The citation file, what make may install into, and what ``make check`` leaves out."""

import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import overlap_recipes

ROOT = Path(__file__).resolve().parents[1]


def test_the_citation_names_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    assert citation["message"] and citation["title"]
    assert all(author.get("name") or author.get("family-names") for author in citation["authors"])
    assert str(citation["version"]) == overlap_recipes.__version__
    assert citation["license"] == project["license"]


def made_by_make(clone: Path, marker: str) -> Path:
    """An environment in ``clone`` that its make has made, older than its requirements."""
    environment = clone / ".venv"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").write_text("#!/bin/sh\n")
    (environment / "bin" / "python").chmod(0o755)
    (environment / ".made-by-make").write_text(marker)
    for name in ("Makefile", "requirements.txt"):
        (clone / name).write_bytes((ROOT / name).read_bytes())
    return environment


def would_install(clone: Path, *arguments: str) -> bool:
    command = ["make", "-n", "environment", *arguments]
    said = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=True)
    return "pip install" in said.stdout


@pytest.mark.parametrize("marked", [True, False])
def test_make_never_installs_into_the_environment_of_another_clone(tmp_path, marked):
    own, other = tmp_path / "own", tmp_path / "other"
    theirs = made_by_make(other, f"{other}\n" if marked else "")
    mine = made_by_make(own, f"{own}\n" if marked else "")
    assert would_install(own) and would_install(own, "VENV=.venv"), "its own is kept up to date"
    assert not would_install(own, f"VENV={theirs}")
    mine.rename(own / "aside")
    mine.symlink_to(theirs)
    assert not would_install(own), "a link to another clone's is another clone's"


def test_what_make_check_leaves_out_is_there():
    for test in (ROOT / "tests" / "slow.txt").read_text().split():
        file, name = test.split("::")
        assert f"def {name}(" in (ROOT / file).read_text(), test
