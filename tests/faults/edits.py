"""Edits that take a line out of the library: each must be caught."""

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from overlap_recipes.checkpoint import durable, retention, writer

IN_ORDER = (writer, durable, retention)  # each takes names from those before it


@dataclass(frozen=True)
class Edit:
    """Replace ``find``, which occurs once, in the code of ``module``."""

    module: ModuleType
    find: str
    replace: str

    def apply(self) -> None:
        """Give the imported module the edited code, and those that took names from it."""
        source = Path(self.module.__file__).read_text()
        assert source.count(self.find) == 1, f"{self.find!r} occurs {source.count(self.find)} times"
        for module in IN_ORDER:
            text = Path(module.__file__).read_text()
            if module is self.module:
                text = text.replace(self.find, self.replace)
            exec(compile(text, module.__file__, "exec"), module.__dict__)


POINTER_FIRST = Edit(
    durable,
    """        aside.rename(directory)
        flush(directory.parent)
        write_durably(directory.with_name(POINTER), directory.name)
""",
    """        write_durably(directory.with_name(POINTER), directory.name)
        aside.rename(directory)
        flush(directory.parent)
""",
)
DELETE_FIRST = Edit(
    retention,
    """        super().commit(aside, directory)
        if self.rank == 0:
""",
    """        if self.rank == 0:
            for step in committed_steps(self.root):
                delete(self.root, step)
        super().commit(aside, directory)
        if self.rank == 0:
""",
)
NO_FILE_FLUSH = Edit(writer, "        os.fsync(file)\n", "")
NO_DIRECTORY_FLUSH = Edit(durable, "    flush(path.parent)\n", "")
NO_ROOT_FLUSH = Edit(durable, "        flush(directory.parent)\n", "")
RENAME_BEFORE_FLUSH = Edit(
    durable,
    """    flush(aside)
    aside.replace(path)
""",
    """    aside.replace(path)
    flush(path)
""",
)
DELETION_NOT_FLUSHED = Edit(retention, "    flush(root)\n", "")
BY_KILL = {"pointer before rename": POINTER_FIRST, "delete before durable": DELETE_FIRST}
BY_POWER_CUT = {
    "files not flushed": NO_FILE_FLUSH,
    "directory not flushed": NO_DIRECTORY_FLUSH,
    "root not flushed": NO_ROOT_FLUSH,
    "rename before flush": RENAME_BEFORE_FLUSH,
    "deletion not flushed": DELETION_NOT_FLUSHED,
}
