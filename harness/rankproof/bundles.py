"""A recipe as one archive: the file, and all that it imports from its project."""

import zipfile
from pathlib import Path

from rankproof.recipe import Recipe

LICENCE = "LICENSE"
CACHE = "__pycache__"


def is_more_than_a_file(recipe: Recipe) -> bool:
    """Whether it imports anything of its project."""
    return len(recipe.flat_files) > 1 or bool(recipe.packages)


def write_bundle(recipe: Recipe, folder: Path) -> Path:
    """Write ``<name>.zip`` into ``folder`` and return its path.

    In the archive are the recipe and the files that it imports, beside each other; beside them
    every package of the project of which it imports anything, whole; and the project's licence.
    """
    files = {file.name: file for file in recipe.flat_files}
    for package in recipe.packages:
        for file in sorted(package.rglob("*")):
            if file.is_file() and CACHE not in file.parts:
                files[str(file.relative_to(package.parent))] = file
    if recipe.root is not None and (recipe.root / LICENCE).exists():
        files[LICENCE] = recipe.root / LICENCE
    bundle = folder / f"{recipe.path.stem}.zip"
    with zipfile.ZipFile(bundle, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, file in files.items():
            archive.write(file, name)
    return bundle
