"""Which recipes and which world sizes the command line asks for."""

from pathlib import Path

import pytest

from harness.recipe import Recipe, RecipeError, discover

REPO = Path(__file__).resolve().parent.parent
RECIPES = REPO / "recipes_source"
PROOFS = REPO / "tests" / "proofs"
CONTROLS = REPO / "tests" / "controls"


def recipes_under_test() -> list[Recipe]:
    """This gallery's recipes."""
    try:
        return discover(RECIPES, CONTROLS)
    except RecipeError as error:
        raise pytest.UsageError(str(error)) from error


def proofs_under_test() -> list[Recipe]:
    """The scripts that prove modules of the library without a page."""
    return discover(PROOFS, CONTROLS)


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
