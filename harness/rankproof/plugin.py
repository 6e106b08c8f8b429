"""``pytest --rankproof DIR`` judges every script of a folder, at each of its numbers of ranks.

A script that fails is a test that fails; one that is not judged is skipped, and says why. Each is
run twice if it saves: as it is, and with every write held until the script waits for it.
"""

from pathlib import Path

import pytest

from rankproof.recipe import RecipeError, Settings, find_recipes, may_save
from rankproof.run import run


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rankproof")
    group.addoption("--rankproof", metavar="DIR", help="judge the scripts below DIR on ranks")
    group.addoption("--rankproof-ranks", metavar="N,N", help="numbers of ranks (default 2)")
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
        paths = find_recipes(root, settings)
        text = config.getoption("--rankproof-ranks")
        ranks = [int(part) for part in text.split(",")] if text else settings.ranks
    except (RecipeError, ValueError) as error:
        raise pytest.UsageError(str(error)) from error
    items[:] = [
        ScriptItem.from_parent(
            session,
            name=f"{path.relative_to(root)}-{n}{gate or ''}",
            script=path,
            ranks=n,
            gate=gate,
            settings=settings,
        )
        for path in paths
        for n in ranks
        for gate in ([None, "hold_write"] if may_save(path) else [None])
    ]


class ScriptFailed(Exception):
    """A script was judged bad; the text says why."""


class ScriptItem(pytest.Item):
    """One script on one number of ranks."""

    def __init__(self, *, script: Path, ranks: int, gate: str | None, settings, **kwargs) -> None:
        super().__init__(**kwargs)
        self.script, self.ranks, self.gate, self.settings = script, ranks, gate, settings

    def runtest(self) -> None:
        report = run(
            self.script,
            self.ranks,
            launcher=self.config.getoption("--rankproof-launcher"),
            gate=self.gate,
            deadline_s=self.settings.deadline_s,
            args=self.settings.args_of(self.script),
        )
        if report.verdict == "failed":
            raise ScriptFailed(report.describe())
        if report.verdict == "not judged":
            pytest.skip("; ".join(report.unjudged))

    def repr_failure(self, excinfo, style=None):
        if isinstance(excinfo.value, ScriptFailed):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self):
        return self.script, 0, self.name
