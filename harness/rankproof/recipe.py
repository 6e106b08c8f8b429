"""Recipes as files: finding them, reading their settings and their controls."""

import ast
import importlib.util
import os
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path

from rankproof.judge import KINDS, Failure
from rankproof.sources import (
    DOCUMENTED,
    PACKAGE_FILE,
    SourceError,
    Sources,
    find_module,
    imported_modules,
    parse,
    read,
)

DEFAULT_RANKS = (1, 2, 3, 4)
DEFAULT_DEADLINE_S = 120.0
STOPPED = frozenset({"raised", "killed", "hung"})
GATES = ("hold_write",)  # rankproof.gates explains them
OWN_GATES = "gates.py"  # beside controls: other gates that they name
DCP = ("torch.distributed.checkpoint", "torch.distributed.checkpoint.format_utils")
DCP += ("torch.distributed.checkpoint.state_dict",)  # what a script that saves will import
UNFINISHED = frozenset({"checkpoint_missing", "checkpoint_incomplete"})
NOT_AWAITED = frozenset({"never_awaited"})
EXCEPTION = re.compile(r"[A-Z]\w+(:|,|$)")  # how a pattern of "raised" begins
# What an edit raises that is wrong by itself: no failure of a script that lacks a line.
SLIPS = re.compile(
    r"\b(NameError|UnboundLocalError|SyntaxError|IndentationError|AttributeError|ImportError"
    r"|ModuleNotFoundError)\b"
)
ASKS_FOR_RANKS = re.compile(r"--nproc[-_]per[-_]node[= ]+(\d+)")
MOST_ASKED = 8  # ranks: more are left to --ranks
BESIDE_SCRIPTS = ("README*", "Makefile", "*.sh")
DEFINING = (*DOCUMENTED, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)


class RecipeError(SourceError):
    """A recipe or its controls file is not what the harness needs; the message says what to do."""


@dataclass(frozen=True)
class Control:
    """A negative control: an edit of a script or of a module that it imports, and what must fail.

    ``fails`` has the kinds of failure that the edit may cause, each with patterns of its text.
    Those of ``raised`` begin with the exception's type. The edited file is the script's own where
    ``file`` is None.
    """

    name: str
    says: str
    find: str
    replace: str
    fails: dict[str, tuple[str, ...]]
    file: Path | None = None
    ranks: int = 2
    gate: str | None = None
    order: bool = False
    order_on_device: bool = False  # queued work alone shows it on an accelerator
    deadline_s: float = DEFAULT_DEADLINE_S

    def named(self, failures: Iterable[Failure]) -> list[Failure]:
        """Those of ``failures`` that the control names."""
        found = []
        for failure in failures:
            patterns = self.fails.get(failure.kind, ())
            if any(re.search(pattern, failure.text) for pattern in patterns):
                found.append(failure)
        return found

    def missed(self, failures: Iterable[Failure]) -> str:
        """Why ``failures`` are not what the control says; empty if they are.

        One at least is named, and no other kind occurs. A rank that was stopped leaves its last
        save unfinished; that alone is no other failure.
        """
        failures = list(failures)
        named = self.named(failures)
        if not named:
            return "no failure is one that the control names"
        slips = [f.text for f in failures if f not in named and SLIPS.search(f.text)]
        if slips:
            return f"the edit is no Python that could run, whatever the script proves: {slips[0]}"
        expected = frozenset(self.fails)
        if expected & (UNFINISHED | {"overlapping_saves"}):  # an edit about awaiting
            expected |= NOT_AWAITED
        kinds = {failure.kind for failure in failures}
        unexpected = kinds - expected
        if kinds & expected & STOPPED:
            unexpected -= UNFINISHED | NOT_AWAITED | {"save_failed"}
        return f"it failed by {', '.join(sorted(unexpected))}, too" if unexpected else ""

    @property
    def expected(self) -> str:
        """What must fail, in words."""
        said = [f"{kind} ({' or '.join(self.fails[kind])})" for kind in sorted(self.fails)]
        return " or ".join(said)

    def caught(self, failures: Iterable[Failure]) -> bool:
        """Whether a run with these failures failed as the control says, and only so."""
        return not self.missed(failures)

    def apply(self, source: str) -> str:
        """Return ``source`` with the edit made.

        Raises:
            RecipeError: ``find`` does not occur exactly once.
        """
        count = source.count(self.find)
        if count != 1:
            raise RecipeError(
                f"control '{self.name}': its 'find' text occurs {count} times in the recipe, not "
                "once; bring the control up to date with the recipe"
            )
        return source.replace(self.find, self.replace)

    def edited(self, recipe: "Recipe", folder: Path) -> tuple[str, Path]:
        """Write the edited file to ``folder``, a module with the whole package that it lies in.

        Returns:
            Its dotted name, and where it is.

        Raises:
            RecipeError: the edit does not fit, or the recipe does not import the file.
        """
        original = self.file or recipe.path
        name = recipe.sources.name_of(original)
        if name is None:
            raise RecipeError(
                f"control '{self.name}': {recipe.path.name} does not import {original}, so an edit "
                "of it would change nothing"
            )
        source = self.apply(original.read_text(encoding="utf-8"))
        package = name.partition(".")[0]
        folder.mkdir(parents=True)
        if package != name or original.name == PACKAGE_FILE:
            whole = recipe.sources.found_in[name] / package
            shutil.copytree(whole, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
            file = folder / original.relative_to(recipe.sources.found_in[name])
        else:
            file = folder / original.name
        file.write_text(source, encoding="utf-8")
        return name, file


@dataclass(frozen=True)
class Settings:
    """``[tool.rankproof]`` of a pyproject.toml, or a rankproof.toml: what holds for a folder."""

    root: Path = field(default_factory=Path.cwd)  # the paths and patterns below are relative to it
    recipes: str = "."
    controls: str | None = None
    verified: str = "verified"
    pattern: str = "*.py"
    exclude: tuple[str, ...] = ()
    import_from: tuple[str, ...] = ()  # folders that scripts import from, beside their own
    ranks: tuple[int, ...] = (2,)
    deadline_s: float = DEFAULT_DEADLINE_S
    args: dict[str, str] = field(default_factory=dict)  # by file name or pattern
    off: tuple[str, ...] = ()  # kinds of failure that do not count, see rankproof.run.OPTIONAL

    @classmethod
    def of(cls, path: Path) -> "Settings":
        """The settings of the nearest file that has some, from ``path`` upwards.

        Raises:
            RecipeError: a key is unknown, its ranks are no numbers, or the file is not valid.
        """
        path = Path(path).resolve()
        names = "rankproof.toml", "pyproject.toml"
        files = (folder / name for folder in (path, *path.parents) for name in names)
        for file in filter(Path.is_file, files):
            table = _toml(file)
            if file.name == "pyproject.toml":
                table = table.get("tool", {}).get("rankproof")
            if table is not None:
                known = {f.name for f in fields(cls)} - {"root"}
                settings = _checked(table, known, str(file))
                _check_ranks(settings.get("ranks", cls.ranks), file)
                return cls(root=file.parent, **settings)
        return cls(root=path if path.is_dir() else path.parent)

    def load(self, path: Path) -> "Recipe":
        """The script at ``path``; only one below ``recipes``, or named by a file, has controls."""
        below = path.resolve().is_relative_to((self.root / self.recipes).resolve())
        controls = None
        if self.controls is not None:
            file = self.root / self.controls / f"{path.stem}.toml"
            if below or (file.is_file() and "script" in _toml(file)):
                controls = self.root / self.controls
        return load_recipe(path, controls, self.deadline_s)

    def ranks_of(self, recipe: "Recipe") -> list[int]:
        """The numbers of ranks that a script is judged on: as set, and as it says it is started.

        The script's own affair, and one run, where it starts its ranks itself.
        """
        ranks = set(self.ranks) if self.ranks != (2,) else {recipe.page_ranks}
        return sorted(ranks | asked_ranks(recipe.path))

    @property
    def import_folders(self) -> tuple[Path, ...]:
        return tuple((self.root / folder).resolve() for folder in self.import_from)

    def args_of(self, recipe: Path) -> tuple[str, ...]:
        found = (args for pattern, args in self.args.items() if recipe.match(pattern))
        return tuple(shlex.split(next(found, "")))


@dataclass(frozen=True)
class Recipe:
    """One file: what the page shows, the harness runs and a reader copies."""

    path: Path
    ranks: tuple[int, ...] = DEFAULT_RANKS
    page_ranks: int = 2
    order: bool = False
    deadline_s: float = DEFAULT_DEADLINE_S
    needs: tuple[str, ...] = ()  # packages beside torch
    controls: tuple[Control, ...] = field(default=())
    import_from: tuple[Path, ...] = ()
    root: Path | None = None  # of its project, where settings were found
    module: str = ""  # its dotted name, where it runs as one, from the first of import_from
    args: tuple[str, ...] = ()  # as the settings of its project say
    off: tuple[str, ...] = ()  # so are these: kinds of failure that do not count

    @property
    def missing(self) -> list[str]:
        """What it needs and is not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]

    @cached_property
    def sources(self) -> Sources:
        """Its own file and those of its project that it imports, directly or not."""
        if self.module:
            return Sources.of_module(self.module, self.import_from)
        return Sources.of_script(self.path, self.import_from)

    @property
    def files(self) -> list[Path]:
        return list(self.sources.files.values())

    @property
    def flat_files(self) -> list[Path]:
        """Those of its files that lie in no package."""
        found = []
        for name, path in self.sources.files.items():
            if "." not in name and path.name != PACKAGE_FILE:
                found.append(path)
        return found

    @property
    def packages(self) -> list[Path]:
        """The folders of the packages that it imports from its project."""
        found = {
            self.sources.found_in[name] / name.partition(".")[0]
            for name, path in self.sources.files.items()
            if "." in name or path.name == PACKAGE_FILE
        }
        return sorted(found)

    @property
    def import_path(self) -> list[Path]:
        """The folders that it imports from."""
        beside = [file.parent for file in self.flat_files]
        return list(dict.fromkeys([*beside, *self.import_from]))

    @property
    def saves(self) -> bool:
        """Whether one of its files imports torch's checkpointing."""
        modules = {module for file in self.files for module in imported_modules(file)}
        return any(f"{name}.".startswith(f"{DCP[0]}.") for name in modules)

    @property
    def name(self) -> str:
        return self.module.removesuffix(".__main__") or self.path.stem

    @property
    def folder(self) -> str:
        return self.path.parent.name

    @property
    def min_ranks(self) -> int:
        return min(self.ranks)

    def control(self, name: str) -> Control:
        found = {control.name: control for control in self.controls}
        if name not in found:
            raise RecipeError(f"recipe '{self.name}' has no control '{name}'")
        return found[name]


def _checked(table: dict, known: set[str], where: str) -> dict:
    """The table with its lists as tuples, if it has no other keys than ``known``."""
    if unknown := table.keys() - known:
        raise RecipeError(f"{where}: unknown keys: {sorted(unknown)}; known: {sorted(known)}")
    return {key: tuple(v) if isinstance(v, list) else v for key, v in table.items()}


def _check_ranks(ranks: object, file: Path) -> None:
    are_numbers = isinstance(ranks, tuple) and all(type(n) is int and n >= 1 for n in ranks)
    if not ranks or not are_numbers:
        raise RecipeError(f"{file}: ranks {ranks!r}: give a list of numbers of 1 or more")


def _toml(path: Path) -> dict:
    try:
        return tomllib.loads(read(path))
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path}: {error}") from error


def _control_from(table: dict, path: Path, root: Path, deadline_s: float) -> Control:
    where = f"{path}: control {table.get('name', '?')!r}"
    values = {"deadline_s": deadline_s} | _checked(table, {f.name for f in fields(Control)}, where)
    gate = table.get("gate")
    if gate is not None and gate not in GATES:  # one of its own
        values["gate"] = f"{path.with_name(OWN_GATES)}:{gate}"
    missing = {"name", "says", "find", "replace", "fails"} - table.keys()
    if missing:
        raise RecipeError(f"{where} lacks {sorted(missing)}")
    values["fails"] = _patterns(table["fails"], where)
    if "file" in table:
        values["file"] = (root / table["file"]).resolve()
        if not values["file"].is_file():
            raise RecipeError(f"{where}: no file {values['file']}")
    return Control(**values)


def _patterns(fails: object, where: str) -> dict[str, tuple[str, ...]]:
    """The patterns of each kind, if they say which failure it must be."""
    if not isinstance(fails, dict) or not fails:
        raise RecipeError(f"{where}: say kind and pattern of its text: fails.raised = '…Error: …'")
    found = {}
    for kind, said in fails.items():
        if kind not in KINDS:
            raise RecipeError(f"{where}: no kind of failure '{kind}'; there are {', '.join(KINDS)}")
        found[kind] = (said,) if isinstance(said, str) else tuple(said)
        for pattern in found[kind]:
            _check_pattern(kind, pattern, where)
    return found


def _check_pattern(kind: str, pattern: str, where: str) -> None:
    try:
        matches_anything = re.search(pattern, "") is not None
    except re.error as error:
        raise RecipeError(f"{where}: fails.{kind} is no pattern: {error}") from error
    if matches_anything:
        raise RecipeError(f"{where}: fails.{kind} matches any text")
    if kind == "raised" and not EXCEPTION.match(pattern):
        raise RecipeError(f"{where}: fails.raised begins with the exception's type")


def load_controls(path: Path, root: Path, deadline_s: float = DEFAULT_DEADLINE_S) -> dict:
    """Read ``tests/controls/<recipe>.toml`` into the keyword arguments of :class:`Recipe`.

    ``script``, and each control's ``file``, are relative to ``root``.

    Raises:
        RecipeError: the file is not valid, or a key is unknown or missing.
    """
    known = {"script", "ranks", "page_ranks", "order", "deadline_s", "needs", "control"}
    table = {"deadline_s": deadline_s} | _checked(_toml(path), known, str(path))
    deadline_s = table["deadline_s"]
    controls = tuple(_control_from(c, path, root, deadline_s) for c in table.pop("control", ()))
    return table | {"controls": controls}


def load_recipe(
    path: Path, controls_dir: Path | None = None, deadline_s: float = DEFAULT_DEADLINE_S
) -> Recipe:
    """The script at ``path``, with its controls if ``controls_dir`` holds ``<stem>.toml``.

    A controls file that names another ``script`` is not for this one.
    """
    path = Path(path).resolve()
    if not path.is_file():
        raise RecipeError(f"{path}: no such recipe; pass the path of a Python file")
    _parse(path)
    project = Settings.of(path)
    settings = {"deadline_s": deadline_s}
    file = controls_dir / f"{path.stem}.toml" if controls_dir is not None else None
    if file is not None and file.is_file():
        found = load_controls(file, project.root, deadline_s)
        script = found.pop("script", None)
        if script is None or (project.root / script).resolve() == path:
            settings = found
    return Recipe(
        path,
        **settings,
        import_from=project.import_folders,
        root=project.root,
        args=project.args_of(path),
        off=project.off,
    )


def load_module(name: str, folder: Path) -> Recipe:
    """The module ``name``, as ``python -m`` finds it from ``folder``: a package by its main.

    Raises:
        RecipeError: there is no such module.
    """
    if not all(part.isidentifier() for part in name.split(".")):
        raise RecipeError(f"{name}: -m takes a module's name, such as package.train")
    main = find_module(f"{name}.__main__", folder)
    path = main or find_module(name, folder)
    if path is None:
        raise RecipeError(f"no module {name} in {folder}")
    if path.name == PACKAGE_FILE:
        raise RecipeError(f"{name} is a package without a __main__.py")
    project = Settings.of(path)
    return Recipe(
        path,
        deadline_s=project.deadline_s,
        import_from=(folder, *project.import_folders),
        root=project.root,
        args=project.args_of(path),
        off=project.off,
        module=f"{name}.__main__" if main else name,
    )


def asked_ranks(script: Path) -> set[int]:
    """The numbers of ranks in the commands that start a script, in its text and beside it.

    Beside it: in a README, a Makefile or a shell script of its folder, in lines that name it.
    """
    texts = [read(script)]
    for pattern in BESIDE_SCRIPTS:
        for file in script.parent.glob(pattern):
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            texts += [line for line in lines if script.name in line]
    asked = set()
    for text in texts:
        asked |= {int(number) for number in ASKS_FOR_RANKS.findall(text)}
    return {number for number in asked if 1 <= number <= MOST_ASKED}


def package_of(path: Path) -> tuple[Path, str]:
    """The folder that a file's package is imported from, and the name of its module there."""
    folder, parts = path.parent, [path.stem]
    while (folder / PACKAGE_FILE).is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return folder, ".".join(parts)


def _parse(path: Path) -> ast.Module:
    try:
        return parse(path)
    except SourceError as error:
        raise RecipeError(str(error)) from error


def find_gate(name: str) -> str:
    """The gate of this name: one of ``GATES``, or ``FILE.py:FUNCTION`` with the file's full path.

    Raises:
        RecipeError: there is none.
    """
    if name in GATES:
        return name
    file, _, function = name.rpartition(":")
    if not file:
        raise RecipeError(f"no gate '{name}'; see --help")
    path = Path(file).resolve()
    if not path.is_file():
        raise RecipeError(f"--gate {name}: no file {path}")
    defined = set()
    for node in _parse(path).body:
        if isinstance(node, ast.FunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            defined |= {alias.asname or alias.name for alias in node.names}
    if function not in defined:
        raise RecipeError(f"--gate {name}: no function '{function}' in {path}")
    return f"{path}:{function}"


def is_helper(path: Path) -> bool:
    """Whether a file only defines things: it has no main guard and calls nothing by itself.

    ``logger = getLogger()`` defines; ``result = main()`` does not, where ``main`` is a function of
    the file or of one beside it.
    """
    body = _parse(path).body
    own = own_functions(body, path.parent)
    for node in body:
        if not isinstance(node, DEFINING):
            if not isinstance(getattr(node, "value", None), ast.Constant):
                return False
        elif isinstance(node, ast.Assign | ast.AnnAssign) and _calls(node, own):
            return False
    return True


def own_functions(body: list[ast.stmt], folder: Path) -> set[str]:
    """Names of functions that a file defines, and of what it imports from a file beside it."""
    names = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom) and (folder / f"{node.module}.py").is_file():
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            beside = [alias for alias in node.names if (folder / f"{alias.name}.py").is_file()]
            names |= {alias.asname or alias.name for alias in beside}
    return {name for name in names if name.islower()}  # classes are constants' makers


def _calls(node: ast.stmt, names: set[str]) -> bool:
    """Whether a function of ``names``, or of a module among them, is called in ``node``."""
    for call in ast.walk(node):
        function = getattr(call, "func", None)
        owner = getattr(function, "value", function)
        if isinstance(call, ast.Call) and getattr(owner, "id", "") in names:
            return True
    return False


def python_files(root: Path) -> list[Path]:
    """Every ``*.py`` below ``root`` whose name does not begin with an underscore, by path.

    Hidden folders and virtual environments are left out.
    """
    paths = []
    for folder, folders, files in os.walk(root):
        hidden = {name for name in folders if name.startswith(".")}
        hidden |= {name for name in folders if Path(folder, name, "pyvenv.cfg").exists()}
        folders[:] = set(folders) - hidden
        paths += [Path(folder, n) for n in files if n.endswith(".py") and not n.startswith("_")]
    return sorted(paths)


def why_skipped(root: Path, settings: Settings) -> dict[Path, str]:
    """The Python files below ``root`` that are not run, each with the reason."""
    skipped = {}
    for path in python_files(root):
        excluding = [pattern for pattern in settings.exclude if path.match(pattern)]
        if not path.match(settings.pattern):
            skipped[path] = f"its name does not match {settings.pattern}"
        elif excluding:
            skipped[path] = f"excluded by {excluding[0]}"
        elif is_helper(path):
            skipped[path] = "it only defines functions, classes and constants"
    return skipped


def find_recipes(root: Path, settings: Settings) -> list[Recipe]:
    """The scripts of anyone's folder: what its settings name, without files that only define.

    Raises:
        RecipeError: there is none.
    """
    skipped = why_skipped(root, settings)
    found = [settings.load(path) for path in python_files(root) if path not in skipped]
    if not found:
        raise RecipeError(f"{root}: no scripts that match {settings.pattern} and do something")
    return found


def discover(root: Path, controls_dir: Path | None = None) -> list[Recipe]:
    """Every recipe of a gallery, by path; see :func:`python_files`.

    Raises:
        RecipeError: there is none.
    """
    paths = python_files(root)
    if not paths:
        raise RecipeError(f"{root}: no recipes (*.py) found")
    return [load_recipe(path, controls_dir) for path in paths]
