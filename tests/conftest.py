"""``pytest tests`` runs every claim; with ``--recipes DIR`` it judges that folder alone."""

import os
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
REPO = TESTS.parent
sys.path[:0] = [str(REPO), str(REPO / "_ext"), str(TESTS)]

ASKED_OF_ANY_RECIPE = (
    "test_recipe_proves_its_claim",
    "test_every_save_is_awaited_however_slow_the_disk",
    "test_recipe_runs_under_torchrun",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("recipes")
    group.addoption("--recipes", metavar="DIR", help="judge the recipes below DIR, nothing else")
    group.addoption("--ranks", metavar="N,N", help="world sizes to run them on (default 1,2,3,4)")
    parser.addini("declared_skips", "how many tests may be skipped where CI=true", default="0")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path.is_relative_to(TESTS / "data"):
        return True
    if config.getoption("--recipes") and collection_path != TESTS:
        return collection_path.name != "test_recipes.py"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--recipes"):
        asked = [item for item in items if item.name.startswith(ASKED_OF_ANY_RECIPE)]
        config.hook.pytest_deselected(items=[item for item in items if item not in asked])
        items[:] = asked


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Where CI=true, more skips than the project declares fail the run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or os.environ.get("CI") != "true":
        return
    skipped = len(reporter.stats.get("skipped", []))
    declared = int(session.config.getini("declared_skips"))
    if skipped > declared:
        reporter.write_line(f"{skipped} tests were skipped, {declared} are declared", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
