"""Recipes and proofs of sharding as modules, as they stand or with a control's edit."""

import importlib.util
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "harness"))
SHARDING = ROOT / "recipes_source" / "sharding"
PROOFS = ROOT / "tests" / "proofs"
CONTROLS = ROOT / "tests" / "controls"
EDITED: list[Path] = []  # where edited copies go: the folder of the run
KINDS = {"stream_context": "FsdpContext"}


def script(name: str) -> Path:
    """A recipe's file, or a proof's."""
    recipe = SHARDING / f"{name}.py"
    return recipe if recipe.is_file() else PROOFS / f"{name}.py"


def load(name: str, control: str | None = None):
    """A recipe as a module, with a control's edit of it or of the library if one is named.

    It is imported anew with all that it imports of this project: the edit may be in any of it.
    """
    from rankproof.recipe import load_recipe

    recipe = load_recipe(script(name), CONTROLS)
    file = recipe.path
    first = []
    if control is not None:
        folder = Path(tempfile.mkdtemp(dir=EDITED[-1] if EDITED else None)) / "edited"
        _, file = recipe.control(control).edited(recipe, folder)
        first = [str(folder)]
        if file.name != recipe.path.name or file.parent != folder:
            file = recipe.path  # the edit is in what it imports
    remove_hook_of_the_last_import()
    for module in list(sys.modules):
        where = getattr(sys.modules[module], "__file__", None) or ""
        ours = module.partition(".")[0] == "overlap_recipes"
        if ours or Path(where).parent in (SHARDING, PROOFS):
            del sys.modules[module]
    sys.path[:0] = first
    try:
        spec = importlib.util.spec_from_file_location(f"{name}_{control}", file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        del sys.path[: len(first)]
    return module


def of_library(module: str):
    """A module of fsdp2, as the recipe that was loaded last has it."""
    return sys.modules[f"overlap_recipes.fsdp2.{module}"]


def remove_hook_of_the_last_import() -> None:
    """Optimizers would call one for each import of the library."""
    shared_slots = sys.modules.get("overlap_recipes.fsdp2.shared_slots")
    if shared_slots is None or shared_slots.counted.cache_info().currsize == 0:
        return
    shared_slots.counted().hook.remove()
    shared_slots.counted.cache_clear()
