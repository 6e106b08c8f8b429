"""Scripts that import a package of their project: what counts as their code, and edits of it."""

import textwrap
from pathlib import Path

import pytest

from rankproof.kept import _present_code as kept_code
from rankproof.recipe import Settings
from rankproof.run import run

SETTINGS = 'recipes = "scripts"\ncontrols = "controls"\nimport_from = ["."]\n'
FILES = {
    "rankproof.toml": SETTINGS,
    "scripts/uses.py": """
        from library.arithmetic import double

        if __name__ == "__main__":
            assert double(2) == 4, f"twice 2 is {double(2)}"
        """,
    "library/__init__.py": "from .unrelated import alone\n",
    "library/unrelated.py": "alone = 1\n",
    "library/arithmetic/__init__.py": "from .twice import double as double\n",
    "library/arithmetic/twice.py": """
        from ..factors import TWO

        def double(x):
            return TWO * x
        """,
    "library/factors.py": "TWO = 2\n",
    "controls/uses.toml": """
        [[control]]
        name = "three_times"
        says = "Take another factor"
        file = "library/factors.py"
        find = "TWO = 2"
        replace = "TWO = 3"
        ranks = 1
        fails.raised = 'AssertionError: twice 2 is 6'
        """,
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        file = tmp_path / "project" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    return tmp_path / "project"


def recipe_of(project: Path):
    kept_code.cache_clear()
    script = project / "scripts" / "uses.py"
    return Settings.of(script).load(script)


def test_dotted_and_relative_imports_are_followed_and_named(project: Path) -> None:
    """A package that is only passed through counts without what it imports."""
    assert list(recipe_of(project).sources.files) == [
        "uses",
        "library",
        "library.arithmetic",
        "library.arithmetic.twice",
        "library.factors",
    ]


def test_a_control_edits_a_module_of_the_package(project: Path) -> None:
    recipe = recipe_of(project)
    control = recipe.control("three_times")
    report = run(recipe.path, 1, launcher="warm", control=control)
    assert control.caught(report.failures), report.describe()
    assert run(recipe.path, 1, launcher="warm").ok, "and only there"


def test_a_control_without_its_edit_is_not_caught(project: Path) -> None:
    """The edited file must be what the script imports: a package elsewhere is found out."""
    script = project / "scripts" / "uses.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(project)!r})\n" + script.read_text())
    recipe = recipe_of(project)
    control = recipe.control("three_times")
    report = run(recipe.path, 1, launcher="warm", control=control)
    assert report.kinds == {"misfit"} and not control.caught(report.failures)
    assert "was imported, not the edited file" in report.failures[0].text
