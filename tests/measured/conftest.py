"""What has been measured is tested in a repository of its own."""

from pathlib import Path

import pytest
from results_site import RECIPE, recipe_of


@pytest.fixture
def repo(tmp_path) -> Path:
    """A repository with one recipe, its page, and nothing measured."""
    repo = tmp_path / "repo"
    for folder in ("benchmarks/results", "benchmarks/traces", "recipes_source/checkpoint"):
        (repo / folder).mkdir(parents=True)
    recipe_of(repo).write_text(RECIPE)
    (repo / "guide").mkdir()
    (repo / "guide" / "changelog.rst").touch()
    return repo
