"""Recipes of the offload folder as modules, as they stand or with a control's edit."""

import importlib.util
from pathlib import Path

from rankproof.recipe import load_recipe

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes_source" / "offload"


def load(tmp_path: Path, recipe: str, control: str | None = None):
    """The recipe's module, with a control's edit if one is named."""
    path = RECIPES / f"{recipe}.py"
    source = path.read_text()
    if control is not None:
        source = load_recipe(path, ROOT / "tests" / "controls").control(control).apply(source)
    copy = tmp_path / f"{recipe}_{control}.py"
    copy.write_text(source)
    spec = importlib.util.spec_from_file_location(copy.stem, copy)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
