"""What the tests share to choose recipes, and to edit a copy of the library."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest
from selection import edited_module


def test_an_edited_copy_is_found_though_its_folder_was_listed_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import lists a folder again if its time has changed: a clock may tick too slowly."""
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.util.find_spec("nothing_here") is None  # now the folder has been listed
    sys.path.remove(str(tmp_path))
    listed = os.stat(tmp_path).st_mtime_ns
    copytree = shutil.copytree

    def within_one_tick(*arguments: object, **settings: object) -> None:
        copytree(*arguments, **settings)
        os.utime(tmp_path, ns=(listed, listed))

    monkeypatch.setattr(shutil, "copytree", within_one_tick)
    line = "import mmap\n"
    edited = edited_module(tmp_path, "page_locked", line, f"{line}EDITED = True\n")
    assert edited.EDITED
