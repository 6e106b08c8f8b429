"""Built pages to test: the real ones, and a small site of recipes made for the tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock
from small_site import HELLO, HELLO_CONTROLS, ROOT, Site


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A site with one recipe that passes, not yet built."""
    site = Site(tmp_path / "site")
    site.recipe("hello", HELLO, HELLO_CONTROLS)
    return site


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that all workers of this test run share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def built_site(shared: Path) -> Path:
    """The real pages, brought up to date by one worker while the others wait."""
    out = ROOT / "_build" / "html"
    with FileLock(shared / "site.lock"):
        log = shared / "site.log"
        if not log.exists():
            command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-b", "html"]
            built = subprocess.run(
                [*command, "-d", "_build/doctrees", ".", str(out)],
                cwd=ROOT,
                capture_output=True,
                text=True,
            )
            log.write_text(f"{built.returncode}\n{built.stdout}\n{built.stderr}")
        code, _, text = log.read_text().partition("\n")
    assert code == "0", f"the pages do not build:\n{text[-5000:]}"
    return out
