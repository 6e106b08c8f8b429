"""Which recipes and which world sizes the command line asks for."""

import importlib
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rankproof.recipe import Recipe, RecipeError, discover

REPO = Path(__file__).resolve().parent.parent
RECIPES = REPO / "recipes_source"
PROOFS = REPO / "tests" / "proofs"
CONTROLS = REPO / "tests" / "controls"
LIBRARY = REPO / "overlap_recipes"


def with_library() -> dict[str, str]:
    """The environment of a process that is to import this checkout's library."""
    return os.environ | {"PYTHONPATH": str(REPO)}


def edited_module(folder: Path, module: str, find: str, replace: str) -> ModuleType:
    """``module`` of the library with an edit, from a copy of the whole package below ``folder``.

    The copy has a name of its own, so the library that is imported already stays as it is.
    """
    package = f"edited_{len([name for name in sys.modules if name.startswith('edited_')])}"
    copied = folder / package
    shutil.copytree(LIBRARY, copied, ignore=shutil.ignore_patterns("__pycache__"))
    file = copied.joinpath(*module.split(".")).with_suffix(".py")
    source = file.read_text(encoding="utf-8")
    assert source.count(find) == 1, f"{find!r} is not once in {module}"
    file.write_text(source.replace(find, replace), encoding="utf-8")
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()  # a listing of the folder may be older than the copy
    try:
        return importlib.import_module(f"{package}.{module}")
    finally:
        sys.path.remove(str(folder))


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
