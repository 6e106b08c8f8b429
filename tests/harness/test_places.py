"""A verdict does not depend on where a script lies: home, ``/tmp``, or neither.

Those that write are run, since rankproof lays private mounts over home and ``/tmp`` only.
"""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from selection import REPO
from test_verdicts import BAD, DATA, GOOD, is_right

from rankproof.run import run

FOLDERS = {"home": Path.home(), "tmp": Path("/tmp"), "elsewhere": REPO.parent}
OF_FILES = ("writes_elsewhere", "cleans_up_in_tmp", "renames_when_complete")


@pytest.mark.parametrize("place", FOLDERS)
def test_scripts_that_write_are_judged_alike_in_home_in_tmp_and_elsewhere(place: str) -> None:
    if not os.access(FOLDERS[place], os.W_OK):
        pytest.skip(f"nobody may write to {FOLDERS[place]} here")
    with tempfile.TemporaryDirectory(dir=FOLDERS[place]) as folder:
        for name in OF_FILES:
            case = BAD.get(name) or GOOD[name]
            script = DATA / ("bad" if name in BAD else "good") / f"{name}.py"
            copy = Path(shutil.copy(script, folder))
            report = run(copy, 2, launcher="warm")
            assert is_right(report, case), report.describe()
