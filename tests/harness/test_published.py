"""The three published checkpoint loops, judged like anyone's recipes."""

import subprocess
import sys

from selection import REPO

from rankproof.run import run

PUBLISHED = REPO / "tests" / "data" / "published"
CROSSED = f"{REPO / 'tests' / 'controls' / 'gates.py'}:cross_collectives"


def test_on_two_ranks_the_shared_group_is_named_as_the_likely_cause() -> None:
    report = run(PUBLISHED / "basic.py", 2, launcher="warm", gate=CROSSED, deadline_s=10)
    assert report.kinds & {"hung", "killed", "raised"}, report.describe()
    assert "async_save ran on the process group that training uses" in report.failures[0].hint


def test_on_one_rank_the_last_checkpoint_is_missing() -> None:
    """Certain, because the write is held until it is awaited: the last one never is."""
    report = run(PUBLISHED / "basic.py", 1, launcher="warm", gate="hold_write")
    missing = [f for f in report.failures if f.kind == "checkpoint_missing"]
    states = ("is empty", "does not exist")  # destroying the group may come before its planning
    assert [f.text for f in missing] in [[f"checkpoint_step9: the directory {s}"] for s in states]
    assert "never awaited" in missing[0].hint


def test_a_folder_of_scripts_is_judged_from_the_command_line() -> None:
    """``pytest --rankproof DIR``: two of the three are rejected, one accepted."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "tests", "--rankproof", PUBLISHED),
            *("--rankproof-ranks", "1", "--rankproof-launcher", "warm"),
            *("-p", "no:cacheprovider", "-q", "-n", "0", "-rf", "--tb=short"),
        ],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    for name, rejected in (("basic", True), ("pinned", True), ("default_stager", False)):
        assert any(f"{name}.py-1" in line for line in failed) == rejected, done.stdout
    assert "never_awaited" in done.stdout
