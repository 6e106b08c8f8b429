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
GATES = ("hold_write", "hold_staging", "finish_staging_first", "cross_collectives")
GATES += ("rank_0_first", "rank_0_last", "queue_work")  # rankproof.gates explains them
DCP = ("torch.distributed.checkpoint", "torch.distributed.checkpoint.format_utils")
DCP += ("torch.distributed.checkpoint.state_dict",)  # what a script that saves will import
UNFINISHED = frozenset({"checkpoint_missing", "checkpoint_incomplete"})
NOT_AWAITED = frozenset({"never_awaited"})


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
        for folder in (path, *path.parents):
            for name in ("rankproof.toml", "pyproject.toml"):
                file = folder / name
                if not file.is_file():
                    continue
                table = _toml(file)
                if name == "pyproject.toml":
                    table = table.get("tool", {}).get("rankproof")
                if table is not None:
                    known = {f.name for f in fields(cls)} - {"root"}
                    return cls(root=folder, **_checked(table, known, str(file)))
        return cls(root=path if path.is_dir() else path.parent)

    def controls_of(self, recipe: Path) -> Path | None:
        """The folder of the recipe's controls; only recipes below ``recipes`` have any."""
        own = Path(recipe).resolve().is_relative_to(self.root / self.recipes)
        return self.root / self.controls if self.controls and own else None

    def args_of(self, recipe: Path) -> tuple[str, ...]:
        for pattern, args in self.args.items():
            if Path(recipe).match(pattern):
                return tuple(shlex.split(args))
        return ()


@dataclass(frozen=True)
class Recipe:
    """One file: what the page shows, the harness runs and a reader copies."""

    path: Path
    title: str
    code_sha256: str
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
    def name(self) -> str:
        return self.path.stem

    @property
    def folder(self) -> str:
        return self.path.parent.name

    @property
    def min_ranks(self) -> int:
        return min(self.ranks)

    def control(self, name: str) -> Control:
        for control in self.controls:
            if control.name == name:
                return control
        raise RecipeError(f"recipe '{self.name}' has no control '{name}'")


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
        body = getattr(node, "body", None)
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            body[0].value.value = ""
    return hashlib.sha256(repr(_plain(tree)).encode()).hexdigest()


def _beside(path: Path, name: str) -> Path | None:
    """The file that ``import name`` in the recipe at ``path`` means: in its folder, else in another
    folder of its gallery (sphinx-gallery knows one by its header)."""
    folders = [h.parent for h in sorted(path.parent.parent.glob("*/GALLERY_HEADER.rst"))]
    if path.parent not in folders:
        folders = []
    files = (folder / f"{name}.py" for folder in [path.parent, *folders])
    return next((file for file in files if file.is_file()), None)


def with_imports(path: Path) -> list[Path]:
    """``path`` and the files of its gallery that it imports, directly or not."""
    found = [path]
    for current in found:
        names = sorted(name for name in imported_modules(current) if name.isidentifier())
        neighbours = [_beside(current, name) for name in names]
        found += [file for file in neighbours if file is not None and file not in found]
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


def may_save(path: Path) -> bool:
    """Whether a file, or one of its gallery that it imports, imports torch's checkpointing."""
    modules = {module for file in with_imports(path) for module in imported_modules(file)}
    return any(f"{name}.".startswith(f"{DCP[0]}.") for name in modules)


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


def _title(path: Path) -> str:
    docstring = ast.get_docstring(_parse(path)) or ""
    return next((line for line in docstring.splitlines() if line.strip()), path.stem)


def _control_from(table: dict, path: Path, deadline_s: float) -> Control:
    where = f"{path}: control {table.get('name', '?')!r}"
    values = {"deadline_s": deadline_s} | _checked(table, {f.name for f in fields(Control)}, where)
    if missing := {"name", "says", "find", "replace", "fails"} - table.keys():
        raise RecipeError(f"{where} lacks {sorted(missing)}")
    return Control(**values | {"fails": frozenset(table["fails"])})


def load_controls(path: Path) -> dict:
    """Read ``tests/controls/<recipe>.toml`` into the keyword arguments of :class:`Recipe`.

    Raises:
        RecipeError: the file is not valid, or a key is unknown or missing.
    """
    known = {"ranks", "page_ranks", "order", "deadline_s", "needs", "control"}
    table = _checked(_toml(path), known, str(path))
    deadline_s = table.get("deadline_s", DEFAULT_DEADLINE_S)
    controls = tuple(_control_from(c, path, deadline_s) for c in table.pop("control", ()))
    return table | {"controls": controls}


def load_recipe(path: Path, controls_dir: Path | None = None) -> Recipe:
    """The recipe at ``path``, with its controls if ``controls_dir`` holds ``<stem>.toml``."""
    path = Path(path).resolve()
    if not path.is_file():
        raise RecipeError(f"{path}: no such recipe; pass the path of a Python file")
    settings = {}
    if controls_dir is not None and (file := controls_dir / f"{path.stem}.toml").is_file():
        settings = load_controls(file)
    return Recipe(path=path, title=_title(path), code_sha256=code_sha256(path), **settings)


DEFINING = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
DEFINING += (ast.Assign, ast.AnnAssign)


def is_helper(path: Path) -> bool:
    """Whether a file only defines things: it has no main guard and calls nothing by itself."""
    return all(
        isinstance(node, DEFINING)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in _parse(path).body
    )


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


def find_recipes(root: Path, settings: Settings) -> list[Path]:
    """The scripts of anyone's folder: what its settings name, without files that only define.

    Raises:
        RecipeError: there is none.
    """
    found = [
        path
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
