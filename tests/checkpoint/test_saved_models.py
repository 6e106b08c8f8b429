"""Stock models with stock optimizers, killed in a save: what is resumed has the bits of before."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from selection import with_library

PROGRAM = Path(__file__).parents[1] / "data" / "saved_models.py"
EVERY_RUN = ["mixtral-muon", "t5-schedule_free", "lora-adamw"]


@pytest.mark.parametrize(
    ("cases", "count"),
    [(EVERY_RUN, 3), pytest.param(["all"], 40, marks=pytest.mark.all_models)],
    ids=["three", "all"],
)
def test_a_killed_job_is_resumed_with_the_bits_of_before_on_any_number_of_ranks(
    cases: list[str], count: int
) -> None:
    done = subprocess.run(
        [sys.executable, PROGRAM, *cases],
        env=with_library() | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120 * count,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^\S+ +right$", done.stdout, re.MULTILINE)) == count, done.stdout
