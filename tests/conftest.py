"""``pytest tests`` runs every claim; ``pytest tests --recipes DIR`` judges a folder of recipes alone."""

import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "_ext")]

from harness.recipe import RecipeError, discover  # noqa: E402 (needs the path above)

RECIPES = REPO / "recipes_source"
CONTROLS = REPO / "tests" / "controls"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("recipes")
    group.addoption("--recipes", metavar="DIR", help="judge the recipes below DIR, and nothing else")
    group.addoption("--ranks", metavar="N,N", help="world sizes to run them on (default 1,2,3,4)")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path.is_relative_to(REPO / "tests" / "data"):
        return True
    if config.getoption("--recipes") and collection_path.suffix == ".py":
        return collection_path.name != "test_recipes.py"
    return None


def recipes_under_test(config: pytest.Config) -> list:
    """This gallery's recipes, or those of ``--recipes``."""
    folder = config.getoption("--recipes")
    try:
        if folder:
            return discover(Path(folder))
        return discover(RECIPES, CONTROLS)
    except RecipeError as error:
        raise pytest.UsageError(str(error)) from error


def ranks_under_test(config: pytest.Config) -> list[int] | None:
    """The world sizes of ``--ranks``, None if not given."""
    text = config.getoption("--ranks")
    if not text:
        return None
    try:
        ranks = [int(part) for part in text.split(",")]
    except ValueError:
        ranks = []
    if not ranks or min(ranks) < 1:
        raise pytest.UsageError(f"--ranks {text}: pass numbers of 1 or more, like 1,2,4")
    return ranks
