"""The files from scratch: copied by themselves, alike where they say the same, loud outside."""

import ast
import sys
from pathlib import Path

import pytest
from sizes import block_of, statements
from troubles import survives

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


@pytest.mark.parametrize("file", [*FILES, *OFFLOAD], ids=lambda file: file.stem)
def test_a_file_from_scratch_needs_torch_alone(file: Path) -> None:
    names = imports_of(file.read_text(encoding="utf-8"))
    for name in names & SHARED:
        names |= imports_of(file.with_name(f"{name}.py").read_text(encoding="utf-8"))
    assert names - SHARED - sys.stdlib_module_names == {"torch"}


@pytest.mark.parametrize("file", BLOCKS, ids=lambda file: file.stem)
def test_what_a_reader_copies_is_one_short_block_that_stands_alone(
    file: Path, tmp_path: Path, plain_python
) -> None:
    """It runs in an empty folder, where torch is, and no file of ours."""
    block = block_of(file)
    assert imports_of(block) - sys.stdlib_module_names == {"torch"}
    assert statements(block) <= MOST_STATEMENTS
    (tmp_path / "block.py").write_text(block, encoding="utf-8")
    done = plain_python(str(tmp_path / "block.py"), str(tmp_path))
    assert done["code"] == 0, done["said"]


def test_what_is_outside_the_scope_raises_on_every_rank() -> None:
    states = ("state_dicts_that_ranks_do_not_share", "state_dicts_of_other_things")
    jobs = ("jobs_that_do_not_come_back", "checkpoints_of_other_jobs")
    survives("outside_scope", *states, *jobs, ranks=2)
