"""Edits that take a line out of a recipe: each must be caught."""

import sys
from dataclasses import dataclass
from pathlib import Path

RECIPES = Path(__file__).resolve().parents[2] / "recipes_source" / "checkpoint"


@dataclass(frozen=True)
class Edit:
    """Replace ``find``, which occurs once, in the recipe ``module``."""

    module: str
    find: str
    replace: str

    def apply(self) -> None:
        """Give the imported module the edited code, and those that took names from it."""
        source = (RECIPES / f"{self.module}.py").read_text()
        assert source.count(self.find) == 1, f"{self.find!r} occurs {source.count(self.find)} times"
        for name in ("durable_saves", "retention"):
            module = sys.modules[name]
            text = (RECIPES / f"{name}.py").read_text()
            if name == self.module:
                text = text.replace(self.find, self.replace)
            exec(compile(text, module.__file__, "exec"), module.__dict__)


POINTER_FIRST = Edit(
    "durable_saves",
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
    "retention",
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
NO_FILE_FLUSH = Edit("durable_saves", "            flush(file)\n", "            pass\n")
NO_DIRECTORY_FLUSH = Edit("durable_saves", "    flush(path.parent)\n", "")
NO_ROOT_FLUSH = Edit("durable_saves", "        flush(directory.parent)\n", "")
RENAME_BEFORE_FLUSH = Edit(
    "durable_saves",
    """    flush(aside)
    aside.replace(path)
""",
    """    aside.replace(path)
    flush(path)
""",
)
DELETION_NOT_FLUSHED = Edit("retention", "    flush(root)\n", "")
BY_KILL = {"pointer before rename": POINTER_FIRST, "delete before durable": DELETE_FIRST}
BY_POWER_CUT = {
    "files not flushed": NO_FILE_FLUSH,
    "directory not flushed": NO_DIRECTORY_FLUSH,
    "root not flushed": NO_ROOT_FLUSH,
    "rename before flush": RENAME_BEFORE_FLUSH,
    "deletion not flushed": DELETION_NOT_FLUSHED,
}
