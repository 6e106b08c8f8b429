"""The files from scratch: copied by themselves, alike where they say the same, loud outside."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from troubles import survives

from rankproof.run import run

ROOT = Path(__file__).parents[2]
FILES = [
    ROOT / "recipes_source" / "checkpoint" / f"{name}.py"
    for name in ("state_to_save", "async_save", "pinned_staging", "default_stager")
]
OFFLOAD = [
    ROOT / "recipes_source" / "offload" / f"{name}.py"
    for name in ("three_streams", "weight_streaming", "activation_offload")
]
TUTORIAL = ROOT / "tests" / "upstream" / "tutorial" / "distributed_async_checkpoint_recipe.py"
OWN = {"train", "main"}  # each file has its own
METHODS = {"compare", "wait", "end_last"}


def imports_of(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "a file beside it").partition(".")[0])
    return found


@pytest.mark.parametrize("file", [*FILES, *OFFLOAD, TUTORIAL], ids=lambda file: file.stem)
def test_a_file_from_scratch_needs_torch_alone(file: Path) -> None:
    assert imports_of(file) - sys.stdlib_module_names == {"torch"}


def test_what_files_from_scratch_share_is_the_same_in_each() -> None:
    """So that a cure in one reaches all; methods are compared as functions are."""
    seen: dict[str, str] = {}
    shared = set()
    for file in FILES:
        source = file.read_text(encoding="utf-8")
        for node in ast.parse(source).body:
            parts = [node]
            if isinstance(node, ast.ClassDef) and node.name.endswith("Checkpoints"):
                parts = [part for part in node.body if getattr(part, "name", "") in METHODS]
            for part in parts:
                if not isinstance(part, ast.FunctionDef | ast.ClassDef) or part.name in OWN:
                    continue
                text = ast.unparse(part)
                assert seen.setdefault(part.name, text) == text, f"{part.name} of {file.stem}"
                shared.add(part.name)
    assert {"NamedWhenComplete", "fact_of", "leaves", "compare", "same_bits"} <= shared


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
