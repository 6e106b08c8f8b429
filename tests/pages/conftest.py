"""Built pages to test: the real ones, and a small site of recipes made for the tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock
from small_site import HELLO, HELLO_CONTROLS, NO_CONTROLS, RAISES, ROOT, Site


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
def toy_site(shared: Path) -> Site:
    """A site of good and bad recipes, built once; tests read it and change copies only."""
    with FileLock(shared / "toys.lock"):
        log = shared / "toys.log"
        if log.exists():
            site = Site.__new__(Site)
            site.root, site.log = shared / "toys", log.read_text()
            return site
        site = Site(shared / "toys")
        for name in ("hello", "prose", "edited"):
            site.recipe(name, HELLO, HELLO_CONTROLS)
        site.write("recipes_source/more/GALLERY_HEADER.rst", "More\n====\n\nThey import.\n")
        imports = NO_CONTROLS.replace("import os\n", "import os\n\nimport hello\n")
        site.recipe("second", imports, folder="more")
        site.recipe("blind", HELLO, HELLO_CONTROLS.replace('"rank < 0"', '"rank > -1"'))
        site.recipe("misfit", HELLO, HELLO_CONTROLS.replace("rank >= 0", "rank >= 1"))
        site.recipe("silent", NO_CONTROLS, HELLO_CONTROLS)
        site.recipe("raises", RAISES)
        built = site.build("-D", "rank_launcher=warm")
        assert built.returncode != 0
        site.log = built.stderr
        log.write_text(site.log)
        return site


@pytest.fixture(scope="session")
def built_site(shared: Path) -> Path:
    """The real pages, brought up to date by one worker while the others wait.

    ``BUILT_SITE=DIR`` takes those of DIR as they are.
    """
    if "BUILT_SITE" in os.environ:
        return Path(os.environ["BUILT_SITE"]).resolve()
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
