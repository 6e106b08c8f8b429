"""``rankproof run -m package.module``: as ``python -m`` and ``torchrun -m`` find and start it."""

from pathlib import Path

import pytest
from written_recipes import command, write

from rankproof.run import run

STARTS_BY_RELATIVE_IMPORT = """
    import sys
    from .parts import double

    if __name__ == "__main__":
        assert __package__ == "package", __package__
        assert __spec__.name == "package.train", __spec__
        assert double(int(sys.argv[1])) == 6
    """


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "package"
    package.mkdir()
    write(package, "__init__.py", "")
    write(package, "parts.py", "def double(x):\n    return 2 * x\n")
    write(package, "train.py", STARTS_BY_RELATIVE_IMPORT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("launcher", ["warm", "torchrun"])
def test_a_module_is_run_within_its_package(project, monkeypatch, capsys, launcher) -> None:
    options = ("--ranks", "1", "--launcher", launcher)
    assert command(monkeypatch, "run", "-m", "package.train", *options, "--", "3") == 0
    assert "package.train on 1 rank: ran" in capsys.readouterr().out


def test_a_package_is_run_by_its_main(project) -> None:
    text = "from .parts import double\nassert double(1) == 3, 'the main of the package ran'\n"
    write(project / "package", "__main__.py", text)
    report = run(project, 1, module="package", launcher="warm")
    assert [f.text for f in report.failures] == ["AssertionError: the main of the package ran"]


def test_a_file_that_imports_by_its_package_is_told_of_the_option(project) -> None:
    report = run(project / "package" / "train.py", 1, launcher="warm", args=("3",))
    assert report.failures[0].hint == f"it is part of a package: in {project}, -m package.train"
