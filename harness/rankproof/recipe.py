"""Recipes as files: finding them, hashing their code, reading their controls."""

import ast
import hashlib
import importlib.util
import os
import shlex
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path

DEFAULT_RANKS = (1, 2, 3, 4)
DEFAULT_DEADLINE_S = 120.0
STOPPED = frozenset({"raised", "killed", "hung"})
GATES = ("hold_write",)  # rankproof.gates explains them
OWN_GATES = "gates.py"  # beside controls: other gates that they name
DCP = ("torch.distributed.checkpoint", "torch.distributed.checkpoint.format_utils")
DCP += ("torch.distributed.checkpoint.state_dict",)  # what a script that saves will import
UNFINISHED = frozenset({"checkpoint_missing", "checkpoint_incomplete"})
NOT_AWAITED = frozenset({"never_awaited"})
DOCUMENTED = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
DEFINING = (*DOCUMENTED, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)


class RecipeError(ValueError):
    """A recipe or its controls file is not what the harness needs; the message says what to do."""


@dataclass(frozen=True)
class Control:
    """A negative control: an edit of the recipe, and the failures that the edit may cause."""

    name: str
    says: str
    find: str
    replace: str
    fails: frozenset[str]
    ranks: int = 2
    gate: str | None = None
    order: bool = False
    order_on_device: bool = False  # queued work alone shows it on an accelerator
    deadline_s: float = DEFAULT_DEADLINE_S

    def caught(self, kinds: frozenset[str]) -> bool:
        """Whether a run with these kinds of failure failed as the control says, and only so.

        A rank that was stopped leaves its last save unfinished; that alone is no other failure.
        """
        awaits = self.fails & (UNFINISHED | {"overlapping_saves"})  # an edit about awaiting
        fails = self.fails | NOT_AWAITED if awaits else self.fails
        unexpected = kinds - fails
        if kinds & fails & STOPPED:
            unexpected -= UNFINISHED | NOT_AWAITED
        return bool(kinds & fails) and not unexpected

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


@dataclass(frozen=True)
class Settings:
    """``[tool.rankproof]`` of a pyproject.toml, or a rankproof.toml: what holds for a folder."""

    root: Path = field(default_factory=Path.cwd)  # the paths and patterns below are relative to it
    recipes: str = "."
    controls: str | None = None
    verified: str = "verified"
    pattern: str = "*.py"
    exclude: tuple[str, ...] = ()
    ranks: tuple[int, ...] = (2,)
    deadline_s: float = DEFAULT_DEADLINE_S
    args: dict[str, str] = field(default_factory=dict)  # by file name or pattern

    @classmethod
    def of(cls, path: Path) -> "Settings":
        """The settings of the nearest file that has some, from ``path`` upwards.

        Raises:
            RecipeError: a key is unknown, or the file is not valid.
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
                return cls(root=file.parent, **_checked(table, known, str(file)))
        return cls(root=path if path.is_dir() else path.parent)

    def load(self, path: Path) -> "Recipe":
        """The script at ``path``; only those below ``recipes`` have controls."""
        own = self.controls and path.resolve().is_relative_to(self.root / self.recipes)
        return load_recipe(path, self.root / self.controls if own else None, self.deadline_s)

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

    @property
    def missing(self) -> list[str]:
        """What it needs and is not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]

    @property
    def files(self) -> list[Path]:
        """Its own and those of its gallery that it imports, directly or not."""
        return with_imports(self.path)

    @property
    def saves(self) -> bool:
        """Whether one of its files imports torch's checkpointing."""
        modules = {module for file in self.files for module in imported_modules(file)}
        return any(f"{name}.".startswith(f"{DCP[0]}.") for name in modules)

    @property
    def name(self) -> str:
        return self.path.stem

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


def _toml(path: Path) -> dict:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path}: {error}") from error


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8"), str(path))
    except SyntaxError as error:
        raise RecipeError(f"{path}:{error.lineno}: not valid Python: {error.msg}") from error


def code_sha256(path: Path) -> str:
    """SHA-256 of the file's syntax tree without docstrings; comments are not in the tree.

    Editing prose keeps it, editing code changes it. It is the same on every Python version: fields
    that are empty are left out, since versions differ in which ones they have.
    """
    tree = _parse(path)
    for node in ast.walk(tree):
        documented = isinstance(
            node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        )
        if documented and ast.get_docstring(node, clean=False) is not None:
            node.body[0].value.value = ""
    return hashlib.sha256(repr(_plain(tree)).encode()).hexdigest()


def with_imports(path: Path) -> list[Path]:
    """The file and those that it imports, directly or not.

    ``import name`` means ``name.py`` in the file's folder, else in another folder of its gallery
    (sphinx-gallery knows one by its header).
    """
    found = [path]
    for current in found:
        galleries = [h.parent for h in sorted(current.parent.parent.glob("*/GALLERY_HEADER.rst"))]
        folders = [current.parent, *(galleries if current.parent in galleries else [])]
        for name in sorted(imported_modules(current)):
            files = [folder / f"{name}.py" for folder in folders if name.isidentifier()]
            file = next((file for file in files if file.is_file()), path)
            found += [file] if file not in found else []
    return found


def imported_modules(path: Path) -> set[str]:
    """Dotted names of what a file imports; with ``from a import b``, both ``a`` and ``a.b``."""
    found = set()
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def code_hashes(path: Path) -> dict[str, str]:
    """:func:`code_sha256` of a recipe and of what it imports from its gallery, by name."""
    return {file.stem: code_sha256(file) for file in with_imports(path)}


def _plain(node: object) -> object:
    """A syntax tree as nested lists, without empty fields and positions."""
    if isinstance(node, list):
        return [_plain(item) for item in node]
    if not isinstance(node, ast.AST):
        return node
    fields = [(name, _plain(value)) for name, value in ast.iter_fields(node)]
    return [type(node).__name__, *(pair for pair in fields if pair[1] not in (None, []))]


def _control_from(table: dict, path: Path, deadline_s: float) -> Control:
    where = f"{path}: control {table.get('name', '?')!r}"
    values = {"deadline_s": deadline_s} | _checked(table, {f.name for f in fields(Control)}, where)
    if (gate := table.get("gate", GATES[0])) not in GATES:
        values["gate"] = f"{path.with_name(OWN_GATES)}:{gate}"
    if missing := {"name", "says", "find", "replace", "fails"} - table.keys():
        raise RecipeError(f"{where} lacks {sorted(missing)}")
    return Control(**values | {"fails": frozenset(table["fails"])})


def load_controls(path: Path, deadline_s: float = DEFAULT_DEADLINE_S) -> dict:
    """Read ``tests/controls/<recipe>.toml`` into the keyword arguments of :class:`Recipe`.

    Raises:
        RecipeError: the file is not valid, or a key is unknown or missing.
    """
    known = {"ranks", "page_ranks", "order", "deadline_s", "needs", "control"}
    table = {"deadline_s": deadline_s} | _checked(_toml(path), known, str(path))
    deadline_s = table["deadline_s"]
    controls = tuple(_control_from(c, path, deadline_s) for c in table.pop("control", ()))
    return table | {"controls": controls}


def load_recipe(
    path: Path, controls_dir: Path | None = None, deadline_s: float = DEFAULT_DEADLINE_S
) -> Recipe:
    """The recipe at ``path``, with its controls if ``controls_dir`` holds ``<stem>.toml``."""
    path = Path(path).resolve()
    if not path.is_file():
        raise RecipeError(f"{path}: no such recipe; pass the path of a Python file")
    _parse(path)
    settings = {"deadline_s": deadline_s}
    if controls_dir is not None and (file := controls_dir / f"{path.stem}.toml").is_file():
        settings = load_controls(file, deadline_s)
    return Recipe(path, **settings)


def is_helper(path: Path) -> bool:
    """Whether a file only defines things: it has no main guard and calls nothing by itself."""
    does = [node for node in _parse(path).body if not isinstance(node, DEFINING)]
    return all(isinstance(getattr(node, "value", None), ast.Constant) for node in does)


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


def find_recipes(root: Path, settings: Settings) -> list[Recipe]:
    """The scripts of anyone's folder: what its settings name, without files that only define.

    Raises:
        RecipeError: there is none.
    """
    found = [
        settings.load(path)
        for path in python_files(root)
        if path.match(settings.pattern)
        and not any(path.match(pattern) for pattern in settings.exclude)
        and not is_helper(path)
    ]
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
