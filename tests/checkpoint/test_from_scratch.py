"""The files from scratch: copied by themselves, alike where they say the same, loud outside."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sizes import block_of, statements
from troubles import survives

from rankproof.run import run

ROOT = Path(__file__).parents[2]
FILES = [
    ROOT / "recipes_source" / "checkpoint" / f"{name}.py"
    for name in ("state_to_save", "async_save", "pinned_staging", "default_stager")
]
BLOCKS = [
    ROOT / "recipes_source" / name
    for name in (
        "checkpoint/async_save.py",
        "checkpoint/pinned_staging.py",
        "checkpoint/default_stager.py",
        "offload/three_streams.py",
    )
]
OFFLOAD = [
    ROOT / "recipes_source" / "offload" / f"{name}.py"
    for name in ("three_streams", "weight_streaming", "activation_offload")
]
TUTORIAL = ROOT / "tests" / "upstream" / "tutorial" / "distributed_async_checkpoint_recipe.py"
SHARED = {"_checks", "async_save"}  # files next to a recipe that it imports; they need torch alone
MOST_STATEMENTS = 60  # of what a reader copies


def imports_of(source: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "a file beside it").partition(".")[0])
    return found


@pytest.mark.parametrize("file", [*FILES, *OFFLOAD, TUTORIAL], ids=lambda file: file.stem)
def test_a_file_from_scratch_needs_torch_alone(file: Path) -> None:
    names = imports_of(file.read_text(encoding="utf-8"))
    for name in names & SHARED:
        names |= imports_of(file.with_name(f"{name}.py").read_text(encoding="utf-8"))
    assert names - SHARED - sys.stdlib_module_names == {"torch"}


@pytest.mark.parametrize("file", BLOCKS, ids=lambda file: file.stem)
def test_what_a_reader_copies_is_one_short_block_that_stands_alone(
    file: Path, tmp_path: Path
) -> None:
    """It runs in an empty folder, where torch is, and no file of ours."""
    block = block_of(file)
    assert imports_of(block) - sys.stdlib_module_names == {"torch"}
    assert statements(block) <= MOST_STATEMENTS
    (tmp_path / "block.py").write_text(block, encoding="utf-8")
    command = [sys.executable, "-P", "block.py"]
    done = subprocess.run(command, cwd=tmp_path, env=alone(), capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()


def alone() -> dict[str, str]:
    """The environment without what would let Python find our files."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.mark.parametrize(
    "trouble",
    [
        "state_dicts_that_ranks_do_not_share",
        "state_dicts_of_other_things",
        "jobs_that_do_not_come_back",
        "checkpoints_of_other_jobs",
    ],
)
def test_what_is_outside_the_scope_raises_on_every_rank(trouble: str) -> None:
    survives("outside_scope", trouble, ranks=2)


def test_the_tutorial_awaits_every_save_and_its_checkpoints_are_right() -> None:
    report = run(TUTORIAL, 2, launcher="warm", gate="hold_write", args=("out",), deadline_s=60)
    assert report.ok, report.describe()
    assert report.outputs[0].count("every bit loaded back") == 6


def as_a_gallery_runs_it(accelerators: int) -> subprocess.CompletedProcess:
    """By ``exec``, where ``__file__`` is not defined; ``sys.argv[0]`` is the file."""
    program = (
        "import sys, torch; n = int(sys.argv[2]); torch.accelerator.device_count = lambda: n; "
        "sys.argv[:] = sys.argv[1:2]; source = open(sys.argv[0]).read(); "
        "exec(compile(source, 'block', 'exec'), {'__name__': '__main__'})"
    )
    command = [sys.executable, "-c", program, str(TUTORIAL), str(accelerators)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(torch.accelerator.device_count() == 1, reason="two ranks need two accelerators")
def test_the_tutorial_starts_two_ranks_by_itself() -> None:
    done = as_a_gallery_runs_it(torch.accelerator.device_count())
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("every bit loaded back") == 6


def test_the_tutorial_says_why_it_is_left_out_on_one_accelerator() -> None:
    done = as_a_gallery_runs_it(1)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Skipped: 2 ranks need 2 accelerators, or none; there is 1.\n"
