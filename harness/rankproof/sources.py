"""Which files a script's code is in: those of its own project that it imports, and their hashes.

Files are read, never imported. A file goes by the dotted name under which it is imported: ``saves``
beside the script, ``package.part.saves`` in a package. A package's ``__init__.py`` that an import
only passes through counts with its own code. What it imports itself counts where a name is taken
from it: ``from package import Name`` leads to the module that ``Name`` comes from.
"""

import ast
import hashlib
from pathlib import Path

DOCUMENTED = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
GALLERY_HEADER = "GALLERY_HEADER.rst"  # sphinx-gallery knows a folder of scripts by it
PACKAGE_FILE = "__init__.py"


class SourceError(ValueError):
    """A file is not valid Python, or there is none of that name."""


def read(path: Path) -> str:
    """The text of a file.

    Raises:
        SourceError: the file is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise SourceError(f"{path}: not UTF-8: byte {error.start} is {byte:#x}") from error


def parse(path: Path) -> ast.Module:
    """The syntax tree of a file.

    Raises:
        SourceError: the file is not UTF-8, or not valid Python.
    """
    try:
        return ast.parse(read(path), str(path))
    except SyntaxError as error:
        raise SourceError(f"{path}:{error.lineno}: not valid Python: {error.msg}") from error


def code_sha256(path: Path) -> str:
    """SHA-256 of the file's syntax tree without docstrings; comments are not in the tree.

    Editing prose keeps it, editing code changes it. It is the same on every Python version: fields
    that are empty are left out, since versions differ in which ones they have.
    """
    tree = parse(path)
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body[0].value.value = ""
    return hashlib.sha256(repr(_plain(tree)).encode()).hexdigest()


def _plain(node: object) -> object:
    """A syntax tree as nested lists, without empty fields and positions."""
    if isinstance(node, list):
        return [_plain(item) for item in node]
    if not isinstance(node, ast.AST):
        return node
    fields = [(name, _plain(value)) for name, value in ast.iter_fields(node)]
    return [type(node).__name__, *(pair for pair in fields if pair[1] not in (None, []))]


def imported_modules(path: Path) -> set[str]:
    """Dotted names of what a file imports; with ``from a import b``, both ``a`` and ``a.b``."""
    found = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def find_module(name: str, folder: Path) -> Path | None:
    """The file of a module by its dotted name, if it is imported from ``folder``."""
    base = folder.joinpath(*name.split("."))
    for file in (base / PACKAGE_FILE, base.with_name(f"{base.name}.py")):
        if file.is_file():
            return file
    return None


class Sources:
    """The files of a script's own project that its code is in.

    Args:
        folders: where a name is looked for, in this order.

    ``files`` are paths by dotted name, in the order in which they were found; ``found_in`` has the
    folder of each.
    """

    def __init__(self, folders: list[Path]) -> None:
        self.folders = folders
        self.files: dict[str, Path] = {}
        self.found_in: dict[str, Path] = {}
        self._followed: set[str] = set()
        self._taken: set[tuple[str, str]] = set()

    @classmethod
    def of_script(cls, script: Path, import_from: tuple[Path, ...] = ()) -> "Sources":
        """Of a script: its folder, the other folders of its gallery, then ``import_from``."""
        headers = sorted(script.parent.parent.glob(f"*/{GALLERY_HEADER}"))
        galleries = [header.parent for header in headers]
        beside = galleries if script.parent in galleries else []
        sources = cls(list(dict.fromkeys([script.parent, *beside, *import_from])))
        sources._add(script.stem, script, script.parent)
        sources._follow_imports(script.stem, script)
        return sources

    @classmethod
    def of_module(cls, name: str, import_from: tuple[Path, ...]) -> "Sources":
        """Of a module, by its dotted name.

        Raises:
            SourceError: there is no such module.
        """
        sources = cls(list(import_from))
        if sources._find(name) is None:
            raise SourceError(f"no module {name} in {', '.join(map(str, import_from))}")
        sources.follow(name)
        return sources

    def hashes(self) -> dict[str, str]:
        """:func:`code_sha256` of every file, by dotted name."""
        return {name: code_sha256(path) for name, path in self.files.items()}

    def name_of(self, path: Path) -> str | None:
        """The dotted name of one of the files."""
        for name, file in self.files.items():
            if file.resolve() == path.resolve():
                return name
        return None

    def follow(self, name: str) -> None:
        """Add a module and what it imports, if it belongs to the project."""
        found = self._find(name)
        if found is None or name in self._followed:
            return
        self._pass_through(name)
        self._add(name, *found)
        self._follow_imports(name, found[0])

    def _add(self, name: str, path: Path, folder: Path) -> None:
        self.files.setdefault(name, path)
        self.found_in.setdefault(name, folder)

    def _find(self, name: str) -> tuple[Path, Path] | None:
        """The file of a module, and the folder in which its first name was found."""
        for folder in self.folders:
            file = find_module(name, folder)
            if file is not None:
                return file, folder
        return None

    def _pass_through(self, name: str) -> None:
        """Add the packages that a module lies in, without what they import."""
        parts = name.split(".")
        for length in range(1, len(parts)):
            parent = ".".join(parts[:length])
            found = self._find(parent)
            if found is not None:
                self._add(parent, *found)

    def _follow_imports(self, name: str, path: Path) -> None:
        self._followed.add(name)
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self._follow_import(alias)
            elif isinstance(node, ast.ImportFrom):
                base = _absolute(node, name, path)
                for alias in node.names:
                    self._take(base, alias.name)

    def _follow_import(self, alias: ast.alias) -> None:
        """``import a.b.c``; without ``as``, anything of ``a`` and ``a.b`` may be used, too."""
        self.follow(alias.name)
        parts = alias.name.split(".")
        if alias.asname is None:
            for length in range(1, len(parts)):
                self.follow(".".join(parts[:length]))

    def _take(self, base: str, name: str) -> None:
        """``from base import name``: a module of that name, or what the name stands for."""
        module = f"{base}.{name}" if base else name
        if name != "*" and self._find(module) is not None:
            self.follow(module)
            return
        found = self._find(base)
        if found is None or (base, name) in self._taken:
            return
        self._taken.add((base, name))
        file, folder = found
        origins = [] if name == "*" or file.name != PACKAGE_FILE else _origins(file, base, name)
        if not origins:
            self.follow(base)
            return
        self._pass_through(base)
        self._add(base, file, folder)
        for origin, original in origins:
            self._take(origin, original)


def _absolute(node: ast.ImportFrom, name: str, path: Path) -> str:
    """The dotted name that a ``from ... import`` of the module ``name`` begins with."""
    if node.level == 0:
        return node.module or ""
    parts = name.split(".")
    up = node.level - 1 if path.name == PACKAGE_FILE else node.level
    kept = parts[: len(parts) - up]
    return ".".join([*kept, node.module] if node.module else kept)


def _origins(file: Path, package: str, name: str) -> list[tuple[str, str]]:
    """Where a package's file has ``name`` from: pairs of a module and the name in it."""
    found = []
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.ImportFrom):
            base = _absolute(node, package, file)
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    found.append((base, alias.name))
    return found
