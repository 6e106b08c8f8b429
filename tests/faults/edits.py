"""Edits that take a line out of the library: each must be caught."""

from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType

from overlap_recipes.checkpoint import kept
from overlap_recipes.checkpoint.stores import directory


@dataclass(frozen=True)
class Edit:
    """Replace ``find``, which occurs once, in the code of ``module``."""

    module: ModuleType
    find: str
    replace: str

    def apply(self) -> None:
        """Give the functions of the imported module the edited code, whoever has taken them."""
        file = self.module.__file__
        source = Path(file).read_text()
        assert source.count(self.find) == 1, f"{self.find!r} occurs {source.count(self.find)} times"
        edited = {"__name__": self.module.__name__, "__package__": self.module.__package__}
        exec(compile(source.replace(self.find, self.replace), file, "exec"), edited)
        for name, own in vars(self.module).items():
            if getattr(own, "__module__", None) != self.module.__name__:
                continue
            if isinstance(own, FunctionType):
                own.__code__ = edited[name].__code__
            elif isinstance(own, type):
                for method, function in vars(own).items():
                    if isinstance(function, FunctionType) and method in vars(edited[name]):
                        function.__code__ = vars(edited[name])[method].__code__


POINTER_FIRST = Edit(
    directory,
    """        Path(place).rename(directory)
        flush(self.root)
        write_durably(self.root / POINTER, directory.name)
""",
    """        write_durably(self.root / POINTER, directory.name)
        Path(place).rename(directory)
        flush(self.root)
""",
)
DELETE_FIRST = Edit(
    kept,
    """        self.store.commit(self.step, self.place, files)
        self.prune()
""",
    """        for step in self.store.steps():
            self.store.remove(step)
        self.store.commit(self.step, self.place, files)
""",
)
NO_FILE_FLUSH = Edit(
    directory,
    """            if kind is None:
                os.fsync(self.stream.fileno())
""",
    """            pass
""",
)
NO_DIRECTORY_FLUSH = Edit(directory, "        flush(Path(place))\n", "        pass\n")
NO_ROOT_FLUSH = Edit(
    directory,
    "        flush(self.root)\n        write_durably(",
    "        write_durably(",
)
RENAME_BEFORE_FLUSH = Edit(
    directory,
    """    flush(aside)
    aside.replace(path)
""",
    """    aside.replace(path)
    flush(path)
""",
)
DELETION_NOT_FLUSHED = Edit(
    directory,
    "        flush(self.root)\n        _delete(doomed)",
    "        _delete(doomed)",
)
BY_KILL = {"pointer before rename": POINTER_FIRST, "delete before durable": DELETE_FIRST}
BY_POWER_CUT = {
    "files not flushed": NO_FILE_FLUSH,
    "directory not flushed": NO_DIRECTORY_FLUSH,
    "root not flushed": NO_ROOT_FLUSH,
    "rename before flush": RENAME_BEFORE_FLUSH,
    "deletion not flushed": DELETION_NOT_FLUSHED,
}
