"""What people use around the pages: local hooks, issue templates, the citation file."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import overlap_recipes

ROOT = Path(__file__).resolve().parents[1]
(REPOSITORY,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
HOOKS = {hook["id"]: hook for hook in REPOSITORY["hooks"]}
GOOD = "x = 1\n"
BAD = {  # what each hook that is given files refuses
    "ruff": "import os\n",
    "ruff-format": "x=1\n",
    "codespell": "# it is recieved\n",  # codespell:ignore recieved
}


def run(hook: dict, *files: Path) -> int:
    """The exit status of a hook, with this interpreter in place of that of ``.venv``."""
    program, *arguments = hook["entry"].split()
    assert program == ".venv/bin/python"
    command = [sys.executable, *arguments, *map(str, files)]
    return subprocess.run(command, cwd=ROOT, capture_output=True).returncode


def test_hooks_are_local_and_complete():
    assert REPOSITORY["repo"] == "local"
    for hook in HOOKS.values():
        assert hook.keys() >= {"id", "name", "entry", "language"}, "pre-commit needs these"
        assert hook["language"] == "system", "anything else installs something"


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_runs_and_refuses_what_is_bad(name, tmp_path):
    hook, file = HOOKS[name], tmp_path / "example.py"
    if hook.get("pass_filenames") is False:
        assert run(hook) == 0
        return
    file.write_text(GOOD)
    assert run(hook, file) == 0
    file.write_text(BAD[name])
    assert run(hook, file) != 0


def test_the_citation_names_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    assert citation["message"] and citation["title"]
    assert all(author.get("name") or author.get("family-names") for author in citation["authors"])
    assert str(citation["version"]) == overlap_recipes.__version__
    assert citation["license"] == project["license"]
