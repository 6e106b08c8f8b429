"""Run a script on several ranks and report what it did: the harness's public face."""

import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rankproof.errors import summary
from rankproof.judge import NO_RENDEZVOUS, TAKEN_PORT, Failure
from rankproof.launch import HOME, launch, load_back, new_spec
from rankproof.protocol import Edited, Spec
from rankproof.recipe import (
    DCP,
    DEFAULT_DEADLINE_S,
    Control,
    Recipe,
    RecipeError,
    find_gate,
    load_module,
    load_recipe,
    package_of,
)
from rankproof.report import COMMAND, Report, reproduce
from rankproof.sources import parse, read
from rankproof.starts import own_ranks, takes_dir
from rankproof.verdict import Left, fill_in

__all__ = ["COMMAND", "HOME", "LAUNCHERS", "OPTIONAL", "Options", "Report", "load_back", "run"]

ORDER_UNSEEN = "in which order the ranks that it starts use memory: torchrun must start them"
GROUPS_UNSEEN = "whether the ranks that it starts leave their process groups is not seen"
SAVES_UNSEEN = "what the processes that it starts save is not seen"
OPTIONAL = (  # kinds that a project may turn off: its habits, no lost work
    "child_died",
    "deprecation_warning",
    "exited_early",
    "left_process",
    "left_process_group",
    "left_thread",
    "wrote_elsewhere",
)
NO_TORCH = (
    "rankproof judges with your torch, and there is none here: pip install torch, for a CPU with "
    "--index-url https://download.pytorch.org/whl/cpu"
)
LAUNCHERS = ("auto", "torchrun", "warm", "python")


@dataclass(frozen=True)
class Options:
    """How a script is to be run.

    Args:
        launcher: ``"torchrun"`` for the real thing, ``"warm"`` to fork from a process that has
            imported torch, ``"python"`` for a script that starts its ranks itself (their number is
            then its own affair), ``"auto"`` for python or warm, as the script needs it.
        control: run it with this edit, its gate and its deadline.
        gate: hold a background step, see :mod:`rankproof.gates`.
        order: record stream order on CPU, see :mod:`rankproof.streams`.
        deadline_s: seconds from the script's first line until every rank is stopped; the
            control's, or 120, if not given.
        args: more arguments for the script. ``--dir`` is added if its source knows it.
        keep: a directory that receives the run's files (created; must not exist).
        through: directories that the script may write to, or make, and that keep what it writes.
        cwd: the working directory, for a script that reads files beside itself; an empty one,
            where the script may write, if not given.
        off: kinds of failure that are not to count, see :data:`OPTIONAL`; they become notes.
        module: run the module of this name, as ``python -m`` does; the path is then the folder
            that its package lies in.
    """

    launcher: str = "torchrun"
    control: Control | None = None
    gate: str | None = None
    order: bool = False
    deadline_s: float | None = None
    args: tuple[str, ...] = ()
    keep: Path | None = None
    through: tuple[Path, ...] = ()
    cwd: Path | None = None
    off: tuple[str, ...] = ()
    module: str | None = None

    def refuse(self) -> None:
        """Raise a RecipeError for what no run can be started with."""
        if self.launcher not in LAUNCHERS:
            raise RecipeError(f"no launcher '{self.launcher}'; there are {', '.join(LAUNCHERS)}")
        if self.keep and self.keep.exists():
            raise RecipeError(f"{self.keep} exists already; pass a directory that does not")
        if self.cwd and not self.cwd.is_dir():
            raise RecipeError(f"--cwd {self.cwd}: no such directory")
        if set(self.off) - set(OPTIONAL):
            raise RecipeError(f"--off {', '.join(self.off)}: only {', '.join(OPTIONAL)} can be")

    def command(self, recipe: Recipe, ranks: int) -> str:
        """The command that runs the same again."""
        deadline = None
        if self.deadline_s not in (None, recipe.deadline_s):
            deadline = f"{self.deadline_s:g}"
        return reproduce(
            f"-m {self.module}" if self.module else recipe.path,
            self.args,
            ranks=ranks,
            control=self.control.name if self.control else None,
            gate=self.gate,
            order=self.order and self.control is None,  # a control says that itself
            launcher=self.launcher if self.launcher != "auto" else None,
            deadline=deadline,
            cwd=self.cwd,
            allow=self.through,
            off=self.off,
        )


def run(path: Path | str, ranks: int, **options) -> Report:
    """Run the script at ``path`` on ``ranks`` ranks and judge it; for the rest see Options.

    Raises:
        RecipeError: there is no such file or kind, no gate of that name, ``ranks`` is not
            positive, ``keep`` exists, ``cwd`` does not, or the edit does not fit.
        SourceError: what the script imports from its project is not UTF-8, or not valid Python.
    """
    chosen = Options(**options)
    recipe = (
        load_module(chosen.module, Path(path).resolve()) if chosen.module else load_recipe(path)
    )
    chosen.refuse()
    if ranks < 1:
        raise RecipeError(f"{ranks} ranks: pass a number of 1 or more")
    if find_spec("torch") is None:
        raise RecipeError(NO_TORCH)
    if sys.platform != "linux":
        raise RecipeError("ranks are judged on Linux only: it needs subreapers and /proc")
    return _Run(recipe, ranks, chosen).report_on()


class _Run:
    """One run of a script: how it is started, and what becomes of its report."""

    def __init__(self, recipe: Recipe, ranks: int, options: Options) -> None:
        control = options.control
        self.recipe = recipe
        self.ranks = ranks
        self.options = options
        self.order = control.order if control else options.order
        gate = options.gate or (control.gate if control else None)
        self.gate = find_gate(gate) if gate else None
        controls_deadline = control.deadline_s if control else None
        self.deadline_s = options.deadline_s or controls_deadline or DEFAULT_DEADLINE_S
        starts, sets_rendezvous = own_start(recipe)
        self.starts = starts  # where it starts its ranks itself, or empty
        self.sets_rendezvous = sets_rendezvous
        self.launcher = options.launcher
        if self.launcher == "auto":
            self.launcher = "python" if starts else "warm"

    def report_on(self) -> Report:
        """Run it, judge it, leave nothing."""
        report = self.empty_report()
        if self.starts and self.launcher != "python":
            why = f"it starts its ranks itself ({self.starts}): use --launcher python"
            report.give_up(why)
            return report
        run_dir = Path(tempfile.mkdtemp(prefix=f"rankproof-{self.recipe.name}-"))
        try:
            spec = self.spec(run_dir)
            started = time.monotonic()
            launch(spec, DCP if self.recipe.saves else ())
            report.seconds = time.monotonic() - started
            _keep_made(run_dir / "made", self.options.through)
            self.judge(report, Left(run_dir, self.deadline_s, own_places(self.recipe)))
            return report
        finally:
            if self.options.keep is not None:
                shutil.copytree(run_dir, self.options.keep, symlinks=True)
            shutil.rmtree(run_dir, ignore_errors=True)

    def judge(self, report: Report, left: Left) -> None:
        """Whatever a run left, it gets a verdict: a folder's other scripts want theirs, too."""
        try:
            fill_in(report, left, self.options)
            self.qualify(report)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(where.filename).name}:{where.lineno}"
            report.give_up(f"rankproof itself failed at {place}: {summary(error)}")

    def empty_report(self) -> Report:
        control = self.options.control
        return Report(
            recipe=self.recipe.name,
            path=str(self.recipe.path),
            ranks=1 if self.launcher == "python" else self.ranks,
            launcher=self.launcher,
            command=self.options.command(self.recipe, self.ranks),
            control=control.name if control else None,
            gate=self.gate,
        )

    def spec(self, run_dir: Path) -> Spec:
        """What a server is told."""
        recipe = self.recipe
        edits = run_dir / "edited"
        file, edited = self.edit(edits)
        spec = new_spec(run_dir, file, self.ranks, self.deadline_s)
        spec.edited = edited
        spec.launcher = self.launcher
        spec.processes = 1 if self.launcher == "python" else self.ranks
        spec.module = recipe.module
        spec.gate = self.gate
        spec.order = self.order
        spec.through = [str(Path(folder).resolve()) for folder in self.options.through]
        if self.options.cwd:
            spec.cwd = str(self.options.cwd.resolve())
        if accepts_dir(recipe):
            spec.args = ["--dir", str(run_dir / "dir")]
        spec.args += self.options.args
        if self.options.control:
            spec.import_from.append(str(edits))
        spec.import_from += [str(folder) for folder in recipe.import_path]
        own_folders = {source.parent for source in recipe.files} | {file.parent, edits}
        spec.own_folders = sorted(str(folder) for folder in own_folders)
        return spec

    def edit(self, folder: Path) -> tuple[Path, Edited | None]:
        """The file to run, and the module that was edited where it is another one."""
        path = self.recipe.path
        if self.options.control is None:
            return path, None
        name, edited_file = self.options.control.edited(self.recipe, folder)
        if edited_file.name == path.name and name == path.stem:
            return edited_file, None
        return path, Edited(name, str(edited_file))

    def qualify(self, report: Report) -> None:
        """Say what cannot be known of the script, and what may help."""
        if self.launcher == "python":
            report.notes.append(GROUPS_UNSEEN)
            if self.recipe.saves and report.nothing_to_judge:
                report.unjudged = report.unjudged or [SAVES_UNSEEN]
            if self.order and self.starts:
                report.unjudged.append(ORDER_UNSEEN)
        _do_not_judge_a_taken_port(report)
        if report.kinds == {"raised"}:
            if self.options.cwd is None:
                _hint_at_files_beside(report, self.recipe.path.parent)
            _hint_at_its_package(report, self.recipe.path)
        if self.sets_rendezvous and self.launcher != "python":
            _do_not_judge_its_rendezvous(report, self.sets_rendezvous)


def own_start(recipe: Recipe) -> tuple[str, str]:
    """:func:`rankproof.starts.own_ranks` of a script."""
    return own_ranks(read(recipe.path), sources_beside(recipe))


def is_run_once(recipe: Recipe, launcher: str) -> bool:
    """Whether how many ranks it has is the script's own affair."""
    return launcher == "python" or (launcher == "auto" and own_start(recipe)[0] != "")


def sources_beside(recipe: Recipe) -> dict[str, str]:
    """The text, by name, of each file of the script's project that it imports.

    Raises:
        SourceError: one is not valid; a package on the way to a module is parsed nowhere else.
    """
    found = {}
    for name, file in recipe.sources.files.items():
        parse(file)
        found[name] = read(file)
    return found


def _keep_made(made: Path, through: tuple[Path, ...]) -> None:
    """Put directories that the script was allowed, and has made, where they belong."""
    for number, folder in enumerate(through):
        own = made / str(number)
        if own.is_dir():
            shutil.copytree(own, Path(folder).resolve(), symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(own)  # else its checkpoints would be found twice


def _do_not_judge_a_taken_port(report: Report) -> None:
    """Drop all failures where one is that a port was taken: it is not the script's."""
    for failure in report.failures:
        if TAKEN_PORT.search(failure.text):
            why = "a port was taken, by this run or another program"
            report.give_up(f"{why}: {failure.text}")
            return


def _do_not_judge_its_rendezvous(report: Report, sets: str) -> None:
    """Drop failures that all may come of ranks that did not find each other.

    ``sets`` says where the script sets the rendezvous itself.
    """
    if report.failures and all(_of_starting(failure) for failure in report.failures):
        why = f"it sets its ranks' rendezvous itself ({sets}), which a launcher does for it"
        report.give_up(f"{why}; what came of it: {report.failures[0].text}")


def _of_starting(failure: Failure) -> bool:
    """Whether a failure may be that of ranks that did not find each other."""
    if failure.kind == "raised":
        return NO_RENDEZVOUS.search(failure.text) is not None
    return failure.kind in ("hung", "killed", "missing_record")


def _hint_at_files_beside(report: Report, folder: Path) -> None:
    """Say ``--cwd`` where a file was not found that lies beside the script."""
    for failure in report.failures:
        named = re.search(r"No such file or directory: '([^'/][^']*)'", failure.text)
        if named and (folder / named[1]).exists():
            failure.hint = f"it lies beside the script: run it with --cwd {folder}"


def _hint_at_its_package(report: Report, path: Path) -> None:
    """Say ``-m`` where a file imports relative to a package that it was not started in."""
    for failure in report.failures:
        if "with no known parent package" in failure.text:
            folder, name = package_of(path)
            failure.hint = f"it is part of a package: in {folder}, -m {name}"


def accepts_dir(recipe: Recipe) -> bool:
    """Whether the script, or a file that it imports from beside it, takes ``--dir PATH``."""
    sources = [file.read_text(encoding="utf-8") for file in recipe.flat_files]
    return any(takes_dir(source) for source in sources)


def own_places(recipe: Recipe) -> tuple[str, ...]:
    """Where a script's project lies; nothing is to be written there, not for a moment either."""
    found = {recipe.path.parent, *(file.parent for file in recipe.files)}
    if recipe.root is not None:
        found.add(recipe.root)
    return tuple(f"{os.path.realpath(folder)}/" for folder in found)
