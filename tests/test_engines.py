"""What ``tools/engines`` says of a job is right; its files start one again where it got on."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ENGINES = Path(__file__).resolve().parents[1] / "tools" / "engines"
spec = importlib.util.spec_from_file_location("judge", ENGINES / "judge.py")
judge = importlib.util.module_from_spec(spec)
spec.loader.exec_module(judge)

SAID = """\
10:00:09 n2 rank 0: begins after step 40, one of 1 ranks
10:00:20 n1 rank 0: begins after step 60, one of 2 ranks
10:00:01 n1 rank 0: begins after step 0, one of 2 ranks
10:00:05 n2 rank 0: begins after step 20, one of 2 ranks
10:00:30 n1 rank 0: ends after step 99, weights aaa
10:00:30 n2 rank 1: ends after step 99, weights {}
"""


def test_the_judge_repeats_a_job_on_as_many_ranks_until_the_same_steps() -> None:
    assert judge.parts_of(SAID) == [(2, 40), (1, 60), (2, 99)]


@pytest.mark.parametrize(
    ("said", "known", "status", "answer"),
    [
        (SAID.format("aaa"), "aaa", 0, "equal bits"),
        (SAID.format("aaa"), "bbb", 1, "OTHER BITS"),
        (SAID.format("bbb"), "aaa", 1, "NO END"),
        (SAID[: SAID.index("10:00:30")], "aaa", 1, "NO END"),
    ],
)
def test_the_judge_notices_other_bits(said, known, status, answer, tmp_path: Path) -> None:
    (tmp_path / "known").mkdir()
    (tmp_path / "known" / str(judge.parts_of(SAID))).write_text(known)
    (tmp_path / "out").write_text(said)
    ran = subprocess.run(
        [sys.executable, ENGINES / "judge.py", tmp_path / "out"],
        env={**os.environ, "KNOWN": str(tmp_path / "known")},
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, ran.stdout[: len(answer)]) == (status, answer), ran.stderr


@pytest.mark.parametrize("script", sorted(ENGINES.glob("*.sh")), ids=lambda script: script.name)
def test_a_script_can_be_read_by_bash(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize("name", ["srun", "torchrun", "array"])
@pytest.mark.parametrize(
    ("ranks", "status", "requeued"),
    [
        ("exit 1", 1, False),  # a crash at the start
        ("mkdir $root/step5; exit 85", 85, True),
        ("mkdir $root/step5; exit 0", 0, False),
        ("mkdir $root/step40 $root/step100; exit 137", 137, True),
    ],
)
def test_a_job_is_requeued_where_it_has_got_on(
    name: str, ranks: str, status: int, requeued: bool, tmp_path: Path
) -> None:
    root = tmp_path / "checkpoints"
    if name == "array":
        root = root / "3"
    (root / "step4").mkdir(parents=True)
    commands = {
        "srun": f"root={root}; {ranks}",
        "scontrol": 'if [ "$1" = requeue ]; then echo "$2" > requeued; else echo n1; fi',
    }
    for command, line in commands.items():
        (tmp_path / command).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / command).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    environment = {**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    job = ["bash", ENGINES / f"{name}.sbatch"]
    ran = subprocess.run(job, cwd=tmp_path, env=environment)
    assert ran.returncode == status
    assert (tmp_path / "requeued").exists() == requeued
    if requeued:
        of_this_task = "7_3" if name == "array" else "7"
        assert (tmp_path / "requeued").read_text() == of_this_task + "\n"
