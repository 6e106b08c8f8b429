"""Runs that are kept: what was observed of this very code need not be observed again.

The pages' build and the tests both run each recipe and each of its negative controls. Whoever comes
second takes what the first has kept. A kept run is fresh as long as the recipe, what it imports
from its project, the edit and its gate, the number of ranks, its arguments and what is turned off,
torch, the packages that it needs and the harness are what they were. Only runs that ended as they
must are kept.
"""

import dataclasses
import hashlib
import json
import os
import threading
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from rankproof.judge import Failure
from rankproof.recipe import Control, Recipe, RecipeError
from rankproof.report import Report
from rankproof.run import run
from rankproof.sources import Sources

HERE = Path(__file__).parent


@cache
def _harness_sha256() -> str:
    texts = (path.read_text(encoding="utf-8") for path in sorted(HERE.rglob("*.py")))
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def _gate_sha256(control: Control | None) -> str:
    """Of the file of a gate of anybody's own; empty for the harness's own gates, and for none."""
    file = (control.gate or "").rpartition(":")[0] if control else ""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""


@cache
def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@cache
def _present_code(script: Path, import_from: tuple[Path, ...]) -> dict[str, str]:
    """The hashes of a script's files, as they are in this process's life."""
    return Sources.of_script(script, import_from).hashes()


@dataclasses.dataclass(frozen=True)
class KeptRun:
    """One run of a recipe on ``ranks`` ranks, as it is or with a control's edit, below ``store``.

    A recipe as it is is started by ``launcher``, one with an edit from a warm process.
    """

    store: Path
    recipe: Recipe
    ranks: int
    control: Control | None = None
    launcher: str = "torchrun"

    @property
    def file(self) -> Path:
        name = self.control.name if self.control else self.launcher
        return self.store / self.recipe.folder / self.recipe.name / f"{name}-x{self.ranks}.json"

    @property
    def key(self) -> str:
        edit = self.control and repr(dataclasses.replace(self.control, says=""))
        code = _present_code(self.recipe.path, self.recipe.import_from)
        versions = [torch.__version__, *map(_version_of, self.recipe.needs)]
        gate = _gate_sha256(self.control)
        settings = [self.recipe.args, self.recipe.off]
        what = json.dumps([code, self.ranks, settings, versions, edit, gate, _harness_sha256()])
        return hashlib.sha256(what.encode()).hexdigest()

    def report(self) -> Report | None:
        """What was observed, None if that is not there or no longer fresh."""
        if not self.file.is_file():
            return None
        content = json.loads(self.file.read_text(encoding="utf-8"))
        return Report.from_dict(content["report"]) if content["key"] == self.key else None

    def as_it_must(self, report: Report) -> bool:
        """Whether the recipe ended as it must, or the control was caught."""
        return self.control.caught(report.failures) if self.control else report.ok

    def keep(self, report: Report) -> None:
        """Keep ``report`` if it is as it must be, else drop what was kept."""
        if self.as_it_must(report):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            content = {"key": self.key, "report": report.to_dict()}
            part = self.file.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
            part.write_text(json.dumps(content), encoding="utf-8")
            part.replace(self.file)  # others read it at any time
        else:
            self.file.unlink(missing_ok=True)

    def run(self) -> Report:
        """Run it now, whatever was kept, and keep what is observed."""
        path, launcher = self.recipe.path, "warm" if self.control else self.launcher
        try:
            report = run(
                path,
                self.ranks,
                launcher=launcher,
                control=self.control,
                deadline_s=(self.control or self.recipe).deadline_s,
                args=self.recipe.args,
                off=self.recipe.off,
            )
        except RecipeError as error:  # the edit does not fit
            report = Report(path.stem, str(path), self.ranks, launcher, "bring it up to date")
            report.failures = [Failure("misfit", str(error))]
        self.keep(report)
        return report
