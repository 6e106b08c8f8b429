"""A run of a recipe: its processes, threads, environment and files, and that nothing is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from selection import REPO
from test_verdicts import BAD, is_right, judge
from written_recipes import write

from rankproof.launch import HOME, servers
from rankproof.leader import descendants
from rankproof.run import run


def harness_processes() -> list[str]:
    """The processes of this one's servers: each run's leader and ranks are gone."""
    return [line for line in descendants().values() if "rankproof." in line]


@pytest.mark.parametrize("name", ["hangs", "killed", "leaves_a_process"])
def test_a_bad_recipe_is_reported_under_torchrun_and_nothing_of_it_is_left(name: str) -> None:
    case = BAD[name]
    report = judge("bad", name, case, "torchrun")
    assert is_right(report, case), report.describe()
    left = harness_processes()
    assert all("rankproof.server" in line for line in left), left
    living = [server for server in servers.by_modules.values() if server.process.poll() is None]
    assert len(left) == len(living), "a leader is a fork of its server"
    described = report.describe()
    for wanted in (f"{name} on 2 ranks: FAILED", "rank 0, last lines", "rank 1, last lines"):
        assert wanted in described
    assert f"python -m harness run tests/data/bad/{name}.py --ranks 2" in described
    if name == "hangs":
        assert described.count("stacks at the deadline") == 2
        assert "in wait_for_a_message" in described


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("os._exit(0)", set()),
        ("os._exit(0)\nprint()", {"missing_record"}),
        ("for _ in range(2):\n    os._exit(0)", {"missing_record"}),
    ],
)
def test_os_exit_is_the_end_by_the_last_line_alone(tmp_path, text: str, kinds: set) -> None:
    report = run(write(tmp_path, "gone.py", f"import os\n{text}\n"), 2, launcher="warm")
    assert report.kinds == kinds, report.describe()


@pytest.mark.parametrize("launcher", ["warm", "torchrun"])
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_command_that_is_ended_leaves_no_rank_and_no_directory(tmp_path, launcher, end) -> None:
    """By SIGTERM, it takes them down itself, and without a traceback."""
    tmp, pids = tmp_path / "tmp", tmp_path / "pids"
    tmp.mkdir()
    pids.mkdir()
    text = f"""
        import os, pathlib, threading
        pathlib.Path({str(pids)!r}, str(os.getpid())).touch()
        threading.Event().wait()
    """
    script = write(tmp_path, "waits.py", text)
    options = ["run", script, "--ranks", "2", "--launcher", launcher, "--allow", pids]
    ended = subprocess.Popen(
        [sys.executable, "-m", "harness", *options],
        cwd=REPO,
        env=os.environ | {"TMPDIR": str(tmp)},
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 300
    while len(list(pids.iterdir())) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    ranks = [Path("/proc", path.name) for path in pids.iterdir()]
    assert len(ranks) == 2
    ended.send_signal(end)
    if end == signal.SIGTERM:
        said = ended.communicate(timeout=60)[1]
        assert (ended.returncode, "Traceback" in said) == (128 + end, False), said
        assert list(tmp.iterdir()) == []
    ended.wait()
    while (any(map(Path.exists, ranks)) or any(tmp.iterdir())) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(Path.exists, ranks)) and list(tmp.iterdir()) == []


def test_the_claims_of_a_recipe_are_checked_whatever_the_caller_optimises(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    recipe = write(tmp_path, "claims.py", "assert 1 == 2, 'the claim is wrong'\n")
    report = run(recipe, 1, launcher="torchrun")
    assert report.kinds == {"raised"}, report.describe()


def test_a_recipe_sees_the_callers_library_and_not_the_harness(tmp_path, monkeypatch) -> None:
    library = tmp_path / "library"
    library.mkdir()
    write(library, "callers_library.py", "answer = 42\n")
    monkeypatch.setenv("PYTHONPATH", f"{HOME}{os.pathsep}{library}")
    text = f"""
        import importlib.util, os, subprocess, sys
        import callers_library
        assert os.environ["PYTHONPATH"] == {str(library)!r}
        assert {HOME!r} not in sys.path
        subprocess.run([sys.executable, "-c", "import callers_library"], check=True)
    """
    recipe = write(tmp_path, "recipe.py", text)
    for launcher in ("warm", "torchrun"):
        report = run(recipe, 1, launcher=launcher)
        assert report.ok, report.describe()
