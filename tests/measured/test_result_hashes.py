"""The hashes that a measurement is written with: of recipes, and of the library's modules."""

from pathlib import Path

import pytest
from results_site import RECIPE, measure, recipe_of, row

from benchmarks import result_files
from harness.sources import code_sha256


def with_library(repo: Path) -> Path:
    """Let the recipe of ``repo`` import a module of the library; the module."""
    library = repo / "overlap_recipes" / "checkpoint"
    library.mkdir(parents=True)
    for folder in (library, library.parent):
        (folder / "__init__.py").write_text("")
    module = library / "saves.py"
    module.write_text('"""Saves."""\n\n\ndef save():\n    return 1\n')
    imports = "from overlap_recipes.checkpoint.saves import save\n"
    recipe_of(repo).write_text(f"{imports}{RECIPE}")
    return module


def test_a_row_is_stale_when_the_library_that_it_measured_has_changed(repo):
    module = with_library(repo)
    name = "overlap_recipes.checkpoint.saves"
    hashes = result_files.hashes_of(["async_save", name], repo)
    assert set(hashes) > {"async_save", "overlap_recipes", name}
    measured = [("async_save", hashes), (name, hashes)]
    assert result_files.changed_recipes(measured, repo) == []
    module.write_text('"""Prose."""\n\n\ndef save():\n    return 1\n')
    assert result_files.changed_recipes(measured, repo) == []
    module.write_text('"""Prose."""\n\n\ndef save():\n    return 22\n')
    assert result_files.changed_recipes(measured, repo) == ["async_save", name]


def test_a_row_without_the_librarys_hash_is_stale_and_so_is_one_of_a_name_that_is_gone(repo):
    module = with_library(repo)
    own = {"async_save": code_sha256(recipe_of(repo))}
    assert result_files.changed_recipes([("async_save", own)], repo) == ["async_save"]
    name = "overlap_recipes.checkpoint.saves"
    hashes = result_files.hashes_of([name], repo)
    module.rename(module.with_name("other.py"))
    assert result_files.changed_recipes([(name, hashes)], repo) == [name]
    measure(repo, code_sha256=hashes, rows=[row("ours", 0.1, recipes=[name])])
    (line,) = result_files.stale_results(repo)
    assert line.endswith(f"test-x2.json: measured on an earlier version of {name}")


def test_a_name_that_nothing_has_is_no_hash_to_write(repo):
    with pytest.raises(result_files.ResultError, match="no recipe and no module .* async_safe"):
        result_files.hashes_of(["async_safe"], repo)


def test_the_code_hash_is_the_same_under_every_python(repo):
    """A result is measured under one Python and read under another: 3.12 computed this one."""
    expected = "976adbfca22b3ca6fc498b9698c616b81605ff7ebd1f5409283a4ea941d56891"
    assert code_sha256(recipe_of(repo)) == expected
