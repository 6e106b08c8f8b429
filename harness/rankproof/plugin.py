"""``pytest --rankproof DIR`` judges every script of a folder, at each of its numbers of ranks.

A script that fails is a test that fails; one that is not judged is skipped, and says why. Each is
run twice if it saves: as it is, and with every write held until the script waits for it.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from rankproof.recipe import RecipeError, Settings, find_recipes
from rankproof.report import Report
from rankproof.run import run


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rankproof")
    group.addoption("--rankproof", metavar="DIR", help="judge the scripts below DIR on ranks")
    ranks = "numbers of ranks (default: 2, or as set)"
    group.addoption("--rankproof-ranks", metavar="N,N", help=ranks)
    group.addoption("--rankproof-launcher", default="auto", help="auto, torchrun, warm or python")


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """With ``--rankproof`` nothing else is collected."""
    return True if config.getoption("--rankproof") else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Scripts are tests of their own."""
    folder = config.getoption("--rankproof")
    if not folder:
        return
    root = Path(folder).resolve()
    settings = Settings.of(root)
    try:
        scripts = find_recipes(root, settings)
        text = config.getoption("--rankproof-ranks")
        given = [int(part) for part in text.split(",")] if text else None
    except (RecipeError, ValueError) as error:
        raise pytest.UsageError(str(error)) from error
    launcher = config.getoption("--rankproof-launcher")
    judge = partial(run, launcher=launcher, deadline_s=settings.deadline_s)
    items[:] = [
        ScriptItem.from_parent(
            session,
            name=f"{script.path.relative_to(root)}-{n}{gate or ''}",
            script=script.path,
            judge=partial(judge, script.path, n, gate=gate, args=script.args, off=script.off),
        )
        for script in scripts
        for n in given or settings.ranks_of(script)
        for gate in ([None, "hold_write"] if script.saves else [None])
    ]


class ScriptItem(pytest.Item):
    """One script on one number of ranks."""

    def __init__(self, *, script: Path, judge: Callable[[], Report], **kwargs) -> None:
        super().__init__(**kwargs)
        self.script, self.judge = script, judge

    def runtest(self) -> None:
        report = self.judge()
        if report.verdict == "failed":
            pytest.fail(report.describe(), pytrace=False)
        if report.verdict == "not judged":
            pytest.skip("; ".join(report.unjudged))

    def reportinfo(self):
        return self.script, 0, self.name
