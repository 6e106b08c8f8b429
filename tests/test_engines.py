"""The files of ``tools/engines`` start a job again where it got on."""

import os
import subprocess
from pathlib import Path

import pytest

ENGINES = Path(__file__).resolve().parents[1] / "tools" / "engines"


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
