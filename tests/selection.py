"""Which recipes and which world sizes the command line asks for."""

import ast
from pathlib import Path

import pytest

from harness.recipe import Recipe, RecipeError, discover, with_imports

REPO = Path(__file__).resolve().parent.parent
RECIPES = REPO / "recipes_source"
CONTROLS = REPO / "tests" / "controls"


def recipes_under_test(config: pytest.Config) -> list[Recipe]:
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


def imported_modules(source: str) -> set[str]:
    """Dotted names of what the source imports; with ``from a import b``, both ``a`` and ``a.b``."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def may_save(recipe: Recipe) -> bool:
    """Whether a recipe, or what it imports from its folder, imports torch's checkpointing."""
    modules = {m for file in with_imports(recipe.path) for m in imported_modules(file.read_text())}
    return any(f"{name}.".startswith("torch.distributed.checkpoint.") for name in modules)
