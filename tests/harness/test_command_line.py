"""The command line and ``run``: what they are asked, what they refuse, and what they tell."""

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from written_recipes import command, write

from rankproof.recipe import Control, Recipe, RecipeError, Settings
from rankproof.run import Options


def test_a_recipe_gets_its_own_arguments_and_so_does_the_command_that_runs_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    path = write(tmp_path, "fails.py", "import sys\nraise ValueError(sys.argv[1:])\n")
    kept = tmp_path / "kept"
    options = ("run", path, "--ranks", 1, "--launcher", "warm", "--keep", kept)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert command(monkeypatch, *options, "--", "--layers", "4") == 1
    printed = capsys.readouterr().out
    assert "ValueError: [" in (kept / "ranks" / "rank0.out").read_text()
    assert "ValueError: ['--layers', '4']" in printed
    assert "--ranks 1 --launcher warm -- --layers 4\n::error file=" in printed


def test_the_command_that_runs_it_again_is_complete(tmp_path) -> None:
    path = tmp_path / "a recipe.py"

    def ends(end: str, **options) -> bool:
        said = Options("auto", **options).command(Recipe(path), 2)
        return said.endswith(f"run '{path}' --ranks 2 {end}")

    assert ends("--gate hold_write --order -- 'a b'", args=("a b",), gate="hold_write", order=True)
    assert ends("--control n", control=Control("n", "s", "a", "b", {}), order=True)
    more = {"through": (Path("a b"), Path("/data")), "off": ("left_thread",), "deadline_s": 5}
    end = "--deadline 5 --cwd /x --allow 'a b' --allow /data --off left_thread"
    assert ends(end, cwd=Path("/x"), **more)


def test_a_kind_that_is_turned_off_is_a_note_by_the_command_and_by_the_settings(
    tmp_path, monkeypatch, capsys
) -> None:
    text = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
    script = write(tmp_path, "leaves_it.py", text)
    run_it = ("run", script, "--ranks", 1, "--launcher", "warm")
    assert command(monkeypatch, *run_it, "--off", "left_process_group") == 0
    assert "note: left_process_group is turned off: torch.dist" in capsys.readouterr().out
    write(tmp_path, "rankproof.toml", 'off = ["left_process_group"]')
    assert command(monkeypatch, *run_it) == 0
    write(tmp_path, "rankproof.toml", 'off = ["checkpoint_wrong"]')
    assert command(monkeypatch, *run_it) == 2
    assert "--off checkpoint_wrong: only child_died, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "0"], "0 ranks: pass a number of 1 or more"),
        (["--cwd", "nowhere"], "--cwd nowhere: no such directory"),
        (["--gate", "hold_all"], "no gate 'hold_all'; see --help"),
        (["--gate", "missing.py:own"], "error: --gate missing.py:own: no file "),
        (["--gate", "gate.py:nix"], "error: --gate gate.py:nix: no function 'nix' in "),
        (["--keep", "."], "exists already; pass a directory that does not"),
        (["--ranks", "1,2", "--keep", "kept"], "--keep is for one run, and these are 2"),
        (["--junit", "missing/ranks.xml"], "--junit missing/ranks.xml: no folder missing"),
        (["--junit", "/tmp"], "--junit /tmp: a folder is there"),
    ],
)
def test_a_bad_option_is_refused_before_anything_runs(
    tmp_path, monkeypatch, capsys, options: list[str], message: str
) -> None:
    ran = tmp_path / "ran"
    write(tmp_path, "gate.py", "nix = 1\n\ndef own(ledger):\n    pass\n")
    recipe = write(tmp_path, "runs.py", f"open({str(ran)!r}, 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, "run", recipe, "--launcher", "warm", *options) == 2
    told = capsys.readouterr()
    assert message in told.err and told.out == ""
    assert not ran.exists()


def test_a_folder_is_judged_as_its_settings_say(tmp_path, monkeypatch, capsys) -> None:
    """Helpers and what is left out do not run; the worst verdict counts, JSON and JUnit say all."""
    settings = """
        pattern = "train_*.py"
        exclude = ["*_slow.py"]
        ranks = [1]
        [args]
        "train_small.py" = "--epochs 3"
    """
    write(tmp_path, "rankproof.toml", settings)
    write(tmp_path, "train_helper.py", "WIDTH = 3\n\ndef model():\n    return WIDTH\n")
    write(tmp_path, "train_slow.py", "raise SystemExit('left out')\n")
    write(tmp_path, "other.py", "raise SystemExit('of another name')\n")
    warns = "import sys, warnings\nwarnings.simplefilter('always')\n"
    write(tmp_path, "train_small.py", f"{warns}assert sys.argv[1:] == ['--epochs', '3']\n")
    write(tmp_path, "train_two.py", "import torch.multiprocessing as mp\nmp.spawn(print)\n")
    report, run_it = tmp_path / "report.xml", ("run", tmp_path, "--launcher", "warm")

    assert command(monkeypatch, *run_it, "--junit", report, "--json") == 2
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    said = [(r["recipe"], r["verdict"], r["outputs"]) for r in told]
    assert said == [("train_small", "passed", [""]), ("train_two", "not judged", [])]
    said = captured.err
    assert "other.py: its name does not match train_*.py" in said
    assert "train_slow.py: excluded by *_slow.py" in said
    assert "train_helper.py: it only defines functions, classes and constants" in said
    assert re.search(r"runs .*train_small.py on 1 rank\n", said)
    (suite,) = ElementTree.parse(report).getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("2", "0", "1")
    assert float(suite.get("time")) > 0 and suite.get("timestamp")
    cases = {case.get("name"): [c.tag for c in case] for case in suite}
    assert cases == {"train_small.py on 1 rank": [], "train_two.py on 1 rank": ["skipped"]}

    write(tmp_path, "train_wrong.py", "raise ValueError('the loss is not finite')\n")
    assert command(monkeypatch, *run_it, "--junit", report) == 1
    assert "train_wrong on 1 rank: FAILED" in capsys.readouterr().out
    failure = ElementTree.parse(report).find(
        ".//testcase[@name='train_wrong.py on 1 rank']/failure"
    )
    assert failure.get("message") == "ValueError: the loss is not finite"
    assert failure.get("type") == "raised"

    command(monkeypatch, "run", tmp_path / "train_two.py", "--ranks", "1,2", "--json")
    assert len(json.loads(capsys.readouterr().out)) == 1  # it starts as many as it likes


def test_it_says_its_version_and_that_it_needs_linux(tmp_path, monkeypatch, capsys) -> None:
    assert command(monkeypatch, "--version") == 0
    assert re.fullmatch(r"rankproof \d+\.\d+\.\d+\n", capsys.readouterr().out)
    monkeypatch.setattr(sys, "platform", "darwin")
    script = write(tmp_path, "script.py", "print()\n")
    assert command(monkeypatch, "run", script) == 2
    assert "judged on Linux only" in capsys.readouterr().err


HANGS_ON_THREE = """
    # torchrun --nproc-per-node=3 hangs.py
    import os, threading

    if os.environ["WORLD_SIZE"] == "3":
        threading.Event().wait()
"""


def test_a_script_is_judged_on_the_ranks_that_it_says_it_is_started_on(
    tmp_path, monkeypatch, capsys
) -> None:
    """On two alone, it passes."""
    script = write(tmp_path, "hangs.py", HANGS_ON_THREE)
    run_it = ("run", script, "--deadline", 3)
    assert command(monkeypatch, *run_it) == 1
    told = capsys.readouterr().out
    assert "hangs on 2 ranks: ran" in told and "hangs on 3 ranks: FAILED" in told
    assert command(monkeypatch, *run_it, "--ranks", "2,1") == 0


@pytest.mark.parametrize("ranks", ["3", "[]", "[0]", "['2']"])
def test_ranks_of_a_folder_that_are_no_numbers_are_refused(tmp_path, ranks: str) -> None:
    write(tmp_path, "rankproof.toml", f"ranks = {ranks}\n")
    with pytest.raises(RecipeError, match="ranks .*: give a list of numbers of 1 or more"):
        Settings.of(tmp_path)
