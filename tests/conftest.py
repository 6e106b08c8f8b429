"""``pytest tests`` runs every claim; with ``--rankproof DIR`` it judges that folder alone."""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
REPO = TESTS.parent
sys.path[:0] = [str(REPO), str(REPO / "_ext"), str(REPO / "tools"), str(TESTS)]
import harness  # noqa: E402, F401 (puts rankproof on the path)

pytest_plugins = ["rankproof.plugin"]  # --rankproof DIR judges that folder, nothing else


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("recipes")
    group.addoption("--ranks", metavar="N,N", help="world sizes to run them on (default 1,2,3)")
    group.addoption("--all-ranks", action="store_true", help="every world size of each recipe")
    group.addoption("--all-models", action="store_true", help="every stock model of the tables")
    group.addoption("--check", action="store_true", help="recipes at two ranks and the fast tests")
    parser.addini("declared_skips", "how many tests may be skipped where CI=true", default="0")


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def plain_python() -> Iterator[Callable[..., dict]]:
    """``plain_python(file, work)``: the code and the output of ``python file`` in ``work``."""
    from fork_server import asking
    from selection import with_library

    command = [sys.executable, "-B", "-W", "ignore", str(TESTS / "warm_python.py")]
    env = with_library() | {"PYTHONDONTWRITEBYTECODE": "1"}
    with asking(command, 120, REPO, env) as ask:
        yield ask


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if collection_path.is_relative_to(TESTS / "data") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all-models"):
        rest = [item for item in items if item.get_closest_marker("all_models")]
        config.hook.pytest_deselected(items=rest)
        items[:] = [item for item in items if item not in rest]
    if config.getoption("--check"):
        fast = [item for item in items if is_fast(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in fast])
        items[:] = fast


# By file and name: they start processes, or need the pages or a server.
SLOW = frozenset((TESTS / "slow.txt").read_text().split())


def is_fast(item: pytest.Item) -> bool:
    """Whether ``make check`` runs it; of each recipe's proof, the run at two ranks."""
    test = item.nodeid.partition("[")[0]
    if test == "tests/test_recipes.py::test_recipe_proves_its_claim":
        return item.callspec.params["ranks"] == max(2, item.callspec.params["recipe"].min_ranks)
    return test not in SLOW


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """The seconds that each file and each recipe took, over all workers."""
    files, recipes = Counter(), Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if not isinstance(report, pytest.TestReport):
                continue
            file, _, test = report.nodeid.partition("::")
            files[file] += report.duration
            if file.endswith("test_recipes.py") and "[" in test:
                recipes[test.partition("[")[2].rstrip("]").partition("-")[0]] += report.duration
    for title, seconds in (("file", files), ("recipe", recipes)):
        if sum(seconds.values()) >= 10:
            terminalreporter.section(f"seconds by {title}")
            for name, taken in seconds.most_common():
                terminalreporter.write_line(f"{taken:8.1f} s  {name}")


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
